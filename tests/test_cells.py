"""Cells of their own size, packed into a class's stored numbers, and black frames: against naive decoders, and through
sets, files and pictures."""

import dataclasses
import json
import math
import signal

import pytest
import torch
from torch.nn import functional
from toys import make_dataset

import m3d
from m3d.condensed import CELLS_FORMAT, CondensedSet
from m3d.errors import Interrupted, M3DError
from m3d.files import read_tensors, to_safetensors
from m3d.methods import Task, make_method
from m3d.nets import FlatNet, make_net
from m3d.normalise import Normalise
from m3d.pictures import grid
from m3d.reproduce.measures import picture
from m3d.runtime import Runtime
from m3d.step import Step
from m3d.synth import Synthetic
from m3d.tiles import Tiles
from m3d.upsamplers import bilinear_matrix

SMALL = {"steps": 2, "batch_real": 4, "augment": "none", "net": "convnet2:width=8", "device": "cpu"}


def some(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def naive(stored, cell, margin=0):
    """[n, ch, h, w] of one class: numbers taken one by one from each channel's row, cells enlarged by the library."""
    n, ch, h, w = stored.shape
    wide = math.floor(cell * w / h + 0.5)
    rows = [[float(v) for v in stored[:, c].flatten()] for c in range(ch)]
    out = []
    for k in range(n * h * w // (cell * wide)):
        planes = [torch.tensor(row[k * cell * wide : (k + 1) * cell * wide]).view(cell, wide) for row in rows]
        inner = (h - 2 * margin, w - 2 * margin)
        large = functional.interpolate(torch.stack(planes)[None], inner, mode="bilinear", align_corners=False)[0]
        out.append(functional.pad(large, (margin, margin, margin, margin)))
    return torch.stack(out)


@pytest.mark.parametrize(("n", "side", "cell", "count"), [
    (10, (28, 28), 20, 19), (1, (28, 28), 14, 4), (3, (8, 12), 5, 7), (2, (32, 32), 32, 2), (1, (9, 9), 6, 2),
])  # fmt: skip
@pytest.mark.parametrize("channels", [1, 3])
def test_cells_are_cut_from_one_row_of_numbers(n, side, cell, count, channels):
    tiles, stored = Tiles(1, cell=cell), some(2, n, channels, *side)
    decoded = tiles.decode(stored)
    assert decoded.shape == (2, count, channels, *side) and tiles.count(n, (channels, *side)) == count
    for c in range(2):
        torch.testing.assert_close(decoded[c], naive(stored[c], cell), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tiles", [Tiles(2, margin=2), Tiles(1, cell=6, margin=1), Tiles(3, margin=1)])
def test_frames_are_black_and_cells_fill_what_is_left(tiles):
    stored, m = some(2, 3, 1, 12, 12) * 0.9 + 0.1, tiles.margin
    decoded = tiles.decode(stored)
    inner = decoded[..., m : 12 - m, m : 12 - m]
    assert decoded.shape[-2:] == (12, 12) and (inner >= 0.1 - 1e-6).all()
    assert decoded.sum() == pytest.approx(float(inner.sum()))
    if tiles.cell:
        torch.testing.assert_close(decoded[0], naive(stored[0], tiles.cell, m), atol=1e-5, rtol=1e-5)
    else:
        side = 12 // tiles.factor
        up = bilinear_matrix(12 - 2 * m, side)
        torch.testing.assert_close(inner[1, 1], up @ stored[1, 0, :, :side, side : 2 * side] @ up.mT)


@pytest.mark.parametrize("upsample", ["bilinear", "bicubic", "cosine"])
@pytest.mark.parametrize("tiles", [Tiles(1, cell=5), Tiles(1, cell=6, margin=2), Tiles(2, margin=1)])
def test_they_start_as_near_to_real_images_as_they_can(tiles, upsample):
    """An image that cells can show exactly comes back; what is left of any other is changed by no number of a cell."""
    tiles = dataclasses.replace(tiles, upsample=upsample)
    n = tiles.count(2, (1, 12, 12))
    shown = tiles.decode(0.3 + 0.4 * some(1, 2, 1, 12, 12))
    torch.testing.assert_close(tiles.decode(tiles.encode(shown)), shown, atol=1e-4, rtol=0)
    blurred = functional.avg_pool2d(
        some(n, 1, 12, 12, seed=1), 5, 1, 2
    )  # away from black and white: nothing is cut off
    frame = (slice(None), slice(None), slice(None), *[slice(tiles.margin, 12 - tiles.margin)] * 2)
    images = 0.4 + 0.2 * blurred[None]
    best = tiles.encode(images).requires_grad_()
    assert best.shape == (1, 2, 1, 12, 12) and best.min() > 0.02 and best.max() < 0.98
    missed = (tiles.decode(best) - images)[frame].square().sum()
    (slope,) = torch.autograd.grad(missed, best)
    assert missed > 0.001 and slope.abs().max() < 1e-5


def test_what_comes_nearest_is_cut_off_at_black_and_white():
    tiles, images = Tiles(1, cell=5), (some(1, 11, 1, 12, 12) > 0.5).float()
    stored = tiles.encode(images)
    assert stored.min() == 0 and stored.max() == 1


def test_what_no_cell_uses_stays_grey():
    """Seven cells of 5×5 pixels in 192 numbers leave 17."""
    stored = Tiles(1, cell=5).encode(some(1, 7, 1, 8, 8) * 0.3)
    assert stored.shape == (1, 3, 1, 8, 8)
    assert (stored.flatten()[175:] == 0.5).all() and (stored.flatten()[:175] < 0.5).all()


@pytest.mark.parametrize("cell", [4, 6, 8])
def test_halved_colours_double_them(cell):
    """Each cell holds two images: the same as mosaics of such cells do."""
    tiles = Tiles(1, chroma="half", cell=cell)
    count = tiles.count(3, (3, 8, 8))
    assert count == 2 * (3 * 64 // cell**2)
    plain = some(2, count, 3, 1, 1).expand(2, count, 3, 8, 8)
    stored = tiles.encode(plain)
    assert stored.shape == (2, 3, 3, 8, 8)
    torch.testing.assert_close(tiles.decode(stored), plain, atol=1e-5, rtol=0)
    if cell == 4:  # as many as a factor of 2 makes, only laid out otherwise
        mosaic = Tiles(2, chroma="half")
        square = some(1, 3, 3, 8, 8)
        cells = mosaic.layout.cut(square)
        torch.testing.assert_close(tiles.decode(tiles.layout.joined(cells, 8, 8)), mosaic.decode(square))


def test_gradients_reach_every_number_that_is_used_and_no_other():
    pixels = some(2, 2, 1, 8, 8)
    synthetic = Synthetic(pixels, Tiles(1, cell=5), Normalise([0.5], [0.25]))
    synthetic(torch.arange(2)).square().sum().backward()
    moved = (synthetic.latent.grad != 0).flatten(1)
    assert moved[:, : 5 * 25].all() and not moved[:, 5 * 25 :].any()


@pytest.mark.parametrize(
    ("tiles", "shape", "told"),
    [
        (lambda: Tiles(2, cell=5), None, r"cell=5 and factor=2 both say how images are cut; give one of them"),
        (lambda: Tiles(1, cell=-1), None, r"cell=-1 is not valid; allowed: a height in pixels, or 0"),
        (lambda: Tiles(1, margin=-2), None, r"margin=-2 is not valid; allowed: a width in pixels, 0 and more"),
        (lambda: Tiles(1, cell=40), (1, 32, 32), r"cell=40 does not go with images of 32×32; allowed: 2 to 32$"),
        (lambda: Tiles(1, cell=1), (1, 32, 32), r"cell=1 does not go with images of 32×32; allowed: 2 to 32$"),
        (lambda: Tiles(1, cell=10**400), (1, 32, 32), r"allowed: 2 to 32$"),
        (lambda: Tiles(1, cell=26, margin=4), (1, 32, 32), r"of 32×32 and margin=4; allowed: 2 to 24$"),
        (lambda: Tiles(1, cell=28, margin=2), (1, 32, 24), r"of 32×24 and margin=2; allowed: 2 to 27$"),  # 27×20
        (
            lambda: Tiles(1, cell=4),
            (1, 64, 116),
            r"cell=4 does not go with images of 64×116; allowed: 5 to 64$",
        ),  # 8 wide
        (lambda: Tiles(1, cell=4, margin=8), (1, 16, 16), r"allowed: none, the margin leaves too little$"),
        (lambda: Tiles(2, margin=9), (1, 32, 32), r"margin=9 leaves less .* than the 16×16 .*; allowed: 0 to 8$"),
        (lambda: Tiles(2, margin=7), (1, 32, 24), r"margin=7 leaves less .* than the 16×12 .*; allowed: 0 to 6$"),
        (lambda: Tiles(1, margin=1), (1, 8, 8), r"margin=1 leaves .*; allowed: 0; a larger factor, or a cell, makes"),
        (
            lambda: Tiles(1, "nearest", "bilinear", "half", 10),
            (3, 16, 24),
            r"3×16×24 images and cells of 10×15 pixels; allowed: .* cells of even sides$",
        ),
    ],
)
def test_what_cannot_be_cut_is_told(tiles, shape, told):
    with pytest.raises(M3DError, match=told):
        tiles().require(shape)


@pytest.mark.parametrize("method", ["random", "herding", "k-center", "m3d", "m3d+"])
def test_methods_that_store_them(method, tmp_path):
    data, options = make_dataset(3, 24, (3, 16, 16)), {"cell": 10, "margin": 2, "chroma": "full"}
    small = {"network": "convnet1:width=4", "epochs": 1} if method in ("herding", "k-center") else {}
    small = {"device": "cpu"} if method == "random" else {"device": "cpu", **small}
    if method.startswith("m3d"):
        small = {**SMALL, **({"encoders": 1, "encoder_epochs": 1} if method == "m3d+" else {})}
    made = m3d.condense(data, 2, method, out=tmp_path / "run", **options, **small)
    loaded = CondensedSet.load(tmp_path / "run")
    assert loaded.manifest["format"] == CELLS_FORMAT and loaded.manifest["factor"] == 1
    images, labels = loaded.decoded()
    assert images.shape == (15, 3, 16, 16) and labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert torch.equal(images, made.decoded()[0]) and "cells 10 pixels high in frames of 2" in repr(loaded)
    assert loaded.images.shape == (6, 3, 16, 16)  # no more storage than without
    assert (images[..., :2, :] == 0).all() and images[..., 2:14, 2:14].std() > 0.01
    each = [Tiles(1, cell=10, margin=2).decode(loaded.images[2 * c : 2 * c + 2]) for c in range(3)]
    torch.testing.assert_close(images, torch.cat(each))


def test_a_cell_takes_the_place_of_the_method_s_factor():
    task = Task("photos", (3, 32, 32), 3, 10, smallest=100)
    for method in ("m3d", "m3d+"):
        made, told = make_method(method, task, {"cell": 20})
        assert (made.tiles.factor, made.tiles.cell, told["factor"]) == (1, 20, 1)
        with pytest.raises(M3DError, match="both say how images are cut"):
            make_method(method, task, {"cell": 20, "factor": 2})
    assert make_method("m3d+", task, {"cell": 20})[1]["chroma"] == "half"  # 2 × 25 images
    assert make_method("m3d+", task, {"cell": 21})[1]["chroma"] == "full"  # colours of 10½ pixels there are not
    assert make_method("m3d+", dataclasses.replace(task, smallest=49), {"cell": 20})[1]["chroma"] == "full"
    assert make_method("m3d+", dataclasses.replace(task, shape=(1, 32, 32)), {"cell": 20})[1]["chroma"] == "full"


def test_a_stopped_run_goes_on_to_the_same_bits_and_is_evaluated(tmp_path, monkeypatch):
    monkeypatch.setattr("m3d.engine._REPORT_SECONDS", 0.0)
    data, options = make_dataset(3, 24, (1, 16, 16)), {**SMALL, "steps": 3, "cell": 9, "margin": 1}
    whole = m3d.condense(data, 2, "m3d", **options)

    def stop(progress):
        if progress.step == 1:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        m3d.condense(data, 2, "m3d", out=tmp_path / "run", report=stop, **options)
    assert m3d.resume(tmp_path / "run", data=data).fingerprint == whole.fingerprint
    result = m3d.evaluate(
        tmp_path / "run", data=data, net="convnet1:width=4", protocol="quick", epochs=1, repeats=1, device="cpu"
    )
    assert 0 <= result.mean <= 100
    assert (result.record["factor"], result.record["cell_height"], result.record["margin"]) == (1, 9, 1)


@pytest.mark.parametrize(
    "options",
    [{"cell": 10, "margin": 1}, {"cell": 10, "chroma": "half", "upsample": "cosine"}, {"factor": 2, "margin": 2}],
)
def test_a_step_with_them_compiles_without_breaks(options):
    """And gives what it gives uncompiled, gradients of the stored pixels included."""
    torch._dynamo.reset()
    data, cpu = make_dataset(3, 24, (3, 16, 16)), Runtime.choose("cpu")
    method = make_method("m3d", Task("any", data.shape, 3, 2), {"batch_real": 4, **options})[0]
    pixels = method.tiles.encode(method.init(data, method.tiles.count(2, data.shape), 0, cpu))
    step = Step(method, data, FlatNet(make_net("convnet2:width=4", data.shape, 3)), pixels, 0, cpu)
    step.refill(0)
    step.pool.draw(0)
    step.objective.draw(step.number)
    compiled = torch.compile(step.loss, backend="aot_eager", fullgraph=True, dynamic=False)
    found = []
    for loss in (step.loss, compiled):
        value = loss(step.lanes, step.real_index[0], step.syn_index[0], step.augmentation[0])
        found.append((value, *torch.autograd.grad(value.sum(), step.learned)))
    assert float(found[0][1].abs().sum()) > 0
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-4)


def test_pictures_show_cells(tmp_path):
    made = m3d.condense(make_dataset(3, 24, (3, 16, 16)), 2, "random", cell=10, device="cpu")
    assert made.pictures().shape == (3, 5, 3, 10, 10)
    torch.testing.assert_close(made.pictures(), Tiles(1, cell=10).layout.cut(made.images.unflatten(0, (3, 2))))
    axes = grid(made).axes[0]
    assert "cells of 10 pixels" in axes.get_title("left").replace("\n", " ")
    assert picture(made)["rows"] == 2 and picture(made)["columns"] == 3
    halved = m3d.condense(make_dataset(3, 24, (3, 16, 16)), 2, "random", cell=10, chroma="half", device="cpu")
    assert halved.pictures().shape == (3, 10, 3, 10, 10) and halved.pictures().std() > 0.01


def test_damaged_sets_of_cells_are_refused(tmp_path):
    made = m3d.condense(make_dataset(3, 24, (1, 8, 8)), 2, "random", cell=5, device="cpu")
    made.save(tmp_path / "set.safetensors")
    tensors, metadata = read_tensors(tmp_path / "set.safetensors")
    manifest = json.loads(metadata["m3d"])

    def refused(told, **changes):
        (tmp_path / "bad.safetensors").write_bytes(
            to_safetensors(tensors, {"m3d": json.dumps({**manifest, **changes})})
        )
        with pytest.raises(M3DError, match=told):
            CondensedSet.load(tmp_path / "bad.safetensors")

    refused("the manifest's 'cell' must be a number of pixels", cell="5")
    refused("the manifest's 'cell' must be a number of pixels", cell=True)
    refused("the manifest's 'margin' must be a number of pixels", margin=None)
    refused("cell=9 does not go with images of 8×8; allowed: 1 to 8", cell=9)
    refused("cell=1000.* does not go with images of 8×8", cell=10**400)
    refused("both say how images are cut", factor=2)
    refused("has format 5; this version reads formats 1 to 4", format=5)
    empty = dataclasses.replace(made, images=torch.zeros(6, 1, 0, 8))
    empty.save(tmp_path / "empty.safetensors")
    with pytest.raises(M3DError, match=r"images are \[6, 1, 0, 8\]; a set holds one image at least"):
        CondensedSet.load(tmp_path / "empty.safetensors")
    mixed = dataclasses.replace(made, labels=made.labels.flip(0).roll(1))
    mixed.save(tmp_path / "mixed.safetensors")
    with pytest.raises(M3DError, match="images of different classes share cells"):
        CondensedSet.load(tmp_path / "mixed.safetensors")


def test_labels_follow_their_images_in_any_order():
    """Images of one set may be mixed as long as no cell is shared."""
    made = m3d.condense(make_dataset(3, 24, (1, 8, 8)), 2, "random", factor=2, device="cpu")
    order = torch.tensor([4, 0, 3, 1, 5, 2])
    mixed = dataclasses.replace(made, images=made.images[order], labels=made.labels[order])
    images, labels = (part.unflatten(0, (6, 4)) for part in made.decoded())
    assert torch.equal(mixed.decoded()[0], images[order].flatten(0, 1))
    assert torch.equal(mixed.decoded()[1], labels[order].flatten())


def test_records_from_before_there_were_cells_mean_the_same(tmp_path):
    """What was recorded without the options and what names their plain values are one setting."""
    from m3d.earlier import comparable, completed

    named = {"lr": 1.0, "cell": 0, "margin": 0, "chroma": "full"}
    assert completed({"lr": 1.0}, named) == named and comparable(named) == {"lr": 1.0}
    assert comparable({**named, "cell": 20}) == {"lr": 1.0, "cell": 20}
    m3d.condense(make_dataset(3, 24, (1, 16, 16)), 1, "m3d", out=tmp_path / "run", **SMALL)
    loaded = CondensedSet.load(tmp_path / "run")
    assert loaded.manifest["format"] == 1  # a set without them is read by older versions as well
