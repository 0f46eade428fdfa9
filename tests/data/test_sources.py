"""``load_data``: names and paths, recipes, npz files, the embedded digits, and the real datasets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_files import idx_bytes, md5, save_npz

from m3d.data import dataset_names, load_data, official
from m3d.data.official import RECORDS, Record
from m3d.errors import M3DError

pytestmark = pytest.mark.usefixtures("no_surroundings")


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
