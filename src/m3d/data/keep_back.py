"""A test split for data that come without one: a part of every class, kept back before anything is decoded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from m3d import rng
from m3d.data.classes import stratified
from m3d.data.ingest import Source
from m3d.data.readers import Arrays
from m3d.decode import Encoded
from m3d.errors import M3DError


class HasTestSplit(M3DError):
    """The data have a test split of their own."""


class Part:
    """Some images of a source, in its order."""

    def __init__(self, whole: Source, index: np.ndarray, count: np.ndarray, which: str = ""):
        self.class_names, self.count = whole.class_names, count
        self.which = which  # what an error says of them, after "no image"
        self._whole, self._index = whole, index

    def __len__(self) -> int:
        return len(self._index)

    def name(self, index: int) -> str:
        return self._whole.name(int(self._index[index]))

    def encoded(self, first: int, last: int) -> Sequence[Encoded]:
        return [self._whole.encoded(i, i + 1)[0] for i in self._index[first:last].tolist()]

    def key(self) -> str:
        digest = hashlib.sha256(self._whole.key().encode())
        digest.update(np.ascontiguousarray(self._index).data)
        return digest.hexdigest()


@dataclass(frozen=True)
class KeepBack:
    """How large a part of every class is kept back, and which draw of it."""

    fraction: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise M3DError(f"test_fraction={self.fraction} is not valid; allowed: between 0 and 1")

    def of(self, whole: Source) -> tuple[Part, Part]:
        """(train, test)"""
        (rest, rest_count), (kept, kept_count) = self._drawn(whole.count)
        which = " in the part kept back to test on (keep back more, or remove what cannot be read)"
        return Part(whole, rest, rest_count), Part(whole, kept, kept_count, which)

    def of_arrays(self, arrays: Arrays, names: Sequence[str], where: str) -> Arrays:
        """The same data with a test split, which they must not have; ``names`` are those of their classes."""
        if len(arrays.x_test) or len(arrays.y_test):
            raise self.refuse(where)
        if len(arrays.x_train) != len(arrays.y_train):
            raise M3DError(f"{where}: train: {len(arrays.x_train)} images but {len(arrays.y_train)} labels")
        count = np.bincount(arrays.y_train, minlength=len(names))
        for c in np.flatnonzero(count[: len(names)] == 0).tolist():
            raise M3DError(f"{where}: train: class {names[c]!r} has no image; every class needs at least one")
        order = np.argsort(arrays.y_train, kind="stable")
        (rest, _), (kept, _) = self._drawn(count)
        rest, kept = order[rest], order[kept]
        x, y = arrays.x_train, arrays.y_train
        return Arrays(x[rest], y[rest], x[kept], y[kept], arrays.class_names)

    def refuse(self, where: str) -> HasTestSplit:
        """The error for data that need none."""
        return HasTestSplit(f"test_fraction={self.fraction}: {where} has a test split of its own; leave it out")

    def _drawn(self, count: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        name, purpose = f"test_fraction={self.fraction}", rng.Purpose.TEST_SPLIT
        parts = stratified(torch.from_numpy(count.astype(np.int64)), self.fraction, self.seed, purpose, name)
        return [(index.numpy(), number.numpy()) for index, number in parts]
