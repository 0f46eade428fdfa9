"""Hugging Face datasets: a tiny one saved to the disk, where the package is there; a clear error where it is not."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import m3d
from m3d.data import hub, load_data
from m3d.data.streamed import StreamedData
from m3d.errors import M3DError

NAMES = ("cat", "dog")


def encoded(value: int) -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (value, 2 * value, 7)).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


# ------------------------------------------------------------------------------------------ with the package, if it is


def save(where: Path, test: str = "test", bad: bool = False, label: str = "label") -> Path:
    """Six training images whose labels are mixed, and two test images."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"img": datasets.Image(), label: datasets.ClassLabel(names=list(NAMES))})
    splits = {"train": [1, 0, 1, 0, 0, 1], test: [0, 1]}
    made = {}
    for split, labels in splits.items():
        images = [encoded(10 * i) for i in range(len(labels))]
        if bad and split == "train":
            images[3] = {"bytes": b"no image", "path": None}
        made[split] = datasets.Dataset.from_dict({"img": images, label: labels}, features=features)
    datasets.DatasetDict(made).save_to_disk(str(where))
    return where


@pytest.mark.parametrize("resident", ["yes", "no"])
@pytest.mark.parametrize("test", ["test", "validation"])
def test_a_saved_dataset(tmp_path: Path, resident: str, test: str) -> None:
    data = load_data(save(tmp_path / "pets", test), resident=resident)
    assert isinstance(data.train, StreamedData) == (resident == "no")
    assert data.name == "pets" and data.class_names == NAMES and data.train.count.tolist() == [3, 3]
    assert data.train.images[:, 0, 0, 0].tolist() == [10, 30, 40, 0, 20, 50]  # by class, in order within one
    assert data.train.images[:, 1, 0, 0].tolist() == [20, 60, 80, 0, 40, 100]
    assert load_data(**data.recipe).train.fingerprint == data.train.fingerprint
    condensed = m3d.condense(data, 1, "dm", net="convnet2:width=8", steps=1, batch_real=2, device="cpu")
    assert condensed.class_names == list(NAMES)


@pytest.mark.parametrize("resident", ["yes", "no"])
def test_a_bad_cell_is_refused_or_left_out(tmp_path: Path, resident: str) -> None:
    root = save(tmp_path / "pets", bad=True)
    with pytest.raises(M3DError, match=r"pets/train/3: cannot be read as an image"):
        load_data(root, resident=resident)
    data = load_data(root, resident=resident, on_bad_image="skip")
    assert data.train.images[:, 0, 0, 0].tolist() == [10, 40, 0, 20, 50]


def test_splits_and_columns_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(M3DError, match=r"has the splits train, extra; needed: train, and test or validation"):
        load_data(save(tmp_path / "pets", test="extra"))
    datasets = pytest.importorskip("datasets")
    plain = datasets.Dataset.from_dict({"number": [1, 2]})
    datasets.DatasetDict({"train": plain, "test": plain}).save_to_disk(str(tmp_path / "numbers"))
    with pytest.raises(M3DError, match=r"one Image and one ClassLabel column are needed; it has number: Value"):
        load_data(tmp_path / "numbers")


def test_a_name_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load(name: str) -> None:
        raise FileNotFoundError(f"no {name} on the hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(M3DError, match=r"hf:nobody/nothing: cannot be loaded \(FileNotFoundError: no nobody/nothing"):
        load_data("hf:nobody/nothing")


# ---------------------------------------------------------------------------------------------------- without it


def test_the_package_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "dataset_dict.json").write_text("{}")
    for source in ("hf:user/pets", str(tmp_path)):
        with pytest.raises(M3DError, match=r"need the package datasets: pip install 'm3d\[hf\]'"):
            load_data(source)


class FakeImage:
    def __init__(self, decode: bool = True):
        self.decode = decode


class FakeLabel:
    def __init__(self, names: tuple[str, ...]):
        self.names = names


class FakeRows:
    """As much of ``datasets.Dataset`` as is used: cells by column name, rows by list of numbers."""

    def __init__(self, images: list[dict[str, Any]], labels: list[int], fingerprint: str):
        self._cells = {"image": images, "label": labels}
        self.features: dict[str, Any] = {"image": FakeImage(), "label": FakeLabel(NAMES)}
        self._fingerprint = fingerprint

    def with_format(self, kind: str) -> FakeRows:
        assert kind == "numpy"
        return self

    def select_columns(self, names: list[str]) -> FakeRows:
        assert names == ["image"]
        return self

    def cast_column(self, name: str, kind: FakeImage) -> FakeRows:
        assert name == "image" and not kind.decode, "images must stay encoded"
        return self

    def __getitem__(self, key: str | list[int]) -> Any:
        if isinstance(key, str):
            return np.array(self._cells[key])
        return {"image": [self._cells["image"][i] for i in key]}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeRows]:
    """A stand-in for the package: what is read is ours, so it is tested where the package is not."""
    splits = {
        "train": FakeRows([encoded(10 * i) for i in range(4)], [1, 0, 1, 0], "a"),
        "test": FakeRows([encoded(1), encoded(2)], [0, 1], "b"),
    }
    module = type(sys)("datasets")
    module.Image, module.ClassLabel = FakeImage, FakeLabel  # type: ignore[attr-defined]
    module.load_dataset = lambda name: splits if name == "user/pets" else pytest.fail(name)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return splits


@pytest.mark.parametrize("resident", ["yes", "no"])
def test_a_dataset_of_the_hub(fake: dict[str, FakeRows], resident: str) -> None:
    data = load_data("hf:user/pets", resident=resident)
    assert data.name == "pets" and data.recipe["source"] == "hf:user/pets"
    assert data.train.images[:, 0, 0, 0].tolist() == [10, 30, 0, 20]
    assert data.train.count.tolist() == [2, 2]


def test_another_fingerprint_is_another_cache(fake: dict[str, FakeRows]) -> None:
    before = load_data("hf:user/pets", resident="no").train.images.clone()
    fake["train"] = FakeRows([encoded(10 * i + 5) for i in range(4)], [1, 0, 1, 0], "c")
    assert not torch.equal(load_data("hf:user/pets", resident="no").train.images, before)


def test_images_may_lie_in_files(fake: dict[str, FakeRows], tmp_path: Path) -> None:
    paths = []
    for i in range(4):
        path = tmp_path / f"{i}.png"
        path.write_bytes(encoded(10 * i)["bytes"])
        paths.append({"bytes": None, "path": str(path)})
    fake["train"] = FakeRows(paths, [1, 0, 1, 0], "d")
    assert load_data("hf:user/pets", resident="no").train.images[:, 0, 0, 0].tolist() == [10, 30, 0, 20]
    paths[3] = {"bytes": None, "path": str(tmp_path / "gone.png")}
    fake["train"] = FakeRows([paths[0], encoded(10), paths[2], paths[3]], [1, 0, 1, 0], "e")
    data = load_data("hf:user/pets", resident="no", on_bad_image="skip")
    assert data.train.images[:, 0, 0, 0].tolist() == [10, 0, 20]


@pytest.mark.parametrize(
    ("labels", "message"), [([1, 1, 1, 1], "class 'cat' has no image"), ([0, 1, -1, 1], "1 of 4 images have no label")]
)
def test_labels_that_will_not_do(fake: dict[str, FakeRows], labels: list[int], message: str) -> None:
    fake["train"] = FakeRows([encoded(0)] * 4, labels, "f")
    with pytest.raises(M3DError, match=message):
        load_data("hf:user/pets")


def test_one_of_several_label_columns() -> None:
    module = sys.modules.get("datasets")
    fake = type(sys)("datasets")
    fake.Image, fake.ClassLabel = FakeImage, FakeLabel  # type: ignore[attr-defined]
    sys.modules["datasets"] = fake
    try:
        features = {"img": FakeImage(), "coarse_label": FakeLabel(NAMES), "fine_label": FakeLabel(NAMES)}
        assert hub._columns(features, "x") == ("img", "fine_label")
    finally:
        sys.modules.pop("datasets")
        if module is not None:
            sys.modules["datasets"] = module
