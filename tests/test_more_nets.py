"""The networks the field evaluates on: their definitions from the library's layers, flat use, law, and refusals."""

import math

import pytest
import torch
from torch import nn

from m3d.errors import M3DError
from m3d.nets import FlatNet, make_net
from m3d.nets.norms import BatchNorm, norm_layer
from m3d.nets.single import Conv, HeConv
from m3d.rng import Purpose

NAMES = ["resnet10", "resnet18", "resnetap10", "densenet121", "alexnet", "vgg11"]
SMALL = ["resnet10:width=4", "resnet18:width=4", "resnetap10:width=4", "densenet121:growth=4"]  # quick ones
ZERO = torch.tensor([0])


def norm_of(name: str, channels: int) -> nn.Module:
    if name == "none":
        return nn.Identity()
    return nn.GroupNorm(channels, channels) if name == "instance" else nn.BatchNorm2d(channels)


class Branches(nn.Module):
    """The sum (after ReLU) or the concatenation of what two branches make of x."""

    def __init__(self, main: nn.Module, side: nn.Module, join: bool = False):
        super().__init__()
        self.main, self.side, self.join = main, side, join

    def forward(self, x):
        main, side = self.main(x), self.side(x)
        return torch.cat([side, main], 1) if self.join else torch.relu(main + side)


def reference_resnet(channels: int, classes: int, blocks: int, norm: str, pool: bool, stem: list[nn.Module]):
    layers, inputs = [*stem, norm_of(norm, 64), nn.ReLU()], 64
    if pool and stem[0].kernel_size == (7, 7):
        layers.append(nn.AvgPool2d(4))
    for k, outputs in enumerate((64, 128, 256, 512)):
        for b in range(blocks):
            halve = k > 0 and b == 0
            stride, down = (2, []) if halve and not pool else (1, [nn.AvgPool2d(2)] if halve else [])
            main = [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), norm_of(norm, outputs), nn.ReLU(), *down]
            main += [nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), norm_of(norm, outputs)]
            side = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), *down, norm_of(norm, outputs)] if halve else []
            layers.append(Branches(nn.Sequential(*main), nn.Sequential(*side)))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def reference_densenet(channels: int, classes: int, norm: str):
    layers, width = [nn.Conv2d(channels, 64, 3, padding=1, bias=False)], 64
    for k, count in enumerate((6, 12, 24, 16)):
        for _ in range(count):
            main = [norm_of(norm, width), nn.ReLU(), nn.Conv2d(width, 128, 1, bias=False)]
            main += [norm_of(norm, 128), nn.ReLU(), nn.Conv2d(128, 32, 3, padding=1, bias=False)]
            layers.append(Branches(nn.Sequential(*main), nn.Identity(), join=True))
            width += 32
        layers += [norm_of(norm, width), nn.ReLU()]
        if k < 3:
            layers += [nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
            width //= 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def reference_plain(channels: int, classes: int, norm: str, recipe: str, features: int, extra: int = 0):
    """``recipe``: widths with kernels, M a max pooling; the first convolution has ``extra`` padding."""
    layers, inputs = [], channels
    for word in recipe.split():
        if word == "M":
            layers.append(nn.MaxPool2d(2))
            continue
        width, kernel = map(int, word.split("/"))
        padding = kernel // 2 + (extra if not layers else 0)
        layers += [nn.Conv2d(inputs, width, kernel, padding=padding), norm_of(norm, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, classes))


ALEXNET = "128/5 M 192/5 M 256/3 192/3 192/3 M"
VGG11 = "64/3 M 128/3 M 256/3 256/3 M 512/3 512/3 M 512/3 512/3 M"


def reference(name: str, shape: tuple[int, int, int], norm: str) -> nn.Module:
    channels, extra = shape[0], 2 if shape[1] == 28 else 0
    if name in ("resnet10", "resnet18", "resnetap10"):
        kernel = 7 if shape[1] > 128 else 3
        stem = [nn.Conv2d(channels, 64, kernel, padding=kernel // 2, bias=False)]
        return reference_resnet(channels, 10, 2 if name == "resnet18" else 1, norm, "ap" in name, stem)
    if name == "densenet121":
        return reference_densenet(channels, 10, norm)
    features, recipe = (3072, ALEXNET) if name == "alexnet" else (512, VGG11)
    return reference_plain(channels, 10, norm, recipe, features, extra)


def in_order(net: nn.Module, x: torch.Tensor) -> tuple[list[nn.Module], object]:
    """(the layers that have parameters, in the order they run; what the network returns)."""
    ran: list[nn.Module] = []
    layers = [m for m in net.modules() if list(m.parameters(recurse=False))]
    hooks = [m.register_forward_hook(lambda m, *_: ran.append(m)) for m in layers]
    out = net(x)
    for hook in hooks:
        hook.remove()
    return ran, out


CASES = [(name, (3, 32, 32), norm) for name in NAMES for norm in ("instance", "batch")]
CASES += [("alexnet", (3, 32, 32), "none"), ("resnetap10", (3, 132, 132), "instance")]
CASES += [("alexnet", (1, 28, 28), "instance"), ("vgg11", (1, 28, 28), "instance")]


@pytest.mark.parametrize(("name", "shape", "norm"), CASES)
def test_networks_are_what_they_are_called(name, shape, norm):
    """Equal to a definition from the library's own layers, with its weights copied."""
    net, other = make_net(f"{name}:norm={norm}", shape, 10), reference(name, shape, norm)
    for p in other.parameters():
        p.data.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())), alpha=0.02)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs, expected = in_order(other, x)
        mine, _ = in_order(net, x)
        for layer, model in zip(mine, theirs, strict=True):
            assert dict(layer.named_parameters()).keys() == dict(model.named_parameters()).keys()
            layer.load_state_dict(dict(model.named_parameters()))
        torch.testing.assert_close(net(x).logits, expected, atol=1e-5, rtol=1e-5)
    assert len(mine) == len({id(m) for m in mine})
    assert sum(p.numel() for p in net.parameters()) == sum(p.numel() for p in other.parameters())


def densenet_size(growth: int, classes: int) -> int:
    """Parameters of DenseNet-121 with the small stem, by counting its convolutions, norms and classifier."""
    width = 2 * growth
    total = 27 * width
    for k, count in enumerate((6, 12, 24, 16)):
        for _ in range(count):
            total += 2 * width + width * 4 * growth + 8 * growth + 9 * 4 * growth * growth
            width += growth
        total += 2 * width
        if k < 3:
            total += width * (width // 2)
            width //= 2
    return total + (width + 1) * classes


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        ("resnet18:norm=batch", 11_173_962),  # the number the CIFAR networks are known by
        ("resnet18", 11_173_962),
        ("resnet10", 4_903_242),
        ("resnetap10", 4_903_242),
        ("densenet121", 6_956_298),  # known
        ("densenet121", densenet_size(32, 10)),
        ("densenet121:growth=12", densenet_size(12, 10)),
        ("vgg11:norm=batch", 9_231_114),  # known
        ("alexnet:norm=none", 1_872_202),
    ],
)
def test_parameter_counts(spec, count):
    assert FlatNet(make_net(spec, (3, 32, 32), 10)).size == count


@pytest.mark.parametrize(
    ("spec", "features", "maps"),
    [
        ("resnet10", 512, [(64, 32), (128, 16), (256, 8), (512, 4)]),
        ("resnet18:norm=batch", 512, [(64, 32), (128, 16), (256, 8), (512, 4)]),
        ("resnetap10", 512, [(64, 32), (128, 16), (256, 8), (512, 4)]),
        ("densenet121", 1024, [(256, 32), (512, 16), (1024, 8), (1024, 4)]),
        ("alexnet", 3072, [(128, 32), (192, 16), (192, 8)]),
        ("vgg11", 512, [(64, 32), (128, 16), (256, 8), (512, 4), (512, 2)]),
    ],
)
def test_shapes_of_what_is_seen(spec, features, maps):
    net = FlatNet(make_net(spec, (1, 32, 32), 7))
    seen = net(net.fresh(0, Purpose.ENCODER, ZERO, torch.arange(2)), torch.rand(2, 3, 1, 32, 32), maps=True)
    assert seen.features.shape == (2, 3, features) and seen.logits.shape == (2, 3, 7)
    assert [tuple(m.shape) for m in seen.maps] == [(2, 3, c, side, side) for c, side in maps]
    assert all((m >= 0).all() and (m > 0).any() for m in seen.maps)  # activations


SIZES = [(spec, side) for spec in SMALL for side in (16, 17, 28, 33, 65, 129)]
SIZES += [("alexnet", 8), ("alexnet", 16), ("alexnet", 33), ("vgg11", 32), ("vgg11", 65)]


@pytest.mark.parametrize(("spec", "side"), SIZES)
def test_any_image_from_16_pixels_up(spec, side):
    """Of any proportions; AlexNet from 8 pixels, VGG-11, which halves five times, from 32."""
    with torch.no_grad():
        seen = make_net(spec, (1, side, side + 3), 7)(torch.rand(2, 1, side, side + 3))
    assert seen.logits.shape == (2, 7) and torch.isfinite(seen.logits).all()
    assert not torch.equal(seen.logits[0], seen.logits[1])  # the image still matters at the end


def test_the_stem_of_resnetap_depends_on_the_image():
    for side, kernel, last in ((64, 3, 8), (65, 3, 4), (128, 3, 8), (129, 7, 4), (224, 7, 7)):
        net = make_net("resnetap10:width=2", (3, side, side), 5)
        assert net.stem[0].kernel_size == (kernel, kernel)
        assert net(torch.rand(1, 3, side, side)).maps[-1].shape == (1, 16, last, last)
        assert {m.stride for m in net.modules() if isinstance(m, Conv)} == {(1, 1)}


@pytest.mark.parametrize("norm", ["instance", "batch"])
@pytest.mark.parametrize("spec", SMALL)
def test_stacked_equals_single(spec, norm):
    modules = [make_net(f"{spec},norm={norm}", (3, 16, 16), 4) for _ in range(3)]
    x = torch.rand(3, 5, 3, 16, 16)
    flat = torch.stack([torch.cat([p.detach().flatten() for p in m.parameters()]) for m in modules])
    seen = FlatNet(make_net(f"{spec},norm={norm}", (3, 16, 16), 4))(flat, x, maps=True)
    for r, module in enumerate(modules):
        own = module(x[r])
        torch.testing.assert_close((seen.features[r], seen.logits[r]), (own.features, own.logits))
        torch.testing.assert_close([m[r] for m in seen.maps], list(own.maps))


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28)])
@pytest.mark.parametrize(
    "spec", [*SMALL, "resnet10:width=4,norm=batch", "densenet121:growth=2,norm=batch", "alexnet", "vgg11"]
)
def test_networks_side_by_side_equal_one_by_one(spec, shape):
    """In float64, strides, shortcuts and odd paddings included: what is seen, and gradients of weights and images."""
    net = FlatNet(make_net(spec, shape, 4))
    flat = net.fresh(0, Purpose.ENCODER, ZERO, torch.arange(3)).double().requires_grad_()
    x = torch.rand(3, 2, *shape, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(3, 2, 4, dtype=torch.float64)
    found = []
    for way in (net.net.stacked, net.net.side_by_side):
        seen = way(net.unflatten(flat), x, torch.float64)
        found.append((seen.features, seen.logits, *torch.autograd.grad((seen.logits * direction).sum(), (flat, x))))
    for plain, ours in zip(*found, strict=True):
        assert plain.shape == ours.shape and (plain - ours).norm() < 1e-11 * plain.norm()


@pytest.mark.parametrize("spec", [*SMALL, "resnet10:width=4,norm=batch", "alexnet", "alexnet:norm=none", "vgg11"])
def test_half_precision_is_finite_and_close(spec):
    net = FlatNet(make_net(spec, (3, 32, 32), 4))
    flat, x = net.fresh(0, Purpose.ENCODER, ZERO, torch.arange(1)), torch.rand(1, 6, 3, 32, 32)
    with torch.no_grad():
        exact, rough = net(flat, x, maps=True), net(flat, x, torch.bfloat16, maps=True)
    pairs = [(exact.features, rough.features), (exact.logits, rough.logits)]
    for a, b in [*zip(exact.maps, rough.maps, strict=True), *pairs]:
        assert b.dtype == torch.float32 and torch.isfinite(b).all()
        assert (a - b).norm() < 0.25 * a.norm()  # rounding adds up over DenseNet's 121 layers
    assert all((a - b).norm() < 0.1 * a.norm() for a, b in pairs)


@pytest.mark.parametrize("spec", ["resnet10:width=4", "resnetap10:width=4,norm=batch", "densenet121:growth=2"])
def test_gradients_reach_the_flat_vector_and_the_images(spec):
    net = FlatNet(make_net(spec, (3, 16, 16), 3))
    flat = net.fresh(0, Purpose.ENCODER, ZERO, torch.arange(2)).double().requires_grad_()
    x = torch.rand(2, 2, 3, 16, 16, dtype=torch.float64, requires_grad=True)
    net(flat, x, torch.float64).logits.square().sum().backward()
    assert (flat.grad != 0).float().mean() > 0.7 and (x.grad != 0).all()
    for name, part in net.unflatten(flat.grad).items():
        assert part.abs().amax(tuple(range(1, part.ndim))).gt(0).all(), name


@pytest.mark.parametrize("name", NAMES)
def test_fresh_weights_follow_the_law(name):
    recipe = make_net(name, (3, 32, 32), 10)
    he = {f"{m}.weight" for m, module in recipe.named_modules() if isinstance(module, HeConv)}
    assert bool(he) == (name == "resnetap10")
    net = FlatNet(recipe)
    rows = net.fresh(0, Purpose.ENCODER, ZERO, torch.arange(2))
    assert torch.equal(rows, net.fresh(0, Purpose.ENCODER, ZERO, torch.arange(2)))
    assert not torch.equal(rows[0], rows[1])
    theirs = dict(make_net(name, (3, 32, 32), 10).named_parameters())
    for part, value in net.unflatten(rows).items():
        model = theirs[part].detach()
        weight = theirs[part.replace("bias", "weight")]
        if weight.ndim == 1:  # a norm's
            assert torch.equal(value[0], model)
        elif part in he:
            deviation = math.sqrt(2 / (weight.shape[0] * weight[0, 0].numel()))
            assert abs(value.std() / deviation - 1) < 0.05 and abs(model.std() / deviation - 1) < 0.05
            assert value.abs().max() > 2.5 * deviation and abs(value.mean()) < 0.1 * deviation
        else:
            bound = 1 / math.sqrt(weight[0].numel())
            assert value.abs().max() <= bound
            assert value.numel() < 1000 or abs(value.std() / (bound / math.sqrt(3)) - 1) < 0.05


def test_normal_and_uniform_draws_of_fresh_weights_are_unrelated():
    """He-normal weights come from lanes of their own, and the classifier's uniform ones are those without them."""
    net = FlatNet(make_net("resnetap10:width=16", (3, 32, 32), 10))
    rows = net.fresh(0, Purpose.ENCODER, ZERO, torch.arange(3))
    normal = net.deviation > 0
    deviation, net.deviation, net.spread = net.deviation, None, torch.ones_like(net.spread)
    uniform = net.fresh(0, Purpose.ENCODER, ZERO, torch.arange(3))
    table = torch.cat([(rows / deviation)[:, normal], uniform[:, normal]])
    assert (torch.corrcoef(table) - torch.eye(6)).abs().max() < 0.02
    assert all(torch.equal(rows[k : k + 1], fresh_lane(k)) for k in range(3))


def fresh_lane(k: int) -> torch.Tensor:
    """A lane does not depend on those drawn with it."""
    return FlatNet(make_net("resnetap10:width=16", (3, 32, 32), 10)).fresh(
        0, Purpose.ENCODER, ZERO, torch.arange(k, k + 1)
    )


def test_batch_norm_is_of_the_whole_batch():
    """By the given batch alone, and never by parts of it; instance norm sees each image alone."""
    x = torch.randn(64, 5, 4, 4) * 3 + 2
    torch.testing.assert_close(norm_layer("batch", 5)(x), nn.BatchNorm2d(5)(x))
    assert not list(BatchNorm(5).buffers())
    images = torch.rand(1, 40, 3, 64, 64)  # more than FlatNet runs at once on a CPU
    for norm, mixes in (("instance", False), ("batch", True)):
        net = FlatNet(make_net(f"resnet10:width=2,norm={norm}", (3, 64, 64), 3))
        flat = net.fresh(0, Purpose.ENCODER, ZERO, torch.arange(1))
        assert net.mixes_images == mixes
        with torch.no_grad():
            whole, part = net(flat, images).logits, net(flat, images[:, :8]).logits
            torch.testing.assert_close(whole, net.net.stacked(net.unflatten(flat), images, torch.float32).logits)
        assert torch.allclose(whole[:, :8], part, atol=1e-5) != mixes


def test_bad_requests_say_what_is_allowed():
    for name in ("resnet10", "resnet18", "resnetap10", "densenet121"):
        with pytest.raises(M3DError, match="15×40 are too small; allowed: at least 16×16"):
            make_net(name, (3, 15, 40), 10)
    with pytest.raises(M3DError, match=r"31×31 are too small; allowed: at least 32×32 \(or 28×28, which is padded\)"):
        make_net("vgg11", (3, 31, 31), 10)
    with pytest.raises(M3DError, match="at least 8×8"):
        make_net("alexnet", (3, 7, 7), 10)
    with pytest.raises(M3DError, match=r"norm='group'.*one of instance, batch"):
        make_net("resnet10:norm=group", (3, 32, 32), 10)
    with pytest.raises(M3DError, match="norm='group' is not valid; allowed: none, instance, batch"):
        norm_layer("group", 3)
    with pytest.raises(M3DError, match="width=0"):
        make_net("resnetap10:width=0", (3, 32, 32), 10)
    with pytest.raises(M3DError, match="growth=0"):
        make_net("densenet121:growth=0", (3, 32, 32), 10)
