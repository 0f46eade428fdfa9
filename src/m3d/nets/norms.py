"""Normalisations without state: they compute in float32 and return the precision they were given."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from m3d.errors import M3DError
from m3d.nets.flat import MixesImages
from m3d.nets.single import wide

BlockNorm = Literal["instance", "batch"]
AnyNorm = Literal["none", "instance", "batch"]


class Affine(nn.Module):
    """Gain and shift of each channel."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))


class InstanceNorm(Affine):
    """Every channel of every image to mean 0 and variance 1, then gain and shift: GroupNorm(C, C)."""

    def forward(self, x: Tensor) -> Tensor:
        """[n, c, h, w] for ``x`` of the same shape."""
        return functional.group_norm(wide(x), x.shape[1], self.weight, self.bias).to(x.dtype)


class BatchNorm(Affine, MixesImages):
    """Every channel of the batch to mean 0 and variance 1, then gain and shift: batch norm as it is during training.

    There are no running statistics. To test a network, its training images are put before the test images and
    ``reference`` says how many they are: all images are then normalised by the statistics of those first ones (see
    ``FlatNet.calibrated``), so that what is said of a test image does not depend on the images tested with it.
    """

    eps = 1e-5  # added to the variance

    def forward(self, x: Tensor) -> Tensor:
        """[n, c, h, w] for ``x`` of the same shape."""
        return batch_norm(x, self.weight, self.bias, self.reference, self.eps)


def batch_norm(x: Tensor, gain: Tensor, shift: Tensor, reference: int = 0, eps: float = 1e-5) -> Tensor:
    """[n, c, h, w]: ``x`` by the mean and variance of its first ``reference`` images (0: all), gain and shift [c].

    The library computes in float32 between rounded maps by itself.
    """
    if not reference:
        return functional.batch_norm(x, None, None, gain, shift, training=True, eps=eps)
    var, mean = torch.var_mean(wide(x[:reference]), dim=(0, 2, 3), correction=0)
    return functional.batch_norm(x, mean, var, gain, shift, eps=eps)


def norm_layer(norm: str, channels: int) -> nn.Module:
    """The normalisation called ``norm`` for ``channels`` channels."""
    kinds: dict[str, type[Affine]] = {"instance": InstanceNorm, "batch": BatchNorm}
    if norm == "none":
        return nn.Identity()
    if norm not in kinds:
        raise M3DError(f"norm={norm!r} is not valid; allowed: none, instance, batch")
    return kinds[norm](channels)
