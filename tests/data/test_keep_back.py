"""Data without a test split: a part of every class is kept back, the same part every time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import m3d
from m3d.cli import main
from m3d.data import load_data
from m3d.data.hub import read_hub
from m3d.data.ingest import Handling
from m3d.data.keep_back import HasTestSplit, KeepBack
from m3d.errors import M3DError
from m3d.origin import load_source

COUNTS = {"cat": 10, "dog": 20, "eel": 4}


def colours(data) -> list[set[int]]:
    """Which images each class has: no two of the fixture have the same colour."""
    return [{int(image[0, 0, 0]) for image in split.images} for split in (data.train, data.test)]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """``photos/CLASS/*.png``, each image of a red of its own."""
    red = iter(range(256))
    for name, count in COUNTS.items():
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (12, 10), (next(red), 50, 50)).save(tmp_path / "photos" / name / f"{number:02d}.png")
    return tmp_path / "photos"


def test_every_class_is_divided_and_nothing_is_lost(photos: Path) -> None:
    data = load_data(photos, size=8, test_fraction=0.25)
    assert data.class_names == ("cat", "dog", "eel")
    assert data.test.count.tolist() == [2, 5, 1] and data.train.count.tolist() == [8, 15, 3]
    train, test = colours(data)
    assert not train & test and train | test == set(range(sum(COUNTS.values())))
    assert data.mean[0] == pytest.approx(np.mean(sorted(train)) / 255, abs=1e-6)  # of the training images alone
    assert dict(data.recipe) == {
        "source": str(photos.resolve()),
        "size": 8,
        "test_fraction": 0.25,
        "split_seed": 0,
    }
    again = load_data(**data.recipe)
    assert (again.train.fingerprint, again.test.fingerprint) == (data.train.fingerprint, data.test.fingerprint)
    assert colours(load_data(photos, size=8, test_fraction=0.25, split_seed=1))[1] != test


def test_the_part_held_out_for_choices_is_another_one(photos: Path) -> None:
    plain = load_data(photos, size=8, test_fraction=0.25)
    data = load_data(photos, size=8, test_fraction=0.25, val_fraction=0.25)
    assert colours(data)[1] == colours(plain)[1] and data.val is not None
    assert len(data.val) + len(data.train) == len(plain.train) and len(data.val) == 2 + 4 + 1


def test_decoded_to_the_disk_it_is_the_same(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M3D_CACHE", str(tmp_path / "cache"))
    data = load_data(photos, size=8, test_fraction=0.25)
    streamed = load_data(photos, size=8, test_fraction=0.25, resident="no")
    other = load_data(photos, size=8, test_fraction=0.5, resident="no")  # not the first one's cache
    assert np.array_equal(streamed.test.images.numpy(), data.test.images.numpy())
    assert streamed.train.count.tolist() == [8, 15, 3] and other.train.count.tolist() == [5, 10, 2]


def test_a_folder_with_train_alone(photos: Path, tmp_path: Path) -> None:
    whole = load_data(photos, size=8, test_fraction=0.25)
    (tmp_path / "other").mkdir()
    photos.rename(tmp_path / "other" / "train")
    data = load_data(tmp_path / "other", size=8, test_fraction=0.25)
    assert data.train.fingerprint == whole.train.fingerprint and data.test.fingerprint == whole.test.fingerprint


def test_an_npz_without_test_images(tmp_path: Path) -> None:
    labels = np.array([2, 0, 1] * 8)
    images = np.arange(24, dtype=np.uint8)[:, None, None, None] * np.ones((1, 4, 4, 3), np.uint8)
    np.savez(tmp_path / "mine.npz", x_train=images, y_train=labels)
    data = load_data(tmp_path / "mine.npz", test_fraction=0.25)
    assert data.train.count.tolist() == [6, 6, 6] and data.test.count.tolist() == [2, 2, 2]
    for split in (data.train, data.test):
        assert all(labels[int(i[0, 0, 0])] == c for i, c in zip(split.images, split.labels().tolist(), strict=True))
    with pytest.raises(M3DError, match=r"needed: x_train, y_train, x_test, y_test; or test_fraction=0.2"):
        load_data(tmp_path / "mine.npz")
    np.savez(tmp_path / "mine.npz", x_train=images, y_train=labels[:-1])
    with pytest.raises(M3DError, match="24 images but 23 labels"):
        load_data(tmp_path / "mine.npz", test_fraction=0.25)
    np.savez(tmp_path / "mine.npz", x_train=images, y_train=labels, x_test=images)
    with pytest.raises(M3DError, match=r"needed: x_train, y_train, x_test, y_test$"):
        load_data(tmp_path / "mine.npz", test_fraction=0.25)


def test_a_hub_dataset_without_a_test_split(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    pixels = [Image.new("RGB", (4, 4), (i, 0, 0)) for i in range(16)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    rows = datasets.Dataset.from_dict({"image": pixels, "label": [0, 1] * 8}, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda name: {"train": rows})
    train, test, names = read_hub("hf:mine", None, Handling(), KeepBack(0.25))
    assert names == ("a", "b") and train.count.tolist() == [6, 6] and test.count.tolist() == [2, 2]
    monkeypatch.setattr(datasets, "load_dataset", lambda name: {"train": rows, "test": rows})
    with pytest.raises(HasTestSplit):
        read_hub("hf:mine", None, Handling(), KeepBack(0.25))


def test_data_that_have_a_test_split_are_refused(tmp_path: Path, photos: Path) -> None:
    images, labels = np.zeros((4, 4, 4), np.uint8), np.array([0, 1, 0, 1])
    np.savez(tmp_path / "mine.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    (tmp_path / "both").mkdir()
    photos.rename(tmp_path / "both" / "train")
    (tmp_path / "both" / "test" / "cat").mkdir(parents=True)
    for source in ("digits", tmp_path / "mine.npz", tmp_path / "both"):
        with pytest.raises(HasTestSplit, match=r"test_fraction=0.2: .* has a test split of its own; leave it out"):
            load_data(source, test_fraction=0.2)


@pytest.mark.parametrize("fraction", [-0.5, 1.0, 2.0])
def test_a_part_that_is_none_is_refused(photos: Path, fraction: float) -> None:
    with pytest.raises(M3DError, match=rf"test_fraction={fraction} is not valid; allowed: between 0 and 1"):
        load_data(photos, size=8, test_fraction=fraction)


def test_classes_too_small_to_divide_are_named(photos: Path) -> None:
    for path in (photos / "eel").glob("0[1-9].png"):
        path.unlink()
    with pytest.raises(M3DError, match=r"test_fraction=0.25: the smallest class has 1 image, too few"):
        load_data(photos, size=8, test_fraction=0.25)


def test_the_error_for_a_plain_folder_says_how(photos: Path) -> None:
    with pytest.raises(M3DError, match=r"has no train or test folder; .* or CLASS/\*.png with test_fraction=0.2"):
        load_data(photos)


def command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    told = capsys.readouterr()
    return int(stop.value.code or 0), told.out, told.err


def test_from_plain_photographs_to_a_result_also_after_they_moved(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, small = tmp_path / "run", ["--net", "convnet1:width=4"]
    few = [*small, "--epochs", 1, "--repeats", 1, "--json"]
    made = command(capsys, "condense", photos, "--size", 8, "--test-fraction", 0.25, "--steps", 1, *small, "--out", run)
    assert made[0] == 0, made
    code, out, _ = command(capsys, "evaluate", run, *few)
    first = json.loads(out)
    assert code == 0 and first["data"]["fingerprint"] == m3d.CondensedSet.load(run).manifest["data"]["fingerprint"]
    assert command(capsys, "evaluate", "--full", photos, "--size", 8, "--test-fraction", 0.25, *few)[0] == 0
    code, _, err = command(capsys, "evaluate", run, "--test-fraction", 0.25, *few)
    assert code == 2 and "divided as they were when it was made" in err
    swept = ["sweep", photos, "--size", 8, "--test-fraction", 0.25, "--val-fraction", 0.25, "--dry-run"]
    assert command(capsys, *swept, "--out", tmp_path / "sweep")[0] == 0

    photos.rename(tmp_path / "moved")
    code, _, err = command(capsys, "evaluate", run, *few)
    assert code == 2 and "no such file or folder" in err and "name the place they are at now (--data)" in err
    code, out, _ = command(capsys, "evaluate", run, "--data", tmp_path / "moved", *few)
    moved = json.loads(out)
    assert code == 0 and moved["data"]["fingerprint"] == first["data"]["fingerprint"]
    assert moved["accuracy"] == first["accuracy"]
    labelled = command(
        capsys, "relabel", run, "--data", tmp_path / "moved", "--teacher", small[1], "--teachers", 1, "--epochs", 1
    )
    assert labelled[0] == 0, labelled

    # Data with a test split of their own are taken as they are, brought to the set's size.
    (tmp_path / "split").mkdir()
    (tmp_path / "moved").rename(tmp_path / "split" / "train")
    for name in COUNTS:
        (tmp_path / "split" / "test" / name).mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(tmp_path / "split" / "test" / name / "one.png")
    code, out, err = command(capsys, "evaluate", run, "--data", tmp_path / "split", *few)
    assert code == 0, err


def test_an_image_that_the_set_was_made_from_is_never_tested_on(photos: Path, tmp_path: Path) -> None:
    """Data that have changed, or that would be divided otherwise, are refused where the set's own were divided."""
    small = {"net": "convnet1:width=4", "steps": 1, "batch_real": 2, "device": "cpu"}
    divided = {"size": 8, "test_fraction": 0.25, "val_fraction": 0.25, "split_seed": 7}
    made = m3d.condense(photos, 1, load_options=divided, **small)
    own = load_source(made)
    photos.rename(tmp_path / "moved")
    again = load_source(made, tmp_path / "moved")
    assert again.train.fingerprint == own.train.fingerprint and again.test.fingerprint == own.test.fingerprint
    assert load_source(made, tmp_path / "moved", test_fraction=0.25).test.fingerprint == own.test.fingerprint
    with pytest.raises(M3DError, match="images that the set was made from might be tested on"):
        load_source(made, tmp_path / "moved", test_fraction=0.5)
    Image.new("RGB", (12, 10), (250, 50, 50)).save(tmp_path / "moved" / "cat" / "new.png")
    with pytest.raises(M3DError, match="images that the set was made from might be tested on"):
        load_source(made, tmp_path / "moved")
    (tmp_path / "moved").rename(photos)
    with pytest.raises(M3DError, match="bring it back as it was, or name data with a test split of their own"):
        load_source(made)
    photos.rename(tmp_path / "moved")
    # A set of data with a test split of their own may be tested on other data that are divided.
    whole = m3d.condense(load_data("digits"), 1, "random")
    assert len(load_source(whole, tmp_path / "moved", size=8, test_fraction=0.5).test) > 0


def test_moved_data_are_read_as_the_run_read_them(photos: Path, tmp_path: Path) -> None:
    (photos / "cat" / "broken.png").write_bytes(b"no picture")
    small = {"net": "convnet1:width=4", "steps": 1, "batch_real": 2, "device": "cpu"}
    reading = {"size": 8, "test_fraction": 0.25, "on_bad_image": "skip"}
    made = m3d.condense(photos, 1, load_options=reading, **small)
    photos.rename(tmp_path / "moved")
    moved = load_source(made, tmp_path / "moved")
    assert moved.train.fingerprint == made.manifest["data"]["fingerprint"]
    with pytest.raises(M3DError, match="cannot be read"):
        load_source(made, tmp_path / "moved", on_bad_image="error")


def test_bad_images_in_the_part_kept_back(photos: Path) -> None:
    (kept,) = [int(i[0, 0, 0]) - 30 for i in load_data(photos, size=8, test_fraction=0.25).test.images[-1:]]
    (photos / "eel" / f"{kept:02d}.png").write_text("no image")
    with pytest.raises(M3DError, match=r"class 'eel' has no image that can be read in the part kept back to test on"):
        load_data(photos, size=8, test_fraction=0.25, on_bad_image="skip")
    assert load_data(photos, size=8, test_fraction=0.5, on_bad_image="skip").test.count.tolist() == [5, 10, 1]


def test_classes_that_are_called_like_splits(photos: Path) -> None:
    (photos / "cat").rename(photos / "train")
    (photos / "dog").rename(photos / "valid")
    data = load_data(photos, size=8, test_fraction=0.25)
    assert data.class_names == ("eel", "train", "valid") and data.train.count.tolist() == [3, 8, 15]
    (photos / "train" / "steam").mkdir()
    assert load_data(photos, size=8, test_fraction=0.25).class_names == data.class_names  # images beside the folder
    for image in (photos / "train").glob("*.png"):
        image.rename(photos / "train" / "steam" / image.name)
    with pytest.raises(M3DError, match=r"'train' holds folders, as a split does, but beside it is 'eel'"):
        load_data(photos, size=8, test_fraction=0.25)


def test_labels_with_gaps_and_classes_without_images_are_named(tmp_path: Path) -> None:
    images, labels = np.zeros((12, 4, 4), np.uint8), np.array([0, 2] * 6)
    np.savez(tmp_path / "mine.npz", x_train=images, y_train=labels)
    with pytest.raises(M3DError, match="no image has the labels 1; allowed: 0 to 2"):
        load_data(tmp_path / "mine.npz", test_fraction=0.25)
    np.savez(tmp_path / "mine.npz", x_train=images, y_train=labels, class_names=np.array(["a", "b", "c", "d"]))
    with pytest.raises(M3DError, match="train: class 'b' has no image"):
        load_data(tmp_path / "mine.npz", test_fraction=0.25)
    np.savez(tmp_path / "mine.npz", x_train=images, y_train=labels, class_names=np.array(["a", "b"]))
    with pytest.raises(M3DError, match=r"class 'b' has no image|labels run from 0 to 2"):
        load_data(tmp_path / "mine.npz", test_fraction=0.25)
