"""Named datasets: the search for official files, and their download."""

from __future__ import annotations

import gzip
import io
import pickle
import socket
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
from made_files import RANDOM, md5, save_npz, tiny_mnist, write

from m3d.data import load_data, official
from m3d.data.official import RECORDS, File
from m3d.errors import M3DError

pytestmark = pytest.mark.usefixtures("no_surroundings")


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
    for part in ("'svhn'", str(tmp_path), "svhn.npz", "train_32x32.mat", "test_32x32.mat", "data_root", "M3D_DATA"):
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
        with pytest.raises(M3DError, match=r"could not be downloaded.*\.gz.* data_root"):
            official.read(record, tmp_path / "root")
    assert files_below(tmp_path / "root") == []


def test_download_switched_off_asks_nothing(tmp_path: Path, server: tuple[str, Path, list[str]]) -> None:
    url, folder, asked = server
    record, files = tiny_mnist(url)
    write(folder, files)
    with pytest.raises(M3DError, match=r"downloading is switched off"):
        official.read(record, tmp_path / "root", download=False)
    assert asked == []
