"""What a person sees while a grid is worked through."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from m3d.errors import M3DError
from m3d.grid.cells import Cell
from m3d.grid.drift import Change
from m3d.grid.journal import Record
from m3d.terminal import clear_bars, duration, epoch_bar, progress_bar, status_line

if TYPE_CHECKING:
    from m3d.grid.runner import Listener, TimeLeft
    from m3d.grid.work import Watch


def check_time_limit(seconds: float | None) -> None:
    if seconds is not None and not seconds > 0:
        raise M3DError(f"--time-limit {seconds} is not valid; allowed: a positive number of seconds")


def say_record(record: Record) -> None:
    """One line of JSON; a picture's pixels are for the file."""
    typer.echo(json.dumps({k: v for k, v in record.items() if k != "picture"}))


@dataclass(frozen=True)
class Telling:
    """Lines about cells as they begin, end, fail and are tried again; with ``as_json`` their records only."""

    headline: Callable[[Cell, Record], str]
    as_json: bool = False
    records: bool = True  # whether, with ``as_json``, records are printed as they come
    estimates_for: str = ""  # the machine whose times the plan's estimates are

    @contextmanager
    def watched(self) -> Iterator[tuple[Listener, Watch]]:
        from m3d.grid.runner import Listener
        from m3d.grid.work import Watch

        with progress_bar(self.as_json) as bar, epoch_bar(self.as_json) as epochs, status_line(self.as_json) as status:
            told = Listener(
                begin=self._begin,
                done=self._done,
                failed=self._failed,
                again=self._again,
                outdated=self._outdated,
                orphaned=self._orphaned,
                running=status,
            )
            yield told, Watch(bar, epochs)

    def _begin(self, number: int, of: int, cell: Cell, left: TimeLeft | None) -> None:
        clear_bars()
        if not self.as_json:
            time = "" if left is None else f": about {duration(left.seconds)} left"
            where = f", on {self.estimates_for}" if left and not left.measured and self.estimates_for else ""
            typer.echo(f"[{number} of {of}] {cell.key}{time}{where}", err=True)

    def _done(self, cell: Cell, record: Record) -> None:
        if not self.as_json:
            typer.echo(f"{cell.key}: {self.headline(cell, record)}")
        elif self.records:
            say_record(record)

    def _failed(self, cell: Cell, error: M3DError) -> None:
        clear_bars()
        typer.echo("m3d: " + " ".join(f"{cell.key}: {error}".split()), err=True)

    def _again(self, cell: Cell, reason: str) -> None:
        typer.echo("m3d: " + " ".join(f"{cell.key}: {reason}; tried again".split()), err=True)

    def _outdated(self, cell: Cell, changes: Sequence[Change]) -> None:
        was = ", ".join(map(str, changes))
        typer.echo(f"m3d: {cell.key} was made with {was}; --again makes it anew", err=True)

    def _orphaned(self, record: Record) -> None:
        place = f"{record['plan']} {record['cell']}"
        typer.echo(f"m3d: {place} was measured on a set that is made again; --again there measures it anew", err=True)
