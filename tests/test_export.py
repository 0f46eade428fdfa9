"""Exports: what other tools read is what a network trains on."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import m3d
from m3d.errors import M3DError
from m3d.export import export
from m3d.pictures import _canvas
from m3d.reproduce.measures import _sheet


@pytest.fixture(scope="module")
def condensed(digits):
    return m3d.condense(digits, 2, "random")


def test_image_folder(condensed, tmp_path):
    path = export(condensed, "imagefolder", tmp_path / "out")
    assert sorted(p.name for p in path.iterdir() if p.is_dir()) == [str(d) for d in range(10)]
    files = sorted(path.glob("*/*.png"))
    assert len(files) == 20
    pixels = np.asarray(Image.open(path / "3" / "0001.png"))
    assert pixels.shape == (8, 8) and np.abs(pixels / 255 - condensed.decoded()[0][7, 0].numpy()).max() < 1 / 255
    assert json.loads((path / "manifest.json").read_text())["ipc"] == 2
    with pytest.raises(M3DError, match="exists; choose another"):
        export(condensed, "imagefolder", path)
    assert not list(tmp_path.glob(".out*"))


def test_an_exported_folder_is_a_dataset_again(condensed, tmp_path):
    for split in ("train", "test"):
        export(condensed, "imagefolder", tmp_path / split)
    again = m3d.load_data(tmp_path)
    images, labels = condensed.decoded()
    assert list(again.class_names) == condensed.class_names and again.shape == (1, 8, 8)
    assert torch.equal(again.train.labels(), labels)
    assert ((again.train.images.float() / 255 - images).abs() <= 0.5 / 255 + 1e-6).all()


def test_class_names_become_safe_folder_names(condensed, tmp_path):
    names = ["a/b", "a:b", "..", "", "ok", "dog", "cat", "x", "y", "z"]
    strange = m3d.CondensedSet(condensed.images, condensed.labels, {**condensed.manifest, "class_names": names})
    path = export(strange, "imagefolder", tmp_path / "out")
    folders = sorted(p.name for p in path.iterdir() if p.is_dir())
    assert len(folders) == 10 and {"a_b_0", "a_b_1", "ok"} <= set(folders)
    told = json.loads((path / "manifest.json").read_text())
    assert told["class_names"] == names and sorted(told["folders"]) == folders and told["folders"][4] == "ok"
    assert all(p.resolve().is_relative_to(path.resolve()) for p in path.rglob("*"))


def test_npz(condensed, tmp_path):
    with np.load(export(condensed, "npz", tmp_path / "set.npz"), allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["images"], condensed.decoded()[0].numpy())
        np.testing.assert_array_equal(arrays["labels"], condensed.decoded()[1].numpy())
        assert list(arrays["class_names"]) == condensed.class_names and arrays["mean"].shape == (1,)


def test_pt_loads_without_unpickling_code(condensed, tmp_path):
    content = torch.load(export(condensed, "pt", tmp_path / "set.pt"), weights_only=True)
    assert torch.equal(content["images"], condensed.decoded()[0]) and content["class_names"] == condensed.class_names


def test_unknown_format(condensed, tmp_path):
    with pytest.raises(M3DError, match="unknown export format 'jpg'"):
        export(condensed, "jpg", tmp_path / "x")


def test_a_picture_lays_few_images_of_a_class_side_by_side():
    from m3d.pictures import mosaic_figure

    names = ["airplane", "bird", "cat"]
    wide = mosaic_figure(torch.rand(3, 1, 3, 8, 8), names, "one each").axes[0]
    tall = mosaic_figure(torch.rand(3, 4, 1, 8, 8), names, "four each").axes[0]
    assert [t.get_text() for t in wide.get_xticklabels()] == names and not wide.get_yticklabels()
    assert [t.get_text() for t in tall.get_yticklabels()] == names and not tall.get_xticklabels()
    assert wide.images[0].get_size() == (8, 3 * 8 + 2) and tall.images[0].get_size() == (3 * 8 + 2, 4 * 8 + 3)


def test_pixels_outside_their_range_are_kept_by_numbers_and_cut_off_in_pictures(condensed, tmp_path, caplog):
    wild = replace(condensed, images=condensed.images * 3 - 1, manifest={**condensed.manifest, "bounded": False})
    assert np.array_equal(np.load(export(wild, "npz", tmp_path / "w.npz"))["images"], wild.decoded()[0].numpy())
    assert not caplog.records
    path = export(wild, "imagefolder", tmp_path / "out")
    assert "outside [0, 1] are cut off" in caplog.text
    pixels = np.asarray(Image.open(path / "3" / "0001.png")) / 255
    assert np.abs(pixels - wild.images[7, 0].clamp(0, 1).numpy()).max() < 1 / 255
    canvas = _canvas(wild.images[None, :2], gap=1)
    assert canvas.min() == 0 and canvas.max() == 1
    sheet = np.asarray(_sheet(wild.images[None, :2]))
    assert sheet.shape == (8, 16) and np.abs(sheet[:, :8] / 255 - wild.images[0, 0].clamp(0, 1).numpy()).max() < 1 / 255


def test_names_that_no_font_can_draw_are_said_once(tmp_path, caplog, recwarn, monkeypatch):
    from m3d import pictures

    names = ["\u84dd", "\u7ea2", "cat"]  # two Chinese characters
    monkeypatch.setattr(pictures, "_wide_fonts", lambda: ())
    pictures.save_figure(pictures.mosaic_figure(torch.rand(3, 4, 1, 8, 8), names, "three"), tmp_path / "a.png")
    assert [r.getMessage() for r in caplog.records if r.name == "m3d.pictures"] == [
        "some letters of the names are drawn as boxes: no installed font has them"
    ]
    assert not [w for w in recwarn if "Glyph" in str(w.message)]
    caplog.clear()
    plain = pictures.mosaic_figure(torch.rand(3, 4, 1, 8, 8), ["a", "b", "ü"], "three")
    pictures.save_figure(plain, tmp_path / "b.png")
    assert not [r for r in caplog.records if r.name == "m3d.pictures"]
    monkeypatch.setattr(pictures, "_wide_fonts", lambda: ("STIXGeneral",))
    (axes,) = pictures.mosaic_figure(torch.rand(3, 4, 1, 8, 8), names, "three").axes
    for text in (axes.get_yticklabels()[0], axes.title if axes.get_title() else axes._left_title):
        assert text.get_fontfamily() == ["sans-serif", "STIXGeneral"]


def test_a_replacement_that_fails_loses_nothing(condensed, tmp_path, monkeypatch):
    folder = export(condensed, "imagefolder", tmp_path / "out")
    before, rename = sorted(folder.rglob("*")), Path.rename

    def fail(path, target):
        if path.name.startswith(".out.") and not path.name.endswith(".old"):
            raise OSError("no space")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(M3DError, match=r"cannot write .*out': no space"):
        export(condensed, "imagefolder", folder, overwrite=True)
    assert sorted(folder.rglob("*")) == before and [p.name for p in tmp_path.iterdir()] == ["out"]
    monkeypatch.undo()
    export(condensed, "imagefolder", folder, overwrite=True)
    assert sorted(folder.rglob("*")) == before and [p.name for p in tmp_path.iterdir()] == ["out"]
