"""What a cell takes: sets condensed in folders of their own, shared by all plans, and what is measured on them."""

from __future__ import annotations

import base64
import gc
import io
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from m3d import api
from m3d.data import Dataset, load_data
from m3d.engine import Progress
from m3d.errors import Interrupted
from m3d.evaluation import Protocol, evaluate, evaluate_whole, make_protocol
from m3d.reproduce import toy
from m3d.reproduce.cells import RUNS, WHOLE, Cell, Overrides, Source, cell_digest, set_name
from m3d.reproduce.moments import moment_distances
from m3d.runtime import Runtime
from m3d.store import CondensedSet, RunFolder

_KEPT = (  # of a set's manifest
    "method", "options", "ipc", "factor", "net", "seed", "steps", "seconds", "peak_memory", "loss", "created",
    "device", "precision", "deterministic", "torch", "python", "m3d", "commit", "command",
)  # fmt: skip
_PICTURE = (4, 2)  # rows and columns of images in a picture
_PICTURE_SIDE = 120  # pixels of an image in a picture, at most


@dataclass(frozen=True)
class Place:
    """Where and how the work is done: nothing here changes what comes out beyond the machine's arithmetic."""

    out: Path
    data_root: Path | None = None
    device: str = "auto"
    checkpoint_seconds: float = 60.0


@dataclass(frozen=True)
class Watch:
    """Who looks on: steps and epochs as they pass, and whether to stop."""

    steps: Callable[[Progress], None] | None = None
    epochs: Callable[[int, int], None] | None = None
    stopping: Callable[[], bool] = lambda: False


class Workshop:
    """Makes cells. A set that another cell or an earlier call made is taken as it is, a half-made one is finished."""

    def __init__(self, place: Place, overrides: Overrides, watch: Watch):
        self.place, self.overrides, self.watch = place, overrides, watch
        self.runtime = Runtime.choose(place.device, overrides.precision, overrides.deterministic)
        # The last one alone: a whole table's would not fit into memory.
        self._data: tuple[tuple[str, bool], Dataset] | None = None

    def make(self, cell: Cell) -> dict[str, Any]:
        """The record of a cell."""
        if cell.pair:
            return {**toy.compare(cell.pair), **self.runtime.describe()}
        if cell.sources[0].method == WHOLE:
            return self._accuracy(cell, None, self._folder(cell.sources[0]))
        parts = [self.condensed(source) for source in cell.sources]
        whole = parts[0] if len(parts) == 1 else together(parts, cell.tested_on)
        record: dict[str, Any] = {
            "set": whole.fingerprint,
            "condensation_seed": cell.sources[0].seed,
            "condensation": [_told(part) for part in parts],
            **self.runtime.describe(),
        }
        if "accuracy" in cell.measures:
            record |= self._accuracy(cell, whole, self._evaluation_folder(cell))
        if "moments" in cell.measures:
            record["moments"] = moment_distances(whole, self.data(cell.tested_on), cell.sources[0].net, self.runtime)
        if "picture" in cell.measures:
            record["picture"] = picture(whole)
        return record

    def forget(self, cell: Cell) -> None:
        """Remove the sets of a cell and their results, so that they are made again."""
        for folder in (*map(self._folder, cell.sources), self._evaluation_folder(cell) if cell.sources else None):
            if folder is not None:
                shutil.rmtree(folder.path, ignore_errors=True)

    def data(self, name: str, zca: bool = False) -> Dataset:
        """A dataset, loaded once for as long as no other is needed."""
        if self._data is None or self._data[0] != (name, zca):
            self._data = None  # before the next is loaded, not after
            self._data = ((name, zca), load_data(name, data_root=self.place.data_root, zca=zca))
        return self._data[1]

    def condensed(self, source: Source) -> CondensedSet:
        """The set that ``source`` describes: kept from before, finished, or made."""
        folder, source = self._folder(source), self.overrides.source(source)
        if folder.finished:
            return CondensedSet.load(folder.path).hard()  # the paper's labels, whatever was added to the set since
        data = self.data(source.data, source.zca)
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
            report=self.watch.steps,
            **options,
        )

    def _begin(self) -> None:
        """Before long work: stop if asked to, and forget what the cell before left on the device."""
        if self.watch.stopping():
            raise Interrupted(0)
        gc.collect()
        torch.compiler.reset()  # it gives up compiling after a few variants of one function, and each cell is another
        if self.runtime.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.runtime.device)

    def _folder(self, source: Source) -> RunFolder:
        return RunFolder(self.place.out / RUNS / set_name(source, self.overrides))

    def _evaluation_folder(self, cell: Cell) -> RunFolder:
        if len(cell.sources) == 1:
            return self._folder(cell.sources[0])
        digest = cell_digest(cell, self.overrides)
        return RunFolder(self.place.out / RUNS / f"{cell.tested_on}-{cell.sources[0].method}-together-{digest}")

    def _accuracy(self, cell: Cell, condensed: CondensedSet | None, folder: RunFolder) -> dict[str, Any]:
        """The record of training and testing the cell's networks; one made for another plan serves as well."""
        digest = cell_digest(replace(cell, measures=("accuracy",)), self.overrides)
        known = [r for r in folder.results() if r.get("evaluation") == digest]
        if known:
            return known[-1]
        data = self.data(cell.tested_on, cell.zca)
        self._begin()
        settings: dict[str, Any] = {
            "net": cell.net,
            "protocol": self._protocol(cell),
            "repeats": self.overrides.repeats_of(cell),
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


def together(parts: Sequence[CondensedSet], name: str) -> CondensedSet:
    """The sets of consecutive groups of classes as one set of all classes."""
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


def picture(condensed: CondensedSet) -> dict[str, Any]:
    """Some stored images as one PNG, in a record: two of each of four classes, or one each of eight at IPC 1."""
    rows, columns = _PICTURE
    names = condensed.class_names
    images = condensed.images.unflatten(0, (len(names), -1))  # [C, ipc, ch, h, w]
    labelled = images.shape[1] >= columns
    if labelled:
        shown = images[:rows, :columns]
    else:
        first = images[: rows * columns, 0]
        rows = max(1, len(first) // columns)
        shown = first[: rows * columns].unflatten(0, (rows, -1))
    buffer = io.BytesIO()
    _sheet(shown).save(buffer, format="PNG", optimize=True)
    return {
        "png": base64.b64encode(buffer.getvalue()).decode(),
        "rows": shown.shape[0],
        "columns": shown.shape[1],
        "names": list(names[: shown.shape[0]]) if labelled else [],
    }


def _sheet(images: Tensor) -> Image.Image:
    """``images`` [rows, columns, ch, h, w] in [0, 1] side by side without gaps, at most 120 pixels each."""
    rows, columns, ch, h, w = images.shape
    pixels = (images.permute(0, 3, 1, 4, 2).reshape(rows * h, columns * w, ch) * 255).round().to(torch.uint8).numpy()
    sheet = Image.fromarray(np.ascontiguousarray(pixels[..., 0] if ch == 1 else pixels[..., :3]))
    if h > _PICTURE_SIDE:
        sheet = sheet.resize((columns * _PICTURE_SIDE, rows * _PICTURE_SIDE), Image.Resampling.LANCZOS)
    return sheet
