"""What is measured beside accuracy: distances of moments, and what kernels see."""

from __future__ import annotations

import pytest
import torch

import m3d
from m3d import rng
from m3d.nets import FlatNet, make_net
from m3d.reproduce.moments import _SEED, moment_distances
from m3d.reproduce.toy import POINTS, compare, sample, seen
from m3d.runtime import Runtime

CPU = Runtime.choose("cpu")
NET = "convnet2:width=8"


def test_moment_distances_match_a_naive_derivation(tiny):
    condensed = m3d.condense(tiny, 3, "random", factor=2)
    measured = moment_distances(condensed, tiny, NET, CPU, encoders=2)
    net = FlatNet(make_net(NET, tiny.shape, tiny.classes))
    flat = net.fresh(_SEED, rng.Purpose.ENCODER, torch.zeros(1, dtype=torch.long), torch.arange(2))
    mean, std = (torch.tensor(v)[:, None, None] for v in (tiny.mean, tiny.std))
    pixels, labels = condensed.decoded()
    raw, relative = [], []
    for e in range(2):
        for c in range(3):
            real = tiny.train.images[c * 12 : (c + 1) * 12].float() / 255
            moments = []
            for images in (real, pixels[labels == c]):
                features = net(flat[e : e + 1], ((images - mean) / std)[None]).features[0].double()
                centred = features - features.mean(0)
                moments.append(torch.stack([features.mean(0), (centred**2).mean(0), (centred**3).mean(0)]))
            gap = (moments[0] - moments[1]).square().sum(1).sqrt()
            raw.append(gap)
            relative.append(gap / moments[0].square().sum(1).sqrt())
    assert measured["raw"] == pytest.approx(torch.stack(raw).mean(0).tolist(), rel=1e-4)
    assert measured["normalised"] == pytest.approx(torch.stack(relative).mean(0).tolist(), rel=1e-4)
    assert (measured["encoders"], measured["images"], measured["layer"]) == (2, 12, "representation")


def test_a_set_of_all_images_has_no_distance_and_noise_a_large_one(tiny):
    everything = m3d.condense(tiny, 12, "random")
    assert moment_distances(everything, tiny, NET, CPU, encoders=2)["normalised"] == pytest.approx([0, 0, 0], abs=1e-4)
    few = m3d.condense(tiny, 2, "random")
    assert all(v > 0.02 for v in moment_distances(few, tiny, NET, CPU, encoders=2)["normalised"])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("mean", (True, True, True)),
        ("variance", (False, True, True)),
        ("skewness", (False, False, True)),
        ("aligned", (False, False, False)),
    ],
)
def test_each_kernel_sees_its_moments_and_no_more(kind, expected):
    found = compare(kind)["seen"]
    assert tuple(found[name] > 1 for name in ("linear", "polynomial", "gaussian")) == expected
    assert all(v < 0.5 or v > 5 for v in found.values())  # nothing near the limit


def test_samples_differ_in_the_stated_moment_alone():
    for kind, mean, variance, skewness in (
        ("mean", 0.5, 1, 0),
        ("variance", 0, 0.25, 0),
        ("skewness", 0, 1, 2),
        ("aligned", 0, 1, 0),
    ):
        original, other = sample(kind)
        centred = other - other.mean()
        assert len(other) == POINTS and float(other.mean()) == pytest.approx(mean, abs=1e-5)
        assert float(centred.square().mean()) == pytest.approx(variance, abs=1e-4)
        assert float(centred.pow(3).mean() / centred.square().mean() ** 1.5) == pytest.approx(skewness, abs=0.35)
        assert float(original.mean()) == pytest.approx(0, abs=1e-5)


def test_the_limit_is_that_of_random_divisions():
    """Against a plain loop over divisions of few points."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, generator=generator), torch.randn(20, generator=generator) + 1
    value, limit = seen(x, y, "linear")
    assert value == pytest.approx(float((x.mean() - y.mean()) ** 2), rel=1e-4)
    both = torch.cat([x, y])
    chance = []
    for _ in range(2000):
        order = torch.randperm(40, generator=generator)
        chance.append(float((both[order[:20]].mean() - both[order[20:]].mean()) ** 2))
    assert limit == pytest.approx(float(torch.tensor(chance).quantile(0.95)), rel=0.35)
