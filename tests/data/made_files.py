"""Small files like those of the named datasets: .npz, idx in .gz, and the records that know them."""

from __future__ import annotations

import gzip
import hashlib
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from m3d.data import official
from m3d.data.official import RECORDS, Record

RANDOM = np.random.default_rng(0)


def save_npz(path: Path, channels: int = 3, classes: int = 10, side: int = 4, **more: Any) -> Path:
    """An .npz of two training and two test images a class."""
    labels = np.arange(2 * classes) % classes
    images = RANDOM.integers(0, 256, (2, 2 * classes, side, side, channels), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, x_train=images[0], y_train=labels, x_test=images[1], y_test=labels, **more)
    return path


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def tiny_mnist(url: str = "") -> tuple[Record, dict[str, bytes]]:
    """A record like MNIST's of twenty and ten images 4×4, and the contents of its .gz files."""
    arrays = [part for n in (20, 10) for part in (RANDOM.integers(0, 256, (n, 4, 4), np.uint8), np.arange(n) % 10)]
    inner = [idx_bytes(array.astype(np.uint8)) for array in arrays]
    record = RECORDS["mnist"]
    names = [file.name for file in record.layouts[-1].files]
    outer = {name: gzip.compress(content) for name, content in zip(names, inner, strict=True)}
    checksums = [(md5(raw), md5(content)) for raw, content in zip(outer.values(), inner, strict=True)]
    layouts = official._idx_layouts("mnist", checksums, "MNIST/raw")
    return replace(record, counts=(20, 10), url=url, layouts=layouts), outer


def write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
