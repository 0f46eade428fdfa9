"""The paper's first figure, without training: two samples that differ in one moment, and what kernels see of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from m3d import rng
from m3d.kernels import make_kernel

POINTS = 1000
_DIVISIONS = 100
_SEED = 2024
_KERNELS = {"linear": "linear", "polynomial": "polynomial", "gaussian": "gaussian"}
_BINS = 32
_RANGE = (-4.0, 4.0)


def sample(kind: str) -> tuple[Tensor, Tensor]:
    """(original, synthetic) points, [POINTS] each: standard normal beside what ``kind`` says.

    Other mean: N(½, 1). Other variance: N(0, ½²). Other skewness: a gamma distribution of shape 1 (an exponential)
    moved and scaled to mean 0 and variance 1. Aligned: another sample of N(0, 1).
    """
    lanes, step = torch.arange(3), torch.zeros(1, dtype=torch.long)
    first, second, third = rng.normal(_SEED, rng.Purpose.INIT, step, lanes, POINTS)[0]
    original = _standardised(first)
    other = _standardised(second)
    if kind == "mean":
        return original, other + 0.5
    if kind == "variance":
        return original, other * 0.5
    if kind == "skewness":  # half the square of two normal numbers is exponential
        return original, _standardised((second.square() + third.square()) / 2)
    return original, other


def _standardised(x: Tensor) -> Tensor:
    """Mean 0 and variance 1 exactly, so that what differs is what is said to differ."""
    return (x - x.mean()) / x.std(correction=0)


def seen(original: Tensor, synthetic: Tensor, kernel: str) -> tuple[float, float]:
    """(MMD², the 95 % quantile of MMD² between random halves of all points): above it a kernel tells them apart."""
    chosen = make_kernel(kernel)
    both = torch.cat([original, synthetic]).double()[:, None]  # [2n, 1]
    n = len(original)
    value = float(chosen.mmd2(both[:n], both[n:]))
    steps = torch.arange(_DIVISIONS)
    orders = rng.permutation(_SEED, rng.Purpose.SPLIT, steps, torch.zeros(1, dtype=torch.long), 2 * n)[:, 0]
    scale = chosen.scale(both[:n], both[n:])
    gram = chosen(both, both, scale)  # [2n, 2n]: every division is another sign pattern of the same matrix
    signs = torch.where(orders < n, 1.0, -1.0).double() / n  # [divisions, 2n]
    chance = ((signs @ gram) * signs).sum(1)
    return value, float(torch.quantile(chance, 0.95))


def compare(kind: str) -> dict[str, Any]:
    """The record of one pair of distributions."""
    original, synthetic = sample(kind)
    values = {name: seen(original, synthetic, spec) for name, spec in _KERNELS.items()}
    histograms = [
        torch.histc(x, _BINS, *_RANGE) * (_BINS / (_RANGE[1] - _RANGE[0]) / POINTS) for x in (original, synthetic)
    ]
    return {
        "kind": kind,
        "points": POINTS,
        "range": _RANGE,
        "original": [round(v, 4) for v in histograms[0].tolist()],
        "synthetic": [round(v, 4) for v in histograms[1].tolist()],
        "mmd2": {name: value for name, (value, _) in values.items()},
        "chance": {name: limit for name, (_, limit) in values.items()},
        "seen": {name: round(max(value, 0.0) / limit, 4) for name, (value, limit) in values.items()},
    }
