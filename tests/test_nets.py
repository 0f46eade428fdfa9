"""Networks: the published architecture, the flat buffer, and the law of fresh weights."""

import math
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from m3d.errors import M3DError
from m3d.nets import NETS, FlatNet, make_net
from m3d.nets.pooling import halved
from m3d.rng import Purpose


def reference_convnet3(channels: int, classes: int, padding: int = 1, norm: str = "instance") -> nn.Sequential:
    """ConvNet-3 as published, from the library's own layers."""
    layers: list[nn.Module] = []
    for i in range(3):
        first = nn.Conv2d(channels if i == 0 else 128, 128, 3, padding=padding if i == 0 else 1)
        normalise = nn.GroupNorm(128, 128) if norm == "instance" else nn.BatchNorm2d(128, momentum=1.0)
        layers += [first, normalise, nn.ReLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, classes))


@pytest.mark.parametrize("norm", ["instance", "batch", "none"])
@pytest.mark.parametrize("shape", [(3, 9, 11), (1, 28, 28)])
@pytest.mark.parametrize("nets", [1, 3])
@pytest.mark.parametrize("maps", [False, True])
def test_networks_side_by_side_equal_one_by_one(monkeypatch, norm, shape, nets, maps):
    """As they are computed on a GPU and on a CPU: what is seen, its gradients and theirs."""
    net = FlatNet(make_net(f"convnet2:width=4,norm={norm}", shape, 3))
    flat = net.fresh(0, Purpose.ENCODER, torch.zeros(1, dtype=torch.long), torch.arange(nets))
    flat = flat.double().requires_grad_()
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(nets, 5, *shape, dtype=torch.float64, generator=draw).requires_grad_()
    found = []
    for large in (True, False):
        monkeypatch.setattr(sys.modules["m3d.nets.convnet"], "_likes_large_operations", lambda _, large=large: large)
        seen = net(flat, x, torch.float64, maps)
        total = seen.logits.tanh().sum() + sum(m.square().mean() for m in seen.maps)
        once = torch.autograd.grad(total, (flat, x), create_graph=True)
        twice = torch.autograd.grad(sum(g.square().sum() for g in once), (flat, x))
        found.append((seen.features, seen.logits, *seen.maps, *once, *twice))
    assert len(found[0]) == len(found[1]) == (8 if maps else 6)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("sides", [(8, 6), (7, 9), (2, 3)])
@pytest.mark.parametrize("lead", [(2, 3), (2, 3, 4)])
def test_pooling_is_the_library_s_and_differentiable_twice(lead, sides):
    x = torch.randn(*lead, *sides, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = []
    for pool in (halved, lambda y: functional.avg_pool2d(y.flatten(0, -4), 2).unflatten(0, lead[:-1])):
        y = pool(x)
        (once,) = torch.autograd.grad(y.tanh().sum(), x, create_graph=True)
        (twice,) = torch.autograd.grad(once.square().sum(), x)
        found.append((y, once, twice))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


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


def batch_normed() -> tuple[FlatNet, Tensor, list[nn.Sequential]]:
    """(network, two rows of parameters, the same two as the library's own modules in training mode), float64."""
    module, modules = make_net("convnet3:norm=batch", (3, 32, 32), 10), []
    for seed in range(2):
        torch.manual_seed(seed)
        modules.append(reference_convnet3(3, 10, norm="batch").double().train())
        for layer in modules[-1]:
            if isinstance(layer, nn.BatchNorm2d):
                nn.init.uniform_(layer.weight, 0.5, 1.5)
                nn.init.uniform_(layer.bias, -0.5, 0.5)
    rows = [torch.cat([p.detach().flatten() for p in _in_order(module, reference)]) for reference in modules]
    return FlatNet(module), torch.stack(rows), modules


def test_batch_norm_is_the_librarys_in_training_and_each_network_has_its_own():
    net, flat, modules = batch_normed()
    assert net.mixes_images and not net.net.fused
    images = torch.randn(2, 5, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    images[1] += 1.0  # the second network sees other images: statistics must not mix
    images.requires_grad_()
    seen = net(flat, images, torch.float64, maps=True)
    expected = torch.stack([module(x) for module, x in zip(modules, images, strict=True)])
    torch.testing.assert_close(seen.logits, expected)
    assert [tuple(m.shape) for m in seen.maps] == [(2, 5, 128, s, s) for s in (32, 16, 8)]
    torch.testing.assert_close(seen.maps[0][1], modules[1][:3](images[1]))
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mine, theirs = (torch.autograd.grad((v * weight).sum(), images)[0] for v in (seen.logits, expected))
    torch.testing.assert_close(mine, theirs)
    assert not torch.allclose(seen.logits[:, :2], net(flat, images[:, :2], torch.float64).logits, atol=1e-3)


def test_batch_norm_is_tested_with_the_statistics_of_the_reference_images():
    """Against the library's evaluation mode, its running statistics those of one pass over the reference images."""
    net, flat, modules = batch_normed()
    generator = torch.Generator().manual_seed(0)
    reference, images = (torch.randn(2, n, 3, 32, 32, generator=generator, dtype=torch.float64) for n in (6, 4))
    seen = net.calibrated(flat, images, reference, torch.float64)
    for r, module in enumerate(modules):
        module(reference[r])
        for layer, side in zip([m for m in module if isinstance(m, nn.BatchNorm2d)], (32, 16, 8), strict=True):
            count = 6 * side * side
            layer.running_var *= (count - 1) / count  # the library keeps the unbiased variance
        torch.testing.assert_close(seen.logits[r], module.eval()(images[r]))
    alone = net.calibrated(flat, images[:, 1:2], reference, torch.float64)
    torch.testing.assert_close(alone.logits[:, 0], seen.logits[:, 1])


@pytest.mark.parametrize("side", [8, 9, 16, 28, 30, 33, 64])
@pytest.mark.parametrize(
    "name", ["convnet1", "convnet3", "convnet:depth=2,width=16,norm=none", "convnet3:width=8,norm=batch"]
)
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
    with pytest.raises(M3DError, match="norm='layer'"):
        make_net("convnet3:norm=layer", (3, 32, 32), 10)
    with pytest.raises(M3DError, match="buffers"):
        FlatNet(nn.BatchNorm2d(3))


def test_images_of_a_gpu_go_through_in_parts_that_32_bits_can_index():
    from m3d.nets.flat import _images_at_once

    for nets, n, side, most in ((1, 1280, 32, 16_383), (1, 1280, 224, 334), (10, 64, 224, 33)):
        assert _images_at_once(torch.empty(nets, n, 3, side, side, device="meta")) == most
