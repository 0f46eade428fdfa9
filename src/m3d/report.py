"""Runs side by side: one row per result record, or per setting over its seeds, as a table and as a bar chart."""

from __future__ import annotations

import csv
import io
import json
import logging
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib.figure import Figure

from m3d.condensed import CondensedSet
from m3d.earlier import comparable
from m3d.errors import M3DError, unknown
from m3d.evaluation import PROTOCOLS, make_protocol
from m3d.run_folder import RunFolder

log = logging.getLogger(__name__)

COLUMNS = ("run", "method", "data", "ipc", "protocol", "net", "last", "best", "n", "steps", "seconds", "memory")
# Shown only where some result has them. What was reached with soft labels never stands under ``last`` and ``best``.
SOFT_COLUMNS = ("soft_last", "soft_best", "pixel_bytes", "label_bytes")
RANKING_COLUMNS = ("lrs", "ars")
SEED_COLUMNS = ("seed",)  # of the condensation
SHARED_COLUMNS = ("device_share",)  # the part of a device that a run had: its seconds are an upper bound
# What rows of one setting agree in, whatever their seeds; a JSON row has the last three as well.
_SETTING = ("method", "data", "ipc", "protocol", "net", "steps", "kept", "options", "matched")
FORMATS = ("text", "csv", "markdown", "latex")
_PAIRS = {"last": "last_sd", "best": "best_sd", "soft_last": "soft_last_sd", "soft_best": "soft_best_sd"}
_PAIRS |= {"lrs": "lrs_error", "ars": "ars_error"}  # a value and its spread, two columns of a CSV


def rows_of(runs: Sequence[str | Path]) -> list[dict[str, Any]]:
    """One row per evaluation of each run, with the cost of its condensation.

    Of several folders (``runs/*``) those that hold no result are left out, and it is said; one at least must have some.
    """
    rows, empty = [], []
    for folder in map(RunFolder, runs):
        if folder.path.is_dir() and not folder.results():
            empty.append(folder)
        else:
            rows += _rows(folder)
    if not rows:
        return _rows(empty[0])  # says what is missing
    for folder in empty:
        ready = f": evaluate it with m3d evaluate {folder.path}" if folder.finished else ""
        log.warning("%r is left out: it holds no result%s", str(folder.path), ready)
    return rows


def _rows(folder: RunFolder) -> list[dict[str, Any]]:
    """The results of one run; an evaluation that was repeated to the same end stands there once."""
    results = folder.results()
    condensed = CondensedSet.load(folder.path) if folder.finished or not results else None
    if not results:
        raise M3DError(f"{str(folder.path)!r} has no result yet; make one with: m3d evaluate {folder.path}")
    rows: list[dict[str, Any]] = []
    for record in results:
        try:
            row = _row(folder.path.name, record, condensed)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise M3DError(
                f"{str(folder / RunFolder.RESULTS)!r} holds a line that is no result record: {error}"
            ) from error
        if row not in rows:
            rows.append(row)
    return rows


def _row(name: str, record: Mapping[str, Any], condensed: CondensedSet | None) -> dict[str, Any]:
    """One result of a run, with the cost of its condensation unless it is of a set kept on the way, of a run that is
    not finished, or of training on the whole data."""
    manifest: Mapping[str, Any] = {"steps": record.get("steps")}
    if condensed is not None and record.get("set", condensed.fingerprint) == condensed.fingerprint:
        manifest = condensed.manifest
    run: Mapping[str, Any] = {} if condensed is None else condensed.manifest  # of sets kept on its way too
    storage = record.get("storage") or ({} if condensed is None else condensed.storage)
    if "kept_as" in record:
        name = f"{name}/{record['kept_as']}"
    soft, ranking = record.get("labels", "hard") == "soft", record.get("ranking")
    several = int(record["n"]) > 1  # one network has no deviation
    last = (float(record["accuracy"]), float(record["sd"]) if several else None)
    best = (float(record["best_of_checks"]), float(record["best_sd"]) if several else None)
    return {
        "run": name,
        "method": record["method"],
        "data": record["data"]["name"],
        "ipc": record["ipc"],
        "seed": run.get("seed"),
        "protocol": _rules(record),
        "net": record["net"],
        "last": None if soft else last,
        "best": None if soft else best,
        "n": record["n"],
        "steps": manifest.get("steps"),
        "seconds": _seconds(manifest, soft),
        "memory": (manifest.get("peak_memory") or 0) / 2**30 or None,  # GiB
        "device_share": manifest.get("device_share"),
        "soft_last": last if soft else None,
        "soft_best": best if soft else None,
        "pixel_bytes": storage.get("pixels"),
        "label_bytes": storage.get("labels"),
        "lrs": (ranking["lrs"], ranking["lrs_error"]) if ranking else None,
        "ars": (ranking["ars"], ranking["ars_error"]) if ranking else None,
        "kept": record.get("kept_as", ""),
        "options": dict(run.get("options") or {}),
        "matched": {"net": run.get("net"), "fingerprint": (run.get("data") or {}).get("fingerprint")},
    }


def over_seeds(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per setting: means over its seeds, and ± of the seeds' means instead of one set's networks.

    A setting with one seed stays as it is. What was measured twice on one seed's set counts as their mean.
    """
    settings: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        same = {**{name: row[name] for name in _SETTING}, "options": comparable(row["options"])}
        key = json.dumps([same, row["last"] is None], sort_keys=True, default=str)
        settings.setdefault(key, []).append(row)
    return [row for alike in settings.values() for row in _over_seeds(alike)]


def _over_seeds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of one setting as one, if they are of several seeds."""
    by_seed: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        by_seed.setdefault(row["seed"], []).append(row)
    if len(by_seed) < 2:
        return rows
    joined = dict(rows[0])
    for name in _PAIRS:
        known = all(row[name] is not None for row in rows)
        means = [fmean(row[name][0] for row in alike) for alike in by_seed.values()] if known else []
        joined[name] = (fmean(means), stdev(means)) if known else None
    costs = {
        name: [row[name] for row in rows if row[name] is not None] for name in ("seconds", "memory", "device_share")
    }
    each = {row["n"] for row in rows}
    return [
        joined
        | {
            "run": f"{len(by_seed)} seeds",
            "seed": ", ".join(map(str, by_seed)),
            "n": f"{len(rows)} × {each.pop()}" if len(each) == 1 else sum(row["n"] for row in rows),
            "seconds": fmean(costs["seconds"]) if costs["seconds"] else None,
            "memory": max(costs["memory"], default=None),
            "device_share": min(costs["device_share"], default=None),
        }
    ]


def columns_of(rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """What a table of these rows shows."""
    soft = SOFT_COLUMNS if any(row["soft_last"] is not None for row in rows) else ()
    shared = SHARED_COLUMNS if any(row["device_share"] is not None for row in rows) else ()
    seeds = SEED_COLUMNS if len({row["seed"] for row in rows}) > 1 else ()
    return (*COLUMNS, *seeds, *shared, *soft, *(RANKING_COLUMNS if any(row["lrs"] is not None for row in rows) else ()))


def _seconds(manifest: Mapping[str, Any], soft: bool) -> float | None:
    """What the set cost; soft labels' making included where they were used."""
    told = manifest.get("soft_labels") or {}
    parts = [manifest.get("seconds"), told.get("seconds") if soft else None]
    return sum(part for part in parts if part is not None) if any(part is not None for part in parts) else None


def _rules(record: Mapping[str, Any]) -> str:
    """The protocol with what makes results incomparable: its epochs, a batch of its own, a split that is not test."""
    rules, split = record["protocol"], record["data"]["split"]
    known = rules["name"] in PROTOCOLS.names() and "batch" in rules
    usual = not known or make_protocol(rules["name"]).recipe.batch == rules["batch"]
    batch = "" if usual else f", batch {rules['batch']}"
    return f"{rules['name']}/{rules['epochs']}{batch}" + ("" if split == "test" else f" on {split}")


def table(rows: Sequence[dict[str, Any]], form: str = "text") -> str:
    """The rows in one of FORMATS; ``last`` is the headline (last epoch), ``best`` is chosen on test data.

    Results with soft labels stand in columns of their own.
    """
    if form not in FORMATS:
        raise unknown("table format", form, FORMATS)
    sign = r" $\pm$ " if form == "latex" else " ± "
    columns = columns_of(rows)
    told = rows if form == "csv" else [row | {"method": name} for row, name in zip(rows, _apart(rows), strict=True)]
    cells = [[_cell(row[column], sign, form) for column in columns] for row in told]
    titles = [column.replace("_", " ") for column in columns]
    if form == "csv":
        buffer = io.StringIO()
        writer = csv.writer(buffer)
        writer.writerow([name for c in columns for name in ((c, _PAIRS[c]) if c in _PAIRS else (c,))])
        for row in rows:
            flat = [(row[c] or (None, None)) if c in _PAIRS else (row[c],) for c in columns]
            writer.writerow([_plain(v) for values in flat for v in values])
        return buffer.getvalue()
    if form == "markdown":
        lines = [titles, ["---"] * len(columns), *cells]
        return "".join("| " + " | ".join(line) + " |\n" for line in lines)
    if form == "latex":
        body = "".join("    " + " & ".join(line) + r" \\" + "\n" for line in cells)
        head = " & ".join(titles) + r" \\ \midrule" + "\n"
        start = f"\\begin{{tabular}}{{{'l' * len(columns)}}}\n    \\toprule\n    "
        return start + head + body + "    \\bottomrule\n\\end{tabular}\n"
    widths = [max(len(line[k]) for line in [titles, *cells]) for k in range(len(columns))]
    return "".join(
        "  ".join(v.ljust(w) for v, w in zip(line, widths, strict=True)).rstrip() + "\n" for line in [titles, *cells]
    )


def _apart(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Each row's method, with the options in which it differs from other rows of its method, data and IPC."""
    peers: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        peers.setdefault((row["method"], row["data"], row["ipc"]), []).append(comparable(row["options"]))
    names = []
    for row in rows:
        alike = peers[row["method"], row["data"], row["ipc"]]
        differing = [name for name in row["options"] if len({str(options.get(name)) for options in alike}) > 1]
        names.append(" ".join([row["method"], *(f"{name}={row['options'][name]}" for name in differing)]))
    return names


def _plain(value: Any) -> Any:
    """As it stands in a CSV: more digits than are meant, fewer than a mean has by itself."""
    return "" if value is None else round(value, 4) if isinstance(value, float) else value


def _cell(value: Any, sign: str, form: str) -> str:
    if value is None:
        return "–" if form != "latex" else "--"
    if isinstance(value, tuple):
        return f"{value[0]:.2f}" + ("" if value[1] is None else f"{sign}{value[1]:.2f}")
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return text.replace("_", r"\_").replace("&", r"\&") if form == "latex" else text.replace("|", "\\|")


def bar_chart(rows: Sequence[dict[str, Any]]) -> Figure:
    """Last-epoch accuracy of every row, sd as error bars, the number at the end of each bar.

    Results with soft labels stand below all others, in a colour of their own, and say so.
    """
    rows = sorted(rows, key=lambda row: row["last"] is None)  # stable: otherwise in the order given
    figure = Figure(figsize=(6, 0.42 * len(rows) + 1.0))
    axes = figure.add_subplot()
    places = range(len(rows))
    shown = [row["last"] or row["soft_last"] for row in rows]
    means, deviations = [pair[0] for pair in shown], [pair[1] or 0.0 for pair in shown]
    colours = ["#4292c6" if row["last"] else "#fd8d3c" for row in rows]
    axes.barh(places, means, xerr=deviations, color=colours, height=0.6, error_kw={"elinewidth": 1, "capsize": 2})
    for place, mean, deviation in zip(places, means, deviations, strict=True):
        axes.text(mean + deviation + 0.8, place, f"{mean:.1f}", va="center", fontsize=8)
    title, labels = _captions(rows)
    axes.set_yticks(places, labels, fontsize=8)
    axes.set_title(textwrap.fill(title, 66), fontsize=9, loc="left")  # about 14 letters to an inch, right of the names
    axes.invert_yaxis()
    axes.set_xlim(0, min(108, max(m + d for m, d in zip(means, deviations, strict=True)) * 1.12 + 2))
    axes.set_xlabel("accuracy after the last epoch, %")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _captions(rows: Sequence[dict[str, Any]]) -> tuple[str, list[str]]:
    """What all bars share, as a title, and what each is of: its method with what tells it from the others, and the
    run's name only where nothing else does."""
    told = {"data": "{}", "ipc": "IPC {}", "net": "{}", "protocol": "{}", "seed": "seed {}"}
    several = {name for name in told if len({str(row[name]) for row in rows}) > 1}
    known = [{name: told[name].format(row[name]) for name in told if row[name] is not None} for row in rows]
    averaged = ["," in str(row["seed"]) for row in rows]
    for row, texts, several_seeds in zip(rows, known, averaged, strict=True):
        if several_seeds:
            texts["seed"] = f"seeds {row['seed']}"
    shared = {name: text for name, text in known[0].items() if name not in several and (name != "seed" or averaged[0])}
    title = ", ".join(shared.values())
    labels = []
    for name, row, texts in zip(_apart(rows), rows, known, strict=True):
        apart = [text for name, text in texts.items() if name in several]
        labels.append(", ".join([name, *apart, *([] if row["last"] else ["soft labels"])]))
    return title, [
        f"{text} ({row['run']})" if labels.count(text) > 1 else text for text, row in zip(labels, rows, strict=True)
    ]
