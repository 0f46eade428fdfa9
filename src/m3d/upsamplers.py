"""How a small image is enlarged: a matrix for its rows and one for its columns.

As matrix products, resizing is deterministic in both directions; the library's interpolation adds its gradients
atomically on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Upsample = Literal["bilinear", "bicubic", "cosine"]


def bilinear_matrix(target: int, source: int, device: torch.device | str = "cpu") -> Tensor:
    """[target, source]: bilinear resizing of one axis (half-pixel centres, edges repeated)."""
    place = (torch.arange(target, device=device, dtype=torch.float64) + 0.5) * source / target - 0.5
    distance = place.clamp(0, source - 1)[:, None] - torch.arange(source, device=device)
    return (1 - distance.abs()).clamp(min=0).float()


def bicubic_matrix(target: int, source: int, device: torch.device | str = "cpu") -> Tensor:
    """[target, source]: bicubic resizing of one axis (Keys' kernel, a = −¾; half-pixel centres, edges repeated)."""
    place = (torch.arange(target, dtype=torch.float64) + 0.5) * source / target - 0.5
    tap = torch.floor(place)[:, None] + torch.arange(-1, 3)  # [target, 4]
    d, a = (place[:, None] - tap).abs(), -0.75
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    matrix = torch.zeros(target, source, dtype=torch.float64)
    matrix.scatter_add_(1, tap.long().clamp(0, source - 1), torch.where(d <= 1, near, far))
    return matrix.float().to(device)


def cosine_matrix(target: int, source: int, device: torch.device | str = "cpu") -> Tensor:
    """[target, source], source ≤ target: resizing of one axis by its type-II cosine transform, higher frequencies zero.

    Its columns are orthogonal, so that enlarging weakens no pattern of a cell; and what it can show, all images without
    high frequencies, leaves hardly more of real images out than their principal components do (LAB.md).
    """
    numbers = torch.arange(source, dtype=torch.float64)
    large, small = (
        torch.cos(torch.pi * (torch.arange(n, dtype=torch.float64)[:, None] + 0.5) * numbers / n)  # [n, source]
        for n in (target, source)
    )
    weights = torch.where(numbers == 0, 1.0, 2.0) / source
    return ((large * weights) @ small.mT).float().to(device)


UPSAMPLERS: dict[str, Callable[[int, int, torch.device | str], Tensor]] = {
    "bilinear": bilinear_matrix,
    "bicubic": bicubic_matrix,
    "cosine": cosine_matrix,
}
