"""What came out, kept as one JSON record per cell in one file of lines per plan; everything shown is read from here."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from m3d.grid.cells import Cell, Overrides
from m3d.grid.journal import Journal, Record
from m3d.reproduce.cells import Plan


@dataclass(frozen=True)
class Place:
    """What stands at one place of a table: a number with its ± and n, or a text."""

    mean: float | None
    sd: float | None = None
    n: int | None = None
    seeds: int = 1
    text: str = ""
    at_most: bool = False  # a time measured while others computed on the same device


class Records:
    """The records of one plan under one set of overrides."""

    def __init__(self, out: Path, plan: Plan, overrides: Overrides):
        self.plan, self.overrides = plan, overrides
        self.folder = out / overrides.folder if overrides.folder else out
        # A number that stands in several tables is measured once, whichever of them was made first. Not where cells of
        # one set, or of one machine, are compared with each other: there the set may have been made again since.
        others = () if plan.alone else self.folder.glob("*.jsonl")
        self.journal = Journal(self.folder / f"{plan.name}.jsonl", plan.name, overrides, others)

    @property
    def file(self) -> Path:
        return self.journal.file

    def of(self, cell: Cell) -> Record | None:
        """The record of a finished cell; None for one that is not."""
        return self.journal.of(cell)

    def cells_at(self, row: str, column: str) -> list[Cell]:
        return [c for c in self.plan.cells if c.column == column and fnmatchcase(row, c.row)]

    def place(self, row: str, column: str, measure: str) -> Place | None:
        """What the finished cells at a place give; None where none is finished.

        One seed: its mean ± sd over networks. Several: the mean ± sd of the seeds' means, n the networks of all.
        """
        found = [r for cell in self.cells_at(row, column) if (r := self.of(cell)) is not None]
        places = [p for r in found if (p := read(r, measure)) is not None]
        if len(places) < 2:
            return places[0] if places else None
        means = [p.mean for p in places if p.mean is not None]
        n = sum(p.n for p in places if p.n is not None) or None
        at_most = any(p.at_most for p in places)
        return Place(statistics.fmean(means), statistics.stdev(means), n, len(means), at_most=at_most)


def read(record: Record, measure: str) -> Place | None:
    """One measure of one record."""
    name, _, which = measure.rpartition(" ")
    return _READERS[name or measure](record, which)


def _accuracy(record: Record, which: str) -> Place | None:
    if "accuracy" not in record:
        return None
    n = int(record["n"])
    return Place(record["accuracy"], record["sd"] if n > 1 else None, n)


def _condensing(unit: float) -> Callable[[Record, str], Place | None]:
    def seconds(record: Record, which: str) -> Place | None:
        parts: Sequence[Record] = record.get("condensation", ())
        steps = sum(part.get("steps") or 0 for part in parts)
        shared = any("device_share" in part for part in parts)
        return Place(sum(part["seconds"] for part in parts) / unit, at_most=shared) if steps else None

    return seconds


def _starting(record: Record, which: str) -> Place | None:
    parts: Sequence[Record] = record.get("condensation", ())
    known = bool(parts) and all("starting" in part for part in parts)  # older records do not say
    return Place(sum(part["starting"] for part in parts)) if known else None


def _memory(record: Record, which: str) -> Place | None:
    peaks = [part.get("peak_memory") or 0 for part in record.get("condensation", ())]
    return Place(max(peaks) / 2**30) if any(peaks) else None


def _stored(record: Record, which: str) -> Place | None:
    return Place(record["storage"][which] / 2**10) if "storage" in record else None


def _distance(kind: str) -> Callable[[Record, str], Place | None]:
    def distance(record: Record, which: str) -> Place | None:
        return Place(record["moments"][kind][int(which) - 1]) if "moments" in record else None

    return distance


def _fingerprint(record: Record, which: str) -> Place | None:
    return Place(None, text=str(record["set"])[:12])


_READERS: dict[str, Callable[[Record, str], Place | None]] = {
    "accuracy": _accuracy,
    "seconds": _condensing(1),
    "hours": _condensing(3600),
    "starting": _starting,
    "memory": _memory,
    "stored": _stored,
    "distance": _distance("normalised"),
    "raw distance": _distance("raw"),
    "seen by": lambda record, which: Place(record["seen"][which]),
    "fingerprint": _fingerprint,
}
