"""Where synthetic images start. Every initialiser is a choice of images; a coreset is one with no step after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from m3d import rng
from m3d.data.classes import Dataset
from m3d.errors import M3DError


class Init(Protocol):
    """Chooses ``count`` starting images of every class."""

    def __call__(self, data: Dataset, count: int, seed: int) -> Tensor:
        """[C, count, ch, h, w] in [0, 1], on the data's device."""
        ...

    def require(self, data: Dataset, count: int) -> None:
        """Raise, before any work is begun, if the data cannot give ``count`` starting images of every class."""
        ...


@dataclass(frozen=True)
class RandomReal:
    """Different random real images of each class."""

    def __call__(self, data: Dataset, count: int, seed: int) -> Tensor:
        self.require(data, count)
        train = data.train
        position = torch.arange(count, device=train.device).expand(1, train.classes, count)
        lanes = torch.arange(train.classes, device=train.device)
        return train.take(rng.shuffled(seed, rng.Purpose.INIT, position, lanes, train.count)[0])

    def require(self, data: Dataset, count: int) -> None:
        smallest = int(data.train.count.argmin())
        have = int(data.train.count[smallest])
        if have < count:
            raise M3DError(
                f"class {data.class_names[smallest]!r} has {have} training images, but {count} different ones are "
                f"needed to start (images per class × factor²); lower --ipc or --factor, or start from noise "
                f"(--set init=noise)"
            )


@dataclass(frozen=True)
class Noise:
    """Normal noise with the data's mean and standard deviation, clipped to [0, 1]."""

    def __call__(self, data: Dataset, count: int, seed: int) -> Tensor:
        device, (ch, h, w) = data.train.device, data.shape
        lanes = torch.arange(data.classes, device=device)
        steps = torch.zeros(1, dtype=torch.long, device=device)
        draws = rng.normal(seed, rng.Purpose.INIT, steps, lanes, count * ch * h * w)[0]
        mean, std = (torch.tensor(v, device=device)[:, None, None] for v in (data.mean, data.std))
        return (draws.view(data.classes, count, ch, h, w) * std + mean).clamp(0, 1)

    def require(self, data: Dataset, count: int) -> None:
        """Noise needs no image."""
