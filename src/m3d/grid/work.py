"""What a cell takes: sets condensed in folders of their own, shared by all plans, and what is measured on them."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from m3d import api
from m3d.condensed import CondensedSet
from m3d.data import Dataset, load_data
from m3d.errors import Interrupted, M3DError
from m3d.evaluation import Protocol, evaluate, evaluate_whole, make_protocol
from m3d.grid.cells import RUNS, WHOLE, Cell, Overrides, Source, Value, cell_digest, folders, set_name
from m3d.run_folder import RunFolder
from m3d.runtime import Runtime
from m3d.teachers import Teachers, relabel
from m3d.watch import Progress

_KEPT = (  # of a set's manifest
    "method", "options", "ipc", "factor", "net", "seed", "steps", "seconds", "starting", "peak_memory", "loss",
    "created", "device", "precision", "deterministic", "torch", "python", "m3d", "commit", "command", "device_share",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where and how the work is done: nothing here changes what comes out beyond the machine's arithmetic."""

    out: Path
    data_root: Path | None = None
    device: str = "auto"
    checkpoint_seconds: float = 60.0

    def __post_init__(self) -> None:
        if not self.checkpoint_seconds > 0:
            raise M3DError(f"--checkpoint-seconds {self.checkpoint_seconds} is not valid; allowed: a positive number")


@dataclass(frozen=True)
class Watch:
    """Who looks on: steps and epochs as they pass, and whether to stop."""

    steps: Callable[[Progress], None] | None = None
    epochs: Callable[[int, int], None] | None = None
    stopping: Callable[[], bool] = lambda: False


class Shelf:
    """The dataset used last: a whole table's would not fit into memory."""

    def __init__(self, data_root: Path | None = None):
        self._root = data_root
        self._keys: set[tuple[str, tuple[tuple[str, Value], ...]]] = set()  # what it may be asked for by
        self._data: Dataset | None = None

    def get(self, name: str, load: tuple[tuple[str, Value], ...] = ()) -> Dataset:
        """A dataset, loaded once for as long as no other is needed."""
        if self._data is None or (name, load) not in self._keys:
            self._data = None  # before the next is loaded, not after
            options: dict[str, Any] = dict(load)
            self._data = load_data(name, data_root=self._root, **options)
            self._keys = {(name, load), (str(self._data.recipe["source"]), load)}  # as typed, and in full
        return self._data


Measure = Callable[["Workshop", Cell, CondensedSet | None], Any]


class Workshop:
    """Makes cells. A set that another cell or an earlier call made is taken as it is, a half-made one is finished.

    ``measures`` are what can be measured beside accuracies, by name.
    """

    def __init__(
        self,
        place: Place,
        overrides: Overrides,
        watch: Watch,
        measures: Mapping[str, Measure] | None = None,
        shelf: Shelf | None = None,
    ):
        self.place, self.overrides, self.watch, self.measures = place, overrides, watch, measures or {}
        self.runtime = Runtime.choose(place.device, overrides.precision, overrides.deterministic)
        self._shelf = shelf or Shelf(place.data_root)

    def make(self, cell: Cell) -> dict[str, Any]:
        """The record of a cell."""
        if cell.pair:
            return {**self.measures["pair"](self, cell, None), **self.runtime.describe()}
        if cell.sources[0].method == WHOLE:
            return self._accuracy(cell, None)
        at = self.overrides.at(cell)
        parts = [self.condensed(source) if at is None else self.kept(source, at) for source in cell.sources]
        whole = parts[0] if len(parts) == 1 else together(parts, cell.tested_on)
        record: dict[str, Any] = {
            "set": whole.fingerprint,
            "condensation_seed": cell.sources[0].seed,
            "condensation": [_told(part) for part in parts],
            **self.runtime.describe(),
        }
        if "accuracy" in cell.measures:
            record |= self._accuracy(cell, whole)
        for name in cell.measures:
            if name != "accuracy":
                record[name] = self.measures[name](self, cell, whole)
        return record

    def tested_on(self, cell: Cell) -> Dataset:
        """What a cell's networks are tested on."""
        first = cell.sources[0]
        return self._shelf.get(cell.data, first.loading) if cell.data else self._data(first)

    def _data(self, source: Source) -> Dataset:
        data = self._shelf.get(source.data, source.loading)
        if source.fingerprint and data.train.fingerprint != source.fingerprint:
            raise M3DError(f"the training data {source.data!r} here are not those that the grid was planned with")
        return data

    def condensed(self, source: Source) -> CondensedSet:
        """The set that ``source`` describes: kept from before, finished, or made."""
        folder, source = self._folder(source), self.overrides.source(source)
        if folder.finished:
            return api.resume(folder.path).hard()  # the paper's labels, whatever was added to the set since
        data = self._data(source)
        options: dict[str, Any] = dict(source.options)
        self._begin()
        if (folder / RunFolder.RUN).exists():
            return api.resume(folder.path, data=data, report=self.watch.steps)
        return api.condense(
            data,
            source.ipc,
            source.method,
            net=source.net,
            seed=source.seed,
            out=folder.path,
            device=self.place.device,
            precision=self.overrides.precision,
            deterministic=self.overrides.deterministic,
            checkpoint_seconds=self.place.checkpoint_seconds,
            keep_every=source.keep_every,
            report=self.watch.steps,
            **options,
        )

    def kept(self, source: Source, step: int) -> CondensedSet:
        """The same set as it was in the middle of its run."""
        self.condensed(source)
        return CondensedSet.load(self._folder(source).kept(step))

    def _begin(self) -> None:
        """Before long work: stop if asked to, and forget what the cell before left on the device."""
        if self.watch.stopping():
            raise Interrupted(0)
        gc.collect()
        torch.compiler.reset()  # it gives up compiling after a few variants of one function, and each cell is another
        if self.runtime.device.type == "cuda":
            torch.cuda.empty_cache()

    def _folder(self, source: Source) -> RunFolder:
        return RunFolder(self.place.out / RUNS / set_name(source, self.overrides))

    def _accuracy(self, cell: Cell, condensed: CondensedSet | None) -> dict[str, Any]:
        """The record of training and testing the cell's networks; one made for another plan serves as well."""
        folder = RunFolder(self.place.out / RUNS / folders(cell, self.overrides)[-1])
        digest = cell_digest(replace(cell, measures=("accuracy",)), self.overrides)
        known = [r for r in folder.results() if r.get("evaluation") == digest]
        if known:
            return known[-1]
        data = self.tested_on(cell)
        self._begin()
        if condensed is not None and cell.labels == "soft":
            source = cell.sources[0]
            teachers = Teachers() if source.net is None else Teachers(source.net)
            condensed = relabel(condensed, self._data(source), teachers, self.runtime)
        settings: dict[str, Any] = {
            "net": cell.net,
            "protocol": self._protocol(cell),
            "repeats": self.overrides.repeats_of(cell),
            "split": cell.split,
            "runtime": self.runtime,
            "report": self.watch.epochs,
            "folder": folder,
            "checkpoint_seconds": self.place.checkpoint_seconds,
        }
        result = evaluate_whole(data, **settings) if condensed is None else evaluate(condensed, data, **settings)
        record = {**result.as_record(), "evaluation": digest}
        folder.add_result(record)
        return record

    def _protocol(self, cell: Cell) -> Protocol:
        usual = make_protocol(cell.protocol, epochs=cell.epochs)
        most = self.overrides.epochs
        if most is None or usual.recipe.epochs <= most:
            return usual
        return make_protocol(cell.protocol, epochs=most)


def forget(cells: Sequence[Cell], out: Path, overrides: Overrides) -> None:
    """Remove the sets of ``cells`` and their results, so that they are made again."""
    for cell in cells:
        for name in folders(cell, overrides):
            shutil.rmtree(out / RUNS / name, ignore_errors=True)


def together(parts: Sequence[CondensedSet], name: str) -> CondensedSet:
    """The sets of consecutive groups of classes as one set of all classes."""
    stored = {part.tiles for part in parts}
    if len(stored) > 1:
        raise M3DError(f"the parts of {name!r} are stored in different ways: {', '.join(sorted(map(str, stored)))}")
    images = torch.cat([part.images for part in parts])
    before, labels = 0, []
    for part in parts:
        labels.append(part.labels + before)
        before += len(part.class_names)
    sources = [part.manifest["data"] for part in parts]
    manifest = {
        **parts[0].manifest,
        "class_names": [n for part in parts for n in part.class_names],
        "data": {"name": name, "parts": sources},
    }
    return CondensedSet(images, torch.cat(labels), manifest)


def _told(condensed: CondensedSet) -> dict[str, Any]:
    """What a record says of how a set was made."""
    manifest = condensed.manifest
    kept = {k: manifest[k] for k in _KEPT if k in manifest}
    data = {k: manifest["data"].get(k) for k in ("name", "fingerprint")}
    return {**kept, "set": condensed.fingerprint, "data": data}
