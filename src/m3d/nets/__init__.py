"""Networks by name. Each maps images [n, ch, h, w] to :class:`m3d.types.Seen`: block maps, representation, logits."""

from __future__ import annotations

from m3d.nets.convnet import ConvNet, NormName
from m3d.nets.flat import FlatNet, Stackable
from m3d.registry import Registry, parse_spec

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


def make_net(spec: str, shape: Shape, classes: int) -> Stackable:
    """The network that ``spec`` names, e.g. ``convnet3`` or ``convnet3:width=64``, for images of ``shape``."""
    name, options = parse_spec(spec)
    entry = NETS.get(name)
    return entry.build(shape, classes, **entry.resolve(options))


__all__ = ["NETS", "ConvNet", "FlatNet", "Stackable", "make_net"]
