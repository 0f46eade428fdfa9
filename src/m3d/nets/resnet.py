"""Residual networks: ResNet for small images, and ResNetAP, which halves by average pooling instead of strides."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from m3d.errors import M3DError
from m3d.nets.norms import norm_layer
from m3d.nets.single import Classifier, Conv, Grouped, HeConv, pooled, require_size
from m3d.types import Seen


class Block(nn.Module):
    """The basic block ReLU(F(x) + x), F two 3×3 convolutions; it halves the image by a stride or by pooling.

    Pooled: convolution → norm → ReLU → 2×2 average → convolution → norm, and 1×1 convolution → 2×2 average → norm on
    the shortcut. Strided: the first convolution and the shortcut's have stride 2. A block that changes neither size nor
    width adds x itself. Convolutions have no bias: a norm follows each.
    """

    def __init__(self, inputs: int, outputs: int, halve: bool, pool: bool, norm: str):
        super().__init__()
        kind, stride = HeConv if pool else Conv, 2 if halve and not pool else 1
        self.pool = nn.AvgPool2d(2) if halve and pool else nn.Identity()
        self.convs = nn.ModuleList(
            [
                kind(inputs, outputs, 3, stride, padding=1, bias=False),
                kind(outputs, outputs, 3, padding=1, bias=False),
            ]
        )
        self.norms = nn.ModuleList(norm_layer(norm, outputs) for _ in range(2))
        self.shortcut = nn.ModuleList()
        if halve or inputs != outputs:
            self.shortcut = nn.ModuleList(
                [kind(inputs, outputs, 1, stride, bias=False), self.pool, norm_layer(norm, outputs)]
            )

    def forward(self, x: Tensor) -> Tensor:
        """[n, outputs, h', w'] for ``x`` [n, inputs, h, w]."""
        y = functional.relu(self.norms[0](self.convs[0](x)), inplace=True)
        y = self.norms[1](self.convs[1](self.pool(y)))
        for layer in self.shortcut:
            x = layer(x)
        return functional.relu(y + x, inplace=True)


class Residual(Grouped):
    """Stem → four stages of ``blocks`` basic blocks, width × 1, 2, 4, 8, the last three halving → mean → linear.

    Maps are the outputs of the stages; the representation is the mean of the last, 8 × ``width`` numbers.
    """

    def __init__(self, stem: list[nn.Module], classes: int, blocks: int, width: int, pool: bool, norm: str):
        super().__init__()
        self.stem = nn.Sequential(*stem)
        self.stages = nn.ModuleList()
        inputs = width
        for k in range(4):
            outputs = width << k
            first = Block(inputs, outputs, k > 0, pool, norm)
            later = [Block(outputs, outputs, False, pool, norm) for _ in range(blocks - 1)]
            self.stages.append(nn.Sequential(first, *later))
            inputs = outputs
        self.classifier = Classifier(inputs, classes)

    def forward(self, images: Tensor) -> Seen:
        """What this network sees in ``images`` [n, ch, h, w]; convolutions compute in their precision."""
        x, maps = self.stem(images), []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        features = pooled(x)
        return Seen(tuple(maps), features, cast(Tensor, self.classifier(features)))


def resnet(shape: tuple[int, int, int], classes: int, blocks: int, width: int, norm: str) -> Residual:
    """ResNet for small images (He et al. 2016; the CIFAR stem: one 3×3 convolution, no pooling), halving by strides.

    Initialised as PyTorch does by default, as in the DC family's code.
    """
    _check("resnet", shape, width)
    stem = [Conv(shape[0], width, 3, padding=1, bias=False), norm_layer(norm, width), nn.ReLU(inplace=True)]
    return Residual(stem, classes, blocks, width, False, norm)


def resnet_ap(shape: tuple[int, int, int], classes: int, blocks: int, width: int, norm: str) -> Residual:
    """ResNetAP (IDC, Kim et al. 2022): no stride anywhere, average pooling instead, He-normal convolutions.

    The stem depends on the smaller side of the image: up to 64 pixels a 3×3 convolution, up to 128 the same and
    2×2 pooling, above a 7×7 convolution and 4×4 pooling.
    """
    _check("resnetap", shape, width)
    side = min(shape[1:])
    kernel, window = (3, 1) if side <= 64 else (3, 2) if side <= 128 else (7, 4)
    stem = [HeConv(shape[0], width, kernel, padding=kernel // 2, bias=False), norm_layer(norm, width)]
    stem += [nn.ReLU(inplace=True), nn.AvgPool2d(window) if window > 1 else nn.Identity()]
    return Residual(stem, classes, blocks, width, True, norm)


def _check(name: str, shape: tuple[int, int, int], width: int) -> None:
    require_size(name, shape, 16)
    if width < 1:
        raise M3DError(f"{name}: width={width} is not valid; allowed: 1 and more")
