"""Encoders trained on the synthetic images for as long as their accuracy on real ones asks for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from m3d import rng
from m3d.augment import Augment
from m3d.batches import Images
from m3d.errors import M3DError
from m3d.pools import Fresh, LivePool, World, trainer_on_synthetic
from m3d.runtime import Repeated, pick
from m3d.train import Recipe


@dataclass(frozen=True)
class Watched:
    """An encoder is trained on the synthetic images after each step until it has changed, and replaced once it settles.

    Both are judged by the spread (largest − smallest) of the latest ``window`` accuracies, each on fresh real images.
    After a step, a spread below ``outer_stop`` over the encoder's steps calls for a new one; otherwise it is trained,
    an epoch at a time, until the spread over this step's epochs exceeds ``inner_stop``. Neither rule need ever come
    true (accuracies of 100 classes hardly move, those of two are coarse): ``outer_max`` and ``inner_max`` bound both.
    """

    across_classes: ClassVar[bool] = True
    outer_stop: float
    inner_stop: float
    outer_max: int  # steps of one encoder
    inner_max: int  # epochs after one step
    window: int = 10
    queries: int = 128  # real images per class that an accuracy is measured on
    batch: int = 256
    lr: float = 0.01
    augment: Augment = field(default_factory=Augment)

    def __post_init__(self) -> None:
        for name, least in (("outer_max", 1), ("inner_max", 1), ("window", 2), ("queries", 1)):
            if getattr(self, name) < least:
                raise M3DError(f"{name}={getattr(self, name)} is not valid; allowed: {least} and more")
        for name in ("outer_stop", "inner_stop"):
            if not 0 <= getattr(self, name) <= 1:
                raise M3DError(f"{name}={getattr(self, name)} is not valid; allowed: a difference from 0 to 1")

    def start(self, world: World) -> LivePool:
        return _WatchedPool(world, self)


class _WatchedPool(LivePool):
    """The encoder, how many steps it served and the accuracies after the latest of them: all that is checkpointed.

    Draws are numbered by steps. The host reads a spread only where it decides something: once after a step when the
    encoder has filled its window, and once after each epoch from the first full window on.
    """

    accuracies: Tensor  # [window]: a ring, from 0 to 1
    taken: Tensor  # []: steps of this encoder, on the host; 0: a new one is due

    def __init__(self, world: World, record: Watched):
        super().__init__()
        self.record, self.seed, self.data = record, world.seed, world.data.train
        device, classes, queries = self.data.device, self.data.classes, record.queries
        recipe = Recipe(1, record.batch, record.lr, momentum=0.0, weight_decay=0.0, augment=record.augment)
        self.trainer, self.refresh = trainer_on_synthetic(world, recipe)
        self.fresh = Fresh().start(world)
        self.register_buffer("parameters_flat", torch.zeros_like(world.net.base))
        self.register_buffer("accuracies", torch.zeros(record.window, dtype=torch.float64, device=device))
        self.register_buffer("taken", torch.zeros((), dtype=torch.long, device="cpu"))
        # This step's number, its draws (one for every accuracy it may measure), and which of them is next.
        self.step = torch.zeros(1, dtype=torch.long, device=device)
        self.index = torch.zeros(record.inner_max + 1, classes, queries, dtype=torch.long, device=device)
        self.slot = torch.zeros_like(self.step)
        labels = torch.arange(classes, device=device).repeat_interleave(queries)
        pixels = self.data.images.new_zeros(classes * queries, *self.data.shape)
        self.asked = Images(pixels, labels, world.data.normalise())
        self.accuracy = torch.zeros(1, dtype=torch.float64, device=device)  # the latest
        self.inner = torch.zeros_like(self.accuracies)  # after the latest epochs of this step
        self._choose, self._ask = (Repeated(f, world.runtime) for f in (self._draw_queries, self._measure))

    def due(self, step: int) -> bool:
        return int(self.taken) == 0

    @torch.no_grad()
    def draw(self, step: int) -> None:
        self.fresh.draw(step)
        self.parameters_flat.copy_(self.fresh.parameters_flat)
        self.taken.zero_()

    @torch.no_grad()
    def age(self, step: int) -> None:
        self.refresh()
        self.step.fill_(step)
        self._choose()
        first = step * self.record.inner_max  # epochs are numbered by steps, so that each step draws its own orders
        still = torch.zeros_like(self.trainer.velocity)  # there is no momentum: nothing of an earlier network remains
        self.trainer.load({"flat": self.parameters_flat[None], "velocity": still, "epoch": torch.tensor(first)})
        self._ask()
        self.accuracies[int(self.taken) % self.record.window] = self.accuracy[0]
        self.taken.add_(1)
        if self._settled():
            self.taken.zero_()
        else:
            self._train(first)

    def _settled(self) -> bool:
        """Whether this encoder is done with."""
        taken, record = int(self.taken), self.record
        if taken >= record.outer_max:
            return True
        return taken >= record.window and _spread(self.accuracies) < record.outer_stop

    def _train(self, first: int) -> None:
        """Epochs from number ``first`` on, until the accuracy has moved."""
        record = self.record
        for k in range(record.inner_max):
            with torch.enable_grad():
                self.trainer.run(first + k + 1)
            self._ask()
            self.inner[k % record.window] = self.accuracy[0]
            if k + 1 >= record.window and _spread(self.inner) > record.inner_stop:
                break
        self.parameters_flat.copy_(self.trainer.flat[0])

    def _draw_queries(self) -> None:
        """Which real images this step's accuracies are measured on; consecutive ones are different images."""
        many = len(self.index)
        numbers = self.step * many + torch.arange(many, device=self.step.device)
        self.index.copy_(self.data.deck(self.seed, numbers, self.record.queries, rng.Purpose.QUERY))
        self.slot.zero_()

    def _measure(self) -> None:
        """The trainer's network on the next real images, without augmentation."""
        chosen = self.data.start[:, None] + pick(self.index, self.slot)  # [C, queries]
        self.asked.pixels.copy_(self.data.images[chosen.flatten()])
        self.accuracy.copy_(self.trainer.accuracy(self.asked) / 100)
        self.slot.add_(1)


def _spread(accuracies: Tensor) -> float:
    """Largest − smallest. The host waits for the device here."""
    return float(accuracies.max() - accuracies.min())
