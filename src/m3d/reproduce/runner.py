"""The one loop over cells: finished ones are skipped, half-made ones go on, a failed one does not stop the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from m3d.errors import Interrupted, M3DError
from m3d.reproduce.cells import Cell, Overrides, Plan
from m3d.reproduce.cost import estimate
from m3d.reproduce.records import Record, Records, lock
from m3d.reproduce.work import Place, Watch, Workshop
from m3d.runtime import stop_politely, time_limit


@dataclass(frozen=True)
class Listener:
    """Who is told what happens to the cells; every part is optional."""

    begin: Callable[[int, int, Cell, float], None] = lambda number, of, cell, seconds_left: None
    done: Callable[[Cell, Record], None] = lambda cell, record: None
    failed: Callable[[Cell, M3DError], None] = lambda cell, error: None


@dataclass
class Summary:
    """What a call did."""

    made: int = 0
    skipped: int = 0
    failed: list[tuple[Cell, M3DError]] = field(default_factory=list)


class Pace:
    """Time left: the estimates of what is left, corrected by what the cells made so far took."""

    def __init__(self, overrides: Overrides):
        self._overrides = overrides
        self._expected = self._taken = 0.0

    def left(self, cells: Sequence[Cell]) -> float:
        made: set[str] = set()
        expected = sum(estimate(cell, self._overrides, made).seconds for cell in cells)
        return expected * (self._taken / self._expected if self._expected else 1.0)

    def took(self, cell: Cell, seconds: float) -> None:
        self._expected += estimate(cell, self._overrides).seconds
        self._taken += seconds


def run(
    plan: Plan,
    cells: Sequence[Cell],
    place: Place,
    overrides: Overrides,
    *,
    again: bool = False,
    seconds: float | None = None,
    listener: Listener | None = None,
    watch: Watch | None = None,
) -> Summary:
    """Make the missing ones of ``cells``; raises :class:`Interrupted` when stopped by a signal or by the time limit.

    Whatever ends it, a later call with the same settings goes on where this one stopped. With ``again`` what was made
    of ``cells`` before is removed first.
    """
    listener, watch = listener or Listener(), watch or Watch()
    summary, pace = Summary(), Pace(overrides)
    with lock(place.out), time_limit(seconds), stop_politely() as stopping:
        records = Records(place.out, plan, overrides)
        workshop = Workshop(place, overrides, Watch(watch.steps, watch.epochs, stopping.is_set))
        if again:
            records.forget(cells)
            for cell in cells:
                workshop.forget(cell)
        todo = [cell for cell in cells if records.of(cell) is None]
        summary.skipped = len(cells) - len(todo)
        for number, cell in enumerate(todo):
            if stopping.is_set():
                raise Interrupted(summary.made, "cells")
            listener.begin(number + 1, len(todo), cell, pace.left(todo[number:]))
            began = time.monotonic()
            known = records.of(cell)  # another cell of the same content may just have been made
            try:
                record = known or records.add(cell, workshop.make(cell))
            except M3DError as error:
                summary.failed.append((cell, error))
                listener.failed(cell, error)
                continue
            summary.made += 1
            pace.took(cell, time.monotonic() - began)
            listener.done(cell, record)
    return summary
