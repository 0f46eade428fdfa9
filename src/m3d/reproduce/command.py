"""What ``m3d reproduce`` does and prints."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import typer

from m3d.errors import Interrupted, M3DError, unknown
from m3d.grid.cells import Cell, Overrides, sets_in
from m3d.grid.journal import Record
from m3d.grid.telling import Telling, check_time_limit, say_record
from m3d.grid.where import Where
from m3d.reproduce.cells import Plan, matching, select
from m3d.reproduce.cost import MEASURED_ON, estimate
from m3d.reproduce.plans import find
from m3d.reproduce.published import published
from m3d.reproduce.records import Records, read
from m3d.terminal import duration
from m3d.wording import counted

_FEW = 12  # finished cells up to which each is told


@dataclass(frozen=True)
class Request:
    """One call: which plan, which of its cells, where to, under which overrides."""

    name: str
    patterns: tuple[str, ...]  # of cells; none: all
    out: Path
    overrides: Overrides
    as_json: bool = False
    where: Where = field(default_factory=Where)

    def plan(self) -> None:
        """Print what would be done."""
        rows: list[dict[str, Any]] = []
        made = sets_in(self.out)
        for plan, cells in self._chosen():
            records = Records(self.out, plan, self.overrides)
            for cell in cells:
                finished = records.of(cell) is not None
                seconds, memory = (0.0, 0.0) if finished else estimate(cell, self.overrides, made)
                place = {"plan": plan.name, "cell": cell.key, "finished": finished}
                rows.append({**place, "seconds": round(seconds, 1), "memory": round(memory)})
        if self.as_json:
            typer.echo(json.dumps(rows))
            return
        width = max(len(f"{r['plan']}  {r['cell']}") for r in rows)
        for row in rows:
            cost = "finished" if row["finished"] else f"{duration(row['seconds']):>8}  {row['memory'] / 2**30:6.1f} GiB"
            typer.echo(f"{row['plan'] + '  ' + row['cell']:<{width}}  {cost}")
        todo = [row for row in rows if not row["finished"]]
        if not todo:
            typer.echo(f"{counted(len(rows), 'cells')}, all finished" if len(rows) > 1 else "1 cell, finished")
            return
        total, most = sum(r["seconds"] for r in todo), max((r["memory"] for r in todo), default=0)
        typer.echo(
            f"{len(todo)} of {len(rows)} cells to run: about {duration(total)} and at most {most / 2**30:.1f} GiB on "
            f"{MEASURED_ON} (less where it is short: then a step takes fewer classes at a time), estimated from a few "
            f"measurements; a set that cells share is counted once"
        )

    def render(self) -> None:
        """Make tables and figures from the records."""
        from m3d.reproduce.render import render

        for plan, _ in self._chosen():
            records = Records(self.out, plan, self.overrides)
            if self.name.lower() == "all" and not any(records.of(cell) for cell in plan.cells):
                continue
            self._say_files(render(records))
            self._say_records(records, plan.cells)

    def run(
        self, data_root: Path | None, device: str, checkpoint_seconds: float, seconds: float | None, again: bool
    ) -> None:
        """Make the missing cells, then show what there is; one failed cell does not stop the others."""
        check_time_limit(seconds)
        from m3d.grid.work import Place

        chosen = self._chosen()
        place = Place(self.out, data_root, device, checkpoint_seconds)
        ends = None if seconds is None else time.monotonic() + seconds
        failures: list[tuple[Cell, M3DError]] = []
        with self.where.hands(device) as hands:
            for plan, cells in chosen:
                left = None if ends is None else ends - time.monotonic()
                failures += self._make(plan, cells, place, again=again, seconds=left, hands=hands)
        if failures:
            cell, error = failures[0]
            raise M3DError(f"{counted(len(failures), 'cells')} failed; {cell.key}: {error}")

    def _make(self, plan: Plan, cells: list[Cell], place: Any, **settings: Any) -> list[tuple[Cell, M3DError]]:
        """Make a plan's missing cells and show it; returns those that failed."""
        from m3d.reproduce.runner import run

        if not settings["again"]:  # the others follow as they are made
            before = Records(self.out, plan, self.overrides)
            self._say_records(before, cells)
            self._say_finished(plan, before, cells)
        telling = Telling(lambda cell, record: headline(plan, cell, record), self.as_json, estimates_for=MEASURED_ON)
        try:
            with telling.watched() as (listener, watch):
                summary = run(plan, cells, place, self.overrides, listener=listener, watch=watch, **settings)
        except Interrupted as stop:
            self._render_if_any(plan)
            typer.echo(f"m3d: {plan.name}: {stop}; the same command goes on from here", err=True)
            raise SystemExit(130) from None
        if summary.skipped and not self.as_json:
            typer.echo(f"{plan.name}: {summary.skipped} of {len(cells)} cells were finished before")
        self._say_files(self._render_if_any(plan))
        return summary.failed

    def _chosen(self) -> list[tuple[Plan, list[Cell]]]:
        """The plans asked for, each with the cells asked for."""
        chosen = []
        for plan, confined in find(self.name):
            chosen.append((plan, select(plan.cells, confined)))
        if not self.patterns:
            return chosen
        for pattern in self.patterns:
            if not any(_narrow(cells, pattern) for _, cells in chosen):
                keys = {c.key.rpartition("/seed")[0] or c.key for plan, _ in chosen for c in plan.cells}
                raise unknown("cell", pattern, keys, f"'m3d reproduce {self.name} --dry-run'")
        narrowed = ((plan, _narrow(cells, *self.patterns)) for plan, cells in chosen)
        return [(plan, cells) for plan, cells in narrowed if cells]

    def _render_if_any(self, plan: Plan) -> list[Path]:
        from m3d.reproduce.render import render

        records = Records(self.out, plan, self.overrides)
        return render(records) if any(records.of(cell) for cell in plan.cells) else []

    def _say_records(self, records: Records, cells: Iterable[Cell]) -> None:
        """With --json: those of the cells that are finished."""
        for record in filter(None, map(records.of, cells)) if self.as_json else ():
            say_record(record)

    def _say_finished(self, plan: Plan, records: Records, cells: Sequence[Cell]) -> None:
        """What the finished ones of a few cells gave, and how they were made."""
        finished = [(cell, record) for cell in cells if (record := records.of(cell)) is not None]
        if self.as_json or len(finished) > _FEW:
            return
        for cell, record in finished:
            typer.echo(f"{cell.key}: {headline(plan, cell, record)}{origin(record)}")

    def _say_files(self, files: list[Path]) -> None:
        if files and not self.as_json:
            typer.echo(" ".join(map(str, files)))


def _narrow(cells: Sequence[Cell], *patterns: str) -> list[Cell]:
    """What any of the patterns names, in their order and each once; what this plan does not have, another may."""
    return list({cell.key: cell for pattern in patterns for cell in matching(cells, pattern)}.values())


def headline(plan: Plan, cell: Cell, record: Record) -> str:
    """What a finished cell says in one line."""
    place = read(record, "accuracy")
    if place is None or place.mean is None:
        return "made"
    spread = "" if place.sd is None else f" ± {place.sd:.2f}"
    text = f"{place.mean:.2f}{spread} % (last epoch, n={place.n})"
    labels = {c.label for t in plan.tables for c in t.columns if (c.cells, c.measure) == (cell.column, "accuracy")}
    rows = dict.fromkeys(row.key for t in plan.tables for row in t.rows if fnmatchcase(row.key, cell.row))
    found = (published(plan.name, row, label) for row in rows for label in sorted(labels))
    theirs = next(filter(None, found), None)
    if theirs is None:
        return text
    paper = f"{theirs.mean:g}" + ("" if theirs.sd is None else f" ± {theirs.sd:g}")
    return f"{text}; published {paper} ({theirs.source}), difference {place.mean - theirs.mean:+.2f}"


def origin(record: Record) -> str:
    """How a finished cell was made, in brackets."""
    parts: Sequence[Record] = record.get("condensation", ())
    made = next((str(part["created"]) for part in parts if part.get("created")), str(record.get("when", "")))
    steps = sum(part.get("steps") or 0 for part in parts)
    spent = f"condensed in {duration(sum(part['seconds'] for part in parts))}" if steps else ""
    commit = f"commit {record['commit'][:10]}" if record.get("commit") else ""
    told = ", ".join(filter(None, (spent, str(record.get("device", "")), commit, made[:10])))
    return f" [{told}]" if told else ""
