"""Networks by name. Each maps images [n, ch, h, w] to :class:`m3d.types.Seen`: block maps, representation, logits."""

from __future__ import annotations

from typing import Any

from m3d.nets.convnet import ConvNet, NormName
from m3d.nets.densenet import DenseNet
from m3d.nets.flat import FlatNet, Stackable
from m3d.nets.norms import AnyNorm, BlockNorm
from m3d.nets.outside import timm_net
from m3d.nets.plain import alexnet, vgg11
from m3d.nets.resnet import resnet, resnet_ap
from m3d.registry import Entry, Registry, canonical, parse_spec

NETS: Registry[Stackable] = Registry("network")

Shape = tuple[int, int, int]


@NETS.register("convnet")
def convnet(shape: Shape, classes: int, *, depth: int = 3, width: int = 128, norm: NormName = "instance") -> Stackable:
    """ConvNet of any depth and width; ``convnet:depth=4,width=64``."""
    return ConvNet(shape, classes, depth, width, norm)


def _convnet_of(depth: int) -> None:
    def build(shape: Shape, classes: int, *, width: int = 128, norm: NormName = "instance") -> Stackable:
        return ConvNet(shape, classes, depth, width, norm)

    build.__doc__ = f"ConvNet of depth {depth}" + (
        ", the paper's network for low-resolution images." if depth == 3 else "."
    )
    NETS.register(f"convnet{depth}")(build)


for _depth in range(1, 7):
    _convnet_of(_depth)


@NETS.register("resnet10")
def _resnet10(shape: Shape, classes: int, *, width: int = 64, norm: BlockNorm = "instance") -> Stackable:
    """ResNet-10 for small images; the published cross-architecture tests use ``width=32,norm=batch``."""
    return resnet(shape, classes, 1, width, norm)


@NETS.register("resnet18")
def _resnet18(shape: Shape, classes: int, *, width: int = 64, norm: BlockNorm = "instance") -> Stackable:
    """ResNet-18 for small images."""
    return resnet(shape, classes, 2, width, norm)


@NETS.register("resnetap10")
def _resnetap10(shape: Shape, classes: int, *, width: int = 64, norm: BlockNorm = "instance") -> Stackable:
    """ResNetAP-10, the paper's network for ImageNet: average pooling instead of strides, He-normal weights."""
    return resnet_ap(shape, classes, 1, width, norm)


@NETS.register("densenet121")
def _densenet121(shape: Shape, classes: int, *, growth: int = 32, norm: BlockNorm = "instance") -> Stackable:
    """DenseNet-121 for small images; the published cross-architecture tests use ``growth=12,norm=batch``."""
    return DenseNet(shape, classes, (6, 12, 24, 16), growth, norm)


@NETS.register("alexnet")
def _alexnet(shape: Shape, classes: int, *, norm: AnyNorm = "none") -> Stackable:
    """The DC family's small AlexNet, as published without a norm."""
    return alexnet(shape, classes, norm)


@NETS.register("vgg11")
def _vgg11(shape: Shape, classes: int, *, norm: BlockNorm = "instance") -> Stackable:
    """The DC family's VGG-11."""
    return vgg11(shape, classes, norm)


@NETS.register("timm")
def _timm(shape: Shape, classes: int, *, name: str = "resnet18") -> Stackable:
    """Any convolutional network of the library timm by its name there: ``timm:resnet18``; started as PyTorch does."""
    return timm_net(shape, classes, name)


def check_net(spec: str) -> tuple[Entry[Stackable], dict[str, Any]]:
    """The network that ``spec`` names, and its options; whether it takes images of some shape, building it shows."""
    name, colon, rest = spec.partition(":")
    if canonical(name) == "timm" and colon and "=" not in rest:
        spec = f"{name}:name={rest}"
    name, options = parse_spec(spec)
    entry = NETS.get(name)
    return entry, entry.resolve(options)


def make_net(spec: str, shape: Shape, classes: int) -> Stackable:
    """The network that ``spec`` names, e.g. ``convnet3`` or ``convnet3:width=64``, for images of ``shape``.

    ``timm:NAME`` is short for ``timm:name=NAME``.
    """
    entry, resolved = check_net(spec)
    net = entry.build(shape, classes, **resolved)
    net.spec = f"{entry.name}:{','.join(f'{k}={v}' for k, v in sorted(resolved.items()))}"
    return net


__all__ = ["NETS", "ConvNet", "FlatNet", "Stackable", "check_net", "make_net"]
