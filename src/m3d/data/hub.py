"""Hugging Face datasets (extra ``hf``): by name from the hub, or from a folder that ``save_to_disk`` wrote."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from m3d.data.classes import ClassData
from m3d.data.ingest import Handling, read
from m3d.data.keep_back import KeepBack
from m3d.decode import Encoded
from m3d.errors import M3DError
from m3d.wording import option

PREFIX = "hf:"
_TEST_SPLITS = ("test", "validation", "valid", "val")
_LABELS = ("label", "labels", "fine_label", "class", "target")  # where several columns could be it


def is_saved(path: Path) -> bool:
    """Whether ``save_to_disk`` wrote this folder."""
    return (path / "dataset_dict.json").is_file()


class HubImages:
    """One split of a Hugging Face dataset, sorted by class; images stay encoded, as bytes or as paths."""

    def __init__(self, rows: Any, where: str):
        from datasets import Image

        self.where = where
        image, label = _columns(rows.features, where)
        self.class_names: tuple[str, ...] = tuple(rows.features[label].names)
        labels = np.asarray(rows.with_format("numpy")[label][:], np.int64)
        unknown = int((labels < 0).sum()) if len(labels) else 0
        if unknown:
            raise M3DError(f"{where}: {unknown} of {len(labels)} images have no label; allowed: labelled splits")
        self.count = np.bincount(labels, minlength=len(self.class_names))
        for name, n in zip(self.class_names, self.count, strict=True):
            if n == 0:
                raise M3DError(f"{where}: class {name!r} has no image; every class needs at least one")
        self._order = np.argsort(labels, kind="stable")
        self._column = image
        self._rows = rows.select_columns([image]).cast_column(image, Image(decode=False))
        self._fingerprint = rows._fingerprint

    def __len__(self) -> int:
        return len(self._order)

    def name(self, index: int) -> str:
        return f"{self.where}/{self._order[index]}"

    def encoded(self, first: int, last: int) -> Sequence[Encoded]:
        found = self._rows[self._order[first:last].tolist()][self._column]
        # An empty cell is an image without contents: bad, and reported as such.
        if all(image and image["bytes"] is None and image["path"] for image in found):
            return [image["path"] for image in found]
        return [_contents(image) for image in found]

    def key(self) -> str:
        return hashlib.sha256(f"{self.where} {self._fingerprint} {len(self)}".encode()).hexdigest()


def read_hub(
    source: str, size: int | None, handling: Handling, keep_back: KeepBack | None = None
) -> tuple[ClassData, ClassData, tuple[str, ...]]:
    """(train, test, class names) of ``hf:NAME`` or of a saved folder; validation stands in for a missing test split,
    or ``keep_back`` makes one of the training images."""
    try:
        import datasets
    except ImportError:
        raise M3DError(f"{source}: Hugging Face datasets need the package datasets: pip install 'm3d[hf]'") from None
    try:
        if source.startswith(PREFIX):
            splits = datasets.load_dataset(source.removeprefix(PREFIX))
        else:
            splits = datasets.load_from_disk(source)
    except Exception as error:  # whatever its readers, the network or a wrong name make it raise
        raise M3DError(f"{source}: cannot be loaded ({type(error).__name__}: {error})") from error
    test_name = next((name for name in _TEST_SPLITS if name in splits), None)
    if keep_back is not None and "train" in splits:
        if test_name is not None:
            raise keep_back.refuse(source)
        whole = HubImages(splits["train"], f"{source}/train")
        return *read(*keep_back.of(whole), size, handling), whole.class_names
    if "train" not in splits or test_name is None:
        raise M3DError(
            f"{source}: has the splits {', '.join(splits)}; needed: train, and test or validation "
            f"(or {option('test_fraction')})"
        )
    train, test = (HubImages(splits[name], f"{source}/{name}") for name in ("train", test_name))
    if train.class_names != test.class_names:
        raise M3DError(f"{source}: the classes of train and {test_name} differ")
    return *read(train, test, size, handling), train.class_names


def _columns(features: Any, where: str) -> tuple[str, str]:
    """(image column, label column) of a dataset."""
    from datasets import ClassLabel, Image

    images = [name for name, kind in features.items() if isinstance(kind, Image)]
    labels = [name for name, kind in features.items() if isinstance(kind, ClassLabel)]
    if len(labels) > 1:
        labels = [name for name in _LABELS if name in labels][:1] or labels
    if len(images) != 1 or len(labels) != 1:
        shown = ", ".join(f"{name}: {type(kind).__name__}" for name, kind in features.items())
        raise M3DError(f"{where}: one Image and one ClassLabel column are needed; it has {shown}")
    return images[0], labels[0]


def _contents(image: dict[str, Any] | None) -> bytes:
    """The encoded image in a cell, wherever it lies."""
    if not image:
        return b""
    if image["bytes"] is not None:
        return bytes(image["bytes"])
    try:
        return Path(image["path"]).read_bytes()
    except (OSError, TypeError):
        return b""
