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
    """SGD with momentum: v ← momentum·v + g, x ← x − lr·v; lr is multiplied by ``gamma`` at each of ``milestones``."""

    lr: float
    momentum: float = 0.0
    milestones: tuple[int, ...] = ()  # steps
    gamma: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.lr <= 1e30:  # float32, in which pixels move, ends near 3e38
            raise M3DError(f"lr={self.lr} is not valid; allowed: a positive number, at most 1e30")
        if not 0 <= self.momentum < 1:
            raise M3DError(f"momentum={self.momentum} is not valid; allowed: 0 up to, but not including, 1")
        if not 0 < self.gamma <= 1:
            raise M3DError(f"the learning rate times {self.gamma} is not valid; allowed: above 0, at most 1")

    def start(self, target: Tensor) -> LivePlayer:
        return _LiveDescent(self, target)


class _LiveDescent(LivePlayer):
    velocity: Tensor
    taken: Tensor  # []: steps so far, counted on the device so that a recorded step can follow the schedule

    def __init__(self, record: Descent, target: Tensor):
        super().__init__()
        self.record = record
        self._target = (target,)  # in a tuple, so that it is not registered twice
        self.register_buffer("velocity", torch.zeros_like(target, requires_grad=False))
        self.register_buffer("taken", torch.zeros((), dtype=torch.long, device=target.device))
        self._milestones = torch.tensor(record.milestones, device=target.device)

    @torch.no_grad()
    def step(self, gradient: Tensor) -> None:
        record, target = self.record, self._target[0]
        self.velocity.mul_(record.momentum).add_(gradient)
        if not record.milestones:
            target.sub_(self.velocity, alpha=record.lr)
            return
        passed = (self._milestones <= self.taken).sum()
        target.sub_(self.velocity * (record.lr * record.gamma**passed))
        self.taken.add_(1)


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019); with ``ascent`` it climbs instead.

    x ← (1 − lr·decay)·x − lr · m̂ / (√v̂ + ε), m̂ and v̂ the running means of g and g², corrected for their start at 0.

    With ``turns`` C > 1 one step is what C steps of an optimiser do that classes share by turns: in one of them a class
    has its gradient, in the others none, while its running means fade and it moves on by what is left of them,

        m ← β₁ᶜ·m + (1 − β₁)·g,   v ← β₂ᶜ·v + (1 − β₂)·g²,
        x ← dᶜ·x − lr · m / (√v + ε) · Σ_{j<C} dᶜ⁻¹⁻ʲ · β₁ʲ / (1 − β₁ᵗ⁺ʲ) · √((1 − β₂ᵗ⁺ʲ) / β₂ʲ),   d = 1 − lr·decay

    with t the number of the class's own turn, taken to be the first of each round for all.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    decay: float = 0.0
    epsilon: float = 1e-8
    ascent: bool = False
    turns: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise M3DError(f"lr={self.lr} is not valid; allowed: a positive number")
        if self.turns < 1:
            raise M3DError(f"turns={self.turns} is not valid; allowed: 1 and more")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise M3DError(f"betas={self.betas} are not valid; allowed: two numbers from 0 up to, but not including, 1")

    def start(self, target: Tensor) -> LivePlayer:
        return _LiveAdamW(self, target)


class _LiveAdamW(LivePlayer):
    first: Tensor  # running mean of the gradient
    second: Tensor  # and of its square
    taken: Tensor  # []: steps so far, on the device

    def __init__(self, record: AdamW, target: Tensor):
        super().__init__()
        self.record = record
        self._target = (target,)
        self.register_buffer("first", torch.zeros_like(target, requires_grad=False))
        self.register_buffer("second", torch.zeros_like(target, requires_grad=False))
        self.register_buffer("taken", torch.zeros((), device=target.device))
        self._later = torch.arange(record.turns, device=target.device)  # [C]: steps after a class's own turn

    @torch.no_grad()
    def step(self, gradient: Tensor) -> None:
        record, target = self.record, self._target[0]
        gradient = -gradient if record.ascent else gradient
        self.taken.add_(1)
        low, high = record.betas
        if record.turns > 1:
            self._round(gradient, low, high)
            return
        self.first.lerp_(gradient, 1 - low)
        self.second.mul_(high).addcmul_(gradient, gradient, value=1 - high)
        mean = self.first / (1 - low**self.taken)
        spread = (self.second / (1 - high**self.taken)).sqrt_().add_(record.epsilon)
        target.mul_(1 - record.lr * record.decay).sub_(mean / spread, alpha=record.lr)

    def _round(self, gradient: Tensor, low: float, high: float) -> None:
        """All the turns of a round at once."""
        record, target, turns = self.record, self._target[0], self.record.turns
        self.first.mul_(low**turns).add_(gradient, alpha=1 - low)
        self.second.mul_(high**turns).addcmul_(gradient, gradient, value=1 - high)
        number = (self.taken - 1) * turns + 1 + self._later
        each = low**self._later / (1 - low**number) * ((1 - high**number) / high**self._later).sqrt()
        left = 1 - record.lr * record.decay
        length = (each * left ** (turns - 1 - self._later)).sum()
        move = self.first / self.second.sqrt().add_(record.epsilon)
        target.mul_(left**turns).sub_(move * (record.lr * length))
