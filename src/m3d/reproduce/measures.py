"""What the paper measures on a set beside accuracies: moments, pictures, and pairs of distributions without a set."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from m3d.condensed import CondensedSet
from m3d.data.imagenet import spoken
from m3d.grid.cells import Cell
from m3d.grid.work import Measure, Workshop
from m3d.reproduce import toy
from m3d.reproduce.moments import moment_distances

_PICTURE = (2, 10)  # rows and columns of images in a picture
_PICTURE_SIDE = 120  # pixels of an image in a picture, at most


def _moments(workshop: Workshop, cell: Cell, condensed: CondensedSet | None) -> Any:
    assert condensed is not None
    return moment_distances(condensed, workshop.tested_on(cell), condensed.manifest["net"], workshop.runtime)


def _picture(workshop: Workshop, cell: Cell, condensed: CondensedSet | None) -> Any:
    assert condensed is not None
    return picture(condensed)


def _pair(workshop: Workshop, cell: Cell, condensed: CondensedSet | None) -> Any:
    return toy.compare(cell.pair)


MEASURES: Mapping[str, Measure] = {"moments": _moments, "picture": _picture, "pair": _pair}


def picture(condensed: CondensedSet) -> dict[str, Any]:
    """Some stored images as one PNG, in a record: two of each of ten classes, one below the other, or at IPC 1 one each
    of twenty."""
    rows, columns = _PICTURE
    images = condensed.pictures()
    labelled = images.shape[1] >= rows
    if labelled:
        shown = images[:columns, :rows].transpose(0, 1)
    else:
        first = images[: rows * columns, 0]
        columns = min(columns, len(first))
        shown = first[: len(first) // columns * columns].unflatten(0, (-1, columns))
    buffer = io.BytesIO()
    _sheet(shown).save(buffer, format="PNG", optimize=True)
    return {
        "png": base64.b64encode(buffer.getvalue()).decode(),
        "rows": shown.shape[0],
        "columns": shown.shape[1],
        "names": [spoken(name) for name in condensed.class_names[: shown.shape[1]]] if labelled else [],
    }


def _sheet(images: Tensor) -> Image.Image:
    """``images`` [rows, columns, ch, h, w] side by side without gaps, at most 120 pixels each."""
    rows, columns, ch, h, w = images.shape
    canvas = images.permute(0, 3, 1, 4, 2).reshape(rows * h, columns * w, ch)
    pixels = (canvas.clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    sheet = Image.fromarray(np.ascontiguousarray(pixels[..., 0] if ch == 1 else pixels[..., :3]))
    if h > _PICTURE_SIDE:
        sheet = sheet.resize((columns * _PICTURE_SIDE, rows * _PICTURE_SIDE), Image.Resampling.LANCZOS)
    return sheet
