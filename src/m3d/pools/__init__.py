"""Through which networks real and synthetic images are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from m3d import rng
from m3d.augment import Augment
from m3d.batches import Images
from m3d.data.classes import Dataset
from m3d.errors import M3DError
from m3d.nets.flat import FlatNet
from m3d.runtime import Repeated, Runtime
from m3d.shards import Ranks, Shard
from m3d.synth import Synthetic
from m3d.train import Recipe, Trainer
from m3d.types import Eyes


@dataclass(frozen=True)
class World:
    """What a pool may look at during a run."""

    net: FlatNet
    data: Dataset
    synthetic: Synthetic
    seed: int
    runtime: Runtime
    shard: Shard | None = None  # whose classes ``synthetic`` holds; None: all

    @property
    def ranks(self) -> Ranks:
        """The processes that may share the training of networks."""
        return Ranks() if self.shard is None else self.shard.ranks

    def images(self) -> Tensor:
        """[C, n, ch, h, w]: the synthetic images of all classes, decoded, not normalised; every process must ask."""
        own = self.synthetic.pixels()
        return self.synthetic.tiles.decode(own if self.shard is None else self.shard.whole(own))


class LivePool(nn.Module):
    """Encoders during a run: one flat parameter vector, refilled in place. Its state_dict is checkpointed."""

    parameters_flat: Tensor  # [P]; static storage, so that a captured step always reads the current encoder

    def eyes(self) -> Eyes:
        """What a step looks through: tensors at fixed addresses."""
        return Eyes(self.parameters_flat)

    def due(self, step: int) -> bool:
        """Whether the encoder changes before this step."""
        raise NotImplementedError(f"{type(self).__name__} must define due(step)")

    def draw(self, step: int) -> None:
        """Refill the encoder for this step, in place."""
        raise NotImplementedError(f"{type(self).__name__} must define draw(step)")

    def age(self, step: int) -> None:
        """After this step: train the encoder, or (the default) leave it as it is."""

    def restore(self, step: int) -> None:
        """After a checkpoint was loaded: rebuild what it does not hold, as it was just before this step."""


class Pool(Protocol):
    """A recipe for encoders. One that looks at synthetic images of all classes says ``across_classes = True``."""

    def start(self, world: World) -> LivePool: ...


@dataclass(frozen=True)
class Fresh:
    """A new randomly initialised encoder every ``every`` steps: the paper's IPM (iterations per model)."""

    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise M3DError(f"ipm={self.every} is not valid; allowed: 1 and more")

    def start(self, world: World) -> LivePool:
        return _FreshPool(world, self.every)


class _FreshPool(LivePool):
    def __init__(self, world: World, every: int, persistent: bool = False):
        super().__init__()
        self.net, self.seed, self.every = world.net, world.seed, every
        self.lane = torch.zeros(1, dtype=torch.long, device=world.net.base.device)
        self.index = torch.zeros_like(self.lane)  # which encoder; read on the device by the recorded refill
        self._refill = Repeated(self._fill, world.runtime)
        # An encoder that is not trained is a function of (seed, step) alone, so nothing of it needs to be saved.
        self.register_buffer("parameters_flat", torch.zeros_like(world.net.base), persistent=persistent)

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


@dataclass(frozen=True)
class TrainedOnSynthetic:
    """A new encoder every ``every`` steps; between them it is trained on the synthetic images as they are then."""

    across_classes: ClassVar[bool] = True
    every: int
    epochs: int  # of training after each step but the last of an encoder
    batch: int = 256
    lr: float = 0.01
    augment: Augment = field(default_factory=Augment)

    def __post_init__(self) -> None:
        _at_least_one(self, "every", "epochs")

    def start(self, world: World) -> LivePool:
        recipe = Recipe(1, self.batch, self.lr, momentum=0.0, weight_decay=0.0, augment=self.augment)
        return _TrainedPool(world, self.every, self.epochs, *trainer_on_synthetic(world, recipe))


@torch.no_grad()
def trainer_on_synthetic(world: World, recipe: Recipe) -> tuple[Trainer, Callable[[], None]]:
    """(trainer of one network on the synthetic images, function that brings its images up to date)."""
    pixels = world.images()
    labels = torch.arange(len(pixels), device=pixels.device).repeat_interleave(pixels.shape[1])
    images = Images(pixels.flatten(0, 1).clone(), labels, world.data.normalise())

    def refresh() -> None:
        images.pixels.copy_(world.images().flatten(0, 1))

    return Trainer(world.net, images, recipe, 1, world.seed, world.runtime), refresh


@dataclass(frozen=True)
class TrainedOnReal:
    """A new encoder every ``every`` steps; between them it is trained on real images, the next ``images`` each time."""

    every: int
    images: int
    recipe: Recipe  # its number of epochs does not matter
    before: int = 0  # epochs of all real images that an encoder is trained for before its first step

    def __post_init__(self) -> None:
        _at_least_one(self, "every", "images")
        if self.before < 0:
            raise M3DError(f"{self.before} epochs of training before the first step are not valid; allowed: 0 and more")

    def start(self, world: World) -> LivePool:
        train = world.data.train
        images = Images(train.images, train.labels(), world.data.normalise()).prepared()
        sample = min(self.images, len(images))
        trainer = Trainer(world.net, images, self.recipe, 1, world.seed, world.runtime, sample=sample)
        return _TrainedPool(world, self.every, 1, trainer, lambda: None, -(-self.before * len(images) // sample))


class _TrainedPool(_FreshPool):
    """An encoder and its momentum, both checkpointed; ``refresh`` brings the trainer's images up to date.

    The trainer's epochs, ``before`` the first step of an encoder and ``epochs`` after each but the last, are numbered
    through all encoders, so that each draws its own orders.
    """

    velocity: Tensor  # [P]

    def __init__(
        self, world: World, every: int, epochs: int, trainer: Trainer, refresh: Callable[[], None], before: int = 0
    ):
        super().__init__(world, every, persistent=True)
        self.register_buffer("velocity", torch.zeros_like(self.parameters_flat))
        self.epochs, self.trainer, self.refresh, self.before = epochs, trainer, refresh, before

    def draw(self, step: int) -> None:
        super().draw(step)
        self.velocity.zero_()
        if self.before:
            self._train(self._after(step) - self.before, self.before)
            self.velocity.zero_()

    def restore(self, step: int) -> None:
        """The checkpoint holds the encoder itself."""

    @torch.no_grad()
    def age(self, step: int) -> None:
        if (step + 1) % self.every == 0:  # a new encoder follows
            return
        self.refresh()
        self._train(self._after(step), self.epochs)

    def _after(self, step: int) -> int:
        """The number of the first epoch after ``step``."""
        encoder, within = divmod(step, self.every)
        return encoder * (self.before + self.every * self.epochs) + self.before + within * self.epochs

    @torch.no_grad()
    def _train(self, first: int, epochs: int) -> None:
        """Train the encoder for ``epochs`` epochs, of which ``first`` is the first."""
        state = {"flat": self.parameters_flat[None], "velocity": self.velocity[None], "epoch": torch.tensor(first)}
        self.trainer.load(state)
        with torch.enable_grad():
            self.trainer.run(first + epochs)
        self.parameters_flat.copy_(self.trainer.flat[0])
        self.velocity.copy_(self.trainer.velocity[0])


def _at_least_one(record: object, *names: str) -> None:
    for name in names:
        if getattr(record, name) < 1:
            raise M3DError(f"{name}={getattr(record, name)} is not valid; allowed: 1 and more")
