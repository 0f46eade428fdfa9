"""Whether a record still says what this version would do: a cell names some options and leaves others to its method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from m3d.earlier import completed
from m3d.grid.cells import WHOLE, Cell, Overrides, Source
from m3d.grid.journal import Record

Settings = Callable[[Source], Mapping[str, Any]]  # every option with which a set would be made today


class Change(NamedTuple):
    """An option of a recorded set that would have another value today."""

    option: str
    then: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.option}={self.then} (today {self.now})"


def drift(cell: Cell, record: Record, overrides: Overrides, settings: Settings) -> list[Change]:
    """What has changed since the sets of a finished cell were made.

    Only what both sides name can be compared: most options that came later, and values that early records left open,
    cannot.
    """
    changes: dict[str, Change] = {}  # sub-tasks share their options
    for source, made in zip(cell.sources, record.get("condensation", ()), strict=False):
        if source.method == WHOLE:
            continue
        today = settings(overrides.source(source))
        then = completed(made.get("options", {}), today)
        for option, now in today.items():
            if None not in (now, then.get(option)) and now != then[option]:
                changes[option] = Change(option, then[option], now)
    return list(changes.values())
