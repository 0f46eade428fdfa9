"""The two-minute demonstration: digits condensed to one image per class, beside a random selection of the same size."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from m3d import api
from m3d.data import load_data
from m3d.pictures import mosaic_figure, save_figure
from m3d.watch import Progress

# 8×8 images leave nothing for a third block to see, and half the paper's width is enough for them.
NET = "convnet2:width=64"
# Found on a held-out part of the training data (LAB.md).
OPTIONS: dict[str, Any] = {"steps": 300, "batch_real": 32, "augment": "none"}


def run_demo(out: Path, repeats: int, report: Callable[[Progress], None] | None) -> dict[str, Any]:
    """Condense, select, evaluate both, draw both; returns the rows of the table and the picture's path."""
    data = load_data("digits")
    rows: list[dict[str, Any]] = []
    sets = []
    for label, method, options in (("random selection", "random", {}), ("M3D", "m3d", OPTIONS)):
        began = time.perf_counter()
        condensed = api.condense(data, 1, method, net=NET, out=out / method, overwrite=True, report=report, **options)
        seconds = time.perf_counter() - began
        result = api.evaluate(condensed, data, net=NET, protocol="quick", repeats=repeats)
        rows.append({"label": label, "accuracy": result.mean, "sd": result.sd, "seconds": seconds})
        sets.append(condensed)
    # One row per method, one column per class.
    pictures = torch.stack([s.images for s in sets])
    figure = mosaic_figure(pictures, [row["label"] for row in rows], "digits, one image per class")
    picture = out / "digits.png"
    save_figure(figure, picture)
    return {"rows": rows, "picture": str(picture)}
