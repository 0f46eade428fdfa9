"""The field's ConvNet: blocks of convolution, instance norm, ReLU and average pooling, then one linear layer."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from m3d.errors import M3DError
from m3d.types import Seen


class InstanceNorm(nn.Module):
    """Every channel of every image to mean 0 and variance 1, then an affine map: GroupNorm(C, C) by ``var_mean``.

    Written out because it fuses with its neighbours where GroupNorm does not; statistics are always float32.
    """

    def __init__(self, channels: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        var, mean = torch.var_mean(y, dim=(2, 3), keepdim=True, correction=0)
        gain = torch.rsqrt(var + self.eps) * self.weight[:, None, None]
        return ((y - mean) * gain + self.bias[:, None, None]).to(x.dtype)


class ConvNet(nn.Module):
    """``depth`` × [3×3 convolution → norm → ReLU → 2×2 average pooling] → linear.

    28×28 images are padded to 32×32 by the first convolution (padding 3), as in the published experiments.
    """

    def __init__(
        self, shape: tuple[int, int, int], classes: int, depth: int = 3, width: int = 128, norm: str = "instance"
    ):
        super().__init__()
        channels, height, side = shape
        if depth < 1 or width < 1:
            raise M3DError(f"convnet: depth={depth}, width={width} is not valid; allowed: 1 and more")
        self.first_padding = 3 if (height, side) == (28, 28) else 1
        grown = 2 * (self.first_padding - 1)
        height, side = (height + grown) >> depth, (side + grown) >> depth
        if min(height, side) < 1:
            raise M3DError(
                f"convnet{depth} halves an image {depth} times: {shape[1]}×{shape[2]} is too small; "
                f"allowed: at least {2**depth}×{2**depth}, or a smaller depth"
            )
        widths = [channels] + [width] * depth
        self.convs = nn.ModuleList(
            nn.Conv2d(widths[i], width, 3, padding=self.first_padding if i == 0 else 1) for i in range(depth)
        )
        self.norms = nn.ModuleList(InstanceNorm(width) if norm == "instance" else nn.Identity() for _ in range(depth))
        self.classifier = nn.Linear(width * height * side, classes)

    def forward(self, images: Tensor) -> Seen:
        maps, x = [], images
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = functional.relu(norm(conv(x)))
            maps.append(x)
            x = functional.avg_pool2d(x, 2)
        features = x.flatten(1)
        return Seen(tuple(maps), features, self.classifier(features))


NormName = Literal["instance", "none"]
