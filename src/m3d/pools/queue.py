"""A queue of networks that go on learning from real images while they serve as encoders (IDM's model sampling)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from m3d import rng
from m3d.batches import Images
from m3d.errors import M3DError
from m3d.pools import LivePool, World
from m3d.train import Recipe, Trainer
from m3d.types import Eyes

_BLOCK = 64  # steps whose choices are drawn together
_SERVES, _LEARN = 0, 1  # lanes of the draws: which network serves a step, and which ones learn after it


@dataclass(frozen=True)
class Queue:
    """Networks of all ages: ``initial`` random ones, and another one before step 0 and every ``every`` steps.

    When there are more than ``capacity``, the oldest leaves. Each step looks through one of them, drawn at random;
    after it ``learners`` different ones, drawn anew, each take ``train_steps`` steps on real images. The trust in a
    network is its training accuracy in percent: the share of images it knew just before it learned from them, counted
    anew every ``recount`` steps (0: never) and zero while nothing is counted.
    """

    recipe: Recipe  # how they learn; its number of epochs does not matter
    every: int = 30
    initial: int = 3
    capacity: int = 100
    learners: int = 2
    train_steps: int = 10
    recount: int = 100

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("initial", 0), ("learners", 1), ("train_steps", 1), ("recount", 0)):
            if getattr(self, name) < least:
                raise M3DError(f"{name}={getattr(self, name)} is not valid; allowed: {least} and more")
        for name, have in (("initial", self.initial + 1), ("capacity", self.capacity)):
            if have < self.learners:
                raise M3DError(
                    f"{name}={getattr(self, name)} is not valid: the queue would hold {have} of the {self.learners} "
                    f"networks that learn together"
                )

    def pushed(self, step: int) -> int:
        """How many networks have been in the queue up to ``step``, the one pushed before it included."""
        return self.initial + step // self.every + 1

    def start(self, world: World) -> LivePool:
        return LiveQueue(self, world)


class LiveQueue(LivePool):
    """Network number k lies in row k mod capacity, so a new one takes the place of the oldest.

    The rows, with momenta and counts, are the whole state; which networks serve and learn follows from the step.
    """

    networks: Tensor  # [capacity, P]
    momenta: Tensor  # [capacity, P]
    right: Tensor  # [capacity]: training images known, of those
    asked: Tensor  # [capacity]: counted so far
    trust: Tensor  # []

    def __init__(self, record: Queue, world: World):
        super().__init__()
        self.record, self.net, self.seed = record, world.net, world.seed
        base = world.net.base
        rows = torch.zeros(record.capacity, len(base), device=base.device)
        self.register_buffer("networks", rows)
        self.register_buffer("momenta", torch.zeros_like(rows))
        for name in ("right", "asked"):
            self.register_buffer(name, torch.zeros(record.capacity, dtype=torch.long, device=base.device))
        # What a step looks through is chosen again before it, so neither needs to be saved.
        self.register_buffer("parameters_flat", torch.zeros_like(base), persistent=False)
        self.register_buffer("trust", torch.zeros((), device=base.device), persistent=False)
        train, data = world.data.train, world.data
        images = Images(train.images, train.labels(), data.normalise()).prepared()
        self.batch = min(record.recipe.batch, len(images))
        self.ranks = world.ranks
        self.own = self.ranks.share(record.learners)  # of the networks that learn after a step: this process's
        self.trainer = Trainer(
            world.net,
            images,
            record.recipe,
            len(self.own),
            world.seed,
            world.runtime,
            sample=record.train_steps * self.batch,
            first=self.own.start,
            counts=True,
        )
        self._orders = torch.zeros(0)
        self._drawn = -1  # which block of steps the orders belong to

    def eyes(self) -> Eyes:
        return Eyes(self.parameters_flat, trust=self.trust)

    def due(self, step: int) -> bool:
        return True

    @torch.no_grad()
    def draw(self, step: int) -> None:
        record = self.record
        if record.recount and step % record.recount == 0:
            self.right.zero_()
            self.asked.zero_()
        if step % record.every == 0:
            last = record.pushed(step)
            for number in range(0 if step == 0 else last - 1, last):
                self._push(number)
        (row,) = self._rows(step, _SERVES, 1)
        self.parameters_flat.copy_(self.networks[row])
        self.trust.copy_(100 * self.right[row] / self.asked[row].clamp(min=1))

    @torch.no_grad()
    def age(self, step: int) -> None:
        """Every process teaches its share of the learners and is given the others'."""
        rows, trainer = self._rows(step, _LEARN, self.record.learners), self.trainer
        assert trainer.right is not None
        # Rows are picked by Python numbers, never by an index tensor: nothing here waits for the device.
        for k, learner in enumerate(self.own):
            trainer.flat[k].copy_(self.networks[rows[learner]])
            trainer.velocity[k].copy_(self.momenta[rows[learner]])
        trainer.right.zero_()
        trainer.epoch = step
        with torch.enable_grad():
            trainer.run(step + 1)  # an epoch is ``train_steps`` batches, and each step draws its own
        taught = [self.ranks.gathered(x, len(rows)) for x in (trainer.flat, trainer.velocity, trainer.right)]
        for row, flat, velocity, right in zip(rows, *taught, strict=True):
            self.networks[row].copy_(flat)
            self.momenta[row].copy_(velocity)
            self.right[row].add_(right)
            self.asked[row].add_(trainer.batches.length)

    def _push(self, number: int) -> None:
        """Put random network ``number`` in the place of the oldest."""
        row = number % self.record.capacity
        index = torch.full((1,), number, dtype=torch.long, device=self.networks.device)
        self.networks[row].copy_(self.net.fresh(self.seed, rng.Purpose.ENCODER, index, torch.zeros_like(index))[0])
        for buffer in (self.momenta, self.right, self.asked):
            buffer[row].zero_()

    def _rows(self, step: int, lane: int, count: int) -> list[int]:
        """``count`` different rows in use at ``step``, drawn on the host, which knows how many there are."""
        block, within = divmod(step, _BLOCK)
        if block != self._drawn:
            steps = torch.arange(block * _BLOCK, (block + 1) * _BLOCK)
            lanes = torch.tensor([_SERVES, _LEARN])
            self._orders = rng.permutation(self.seed, rng.Purpose.QUEUE, steps, lanes, self.record.capacity)
            self._drawn = block
        order: list[int] = self._orders[within, lane].tolist()
        used = self.record.pushed(step)  # may exceed the capacity: then every row is in use
        return [row for row in order if row < used][:count]
