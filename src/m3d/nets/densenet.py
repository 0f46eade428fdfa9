"""DenseNet for small images: every layer reads all earlier ones of its block."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from m3d.errors import M3DError
from m3d.nets.norms import norm_layer
from m3d.nets.single import Classifier, Conv, Grouped, beside, pooled, require_size
from m3d.types import Seen


class Layer(nn.Module):
    """Appends ``growth`` maps: norm → ReLU → 1×1 convolution to 4 · growth → norm → ReLU → 3×3 convolution."""

    def __init__(self, inputs: int, growth: int, norm: str):
        super().__init__()
        self.inputs = inputs
        self.norms = nn.ModuleList([norm_layer(norm, inputs), norm_layer(norm, 4 * growth)])
        self.convs = nn.ModuleList(
            [Conv(inputs, 4 * growth, 1, bias=False), Conv(4 * growth, growth, 3, padding=1, bias=False)]
        )

    def forward(self, x: Tensor) -> Tensor:
        """[n, inputs + growth, h, w] for ``x`` [n, inputs, h, w]."""
        y = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            y = conv(functional.relu(norm(y), inplace=True))
        return beside(x, y, self.inputs)


class DenseNet(Grouped):
    """DenseNet-BC (Huang et al. 2017) with the CIFAR stem: one 3×3 convolution to 2 · growth maps, no pooling.

    Four dense blocks; after each of the first three a transition: norm → ReLU → 1×1 convolution to half as many maps →
    2×2 average; after the last norm → ReLU → mean → linear. Convolutions have no bias and start as PyTorch's do by
    default. Maps are the blocks' outputs after norm and ReLU.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, layers: tuple[int, ...], growth: int, norm: str):
        super().__init__()
        require_size("densenet", shape, 16)
        if growth < 1:
            raise M3DError(f"densenet: growth={growth} is not valid; allowed: 1 and more")
        width = 2 * growth
        self.stem = Conv(shape[0], width, 3, padding=1, bias=False)
        self.blocks, self.norms, self.transitions = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for k, count in enumerate(layers):
            self.blocks.append(nn.Sequential(*(Layer(width + i * growth, growth, norm) for i in range(count))))
            width += count * growth
            self.norms.append(norm_layer(norm, width))
            if k < len(layers) - 1:
                self.transitions.append(nn.Sequential(Conv(width, width // 2, 1, bias=False), nn.AvgPool2d(2)))
                width //= 2
        self.classifier = Classifier(width, classes)

    def forward(self, images: Tensor) -> Seen:
        """What this network sees in ``images`` [n, ch, h, w]; convolutions compute in their precision."""
        x, maps = self.stem(images), []
        for k, (block, norm) in enumerate(zip(self.blocks, self.norms, strict=True)):
            maps.append(functional.relu(norm(block(x)), inplace=True))
            x = self.transitions[k](maps[-1]) if k < len(self.transitions) else maps[-1]
        features = pooled(x)
        return Seen(tuple(maps), features, cast(Tensor, self.classifier(features)))
