"""Shared fixtures: one thread (two spin on a busy machine), the embedded digits, and a tiny generated dataset."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # the fused kernels run, slowly, on the CPU

from m3d.data import ClassData, Dataset, load_data
from m3d.data.classes import channel_statistics

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Trained networks go to a folder of the test session, never to the user's."""
    monkeypatch.setenv("M3D_CACHE", str(tmp_path_factory.getbasetemp() / "networks"))


@pytest.fixture(scope="session")
def digits() -> Dataset:
    return load_data("digits")


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


@pytest.fixture
def tiny() -> Dataset:
    return make_dataset()


@pytest.fixture
def tiny_file(tmp_path) -> str:
    """The same data as an .npz, for what must load it again."""
    data = make_dataset()
    arrays = {}
    for name, part in (("train", data.train), ("test", data.test)):
        arrays[f"x_{name}"] = part.images.permute(0, 2, 3, 1).numpy()
        arrays[f"y_{name}"] = part.labels().numpy()
    path = tmp_path / "tiny.npz"
    np.savez(path, class_names=np.array(data.class_names), **arrays)
    return str(path)
