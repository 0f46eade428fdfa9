"""Objectives on characteristic functions: the expectation of exp(i·⟨t, x⟩), compared at many frequencies t."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from m3d import rng
from m3d.errors import M3DError
from m3d.objectives.base import Objective
from m3d.players import Player
from m3d.types import Seen

_LEAST = 1e-12  # under every root: its derivative at 0 is infinite
_HIDDEN = 256  # width of the network that learns the frequencies, and size of the noise it starts from


class CharacteristicGap(Objective[Seen]):
    """300 · mean_t √(a·(|φ_T| − |φ_S|)² + (1 − a)·2·(|φ_T|·|φ_S| − Re φ_T·φ̄_S)): NCFM's loss.

    φ(t) = mean over a class's images of exp(i·⟨t, f⟩), f the representation divided by its length; a (``amplitude``)
    weighs differences of amplitude against those of phase. Since 2·(|φ_T|·|φ_S| − Re φ_T·φ̄_S) is
    |φ_T − φ_S|² − (|φ_T| − |φ_S|)², the loss at a = ½ is 300 · mean_t |φ_T − φ_S| / √2; that form is computed, because
    it does not lose small differences to rounding.

    All classes of a step share its frequencies: normal ones, or the answers to normal noise of a small network whose
    ``player`` climbs where the images descend.
    """

    def __init__(
        self, frequencies: int = 4096, amplitude: float = 0.5, climber: Player | None = None, scale: float = 300.0
    ):
        """With a ``climber`` the frequencies are learned by it; without, they are drawn from N(0, I)."""
        super().__init__()
        if frequencies < 1:
            raise M3DError(f"frequencies={frequencies} is not valid; allowed: 1 and more")
        if not 0 <= amplitude <= 1:
            raise M3DError(f"amplitude={amplitude} is not valid; allowed: a weight from 0 to 1")
        self.frequencies, self.amplitude, self.climber, self.scale = frequencies, amplitude, climber, scale
        self.learns = climber is not None
        self.register_buffer("noise", None, persistent=False)
        self.generator: Generator | None = None

    noise: Tensor  # [F, d], or what the generator turns into frequencies: [F, _HIDDEN]

    def start(self, seed: int, sample: Callable[[], Seen]) -> None:
        features = sample().features
        device, width = features.device, features.shape[-1]
        self._seed, self._lanes = seed, torch.arange(self.frequencies, device=device)
        if self.climber is not None:
            self.generator = Generator(width, seed, self.climber, device)
        self.noise = torch.zeros(self.frequencies, width if self.generator is None else _HIDDEN, device=device)

    @torch.no_grad()
    def draw(self, step: Tensor) -> None:
        self.noise.copy_(rng.normal(self._seed, rng.Purpose.FREQUENCY, step, self._lanes, self.noise.shape[1])[0])

    def forward(self, goal: Seen, seen: Seen) -> Tensor:
        """[C]."""
        t = self.noise if self.generator is None else self.generator(self.noise)  # [F, d]
        real, synthetic = (characteristic(s.features.float(), t) for s in (goal, seen))
        return self.scale * gap(real, synthetic, self.amplitude).mean(-1)


class Generator(nn.Module):
    """Three layers with tanh between them: noise [F, _HIDDEN] to frequencies [F, d]."""

    def __init__(self, width: int, seed: int, player: Player, device: torch.device):
        super().__init__()
        self.player = player
        sizes = (_HIDDEN, _HIDDEN, _HIDDEN, width)
        for k in range(3):
            lane, layer = torch.arange(sizes[k + 1], device=device), torch.full((1,), k, device=device)
            u = rng.uniform(seed, rng.Purpose.SAMPLER, layer, lane, sizes[k] + 1)[0]  # [outputs, inputs + 1]
            start = (2 * u - 1) / math.sqrt(sizes[k])
            self.register_parameter(f"weight_{k}", nn.Parameter(start[:, :-1].contiguous()))
            self.register_parameter(f"bias_{k}", nn.Parameter(start[:, -1].contiguous()))

    def forward(self, noise: Tensor) -> Tensor:
        x = noise
        for k in range(3):
            weight, bias = self.get_parameter(f"weight_{k}"), self.get_parameter(f"bias_{k}")
            x = functional.linear(x if k == 0 else torch.tanh(x), weight, bias)
        return x


def characteristic(features: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """(real, imaginary part) of φ, each [C, F], of the directions of ``features`` [C, n, d] at t [F, d]."""
    angle = functional.normalize(features, dim=-1) @ frequencies.mT  # [C, n, F]
    return angle.cos().mean(1), angle.sin().mean(1)


def gap(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], amplitude: float) -> Tensor:
    """[C, F]: √(a·Δ² + (1 − a)·(|φ₁ − φ₂|² − Δ²)), Δ the difference of the amplitudes; 0 where both agree."""
    whole = (first[0] - second[0]).square() + (first[1] - second[1]).square()
    lengths = [(re.square() + im.square() + _LEAST).sqrt() for re, im in (first, second)]
    difference = (lengths[0] - lengths[1]).square()
    square = amplitude * difference + (1 - amplitude) * (whole - difference).clamp(min=0)
    return (square + _LEAST).sqrt() - math.sqrt(_LEAST)
