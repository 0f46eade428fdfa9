"""Pictures a person looks at: a labelled grid of condensed images, and the loss over steps."""

from __future__ import annotations

import io
import logging
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font_names
from numpy.typing import NDArray
from torch import Tensor

from m3d.condensed import CondensedSet
from m3d.errors import M3DError
from m3d.files import write_bytes
from m3d.limits import plain_file
from m3d.run_folder import RunFolder
from m3d.tiles import Tiles
from m3d.wording import counted

log = logging.getLogger(__name__)
FORMATS = ("png", "svg", "pdf")
# Fonts with many scripts, asked after the usual one where they are installed.
_WIDE = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "WenQuanYi Zen Hei",
    "PingFang SC",
    "Microsoft YaHei",
    "Arial Unicode MS",
)


@cache
def _wide_fonts() -> tuple[str, ...]:
    installed = set(get_font_names())
    return tuple(name for name in _WIDE if name in installed)


def picture_format(path: Path) -> str:
    """The format a picture's name asks for, checked before any work."""
    kind = path.suffix.lower().lstrip(".")
    if kind not in FORMATS:
        raise M3DError(f"{str(path)!r}: allowed endings are {', '.join('.' + f for f in FORMATS)}")
    return kind


def save_figure(figure: Figure, path: Path, dpi: int = 160, tight: bool = True) -> None:
    """Write a figure; the same figure gives the same bytes. ``tight`` cuts it to its content instead of its size."""
    kind = picture_format(path)
    # Dates, and identifiers drawn at random, are left out.
    dateless = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "m3d"}), _letters_without_a_font():
        figure.savefig(buffer, format=kind, dpi=dpi, bbox_inches="tight" if tight else None, metadata=dateless)
    write_bytes(path, buffer.getvalue())


@contextmanager
def _letters_without_a_font() -> Iterator[None]:
    """Say once, in a sentence, that a name has letters which no font here can draw."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    missing = [w for w in caught if "missing from font" in str(w.message)]
    if missing:
        log.warning("some letters of the names are drawn as boxes: no installed font has them")
    for other in caught:
        if other not in missing:
            warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)


def grid(condensed: CondensedSet, decoded: bool = False, most: int = 10, classes: int = 20) -> Figure:
    """Rows are classes, columns images: as stored, or as a network sees them (``decoded``). With one or two images of a
    class, classes stand side by side instead."""
    names = condensed.class_names
    images = condensed.decoded()[0].unflatten(0, (len(names), -1)) if decoded else condensed.pictures()
    per_class = images.shape[1]
    rows, columns = min(len(names), classes), min(per_class, most)
    shown = images[:rows, :columns]
    title = (
        f"{condensed.manifest['data'].get('name', '')} condensed by {condensed.manifest['method']}: "
        f"{condensed.manifest['ipc']} per class" + (f", decoded to {per_class}" if decoded else "")
    )
    if not decoded and condensed.tiles.cell:
        title += f", cells of {condensed.tiles.cell} pixels"
    elif not decoded and condensed.tiles.halved:
        title += ", two mosaics each"
    if condensed.soft is not None:
        sizes = {k: f"{v / 1024:.1f} KiB" for k, v in condensed.storage.items()}
        title += f", soft labels ({sizes['pixels']} pixels + {sizes['labels']} labels)"
    shown_are = "images" if decoded else _kind(condensed.tiles)
    hidden = [f"{rows} of {len(names)} classes"] * (rows < len(names))
    hidden += [f"{columns} of {per_class} {shown_are}"] * (columns < per_class)
    return mosaic_figure(shown, names[:rows], title + (f" ({', '.join(hidden)} shown)" if hidden else ""))


def _kind(tiles: Tiles) -> str:
    """What pictures of what is stored show."""
    return "cells" if tiles.cell else "mosaics" if tiles.halved else "images"


def mosaic_figure(images: Tensor, names: Sequence[str], title: str) -> Figure:
    """A figure of ``images`` [classes, n, ch, h, w] with the classes' names beside their rows, or below their
    columns where n is at most 2."""
    across = images.shape[1] <= 2 < images.shape[0]
    images = images.transpose(0, 1) if across else images
    rows, columns, _, h, w = images.shape
    gap = max(1, h // 16)
    cell = 0.55  # inches
    width = max(columns * cell, 2.5)
    figure = Figure(figsize=(width + 1.2, rows * cell + 0.5))
    axes = figure.add_subplot()
    axes.imshow(_canvas(images, gap), interpolation="nearest", vmin=0, vmax=1)
    if across:
        axes.set_yticks([])
        axes.set_xticks([c * (w + gap) + w / 2 - 0.5 for c in range(columns)], names, fontsize=9)
        if max(map(len, names)) > 5:  # letters that fit below an image
            for label in axes.get_xticklabels():
                label.set(rotation=45, ha="right", rotation_mode="anchor")
    else:
        axes.set_xticks([])
        axes.set_yticks([r * (h + gap) + h / 2 - 0.5 for r in range(rows)], names, fontsize=9)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    heading = axes.set_title(
        textwrap.fill(title, int(width * 14)), fontsize=9, loc="left"
    )  # about 14 letters to an inch
    for text in (heading, *axes.get_xticklabels(), *axes.get_yticklabels()):
        text.set_fontfamily(["sans-serif", *_wide_fonts()])
    return figure


def _canvas(images: Tensor, gap: int) -> NDArray[np.float32]:
    """[height, width, 3]: ``images`` [rows, columns, ch, h, w] side by side on white, ``gap`` pixels apart."""
    rows, columns, ch, h, w = images.shape
    canvas = np.ones((rows * (h + gap) - gap, columns * (w + gap) - gap, 3), dtype=np.float32)
    pixels = images.expand(rows, columns, 3, h, w) if ch == 1 else images[:, :, :3]
    for r in range(rows):
        for c in range(columns):
            top, left = r * (h + gap), c * (w + gap)
            canvas[top : top + h, left : left + w] = pixels[r, c].permute(1, 2, 0).clamp(0, 1).numpy()
    return canvas


def loss_curve(folder: RunFolder) -> Figure:
    """The loss of every step, and its running mean where there are steps enough for one."""
    file = folder / RunFolder.HISTORY
    if not file.exists():
        raise M3DError(f"{str(folder.path)!r} has no history; only runs with steps have one")
    plain_file(file)
    try:
        table = np.loadtxt(file, delimiter=",", skiprows=1, ndmin=2, usecols=(0, 1))
    except (OSError, ValueError) as error:
        raise M3DError(f"{str(file)!r} is no table of steps and losses: {error}") from error
    figure = Figure(figsize=(5.5, 3.2))
    axes = figure.add_subplot()
    window = len(table) // 50
    colour, width = ("#9ecae1", 0.6) if window > 1 else ("#08519c", 1.4)
    axes.plot(table[:, 0], table[:, 1], color=colour, linewidth=width, label="each step")
    if window > 1:
        smooth = np.convolve(table[:, 1], np.ones(window) / window, mode="valid")
        label = f"mean of {counted(window, 'steps')}"
        axes.plot(table[window - 1 :, 0], smooth, color="#08519c", linewidth=1.4, label=label)
        axes.legend(frameon=False)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, mean over classes")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
