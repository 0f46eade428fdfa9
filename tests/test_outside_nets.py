"""Networks of timm: through a small imitation of it everywhere, and for real where it is installed."""

import importlib.util
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional

import m3d
from m3d.evaluation import make_protocol
from m3d.nets import FlatNet, make_net
from m3d.nets.norms import BatchNorm
from m3d.rng import Purpose

needs_timm = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")


class NormAct(nn.BatchNorm2d):
    """As timm's batch norm with an activation after it."""

    def __init__(self, channels):
        super().__init__(channels, eps=1e-3)
        self.act = nn.SiLU()


class Imitation(nn.Module):
    """Two convolutions with both kinds of batch norm, dropout, and timm's way to ask for parts of the answer."""

    def __init__(self, channels, classes, **extra):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(channels, 6, 3, stride=2, padding=1), NormAct(6))
        self.block = nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5))
        self.block.add_module("path", Path(0.5))
        self.fc = nn.Linear(8, classes)
        if extra.get("buffer"):
            self.register_buffer("index", torch.zeros(3))
        if extra.get("embedding"):
            self.position = nn.Parameter(torch.zeros(1, 8, 4, 4))
        if extra.get("plain"):
            self.block[1] = nn.BatchNorm2d(8, affine=False)
        if extra.get("headless"):
            self.fc = nn.Identity()

    def forward_features(self, x):
        return self.block(self.stem(x))

    def forward_head(self, x, pre_logits=False):
        pooled = x.mean((2, 3))
        return pooled if pre_logits else self.fc(pooled)

    def get_classifier(self):
        return self.fc


class Path(nn.Module):
    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        return x * (torch.rand(len(x), 1, 1, 1) >= self.drop_prob) if self.drop_prob else x


@pytest.fixture
def timm(monkeypatch):
    asked = []

    def create_model(name, pretrained, num_classes, in_chans):
        asked.append((name, pretrained))
        if name == "nothing":
            raise RuntimeError("Unknown model (nothing)")
        return Imitation(in_chans, num_classes, **({} if name == "small" else {name: True}))

    module = types.ModuleType("timm")
    module.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", module)
    return asked


def flat_of(net: FlatNet, repeats=1):
    return net.fresh(0, Purpose.CLASSIFIER, torch.tensor([0]), torch.arange(repeats))


def test_a_model_becomes_a_stateless_network(timm):
    """Against the model itself in training mode without dropout."""
    net = FlatNet(make_net("timm:small", (3, 8, 8), 5))
    assert timm == [("small", False)] and net.mixes_images and net.spec == "timm:name=small"
    rows, images = flat_of(net, 2), torch.randn(2, 7, 3, 8, 8)
    seen = net(rows, images)
    assert seen.features.shape == (2, 7, 8) and seen.logits.shape == (2, 7, 5) and seen.maps == ()
    for r in range(2):
        own = Imitation(3, 5).train()
        own.block[3], own.block.path = nn.Identity(), nn.Identity()
        with torch.no_grad():
            for parameter, value in zip(own.parameters(), net.unflatten(rows).values(), strict=True):
                parameter.copy_(value[r])
        x = images[r]
        x = functional.silu(own.stem(x))  # the imitation's norm, like any batch norm, does not apply it itself
        expected = own.fc(own.block(x).mean((2, 3)))
        torch.testing.assert_close(seen.logits[r], expected, atol=1e-5, rtol=1e-4)
    norms = [m for m in make_net("timm:small", (3, 8, 8), 5).modules() if isinstance(m, BatchNorm)]
    assert [n.eps for n in norms] == [1e-3, 1e-5]


def test_layers_start_as_pytorch_starts_them(timm):
    net = FlatNet(make_net("timm:small", (3, 8, 8), 5))
    named = net.unflatten(flat_of(net, 200))
    weight = named["model.block.0.weight"]
    assert float(weight.abs().max()) <= 54**-0.5 and float(weight.std()) == pytest.approx((3 * 54) ** -0.5, rel=0.02)
    assert (named["model.stem.1.0.weight"] == 1).all() and (named["model.stem.1.0.bias"] == 0).all()


def test_half_precision(timm):
    net = FlatNet(make_net("timm:small", (3, 8, 8), 5))
    flat, images = flat_of(net).requires_grad_(), torch.randn(1, 7, 3, 8, 8)
    low, high = (net(flat, images, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert low.logits.dtype == low.features.dtype == torch.float32
    torch.testing.assert_close(low.logits, high.logits, atol=0.05, rtol=0.05)
    assert not torch.equal(low.logits, high.logits)
    (gradient,) = torch.autograd.grad(low.logits.square().sum(), flat)
    assert gradient.abs().sum() > 0 and torch.isfinite(gradient).all()


def test_it_evaluates_a_set(timm, tiny):
    condensed = m3d.condense(tiny, 4, "random")
    settings = {"repeats": 2, "protocol": make_protocol("dsa", epochs=12)}
    first, again = (m3d.evaluate(condensed, tiny, net="timm:small", **settings) for _ in range(2))
    assert first.last == again.last and first.mean > 40 and first.record["net"] == "timm:small"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "no usable network 'nothing': Unknown model"),
        ("buffer", "keeps buffers beside its parameters"),
        ("plain", "without gain and shift"),
        ("headless", "does not end in one linear layer"),
    ],
)
def test_what_cannot_be_used_is_named(timm, name, message):
    with pytest.raises(m3d.M3DError, match=message):
        make_net(f"timm:{name}", (3, 8, 8), 5)


def test_a_timm_that_does_not_go_with_this_pytorch_is_told(monkeypatch, tmp_path):
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(m3d.M3DError, match=r"timm:small: timm is installed but cannot be imported: operator torch"):
        make_net("timm:small", (3, 8, 8), 5)


def test_parameters_without_a_law_are_refused(timm):
    with pytest.raises(m3d.M3DError, match="no initialisation is known for the parameters of Imitation"):
        FlatNet(make_net("timm:embedding", (3, 8, 8), 5))


def test_without_timm_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(m3d.M3DError, match=r"timm:resnet18 needs the library timm.*pip install timm"):
        make_net("timm:resnet18", (3, 32, 32), 10)


@needs_timm
@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0", "mobilenetv3_small_100"])
def test_real_models_run(name):
    net = FlatNet(make_net(f"timm:{name}", (3, 64, 64), 5))
    seen = net(flat_of(net), torch.randn(1, 4, 3, 64, 64))
    assert seen.logits.shape == (1, 4, 5) and torch.isfinite(seen.logits).all()
