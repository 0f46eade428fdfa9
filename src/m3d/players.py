"""Who moves: optimisers as in-place arithmetic on a few tensors, so that a step can be captured and checkpointed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from m3d.errors import M3DError


class LivePlayer(nn.Module):
    """An optimiser during a run. Its buffers are its whole state."""

    def step(self, gradient: Tensor) -> None:
        """Move the target once, in place."""
        raise NotImplementedError


class Player(Protocol):
    """A recipe for an optimiser of one tensor."""

    def start(self, target: Tensor) -> LivePlayer: ...


@dataclass(frozen=True)
class Descent:
    """SGD with momentum: v ← momentum·v + g, x ← x − lr·v."""

    lr: float
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise M3DError(f"lr={self.lr} is not valid; allowed: a positive number")
        if not 0 <= self.momentum < 1:
            raise M3DError(f"momentum={self.momentum} is not valid; allowed: 0 up to, but not including, 1")

    def start(self, target: Tensor) -> LivePlayer:
        return _LiveDescent(self, target)


class _LiveDescent(LivePlayer):
    velocity: Tensor

    def __init__(self, record: Descent, target: Tensor):
        super().__init__()
        self.record = record
        self._target = (target,)  # in a tuple, so that it is not registered twice
        self.register_buffer("velocity", torch.zeros_like(target, requires_grad=False))

    @torch.no_grad()
    def step(self, gradient: Tensor) -> None:
        self.velocity.mul_(self.record.momentum).add_(gradient)
        self._target[0].sub_(self.velocity, alpha=self.record.lr)
