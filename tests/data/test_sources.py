"""``load_data``: names and paths, recipes, the search for official files, downloads, and the real datasets."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import socket
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m3d.data import dataset_names, load_data, official
from m3d.data.official import RECORDS, File, Record
from m3d.errors import M3DError

RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def no_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test may see this machine's own data, nor reach past it."""
    monkeypatch.delenv("M3D_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def save_npz(path: Path, channels: int = 3, classes: int = 10, side: int = 4, **more: Any) -> Path:
    """An .npz of two training and two test images a class."""
    labels = np.arange(2 * classes) % classes
    images = RANDOM.integers(0, 256, (2, 2 * classes, side, side, channels), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, x_train=images[0], y_train=labels, x_test=images[1], y_test=labels, **more)
    return path


# ------------------------------------------------------------------------------------------------------ names, recipes


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("cifar10", "cifar10"),
        ("cifar-10", "cifar10"),
        ("CIFAR_10", "cifar10"),
        ("cifar-100", "cifar100"),
        ("fashion-mnist", "fashion-mnist"),
        ("fashion_mnist", "fashion-mnist"),
        ("FashionMNIST", "fashion-mnist"),
        (" svhn ", "svhn"),
    ],
)
def test_spellings_of_a_name(written: str, name: str) -> None:
    record = official.find(written)
    assert record is not None
    assert record.name == name


def test_names() -> None:
    files = ["cifar10", "cifar100", "digits", "fashion-mnist", "mnist", "svhn"]
    folders = ["imagenet10", "imagenet100", *(f"imagenet100-{part}" for part in range(1, 6))]
    assert dataset_names() == sorted(files + folders) and sorted(RECORDS) == files
    assert [len(RECORDS[name].class_names) for name in files] == [10, 100, 10, 10, 10, 10]
    assert [RECORDS[name].mirror for name in files] == [True, True, False, True, False, False]
    assert [name for name in files if not RECORDS[name].cutmix] == ["mnist"]


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS.keys())
def test_records_are_whole(record: Record) -> None:
    assert len(record.mean) == len(record.std) == (0 if record.bundled else record.channels)
    assert len(set(record.class_names)) == len(record.class_names)
    checksums = [md5 for layout in record.layouts for file in layout.files for md5 in (file.md5, file.content) if md5]
    assert all(len(md5) == 32 and set(md5) <= set("0123456789abcdef") for md5 in checksums)
    assert record.bundled or all(file.md5 for file in record.layouts[-1].files), "a download must have a checksum"


def test_wrong_name_suggests_the_nearest_and_says_that_a_path_must_exist() -> None:
    with pytest.raises(M3DError, match=r"'cifar11'. Did you mean 'cifar10'\? .* A path must exist, and 'cifar11'"):
        load_data("cifar11")


@pytest.mark.parametrize("source", ["./nowhere", "nowhere.npz", Path("nowhere"), Path("cifar10")])
def test_missing_path_is_named(source: str | Path) -> None:
    with pytest.raises(M3DError, match=f"{Path(source)}: no such file or folder"):
        load_data(source)


def test_empty_name_is_not_the_current_folder() -> None:
    with pytest.raises(M3DError, match=r"unknown dataset ''"):
        load_data("")


def test_other_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,2")
    with pytest.raises(M3DError, match=r"a.csv: is neither a folder of images nor an .npz"):
        load_data(tmp_path / "a.csv")


def test_name_wins_over_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_data("digits").recipe == {"source": "digits"}
    with pytest.raises(M3DError, match=r"digits: has no train or test folder"):
        load_data("./digits")
    with pytest.raises(M3DError, match=r"digits: has no train or test folder"):
        load_data(Path("digits"))


def test_recipe_of_a_path_is_absolute_and_loads_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_npz(tmp_path / "mine.npz", classes=3)
    monkeypatch.chdir(tmp_path)
    data = load_data("mine.npz", data_root="unused", size=3, val_fraction=0.5, split_seed=4)
    path = str((tmp_path / "mine.npz").resolve())
    assert data.recipe == {"source": path, "size": 3, "val_fraction": 0.5, "split_seed": 4}
    monkeypatch.chdir("/")
    again = load_data(**data.recipe)
    assert data.val is not None
    assert again.val is not None
    assert again.train.fingerprint == data.train.fingerprint
    assert again.val.fingerprint == data.val.fingerprint
    assert again.val.fingerprint != load_data(**{**data.recipe, "split_seed": 5}).val.fingerprint  # type: ignore[union-attr]
    assert (again.name, again.mean, again.shape) == ("mine", data.mean, (3, 3, 3))


def test_recipe_of_a_name_keeps_a_given_data_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_npz(tmp_path / "data" / "cifar10.npz")
    monkeypatch.chdir(tmp_path)
    data = load_data("cifar_10", data_root="data")
    assert data.recipe == {"source": "cifar10", "data_root": str((tmp_path / "data").resolve())}
    assert load_data(**data.recipe).train.fingerprint == data.train.fingerprint


def test_data_root_is_the_environment_variable_then_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_npz(tmp_path / "home" / ".cache" / "m3d" / "cifar10.npz", side=4)
    save_npz(tmp_path / "elsewhere" / "cifar10.npz", side=5)
    assert load_data("cifar10").shape == (3, 4, 4)
    monkeypatch.setenv("M3D_DATA", str(tmp_path / "elsewhere"))
    assert load_data("cifar10").shape == (3, 5, 5)
    assert load_data("cifar10").recipe == {"source": "cifar10"}
    assert load_data("cifar10", data_root=tmp_path / "home" / ".cache" / "m3d").shape == (3, 4, 4)


# ----------------------------------------------------------------------------------------------------------------- npz


def test_npz_of_ones_own_has_its_own_statistics(tmp_path: Path) -> None:
    data = load_data(save_npz(tmp_path / "mine.npz", channels=1, classes=3, class_names=np.array(["x", "y", "z"])))
    assert (data.name, data.class_names, data.mirror) == ("mine", ("x", "y", "z"), True)
    assert data.mean == pytest.approx((float(data.train.images.double().mean()) / 255,))
    assert load_data(save_npz(tmp_path / "mine.npz", classes=3)).class_names == ("0", "1", "2")


def test_npz_called_like_a_dataset_takes_after_it(tmp_path: Path) -> None:
    data = load_data(save_npz(tmp_path / "Fashion_MNIST.npz", channels=1))
    record = RECORDS["fashion-mnist"]
    assert (data.name, data.class_names, data.mirror) == ("fashion-mnist", record.class_names, True)
    assert (data.mean, data.std) == ((0.2861,), (0.3530,))
    assert data.recipe == {"source": str((tmp_path / "Fashion_MNIST.npz").resolve())}
    assert not load_data(save_npz(tmp_path / "svhn.npz")).mirror
    assert load_data(save_npz(tmp_path / "svhn.npz")).cutmix
    assert not load_data(save_npz(tmp_path / "mnist.npz", channels=1)).cutmix


@pytest.mark.parametrize(("channels", "classes"), [(1, 10), (3, 9)])
def test_npz_called_like_a_dataset_must_be_like_it(tmp_path: Path, channels: int, classes: int) -> None:
    names = np.array([f"class {c}" for c in range(classes)])
    path = save_npz(tmp_path / "cifar10.npz", channels, classes, class_names=names)
    with pytest.raises(M3DError, match=f"{classes} classes of {channels}-channel images, but cifar10 has 10 classes"):
        load_data(path)


def test_npz_with_a_label_too_many_is_refused(tmp_path: Path) -> None:
    path = save_npz(tmp_path / "mine.npz", classes=3, class_names=np.array(["x", "y"]))
    with pytest.raises(M3DError, match=r"mine.npz: train: labels run from 0 to 2; allowed: 0 to 1"):
        load_data(path)


@pytest.mark.parametrize("stem", ["fashion-mnist", "fashion_mnist", "FashionMNIST"])
def test_npz_below_the_data_root_is_found_by_name(tmp_path: Path, stem: str) -> None:
    save_npz(tmp_path / f"{stem}.npz", channels=1)
    assert load_data("fashion-mnist", data_root=tmp_path, download=False).shape == (1, 4, 4)


def test_size_of_a_named_dataset(tmp_path: Path) -> None:
    save_npz(tmp_path / "cifar10.npz", side=8)
    data = load_data("cifar10", data_root=tmp_path, size=4)
    assert data.shape == (3, 4, 4)
    assert data.mean == RECORDS["cifar10"].mean
    assert data.recipe["size"] == 4


# ------------------------------------------------------------------------------------------------------ official files


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


@pytest.mark.parametrize("folder", ["", "mnist", "MNIST/raw"])
@pytest.mark.parametrize("packing", ["gz", "packed again", "plain"])
def test_idx_files_are_found(tmp_path: Path, folder: str, packing: str) -> None:
    record, files = tiny_mnist()
    plain = {name.removesuffix(".gz"): gzip.decompress(raw) for name, raw in files.items()}
    again = {f"{name}.gz": gzip.compress(raw, compresslevel=1, mtime=1) for name, raw in plain.items()}
    assert again.keys() == files.keys()
    assert again != files
    write(tmp_path / folder, {"gz": files, "packed again": again, "plain": plain}[packing])
    arrays = official.read(record, tmp_path, download=False)
    assert (arrays.x_train.shape, arrays.x_test.shape) == ((20, 4, 4, 1), (10, 4, 4, 1))
    assert arrays.x_train.tobytes() == plain["train-images-idx3-ubyte"][16:]
    assert arrays.y_test.tolist() == list(range(10))


def test_files_of_another_dataset_with_the_same_names_are_not_taken(tmp_path: Path) -> None:
    record, _ = tiny_mnist()
    write(tmp_path, tiny_mnist()[1])  # other random pixels
    with pytest.raises(M3DError, match=r"md5 differs.*: .*train-images-idx3-ubyte.gz"):
        official.read(record, tmp_path, download=False)


def test_npz_is_preferred_to_official_files(tmp_path: Path) -> None:
    record, files = tiny_mnist()
    write(tmp_path, files)
    save_npz(tmp_path / "mnist.npz", channels=1, side=5)
    assert official.read(record, tmp_path, download=False).x_train.shape == (20, 5, 5, 1)


def test_number_of_images_is_checked(tmp_path: Path) -> None:
    record, files = tiny_mnist()
    write(tmp_path, files)
    with pytest.raises(M3DError, match=r"mnist: 20 \+ 10 images in .*idx3.*; the dataset has 60000 \+ 10000"):
        official.read(replace(record, counts=(60_000, 10_000)), tmp_path, download=False)


def test_folder_of_the_distribution_is_looked_in(tmp_path: Path) -> None:
    record, files = tiny_mnist()
    write(tmp_path / "distribution", files)
    layouts = tuple(replace(layout, folders=("", str(tmp_path / "distribution"))) for layout in record.layouts)
    assert len(official.read(replace(record, layouts=layouts), tmp_path / "root", download=False).x_train) == 20
    assert all("/usr/share/datasets/fashion-mnist" in layout.folders for layout in RECORDS["fashion-mnist"].layouts)


def cifar_files(name: str) -> dict[str, bytes]:
    """Two records in each of CIFAR-10's or CIFAR-100's binary batches."""
    batches = [file.name for file in RECORDS[name].layouts[-2].files]
    contents = RANDOM.integers(0, 10, (len(batches), 2, LABEL_BYTES[name] + 3072), np.uint8)
    return {batch: content.tobytes() for batch, content in zip(batches, contents, strict=True)}


def pickled(name: str, records: bytes) -> bytes:
    """The pickled form of a binary batch."""
    rows, labels = np.frombuffer(records, np.uint8).reshape(2, -1), LABEL_BYTES[name]
    key = {"cifar10": b"labels", "cifar100": b"fine_labels"}[name]
    batch = {key: rows[:, labels - 1].tolist(), b"coarse_labels": rows[:, 0].tolist(), b"data": rows[:, labels:].copy()}
    return pickle.dumps(batch, 2)


LABEL_BYTES = {"cifar10": 1, "cifar100": 2}
CIFAR_FOLDERS = [
    ("cifar10", "cifar-10-batches-bin"),
    ("cifar10", "cifar-10-batches-py"),
    ("cifar100", "cifar-100-binary"),
    ("cifar100", "cifar-100-python"),
]


@pytest.mark.parametrize(("name", "folder"), CIFAR_FOLDERS)
def test_unpacked_cifar_is_found(tmp_path: Path, name: str, folder: str) -> None:
    files = cifar_files(name)
    pickles = {batch.removesuffix(".bin"): pickled(name, records) for batch, records in files.items()}
    write(tmp_path / folder, pickles if "py" in folder else files)
    n = 2 * (len(files) - 1)
    arrays = official.read(replace(RECORDS[name], counts=(n, 2)), tmp_path, download=False)
    (first, *_, last), label = files.values(), LABEL_BYTES[name] - 1
    assert arrays.y_train[0] == first[label]
    assert arrays.y_test[0] == last[label]
    assert arrays.x_train[0, 0, 0].tolist() == [first[label + 1 + 1024 * channel] for channel in range(3)]


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_archive_is_found_and_its_checksum_minded(tmp_path: Path, name: str) -> None:
    files = cifar_files(name)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for member_name, content in files.items():
            member = tarfile.TarInfo(f"folder/{member_name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    record, layout = RECORDS[name], RECORDS[name].layouts[-1]
    write(tmp_path, {layout.files[0].name: stream.getvalue()})
    with pytest.raises(M3DError, match=f"md5 differs.*{layout.files[0].name}"):
        official.read(record, tmp_path, download=False)
    known = replace(layout, files=(File(layout.files[0].name, md5(stream.getvalue())),))
    record = replace(record, layouts=(known,), counts=(2 * (len(files) - 1), 2))
    assert len(official.read(record, tmp_path, download=False).x_train) == 2 * (len(files) - 1)


def test_missing_files_are_named_with_the_folder_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(M3DError) as caught:
        load_data("svhn", data_root=tmp_path, download=False)
    for part in ("'svhn'", str(tmp_path), "svhn.npz", "train_32x32.mat", "test_32x32.mat", "--data-root", "M3D_DATA"):
        assert part in str(caught.value)


# ----------------------------------------------------------------------------------------------------------- downloads


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves a folder and counts what is asked for."""

    asked: list[str]

    def log_message(self, *_: Any) -> None:
        self.asked.append(self.path)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """(address, folder served, list of what was asked for)."""
    folder = tmp_path / "web"
    folder.mkdir()
    asked: list[str] = []
    handler = type("Handler", (QuietHandler,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as web:
        thread = threading.Thread(target=web.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{web.server_port}", folder, asked
        web.shutdown()
        thread.join()


def files_below(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


def test_download_once(tmp_path: Path, server: tuple[str, Path, list[str]]) -> None:
    url, folder, asked = server
    record, files = tiny_mnist(url)
    write(folder, files)
    first = official.read(record, tmp_path / "root")
    assert files_below(tmp_path / "root") == sorted(files)
    assert len(asked) == 4
    again = official.read(record, tmp_path / "root")
    assert len(asked) == 4, "files that are there are not fetched again"
    assert np.array_equal(first.x_train, again.x_train)
    assert first.x_train.tobytes() == gzip.decompress(files["train-images-idx3-ubyte.gz"])[16:]


def test_download_with_the_wrong_checksum_leaves_nothing(tmp_path: Path, server: tuple[str, Path, list[str]]) -> None:
    url, folder, asked = server
    record, _ = tiny_mnist(url)
    write(folder, tiny_mnist()[1])
    with pytest.raises(M3DError, match=f"{url}/train-images-idx3-ubyte.gz could not be downloaded: .*hash"):
        official.read(record, tmp_path / "root")
    assert asked == ["/train-images-idx3-ubyte.gz"]
    assert files_below(tmp_path / "root") == []


def test_download_mends_a_wrong_file_in_its_own_folder(tmp_path: Path, server: tuple[str, Path, list[str]]) -> None:
    url, folder, asked = server
    record, files = tiny_mnist(url)
    write(folder, files)
    write(tmp_path / "root" / "mnist", {**files, "t10k-images-idx3-ubyte.gz": b"half a file"})
    assert len(official.read(record, tmp_path / "root").x_test) == 10
    assert asked == ["/t10k-images-idx3-ubyte.gz"]


def test_file_that_is_not_on_the_server(tmp_path: Path, server: tuple[str, Path, list[str]]) -> None:
    record, _ = tiny_mnist(server[0])
    with pytest.raises(M3DError, match=r"could not be downloaded: 404"):
        official.read(record, tmp_path / "root")
    assert files_below(tmp_path / "root") == []


def test_unreachable_server(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound but not listening: nothing answers at this port
        taken.bind(("127.0.0.1", 0))
        record, _ = tiny_mnist(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(M3DError, match=r"could not be downloaded.*\.gz.* --data-root"):
            official.read(record, tmp_path / "root")
    assert files_below(tmp_path / "root") == []


def test_download_switched_off_asks_nothing(tmp_path: Path, server: tuple[str, Path, list[str]]) -> None:
    url, folder, asked = server
    record, files = tiny_mnist(url)
    write(folder, files)
    with pytest.raises(M3DError, match=r"downloading is switched off"):
        official.read(record, tmp_path / "root", download=False)
    assert asked == []


# -------------------------------------------------------------------------------------------------------------- digits


def test_digits() -> None:
    data = load_data("digits")
    assert (data.name, data.shape, len(data.train), len(data.test)) == ("digits", (1, 8, 8), 1347, 450)
    assert data.class_names == tuple("0123456789")
    assert not data.mirror
    assert data.train.count.min() >= 130
    assert data.test.count.min() >= 43
    assert (data.train.images.min(), data.train.images.max()) == (0, 255)
    assert (data.mean[0], data.std[0]) == pytest.approx((0.30528, 0.37584), abs=1e-5)


def test_digits_are_those_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn has the original digits")
    original = datasets.load_digits()
    data = load_data("digits")
    images = np.concatenate([part.images[:, 0].numpy() for part in (data.train, data.test)])
    labels = np.concatenate([part.labels().numpy() for part in (data.train, data.test)])
    ours = sorted(zip(labels.tolist(), images.reshape(-1, 64).tolist(), strict=True))
    scaled = np.rint(original.data * 255 / 16).astype(int)
    assert ours == sorted(zip(original.target.tolist(), scaled.tolist(), strict=True))


def test_digits_need_neither_network_nor_scikit_learn() -> None:
    code = (
        "import socket, sys\n"
        "sys.modules.update(dict.fromkeys(['sklearn', 'scipy', 'pooch', 'requests']))\n"  # importing them now fails
        "def refuse(*_, **__): raise AssertionError('network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from m3d.data import load_data\n"
        "assert len(load_data('digits').train) == 1347\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)


# ------------------------------------------------------------------------------------------------------- real datasets

REAL = {
    "cifar10": (50_000, 10_000, (3, 32, 32)),
    "cifar100": (50_000, 10_000, (3, 32, 32)),
    "fashion-mnist": (60_000, 10_000, (1, 28, 28)),
    "mnist": (60_000, 10_000, (1, 28, 28)),
    "svhn": (73_257, 26_032, (3, 32, 32)),
}
DATA_ROOT = os.environ.get("M3D_DATA")


def real(name: str) -> Any:
    """The real dataset, or a skipped test that says why."""
    if not DATA_ROOT:
        pytest.skip("set M3D_DATA to a folder with the real datasets to run this")
    try:
        return load_data(name, data_root=DATA_ROOT, download=False)
    except M3DError as error:
        if "downloading is switched off" not in str(error):
            raise
        pytest.skip(f"{name} is not in M3D_DATA={DATA_ROOT}")


@pytest.mark.data
@pytest.mark.parametrize("name", REAL)
def test_real_dataset(name: str) -> None:
    train, test, shape = REAL[name]
    data = real(name)
    assert (len(data.train), len(data.test), data.shape) == (train, test, shape)
    assert data.class_names == RECORDS[name].class_names
    if name != "cifar100":  # which borrows CIFAR-10's numbers
        mean = (data.train.images.float().mean((0, 2, 3)) / 255).tolist()
        assert mean == pytest.approx(data.mean, abs=2e-4)


@pytest.mark.data
def test_real_mnist_has_the_checksums_of_the_official_files() -> None:
    real("mnist")
    npz = next(Path(str(DATA_ROOT)).glob("mnist.npz"), None)
    if npz is None:
        pytest.skip("needs mnist.npz, in which the images are in their official order")
    with np.load(npz) as arrays:
        parts = [arrays[key].astype(np.uint8) for key in ("x_train", "y_train", "x_test", "y_test")]
    contents = [idx_bytes(part.reshape(-1, 28, 28) if part.ndim > 1 else part) for part in parts]
    assert [md5(content) for content in contents] == [file.content for file in RECORDS["mnist"].layouts[-1].files]
