"""Augmentation of photographs in training: a random part of the image, colour jitter, and lighting.

It works on pixels in [0, 1], before normalisation, for any number of images at once and without branches: parameters
from uniform numbers first, then one pass. The recipe is that of ImageNet training in IDC's evaluation; a part that
would reach beyond the image is clipped to it, where the public code draws again. Constants stay Python numbers: tensors
made of them inside could not be recorded in a CUDA graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from m3d.errors import M3DError

UNIFORMS = 11  # how many uniform numbers describe what is done to one image
_RATIO = (3 / 4, 4 / 3)  # of a part's sides
_GREY = (0.299, 0.587, 0.114)
# Principal components of the colours of ImageNet (Krizhevsky et al., 2012): deviations, and directions in columns.
_COLOUR_DEVIATIONS = (0.2175, 0.0188, 0.0045)
_COLOUR_DIRECTIONS = ((-0.5675, 0.7192, 0.4009), (-0.5808, -0.0045, -0.8140), (-0.5836, -0.6948, 0.4203))


@dataclass(frozen=True)
class Photo:
    """A part of at least ``least`` of the area, brightness, contrast and saturation × U(1 − jitter, 1 + jitter) in
    random order, and ``lighting`` · N(0, 1) along each principal colour."""

    least: float = 0.5
    jitter: float = 0.4
    lighting: float = 0.1

    def __post_init__(self) -> None:
        if not (0 < self.least <= 1 and 0 <= self.jitter < 1 and self.lighting >= 0):
            raise M3DError(f"{self} is not valid; allowed: 0 < least ≤ 1, 0 ≤ jitter < 1, lighting ≥ 0")

    def __call__(self, pixels: Tensor, u: Tensor) -> Tensor:
        """``pixels`` [N, 3, h, w] in [0, 1], each changed by its own ``u`` [N, UNIFORMS]."""
        if pixels.shape[1] != 3:
            raise M3DError(f"this augmentation is for photographs; the images have {pixels.shape[1]} channel(s), not 3")
        return self._light(self._jitter(self._part(pixels, u[:, :4]), u[:, 4:8]), u[:, 8:11])

    def _part(self, pixels: Tensor, u: Tensor) -> Tensor:
        """A random part of each image, brought to full size: U(least, 1) of the area, sides between 3 : 4 and 4 : 3."""
        h, w = pixels.shape[-2:]
        area = (self.least + (1 - self.least) * u[:, 0]) * (h * w)
        low, high = math.log(_RATIO[0]), math.log(_RATIO[1])
        ratio = torch.exp(low + (high - low) * u[:, 1])
        height = torch.round(torch.sqrt(area / ratio)).clamp(1, h)
        width = torch.round(torch.sqrt(area * ratio)).clamp(1, w)
        top, left = torch.floor(u[:, 2] * (h - height + 1)), torch.floor(u[:, 3] * (w - width + 1))
        row = _places(h, top, height)[:, :, None].expand(-1, h, w)
        column = _places(w, left, width)[:, None, :].expand(-1, h, w)
        grid = torch.stack([column, row], dim=-1)
        return functional.grid_sample(pixels, grid, padding_mode="border", align_corners=False)

    def _jitter(self, pixels: Tensor, u: Tensor) -> Tensor:
        """Three blends in an order of each image's own: with black, with its mean grey, with itself in grey."""
        share = 1 + self.jitter * (2 * u[:, :3] - 1)  # [N, 3]
        for which in _order(u[:, 3]):  # [N]: 0 brightness, 1 contrast, 2 saturation
            chosen = which[:, None, None, None]
            grey = torch.stack([w * pixels[:, k] for k, w in enumerate(_GREY)]).sum(0)[:, None]  # [N, 1, h, w]
            level = grey.mean((2, 3), keepdim=True)
            other = torch.where(chosen == 0, torch.zeros_like(grey), torch.where(chosen == 1, level, grey))
            amount = share.gather(1, which[:, None])[..., None, None]  # [N, 1, 1, 1]
            pixels = pixels * amount + other * (1 - amount)
        return pixels

    def _light(self, pixels: Tensor, u: Tensor) -> Tensor:
        """One colour added to every pixel of an image: Σ_j lighting · N(0, 1) · deviation_j · direction_j."""
        normal = math.sqrt(2) * torch.erfinv(2 * u.clamp(2.0**-24, 1 - 2.0**-24) - 1) * self.lighting  # [N, 3]
        amounts = [normal[:, j] * deviation for j, deviation in enumerate(_COLOUR_DEVIATIONS)]
        rows = [torch.stack([d * a for d, a in zip(row, amounts, strict=True)]).sum(0) for row in _COLOUR_DIRECTIONS]
        return pixels + torch.stack(rows, dim=1)[:, :, None, None]


def _order(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One of the six orders of 0, 1, 2 for each of ``u`` [N], as three [N]."""
    code = (u * 6).long()
    first = code // 2
    low, high = (first == 0).long(), 2 - (first == 2).long()  # the two that are left
    second = torch.where(code % 2 == 0, low, high)
    return first, second, 3 - first - second


def _places(length: int, first: Tensor, size: Tensor) -> Tensor:
    """[N, length]: where each pixel of a full-size image lies in a part, in units where the image is [−1, 1]."""
    inside = (torch.arange(length, device=first.device) + 0.5) / length  # 0 to 1 along the part
    return (first[:, None] + inside * size[:, None]) * (2 / length) - 1
