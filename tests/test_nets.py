"""Networks: the published architecture, the flat buffer, and the law of fresh weights."""

import math

import pytest
import torch
from torch import nn

from m3d.errors import M3DError
from m3d.nets import NETS, FlatNet, make_net
from m3d.rng import Purpose


def reference_convnet3(channels: int, classes: int, padding: int = 1) -> nn.Sequential:
    """ConvNet-3 as published, from the library's own layers."""
    layers: list[nn.Module] = []
    for i in range(3):
        first = nn.Conv2d(channels if i == 0 else 128, 128, 3, padding=padding if i == 0 else 1)
        layers += [first, nn.GroupNorm(128, 128), nn.ReLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, classes))


@pytest.mark.parametrize(("shape", "padding"), [((3, 32, 32), 1), ((1, 28, 28), 3)])
def test_convnet3_is_the_published_network(shape, padding):
    net, reference = make_net("convnet3", shape, 10), reference_convnet3(shape[0], 10, padding)
    assert sum(p.numel() for p in net.parameters()) == sum(p.numel() for p in reference.parameters())
    weights = dict(zip(net.state_dict(), _in_order(net, reference), strict=True))
    net.load_state_dict(weights)
    x = torch.randn(4, *shape)
    seen = net(x)
    torch.testing.assert_close(seen.logits, reference(x), atol=1e-5, rtol=1e-4)
    assert seen.features.shape == (4, 2048)
    assert [tuple(m.shape[1:]) for m in seen.maps] == [(128, 32, 32), (128, 16, 16), (128, 8, 8)]


def _in_order(net, reference):
    """The reference's weights in the order of ``net``'s: convolutions, norms, classifier."""
    layers = [m for m in reference if list(m.parameters())]
    convs, norms, linear = layers[0:6:2], layers[1:6:2], layers[6]
    return [p for m in (*convs, *norms, linear) for p in m.parameters()]


@pytest.mark.parametrize("side", [8, 9, 16, 28, 30, 33, 64])
@pytest.mark.parametrize("name", ["convnet1", "convnet3", "convnet:depth=2,width=16,norm=none"])
def test_any_image_from_8_pixels_up(name, side):
    seen = make_net(name, (1, side, side), 7)(torch.rand(2, 1, side, side))
    assert seen.logits.shape == (2, 7) and torch.isfinite(seen.logits).all()


def test_every_listed_network_builds_and_runs_flat():
    names = [name for name in NETS.names() if name != "timm"]  # another library's, tested by itself
    assert len(names) >= 13
    for name in names:
        net = FlatNet(make_net(name, (3, 64, 64), 5))
        seen = net(net.fresh(0, Purpose.ENCODER, torch.tensor([0]), torch.arange(2)), torch.rand(2, 3, 3, 64, 64))
        assert seen.logits.shape == (2, 3, 5) and seen.maps == ()


def test_flat_and_stacked_equal_the_module():
    modules = [make_net("convnet2:width=8", (3, 8, 8), 4) for _ in range(3)]
    x = torch.rand(3, 5, 3, 8, 8)
    flat = torch.stack([torch.cat([p.detach().flatten() for p in m.parameters()]) for m in modules])
    seen = FlatNet(make_net("convnet2:width=8", (3, 8, 8), 4))(flat, x, maps=True)
    for r, module in enumerate(modules):
        own = module(x[r])
        torch.testing.assert_close(seen.features[r], own.features)
        torch.testing.assert_close(seen.logits[r], own.logits)
        for mine, theirs in zip(seen.maps, own.maps, strict=True):
            torch.testing.assert_close(mine[r], theirs)


def test_fresh_weights_follow_the_librarys_law():
    net = FlatNet(make_net("convnet3", (3, 32, 32), 10))
    rows = net.fresh(0, Purpose.ENCODER, torch.tensor([0]), torch.arange(2))
    assert rows.shape == (2, net.size) and not torch.equal(rows[0], rows[1])
    assert torch.equal(rows, net.fresh(0, Purpose.ENCODER, torch.tensor([0]), torch.arange(2)))
    assert not torch.equal(rows, net.fresh(0, Purpose.ENCODER, torch.tensor([1]), torch.arange(2)))
    assert not torch.equal(rows, net.fresh(0, Purpose.CLASSIFIER, torch.tensor([0]), torch.arange(2)))
    mine = {name: value[0] for name, value in net.unflatten(rows).items()}
    theirs = dict(make_net("convnet3", (3, 32, 32), 10).named_parameters())
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        if "norms" in name:
            assert torch.equal(value, theirs[name].detach())
            continue
        weight = theirs[name.replace("bias", "weight")]
        bound = 1 / math.sqrt(weight[0].numel())
        assert value.abs().max() <= bound
        if value.numel() > 1000:
            assert abs(value.std() / (bound / math.sqrt(3)) - 1) < 0.05
            assert abs(value.std() / theirs[name].std() - 1) < 0.05


def test_gradients_reach_the_flat_vector():
    net = FlatNet(make_net("convnet2:width=4", (1, 8, 8), 3))
    flat = net.fresh(0, Purpose.ENCODER, torch.tensor([0]), torch.tensor([0])).double().requires_grad_()
    x = torch.rand(1, 2, 1, 8, 8).double()
    net(flat, x, torch.float64).logits.square().sum().backward()
    assert (flat.grad != 0).float().mean() > 0.9


def test_bad_networks_are_refused():
    with pytest.raises(M3DError, match="Did you mean 'convnet3'"):
        make_net("convent3", (3, 32, 32), 10)
    with pytest.raises(M3DError, match="at least 16×16"):
        make_net("convnet4", (1, 8, 8), 10)
    with pytest.raises(M3DError, match="widht"):
        make_net("convnet3:widht=3", (3, 32, 32), 10)
    with pytest.raises(M3DError, match="width='wide'"):
        make_net("convnet3:width=wide", (3, 32, 32), 10)
    with pytest.raises(M3DError, match="buffers"):
        FlatNet(nn.BatchNorm2d(3))
