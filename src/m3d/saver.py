"""Checkpoints of one evaluation, which then goes on where it was stopped."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from m3d.errors import Interrupted, M3DError
from m3d.files import read_newest, set_aside, sweep, write_checked
from m3d.lock import claim
from m3d.run_folder import RunFolder
from m3d.train import Trainer


class Saver:
    """Checkpoints of one evaluation in its run's folder; without a folder, nothing is written and nothing resumed."""

    def __init__(self, folder: RunFolder | None, every: float):
        self._folder, self._every = folder, every
        self._last = time.perf_counter()
        self._path: Path | None = None
        self._previous = Path()

    @contextmanager
    def claimed(self, record: Mapping[str, Any]) -> Iterator[None]:
        """Hold this one evaluation against other processes; other evaluations of the same set may run beside it.

        A checkpoint's name is a digest of everything that decides its outcome, so another evaluation never takes it.
        """
        if self._folder is None:
            yield
            return
        digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
        name = f"evaluation-{digest}"
        self._path, self._previous = (self._folder / f"{name}{end}.safetensors" for end in ("", ".previous"))
        with claim(self._folder.path, "m3d evaluate", f".{name}.lock"):
            sweep(self._path)
            yield

    def begin(self, trainer: Trainer, checks: tuple[int, ...]) -> tuple[dict[int, Tensor], float]:
        """(accuracies measured before, seconds spent before); the trainer continues where a checkpoint left it."""
        if self._path is None:
            return {}, 0.0
        try:
            found = read_newest(self._path, self._previous)
            if found is None:
                return {}, 0.0
            tensors, state = found
            trainer.load(tensors)
            measured = {epoch: tensors[f"accuracy.{epoch}"] for epoch in checks if epoch <= trainer.epoch}
            return measured, float(state["seconds"])
        except M3DError as error:
            raise M3DError(f"{error}; delete it to begin this evaluation again") from error
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise M3DError(
                f"{str(self._path)!r} is no checkpoint of this evaluation ({error}); delete it to begin again"
            ) from error

    def tend(self, trainer: Trainer, measured: Mapping[int, Tensor], seconds: float, stopping: bool) -> None:
        """Save if it is time to, or if the work is asked to stop."""
        if stopping or (self._path is not None and time.perf_counter() - self._last > self._every):
            if self._path is not None:
                tensors = {**trainer.state(), **{f"accuracy.{epoch}": v for epoch, v in measured.items()}}
                write_checked(self._path, tensors, {"seconds": seconds}, keep=self._previous)
            self._last = time.perf_counter()
        if stopping:
            raise Interrupted(trainer.epoch, "epochs")

    def finish(self) -> None:
        if self._path is not None:
            for path in (self._path, self._previous, set_aside(self._path)):
                path.unlink(missing_ok=True)
