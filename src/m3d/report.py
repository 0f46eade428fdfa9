"""Runs side by side: one row per result record, as text, CSV, Markdown or LaTeX, and as a bar chart."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from m3d.errors import M3DError, unknown
from m3d.store import CondensedSet, RunFolder

COLUMNS = ("run", "method", "data", "ipc", "protocol", "net", "last", "best", "n", "steps", "seconds", "memory")
FORMATS = ("text", "csv", "markdown", "latex")


def rows_of(runs: Sequence[str | Path]) -> list[dict[str, Any]]:
    """One row per evaluation of each run, with the cost of its condensation."""
    rows = []
    for run in runs:
        folder = RunFolder(run)
        manifest = CondensedSet.load(folder.path).manifest
        results = folder.results()
        if not results:
            raise M3DError(f"{str(folder.path)!r} has no result yet; make one with: m3d evaluate {folder.path}")
        for record in results:
            try:
                rows.append(_row(folder.path.name, record, manifest))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise M3DError(
                    f"{str(folder / RunFolder.RESULTS)!r} holds a line that is no result record: {error}"
                ) from error
    return rows


def _row(name: str, record: dict[str, Any], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """One result of a run, with the cost of its condensation."""
    return {
        "run": name,
        "method": record["method"],
        "data": record["data"]["name"],
        "ipc": record["ipc"],
        "protocol": _rules(record),
        "net": record["net"],
        "last": (float(record["accuracy"]), float(record["sd"])),
        "best": (float(record["best_of_checks"]), float(record["best_sd"])),
        "n": record["n"],
        "steps": manifest.get("steps"),
        "seconds": manifest.get("seconds"),
        "memory": (manifest.get("peak_memory") or 0) / 2**30 or None,  # GiB
    }


def _rules(record: dict[str, Any]) -> str:
    """The protocol with what makes results incomparable: its epochs, and the split if it is not the test data."""
    split = record["data"]["split"]
    return f"{record['protocol']['name']}/{record['protocol']['epochs']}" + ("" if split == "test" else f" on {split}")


def table(rows: Sequence[dict[str, Any]], form: str = "text") -> str:
    """The rows in one of FORMATS; ``last`` is the headline (last epoch), ``best`` is chosen on test data."""
    if form not in FORMATS:
        raise unknown("table format", form, FORMATS)
    sign = r" $\pm$ " if form == "latex" else " ± "
    cells = [[_cell(row[column], sign, form) for column in COLUMNS] for row in rows]
    if form == "csv":
        buffer = io.StringIO()
        writer = csv.writer(buffer)
        writer.writerow([name for c in COLUMNS for name in ((c, f"{c}_sd") if c in ("last", "best") else (c,))])
        for row in rows:
            flat = [row[c] if isinstance(row[c], tuple) else (row[c],) for c in COLUMNS]
            writer.writerow(["" if v is None else v for values in flat for v in values])
        return buffer.getvalue()
    if form == "markdown":
        lines = [list(COLUMNS), ["---"] * len(COLUMNS), *cells]
        return "".join("| " + " | ".join(line) + " |\n" for line in lines)
    if form == "latex":
        body = "".join("    " + " & ".join(line) + r" \\" + "\n" for line in cells)
        head = " & ".join(COLUMNS) + r" \\ \midrule" + "\n"
        start = f"\\begin{{tabular}}{{{'l' * len(COLUMNS)}}}\n    \\toprule\n    "
        return start + head + body + "    \\bottomrule\n\\end{tabular}\n"
    widths = [max(len(line[k]) for line in [list(COLUMNS), *cells]) for k in range(len(COLUMNS))]
    return "".join(
        "  ".join(v.ljust(w) for v, w in zip(line, widths, strict=True)).rstrip() + "\n"
        for line in [list(COLUMNS), *cells]
    )


def _cell(value: Any, sign: str, form: str) -> str:
    if value is None:
        return "–" if form != "latex" else "--"
    if isinstance(value, tuple):
        return f"{value[0]:.2f}{sign}{value[1]:.2f}"
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return text.replace("_", r"\_").replace("&", r"\&") if form == "latex" else text.replace("|", "\\|")


def bar_chart(rows: Sequence[dict[str, Any]]) -> Figure:
    """Last-epoch accuracy of every row, sd as error bars, the number at the end of each bar."""
    figure = Figure(figsize=(6, 0.42 * len(rows) + 1.0))
    axes = figure.add_subplot()
    places = range(len(rows))
    means, deviations = [r["last"][0] for r in rows], [r["last"][1] for r in rows]
    axes.barh(places, means, xerr=deviations, color="#4292c6", height=0.6, error_kw={"elinewidth": 1, "capsize": 2})
    for place, mean, deviation in zip(places, means, deviations, strict=True):
        axes.text(mean + deviation + 0.8, place, f"{mean:.1f}", va="center", fontsize=8)
    axes.set_yticks(places, [f"{r['method']}, IPC {r['ipc']}, {r['net']}, {r['protocol']}" for r in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, min(108, max(m + d for m, d in zip(means, deviations, strict=True)) * 1.12 + 2))
    axes.set_xlabel("accuracy after the last epoch, %")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
