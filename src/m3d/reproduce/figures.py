"""The paper's figures from records: as wide as a paper's column, in colours that colour-blind readers tell apart."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from PIL import Image

from m3d.grid.cells import Cell
from m3d.grid.journal import Record
from m3d.reproduce.cells import FACTS
from m3d.reproduce.names import name_points
from m3d.reproduce.records import Place, Records

WIDTH = 3.3  # inches
_NEAR = 0.04  # of an axis: lines nearer than this have one name together
_FONT = 7
# Okabe and Ito's palette; series differ in marker and line too.
_BLUE, _ORANGE, _GREEN, _RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
_STYLES = ((_BLUE, "o", "-"), (_ORANGE, "s", "--"), (_GREEN, "^", ":"))
_KERNELS = {"linear": (_ORANGE, ""), "polynomial": (_GREEN, "////"), "gaussian": (_BLUE, "xxxx")}


def steps(records: Records) -> dict[str, Figure]:
    """Accuracy over condensing steps, one line per series, ± one standard deviation."""
    (table,) = records.plan.tables
    figure, axes = _figure(2.2)
    for column, (colour, marker, line) in zip(table.columns, _STYLES, strict=True):
        points = [(int(row.key), p) for row in table.rows if (p := records.place(row.key, column.cells, "accuracy"))]
        if points:
            x, y, error = [k for k, _ in points], *_columns([p for _, p in points])
            axes.errorbar(
                x, y, error, color=colour, marker=marker, linestyle=line, label=column.label, **_line_settings()
            )
    last = max(int(row.key) for row in table.rows)
    axes.set_xlim(-0.03 * last, 1.03 * last)  # all that is planned, however little of it is made
    axes.set_xlabel("condensing steps", fontsize=_FONT)
    axes.set_ylabel("test accuracy, %", fontsize=_FONT)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_title("CIFAR-10, 10 per class", fontsize=_FONT)
    _legend(axes)
    return {"": figure}


def methods(records: Records) -> dict[str, Figure]:
    """Accuracy under one protocol against seconds of condensing; what takes none is a line across.

    Open markers are times of runs that shared their GPU.
    """
    figures = {}
    for ipc in (10, 1):
        cells = f"{ipc}, paper"
        rows = [row.key for row in records.plan.tables[0].rows if records.place(row.key, cells, "accuracy")]
        found = {key: records.place(key, cells, "accuracy") for key in rows}
        if found:
            seconds = {key: records.place(key, cells, "seconds") for key in found}
            figures[f"-ipc{ipc}"] = _against_time(found, seconds, f"CIFAR-10, {ipc} per class")
    return figures


def _against_time(found: dict[str, Place | None], seconds: dict[str, Place | None], title: str) -> Figure:
    figure, axes = _figure(2.6)
    points: dict[str, tuple[float, float]] = {}
    levels: dict[str, float] = {}  # of what takes no time
    for key, place in found.items():
        time, accuracy = seconds[key], place.mean if place else None
        if accuracy is None:
            continue
        if time is None or time.mean is None:
            levels[key] = accuracy
            continue
        spread = place.sd if place and place.sd else 0.0
        colour, marker = (_BLUE, "o") if key.startswith("M3D") else (_ORANGE, "s")
        filling: dict[str, Any] = {"markerfacecolor": "white"} if time.at_most else {}
        axes.errorbar(time.mean, accuracy, spread, color=colour, marker=marker, **filling, **_line_settings())
        points[key] = time.mean, accuracy
    axes.set_xscale("log")
    marks = [m * 10**k for k in range(6) for m in (1, 2, 5)]
    axes.set_xticks(marks, [f"{m:,}" for m in marks])
    axes.minorticks_off()
    times = [x for x, _ in points.values()] or [1.0]
    axes.set_xlim(min(times) / 2.8, max(times) * 1.9)  # room for names on either side
    axes.margins(y=0.08)
    _across(axes, levels)
    shared = any(time and time.at_most for time in seconds.values())
    axes.set_xlabel("condensing, s" + (" (open: at most, on a shared GPU)" if shared else ""), fontsize=_FONT)
    axes.set_ylabel("test accuracy, %", fontsize=_FONT)
    axes.set_title(title, fontsize=_FONT)
    name_points(figure, axes, points, _FONT - 1)
    return figure


def _across(axes: Axes, levels: dict[str, float]) -> None:
    """A line for each of ``levels``; those too near to each other for two names share one."""
    for level in levels.values():
        axes.axhline(level, color="#999999", linewidth=0.7, linestyle=":")
    low, high = axes.get_ylim()
    groups: list[list[str]] = []
    for name in sorted(levels, key=lambda name: levels[name]):
        if groups and levels[name] - levels[groups[-1][0]] < _NEAR * (high - low):
            groups[-1].append(name)
        else:
            groups.append([name])
    where: Any = ("axes fraction", "data")
    for names in groups:
        place = (1, levels[names[0]])
        axes.annotate(", ".join(names), place, xycoords=where, ha="right", va="top", fontsize=_FONT - 1.5)


def ipm(records: Records) -> dict[str, Figure]:
    """Accuracy (left) and seconds (right) against iterations per model."""
    (table,) = records.plan.tables
    figure, axes = _figure(2.1)
    right = axes.twinx()
    keys = [row.key for row in table.rows if records.place(row.key, "M3D", "accuracy")]
    accuracy = [p for key in keys if (p := records.place(key, "M3D", "accuracy"))]
    seconds = [p for key in keys if (p := records.place(key, "M3D", "seconds"))]
    x = range(len(keys))
    y, error = _columns(accuracy)
    bars = right.bar(x, [p.mean or 0.0 for p in seconds], color="#cfcfcf", width=0.55, zorder=1)
    starting = [records.place(key, "M3D", "starting") for key in keys]
    start = [p.mean or 0.0 if p else 0.0 for p in starting]
    lower = right.bar(x, start, color="#cfcfcf", edgecolor="#8a8a8a", hatch="////", linewidth=0, width=0.55, zorder=1)
    line = axes.errorbar(x, y, error, color=_BLUE, marker="o", label="accuracy", **_line_settings())
    axes.set_zorder(right.get_zorder() + 1)  # the line before the bars
    axes.patch.set_visible(False)
    axes.set_xticks(x, keys)
    axes.set_xlabel("iterations per model (IPM)", fontsize=_FONT)
    axes.set_title("CIFAR-10, 10 per class", fontsize=_FONT)
    axes.set_ylabel("test accuracy, %", fontsize=_FONT, color=_BLUE)
    shared = ", at most" if any(p.at_most for p in seconds) else ""
    right.set_ylabel(f"condensing, s (bars{shared})", fontsize=_FONT, color="#555555")
    right.set_ylim(0, 1.8 * max((p.mean or 0.0 for p in seconds), default=1.0))
    right.tick_params(labelsize=_FONT, colors="#555555")
    right.spines["top"].set_visible(False)
    shown: list[tuple[Any, str]] = [(line, "accuracy"), (bars, "time")]
    if any(start):
        shown.append((lower, "start"))
    handles, labels = zip(*shown, strict=True)
    axes.legend(handles, labels, fontsize=_FONT, frameon=False, loc="upper right", ncols=len(shown), columnspacing=1)
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.5 * (high - low), high + 0.25 * (high - low))  # bars below the line, legend above it
    return {"": figure}


def kernel(records: Records) -> dict[str, Figure]:
    """Accuracy of the three kernels on each dataset."""
    (table,) = records.plan.tables
    rows = [r for r in table.rows if any(records.place(r.key, c.cells, "accuracy") for c in table.columns)]
    figure, axes = _figure(2.0)
    for k, column in enumerate(table.columns):
        found = [(i, p) for i, row in enumerate(rows) if (p := records.place(row.key, column.cells, "accuracy"))]
        if not found:
            continue
        y, error = _columns([p for _, p in found])
        x = [i + 0.27 * (k - 1) for i, _ in found]
        axes.bar(
            x,
            y,
            0.25,
            yerr=error,
            label=_proper(column.label),
            error_kw={"elinewidth": 0.7, "capsize": 1.5},
            **_bar_settings(column.label),
        )
        for place, value, spread in zip(x, y, error, strict=True):
            axes.text(place, value + spread + 3, f"{value:.1f}", ha="center", fontsize=_FONT - 1, rotation=90)
    axes.set_xticks(range(len(rows)), [row.labels[0] for row in rows])
    axes.set_ylabel("test accuracy, %", fontsize=_FONT)
    axes.set_ylim(0, 140)
    axes.set_yticks(range(0, 101, 20))
    axes.set_title("10 per class", fontsize=_FONT)
    axes.legend(fontsize=_FONT, frameon=False, ncols=3, loc="upper center", handlelength=1.2, columnspacing=1.2)
    return {"": figure}


def motivation(records: Records) -> dict[str, Figure]:
    """Above: two distributions. Below: how clearly each kernel tells them apart."""
    titles = {"mean": "means\ndiffer", "variance": "variances\ndiffer", "skewness": "skewnesses\ndiffer"}
    titles["aligned"] = "nothing\ndiffers"
    found = [(cell.row, r) for cell in records.plan.cells if (r := records.of(cell))]
    figure = Figure(figsize=(WIDTH, 2.5), layout="constrained")
    axes = figure.subplots(2, len(found), squeeze=False, sharey="row", height_ratios=(1.0, 1.25))
    for k, (kind, record) in enumerate(found):
        _densities(axes[0, k], record, titles[kind])
        _seen(axes[1, k], record)
    for row, label in ((0, "density"), (1, "MMD² / chance")):
        axes[row, 0].set_ylabel(label, fontsize=_FONT)
    axes[0, 0].set_ylim(bottom=0)
    places: tuple[tuple[int, Any], ...] = ((0, "outside upper center"), (1, "outside lower center"))
    for row, place in places:
        handles, labels = axes[row, 0].get_legend_handles_labels()
        settings: dict[str, Any] = {"fontsize": _FONT, "frameon": False, "handlelength": 1.5, "columnspacing": 1.2}
        figure.legend(handles, labels, ncols=4, loc=place, **settings)
    return {"": figure}


def _densities(axes: Axes, record: Record, title: str) -> None:
    low, high = record["range"]
    edges = np.linspace(low, high, len(record["original"]) + 1)
    axes.stairs(record["original"], edges, fill=True, color=_BLUE, alpha=0.35, label="original")
    axes.stairs(record["synthetic"], edges, color=_RED, linewidth=1.0, label="synthetic")
    axes.set_title(title, fontsize=_FONT)
    axes.set_yticks([])
    axes.set_xticks([0], ["0"])
    _plain(axes)


def _seen(axes: Axes, record: Record) -> None:
    values = record["seen"]
    for k, name in enumerate(_KERNELS):
        axes.bar(k, values[name], 0.8, label=_proper(name), **_bar_settings(name))
        axes.text(k, values[name] + 1.0, f"{values[name]:.0f}", ha="center", va="bottom", fontsize=_FONT - 1)
    axes.axhline(1.0, color="black", linewidth=0.6, linestyle="--", label="chance")
    axes.set_xticks([])
    _plain(axes)


def images(records: Records) -> dict[str, Figure]:
    """A figure per dataset: the start, DM and M3D below each other, first without factor, then with it."""
    figures = {}
    for data in dict.fromkeys(cell.row for cell in records.plan.cells):
        cells = [cell for cell in records.plan.cells if cell.row == data]
        pictures = {cell.column: r["picture"] for cell in cells if (r := records.of(cell))}
        if pictures:
            figures[f"-{data}"] = _panels(cells, pictures)
    return figures


def _panels(cells: list[Cell], pictures: dict[str, Record]) -> Figure:
    shown = [f"{name}, {part}" for part in ("no factor", "factor") for name in ("initial", "DM", "M3D")]
    shown = [name for name in shown if name in pictures]
    sheet = pictures[shown[0]]
    side = WIDTH * 0.9 / sheet["columns"]  # inches of one image; the rest is for names
    names = 0.5 if sheet["names"] else 0.0
    figure = Figure(
        figsize=(WIDTH, len(shown) * (sheet["rows"] * side + 0.05) + names + 0.25),
        layout=ConstrainedLayoutEngine(h_pad=0.012, w_pad=0.02, hspace=0, wspace=0),
    )
    axes = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
    for k, name in enumerate(shown):
        _panel(axes[k], pictures[name], name.replace(", ", ",\n"), named=k == 0)
    source = cells[0].sources[0]
    title = f"{FACTS[source.data].title}, {source.ipc} per class" if source.data in FACTS else source.data
    figure.suptitle(title, fontsize=_FONT)
    return figure


def _panel(axes: Axes, sheet: Record, label: str, named: bool) -> None:
    """A sheet of images, its ``label`` on the left; ``named``: the classes' names above."""
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(sheet["png"]))).convert("RGB"))
    rows, columns = sheet["rows"], sheet["columns"]
    h, w = pixels.shape[0] // rows, pixels.shape[1] // columns
    gap = max(1, h // 16)
    canvas = np.full((rows * (h + gap) - gap, columns * (w + gap) - gap, 3), 255, np.uint8)
    for r in range(rows):
        for c in range(columns):
            top, left = r * (h + gap), c * (w + gap)
            canvas[top : top + h, left : left + w] = pixels[r * h : (r + 1) * h, c * w : (c + 1) * w]
    axes.imshow(canvas, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_ylabel(label, fontsize=_FONT - 1, labelpad=2)
    if named and sheet["names"]:
        axes.xaxis.tick_top()
        middles = [c * (w + gap) + w / 2 for c in range(columns)]
        axes.set_xticks(middles, sheet["names"], fontsize=_FONT - 1.5, rotation=40, ha="left", rotation_mode="anchor")
        axes.tick_params(length=0, pad=1)


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    _plain(axes)
    return figure, axes


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=_FONT, length=2, pad=2)


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=_FONT, frameon=False, loc="lower right")


def _columns(places: list[Place]) -> tuple[list[float], list[float]]:
    """Means and standard deviations (0 where there is none)."""
    return [p.mean or 0.0 for p in places], [p.sd or 0.0 for p in places]


def _line_settings() -> dict[str, Any]:
    return {"markersize": 3, "linewidth": 1.1, "elinewidth": 0.7, "capsize": 1.5}


def _proper(kernel: str) -> str:
    return "Gaussian" if kernel == "gaussian" else kernel


def _bar_settings(kernel: str) -> dict[str, Any]:
    """How a kernel's bars are told apart: by colour and by hatching."""
    colour, hatch = _KERNELS[kernel]
    return {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.3}


FIGURES: dict[str, Callable[[Records], dict[str, Figure]]] = {
    "methods": methods,
    "steps": steps,
    "ipm": ipm,
    "kernel": kernel,
    "motivation": motivation,
    "images": images,
}
