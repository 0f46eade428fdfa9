"""A condensation from its request to what it leaves: checked before any long work, run whole or in parts, and kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from torch import Tensor

from m3d.condensed import CondensedSet
from m3d.data import Dataset
from m3d.engine import condense as run_engine
from m3d.errors import M3DError
from m3d.evaluation import evaluate as evaluate_set
from m3d.evaluation import make_protocol
from m3d.method import Method
from m3d.methods import METHODS, Task, make_method
from m3d.nets import check_net, make_net
from m3d.nets.flat import FlatNet
from m3d.run_folder import RunFolder
from m3d.runtime import Runtime
from m3d.shards import Ranks, Shard, split
from m3d.tiles import Tiles
from m3d.watch import Outcome, Progress, Snapshot, Watch
from m3d.wording import counted, option


class Prepared:
    """A checked request, ready to run: everything that can fail cheaply has been tried."""

    def __init__(
        self, request: Mapping[str, Any], data: Dataset, method: Method, options: dict[str, object], runtime: Runtime
    ):
        self.request, self.data, self.method, self.options, self.runtime = request, data, method, options, runtime
        self.net: str = method.network if request["net"] is None else request["net"]
        self.ranks = Ranks.from_environment()
        begun = request.get("machine")
        begun = begun if isinstance(begun, dict) else {}  # where a run is resumed
        self.begun_by, share = str(begun.get("command", "")), begun.get("device_share")
        self.begun_with = share if isinstance(share, float) else 1.0  # the part of a device that it had then
        # Runs that were begun before there were such options have neither.
        self.shards = [
            Shard(classes, self.ranks, request.get("classes_at_once"))
            for classes in split(range(data.classes), request.get("subtasks", 1))
        ]

    @contextmanager
    def together(self) -> Iterator[None]:
        """On this process's own device, in company of the other processes of the run."""
        self.runtime = self.ranks.place(self.runtime)
        same = json.dumps([self.request, self.data.train.fingerprint], default=str)
        with self.ranks.together(self.runtime, same), self.runtime.counting_memory():
            yield

    def go(self, folder: RunFolder | None, report: Callable[[Progress], None] | None) -> CondensedSet:
        request, runtime = self.request, self.runtime
        on_device = self.data.to(runtime.device)
        net = FlatNet(make_net(self.net, self.data.shape, self.data.classes), runtime.device)
        outcomes = []
        for number, shard in enumerate(self.shards):
            watch = self._watch(number, folder, report)
            outcomes.append(
                run_engine(self.method, on_device, net, request["ipc"], request["seed"], runtime, watch, shard)
            )
        outcome = Outcome.joined(outcomes)
        result = self._set(outcome.pixels, outcome, self.method.steps, outcome.learned)
        if self.ranks.leads:
            self._keep(folder, result, outcome)
        self.ranks.meet()
        return result

    def _watch(self, number: int, folder: RunFolder | None, report: Callable[[Progress], None] | None) -> Watch:
        """What happens beside the loop of sub-task ``number``; a run that is not split is its own only one."""
        parts = len(self.shards)
        report = report if self.ranks.leads else None
        every = self.request["checkpoint_seconds"]
        if parts == 1:
            judged, kept = self.request["eval_every"], self.request.get("keep_every", 0)
            keep = None if folder is None else partial(self._keep_step, folder)
            return Watch(report, folder, every, self._judge, judged, keep, kept)

        def counted(progress: Progress) -> None:
            assert report is not None
            done = number * progress.steps
            report(replace(progress, step=done + progress.step, steps=parts * progress.steps))

        own = None if folder is None else folder.subtask(number, parts)
        pays = number == 0  # the first one has trained the networks of all, or found them
        return Watch(None if report is None else counted, own, every, keep_end=True, pays_for_networks=pays)

    def _keep_step(self, folder: RunFolder, now: Snapshot) -> None:
        """The set as it is in the middle of the run."""
        kept = self._set(now.pixels, None, now.step, now.learned)
        replace(kept, manifest={**kept.manifest, "seconds": round(now.seconds, 3)}).save(folder.kept(now.step))

    def _keep(self, folder: RunFolder | None, result: CondensedSet, outcome: Outcome) -> None:
        """Write down what a finished run leaves, then remove what it no longer needs."""
        if folder is not None:
            if outcome.losses:
                folder.write_history(outcome.losses)
            if outcome.best is not None:
                best = self._set(outcome.best[0], outcome, outcome.best[1], outcome.best_learned)
                best.save(folder / RunFolder.BEST)
            result.save(folder / RunFolder.CONDENSED)
            folder.drop_checkpoints()

    @property
    def judging(self) -> dict[str, Any]:
        """How the set is evaluated in the middle of the run."""
        return {"net": self.net, "protocol": "quick", "repeats": 3, **self.request["eval_options"]}

    def _judge(self, now: Snapshot) -> float:
        """Validation accuracy of the set as it is now."""
        learned = now.learned if all(number > 0 for number in now.learned.values()) else None  # no rate to train at
        condensed = self._set(now.pixels, None, now.step, learned)
        return evaluate_set(condensed, self.data, split="val", runtime=self.runtime, **self.judging).mean

    def _set(
        self, pixels: Tensor, outcome: Outcome | None, steps: int, learned: Mapping[str, float] | None = None
    ) -> CondensedSet:
        request, data = self.request, self.data
        manifest: dict[str, Any] = {
            "method": request["method"],
            "options": self.options,
            "ipc": request["ipc"],
            "factor": self.method.tiles.factor,
            "upsample": self.method.tiles.upsample,
            "chroma": self.method.tiles.chroma,
            "cell": self.method.tiles.cell,
            "margin": self.method.tiles.margin,
            "mean": list(data.mean),
            "std": list(data.std),
            "class_names": list(data.class_names),
            "data": {
                "name": data.name,
                "fingerprint": data.train.fingerprint,
                "recipe": dict(data.recipe),
                **data.transform,
            },
            "net": self.net,
            "seed": request["seed"],
            "steps": steps,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            **self.runtime.describe(),
        }
        if self.begun_by and self.begun_by != manifest["command"]:
            manifest["begun_by"] = self.begun_by  # the command above continued it
        if self.begun_with < 1:  # its seconds are of both sessions
            manifest["device_share"] = min(self.begun_with, manifest.get("device_share", 1.0))
        if self.ranks.world > 1:
            manifest["processes"] = self.ranks.world
        if len(self.shards) > 1:
            manifest["subtasks"] = len(self.shards)
        if self.method.matching is not None and not self.method.matching.bounded:
            manifest["bounded"] = False  # its pixels may leave [0, 1]
        if learned:
            manifest["learned"] = dict(learned)
        if outcome is not None:
            memory = max(self.runtime.peak_memory(), outcome.borrowed_memory)
            seconds = {"seconds": round(outcome.seconds, 3), "starting": round(outcome.starting, 3)}
            manifest |= {**seconds, "peak_memory": memory}
            if outcome.losses:
                manifest["loss"] = outcome.losses[steps - 1]
            if outcome.judged:
                manifest["validation"] = outcome.judged
        labels = torch.arange(data.classes).repeat_interleave(request["ipc"])
        return CondensedSet(pixels.flatten(0, 1).float(), labels, manifest)


def option_names(method: str) -> set[str]:
    """The options of the method of that name."""
    return set(METHODS.get(method).options())


def settings_of(method: str, options: Mapping[str, Any], **task: Any) -> dict[str, object]:
    """Every option of a method with its value for a task that is only described (:class:`m3d.methods.Task`)."""
    return make_method(method, Task(**task), dict(options))[1]


def check_request(request: Mapping[str, Any]) -> Runtime:
    """Check what can be checked before the data are there; where and how the run computes."""
    ipc = request["ipc"]
    if isinstance(ipc, bool) or not isinstance(ipc, int) or ipc < 1:
        raise M3DError(f"ipc={ipc!r} is not valid; allowed: a whole number of images per class, 1 and more")
    if not request["checkpoint_seconds"] > 0:
        raise M3DError(f"checkpoint_seconds={request['checkpoint_seconds']} is not valid; allowed: a positive number")
    if request["eval_every"] < 0:
        raise M3DError(f"eval_every={request['eval_every']} is not valid; allowed: 0 (never) and more")
    if request.get("keep_every", 0) < 0:
        raise M3DError(f"keep_every={request['keep_every']} is not valid; allowed: 0 (never) and more")
    METHODS.get(request["method"]).resolve(dict(request["options"]))
    if request["net"] is not None:
        check_net(request["net"])
    return Runtime.choose(request["device"], request["precision"], request["deterministic"], request["step_mode"])


def prepare(request: Mapping[str, Any], data: Dataset) -> Prepared:
    """Check everything that can be checked before any long work."""
    runtime, ipc = check_request(request), request["ipc"]
    if data.classes < 2:
        raise M3DError(f"{data.name} has one class; allowed: two and more")
    if request["eval_every"] and data.val is None:
        raise M3DError(f"eval_every needs held-out data; load a part of them apart with {option('val_fraction', 0.1)}")
    smallest = int(data.train.count.min())
    task = Task(data.name, data.shape, data.classes, ipc, data.mirror, smallest, data.cutmix)
    given = dict(request["options"])
    method, options = make_method(request["method"], task, given)
    if request["precision"] == "auto" and runtime.device.type == "cuda":
        runtime = replace(runtime, precision=method.gpu_precision)
    method.tiles.require(data.shape)

    def tiles_at(fewer: int) -> Tiles:
        return make_method(request["method"], replace(task, ipc=fewer), given)[0].tiles

    _require_images(method, options, data, ipc, tiles_at)
    for name in ("eval_every", "keep_every"):
        if request.get(name, 0) > method.steps:
            raise M3DError(f"{name}={request[name]} is more than the {method.steps} steps of the run")
    _check_counts(request, data)
    prepared = Prepared(request, data, method, options, runtime)
    net = FlatNet(make_net(prepared.net, data.shape, data.classes))
    _require_separable(prepared, net)
    _require_chunks(prepared, net)
    if request["eval_every"]:
        _check_judging(prepared.judging, data)
    return prepared


def _require_images(
    method: Method, options: Mapping[str, object], data: Dataset, ipc: int, tiles_at: Callable[[int], Tiles]
) -> None:
    """Refuse what has more cells than the smallest class has images to start from, and say what would fit."""
    tiles = method.tiles
    try:
        method.init.require(data, tiles.count(ipc, data.shape))
    except M3DError as error:
        ways = _with_fewer_cells(tiles, int(data.train.count.min()), ipc, data.shape, tiles_at)
        if "init" in options:
            ways.append(f"noise instead ({option('init', 'noise', of_method=True)})")
        what = f"{ipc} stored, which hold {counted(tiles.count(ipc, data.shape), 'images')}"
        raise M3DError(f"{error} ({what}); take {', or '.join(ways)}" if ways else f"{error} ({what})") from error


def _with_fewer_cells(
    tiles: Tiles, have: int, ipc: int, shape: tuple[int, int, int], tiles_at: Callable[[int], Tiles]
) -> list[str]:
    """The options that leave no more cells than ``have``, of each kind the one that leaves most; ``tiles_at`` another
    number of images, for which a method may have other settings."""

    def fits(other: Tiles, stored: int = ipc) -> bool:
        try:
            other.require(shape)
        except M3DError:
            return False
        return other.count(stored, shape) <= have

    heights = range(1, shape[1] + 1) if tiles.cell else ()
    ways = [
        next((f"{option('ipc', n)} at most" for n in range(ipc - 1, 0, -1) if fits(tiles_at(n), n)), None),
        option("chroma", "full", of_method=True) if tiles.halved and fits(replace(tiles, chroma="full")) else None,
        next((option("factor", f) for f in range(tiles.factor - 1, 0, -1) if fits(replace(tiles, factor=f))), None),
        next((option("cell", height, of_method=True) for height in heights if fits(replace(tiles, cell=height))), None),
    ]
    return [way for way in ways if way is not None]


def _check_judging(judging: Mapping[str, Any], data: Dataset) -> None:
    """Refuse now what would end the run at its first evaluation."""
    if isinstance(judging["protocol"], str):
        make_protocol(judging["protocol"])
    make_net(judging["net"], data.shape, data.classes)
    repeats = judging["repeats"]
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise M3DError(f"eval_options: repeats={repeats!r} is not valid; allowed: a whole number, 1 and more")


def _check_counts(request: Mapping[str, Any], data: Dataset) -> None:
    subtasks, at_once = request.get("subtasks", 1), request.get("classes_at_once")
    if not 1 <= subtasks <= data.classes:
        raise M3DError(f"subtasks={subtasks} is not valid; allowed: 1 to {data.classes}, the number of classes")
    if at_once is not None and at_once < 1:
        raise M3DError(f"classes_at_once={at_once} is not valid; allowed: 1 and more")
    for name, done in (("eval_every", "evaluated"), ("keep_every", "kept as a set")):
        if subtasks > 1 and request.get(name, 0):
            raise M3DError(f"{name}={request[name]} with subtasks={subtasks}: a part of the classes cannot be {done}")


def _require_chunks(prepared: Prepared, net: FlatNet) -> None:
    """Refuse to send fewer classes through at once where all must go together: it would save nothing."""
    matching, at_once = prepared.method.matching, prepared.request.get("classes_at_once")
    if matching is None or at_once is None or at_once >= prepared.data.classes:
        return
    if matching.together(net):
        raise M3DError(
            f"{prepared.request['method']} takes no classes_at_once={at_once}: {matching.bond(net)}, so that all go "
            f"through at once"
        )


def _require_separable(prepared: Prepared, net: FlatNet) -> None:
    """Refuse to split what would not give the same result."""
    matching, parts, world = prepared.method.matching, len(prepared.shards), prepared.ranks.world
    if matching is None or parts * world == 1:
        return
    bond = matching.bond(net)
    if bond is None and parts > 1 and getattr(matching.pool, "across_classes", False):
        bond = "its encoders are trained on the synthetic images of all classes"
    if bond is not None:
        how = option("subtasks", parts) if parts > 1 else f"torchrun with {world} processes"
        raise M3DError(
            f"{prepared.request['method']} cannot be split by {how}: {bond}; run it whole in one process on one device"
        )
