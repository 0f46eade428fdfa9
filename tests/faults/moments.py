"""Kill a short run before every single change it makes to its folder, let it go on, and compare the end.

What random kills meet once in a hundred runs (the set is there, its checkpoints are half removed) is met every time.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from m3d.run_folder import RunFolder
from tests.faults.harness import Job, checkpoints, contents
from tests.faults.lives import Notes, live

_CHANGES = ("open", "os.remove", "os.rename", "os.mkdir", "os.rmdir")  # Python's audit events, told before they happen
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass
class Moments:
    """What happened to one job that was killed at each of its moments."""

    kind: str
    moments: int = 0
    unfinished_end: int = 0  # kills after the set was there, when something that only the work needs was there too
    identical: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        late = f", {self.unfinished_end} of them after the set was there" if self.unfinished_end else ""
        return (
            f"{self.kind}: killed before each of its {self.moments} changes on the disk{late}; {self.identical} of "
            f"{self.moments} results bit-identical to the undisturbed one, no file left behind; {self.seconds:.0f} s"
        )


def each_moment(job: Job, place: Path, kind: str, prepare: Callable[[Path], None] | None = None) -> Moments:
    """Kill ``job`` in a folder that ``prepare`` filled before its first change there, its second, ... to its last."""
    tally, began = Moments(kind), time.monotonic()
    start, folder = place / "start", place / "run"
    start.mkdir()
    if prepare is not None:
        prepare(start)
    shutil.copytree(start, folder)
    _finish(job, folder)
    expected, names = job.result(folder), contents(folder)
    for number in count(1):
        shutil.rmtree(folder)
        shutil.copytree(start, folder)
        if _lived_through(job, folder, number):
            break
        tally.moments += 1
        tally.unfinished_end += (folder / RunFolder.CONDENSED).exists() and contents(folder) != names
        _finish(job, folder)
        if contents(folder) != names:
            raise SystemExit(f"{kind}, killed before change {number}: left {contents(folder)} instead of {names}")
        tally.identical += job.result(folder) == expected
    shutil.rmtree(folder)
    shutil.rmtree(start)
    tally.seconds = time.monotonic() - began
    return tally


def torn_checkpoint(job: Job) -> Callable[[Path], None]:
    """Fill a folder with the job as it was killed with two checkpoints, the newest of which was then torn."""

    def prepare(folder: Path) -> None:
        for number in count(1):
            if _lived_through(job, folder, number):
                raise AssertionError("the job never had two checkpoints")
            newest, previous = checkpoints(folder, job)
            if newest and previous:
                newest[0].write_bytes(newest[0].read_bytes()[:-5])
                return
            shutil.rmtree(folder)

    return prepare


def _finish(job: Job, folder: Path) -> None:
    assert live(lambda: job.work(folder), Notes(), 0.0, None)


def _lived_through(job: Job, folder: Path, number: int) -> bool:
    """Whether the job ended before its change ``number``, the moment it was to be killed."""

    def work() -> None:
        _die_before(number, folder)
        job.work(folder)

    return live(work, Notes(), 0.0, None)


def _die_before(number: int, folder: Path) -> None:
    """Kill this process before its change ``number`` below ``folder``. Never undone: the process is a throw-away."""
    left = count(number - 1, -1)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _CHANGES and _changes(event, arguments, folder) and next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def _changes(event: str, arguments: tuple[Any, ...], folder: Path) -> bool:
    path = arguments[0]
    if not isinstance(path, str | Path) or (event == "open" and not arguments[2] & _WRITES):
        return False
    path = Path(path)
    inside = path == folder or folder in path.parents
    return inside or (event in ("os.remove", "os.rmdir") and not path.is_absolute())  # a tree is removed by handles
