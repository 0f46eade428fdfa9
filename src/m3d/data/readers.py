"""Readers of dataset files: idx, CIFAR records and pickles, SVHN's .mat, and .npz. None can run code from a file."""

from __future__ import annotations

import gzip
import io
import math
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from m3d.data.archive import read_arrays
from m3d.errors import M3DError
from m3d.wording import option

# (bytes, where they come from) -> images [n, 32, 32, 3], labels [n]
Decode = Callable[[bytes, str], tuple[np.ndarray, np.ndarray]]

_CHUNK = 4096  # images converted at a time: a float copy of a whole dataset may not fit


@dataclass(frozen=True)
class Arrays:
    """A dataset as it stands in its files: images [N, h, w, ch] uint8 and labels [N] int64 of both splits."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    class_names: tuple[str, ...] = ()  # empty: the files do not say


# ---------------------------------------------------------------------------------------------------------------- idx


def content(path: Path) -> bytes:
    """The bytes of a file, decompressed if they are gzip's (seen from the first bytes, whatever the file is called)."""
    raw = path.read_bytes()
    if raw[:2] != b"\x1f\x8b":
        return raw
    try:
        return gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise M3DError(f"{path}: damaged gzip file ({error})") from error


def read_idx(path: Path) -> np.ndarray:
    """The array of unsigned bytes in an idx file, plain or .gz."""
    raw = content(path)
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or len(raw) < 4 + 4 * raw[3]:
        raise M3DError(f"{path}: not an idx file of unsigned bytes (it starts with {raw[:4].hex() or 'nothing'})")
    start = 4 + 4 * raw[3]
    shape = np.frombuffer(raw, ">u4", raw[3], 4).tolist()
    if len(raw) - start != math.prod(shape):
        raise M3DError(f"{path}: {len(raw) - start} bytes of data, but {shape} in the header; is it truncated?")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def read_idx_files(paths: Sequence[Path]) -> Arrays:
    """MNIST's four files: training images and labels, then test images and labels."""
    parts = [read_idx(path) for path in paths]
    for path, part, rank in zip(paths, parts, (3, 1, 3, 1), strict=True):
        if part.ndim != rank:
            raise M3DError(f"{path}: an array of {part.ndim} dimensions; {rank} are needed")
    x_train, y_train, x_test, y_test = parts
    return Arrays(x_train[..., None], y_train.astype(np.int64), x_test[..., None], y_test.astype(np.int64))


# -------------------------------------------------------------------------------------------------------------- CIFAR


def read_cifar(paths: Sequence[Path], *, decode: Decode, members: Sequence[str] = ()) -> Arrays:
    """Batches, the last of which is the test set: ``paths`` themselves, or ``members`` of the archive ``paths[0]``."""
    if members:
        blobs = [(blob, f"{paths[0]}:{name}") for name, blob in zip(members, _members(paths[0], members), strict=True)]
    else:
        blobs = [(path.read_bytes(), str(path)) for path in paths]
    *train, test = [decode(blob, where) for blob, where in blobs]
    return Arrays(np.concatenate([x for x, _ in train]), np.concatenate([y for _, y in train]), *test)


def cifar_records(raw: bytes, where: str, *, label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Binary records: ``label_bytes`` labels, the last of which is the one wanted, then 3×32×32 pixels."""
    width = label_bytes + 3072
    if not raw or len(raw) % width:
        raise M3DError(f"{where}: {len(raw)} bytes are not whole records of {width} bytes; is it truncated?")
    records = np.frombuffer(raw, np.uint8).reshape(-1, width)
    return _planar(records[:, label_bytes:]), records[:, label_bytes - 1].astype(np.int64)


def cifar_pickle(raw: bytes, where: str, *, label_key: str) -> tuple[np.ndarray, np.ndarray]:
    """A pickled batch: ``data`` [n, 3072] uint8 and a list of n labels under ``label_key``."""
    batch = _unpickle(raw, where)
    if not isinstance(batch, dict):
        raise M3DError(f"{where}: holds a {type(batch).__name__}; a dictionary with data and {label_key} is needed")
    batch = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
    data, labels = batch.get("data"), batch.get(label_key)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise M3DError(f"{where}: 'data' is missing or not uint8 [n, 3072]")
    if not isinstance(labels, list) or len(labels) != len(data) or not all(isinstance(y, int) for y in labels):
        raise M3DError(f"{where}: {label_key!r} is missing or not a list of {len(data)} whole numbers")
    return _planar(data), np.array(labels, np.int64)


def _planar(rows: np.ndarray) -> np.ndarray:
    """[n, 3072] colour plane by colour plane -> [n, 32, 32, 3]."""
    return rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _members(archive: Path, names: Sequence[str]) -> list[bytes]:
    """The bytes of the named files in a .tar.gz, read without unpacking it: no path in it can reach the disk."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = member.name.rpartition("/")[2]
                stream = tar.extractfile(member) if name in names and member.isfile() else None
                if stream is not None:
                    found[name] = stream.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise M3DError(f"{archive}: damaged archive ({error})") from error
    missing = [name for name in names if name not in found]
    if missing:
        raise M3DError(f"{archive}: has no {', '.join(missing)}")
    return [found[name] for name in names]


# What a pickled array needs, under the names that NumPy 1 and 2 give it; nothing else in a pickle is ever looked up.
# Python 3 writes bytes into old pickles as a call of _codecs.encode, for which the text-only str.encode stands in.
_RECONSTRUCT = np.empty(0).__reduce__()[0]
_PICKLE_GLOBALS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): str.encode,
}


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler of plain containers and arrays, which refuses every other global before anything is called."""

    def find_class(self, module: str, name: str) -> Any:
        """The allowed object of that name."""
        if (module, name) not in _PICKLE_GLOBALS:
            raise M3DError(f"refused: it asks for {module}.{name}, and a batch of images needs only NumPy arrays")
        return _PICKLE_GLOBALS[module, name]


def _unpickle(raw: bytes, where: str) -> Any:
    """The value of a pickle, from allowed parts only."""
    try:
        return _ArrayUnpickler(io.BytesIO(raw), encoding="bytes").load()
    except M3DError as error:
        raise M3DError(f"{where}: {error}") from error
    except Exception as error:  # a damaged pickle can raise almost anything
        raise M3DError(f"{where}: damaged pickle ({type(error).__name__}: {error})") from error


# --------------------------------------------------------------------------------------------------------- SVHN, .mat

_MAT_MATRIX, _MAT_COMPRESSED = 14, 15
_MAT_DTYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_MAT_NUMERIC = range(6, 16)  # array classes double, single, int8 ... uint64; the others hold text, cells, objects


def read_svhn(paths: Sequence[Path]) -> Arrays:
    """SVHN's training and test .mat: X [32, 32, 3, N] uint8 and y [N, 1], in which 10 stands for the digit 0."""
    parts: list[np.ndarray] = []  # x_train, y_train, x_test, y_test
    for path in paths:
        arrays = read_mat(path)
        if not {"X", "y"} <= arrays.keys():
            raise M3DError(f"{path}: holds {', '.join(sorted(arrays)) or 'no array'}; X and y are needed")
        x, y = arrays["X"], arrays["y"].astype(np.int64).ravel()
        if x.dtype != np.uint8 or x.ndim != 4 or x.shape[3] != len(y):
            raise M3DError(f"{path}: X is {x.dtype} {list(x.shape)} with {len(y)} labels; uint8 [h, w, 3, N] is needed")
        parts += [x.transpose(3, 0, 1, 2), np.where(y == 10, 0, y)]
    x_train, y_train, x_test, y_test = parts
    return Arrays(x_train, y_train, x_test, y_test)


def read_mat(path: Path) -> dict[str, np.ndarray]:
    """The numeric arrays of a MATLAB 5 file by name, in the type they are stored in."""
    raw = memoryview(path.read_bytes())
    order = {b"IM": "<", b"MI": ">"}.get(bytes(raw[126:128]))
    if order is None or struct.unpack_from(f"{order}H", raw, 124)[0] != 0x0100:
        raise M3DError(f"{path}: not a MATLAB 5 .mat file (version 7.3 files are not supported)")
    arrays: dict[str, np.ndarray] = {}
    try:
        for kind, body in _mat_elements(raw[128:], order):
            if kind == _MAT_COMPRESSED:
                kind, body = next(_mat_elements(memoryview(zlib.decompress(body)), order))
            if kind == _MAT_MATRIX:
                arrays.update(_mat_array(body, order))
    except (zlib.error, struct.error, ValueError, IndexError, KeyError, StopIteration) as error:
        raise M3DError(f"{path}: damaged .mat file ({type(error).__name__}: {error})") from error
    return arrays


def _mat_elements(raw: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """(type, data) of each element of a file or of an array."""
    at = 0
    while at < len(raw):
        kind, size = struct.unpack_from(f"{order}II", raw, at)
        start = at + 8
        if kind >> 16:  # at most four bytes of data, packed with type and size into one tag
            kind, size, start = kind & 0xFFFF, kind >> 16, at + 4
        if start + size > len(raw):
            raise ValueError(f"an element of {size} bytes with {len(raw) - start} left")
        yield kind, raw[start : start + size]
        at = start + size if kind == _MAT_COMPRESSED else start + size + -(start + size) % 8


def _mat_array(body: memoryview, order: str) -> dict[str, np.ndarray]:
    """{name: array} of one matrix element; empty for what is not numeric."""
    elements = _mat_elements(body, order)
    if struct.unpack_from(f"{order}I", next(elements)[1])[0] & 0xFF not in _MAT_NUMERIC:
        return {}
    shape = np.frombuffer(next(elements)[1], f"{order}i4").tolist()
    name = bytes(next(elements)[1]).decode("latin1")
    kind, data = next(elements)
    values = np.frombuffer(data, order + _MAT_DTYPES[kind])
    return {name: values.reshape(shape, order="F")}  # MATLAB stores the first axis fastest


# --------------------------------------------------------------------------------------------------------------- .npz

_NPZ_KEYS = ("x_train", "y_train", "x_test", "y_test")


def read_npz(path: Path, test: bool = True) -> Arrays:
    """An .npz with x_train, y_train, x_test, y_test (images NHWC or NHW) and, if it likes, class_names.

    Without ``test`` it may lack x_test and y_test, and the test split is then empty.
    """
    found, parts = read_arrays(path, (*_NPZ_KEYS, "class_names"))
    missing = [key for key in _NPZ_KEYS if key not in found]
    no_test = missing == ["x_test", "y_test"]
    if missing and (test or not no_test):
        instead = (
            f"; or {option('test_fraction', 0.2)}, which keeps back a part of each class to test on" if no_test else ""
        )
        needed = ", ".join(_NPZ_KEYS)
        raise M3DError(f"{path}: found the keys {', '.join(found) or 'none'}; needed: {needed}{instead}")
    names = _names(parts.get("class_names"), f"{path}: class_names")
    x_train, y_train = _images(parts["x_train"], f"{path}: x_train"), _labels(parts["y_train"], f"{path}: y_train")
    if no_test:
        return Arrays(x_train, y_train, x_train[:0], y_train[:0], names)
    x_test, y_test = _images(parts["x_test"], f"{path}: x_test"), _labels(parts["y_test"], f"{path}: y_test")
    if x_train.shape[1:] != x_test.shape[1:]:
        raise M3DError(f"{path}: x_train has images {x_train.shape[1:]} and x_test {x_test.shape[1:]}; they must agree")
    return Arrays(x_train, y_train, x_test, y_test, names)


def _images(x: np.ndarray, where: str) -> np.ndarray:
    """Images as uint8 [N, h, w, ch]; floats are accepted if they are all within [0, 1]."""
    x = x[..., None] if x.ndim == 3 else x
    if x.ndim != 4 or x.shape[3] not in (1, 3) or 0 in x.shape:
        hint = " (channels come last: x.transpose(0, 2, 3, 1))" if x.ndim == 4 and x.shape[1] in (1, 3) else ""
        raise M3DError(f"{where} has the shape {list(x.shape)}; allowed: [N, h, w], [N, h, w, 1] or [N, h, w, 3]{hint}")
    if x.dtype == np.uint8:
        return x
    if not np.issubdtype(x.dtype, np.floating):
        raise M3DError(f"{where} is {x.dtype}; allowed: uint8, or floating point within [0, 1]")
    pixels = np.empty(x.shape, np.uint8)
    for start in range(0, len(x), _CHUNK):
        chunk = x[start : start + _CHUNK]
        bad = ~((chunk >= 0) & (chunk <= 1)).all(axis=(1, 2, 3))  # NaN fails both comparisons
        if bad.any():
            first = int(bad.argmax())
            low, high = chunk[first].min(), chunk[first].max()
            problem = "has NaN pixels" if np.isnan(low) else f"has pixels from {low:g} to {high:g}"
            raise M3DError(f"{where}: image {start + first} {problem}; allowed: uint8, or floating point within [0, 1]")
        pixels[start : start + _CHUNK] = np.rint(chunk * 255)
    return pixels


def _labels(y: np.ndarray, where: str) -> np.ndarray:
    """Labels as int64 [N]."""
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise M3DError(
            f"{where} is {y.dtype} {list(y.shape)}; allowed: whole numbers [N] from 0, their names in class_names"
        )
    # A stray huge label would otherwise mean billions of empty classes.
    if len(y) and not 0 <= y.min() <= y.max() < len(y):
        raise M3DError(f"{where} runs from {y.min()} to {y.max()}; allowed: 0 to the number of classes less 1")
    return y.astype(np.int64)


def _names(names: np.ndarray | None, where: str) -> tuple[str, ...]:
    """Class names as strings; empty where there are none."""
    if names is None:
        return ()
    if names.ndim != 1 or names.dtype.kind not in "US":
        raise M3DError(f"{where} is {names.dtype} {list(names.shape)}; allowed: strings [C]")
    result = tuple(name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name) for name in names.tolist())
    if len(set(result)) < len(result):
        raise M3DError(f"{where} names a class twice: {', '.join(result)}")
    return result
