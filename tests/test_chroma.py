"""Colours at half the resolution: against Pillow's JPEG colours cell by cell, and through sets, files and pictures."""

import dataclasses
import json
import signal

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional
from toys import make_dataset

import m3d
from m3d.condensed import CHROMA_FORMAT, CondensedSet
from m3d.errors import Interrupted, M3DError
from m3d.files import read_tensors, to_safetensors
from m3d.methods import Task, make_method
from m3d.normalise import Normalise
from m3d.pictures import grid
from m3d.reproduce.measures import picture
from m3d.run_folder import RunFolder
from m3d.runtime import Runtime
from m3d.synth import Synthetic
from m3d.teachers import Teachers, relabel
from m3d.tiles import Tiles
from m3d.upsamplers import bicubic_matrix, bilinear_matrix, cosine_matrix

SMALL = {"steps": 2, "batch_real": 4, "augment": "none", "net": "convnet2:width=8", "device": "cpu"}


def some(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def naive(stored, factor):
    """Decoded images of [3, h, w]: cell by cell, both colour differences and luminance enlarged by Pillow, which then
    makes them red, green and blue."""
    h, w = stored.shape[1:]
    ch, cw = h // factor, w // factor
    out = []
    for i in range(factor):
        for j in range(factor):
            cell = stored[:, i * ch : (i + 1) * ch, j * cw : (j + 1) * cw]
            for k in range(2):
                blue = cell[2, k * ch // 2 : (k + 1) * ch // 2, : cw // 2]
                red = cell[2, k * ch // 2 : (k + 1) * ch // 2, cw // 2 :]
                planes = [
                    Image.fromarray(np.asarray(p)).resize((w, h), Image.Resampling.BILINEAR)
                    for p in (cell[k], blue, red)
                ]
                whole = [Image.fromarray((np.asarray(p) * 255).round().astype(np.uint8)) for p in planes]
                picture = Image.merge("YCbCr", whole).convert("RGB")
                out.append(torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1) / 255)
    return torch.stack(out)


@pytest.mark.parametrize(("factor", "side"), [(1, (8, 8)), (2, (16, 16)), (2, (8, 16)), (3, (12, 18)), (4, (32, 32))])
def test_decoding_gives_jpeg_s_colours(factor, side):
    stored = some(2, 2, 3, *side) * 0.2 + 0.4  # nothing is cut off: Pillow does so before the last rounding
    tiles = Tiles(factor, chroma="half")
    decoded = tiles.decode(stored)
    assert decoded.shape == (2, tiles.count(2, (3, *side)), 3, *side) and tiles.count(1, (3, *side)) == 2 * factor**2
    for c in range(2):
        expected = torch.cat([naive(image, factor) for image in stored[c]])
        torch.testing.assert_close(decoded[c], expected, atol=4 / 255, rtol=0)  # 8 bits, twice


@pytest.mark.parametrize(
    ("upsample", "matrix"), [("bilinear", bilinear_matrix), ("bicubic", bicubic_matrix), ("cosine", cosine_matrix)]
)
def test_colours_are_enlarged_as_luminance_is(upsample, matrix):
    """The blue channel of the first image: its luminance 8 → 16 pixels, its blue difference 4 → 16."""
    stored = some(1, 1, 3, 16, 16) * 0.1 + 0.45
    decoded = Tiles(2, upsample=upsample, chroma="half").decode(stored)[0, 0]
    light = matrix(16, 8) @ stored[0, 0, 0, :8, :8] @ matrix(16, 8).mT
    blue = matrix(16, 4) @ (stored[0, 0, 2, :4, :4] - 0.5) @ matrix(16, 4).mT
    torch.testing.assert_close(decoded[2], light + 1.772 * blue)


def test_what_leaves_the_range_is_cut_off():
    decoded = Tiles(2, chroma="half").decode(some(1, 4, 3, 8, 8).round())
    assert decoded.min() == 0 and decoded.max() == 1


def test_as_many_numbers_hold_twice_the_images_and_each_cell_is_its_own():
    tiles, images = Tiles(2, chroma="half"), some(3, 16, 3, 1, 1).expand(3, 16, 3, 16, 16)
    stored = tiles.encode(images)
    assert stored.shape == (3, 2, 3, 16, 16) and stored.numel() == Tiles(2).encode(images[:, ::2]).numel()
    torch.testing.assert_close(tiles.decode(stored), images)  # plain colours lose nothing
    assert stored.min() >= 0 and stored.max() <= 1


@pytest.mark.parametrize("corner", range(8))
def test_the_brightest_colours_fit_into_the_range(corner):
    colour = torch.tensor([float(corner & 1), float(corner & 2 > 0), float(corner & 4 > 0)])
    images = colour[:, None, None].expand(1, 2, 3, 4, 4)
    stored = Tiles(1, chroma="half").encode(images)
    assert stored.min() >= 0 and stored.max() <= 1  # a set that left it could not be read
    torch.testing.assert_close(Tiles(1, chroma="half").decode(stored), images, atol=1e-5, rtol=0)


def test_grey_images_lose_nothing_but_what_the_factor_takes():
    grey = some(2, 8, 1, 16, 16).expand(2, 8, 3, 16, 16)
    halved, full = (Tiles(2, chroma=c) for c in ("half", "full"))
    torch.testing.assert_close(halved.decode(halved.encode(grey)), full.decode(full.encode(grey)))


def test_colours_are_means_of_squares():
    """One 4×4 cell whose left half is red and right half is blue: the colour differences keep both halves."""
    image = torch.zeros(1, 2, 3, 4, 4)
    image[..., 0, :, :2] = image[..., 2, :, 2:] = 1
    image[:, 1] = 0.5
    stored = Tiles(1, chroma="half").encode(image)
    blue, red = stored[0, 0, 2, :2, :2], stored[0, 0, 2, :2, 2:]
    torch.testing.assert_close(blue, torch.tensor([[-0.299 / 1.772 + 0.5, 1.0]] * 2))
    torch.testing.assert_close(red, torch.tensor([[1.0, -0.114 / 1.402 + 0.5]] * 2))
    torch.testing.assert_close(stored[0, 0, 2, 2:], torch.full((2, 4), 0.5))  # the second image has no colour
    torch.testing.assert_close(stored[0, 0, 0], torch.tensor([[0.299, 0.299, 0.114, 0.114]] * 4))
    mixed = some(1, 2, 3, 4, 4)  # four colours in each square
    r, g, b = mixed[0, 0]
    light = 0.299 * r + 0.587 * g + 0.114 * b
    expected = functional.avg_pool2d(((b - light) / 1.772 + 0.5)[None], 2)[0]
    torch.testing.assert_close(Tiles(1, chroma="half").encode(mixed)[0, 0, 2, :2, :2], expected)


def test_the_gradient_reaches_every_number():
    tiles = Tiles(2, chroma="half")
    synthetic = Synthetic(some(2, 1, 3, 8, 8) * 0.2 + 0.4, tiles, Normalise([0.5] * 3, [0.2] * 3))
    (synthetic(torch.arange(2)) * some(2, 8, 3, 8, 8, seed=1)).sum().backward()
    assert (synthetic.latent.grad != 0).all()


@pytest.mark.parametrize(
    ("shape", "factor", "allowed"),
    [
        ((1, 8, 8), 2, "three channels"),
        ((3, 10, 8), 2, "sides that 4 divides"),
        ((3, 8, 10), 2, "sides that 4 divides"),
        ((3, 32, 32), 3, "that 6 divides"),
    ],
)
def test_what_cannot_be_halved_is_refused(shape, factor, allowed):
    with pytest.raises(M3DError, match=f"chroma=half does not go with {'×'.join(map(str, shape))}.*{allowed}"):
        Tiles(factor, chroma="half").require(shape)
    with pytest.raises(M3DError, match="unknown chroma 'quarter'"):
        Tiles(2, chroma="quarter")


@pytest.mark.parametrize("method", ["m3d", "m3d+", "random", "herding", "k-center"])
def test_methods_that_store_it(tmp_path, method, monkeypatch):
    monkeypatch.setenv("M3D_CACHE", str(tmp_path / "cache"))
    data = make_dataset(3, 24, (3, 8, 8))
    options = {"m3d": SMALL, "m3d+": {**SMALL, "encoder_epochs": 1, "encoders": 1, "ce_weight": 0.01}}.get(
        method, {"device": "cpu"} if method == "random" else {"device": "cpu", "features": "pixels"}
    )
    made = m3d.condense(data, 2, method, factor=2, chroma="half", out=tmp_path / "run", **options)
    assert made.images.shape == (6, 3, 8, 8) and made.manifest["chroma"] == "half"
    images, labels = made.decoded()
    assert images.shape == (6 * 8, 3, 8, 8) and labels.tolist() == [c for c in range(3) for _ in range(16)]
    loaded = CondensedSet.load(tmp_path / "run")
    assert loaded.manifest["format"] == CHROMA_FORMAT and torch.equal(loaded.decoded()[0], images)
    result = m3d.evaluate(loaded, data, protocol="quick", epochs=1, repeats=1, net="convnet2:width=8", device="cpu")
    assert result.record["chroma"] == "half"
    with pytest.raises(M3DError, match="chroma=half does not go with 3×8×8 images and factor=3"):
        m3d.condense(data, 2, method, factor=3, chroma="half", **options)


def test_a_file_that_says_it_wrongly_is_refused(tmp_path):
    data = make_dataset(3, 24, (1, 8, 8))
    made = m3d.condense(data, 1, "random", device="cpu")
    for chroma, message in (("half", "three channels"), ("third", "unknown chroma 'third'")):
        changed = dataclasses.replace(made, manifest={**made.manifest, "chroma": chroma})
        with pytest.raises(M3DError, match=message):
            changed.save(tmp_path / "set.safetensors")
            CondensedSet.load(tmp_path / "set.safetensors")


def test_soft_labels_of_such_a_set(tmp_path):
    data = make_dataset(3, 24, (3, 8, 8))
    made = m3d.condense(data, 1, "random", factor=2, chroma="half", device="cpu")
    teachers = Teachers(teachers=1, epochs=1, teacher="convnet1:width=4")
    soft = relabel(made, data, teachers, Runtime.choose("cpu"))
    soft.save(tmp_path / "set.safetensors")
    loaded = CondensedSet.load(tmp_path / "set.safetensors")
    assert loaded.soft is not None and loaded.soft.shape == (3 * 8, 3) and loaded.manifest["format"] == CHROMA_FORMAT
    tensors, metadata = read_tensors(tmp_path / "set.safetensors")
    del tensors["soft"]
    (tmp_path / "set.safetensors").write_bytes(to_safetensors(tensors, metadata))
    with pytest.raises(M3DError, match="has no tensor 'soft'"):
        CondensedSet.load(tmp_path / "set.safetensors")


def test_a_run_begun_before_there_was_the_option_keeps_full_colours(tmp_path, monkeypatch):
    """Its pixels have the same shape either way, so nothing else would notice."""
    monkeypatch.setenv("M3D_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("m3d.engine._REPORT_SECONDS", 0.0)
    data, folder = make_dataset(3, 24, (3, 8, 8)), RunFolder(tmp_path / "run")
    options = {**SMALL, "steps": 6, "factor": 2, "encoders": 1, "encoder_epochs": 1}
    whole = m3d.condense(data, 1, "m3d+", chroma="full", **options)
    assert m3d.condense(data, 1, "m3d+", **options).manifest["chroma"] == "half"

    def stop(progress):
        if progress.step == 3:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        m3d.condense(data, 1, "m3d+", chroma="full", out=folder.path, report=stop, **options)
    request = folder.request()
    del request["options"]["chroma"]
    (folder / RunFolder.RUN).write_text(json.dumps(request))
    resumed = m3d.resume(folder.path, data=data)
    assert resumed.manifest["chroma"] == "full" and resumed.fingerprint == whole.fingerprint


def test_few_images_keep_full_colours_and_too_few_are_told_what_helps():
    """One image per class in sixteen cells takes 16 real ones; with halved colours, 32."""

    def chosen(smallest):
        return make_method("m3d+", Task("photos", (3, 32, 32), 3, 1, smallest=smallest), {})[1]

    assert [chosen(n)["chroma"] for n in (31, 32, None)] == ["full", "half", "half"]
    told = r"has 20 training images, but 32 .*1 stored, which hold 32 images.*take chroma='full', or factor=2"
    with pytest.raises(M3DError, match=told):
        m3d.condense(make_dataset(3, 20, (3, 32, 32)), 1, "m3d+", chroma="half", device="cpu")


def test_pictures_show_colours(tmp_path):
    """Both mosaics of a stored image, each cell in its colours, without being enlarged."""
    tiles, images = Tiles(2, chroma="half"), some(1, 16, 3, 1, 1).expand(1, 16, 3, 8, 8)
    stored = tiles.encode(images)
    mosaics = tiles.pictures(stored)
    assert mosaics.shape == (1, 4, 3, 8, 8)
    for k in range(4):
        torch.testing.assert_close(Tiles(2).decode(mosaics[:, k : k + 1]), images[:, k // 2 * 8 + k % 2 :: 2][:, :4])
    assert torch.equal(Tiles(2).pictures(stored), stored)
    made = m3d.condense(make_dataset(3, 24, (3, 8, 8)), 1, "random", factor=2, chroma="half", device="cpu")
    assert picture(made)["columns"] == 3 and picture(made)["rows"] == 2
    axes = grid(made).axes[0]
    assert "two mosaics" in axes.get_title("left").replace("\n", " ")
    shown = torch.from_numpy(np.asarray(axes.images[0].get_array()))
    torch.testing.assert_close(shown[-8:, :8].float(), made.pictures()[0, 1].movedim(0, -1), atol=0.01, rtol=0)
