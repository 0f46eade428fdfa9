"""Photographs' augmentation: each part against a hand-made case, and in training."""

import itertools

import pytest
import torch
from torch.nn import functional

from m3d.batches import Images
from m3d.errors import M3DError
from m3d.evaluation import make_protocol
from m3d.nets import FlatNet, make_net
from m3d.normalise import Normalise
from m3d.photo import UNIFORMS, Photo
from m3d.runtime import Runtime
from m3d.train import Recipe, Trainer

NOTHING = Photo(least=1.0, jitter=0.0, lighting=0.0)


def images(n=4, h=12, w=10):
    return torch.rand(n, 3, h, w, generator=torch.Generator().manual_seed(0))


def uniforms(n=4, **at):
    """0.5 everywhere (the middle of every range) unless said otherwise."""
    u = torch.full((n, UNIFORMS), 0.5)
    for place, value in at.items():
        u[:, int(place[1:])] = value
    return u


def test_nothing_is_done_by_neutral_settings():
    u = torch.rand(4, UNIFORMS)
    u[:, 1] = 0.5  # square parts
    torch.testing.assert_close(NOTHING(images(h=12, w=12), u), images(h=12, w=12), atol=1e-6, rtol=0)


def test_a_part_is_the_librarys_resize_of_a_crop():
    x = images(1, 16, 16)
    # Half the area as a square: 11 × 11 pixels, at row 5 (the last that fits) and column 0.
    out = Photo(least=0.5, jitter=0.0, lighting=0.0)(x, uniforms(1, _0=0.0, _2=0.999, _3=0.0))
    crop = x[:, :, 5:16, 0:11]
    expected = functional.interpolate(crop, (16, 16), mode="bilinear", align_corners=False)
    inner = (slice(None), slice(None), slice(1, -1), slice(1, -1))  # the rim of a crop's resize repeats its own edge
    torch.testing.assert_close(out[inner], expected[inner], atol=1e-5, rtol=0)


def test_parts_stay_inside_and_in_their_ranges():
    """Coordinates as colours: what part was taken can be read off the result."""
    h = w = 64
    rows = torch.arange(h).float()[:, None].expand(h, w)
    x = torch.stack([rows, rows.mT, torch.zeros(h, w)]).expand(400, 3, h, w)
    u = torch.rand(400, UNIFORMS, generator=torch.Generator().manual_seed(1))
    out = Photo(jitter=0.0, lighting=0.0)(x, u)
    high, wide = (out[:, k].amax((1, 2)) - out[:, k].amin((1, 2)) + 1 for k in (0, 1))
    share = high * wide / (h * w)
    assert out.min() >= 0 and out.max() <= 63
    assert 0.44 < share.min() < 0.56 and share.max() > 0.9
    assert 0.7 < (wide / high).min() < 0.85 and 1.2 < (wide / high).max() < 1.45


def test_jitter_in_each_order_matches_its_formulas():
    x = images(6, 8, 8)  # square, so that the whole image is the part
    u = uniforms(6, _4=1.0, _5=0.0, _6=0.75)
    u[:, 7] = torch.arange(6) / 6 + 0.01
    out = Photo(least=1.0, lighting=0.0)(x, u)

    def grey(y):
        return 0.299 * y[0] + 0.587 * y[1] + 0.114 * y[2]

    operations = (
        lambda y: y * 1.4,
        lambda y: y * 0.6 + grey(y).mean() * 0.4,
        lambda y: y * 1.2 - grey(y) * 0.2,
    )
    found = set()
    for k in range(6):
        for order in itertools.permutations(range(3)):
            y = x[k]
            for o in order:
                y = operations[o](y)
            if torch.allclose(y, out[k], atol=1e-5):
                found.add((k, order))
    assert len({k for k, _ in found}) == 6 and len({order for _, order in found}) == 6


def test_lighting_adds_one_colour_of_the_stated_spread():
    n = 4000
    x = torch.zeros(n, 3, 2, 2)
    out = Photo(least=1.0, jitter=0.0)(x, torch.rand(n, UNIFORMS, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(out, out[:, :, :1, :1].expand_as(out))
    directions = torch.tensor([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
    scale = 0.1 * torch.tensor([0.2175, 0.0188, 0.0045])
    expected = (directions * scale) @ (directions * scale).mT
    torch.testing.assert_close(torch.cov(out[:, :, 0, 0].mT), expected, atol=3e-5, rtol=0.1)


def test_wrong_settings_and_grey_images():
    for wrong in ({"least": 0.0}, {"jitter": 1.0}, {"lighting": -0.1}):
        with pytest.raises(M3DError, match="is not valid"):
            Photo(**wrong)
    with pytest.raises(M3DError, match=r"1 channel\(s\)"):
        NOTHING(torch.zeros(1, 1, 4, 4), uniforms(1))


def trainer(photo, repeats=2, batch=3):
    recipe = Recipe(epochs=2, batch=batch, lr=0.1, photo=photo)
    data = Images(images(8, 8, 8), torch.arange(8) % 2, Normalise((0.4, 0.5, 0.6), (0.2, 0.2, 0.2)))
    net = FlatNet(make_net("convnet2:width=4", (3, 8, 8), 2))
    return Trainer(net, data, recipe, repeats, 0, Runtime.choose("cpu"))


def test_in_training_every_image_of_every_network_has_its_own():
    made = trainer(Photo())
    made._begin_epoch()
    batch = made.batches.take(3, ahead=False).images
    index = made.batches.index[0]
    for r in range(2):
        for k in range(3):
            alone = Photo()(made.images.plain(index[r, k])[None], made.batches.photo[0, r, k][None])
            torch.testing.assert_close(batch[r, k], made.images.normalise(alone)[0], atol=1e-5, rtol=1e-5)
    assert len(torch.unique(made.batches.photo[0].flatten(0, 1), dim=0)) == 6


def test_other_draws_are_what_they_are_without_it():
    with_photo, without = trainer(Photo()), trainer(None)
    for made in (with_photo, without):
        made._begin_epoch()
    assert torch.equal(with_photo.batches.augmentation, without.batches.augmentation)
    assert torch.equal(with_photo.batches.index, without.batches.index) and without.batches.photo.numel() == 0


def test_the_published_recipes():
    ten, hundred = make_protocol("imagenet").recipe, make_protocol("imagenet100").recipe
    assert (ten.epochs, ten.batch, ten.lr, ten.weight_decay, ten.cutmix) == (1000, 64, 0.01, 5e-4, 1.0)
    assert (hundred.epochs, hundred.batch, hundred.lr, hundred.weight_decay) == (600, 128, 0.1, 1e-4)
    assert (ten.milestones, ten.gamma) == ((666, 833), 0.2) and str(ten.augment) == "flip"
    assert ten.photo == hundred.photo == Photo(0.5, 0.4, 0.1)
