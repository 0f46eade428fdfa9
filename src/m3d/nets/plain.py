"""Plain chains of convolutions and max pooling: the small AlexNet and VGG-11 of the DC family."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from m3d.nets.norms import norm_layer
from m3d.nets.single import Classifier, Conv, Grouped, pooled, require_size, wide
from m3d.types import Seen

Stages = tuple[tuple[tuple[int, int], ...], ...]  # stages of (width, kernel) of each convolution

ALEXNET: Stages = (((128, 5),), ((192, 5),), ((256, 3), (192, 3), (192, 3)))
VGG11: Stages = (((64, 3),), ((128, 3),), ((256, 3), (256, 3)), ((512, 3), (512, 3)), ((512, 3), (512, 3)))


class Plain(Grouped):
    """Stages of [convolution → norm → ReLU] × some → 2×2 max pooling, then one linear layer.

    28×28 images are padded to 32×32 by the first convolution, as in the published experiments. Convolutions have a bias
    and start as PyTorch's do by default. Maps are the stages' activations before pooling. The representation is the
    last pooled map: flattened, or its ``mean`` over the image.
    """

    def __init__(
        self, name: str, shape: tuple[int, int, int], classes: int, stages: Stages, norm: str, mean: bool = False
    ):
        super().__init__()
        small = shape[1:] == (28, 28)
        sides = (32, 32) if small else shape[1:]
        least = 2 ** len(stages)
        require_size(name, (shape[0], *sides), least, " (or 28×28, which is padded)" if least > 28 else "")
        inputs, margin, self.mean = shape[0], 2 if small else 0, mean
        self.stages = nn.ModuleList()
        for stage in stages:
            layers: list[nn.Module] = []
            for width, kernel in stage:
                layers += [Conv(inputs, width, kernel, padding=kernel // 2 + margin), norm_layer(norm, width)]
                layers.append(nn.ReLU(inplace=True))
                inputs, margin = width, 0
            self.stages.append(nn.Sequential(*layers))
        area = 1 if mean else (sides[0] >> len(stages)) * (sides[1] >> len(stages))
        self.classifier = Classifier(inputs * area, classes)

    def forward(self, images: Tensor) -> Seen:
        """What this network sees in ``images`` [n, ch, h, w]; convolutions compute in their precision."""
        x, maps = images, []
        for stage in self.stages:
            maps.append(stage(x))
            x = functional.max_pool2d(maps[-1], 2)
        features = pooled(x) if self.mean else wide(x).flatten(1)
        return Seen(tuple(maps), features, cast(Tensor, self.classifier(features)))


def alexnet(shape: tuple[int, int, int], classes: int, norm: str) -> Plain:
    """Five convolutions, three poolings, flattened; published without a norm (``norm="none"``)."""
    return Plain("alexnet", shape, classes, ALEXNET, norm)


def vgg11(shape: tuple[int, int, int], classes: int, norm: str) -> Plain:
    """Configuration A: eight convolutions, five poolings, 512 features at 32×32; above, their mean over the image."""
    return Plain("vgg11", shape, classes, VGG11, norm, mean=True)
