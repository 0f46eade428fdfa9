"""Objectives on every layer a network sees images through, and on how its features tell classes apart."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from m3d.errors import M3DError
from m3d.objectives.base import Objective
from m3d.types import Seen


class LayerMeans(Objective[Seen]):
    """Σ_l w_l · ‖mean F_l(real) − mean F_l(synthetic)‖²: the means over a class's images, layer by layer.

    F_l are the maps of all blocks but the last (weight ``early``), the last block's (``last``), and the representation
    (``features``), for networks of any depth.
    """

    def __init__(self, early: float, last: float, features: float):
        super().__init__()
        for name, weight in (("early", early), ("last", last), ("features", features)):
            if not 0 <= weight < float("inf"):
                raise M3DError(f"the weight {name}={weight} of a layer is not valid; allowed: 0 and more")
        self.early, self.last, self.features = early, last, features

    def forward(self, goal: Seen, seen: Seen) -> Tensor:
        """[C]."""
        if not goal.maps:
            raise M3DError("no block maps to compare; allowed: a probe that reads them, Forward(maps=True)")
        weights = [self.early] * (len(goal.maps) - 1) + [self.last, self.features]
        layers = zip((*goal.maps, goal.features), (*seen.maps, seen.features), strict=True)
        parts = [w * _gap(real, own) for w, (real, own) in zip(weights, layers, strict=True)]
        return torch.stack(parts).sum(0)


def _gap(real: Tensor, synthetic: Tensor) -> Tensor:
    """[C]: ‖mean real − mean synthetic‖² of [C, m, ...] and [C, n, ...]."""
    return (real.mean(1) - synthetic.mean(1)).flatten(1).square().sum(1)


class Discriminate(Objective[Seen]):
    """Σ over a class's real images of −log softmax_k(⟨f(real), mean f(synthetic of class k)⟩) at its own class.

    The class means of the synthetic features serve as a linear classifier of the real ones, so all classes must be seen
    together, in the order of their labels.
    """

    across_classes = True

    def forward(self, goal: Seen, seen: Seen) -> Tensor:
        """[C]."""
        logits = goal.features @ seen.features.mean(1).mT  # [C, m, C]
        own = torch.arange(len(logits), device=logits.device)[:, None].expand(logits.shape[:2])
        return functional.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="none").view(own.shape).sum(1)
