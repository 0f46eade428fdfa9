"""The library's front door: load data, condense it, evaluate what came out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m3d.data import Dataset, load_data
from m3d.engine import Outcome, Progress, Watch
from m3d.engine import condense as run_engine
from m3d.errors import M3DError
from m3d.evaluation import Result
from m3d.evaluation import evaluate as evaluate_set
from m3d.method import Method
from m3d.methods import Task, make_method
from m3d.nets import make_net
from m3d.nets.flat import FlatNet
from m3d.ranking import Ranking
from m3d.ranking import rank as rank_set
from m3d.registry import canonical
from m3d.runtime import Runtime
from m3d.shards import Ranks, Shard, split
from m3d.store import CondensedSet, RunFolder
from m3d.teachers import Teachers
from m3d.teachers import relabel as relabel_set


def condense(
    data: str | Path | Dataset,
    ipc: int = 1,
    method: str = "m3d",
    *,
    net: str | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    overwrite: bool = False,
    device: str = "auto",
    precision: str = "auto",
    deterministic: bool = False,
    step_mode: str = "auto",
    checkpoint_seconds: float = 60.0,
    subtasks: int = 1,
    classes_at_once: int | None = None,
    eval_every: int = 0,
    eval_options: Mapping[str, Any] | None = None,
    load_options: Mapping[str, Any] | None = None,
    report: Callable[[Progress], None] | None = None,
    **options: Any,
) -> CondensedSet:
    """Condense ``data`` to ``ipc`` images per class; ``options`` are the method's own (``m3d list methods NAME``).

    Without ``net`` images are matched through the method's own network. With ``out`` the run is kept in that folder:
    checkpoints, history, and the condensed set at the end. Started by ``torchrun``, several processes share the
    classes; with ``subtasks`` groups of classes are condensed one after the other.
    """
    request: dict[str, Any] = {
        "ipc": ipc,
        "method": canonical(method),
        "options": options,
        "net": net,
        "seed": seed,
        "device": device,
        "precision": precision,
        "deterministic": deterministic,
        "step_mode": step_mode,
        "checkpoint_seconds": checkpoint_seconds,
        "subtasks": subtasks,
        "classes_at_once": classes_at_once,
        "eval_every": eval_every,
        "eval_options": dict(eval_options or {}),
    }
    dataset = data if isinstance(data, Dataset) else load_data(data, **dict(load_options or {}))
    request["data"] = dict(dataset.recipe)
    run = _prepare(request, dataset)
    # what was left to choose is written down: a resumed run keeps it
    request |= {"net": run.net, "device": str(run.runtime.device), "precision": run.runtime.precision}
    folder = RunFolder(out) if out is not None else None
    with run.together(), _claimed(folder, run.ranks, "m3d condense"):
        if folder is not None and run.ranks.leads and not (run.ranks.restarts and _same_run(folder, request)):
            machine = run.runtime.describe()
            folder.begin({**request, "fingerprint": dataset.train.fingerprint, "machine": machine}, overwrite)
        run.ranks.meet()
        if folder is not None and folder.finished:  # before torchrun started the processes anew
            return CondensedSet.load(folder.path)
        return run.go(folder, report)


def _same_run(folder: RunFolder, request: Mapping[str, Any]) -> bool:
    """Whether the folder holds just this run, begun before torchrun started the processes anew."""
    if not (folder / RunFolder.RUN).exists():
        return False
    begun, asked = folder.request(), json.loads(json.dumps(dict(request)))
    return all(begun.get(key) == value for key, value in asked.items())


def _claimed(folder: RunFolder | None, ranks: Ranks, work: str) -> AbstractContextManager[None]:
    """The run's folder held against other runs, by one process for all that share the run."""
    return nullcontext() if folder is None or not ranks.leads else folder.claimed(work)


def resume(
    run: str | Path, *, data: Dataset | None = None, report: Callable[[Progress], None] | None = None
) -> CondensedSet:
    """Continue an interrupted run from its last checkpoint, or return its set if it had finished.

    Without ``data`` the dataset is loaded as the run says; either way it must be the one the run began with.
    """
    folder = RunFolder(run)
    if folder.finished:
        if Ranks.from_environment().leads:
            folder.shed("m3d condense --resume")
        return CondensedSet.load(folder.path)
    request = _checked_request(folder)
    dataset = load_recipe(request["data"], repr(str(folder / RunFolder.RUN))) if data is None else data
    prepared = _prepare(request, dataset)
    if dataset.train.fingerprint != request["fingerprint"]:
        raise M3DError(f"the data of {str(folder.path)!r} have changed since the run began; it cannot be continued")
    with prepared.together(), _claimed(folder, prepared.ranks, "m3d condense --resume"):
        return prepared.go(folder, report)


# What run.json must hold: it may come from another version, another machine, or a stranger.
_REQUEST: dict[str, tuple[type, ...]] = {
    "ipc": (int,),
    "method": (str,),
    "options": (dict,),
    "net": (str, type(None)),
    "seed": (int,),
    "device": (str,),
    "precision": (str,),
    "deterministic": (bool,),
    "step_mode": (str,),
    "checkpoint_seconds": (int, float),
    "eval_every": (int,),
    "eval_options": (dict,),
    "data": (dict,),
    "fingerprint": (str,),
}
_RECIPE: dict[str, tuple[type, ...]] = {
    "source": (str,),
    "data_root": (str,),
    "size": (int,),
    "val_fraction": (int, float),
    "split_seed": (int,),
    "zca": (bool,),
    "resident": (str,),
    "on_bad_image": (str,),
}
_MAY_BE_ABSENT: dict[str, tuple[type, ...]] = {"subtasks": (int,), "classes_at_once": (int, type(None))}


def _checked_request(folder: RunFolder) -> dict[str, Any]:
    """What was asked of the run, every part of the right type."""
    request, where = folder.request(), repr(str(folder / RunFolder.RUN))
    for key, kinds in {**_REQUEST, **_MAY_BE_ABSENT}.items():
        if key not in request and key in _REQUEST:
            raise M3DError(f"{where} is incomplete: it has no {key!r}")
        if key in request and type(request[key]) not in kinds:
            raise M3DError(f"{where}: {key}={request[key]!r} is of the wrong type")
    return request


def load_recipe(recipe: Mapping[str, Any], where: str, **instead: Any) -> Dataset:
    """The dataset of a recipe that stands in the file ``where``; ``instead`` is the caller's own wish.

    A stranger's file must not choose where downloads are put, so files below a folder that it names must be there.
    """
    if "source" not in recipe:
        raise M3DError(f"{where} does not say where its data came from")
    for key, value in recipe.items():
        if key not in _RECIPE or type(value) not in _RECIPE[key]:
            raise M3DError(f"{where}: the data's {key}={value!r} is not valid; allowed: {', '.join(_RECIPE)}")
    return load_data(**{"download": "data_root" not in recipe, **recipe, **instead})


class _Prepared:
    """A checked request, ready to run: everything that can fail cheaply has been tried."""

    def __init__(
        self, request: Mapping[str, Any], data: Dataset, method: Method, options: dict[str, object], runtime: Runtime
    ):
        self.request, self.data, self.method, self.options, self.runtime = request, data, method, options, runtime
        self.net: str = method.network if request["net"] is None else request["net"]
        self.ranks = Ranks.from_environment()
        # Runs that were begun before there were such options have neither.
        self.shards = [
            Shard(classes, self.ranks, request.get("classes_at_once"))
            for classes in split(range(data.classes), request.get("subtasks", 1))
        ]

    @contextmanager
    def together(self) -> Iterator[None]:
        """On this process's own device, in company of the other processes of the run."""
        self.runtime = self.ranks.place(self.runtime)
        with self.ranks.together(self.runtime, json.dumps([self.request, self.data.train.fingerprint], default=str)):
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
        every, judge_every = self.request["checkpoint_seconds"], self.request["eval_every"]
        if parts == 1:
            return Watch(report, folder, every, self._judge, judge_every)

        def counted(progress: Progress) -> None:
            assert report is not None
            done = number * progress.steps
            report(replace(progress, step=done + progress.step, steps=parts * progress.steps))

        own = None if folder is None else folder.subtask(number, parts)
        return Watch(None if report is None else counted, own, every, keep_end=True)

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

    def _judge(self, pixels: Tensor, step: int) -> float:
        """Validation accuracy of the set as it is now."""
        settings = {"protocol": "quick", "repeats": 3, **self.request["eval_options"]}
        now = self._set(pixels, None, step)
        return evaluate_set(now, self.data, net=self.net, split="val", runtime=self.runtime, **settings).mean

    def _set(
        self, pixels: Tensor, outcome: Outcome | None, steps: int, learned: Mapping[str, float] | None = None
    ) -> CondensedSet:
        request, data = self.request, self.data
        manifest: dict[str, Any] = {
            "method": request["method"],
            "options": self.options,
            "ipc": request["ipc"],
            "factor": self.method.tiles.factor,
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
        if self.ranks.world > 1:
            manifest["processes"] = self.ranks.world
        if len(self.shards) > 1:
            manifest["subtasks"] = len(self.shards)
        if learned:
            manifest["learned"] = dict(learned)
        if outcome is not None:
            manifest |= {"seconds": round(outcome.seconds, 3), "peak_memory": self.runtime.peak_memory()}
            if outcome.losses:
                manifest["loss"] = outcome.losses[-1]
            if outcome.judged:
                manifest["validation"] = outcome.judged
        labels = torch.arange(data.classes).repeat_interleave(request["ipc"])
        return CondensedSet(pixels.flatten(0, 1).float(), labels, manifest)


def _prepare(request: Mapping[str, Any], data: Dataset) -> _Prepared:
    """Check everything that can be checked before any long work."""
    ipc = request["ipc"]
    if isinstance(ipc, bool) or not isinstance(ipc, int) or ipc < 1:
        raise M3DError(f"ipc={ipc} is not valid; allowed: 1 and more images per class")
    if data.classes < 2:
        raise M3DError(f"{data.name} has one class; allowed: two and more")
    if not request["checkpoint_seconds"] > 0:
        raise M3DError(f"checkpoint_seconds={request['checkpoint_seconds']} is not valid; allowed: a positive number")
    if request["eval_every"] < 0:
        raise M3DError(f"eval_every={request['eval_every']} is not valid; allowed: 0 (never) and more")
    if request["eval_every"] and data.val is None:
        raise M3DError("eval_every needs held-out data: give a val_fraction between 0 and 1 (--val-fraction 0.1)")
    task = Task(data.name, data.shape, data.classes, ipc, data.mirror, int(data.train.count.min()))
    method, options = make_method(request["method"], task, dict(request["options"]))
    runtime = Runtime.choose(request["device"], request["precision"], request["deterministic"], request["step_mode"])
    method.tiles.require(data.shape)
    method.init.require(data, ipc * method.tiles.cells)
    if request["eval_every"] > method.steps:
        raise M3DError(f"eval_every={request['eval_every']} is more than the {method.steps} steps of the run")
    _check_counts(request, data)
    prepared = _Prepared(request, data, method, options, runtime)
    net = FlatNet(make_net(prepared.net, data.shape, data.classes))
    _require_separable(prepared, net)
    return prepared


def check(
    data: Dataset,
    ipc: int,
    method: str,
    *,
    net: str | None = None,
    device: str = "auto",
    precision: str = "auto",
    **options: Any,
) -> dict[str, object]:
    """Every option of the method with its value, or the error that :func:`condense` would raise before any work."""
    request: dict[str, Any] = {"ipc": ipc, "method": canonical(method), "options": options, "net": net}
    request |= {"device": device, "precision": precision, "deterministic": False, "step_mode": "auto"}
    return _prepare({**request, "checkpoint_seconds": 60.0, "eval_every": 0}, data).options


def _check_counts(request: Mapping[str, Any], data: Dataset) -> None:
    subtasks, at_once = request.get("subtasks", 1), request.get("classes_at_once")
    if not 1 <= subtasks <= data.classes:
        raise M3DError(f"subtasks={subtasks} is not valid; allowed: 1 to {data.classes}, the number of classes")
    if at_once is not None and at_once < 1:
        raise M3DError(f"classes_at_once={at_once} is not valid; allowed: 1 and more")
    if subtasks > 1 and request["eval_every"]:
        raise M3DError(
            f"eval_every={request['eval_every']} with subtasks={subtasks}: a part of the classes cannot be evaluated"
        )


def _require_separable(prepared: _Prepared, net: FlatNet) -> None:
    """Refuse to split what would not give the same result."""
    matching, parts, world = prepared.method.matching, len(prepared.shards), prepared.ranks.world
    if matching is None or parts * world == 1:
        return
    bond = matching.bond(net)
    if bond is None and parts > 1 and getattr(matching.pool, "across_classes", False):
        bond = "its encoders are trained on the synthetic images of all classes"
    if bond is not None:
        how = f"--subtasks {parts}" if parts > 1 else f"torchrun with {world} processes"
        raise M3DError(
            f"{prepared.request['method']} cannot be split by {how}: {bond}; run it whole in one process on one device"
        )


def evaluate(
    run: str | Path | CondensedSet,
    data: str | Path | Dataset | None = None,
    *,
    device: str = "auto",
    precision: str = "auto",
    **options: Any,
) -> Result:
    """Train fresh networks on a condensed set and test them on real images; see :func:`m3d.evaluation.evaluate`.

    Without ``data`` the dataset is loaded as the set's manifest says.
    """
    condensed = run if isinstance(run, CondensedSet) else CondensedSet.load(run)
    dataset = data if isinstance(data, Dataset) else load_source(condensed, data)
    return evaluate_set(condensed, dataset, runtime=Runtime.choose(device, precision), **options)


def rank(
    run: str | Path | CondensedSet,
    data: str | Path | Dataset | None = None,
    *,
    device: str = "auto",
    precision: str = "auto",
    **options: Any,
) -> Ranking:
    """DD-Ranking's label-robust and augmentation-robust scores of a set; see :func:`m3d.ranking.rank`."""
    condensed = run if isinstance(run, CondensedSet) else CondensedSet.load(run)
    dataset = data if isinstance(data, Dataset) else load_source(condensed, data)
    return rank_set(condensed, dataset, runtime=Runtime.choose(device, precision), **options)


def relabel(
    run: str | Path | CondensedSet,
    data: str | Path | Dataset | None = None,
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    device: str = "auto",
    precision: str = "auto",
    deterministic: bool = False,
    data_root: str | Path | None = None,
    size: int | None = None,
    on_bad_image: str | None = None,
    **options: Any,
) -> CondensedSet:
    """The set with soft labels, kept in the folder ``out`` if one is given; ``options`` are those of
    :class:`m3d.teachers.Teachers`: teacher, teachers, epochs, temperature, seed.

    The set itself stays as it is: labels are a choice, and every record says which kind it was made with.
    """
    condensed = run if isinstance(run, CondensedSet) else CondensedSet.load(run)
    teachers = Teachers(**options)
    runtime = Runtime.choose(device, precision, deterministic)
    folder = None if out is None else RunFolder(out)
    if folder is not None:
        folder.require_free(overwrite)
        folder.require_writable()
    with nullcontext() if folder is None else folder.claimed("m3d relabel"):
        if not isinstance(data, Dataset):
            data = load_source(condensed, data, data_root, size, on_bad_image=on_bad_image)
        labelled = relabel_set(condensed, data, teachers, runtime)
        if folder is None:
            return labelled
        folder.begin({"relabel": dict(labelled.manifest["soft_labels"]), "set": labelled.fingerprint}, overwrite)
        labelled.save(folder / RunFolder.CONDENSED)
        return labelled


def load_source(
    condensed: CondensedSet,
    data: str | Path | None = None,
    data_root: str | Path | None = None,
    size: int | None = None,
    zca: bool | None = None,
    on_bad_image: str | None = None,
) -> Dataset:
    """The dataset a set was made from (and it must be unchanged), or the one named instead.

    It is whitened if the set's was, unless ``zca`` says otherwise.
    """
    source = condensed.manifest["data"]
    zca = "transform" in source if zca is None else zca
    if data is not None:
        return load_data(data, data_root=data_root, size=size, zca=zca, on_bad_image=on_bad_image or "error")
    recipe = source.get("recipe")
    if not isinstance(recipe, dict) or "source" not in recipe:
        raise M3DError("the set's manifest does not say where its data came from; name the dataset (--data)")
    own = {"data_root": data_root, "download": True} if data_root else {}
    dataset = load_recipe(recipe, "the set's manifest", zca=zca, **own)
    if dataset.train.fingerprint != source.get("fingerprint"):
        raise M3DError(f"{dataset.name} has changed since the set was made from it; name the data to test on (--data)")
    return dataset
