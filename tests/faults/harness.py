"""Kill a run at random moments of its life, let it go on each time, and compare the end with an undisturbed run."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from m3d import api
from m3d.condensed import CondensedSet
from m3d.data import load_data
from m3d.evaluation import evaluate, make_protocol
from m3d.files import sweep, write_json
from m3d.run_folder import RunFolder
from m3d.runtime import Runtime
from tests.faults.lives import Notes, live

PAUSE = 0.004  # seconds a child waits after every piece it writes
NET = "convnet2:width=8"
_CHECKPOINT_SECONDS = 0.02
_TEAR_EVERY = 10  # kills after which the newest checkpoint is damaged too, as a power cut on a careless disk might
_LIVES = 12  # about so many lives take a run to its end
_MOST_KILLS = 16  # of one run: on a busy machine lives get less done, and too few ends would be compared


@dataclass
class Tally:
    """What happened to the runs of one kind."""

    kind: str
    kills: int = 0
    runs: int = 0
    identical: int = 0
    in_write: int = 0  # kills inside a checkpoint write
    between: int = 0  # of these, kills between its two renames: only the checkpoint before is there
    torn: int = 0  # checkpoints then damaged by the harness
    fell_back: int = 0  # resumes from the checkpoint before
    checkpoints: int = 0
    locks: int = 0  # locks of killed processes taken over
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.kind}: {self.kills} kills over {self.runs} runs, {self.in_write} inside a checkpoint write "
            f"({self.between} between its renames), {self.torn} checkpoints torn besides, {self.fell_back} falls back "
            f"to the checkpoint before, {self.checkpoints} checkpoints written, {self.locks} stale locks taken over; "
            f"{self.identical} of {self.runs} results bit-identical to the undisturbed one; {self.seconds:.0f} s"
        )


@dataclass(frozen=True)
class Job:
    """Work that can be begun or continued in a folder, and what it leaves."""

    name: str
    work: Callable[[Path], None]
    result: Callable[[Path], object]
    newest: str  # pattern of its checkpoint's name
    steps: int


def make_data(folder: Path) -> Path:
    """Three classes of noisy patterns as an .npz."""
    generator = np.random.default_rng(0)
    patterns = generator.integers(40, 215, (3, 1, 8, 8, 3))
    arrays = {}
    for name, n in (("train", 12), ("test", 4)):
        images = np.clip(patterns + generator.normal(0, 20, (3, n, 8, 8, 3)), 0, 255).astype(np.uint8)
        arrays |= {f"x_{name}": images.reshape(-1, 8, 8, 3), f"y_{name}": np.repeat(np.arange(3), n)}
    np.savez(folder / "tiny.npz", **arrays)
    return folder / "tiny.npz"


def condensing(
    data: Path, method: str, steps: int, options: dict[str, object], every: float = _CHECKPOINT_SECONDS
) -> Job:
    """A condensation, resumed where there is a run and begun where there is none yet."""

    def work(folder: Path) -> None:
        if (folder / RunFolder.RUN).exists():
            api.resume(folder)
        else:
            api.condense(data, 1, method, net=NET, out=folder, checkpoint_seconds=every, steps=steps, **options)

    def result(folder: Path) -> object:
        made = CondensedSet.load(folder)
        return (made.fingerprint, made.labels.tolist(), made.manifest["loss"], (folder / "history.csv").read_text())

    return Job(f"condensation by {method}", work, result, RunFolder.CHECKPOINT, steps)


def evaluating(data: Path, condensed: Path, epochs: int, every: float = _CHECKPOINT_SECONDS) -> Job:
    """An evaluation whose numbers are written down at its end."""

    def work(folder: Path) -> None:
        made = evaluate(
            CondensedSet.load(condensed),
            load_data(data),
            net=NET,
            protocol=make_protocol("paper", epochs=epochs),
            repeats=2,
            runtime=Runtime.choose("cpu"),
            folder=RunFolder(folder),
            checkpoint_seconds=every,
        )
        sweep(folder / "answer.json")  # this file is ours, and so is what a kill left of it
        write_json(folder / "answer.json", {"last": made.last, "best": made.best, "checks": made.checks})

    def result(folder: Path) -> object:
        return json.loads((folder / "answer.json").read_text())

    return Job("evaluation", work, result, "evaluation-????????????????.safetensors", epochs)


def torment(jobs: list[Job], kills: int, place: Path, seed: int, kind: str) -> Tally:
    """Kill the jobs' processes ``kills`` times in all, in as many runs as that takes; every run must end as if never
    disturbed, with nothing half written left in its folder."""
    tally, notes, chance, began = Tally(kind), Notes(), random.Random(seed), time.monotonic()
    expected, names, spans = {}, {}, {}
    for job in jobs:
        start = time.monotonic()
        live(lambda job=job: job.work(place / "whole"), notes, PAUSE, None)
        first, end = notes["first"] / 1e9 - start, time.monotonic() - start
        spans[job.name] = first + (end - first) / _LIVES * 2  # a moment is uniform: half of it on average
        expected[job.name], names[job.name] = job.result(place / "whole"), contents(place / "whole")
        shutil.rmtree(place / "whole")
    notes = Notes()
    for number, job in _until(jobs, lambda: tally.kills >= kills):
        folder = place / f"run-{number}"
        _one_run(job, folder, kills, spans[job.name], notes, chance, tally)
        if contents(folder) != names[job.name]:
            raise SystemExit(f"{job.name}, run {number}: left {contents(folder)} instead of {names[job.name]}")
        tally.runs += 1
        tally.identical += job.result(folder) == expected[job.name]
        shutil.rmtree(folder)
    tally.fell_back, tally.locks, tally.checkpoints = notes["fell_back"], notes["locks"], notes["checkpoints"]
    tally.seconds = time.monotonic() - began
    return tally


def _until(jobs: list[Job], done: Callable[[], bool]) -> Iterator[tuple[int, Job]]:
    """The jobs round and round, each at least once, until ``done``."""
    for number, job in enumerate(cycle(jobs)):
        if number >= len(jobs) and done():
            return
        yield number, job


def _one_run(
    job: Job, folder: Path, kills: int, span: float, notes: Notes, chance: random.Random, tally: Tally
) -> None:
    """One run from its beginning to its end through as many lives as it takes."""
    most = min(kills, tally.kills + _MOST_KILLS)
    while True:
        seconds = chance.uniform(0, span) if tally.kills < most else None
        if live(lambda: job.work(folder), notes, PAUSE, seconds):
            return
        tally.kills += 1
        tally.in_write += notes["writing"]
        tally.between += notes["writing"] and notes["between"]
        newest, previous = checkpoints(folder, job)
        needed = not (folder / RunFolder.CONDENSED).exists()  # nobody reads the checkpoints of a finished run
        if newest and previous and needed and tally.kills % _TEAR_EVERY == 0:
            _tear(newest[0], chance)
            tally.torn += 1


def contents(folder: Path) -> list[str]:
    """The names of all that lies below ``folder``."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def checkpoints(folder: Path, job: Job) -> tuple[list[Path], list[Path]]:
    """The job's newest checkpoint and the one before, where they are."""
    previous = job.newest.replace(".safetensors", ".previous.safetensors")
    return list(folder.glob(job.newest)), list(folder.glob(previous))


def _tear(file: Path, chance: random.Random) -> None:
    """Lose the end of a file, or some bytes in it."""
    content = bytearray(file.read_bytes())
    at = chance.randrange(len(content))
    if chance.random() < 0.5:
        del content[at:]
    else:
        content[at] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def summary(tallies: Sequence[Any]) -> str:
    return json.dumps([asdict(t) for t in tallies])
