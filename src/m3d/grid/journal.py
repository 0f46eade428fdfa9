"""What came out, one JSON record per cell in a file of lines; only one process at a time writes below a folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from m3d.errors import M3DError
from m3d.grid.cells import Cell, Overrides, cell_digest
from m3d.lock import claim

Record = Mapping[str, Any]


class Journal:
    """The records of the grid called ``name``, found by what identifies their cells; other files ``beside`` its own may
    hold some of them too. Of several records of a cell its own file's counts, else one with times to rely on."""

    def __init__(self, file: Path, name: str, overrides: Overrides, beside: Iterable[Path] = ()):
        self.file, self.name, self.overrides = file, name, overrides
        self._files = [*sorted(set(beside) - {file}), file]
        self._by_digest: dict[str, dict[str, Any]] = {}
        beside_own = (record for f in self._files[:-1] for record in _read(f))
        for record in (*sorted(beside_own, key=_timed_alone), *_read(file)):
            self._by_digest[record["digest"]] = record

    def of(self, cell: Cell) -> Record | None:
        """The record of a finished cell; None for one that is not."""
        return self._by_digest.get(cell_digest(cell, self.overrides))

    def add(self, cell: Cell, record: Record) -> dict[str, Any]:
        """Write a cell's record down, with what identifies it."""
        from m3d.files import append_line  # brings PyTorch, which reading and planning do without

        digest = cell_digest(cell, self.overrides)
        identity = {"plan": self.name, "cell": cell.key, "digest": digest, "overrides": self.overrides.given()}
        whole = {**identity, **record, **identity}  # first of all, and not to be overwritten by what was measured
        append_line(self.file, whole)
        self._by_digest[digest] = whole
        return whole

    def forget(self, cells: Sequence[Cell]) -> list[Record]:
        """Drop the records of ``cells``, so that they are made again; returns those of other cells of the same sets."""
        from m3d.files import write_bytes

        dropped = {cell_digest(cell, self.overrides) for cell in cells} & set(self._by_digest)
        sets = {self._by_digest[digest].get("set") for digest in dropped} - {None}
        for file in self._files if dropped else ():
            found = _read(file)
            kept = [record for record in found if record["digest"] not in dropped]
            if len(kept) < len(found):
                write_bytes(file, "".join(json.dumps(record) + "\n" for record in kept).encode())
        for digest in dropped:
            del self._by_digest[digest]
        return [record for record in self._by_digest.values() if record.get("set") in sets]


def _timed_alone(record: Record) -> bool:
    """Whether what made its sets had the device to itself."""
    return not any("device_share" in part for part in record.get("condensation", ()))


def _read(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    try:
        found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise M3DError(f"{str(file)!r} is damaged: {error}") from error
    if not all(isinstance(record, dict) and "digest" in record for record in found):
        raise M3DError(f"{str(file)!r} holds a line that is no record of a cell")
    return found


def lock(folder: Path) -> AbstractContextManager[None]:
    """Refuse to work where another process is at work."""
    return claim(folder, "m3d reproduce or sweep")
