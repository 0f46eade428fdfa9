"""The one loop: a frozen Method record in, synthetic pixels out. It knows protocols, never a concrete method."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from m3d.costs import borrowing
from m3d.course import require_no_rise, require_numbers, require_unsaturated, saturated
from m3d.data.classes import Dataset
from m3d.errors import Interrupted, M3DError
from m3d.method import Method
from m3d.nets.flat import FlatNet
from m3d.run_folder import RunFolder
from m3d.runtime import Repeated, Runtime, out_of_memory, stop_politely
from m3d.shards import Shard
from m3d.step import BLOCK, Step
from m3d.watch import Outcome, Progress, Snapshot, Watch
from m3d.wording import option

log = logging.getLogger(__name__)
_REPORT_SECONDS = 0.5


def condense(
    method: Method,
    data: Dataset,
    net: FlatNet,
    ipc: int,
    seed: int,
    runtime: Runtime,
    watch: Watch | None = None,
    shard: Shard | None = None,
) -> Outcome:
    """Condense ``data`` (already on the runtime's device) to ``ipc`` images per class.

    A checkpoint in ``watch.folder`` is continued: the result is bit-identical to a run that never stopped wherever the
    run itself is reproducible. With a ``shard`` of several processes each moves its own classes, and all return the
    whole outcome.
    """
    watch, shard = watch or Watch(), shard or Shard(range(data.classes))
    if ipc < 1:
        raise M3DError(f"ipc={ipc} is not valid; allowed: 1 and more images per class")
    began = time.perf_counter()
    with runtime.active(), borrowing() as borrowed:
        start = method.init(data, method.tiles.count(ipc, data.shape), seed, runtime, shard.ranks)
        pixels = method.tiles.encode(start)
        own = pixels[shard.mine.start : shard.mine.stop]
        step = None if method.matching is None else Step(method, data, net, own, seed, runtime, shard)
        paid = borrowed.seconds if watch.pays_for_networks else 0.0
        if step is None:
            outcome = Outcome(pixels[shard.run.start : shard.run.stop].cpu(), [], paid + time.perf_counter() - began)
        else:
            outcome = _Run(step, watch, began, paid).finish()
        return replace(outcome, borrowed_memory=borrowed.memory)


class _Run:
    """One condensation from its first or its checkpointed step to its last."""

    def __init__(self, state: Step, watch: Watch, began: float, paid: float):
        self.state, self.watch = state, watch
        self.matching, self.data, self.runtime, self.shard = state.matching, state.data, state.runtime, state.shard
        self.advance = Repeated(self.state.advance, self.runtime)
        self.step = 0
        self.losses: list[float] = []
        self.judged: list[tuple[int, float]] = []
        self.best: tuple[Tensor, int, float] | None = None
        self.best_learned: dict[str, float] = {}
        self.starting = paid
        self._earlier_seconds = paid  # by runs that trained networks this one uses; a checkpoint's count has it already
        self.saturated_at_first = self._saturated()
        self._load()
        self._start = began  # choosing the first images counts
        self._last_save = self._last_report = self._last_meeting = time.perf_counter()
        self._last_step = self.step
        self._met = self.step
        self._next_meeting = self.step + 1

    @property
    def seconds(self) -> float:
        return self._earlier_seconds + time.perf_counter() - self._start

    def finish(self) -> Outcome:
        self.state.refill(self.step)
        self.state.pool.restore(self.step)
        agreed = self.shard.ranks.any
        self._judge_if_due()  # a stop during the last judgement left it to be made again
        with stop_politely() as stopping:
            first = self.step + 1
            while self.step < self.matching.steps:
                self._one_step()
                if self.step == first:
                    self._started()
                if self.step < self._next_meeting:
                    continue
                # What one process has a reason to do, all do, at the same step.
                if agreed(self._flush_due()):
                    self._flush()
                self._keep_if_due()
                self._judge_if_due()
                if agreed(stopping.is_set()):
                    self._flush()
                    self._save()
                    raise Interrupted(self.step)
                if agreed(self._save_due()):
                    self._flush()
                    self._save()
                self._plan_meeting()
        self._flush()
        if self.watch.keep_end:
            self._save()
        learned = self.state.learned_numbers()
        return Outcome(
            self._pixels(),
            self.losses,
            self.seconds,
            self.best,
            self.judged,
            learned,
            self.best_learned,
            starting=self.starting,
        )

    def _one_step(self) -> None:
        if self.step % BLOCK == 0:
            self.state.refill(self.step)
        if self.state.pool.due(self.step):
            self.state.pool.draw(self.step)
        self.state.real.bring(self.step)
        while True:
            try:
                self.advance()
                break
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                self._take_fewer_classes(error)
        self.state.pool.age(self.step)
        self.step += 1

    def _started(self) -> None:
        """Kernels are built and networks trained: only from here on do seconds of runs compare."""
        self.runtime.wait()
        self.starting += time.perf_counter() - self._start

    def _take_fewer_classes(self, error: RuntimeError) -> None:
        """Half as many classes at a time. Memory runs out where activations are made, before anything moved, so the
        step is simply tried again."""
        if self.state.chunk == 1 or self.state.together:
            raise M3DError(
                f"step {self.step} does not fit into memory with {self.state.chunk} class(es) at a time; "
                f"lower {option('batch_real')}, {option('ipc')} or {option('size')}"
            ) from error
        self.state.take_fewer_classes()
        log.warning("not enough memory: %d classes at a time from here on", self.state.chunk)
        if self.runtime.device.type == "cuda":
            torch.cuda.empty_cache()
        self.advance = Repeated(self.state.advance, self.runtime)  # what was recorded belongs to the larger chunk

    def _plan_meeting(self) -> None:
        """Agree when all processes are at the same step again: about twice a second, so that a step costs no
        communication, and wherever something is due. One process alone meets itself after every step."""
        now, ranks = time.perf_counter(), self.shard.ranks
        (slowest,) = ranks.most((now - self._last_meeting) / max(1, self.step - self._met))
        ahead = 1 if ranks.alone else int(min(BLOCK, max(1.0, _REPORT_SECONDS / max(slowest, 1e-9))))
        rhythms = (BLOCK, self.watch.judge_every, self.watch.keep_every)
        due = [self.step - self.step % every + every for every in rhythms if every]
        self._next_meeting = min(self.step + ahead, *due, self.matching.steps)
        self._last_meeting, self._met = now, self.step

    def _flush_due(self) -> bool:
        late = time.perf_counter() - self._last_report > _REPORT_SECONDS
        return self.step % BLOCK == 0 or late

    def _flush(self) -> None:
        """Fetch the losses of the steps since the last flush, check and report them."""
        new = self.step - len(self.losses)
        if new == 0:
            return
        first = len(self.losses) % BLOCK
        own = self.state.losses[first : first + new].cpu()  # [new, c]; a flush is all that waits for the device
        block = self.shard.whole(own.mT.contiguous()).mT.contiguous()  # [new, C]
        require_numbers(block, len(self.losses), self._class_names)
        self.losses += block.mean(1).tolist()
        # At set steps, not whenever there is a flush: on a slow machine as on a fast one a run ends or goes on alike.
        if self.step % BLOCK == 0 or self.step == self.matching.steps:
            require_no_rise(self.losses, block, self.matching.diverged_at, self._class_names)
            if self.matching.bounded:
                require_unsaturated(self._saturated(), self.saturated_at_first, self.step)
        now = time.perf_counter()
        if self.watch.report is not None:
            rate = (self.step - self._last_step) / max(now - self._last_report, 1e-9)
            judged = self.judged[-1] if self.judged else None
            self.watch.report(Progress(self.step, self.matching.steps, self.losses[-1], self.seconds, rate, judged))
        self._last_report, self._last_step = now, self.step

    @property
    def _class_names(self) -> tuple[str, ...]:
        return self.data.class_names[self.shard.run.start : self.shard.run.stop]

    def _saturated(self) -> float:
        """The share of pixels at the ends of their range, over the classes of all processes."""
        return float(self.shard.whole(saturated(self.state.synthetic.pixels().detach()).cpu()).mean())

    def _pixels(self) -> Tensor:
        """A copy on the CPU: what is judged or returned must not change with the next step."""
        pixels = self.shard.whole(self.state.result(self.step)).to("cpu", copy=True)
        return pixels.clamp_(0, 1) if self.matching.bounded else pixels  # the way back from standardised ones rounds

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._pixels(), self.step, self.seconds, self.state.learned_numbers())

    def _keep_if_due(self) -> None:
        """Hand the images of this step to who keeps them. After a kill a step may come twice, with the same images."""
        every, keep = self.watch.keep_every, self.watch.keep
        if keep is None or not every or self.step % every or self.step == self.matching.steps:
            return
        now = self._snapshot()
        if self.shard.ranks.leads:
            keep(now)

    def _judge_if_due(self) -> None:
        every, judge = self.watch.judge_every, self.watch.judge
        done = bool(self.judged) and self.judged[-1][0] == self.step
        if judge is None or not every or self.step == 0 or self.step % every or done:
            return
        self._flush()  # numbers that broke are the reason to name
        now = self._snapshot()
        accuracy = self._verdict(judge, now)
        if math.isnan(accuracy):  # the evaluation was asked to stop, and with it the run
            self._flush()
            self._save()
            raise Interrupted(self.step)
        self.judged.append((self.step, accuracy))
        if self.best is None or accuracy > self.best[2]:
            self.best, self.best_learned = (now.pixels, self.step, accuracy), now.learned

    def _verdict(self, judge: Callable[[Snapshot], float], now: Snapshot) -> float:
        """The first process's measurement, which all are told; NaN if it was interrupted."""
        accuracy = math.nan
        if self.shard.ranks.leads:
            with contextlib.suppress(Interrupted):
                accuracy = judge(now)
        return self.shard.ranks.told(accuracy)

    def _save_due(self) -> bool:
        return self.watch.folder is not None and time.perf_counter() - self._last_save > self.watch.checkpoint_seconds

    def _save(self) -> None:
        """A checkpoint of all processes, written by the first; the others wait until it is on disk."""
        folder = self.watch.folder
        if folder is None:
            return
        tensors = self.state.whole_state()
        if self.shard.ranks.leads:
            self._write(folder, tensors)
        self.shard.ranks.meet()
        self._last_save = time.perf_counter()

    def _write(self, folder: RunFolder, tensors: dict[str, Tensor]) -> None:
        tensors["history"] = torch.tensor(self.losses, dtype=torch.float64)
        seconds = {"seconds": self.seconds, "starting": self.starting}
        state: dict[str, Any] = {"step": self.step, "judged": self.judged, **seconds}
        if self.best is not None:
            tensors["best"] = self.best[0]
            state |= {"best": self.best[1:], "best_learned": self.best_learned}
        folder.save_checkpoint(tensors, state)
        folder.write_history(self.losses)

    def _load(self) -> None:
        found = self.watch.folder.load_checkpoint() if self.watch.folder is not None else None
        step = found[1].get("step") if found is not None else 0
        step = step if isinstance(step, int) else -1  # refused below, by every process alike
        last, first = self.shard.ranks.most(step, -step)
        if last != -first:
            raise M3DError(
                f"{str(self.watch.folder and self.watch.folder.path)!r}: one process finds a checkpoint of step "
                f"{-first:.0f}, another of step {last:.0f}; the run folder must be the same one for all of them"
            )
        if found is None:
            return
        tensors, state = found
        try:
            self._restore(tensors, state)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise M3DError(
                f"{str(self.watch.folder and self.watch.folder.path)!r}: the checkpoint is of another run, or of "
                f"another version of m3d: {error}"
            ) from error

    def _restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Go back to where a checkpoint was written."""
        self.losses = tensors.pop("history").tolist()
        if "best" in tensors:
            step, accuracy = state["best"]
            self.best = (tensors.pop("best"), step, accuracy)
            self.best_learned = dict(state["best_learned"])
        self.judged = [(int(s), float(a)) for s, a in state["judged"]]
        self.step, self._earlier_seconds = int(state["step"]), float(state["seconds"])
        self.starting = float(state.get("starting", 0.0))  # older checkpoints have none
        if not 0 <= self.step == len(self.losses) <= self.matching.steps:
            raise ValueError(f"step {self.step} of {self.matching.steps} with {len(self.losses)} losses")
        self.state.load_whole_state(tensors)
