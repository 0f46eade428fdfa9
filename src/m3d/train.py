"""Fast classifier training: many networks at once, each with its own weights, order, augmentation and CutMix.

All networks' parameters are rows of one [R, P] buffer, so the optimiser is three elementwise operations for all. Data
stay on the device (``m3d.batches`` makes batches of them); on CUDA a step of all networks is one recorded graph.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from m3d import rng
from m3d.augment import Augment
from m3d.batches import Batches, Images, Looks, Shown
from m3d.errors import M3DError
from m3d.nets.flat import FlatNet
from m3d.photo import Photo
from m3d.runtime import Repeated, Runtime, out_of_memory

log = logging.getLogger(__name__)
_REFERENCE = 1024  # training images that give batch norms their statistics in a test
_TEST_PIXELS = 2**22  # of the images tested together: 1,000 up to 64 pixels a side, fewer above


@dataclass(frozen=True)
class Recipe:
    """How a classifier is trained on a set of images."""

    epochs: int
    batch: int
    lr: float
    momentum: float = 0.9
    weight_decay: float = 5e-4
    milestones: tuple[int, ...] = ()  # epochs at which the learning rate is multiplied by gamma
    gamma: float = 0.1
    fresh_momentum: bool = False  # whether the momentum starts from zero at a milestone
    augment: Augment = field(default_factory=Augment)  # drawn for every image; one_of is decided once per batch
    cutmix: float = 0.0  # probability of CutMix per batch
    photo: Photo | None = None  # what is done to photographs first, before they are normalised
    schedule: Literal["milestones", "linear"] = "milestones"  # linear: the rate falls to 0, epoch by epoch

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch < 1:
            raise M3DError(f"epochs={self.epochs}, batch={self.batch} is not valid; allowed: 1 and more")
        if not 0 < self.lr < math.inf:
            raise M3DError(f"a learning rate of {self.lr} is not valid to train networks; allowed: a positive number")
        if not 0 <= self.cutmix <= 1:
            raise M3DError(f"cutmix={self.cutmix} is not valid; allowed: a probability from 0 to 1")
        if self.schedule == "linear" and self.milestones:
            raise M3DError(f"milestones={self.milestones} do not go with a linear schedule; allowed: none")

    def rate(self, epoch: int) -> float:
        """The learning rate during ``epoch``."""
        if self.schedule == "linear":
            return self.lr * (1 - epoch / self.epochs)
        return self.lr * self.gamma ** sum(epoch >= m for m in self.milestones)

    def suited(self, *, mirror: bool, cutmix: bool) -> Recipe:
        """The same without what would spoil the images: mirrors, where they change the class, and CutMix."""
        augment = self.augment if mirror else self.augment.without("flip")
        return replace(self, augment=augment, cutmix=self.cutmix if cutmix else 0.0)

    def record(self) -> dict[str, Any]:
        """Everything that decides what is trained, for cache keys; they are older than the schedule."""
        named = {**asdict(self), "augment": str(self.augment)}
        if self.schedule == "milestones":
            del named["schedule"]
        return named


class Trainer:
    """R networks trained side by side on the same images."""

    def __init__(
        self,
        net: FlatNet,
        images: Images,
        recipe: Recipe,
        repeats: int,
        seed: int,
        runtime: Runtime,
        *,
        sample: int | None = None,
        first: int = 0,
        counts: bool = False,
    ):
        """With ``sample`` an epoch is that many images, the next ones of an endless shuffled reading of them all.

        ``first`` is the number of the first network: what a network starts from and is shown depends on its own number
        alone, so ten networks may be trained at once or in groups, and by several processes, some of which have none
        (``repeats`` 0). With ``counts``, ``right`` adds up how many images
        of the batches each network knew before it learned from them.
        """
        device = images.pixels.device
        self.net, self.images, self.recipe, self.seed, self.runtime = net, images, recipe, seed, runtime
        self.repeats = repeats
        self.lanes = torch.arange(first, first + repeats, device=device)
        looks = Looks(recipe.augment, recipe.cutmix, recipe.photo)
        self.batches = Batches(images, looks, recipe.batch, self.lanes, seed, runtime, sample)
        # Networks in one pass: fewer where memory is short, and one on a CPU, where it is no slower and where a network
        # is to be the same to the bit whoever else is trained beside it.
        self.at_once = max(1, repeats) if device.type == "cuda" else 1
        self.flat = net.fresh(seed, rng.Purpose.CLASSIFIER, self.lanes.new_zeros(1), self.lanes)  # [R, P]
        self.velocity = torch.zeros_like(self.flat, requires_grad=False)
        self.right = torch.zeros(repeats, dtype=torch.long, device=device) if counts else None  # [R]
        self.rate = torch.zeros((), device=device)
        self.epoch = 0
        self._steps: dict[tuple[int, bool], Repeated] = {}  # by batch size, and whether batches are made ahead

    def run(self, until: int) -> None:
        """Train up to the end of epoch ``until``."""
        if self.repeats == 0:
            self.epoch = max(self.epoch, until)
        batches = self.batches
        ahead = batches.worth_looking_ahead((until - self.epoch) * batches.steps_per_epoch)
        while self.epoch < until:
            self._begin_epoch()
            first = self.epoch % batches.epochs_per_block * batches.steps_per_epoch
            for k in range(batches.steps_per_epoch):
                if ahead:
                    batches.look_ahead(first + k)
                self._take_step(batches.size(k), ahead)
            self.epoch += 1

    def state(self) -> dict[str, Tensor]:
        """All that a later session needs to go on after the last finished epoch."""
        return {"flat": self.flat.detach(), "velocity": self.velocity, "epoch": torch.tensor(self.epoch)}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        self.flat.copy_(state["flat"])
        self.velocity.copy_(state["velocity"])
        self.epoch = int(state["epoch"])

    def _begin_epoch(self) -> None:
        self.batches.begin(self.epoch)
        self.rate.fill_(self.recipe.rate(self.epoch))
        if self.recipe.fresh_momentum and self.epoch in self.recipe.milestones:
            self.velocity.zero_()

    def _take_step(self, size: int, ahead: bool) -> None:
        while True:
            try:
                self._step_of(size, ahead)()
                return
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                self._train_fewer_at_once(error)

    def _train_fewer_at_once(self, error: RuntimeError) -> None:
        """Half as many networks at a time. Memory runs out before anything moved, so the step is simply tried again."""
        if self.at_once == 1:
            raise M3DError(
                f"one network and {self.batches.batch} images do not fit into memory; give a smaller batch or network"
            ) from error
        self.at_once = -(-self.at_once // 2)
        log.warning("not enough memory: %d networks at a time from here on", self.at_once)
        self._steps.clear()  # what was recorded belongs to the larger group
        if self.runtime.device.type == "cuda":
            torch.cuda.empty_cache()

    def _step_of(self, size: int, ahead: bool) -> Repeated:
        if (size, ahead) not in self._steps:
            self._steps[size, ahead] = Repeated(lambda: self._step(size, ahead), self.runtime)
        return self._steps[size, ahead]

    def _step(self, size: int, ahead: bool) -> None:
        """One SGD step of every network on its own batch of ``size`` images."""
        batch = self.batches.take(size, ahead)
        groups = [
            self._gradient(rows, Shown(*shown))
            for rows, *shown in zip(*(x.split(self.at_once) for x in (self.flat, *batch)), strict=True)
        ]
        gradients, known = (x[0] if len(x) == 1 else torch.cat(x) for x in zip(*groups, strict=True))
        with torch.no_grad():
            scale = self.runtime.loss_scale
            gradient = gradients if scale == 1 else gradients / scale
            gradient = gradient.add(self.flat, alpha=self.recipe.weight_decay)
            self.velocity.mul_(self.recipe.momentum).add_(gradient)
            self.flat.sub_(self.velocity * self.rate)
            if self.right is not None:
                self.right.add_(known)
        self.batches.advance()

    def _gradient(self, rows: Tensor, shown: Shown) -> tuple[Tensor, Tensor]:
        """(gradient [r, P] of the scaled loss, images known [r]) of some networks, ``rows`` [r, P]."""
        images, labels, other, share = shown
        flat = rows.detach().requires_grad_()
        logits = self.net(flat, images, self.runtime.dtype).logits  # [r, b, K]
        scores = functional.log_softmax(logits, dim=-1)
        first, second = (cross_entropy(scores, target) for target in (labels, other))
        loss = first * share + second * (1 - share)  # [r]: each network's mean on its own batch
        (gradient,) = torch.autograd.grad(loss.sum() * self.runtime.loss_scale, flat)
        classes = labels if labels.ndim == 2 else labels.argmax(-1)
        return gradient, (logits.detach().argmax(-1) == classes).sum(1)

    @torch.no_grad()
    def accuracy(self, test: Images, chunk: int = 1000) -> Tensor:
        """[R]: each network's accuracy on ``test``, in percent.

        Batch norms, where a network has them, take the statistics of (at most 1,024 of) the training images, as they
        are without augmentation.
        """
        many = min(len(self.images), _REFERENCE)
        reference = self.images.take(torch.linspace(0, len(self.images) - 1, many, device=self.flat.device).long())
        right = torch.zeros(self.repeats, dtype=torch.long, device=self.flat.device)
        chunk = min(chunk, max(1, _TEST_PIXELS // (test.pixels.shape[-2] * test.pixels.shape[-1])))
        for first in range(0, len(test), chunk):
            index = torch.arange(first, min(first + chunk, len(test)), device=self.flat.device)
            images, labels = test.take(index), test.labels[index]
            for r in range(self.repeats):
                row = self.flat[r : r + 1]
                logits = self.net.calibrated(row, images[None], reference[None], self.runtime.dtype).logits[0]
                right[r] += (logits.argmax(1) == labels).sum()
        return right.double() * (100 / len(test))


def cross_entropy(scores: Tensor, target: Tensor) -> Tensor:
    """[R]: the mean of −Σ_k p_k · log q_k over a batch.

    ``scores`` [R, b, K] are log q; ``target`` [R, b] holds classes, or [R, b, K] the probabilities p.
    """
    if target.ndim == 2:
        # Not a gather: its deterministic backward copies from the host, which no recorded step may do.
        each = functional.nll_loss(scores.flatten(0, 1), target.flatten(), reduction="none")
        return each.view(target.shape).mean(1)
    return -(scores * target).sum(-1).mean(1)
