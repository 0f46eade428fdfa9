"""The one loop over cells: finished ones are skipped, half-made ones go on, a failed one does not stop the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from m3d.errors import Interrupted, M3DError
from m3d.grid.cells import Cell, sets_in
from m3d.grid.drift import Change, Settings, drift
from m3d.grid.journal import Journal, Record, lock
from m3d.grid.work import Measure, Place, Shelf, Watch, Workshop, forget
from m3d.runtime import stop_politely, time_limit

Cost = Callable[[Cell, set[str]], float]  # seconds a cell is thought to take beside the sets named in the second


class TimeLeft(NamedTuple):
    """How long the cells that are left may take."""

    seconds: float
    measured: bool  # whether it rests on cells made in this call, not on the plan's estimates alone


@dataclass(frozen=True)
class Listener:
    """Who is told what happens to the cells; every part is optional."""

    begin: Callable[[int, int, Cell, TimeLeft | None], None] = lambda number, of, cell, left: None
    done: Callable[[Cell, Record], None] = lambda cell, record: None
    failed: Callable[[Cell, M3DError], None] = lambda cell, error: None
    again: Callable[[Cell, str], None] = lambda cell, reason: None  # a cell is tried again
    outdated: Callable[[Cell, Sequence[Change]], None] = lambda cell, changes: None  # finished, under other defaults
    orphaned: Callable[[Record], None] = lambda record: None  # measured on a set that is made again
    running: Callable[[Mapping[str, str]], None] = lambda states: None  # what the cells at work are at, by key


@dataclass
class Summary:
    """What a call did."""

    made: int = 0
    skipped: int = 0
    failed: list[tuple[Cell, M3DError]] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """A grid to work through: its cells, where their records go, what is measured, and what they are thought to take.

    Without ``cost`` all cells are thought to take as long as those before; without ``settings`` every record counts as
    made with today's.
    """

    cells: Sequence[Cell]
    journal: Journal
    place: Place
    measures: Mapping[str, Measure] = field(default_factory=dict)
    cost: Cost | None = None
    settings: Settings | None = None


@dataclass(frozen=True)
class Order:
    """What hands are given to do."""

    job: Job
    todo: Sequence[Cell]
    begin: Callable[[Cell], None]
    listener: Listener
    watch: Watch
    stopping: threading.Event


class Attempt(NamedTuple):
    """How a cell ended, and after how many seconds."""

    cell: Cell
    outcome: Record | M3DError
    seconds: float


class Hands(Protocol):
    """Who makes cells. They return early when asked to stop."""

    @property
    def width(self) -> int:
        """How many cells are made at a time."""
        ...

    def make(self, order: Order) -> Iterator[Attempt]: ...


class Here:
    """This process, one cell after the other; ``shelf`` may hold the data already."""

    width = 1

    def __init__(self, shelf: Shelf | None = None):
        self._shelf = shelf

    def make(self, order: Order) -> Iterator[Attempt]:
        job, watch = order.job, order.watch
        watch = Watch(watch.steps, watch.epochs, order.stopping.is_set)
        workshop = Workshop(job.place, job.journal.overrides, watch, job.measures, self._shelf)
        for cell in order.todo:
            if order.stopping.is_set():
                return
            order.begin(cell)
            began = time.monotonic()
            try:  # another cell of the same content may just have been made
                outcome: Record | M3DError = job.journal.of(cell) or workshop.make(cell)
            except M3DError as error:
                outcome = error
            yield Attempt(cell, outcome, time.monotonic() - began)


class Pace:
    """Time left: the estimates of what is left, corrected by what the cells made so far took."""

    def __init__(self, cost: Cost | None, width: int, made: set[str]):
        """``made``: the names of the sets that are there already."""
        self._cost, self._width, self._made = cost, width, made
        self._expected = self._taken = 0.0

    def left(self, cells: Sequence[Cell]) -> TimeLeft | None:
        """None where nothing is known yet."""
        if self._cost is None and not self._expected:
            return None
        made = set(self._made)
        expected = sum(self._of(cell, made) for cell in cells)
        correction = self._taken / self._expected if self._expected else 1.0
        return TimeLeft(expected * correction / self._width, measured=bool(self._expected))

    def took(self, cell: Cell, seconds: float) -> None:
        self._expected += self._of(cell, self._made)
        self._taken += seconds

    def _of(self, cell: Cell, made: set[str]) -> float:
        return 1.0 if self._cost is None else self._cost(cell, made)


def run(
    job: Job,
    *,
    again: bool = False,
    seconds: float | None = None,
    listener: Listener | None = None,
    watch: Watch | None = None,
    hands: Hands | None = None,
) -> Summary:
    """Make the missing cells of ``job``; raises :class:`Interrupted` when stopped by a signal or by the time limit.

    Whatever ends it, a later call with the same settings goes on where this one stopped. With ``again`` what was made
    of the cells before is removed first. Records are written by this process, whoever makes the cells.
    """
    listener, watch, hands = listener or Listener(), watch or Watch(), hands or Here()
    summary = Summary()
    with lock(job.place.out), time_limit(seconds), stop_politely() as stopping:
        if again:
            for record in job.journal.forget(job.cells):
                listener.orphaned(record)
            forget(job.cells, job.place.out, job.journal.overrides)
        pace = Pace(job.cost, hands.width, sets_in(job.place.out))
        todo = [cell for cell in job.cells if job.journal.of(cell) is None]
        summary.skipped = len(job.cells) - len(todo)
        for cell in job.cells:
            _tell_if_outdated(job, cell, listener)
        left = list(todo)

        def begin(cell: Cell) -> None:
            listener.begin(len(todo) - len(left) + 1, len(todo), cell, pace.left(left))
            left.remove(cell)

        for attempt in hands.make(Order(job, todo, begin, listener, watch, stopping)):
            if isinstance(attempt.outcome, M3DError):
                summary.failed.append((attempt.cell, attempt.outcome))
                listener.failed(attempt.cell, attempt.outcome)
                continue
            record = job.journal.of(attempt.cell) or job.journal.add(attempt.cell, attempt.outcome)
            summary.made += 1
            pace.took(attempt.cell, attempt.seconds)
            listener.done(attempt.cell, record)
            _tell_if_outdated(job, attempt.cell, listener)  # its set may have been there before
        if stopping.is_set() and summary.made + len(summary.failed) < len(todo):
            raise Interrupted(summary.made, "cells")
    return summary


def _tell_if_outdated(job: Job, cell: Cell, listener: Listener) -> None:
    """Say where a finished cell was made with other settings than its method would take today."""
    record = job.journal.of(cell)
    if job.settings is None or record is None:
        return
    with suppress(M3DError):  # what cannot be made today cannot be compared, and is no reason to stop the others
        if changes := drift(cell, record, job.journal.overrides, job.settings):
            listener.outdated(cell, changes)
