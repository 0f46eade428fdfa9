"""Our numbers beside the published ones: Markdown and LaTeX in the paper's layout, CSV with one line per place."""

from __future__ import annotations

import csv
import io

from m3d.reproduce.cells import Column, Plan, Row, Table
from m3d.reproduce.published import Published, published
from m3d.reproduce.records import Place, Records

_LEGEND = (
    "Each place: ours ± sd (n networks), the published value, the difference of accuracies. Ours is the accuracy "
    "after the last epoch, in percent; ± is over the networks of one set, or over the means of several condensation "
    "seeds where n says seeds × networks. – : not run, or not published. † : run again by the paper's authors. "
    "≤ : timed while other runs computed on the same device."
)
_FIELDS = (
    "table", "row", "column", "ours", "sd", "n", "seeds", "text", "at_most",
    "published", "published_sd", "difference", "source",
)  # fmt: skip


def markdown(plan: Plan, records: Records) -> str:
    parts = [f"# {plan.name}: {plan.about}\n", *_warning(records)]
    for table in plan.tables:
        columns = _shown(plan, table, records)
        head = [*table.heads, *(c.label for c in columns)]
        lines = [head, ["---"] * len(head)]
        lines += [[*row.labels, *(_text(plan, row, c, records) for c in columns)] for row in table.rows]
        body = "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
        parts.append(f"## {table.title}\n\n{body}" + (f"\n{table.note}\n" if table.note else ""))
    return "\n".join([*parts, *_legend(plan), _made(plan, records)]) + "\n"


def latex(plan: Plan, records: Records) -> str:
    parts = ["% needs \\usepackage{booktabs}\n"]
    warning = [text.strip().strip("*") for text in _warning(records)]
    for table in plan.tables:
        columns = _shown(plan, table, records)
        head = " & ".join(_escape(h) for h in (*table.heads, *(c.label for c in columns)))
        rows = [
            " & ".join(_escape(t) for t in (*row.labels, *(_text(plan, row, c, records) for c in columns)))
            for row in table.rows
        ]
        layout = "l" * len(table.heads) + "c" * len(columns)
        body = "".join(f"    {row} \\\\\n" for row in rows)
        below = " ".join(filter(None, (*warning, table.note, *_legend(plan))))
        parts.append(
            f"% {table.title}\n\\begin{{tabular}}{{{layout}}}\n    \\toprule\n    {head} \\\\ \\midrule\n"
            f"{body}    \\bottomrule\n\\end{{tabular}}\n"
        )
        if below:
            parts.append(f"\\par\\smallskip{{\\footnotesize {_escape(below)}\\par}}\n")
    return "".join(parts)


def comma_separated(plan: Plan, records: Records) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(_FIELDS)
    for table in plan.tables:
        for row in table.rows:
            for column in table.columns:
                ours, theirs = _both(plan, row, column, records)
                if ours is None and theirs is None:
                    continue
                place = ours or Place(None, seeds=0)
                values = (place.mean, place.sd, place.n, place.seeds, place.text, "yes" if place.at_most else "")
                rest = (
                    (theirs.mean, theirs.sd, _difference(ours, theirs, column), theirs.source)
                    if theirs
                    else (None,) * 4
                )
                line = (table.title, row.key, column.label, *values, *rest)
                writer.writerow(["" if v is None else round(v, 4) if isinstance(v, float) else v for v in line])
    return buffer.getvalue()


def _both(plan: Plan, row: Row, column: Column, records: Records) -> tuple[Place | None, Published | None]:
    return records.place(row.key, column.cells, column.measure), published(plan.name, row.key, column.label)


def _shown(plan: Plan, table: Table, records: Records) -> list[Column]:
    """The columns with anything in them; all of them while nothing is known."""
    filled = [c for c in table.columns if any(_both(plan, row, c, records) != (None, None) for row in table.rows)]
    return filled or list(table.columns)


def _text(plan: Plan, row: Row, column: Column, records: Records) -> str:
    """``62.8 ± 0.6 (n 30), 63.5 ± 0.2, −0.7``: ours, published, difference."""
    ours, theirs = _both(plan, row, column, records)
    mine = "–" if ours is None else _number(ours, _digits(column.measure))
    if theirs is None:
        return mine
    printed = 2 if column.measure.startswith("distance") else 1
    spread = "" if theirs.sd is None else f" ± {theirs.sd:.1f}"
    paper = f"{theirs.mean:.{printed}f}{spread}" + ("†" if theirs.again else "")
    difference = _difference(ours, theirs, column)
    shown = "" if difference is None else f", {_signed(difference)}"
    return f"{mine}, {paper}{shown}"


def _signed(difference: float) -> str:
    rounded = round(difference, 1)
    return "±0.0" if rounded == 0 else f"{rounded:+.1f}".replace("-", "−")


def _number(place: Place, digits: int) -> str:
    if place.mean is None:
        return place.text
    spread = "" if place.sd is None else f" ± {place.sd:.{digits}f}"
    many = f"{place.seeds} × {place.n // place.seeds}" if place.n and place.seeds > 1 else str(place.n)
    bound = "≤ " if place.at_most else ""
    return f"{bound}{place.mean:.{digits}f}{spread}" + ("" if place.n is None else f" (n {many})")


def _digits(measure: str) -> int:
    return {"distance": 3, "raw distance": 3, "hours": 2}.get(measure.rpartition(" ")[0] or measure, 1)


def _difference(ours: Place | None, theirs: Published | None, column: Column) -> float | None:
    """Of accuracies alone: distances are defined, and times measured, in other ways than the paper's."""
    if ours is None or theirs is None or ours.mean is None or column.measure != "accuracy":
        return None
    return ours.mean - theirs.mean


def _warning(records: Records) -> list[str]:
    given = records.overrides.given()
    settings = ", ".join(f"{k} {v}" for k, v in given.items())
    return [f"**Not the paper's settings: {settings}. A quick look, no result.**\n"] if given else []


def _legend(plan: Plan) -> list[str]:
    """How places are read, where they hold accuracies."""
    return [_LEGEND] if any(c.measure == "accuracy" for table in plan.tables for c in table.columns) else []


def _made(plan: Plan, records: Records) -> str:
    """How many cells there are, and on what they were made."""
    found = [r for cell in plan.cells if (r := records.of(cell)) is not None]
    kinds = sorted({f"{r['device']}, torch {r['torch']}, {r['precision']}" for r in found if "device" in r})
    commits = sorted({_short(r["commit"]) for r in found if r.get("commit")})
    on = f"; made on {' and '.join(kinds)}; commit {', '.join(commits) or 'not known'}" if kinds else ""
    return f"\n{len(found)} of {len(plan.cells)} cells are finished{on}."


def _short(commit: str) -> str:
    """The first ten digits, and whether the source had been changed since."""
    digits, dash, state = commit.partition("-")
    return digits[:10] + dash + state


_WRITTEN = {
    "&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "±": r"$\pm$", "×": r"$\times$", "−": "$-$", "†": r"$^\dagger$",
    "≤": r"$\le$", "–": "--", "·": r"$\cdot$", "²": "$^2$", "₂": "$_2$", "λ": r"$\lambda$", "¼": r"$\frac14$",
    "½": r"$\frac12$", "¾": r"$\frac34$", "‖": r"$\|$", "Σ": r"$\Sigma$", "→": r"$\to$", "…": r"\dots{}",
}  # fmt: skip


def _escape(text: str) -> str:
    return "".join(_WRITTEN.get(letter, letter) for letter in text)
