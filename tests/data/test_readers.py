"""Readers of dataset files: right values from well-made files, one error for each kind of bad one, and no code run."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m3d.data import readers
from m3d.errors import M3DError

RANDOM = np.random.default_rng(0)


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def tar_bytes(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


# ---------------------------------------------------------------------------------------------------------------- idx


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gz"])
def test_idx(tmp_path: Path, pack: Any) -> None:
    array = RANDOM.integers(0, 256, (3, 4, 5), np.uint8)
    (tmp_path / "images").write_bytes(pack(idx_bytes(array)))
    assert np.array_equal(readers.read_idx(tmp_path / "images"), array)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not an idx file.*nothing"),
        (b"\0\0\x0d\x01\0\0\0\0", "not an idx file.*00000d01"),  # floats
        (b"\0\0\x08\x03\0\0", "not an idx file"),
        (idx_bytes(np.zeros((3, 4), np.uint8))[:-1], "11 bytes of data, but \\[3, 4\\]"),
        (gzip.compress(idx_bytes(np.zeros(3, np.uint8)), mtime=0)[:-9], "damaged gzip"),
    ],
)
def test_bad_idx_is_named(tmp_path: Path, raw: bytes, message: str) -> None:
    (tmp_path / "images.gz").write_bytes(raw)
    with pytest.raises(M3DError, match=f"images.gz: .*{message}"):
        readers.read_idx(tmp_path / "images.gz")


def test_idx_files_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    (tmp_path / "labels").write_bytes(idx_bytes(np.zeros(3, np.uint8)))
    with pytest.raises(M3DError, match=r"labels: an array of 1 dimensions; 3 are needed"):
        readers.read_idx_files([tmp_path / "labels"] * 4)


# -------------------------------------------------------------------------------------------------------------- CIFAR


def cifar_batch(n: int, label_bytes: int = 1) -> tuple[np.ndarray, np.ndarray, bytes]:
    """Images [n, 32, 32, 3], labels [n], and the binary records of them."""
    images = RANDOM.integers(0, 256, (n, 32, 32, 3), np.uint8)
    labels = RANDOM.integers(0, 10, (n, label_bytes)).astype(np.uint8)
    records = np.concatenate([labels, images.transpose(0, 3, 1, 2).reshape(n, 3072)], axis=1)
    return images, labels[:, -1].astype(np.int64), records.tobytes()


def decode_one_label(raw: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    return readers.cifar_records(raw, where, label_bytes=1)


@pytest.mark.parametrize("label_bytes", [1, 2])
def test_cifar_records(label_bytes: int) -> None:
    images, labels, raw = cifar_batch(7, label_bytes)
    read_images, read_labels = readers.cifar_records(raw, "batch", label_bytes=label_bytes)
    assert np.array_equal(read_images, images)
    assert np.array_equal(read_labels, labels)


@pytest.mark.parametrize("raw", [b"", bytes(3072), bytes(3074)])
def test_truncated_cifar_records_are_refused(raw: bytes) -> None:
    with pytest.raises(M3DError, match=r"batch.bin: .*3073"):
        readers.cifar_records(raw, "batch.bin", label_bytes=1)


def test_cifar_folder_and_archive_are_the_same(tmp_path: Path) -> None:
    parts = {f"{name}.bin": cifar_batch(n) for name, n in (("one", 3), ("two", 4), ("test", 2))}
    for name, (_, _, raw) in parts.items():
        (tmp_path / name).write_bytes(raw)
    backwards = {f"some-folder/{name}": raw for name, (_, _, raw) in reversed(parts.items())}
    (tmp_path / "all.tar.gz").write_bytes(tar_bytes({"some-folder/readme.html": b"hello", **backwards}))
    loose = readers.read_cifar([tmp_path / name for name in parts], decode=decode_one_label)
    packed = readers.read_cifar([tmp_path / "all.tar.gz"], decode=decode_one_label, members=tuple(parts))
    for arrays in (loose, packed):
        assert np.array_equal(arrays.x_train, np.concatenate([parts["one.bin"][0], parts["two.bin"][0]]))
        assert np.array_equal(arrays.y_train, np.concatenate([parts["one.bin"][1], parts["two.bin"][1]]))
        assert np.array_equal(arrays.x_test, parts["test.bin"][0])
        assert np.array_equal(arrays.y_test, parts["test.bin"][1])


def test_archive_without_a_batch_names_it(tmp_path: Path) -> None:
    (tmp_path / "all.tar.gz").write_bytes(tar_bytes({"x/one.bin": cifar_batch(1)[2]}))
    with pytest.raises(M3DError, match=r"all.tar.gz: has no test.bin"):
        readers.read_cifar([tmp_path / "all.tar.gz"], decode=decode_one_label, members=("one.bin", "test.bin"))


def test_damaged_archive_is_named(tmp_path: Path) -> None:
    raw = tar_bytes({"x/one.bin": cifar_batch(3)[2]})
    (tmp_path / "all.tar.gz").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(M3DError, match=r"all.tar.gz: damaged archive"):
        readers.read_cifar([tmp_path / "all.tar.gz"], decode=decode_one_label, members=("one.bin",))


# ------------------------------------------------------------------------------------------------------------ pickles


class PythonTwoPickler(pickle._Pickler):  # type: ignore[name-defined,misc]
    """Writes bytes as Python 2 wrote its strings: as they are, without a call to an encoder."""

    def save_bytes(self, value: bytes) -> None:
        self.write(b"T" + struct.pack("<i", len(value)) + value)
        self.memoize(value)

    dispatch = {**pickle._Pickler.dispatch, bytes: save_bytes}  # type: ignore[attr-defined]  # noqa: RUF012


def python_two(value: Any) -> bytes:
    stream = io.BytesIO()
    PythonTwoPickler(stream, protocol=2).dump(value)
    return stream.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


WRITERS = [python_two, lambda value: pickle.dumps(value, 2), lambda value: pickle.dumps(value, 4)]


@pytest.mark.parametrize("write", WRITERS, ids=["python 2", "protocol 2", "protocol 4"])
def test_cifar_pickle(write: Any) -> None:
    images, labels, raw = cifar_batch(5)
    rows = np.frombuffer(raw, np.uint8).reshape(5, 3073)[:, 1:].copy()
    blob = write({b"batch_label": b"batch 1 of 5", b"labels": labels.tolist(), b"data": rows, b"filenames": [b"a.png"]})
    read_images, read_labels = readers.cifar_pickle(blob, "batch", label_key="labels")
    assert np.array_equal(read_images, images)
    assert np.array_equal(read_labels, labels)


class Malicious:
    """Unpickles by running a command."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f'echo ran > "{self.marker}"',)


@pytest.mark.parametrize("protocol", range(6))
def test_malicious_pickle_is_refused_and_runs_nothing(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "marker"
    blob = pickle.dumps({"data": Malicious(marker)}, protocol)
    with pytest.raises(M3DError, match=r"batch: refused: it asks for \w+\.system"):
        readers.cifar_pickle(blob, "batch", label_key="labels")
    assert not marker.exists()
    pickle.loads(blob)
    assert marker.exists(), "the pickle must be one that does run a command in an ordinary unpickler"


@pytest.mark.parametrize(
    "name", ["builtins.eval", "__builtin__.eval", "builtins.getattr", "numpy.load", "numpy._core.multiarray.scalar"]
)
def test_every_other_global_is_refused_by_name(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    with pytest.raises(M3DError, match=f"batch: refused: it asks for {name}"):
        readers.cifar_pickle(f"c{module}\n{attribute}\n.".encode(), "batch", label_key="labels")


def test_pickle_with_another_encoding_is_refused() -> None:
    with pytest.raises(M3DError, match=r"rot13"):
        readers.cifar_pickle(b"c_codecs\nencode\n(X\x01\0\0\0aX\x05\0\0\0rot13tR.", "batch", label_key="labels")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2], "holds a list"),
        ({"labels": [1]}, "'data' is missing"),
        ({"data": np.zeros((2, 3072), np.float32), "labels": [1, 2]}, "'data' is missing or not uint8"),
        ({"data": np.zeros((2, 3071), np.uint8), "labels": [1, 2]}, "'data' is missing or not uint8"),
        ({"data": np.zeros((2, 3072), np.uint8), "coarse": [1, 2]}, "'labels' is missing"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, "not a list of 2"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1, "a"]}, "not a list of 2"),
    ],
)
def test_bad_pickled_batch_is_refused(value: Any, message: str) -> None:
    with pytest.raises(M3DError, match=f"batch: .*{message}"):
        readers.cifar_pickle(pickle.dumps(value, 4), "batch", label_key="labels")


def test_truncated_pickle_is_refused() -> None:
    with pytest.raises(M3DError, match=r"batch: damaged pickle"):
        readers.cifar_pickle(pickle.dumps({"data": list(range(100))}, 4)[:-20], "batch", label_key="labels")


# --------------------------------------------------------------------------------------------------------- SVHN, .mat


def svhn_arrays(n: int) -> dict[str, np.ndarray]:
    x = RANDOM.integers(0, 256, (32, 32, 3, n), np.uint8)
    return {"X": x, "y": RANDOM.integers(1, 11, (n, 1)).astype(np.uint8)}


def save_mat(path: Path, arrays: dict[str, Any], compress: bool = True) -> Path:
    pytest.importorskip("scipy.io", reason="scipy writes the .mat files that these tests read").savemat(
        path, arrays, do_compression=compress
    )
    return path


@pytest.mark.parametrize("compress", [True, False])
def test_mat_reads_what_scipy_writes(tmp_path: Path, compress: bool) -> None:
    arrays: dict[str, Any] = {
        **svhn_arrays(9),
        "a_longer_name": RANDOM.normal(size=(2, 3)),
        "whole": np.array([[-3, 70_000]]),
        "single": np.float32([[1.5]]),
    }
    path = save_mat(tmp_path / "a.mat", {"text": "hello", "record": {"field": 1.0}, **arrays}, compress)
    read = readers.read_mat(path)
    assert read.keys() == arrays.keys()  # text and records are passed over
    for name, array in arrays.items():
        assert np.array_equal(read[name], array), name
    assert read["X"].dtype == np.uint8


def test_mat_of_the_other_byte_order(tmp_path: Path) -> None:
    def element(kind: int, data: bytes) -> bytes:
        return struct.pack(">II", kind, len(data)) + data + bytes(-len(data) % 8)

    flags, shape, name = struct.pack(">II", 11, 0), struct.pack(">ii", 2, 3), b"\0\1\0\1y\0\0\0"
    values = np.arange(6, dtype=">u2").reshape(2, 3)
    matrix = element(6, flags) + element(5, shape) + name + element(4, values.tobytes(order="F"))
    header = b"MATLAB 5.0".ljust(124) + b"\x01\x00MI"
    compressed = zlib.compress(element(14, matrix))
    (tmp_path / "big.mat").write_bytes(header + struct.pack(">II", 15, len(compressed)) + compressed)
    assert np.array_equal(readers.read_mat(tmp_path / "big.mat")["y"], values)


def test_svhn_label_ten_is_the_digit_zero(tmp_path: Path) -> None:
    parts = {name: {**svhn_arrays(20), "y": np.arange(20).reshape(20, 1) % 10 + 1.0} for name in ("train", "test")}
    paths = [save_mat(tmp_path / f"{name}.mat", arrays) for name, arrays in parts.items()]
    arrays = readers.read_svhn(paths)
    assert arrays.y_train.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0] * 2
    assert arrays.y_train.dtype == np.int64
    assert np.array_equal(arrays.x_train[3], parts["train"]["X"][..., 3])
    assert np.array_equal(arrays.x_test[19], parts["test"]["X"][..., 19])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"X": np.zeros((32, 32, 3, 2), np.uint8)}, "holds X; X and y are needed"),
        ({"X": np.full((32, 32, 3, 2), 0.5), "y": np.ones((2, 1))}, "X is float64"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.ones((3, 1))}, "with 3 labels"),
    ],
)
def test_bad_svhn_is_refused(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(M3DError, match=f"a.mat: .*{message}"):
        readers.read_svhn([save_mat(tmp_path / "a.mat", arrays)] * 2)


@pytest.mark.parametrize("keep", [150, 1000, -1])
def test_truncated_mat_is_named(tmp_path: Path, keep: int) -> None:
    path = save_mat(tmp_path / "a.mat", svhn_arrays(9))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(M3DError, match=r"a.mat: damaged"):
        readers.read_mat(path)


@pytest.mark.parametrize("raw", [b"", b"x" * 200, b"MATLAB 7.3".ljust(124) + b"\x00\x02IM" + bytes(100)])
def test_other_files_are_no_mat(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "a.mat").write_bytes(raw)
    with pytest.raises(M3DError, match=r"a.mat: not a MATLAB 5"):
        readers.read_mat(tmp_path / "a.mat")


# --------------------------------------------------------------------------------------------------------------- .npz


def npz(tmp_path: Path, **changes: Any) -> Path:
    """An .npz of ten training and six test images; a change to None leaves a key out."""
    parts: dict[str, Any] = {
        "x_train": RANDOM.integers(0, 256, (10, 4, 5, 3), np.uint8),
        "y_train": np.arange(10) % 3,
        "x_test": RANDOM.integers(0, 256, (6, 4, 5, 3), np.uint8),
        "y_test": np.arange(6) % 3,
        **changes,
    }
    np.savez(tmp_path / "a.npz", **{key: value for key, value in parts.items() if value is not None})
    return tmp_path / "a.npz"


def test_npz(tmp_path: Path) -> None:
    x = RANDOM.integers(0, 256, (10, 4, 5, 3), np.uint8)
    y = np.arange(10, dtype=np.uint8)[:, None] % 3
    arrays = readers.read_npz(
        npz(tmp_path, x_train=x, y_train=y, class_names=np.array(["a", "b", "é"]), note=np.ones(1))
    )
    assert np.array_equal(arrays.x_train, x)
    assert arrays.y_train.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert arrays.y_train.dtype == np.int64
    assert arrays.class_names == ("a", "b", "é")


def test_npz_of_grey_images_without_a_channel_axis(tmp_path: Path) -> None:
    x_train, x_test = np.ones((10, 4, 5), np.uint8), np.ones((6, 4, 5, 1), np.uint8)
    arrays = readers.read_npz(npz(tmp_path, x_train=x_train, x_test=x_test))
    assert arrays.x_train.shape == (10, 4, 5, 1)
    assert arrays.class_names == ()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_npz_of_fractions_is_scaled(tmp_path: Path, dtype: Any) -> None:
    x = RANDOM.integers(0, 256, (10, 4, 5, 3), np.uint8)
    assert np.array_equal(readers.read_npz(npz(tmp_path, x_train=(x / 255).astype(dtype))).x_train, x)


def test_npz_of_fractions_is_rounded_to_the_nearest(tmp_path: Path) -> None:
    x = np.zeros((10, 4, 5, 3))
    x[0, 0, 0] = np.array([100.4, 100.6, 254.6]) / 255
    assert readers.read_npz(npz(tmp_path, x_train=x)).x_train[0, 0, 0].tolist() == [100, 101, 255]


def spoiled(index: int, value: float) -> np.ndarray:
    x = np.zeros((10, 4, 5, 3), np.float32)
    x[index, 2, 1, 0] = value
    return x


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_test": None}, "found the keys x_train, y_train, y_test; needed: x_train, y_train, x_test, y_test"),
        ({"x_train": spoiled(7, np.nan)}, "x_train: image 7 has NaN pixels"),
        ({"x_train": spoiled(3, np.inf)}, "x_train: image 3 has pixels from 0 to inf"),
        ({"x_train": spoiled(4, 1.5)}, "x_train: image 4 has pixels from 0 to 1.5; allowed: uint8"),
        ({"x_train": spoiled(4, -0.5)}, "x_train: image 4 has pixels from -0.5 to 0"),
        ({"x_train": np.zeros((10, 4, 5, 3), np.int64)}, "x_train is int64; allowed: uint8"),
        ({"x_train": np.zeros((10, 3, 4, 5), np.uint8)}, r"x_train has the shape \[10, 3, 4, 5\]; allowed"),
        ({"x_train": np.zeros((10, 60), np.uint8)}, r"x_train has the shape \[10, 60\]"),
        ({"x_train": np.zeros((0, 4, 5, 3), np.uint8)}, r"x_train has the shape \[0, 4, 5, 3\]"),
        ({"x_test": np.zeros((6, 5, 5, 3), np.uint8)}, r"x_train has images \(4, 5, 3\) and x_test \(5, 5, 3\)"),
        ({"y_train": np.zeros(10)}, "y_train is float64"),
        ({"y_train": np.zeros((10, 3), np.int64)}, r"y_train is int64 \[10, 3\]"),
        ({"y_train": np.arange(10) - 1}, "y_train runs from -1 to 8"),
        ({"y_train": np.arange(10) * 10**9}, "y_train runs from 0 to 9000000000"),
        ({"class_names": np.array([1, 2, 3])}, "class_names is int64"),
        ({"class_names": np.array(["a", "b", "a"])}, "class_names names a class twice"),
        ({"x_train": np.array([Malicious(Path("never"))], dtype=object)}, "cannot be read as an .npz of plain arrays"),
    ],
)
def test_bad_npz_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(M3DError, match=f"a.npz: {message}"):
        readers.read_npz(npz(tmp_path, **changes))


@pytest.mark.parametrize("raw", [b"", b"hello", b"PK\x03\x04 no archive", pickle.dumps([1, 2])])
def test_other_files_are_no_npz(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(raw)
    with pytest.raises(M3DError, match=r"a.npz: cannot be read"):
        readers.read_npz(tmp_path / "a.npz")


def test_single_array_is_no_npz(tmp_path: Path) -> None:
    with (tmp_path / "a.npz").open("wb") as stream:
        np.save(stream, np.ones(3))
    with pytest.raises(M3DError, match=r"a.npz: cannot be read as an .npz"):
        readers.read_npz(tmp_path / "a.npz")


def test_truncated_npz_is_named(tmp_path: Path) -> None:
    path = npz(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(M3DError, match=r"a.npz: cannot be read"):
        readers.read_npz(path)
