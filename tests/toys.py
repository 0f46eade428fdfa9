"""Generated data for tests."""

from __future__ import annotations

import numpy as np

from m3d.data import ClassData, Dataset
from m3d.data.classes import channel_statistics


def make_dataset(
    classes: int = 3, per_class: int = 12, shape: tuple[int, int, int] = (3, 8, 8), seed: int = 0
) -> Dataset:
    """Noise around one random colour pattern per class: easy to tell apart, cheap to make."""
    generator = np.random.default_rng(seed)
    ch, h, w = shape
    patterns = generator.integers(40, 215, (classes, 1, h, w, ch))
    names = tuple(f"class {c}" for c in range(classes))

    def split(n: int, name: str) -> ClassData:
        images = np.clip(patterns + generator.normal(0, 20, (classes, n, h, w, ch)), 0, 255).astype(np.uint8)
        labels = np.repeat(np.arange(classes), n)
        return ClassData.from_labels(images.reshape(-1, h, w, ch), labels, names, name)

    train, test = split(per_class, "train"), split(4, "test")
    mean, std = channel_statistics(train.images)
    return Dataset("tiny", train, test, names, mean, std)
