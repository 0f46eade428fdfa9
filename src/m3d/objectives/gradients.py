"""Objectives on gradients: how differently two sets of images would move a network."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from m3d.errors import M3DError
from m3d.objectives.base import Objective
from m3d.types import Grads


class CosineRows(Objective[Grads]):
    """Σ over weights, Σ over rows of 1 − cos(real row, synthetic row): DC's distance; a row belongs to one output."""

    def forward(self, goal: Grads, seen: Grads) -> Tensor:
        """[C]."""
        parts = [
            (1 - functional.cosine_similarity(a, b, dim=-1, eps=1e-6)).sum(-1)
            for a, b in zip(goal.weights, seen.weights, strict=True)
        ]
        return torch.stack(parts).sum(0)


class PowerDistance(Objective[Grads]):
    """Σ over weights and their entries of |real − synthetic|^power: IDC's distance, power 2 or 1."""

    def __init__(self, power: int = 2):
        super().__init__()
        if power not in (1, 2):
            raise M3DError(f"power={power} is not valid; allowed: 1, 2")
        self.power = power

    def forward(self, goal: Grads, seen: Grads) -> Tensor:
        """[C]."""
        parts = [(a - b).abs().pow(self.power).sum((-2, -1)) for a, b in zip(goal.weights, seen.weights, strict=True)]
        return torch.stack(parts).sum(0)
