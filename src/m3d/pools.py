"""Through which networks real and synthetic images are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from m3d import rng
from m3d.errors import M3DError
from m3d.nets.flat import FlatNet
from m3d.runtime import Repeated, Runtime


class LivePool(nn.Module):
    """Encoders during a run: one flat parameter vector, refilled in place. Its state_dict is checkpointed."""

    parameters_flat: Tensor  # [P]; static storage, so that a captured step always reads the current encoder

    def due(self, step: int) -> bool:
        """Whether the encoder changes before this step."""
        raise NotImplementedError

    def draw(self, step: int) -> None:
        """Refill the encoder for this step, in place."""
        raise NotImplementedError

    def restore(self, step: int) -> None:
        """After a checkpoint was loaded: rebuild what it does not hold, as it was just before this step."""


class Pool(Protocol):
    """A recipe for encoders."""

    def start(self, net: FlatNet, seed: int, runtime: Runtime) -> LivePool: ...


@dataclass(frozen=True)
class Fresh:
    """A new randomly initialised encoder every ``every`` steps: the paper's IPM (iterations per model)."""

    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise M3DError(f"ipm={self.every} is not valid; allowed: 1 and more")

    def start(self, net: FlatNet, seed: int, runtime: Runtime) -> LivePool:
        return _FreshPool(net, seed, self.every, runtime)


class _FreshPool(LivePool):
    def __init__(self, net: FlatNet, seed: int, every: int, runtime: Runtime):
        super().__init__()
        self.net, self.seed, self.every = net, seed, every
        self.lane = torch.zeros(1, dtype=torch.long, device=net.base.device)
        self.index = torch.zeros_like(self.lane)  # which encoder; read on the device by the recorded refill
        self._refill = Repeated(self._fill, runtime)
        # A function of (seed, step) alone, so nothing of it needs to be saved.
        self.register_buffer("parameters_flat", torch.zeros_like(net.base), persistent=False)

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def restore(self, step: int) -> None:
        self.draw(step)

    def draw(self, step: int) -> None:
        self.index.fill_(step // self.every)
        self._refill()

    @torch.no_grad()
    def _fill(self) -> None:
        self.parameters_flat.copy_(self.net.fresh(self.seed, rng.Purpose.ENCODER, self.index, self.lane)[0])
