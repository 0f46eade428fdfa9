"""What happens beside the loop, and what it leaves: progress, snapshots, the outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from m3d.run_folder import RunFolder


@dataclass(frozen=True)
class Progress:
    """What is known after some steps."""

    step: int
    steps: int
    loss: float  # mean over classes, latest step
    seconds: float  # spent in this run so far, earlier sessions included
    rate: float  # steps per second, lately
    validation: tuple[int, float] | None = None  # latest measurement on held-out data: (step, accuracy)


class Snapshot(NamedTuple):
    """The images in the middle of a run."""

    pixels: Tensor  # [C, ipc, ch, h, w] on the CPU, 0 black and 1 white
    step: int
    seconds: float  # spent so far
    learned: dict[str, float]  # numbers learned beside the pixels


@dataclass
class Watch:
    """What happens beside the loop. Every part is optional."""

    report: Callable[[Progress], None] | None = None
    folder: RunFolder | None = None
    checkpoint_seconds: float = 60.0
    judge: Callable[[Snapshot], float] | None = None  # validation accuracy of the images as they are
    judge_every: int = 0
    keep: Callable[[Snapshot], None] | None = None
    keep_every: int = 0
    keep_end: bool = False  # whether the last step is checkpointed too, so that a finished part need not be made again
    pays_for_networks: bool = True  # whether the seconds include those of networks found in the cache


@dataclass
class Outcome:
    """What a finished condensation leaves."""

    pixels: Tensor  # [C, ipc, ch, h, w] on the CPU, 0 black and 1 white
    losses: list[float]
    seconds: float
    best: tuple[Tensor, int, float] | None = None  # (pixels, step, validation accuracy)
    judged: list[tuple[int, float]] = field(default_factory=list)
    learned: dict[str, float] = field(default_factory=dict)  # numbers learned beside the pixels
    best_learned: dict[str, float] = field(default_factory=dict)  # the same when the best pixels were kept
    borrowed_memory: int = 0  # bytes that work taken from a cache used at most
    starting: float = 0.0  # of the seconds, those before the end of each session's first step

    @classmethod
    def joined(cls, parts: Sequence[Outcome]) -> Outcome:
        """The outcome of runs over consecutive groups of classes as that of one run."""
        if len(parts) == 1:
            return parts[0]
        pixels, total = torch.cat([p.pixels for p in parts]), sum(len(p.pixels) for p in parts)
        steps = zip(*(p.losses for p in parts), strict=True)
        losses = [sum(len(p.pixels) * x for p, x in zip(parts, step, strict=True)) / total for step in steps]
        memory = max(p.borrowed_memory for p in parts)
        starting = sum(p.starting for p in parts)
        return cls(pixels, losses, sum(p.seconds for p in parts), borrowed_memory=memory, starting=starting)
