"""The run folder: everything one condensation leaves on disk, written atomically and held by one process at a time."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from m3d.errors import M3DError
from m3d.files import append_line, read_json, read_newest, set_aside, sweep, write_bytes, write_checked, write_json
from m3d.limits import IMAGE_SUFFIXES, parse_json, plain_file
from m3d.lock import NAME as LOCK
from m3d.lock import claim
from m3d.wording import option, resuming

log = logging.getLogger(__name__)
_LOOKED_AT = 1000  # files, before a folder is taken to hold no images


class RunFolder:
    """The folder of one condensation: what was asked, its checkpoints, its set, its results."""

    CONDENSED = "condensed.safetensors"
    BEST = "best.safetensors"
    CHECKPOINT = "checkpoint.safetensors"
    PREVIOUS = "checkpoint.previous.safetensors"
    RUN = "run.json"
    HISTORY = "history.csv"
    RESULTS = "results.jsonl"
    _KNOWN = (CONDENSED, BEST, CHECKPOINT, PREVIOUS, HISTORY, RESULTS)

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def finished(self) -> bool:
        return (self / self.CONDENSED).exists()

    @contextmanager
    def claimed(self, work: str) -> Iterator[None]:
        """Hold the folder against other processes, and remove what killed ones left half written."""
        self._require_folder()
        with claim(self.path, work):
            for name in (*self._KNOWN, self.RUN):
                if name != self.RESULTS:  # who adds a result sweeps for itself, and may be at it now
                    sweep(self / name)
            for leftover in self.path.glob(".step-*.safetensors.????????"):
                leftover.unlink(missing_ok=True)
            yield

    def shed(self, work: str) -> None:
        """Remove from a finished run what a kill after its set was written left of it: checkpoints, parts, the lock.

        Where that cannot be (another process holds the folder, it may not be written) it is said, and the set serves
        all the same.
        """
        if not any(path.exists() for path in (*self._checkpoints(), *self._subtasks(), self / LOCK)):
            return
        try:
            with self.claimed(work):
                if self.finished:  # asked again: before the folder was ours, another may have begun the run anew
                    self.drop_checkpoints()
        except (M3DError, OSError) as error:
            log.warning("what the finished run in %r no longer needs stays there: %s", str(self.path), error)

    def kept(self, step: int) -> Path:
        """Where the set as it was after ``step`` steps is kept, if it is."""
        return self / f"step-{step}.safetensors"

    def begin(self, request: Mapping[str, Any], overwrite: bool = False) -> None:
        """Begin a new run and write down what was asked."""
        self.require_free(overwrite)
        if (self / self.RUN).exists() or self.finished:
            self._clear()
        write_json(self / self.RUN, dict(request))

    def unbegin(self) -> None:
        """Forget what was asked of a run that ended by an error before it left anything: it could only end so again,
        and would stand in the way of a better one."""
        left = (*self._checkpoints(), *self._subtasks(), *self.path.glob("step-*.safetensors"))
        if self.finished or any(path.exists() for path in left):
            return
        (self / self.RUN).unlink(missing_ok=True)

    def require_free(self, overwrite: bool = False) -> None:
        """Raise if a run lies here that may not be replaced, or somebody's images, or if this is no folder."""
        begun = (self / self.RUN).exists() or self.finished
        if not begun and (strange := self._images_of_others()) is not None:
            raise M3DError(
                f"{str(self.path)!r} holds images that are not a run's ({strange}); choose another {option('out')}"
            )
        if begun and not overwrite:
            what, first = "a run", f"continue it with {resuming(self.path)}"
            if self.finished:
                what, first = "a run, which is finished", f"look at it with m3d show {self.path}"
            raise M3DError(
                f"{str(self.path)!r} already holds {what}; {first}, choose another {option('out')}, "
                f"or pass {option('overwrite', True)}"
            )
        self._require_folder()

    def _images_of_others(self) -> Path | None:
        """The first image in a folder, or a folder of folders, here: data, which a run's files must not mix with."""
        for pattern in ("*/*", "*/*/*"):
            for path in islice(self.path.glob(pattern), _LOOKED_AT):
                inside = path.relative_to(self.path)
                if path.suffix.lower() in IMAGE_SUFFIXES and not inside.parts[0].startswith("imagefolder"):
                    return inside
        return None

    def _require_folder(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise M3DError(f"{str(self.path)!r} is a file; {option('out')} must name a folder")

    def _clear(self) -> None:
        """Remove all that an earlier run left here, its pictures and exports too: they would not show the new set."""
        files, folders = ["loss.png", "evaluation-*", "step-*.safetensors"], []
        for of_set in ("", "-best", "-step-*"):
            files += [f"images{of_set}.png", f"condensed{of_set}.npz", f"condensed{of_set}.pt"]
            folders.append(f"imagefolder{of_set}")
        for path in (*(self / name for name in self._KNOWN), *(p for name in files for p in self.path.glob(name))):
            if not path.is_dir():
                path.unlink(missing_ok=True)
        for path in (p for name in folders for p in self.path.glob(name)):
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)
        self.drop_checkpoints()

    def subtask(self, number: int, of: int) -> RunFolder:
        """Where part ``number`` (from 0) of a run that is made in ``of`` parts keeps its checkpoints."""
        return RunFolder(self / f"subtask-{number + 1}-of-{of}")

    def require_writable(self) -> None:
        """Raise, before long work, if nothing could be kept here afterwards."""
        probe = self / ".writable"
        write_bytes(probe, b"")
        probe.unlink(missing_ok=True)

    def request(self) -> dict[str, Any]:
        """What was asked of the run."""
        if not (self / self.RUN).exists():
            what = f"is not a run folder: it has no {self.RUN}" if self.path.exists() else "does not exist"
            raise M3DError(f"{str(self.path)!r} {what}")
        return read_json(self / self.RUN)

    def save_checkpoint(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Write a checkpoint; the one before stays as a fall-back."""
        write_checked(self / self.CHECKPOINT, tensors, state, keep=self / self.PREVIOUS)

    def require_finished(self) -> None:
        """Refuse a run that was stopped, and say how it goes on."""
        if (self / self.RUN).exists() and not (self / self.CONDENSED).exists():
            raise M3DError(f"{str(self.path)!r} is not finished; go on with: {resuming(self.path)}")

    def load_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """(tensors, state) of the newest whole checkpoint, or None if there is none."""
        try:
            return read_newest(self / self.CHECKPOINT, self / self.PREVIOUS)
        except M3DError as error:
            raise M3DError(
                f"{error}; no whole checkpoint is left, begin again with {option('overwrite', True)}"
            ) from error

    def drop_checkpoints(self) -> None:
        """Remove the checkpoints of a finished run, and those of its parts."""
        for path in self._checkpoints():
            path.unlink(missing_ok=True)
        for part in self._subtasks():
            shutil.rmtree(part, ignore_errors=True)

    def _checkpoints(self) -> tuple[Path, ...]:
        newest = self / self.CHECKPOINT
        return newest, self / self.PREVIOUS, set_aside(newest)

    def _subtasks(self) -> list[Path]:
        return list(self.path.glob("subtask-*-of-*"))

    def write_history(self, losses: Iterable[float]) -> None:
        rows = "".join(f"{step},{loss:.9g}\n" for step, loss in enumerate(losses))
        write_bytes(self / self.HISTORY, ("step,loss\n" + rows).encode())

    def add_result(self, record: Mapping[str, Any]) -> None:
        append_line(self / self.RESULTS, dict(record))

    def results(self) -> list[dict[str, Any]]:
        file = self / self.RESULTS
        if not file.exists():
            return []
        plain_file(file)
        try:
            return [parse_json(line, f"a line of {str(file)!r}") for line in file.read_bytes().splitlines()]
        except OSError as error:
            raise M3DError(f"cannot read {str(file)!r}: {error.strerror or error}") from error


def kept_as(run: Path) -> str:
    """What a set in a run folder is called where it is not the run's last one: ``best``, ``step-1000``; else empty."""
    return "" if run.is_dir() or run.name == RunFolder.CONDENSED else run.stem


def home_of(run: Path) -> tuple[RunFolder | None, dict[str, str]]:
    """Where the results of a set are written down, and what they say of it where it is not its run's last one.

    None for a set by itself, or in an archive: it can be measured all the same.
    """
    if not run.is_file():
        folder = RunFolder(run)
        folder.require_writable()
        return folder, {}
    folder = RunFolder(run.parent)
    try:
        folder.request()
        folder.require_writable()
    except M3DError:
        return None, {}
    return folder, {"kept_as": name} if (name := kept_as(run)) else {}
