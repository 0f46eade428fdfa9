"""DSDM's terms beside the mean: covariances of features, and where a class's mean was before."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from m3d.errors import M3DError
from m3d.objectives.base import Objective
from m3d.types import Seen


class Covariance(Objective[Seen]):
    """‖Cov(real) − Cov(synthetic)‖_F² / d of features [n, d], each covariance divided by n − 1 (by 1 of one image).

    With A and B the centred features the squared norm is ‖AAᵀ‖² − 2‖ABᵀ‖² + ‖BBᵀ‖², each over its divisors: matrices of
    n × n numbers instead of d × d.
    """

    def forward(self, goal: Seen, seen: Seen) -> Tensor:
        """[C]."""
        a, b = (_centred(s.features.float()) for s in (goal, seen))
        parts = [(a @ a.mT).square(), -2 * (a @ b.mT).square(), (b @ b.mT).square()]
        squared: Tensor = torch.stack([part.sum((-2, -1)) for part in parts]).sum(0)
        return squared / a.shape[-1]


def _centred(x: Tensor) -> Tensor:
    """(x − mean) / √(n − 1) of [..., n, d]: its Gram matrices are those of a covariance."""
    centred: Tensor = (x - x.mean(-2, keepdim=True)) / max(1, x.shape[-2] - 1) ** 0.5
    return centred


class History(Objective[Seen]):
    """‖mean(synthetic) − past‖² / d from step ``after`` on: a class's mean shall stay near where it was.

    ``past`` is the running mean of the class's means in the steps before: each step leaves ``keep`` of it. It has a row
    for every class, so all classes must be seen together, in the order of their labels. Real images have no part in it:
    on equal readings it is zero only where a class has stood still.
    """

    remembers = True
    past: Tensor  # [C, d]
    latest: Tensor  # [C, d]: the means of the step before
    counts: Tensor  # []: 1 from step ``after`` on, 0 before

    def __init__(self, classes: int, keep: float, after: int):
        super().__init__()
        if not 0 <= keep < 1:
            raise M3DError(f"history_keep={keep} is not valid; allowed: from 0 to less than 1")
        if after < 1:
            raise M3DError(f"history_after={after} is not valid; allowed: 1 and more (before there is no past)")
        self.classes, self.keep, self.after = classes, keep, after

    def start(self, seed: int, sample: Callable[[], Seen]) -> None:
        features = sample().features
        for name in ("past", "latest"):
            self.register_buffer(name, features.new_zeros(self.classes, features.shape[-1], dtype=torch.float32))
        self.register_buffer("counts", torch.zeros((), device=features.device))

    @torch.no_grad()
    def draw(self, step: Tensor) -> None:
        """Take the means of the step before into the past, which begins with those of the first step."""
        share = torch.where(step[0] == 1, 1.0, 1 - self.keep)
        self.past.lerp_(self.latest, share)
        self.counts.copy_(step[0] >= self.after)

    def forward(self, goal: Seen, seen: Seen) -> Tensor:
        """[C]."""
        mean = seen.features.float().mean(-2)
        self.latest.copy_(mean.detach())
        return self.counts * (mean - self.past).square().sum(-1) / mean.shape[-1]
