"""What synthetic images must satisfy by themselves, beside matching real ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from m3d.errors import M3DError
from m3d.nets.flat import FlatNet
from m3d.types import Batch, Eyes


class Guide(Protocol):
    """A loss of synthetic images alone, class by class: [C]."""

    def __call__(self, net: FlatNet, eyes: Eyes, batch: Batch, dtype: torch.dtype) -> Tensor: ...


@dataclass(frozen=True)
class CrossEntropy:
    """weight · trust · the mean cross-entropy of a class's images under the judging network ("calibration").

    The judge is the pool's trained network where it has one beside the encoder, and the encoder itself otherwise.
    """

    weight: float

    def __post_init__(self) -> None:
        if not 0 <= self.weight < float("inf"):
            raise M3DError(f"the weight {self.weight} of the cross-entropy is not valid; allowed: 0 and more")

    def __call__(self, net: FlatNet, eyes: Eyes, batch: Batch, dtype: torch.dtype) -> Tensor:
        """[C]."""
        judge = eyes.flat if eyes.trained is None else eyes.trained
        logits = net(judge[None], batch.images.flatten(0, 1)[None], dtype).logits[0]
        each = functional.cross_entropy(logits, batch.labels.flatten(), reduction="none")
        loss = self.weight * each.view(batch.labels.shape).mean(1)
        return loss if eyes.trust is None else loss * eyes.trust
