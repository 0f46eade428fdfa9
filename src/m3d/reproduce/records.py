"""What came out, kept as one JSON record per cell in one file of lines per plan; everything shown is read from here."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from m3d.errors import M3DError
from m3d.lock import claim
from m3d.reproduce.cells import Cell, Overrides, Plan, cell_digest

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """What stands at one place of a table: a number with its ± and n, or a text."""

    mean: float | None
    sd: float | None = None
    n: int | None = None
    seeds: int = 1
    text: str = ""


class Records:
    """The records of one plan under one set of overrides."""

    def __init__(self, out: Path, plan: Plan, overrides: Overrides):
        self.plan, self.overrides = plan, overrides
        self.folder = out / overrides.folder if overrides.folder else out
        self.file = self.folder / f"{plan.name}.jsonl"
        self._by_digest = {record["digest"]: record for record in self._read()}

    def _read(self) -> list[dict[str, Any]]:
        if not self.file.exists():
            return []
        try:
            found = [json.loads(line) for line in self.file.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise M3DError(f"{str(self.file)!r} is damaged: {error}") from error
        if not all(isinstance(record, dict) and "digest" in record for record in found):
            raise M3DError(f"{str(self.file)!r} holds a line that is no record of a cell")
        return found

    def of(self, cell: Cell) -> Record | None:
        """The record of a finished cell; None for one that is not."""
        return self._by_digest.get(cell_digest(cell, self.overrides))

    def add(self, cell: Cell, record: Mapping[str, Any]) -> dict[str, Any]:
        """Write a cell's record down, with what identifies it."""
        from m3d.files import append_line  # brings PyTorch, which reading and planning do without

        digest = cell_digest(cell, self.overrides)
        identity = {"plan": self.plan.name, "cell": cell.key, "digest": digest, "overrides": self.overrides.given()}
        whole = {**identity, **record}
        append_line(self.file, whole)
        self._by_digest[digest] = whole
        return whole

    def forget(self, cells: Sequence[Cell]) -> None:
        """Drop the records of ``cells``, so that they are made again."""
        from m3d.files import write_bytes

        dropped = {cell_digest(cell, self.overrides) for cell in cells} & set(self._by_digest)
        if not dropped:
            return
        kept = [record for record in self._read() if record["digest"] not in dropped]
        write_bytes(self.file, "".join(json.dumps(record) + "\n" for record in kept).encode())
        for digest in dropped:
            del self._by_digest[digest]

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
        return Place(statistics.fmean(means), statistics.stdev(means), n, len(means))


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
        return Place(sum(part["seconds"] for part in parts) / unit) if steps else None

    return seconds


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
    "distance": _distance("normalised"),
    "raw distance": _distance("raw"),
    "seen by": lambda record, which: Place(record["seen"][which]),
    "fingerprint": _fingerprint,
}


def lock(folder: Path) -> AbstractContextManager[None]:
    """Refuse to work where another process is at work."""
    return claim(folder, "m3d reproduce")
