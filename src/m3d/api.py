"""The library's front door: load data, condense it, evaluate what came out."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from m3d.condensed import CondensedSet
from m3d.data import Dataset, load_data
from m3d.earlier import completed
from m3d.errors import M3DError, unknown
from m3d.evaluation import Protocol, Result, make_protocol
from m3d.evaluation import evaluate as evaluate_set
from m3d.origin import load_source
from m3d.prepare import check_request, option_names, prepare
from m3d.ranking import Ranking
from m3d.ranking import rank as rank_set
from m3d.registry import canonical, loaded_plugins
from m3d.requests import checked_request, load_recipe
from m3d.run_folder import RunFolder, home_of
from m3d.runtime import Runtime
from m3d.shards import Ranks
from m3d.teachers import Teachers
from m3d.teachers import relabel as relabel_set
from m3d.watch import Progress


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
    keep_every: int = 0,
    eval_every: int = 0,
    eval_options: Mapping[str, Any] | None = None,
    load_options: Mapping[str, Any] | None = None,
    report: Callable[[Progress], None] | None = None,
    **options: Any,
) -> CondensedSet:
    """Condense ``data`` to ``ipc`` images per class; ``options`` are the method's own (``m3d list methods NAME``).

    Without ``net`` images are matched through the method's own network. With ``out`` the run is kept in that folder:
    checkpoints, history, and the condensed set at the end; with ``keep_every`` also the set as it was every so many
    steps. Started by ``torchrun``, several processes share the classes; with ``subtasks`` groups of classes are
    condensed one after the other.

    ``load_options`` are those of :func:`m3d.load_data` for data given by name or path (size, test_fraction,
    val_fraction, ...); with ``eval_every`` the set is measured on the held-out part every so many steps, by
    ``eval_options`` (net, protocol, repeats), and the best one kept too: the accuracies are in the manifest
    (``validation``). ``report`` is called about twice a second with a :class:`m3d.watch.Progress`.
    """
    if keep_every and out is None:
        raise M3DError(f"keep_every={keep_every} needs a folder to keep sets in: give out")
    _known("eval_options", eval_options or {}, ("net", "protocol", "repeats", "seed"))
    if eval_options and not eval_every:
        raise M3DError(f"eval_options={dict(eval_options)} without eval_every: nothing is evaluated on the way")
    _known("load_options", load_options or {}, _keywords(load_data))
    _no_data_options(method, options)
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
        "keep_every": keep_every,
        "eval_every": eval_every,
        "eval_options": dict(eval_options or {}),
    }
    if out is not None and not isinstance(request["eval_options"].get("protocol", ""), str):
        raise M3DError("eval_options: a run that is kept needs the name of its protocol, as in 'quick:epochs=50'")
    check_request(request)  # a slip of the pen is said before a folder of images is read
    dataset = data if isinstance(data, Dataset) else load_data(data, **dict(load_options or {}))
    return _begin({**request, "data": dict(dataset.recipe)}, dataset, out, overwrite, report)


def _begin(
    request: dict[str, Any],
    dataset: Dataset,
    out: str | Path | None,
    overwrite: bool,
    report: Callable[[Progress], None] | None,
) -> CondensedSet:
    """Begin the run that was asked for, in its folder where it has one, and bring it to its end."""
    run = prepare(request, dataset)
    # what was left to choose is written down: a resumed run keeps it, also in a version with other defaults
    request |= {"net": run.net, "device": str(run.runtime.device), "precision": run.runtime.precision}
    request["options"] = dict(run.options)
    folder = RunFolder(out) if out is not None else None
    with run.together(), _claimed(folder, run.ranks, "m3d condense"):
        if folder is not None and run.ranks.leads and not (run.ranks.restarts and _same_run(folder, request)):
            machine = run.runtime.describe()
            folder.begin({**request, "fingerprint": dataset.train.fingerprint, "machine": machine}, overwrite)
        run.ranks.meet()
        if folder is not None and folder.finished:  # before torchrun started the processes anew
            return CondensedSet.load(folder.path)
        try:
            return run.go(folder, report)
        except M3DError:
            if folder is not None and run.ranks.leads:
                folder.unbegin()
            raise


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
    request = checked_request(folder)
    with _told_of_plugins(request):
        request["options"] = completed(request["options"], option_names(request["method"]))
        check_request(request)
    dataset = load_recipe(request["data"], repr(str(folder / RunFolder.RUN))) if data is None else data
    prepared = prepare(request, dataset)
    if dataset.train.fingerprint != request["fingerprint"]:
        raise M3DError(f"the data of {str(folder.path)!r} have changed since the run began; it cannot be continued")
    with prepared.together(), _claimed(folder, prepared.ranks, "m3d condense --resume"):
        return prepared.go(folder, report)


@contextmanager
def _told_of_plugins(request: Mapping[str, Any]) -> Iterator[None]:
    """An error about a name that only a plugin knows says how the run was begun."""
    try:
        yield
    except M3DError as error:
        machine = request.get("machine")
        begun = str(machine.get("command", "")) if isinstance(machine, dict) else ""
        if "--plugin" not in begun or loaded_plugins():
            raise
        raise M3DError(f"{error} The run was begun by: {begun}") from error


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
    return prepare({**request, "checkpoint_seconds": 60.0, "eval_every": 0}, data).options


def evaluate(
    run: str | Path | CondensedSet,
    data: str | Path | Dataset | None = None,
    *,
    protocol: Protocol | str = "paper",
    epochs: int | None = None,
    batch: int | None = None,
    keep: bool = False,
    device: str = "auto",
    precision: str = "auto",
    **options: Any,
) -> Result:
    """Train fresh networks on a condensed set and test them on real images.

    ``protocol`` is a name, with options or without (``paper``, ``paper:epochs=300``); ``epochs`` and ``batch`` replace
    its own. ``options`` are those of :func:`m3d.evaluation.evaluate`: net, repeats, seed, split, and so on. Without
    ``data`` the dataset is loaded as the set's manifest says. With ``keep`` the result is written down in the run's
    folder, as ``m3d evaluate`` does, where ``m3d compare`` finds it; a long evaluation is checkpointed there.
    """
    _known("evaluate", options, [*_keywords(evaluate_set), "epochs", "batch", "keep", "device", "precision"])
    if isinstance(protocol, str):
        protocol = make_protocol(protocol, epochs=epochs, batch=batch)
    elif epochs is not None or batch is not None:
        raise M3DError(f"epochs={epochs}, batch={batch} beside a protocol that has its own; give its name instead")
    folder, kept = _home(run) if keep else (None, {})
    condensed = run if isinstance(run, CondensedSet) else CondensedSet.load(run)
    dataset = data if isinstance(data, Dataset) else load_source(condensed, data)
    options = {"folder": folder, **options}
    result = evaluate_set(condensed, dataset, protocol=protocol, runtime=Runtime.choose(device, precision), **options)
    if folder is not None:
        folder.add_result({**result.as_record(), **kept})
    return result


def _home(run: str | Path | CondensedSet) -> tuple[RunFolder, dict[str, str]]:
    """Where a result is kept, and what it says of the set beside its run's."""
    if isinstance(run, CondensedSet):
        raise M3DError("keep=True needs the folder of a run to write to; give that instead of a set")
    folder, kept = home_of(Path(run))
    if folder is None:
        raise M3DError(f"keep=True: {str(run)!r} lies in no run folder that can be written to")
    return folder, kept


def _known(what: str, options: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Refuse an option that there is none of, naming the nearest."""
    for name in options:
        if name not in allowed:
            raise unknown(f"option of {what}", name, allowed)


def _no_data_options(method: str, options: Mapping[str, Any]) -> None:
    """Refuse an option that says how data are read, before they are read without it."""
    for name in options.keys() & set(_keywords(load_data)) - option_names(method):
        raise M3DError(
            f"{name} is not an option of {canonical(method)} but of the data: "
            f"load_options={{{name!r}: {options[name]!r}}}, or m3d.load_data(..., {name}={options[name]!r})"
        )


def _keywords(of: Callable[..., Any]) -> list[str]:
    """What a caller may give; the runtime follows from device and precision."""
    found = inspect.signature(of).parameters.values()
    return [p.name for p in found if p.kind is p.KEYWORD_ONLY and p.name != "runtime"]


def rank(
    run: str | Path | CondensedSet,
    data: str | Path | Dataset | None = None,
    *,
    device: str = "auto",
    precision: str = "auto",
    **options: Any,
) -> Ranking:
    """DD-Ranking's label-robust and augmentation-robust scores of a set; see :func:`m3d.ranking.rank`."""
    _known("rank", options, _keywords(rank_set))
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
