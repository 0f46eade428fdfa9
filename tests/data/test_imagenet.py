"""ImageNet's subsets from a small generated folder laid out like ILSVRC 2012."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import m3d
from m3d.data import imagenet, load_data
from m3d.errors import M3DError


def make_ilsvrc(root: Path, wnids: tuple[str, ...], images: int = 2, side: int = 16) -> Path:
    """Class folders in train and val, JPEG files of several sizes, other classes and an unlabelled test folder."""
    generator = np.random.default_rng(0)
    for k, wnid in enumerate((*wnids, "n99999999")):
        for split, n in (("train", images), ("val", 1)):
            folder = root / split / wnid
            folder.mkdir(parents=True)
            for i in range(n):
                shape = (side + 2 * i, side + 5, 3)
                colour = 40 + (k * 37) % 160 + generator.integers(0, 30, shape)
                Image.fromarray(colour.astype(np.uint8)).save(folder / f"{wnid}_{i}.JPEG")
    (root / "test").mkdir()
    Image.new("RGB", (8, 8)).save(root / "test" / "ILSVRC2012_test_00000001.JPEG")
    return root


def test_the_lists_are_whole_and_nested():
    lists = imagenet.subsets()
    every = lists["imagenet100"]
    assert len(set(every)) == 100 and all(len(w) == 9 and w[0] == "n" and w[1:].isdigit() for w in every)
    assert lists["imagenet10"] == every[:10] and every[0] == "n02869837" and every[99] == "n02090622"
    assert sum((lists[f"imagenet100-{k}"] for k in range(1, 6)), ()) == every
    assert imagenet.find("ImageNet-10") == "imagenet10" and imagenet.find("imagenet_100-3") == "imagenet100-3"
    assert imagenet.find("imagenet") is None


@pytest.mark.parametrize("below", ["", "ILSVRC/Data/CLS-LOC"])
def test_a_subset_is_read_in_the_lists_order(tmp_path, below):
    wnids = imagenet.subsets()["imagenet10"]
    make_ilsvrc(tmp_path / below if below else tmp_path, wnids)
    data = load_data("imagenet10", data_root=tmp_path, size=12)
    assert data.class_names == wnids  # not sorted by name, and no other class
    assert (data.shape, len(data.train), len(data.test)) == ((3, 12, 12), 20, 10)
    assert data.mean == (0.485, 0.456, 0.406) and data.name == "imagenet10"
    levels = [float(data.train.images[data.train.start[c]].float().mean()) for c in range(10)]
    assert levels == pytest.approx([40 + (k * 37) % 160 + 14.5 for k in range(10)], abs=4)
    assert load_data(**data.recipe).train.fingerprint == data.train.fingerprint


def test_full_size_without_being_asked(tmp_path):
    make_ilsvrc(tmp_path, imagenet.subsets()["imagenet10"])
    assert load_data("imagenet10", data_root=tmp_path).shape == (3, 224, 224)


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(M3DError, match="train/nXXXXXXXX"):
        load_data("imagenet10", data_root=tmp_path)
    make_ilsvrc(tmp_path, imagenet.subsets()["imagenet10"])
    with pytest.raises(M3DError, match="imagenet100-2 needs a folder for each of its 20 classes, and 20 are not there"):
        load_data("imagenet100-2", data_root=tmp_path)


def test_a_subset_is_condensed_like_any_other_data(tmp_path):
    make_ilsvrc(tmp_path / "data", imagenet.subsets()["imagenet10"])
    settings = {"net": "resnetap10:width=4", "steps": 1, "batch_real": 2, "lr": 1e-3, "factor": 1}
    load_options = {"data_root": tmp_path / "data", "size": 32}
    made = m3d.condense("imagenet10", 1, out=tmp_path / "run", load_options=load_options, **settings)
    assert made.images.shape == (10, 3, 32, 32) and made.class_names == list(imagenet.subsets()["imagenet10"])
    protocol = m3d.evaluation.make_protocol("imagenet", epochs=1)
    result = m3d.evaluate(tmp_path / "run", net="resnetap10:width=4", protocol=protocol, repeats=2)
    assert len(result.last) == 2 and result.record["protocol"]["photo"] == {
        "least": 0.5,
        "jitter": 0.4,
        "lighting": 0.1,
    }
