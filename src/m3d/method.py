"""What a condensation method is: a frozen record of independent choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from m3d.augment import Augment
from m3d.errors import M3DError
from m3d.guides import Guide
from m3d.nets.flat import FlatNet
from m3d.objectives.base import Objective
from m3d.players import Player
from m3d.pools import Pool
from m3d.probes import Forward, Probe
from m3d.select import Init
from m3d.tiles import Tiles


@dataclass(frozen=True)
class Matching:
    """How synthetic images are moved towards real ones."""

    steps: int
    pool: Pool  # through which networks
    objective: Objective[Any]  # how readings are compared
    player: Player  # how the images move
    probe: Probe[Any] = field(default_factory=Forward)  # what is read, of the kind the objective compares
    guide: Guide | None = None  # what synthetic images must satisfy beside
    augment: Augment = field(default_factory=Augment)  # one draw per class and step, the same for both sides
    batch_real: int = 128  # real images per class and step
    batch_syn_max: int = 200  # decoded synthetic images per class and step, at most
    standardised: bool = False  # whether the player moves standardised pixels instead of plain ones
    bounded: bool = True  # whether pixels are brought back into [0, 1] after each step
    diverged_at: float = 20.0  # stop when the loss exceeds its first value this many times
    average_from: float = 1.0  # the result is the mean of the images after this part of the steps; 1: the last images

    def __post_init__(self) -> None:
        for name in ("steps", "batch_real", "batch_syn_max"):
            if getattr(self, name) < 1:
                raise M3DError(f"{name}={getattr(self, name)} is not valid; allowed: 1 and more")
        if not 0 <= self.average_from <= 1:
            raise M3DError(f"average_from={self.average_from} is not valid; allowed: a part of the steps, from 0 to 1")

    @property
    def average_start(self) -> int:
        """How many steps are taken before the first whose images enter the mean; all of them: there is no mean."""
        return round(self.average_from * self.steps)

    def together(self, net: FlatNet) -> bool:
        """Whether all classes must go through a step at once."""
        return self.objective.across_classes or self.objective.remembers or net.mixes_images

    def bond(self, net: FlatNet) -> str | None:
        """Why classes cannot be condensed apart from each other, as half a sentence; None where they can."""
        if self.objective.across_classes:
            return "its loss compares classes with each other"
        if self.objective.remembers:
            return "its loss remembers where every class was"
        if net.mixes_images:
            return "its network's batch norm mixes the images of all classes"
        parts = [part for part in (self.objective, self.probe) if isinstance(part, nn.Module)]
        if self.objective.learns or any(True for part in parts for _ in part.parameters()):
            return "it learns numbers that all classes share"
        return None


@dataclass(frozen=True)
class Method:
    """A condensation method: where images start, how they are stored, and how they are moved (coresets: not at all)."""

    init: Init
    tiles: Tiles = field(default_factory=lambda: Tiles(1))
    matching: Matching | None = None
    network: str = "convnet3"  # through which images are matched, where nothing else is asked for
    gpu_precision: str = "bf16"  # of its networks' convolutions on a GPU, where nothing else is asked for
    # Options that may be left to the method, with the values they have: records name them, resumed runs keep them.
    settled: Mapping[str, object] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return self.matching.steps if self.matching else 0
