"""Encoders that have seen the data: networks trained before the first step, each step some way back to where it began.

A random encoder looks at everything alike; a trained one looks only at what tells the classes apart. On the straight
line between the initial and the trained weights of one network lie encoders of both kinds and all degrees.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from m3d import rng
from m3d.augment import Augment
from m3d.errors import M3DError
from m3d.pools import LivePool, World
from m3d.runtime import Repeated, pick
from m3d.train import Recipe
from m3d.trained import Trained, trained_networks
from m3d.types import Eyes

_BLOCK = 64  # draws that are made together


def encoder_recipe(epochs: int, batch: int = 512, lr: float = 0.05) -> Recipe:
    """SGD whose rate falls linearly to 0, one augmentation of the full list per batch."""
    return Recipe(epochs, batch, lr, schedule="linear", augment=Augment.any_one())


def default_batch(shape: tuple[int, int, int]) -> int:
    """512 images up to 64 pixels, 64 above: five networks' maps of 512 photographs would not fit into a GPU."""
    return 512 if max(shape[1:]) <= 64 else 64


@dataclass(frozen=True)
class Pretrained:
    """``networks`` trained on the real data; every ``every`` steps an encoder λ · initial + (1 − λ) · trained of one.

    The network is drawn at random and λ from U(low, high). The trained network itself, whatever λ, judges synthetic
    images; its judgement counts fully after ``ramp`` steps and grows in proportion to them before.
    """

    recipe: Recipe
    networks: int = 5
    low: float = 0.0
    high: float = 1.0
    every: int = 1
    ramp: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("encoders", self.networks, 1),
            ("ipm", self.every, 1),
            ("ramp", self.ramp, 0),
        ):
            if value < least:
                raise M3DError(f"{name}={value} is not valid; allowed: {least} and more")
        if not 0 <= self.low <= self.high <= 1:
            raise M3DError(
                f"mix_low={self.low}, mix_high={self.high} is not valid; allowed: 0 ≤ mix_low ≤ mix_high ≤ 1"
            )

    def start(self, world: World) -> LivePool:
        if not world.net.spec:
            raise M3DError("encoders are trained and kept by their network's name; this one has none, use make_net")
        trained = trained_networks(
            world.data, world.net.spec, self.recipe, self.networks, world.seed, world.runtime, world.ranks
        )
        return _PretrainedPool(self, world, trained)


class _PretrainedPool(LivePool):
    """The encoder is a function of (seed, step) and the trained networks, so nothing of it is saved."""

    trained: Tensor  # [P]
    trust: Tensor  # []

    def __init__(self, record: Pretrained, world: World, networks: Trained):
        super().__init__()
        self.record, self.seed, self.networks = record, world.seed, networks
        base = world.net.base
        for name in ("parameters_flat", "trained"):
            self.register_buffer(name, torch.zeros_like(base), persistent=False)
        self.register_buffer("trust", torch.ones((), device=base.device), persistent=False)
        # Which network, and how much of its initial weights, for a block of draws together: a random number takes a
        # hundred small operations, however many are asked for. The device reads which draw it is.
        self.index = torch.zeros(1, dtype=torch.long, device=base.device)
        self.slot = torch.zeros_like(self.index)
        self.rows = torch.zeros(_BLOCK, dtype=torch.long, device=base.device)
        self.shares = torch.zeros(_BLOCK, device=base.device)
        self._drawn = -1  # which block they are
        self._refill = Repeated(self._fill, world.runtime)

    def eyes(self) -> Eyes:
        return Eyes(self.parameters_flat, trained=self.trained, trust=self.trust if self.record.ramp else None)

    def due(self, step: int) -> bool:
        return step % self.record.every == 0

    def restore(self, step: int) -> None:
        self.draw(step)

    def draw(self, step: int) -> None:
        number = step // self.record.every
        block, slot = divmod(number, _BLOCK)
        if block != self._drawn:
            self._draw_block(block)
            self._drawn = block
        self.index.fill_(number)
        self.slot.fill_(slot)
        self._refill()

    @torch.no_grad()
    def _draw_block(self, block: int) -> None:
        record, device = self.record, self.rows.device
        numbers = torch.arange(block * _BLOCK, (block + 1) * _BLOCK, device=device)
        words = rng.bits(self.seed, rng.Purpose.MIXTURE, numbers, torch.arange(2, device=device), 1)[..., 0]  # [n, 2]
        self.rows.copy_(words[:, 0] % record.networks)
        self.shares.copy_(record.low + (record.high - record.low) * (words[:, 1] >> 8).float() * 2.0**-24)

    @torch.no_grad()
    def _fill(self) -> None:
        record, networks = self.record, self.networks
        row, share = self.rows.index_select(0, self.slot), self.shares.index_select(0, self.slot)
        self.trained.copy_(pick(networks.final, row))
        self.parameters_flat.copy_(torch.lerp(self.trained, pick(networks.initial, row), share))
        if record.ramp:
            self.trust.copy_(((self.index[0] * record.every + 1) / record.ramp).clamp(max=1))
