"""Shared fixtures: one thread (two spin on a busy machine), the embedded digits, and a tiny generated dataset."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # the fused kernels run, slowly, on the CPU

from shell import FAST, run
from toys import make_dataset

from m3d.data import Dataset, load_data

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background, and commands would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Trained networks go to a folder of the test session, never to the user's."""
    monkeypatch.setenv("M3D_CACHE", str(tmp_path_factory.getbasetemp() / "networks"))


@pytest.fixture(scope="session")
def digits() -> Dataset:
    return load_data("digits")


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


@pytest.fixture
def finished(capsys, tmp_path):
    """The folder of a short run on the digits."""
    folder = tmp_path / "run"
    code, out, _ = run(capsys, "condense", "digits", "--ipc", 2, *FAST, "--out", folder)
    assert code == 0 and "10 classes × 2 images, 3 steps" in out and f"m3d show {folder}" in out
    assert f"m3d evaluate {folder} --net convnet2:width=8\n" in out
    return folder
