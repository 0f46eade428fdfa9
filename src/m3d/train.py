"""Fast classifier training: many networks at once, each with its own weights, order, augmentation and CutMix.

All networks' parameters are rows of one [R, P] buffer, so the optimiser is three elementwise operations for all. Data
stay on the device; draws are made for many steps at a time, keyed by (seed, step, network); on CUDA a step of all
networks is one recorded graph.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from m3d import rng
from m3d.augment import NUMBERS, UNIFORMS, Augment, Parameters
from m3d.errors import M3DError
from m3d.nets.flat import FlatNet
from m3d.normalise import Normalise
from m3d.photo import UNIFORMS as PHOTO_UNIFORMS
from m3d.photo import Photo
from m3d.runtime import Repeated, Runtime, out_of_memory, pick

log = logging.getLogger(__name__)
_REFERENCE = 1024  # training images that give batch norms their statistics in a test
_TEST_PIXELS = 2**22  # of the images tested together: 1,000 up to 64 pixels a side, fewer above
_BLOCK_STEPS = 64  # draws are made for at least this many steps together


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
        if not 0 <= self.cutmix <= 1:
            raise M3DError(f"cutmix={self.cutmix} is not valid; allowed: a probability from 0 to 1")
        if self.schedule == "linear" and self.milestones:
            raise M3DError(f"milestones={self.milestones} do not go with a linear schedule; allowed: none")

    def rate(self, epoch: int) -> float:
        """The learning rate during ``epoch``."""
        if self.schedule == "linear":
            return self.lr * (1 - epoch / self.epochs)
        return self.lr * self.gamma ** sum(epoch >= m for m in self.milestones)

    def record(self) -> dict[str, Any]:
        """Everything that decides what is trained, for cache keys; they are older than the schedule."""
        named = {**asdict(self), "augment": str(self.augment)}
        if self.schedule == "milestones":
            del named["schedule"]
        return named


class Images:
    """Labelled images on the device, uint8 or float pixels in [0, 1], normalised when taken."""

    def __init__(self, pixels: Tensor, labels: Tensor, normalise: Normalise | None):
        """``normalise`` None: ``pixels`` are normalised already. ``labels``: [N] classes, or [N, K] probabilities."""
        self.pixels, self.labels, self.normalise = pixels, labels, normalise  # [N, ch, h, w], [N] or [N, K]

    def __len__(self) -> int:
        return len(self.pixels)

    def take(self, index: Tensor) -> Tensor:
        """Normalised float32 images [..., ch, h, w] for ``index`` [...]."""
        return self.seen(self.plain(index))

    def seen(self, pixels: Tensor) -> Tensor:
        """``pixels`` as networks take them."""
        return pixels if self.normalise is None else self.normalise(pixels)

    def plain(self, index: Tensor) -> Tensor:
        """Float32 pixels in [0, 1] for ``index``."""
        pixels = self.pixels[index]
        return pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels

    def prepared(self) -> Images:
        """The same images, for reading many times: whitened once, where they are whitened (4 bytes a value)."""
        if self.normalise is None or self.normalise.whitening is None:
            return self
        parts = torch.arange(len(self), device=self.pixels.device).split(1000)
        return Images(torch.cat([self.take(part) for part in parts]), self.labels, None)


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
        if recipe.photo is not None and images.normalise is None:
            raise M3DError("photographs are augmented before they are normalised; whitened images (zca) cannot be")
        device = images.pixels.device
        self.sample, self.length = sample, sample or len(images)  # images an epoch has
        self.net, self.images, self.recipe, self.seed, self.runtime = net, images, recipe, seed, runtime
        self.repeats, self.batch = repeats, min(recipe.batch, self.length)
        # Networks in one pass: fewer where memory is short, and one on a CPU, where it is no slower and where a network
        # is to be the same to the bit whoever else is trained beside it.
        self.at_once = max(1, repeats) if device.type == "cuda" else 1
        self.steps_per_epoch = -(-self.length // self.batch)
        self.epochs_per_block = max(1, _BLOCK_STEPS // self.steps_per_epoch)
        self.lanes = torch.arange(first, first + repeats, device=device)
        self.flat = net.fresh(seed, rng.Purpose.CLASSIFIER, self.lanes.new_zeros(1), self.lanes)  # [R, P]
        self.velocity = torch.zeros_like(self.flat, requires_grad=False)
        self.right = torch.zeros(repeats, dtype=torch.long, device=device) if counts else None  # [R]
        self.rate = torch.zeros((), device=device)
        self.epoch = 0
        self._filled = -1  # which block of epochs the draws below belong to
        block = self.epochs_per_block * self.steps_per_epoch
        self.slot = torch.zeros(1, dtype=torch.long, device=device)
        self.index = torch.zeros(block, repeats, self.batch, dtype=torch.long, device=device)
        self._size = (images.pixels.shape[-2], images.pixels.shape[-1])
        self.augmentation = torch.zeros(block, repeats, self.batch, NUMBERS, device=device)
        self.photo = torch.zeros(block, repeats, self.batch, PHOTO_UNIFORMS if recipe.photo else 0, device=device)
        self.mix = torch.zeros(block, repeats, 4, device=device)
        self.partner = torch.zeros(block, repeats, self.batch, dtype=torch.long, device=device)
        self._steps: dict[int, Repeated] = {}  # by batch size: the last batch of an epoch may be smaller

    def run(self, until: int) -> None:
        """Train up to the end of epoch ``until``."""
        if self.repeats == 0:
            self.epoch = max(self.epoch, until)
        while self.epoch < until:
            self._begin_epoch()
            for k in range(self.steps_per_epoch):
                size = min(self.batch, self.length - k * self.batch)
                self._take_step(size)
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
        block, within = divmod(self.epoch, self.epochs_per_block)
        if block != self._filled:
            self._refill(block * self.epochs_per_block)
            self._filled = block
        self.slot.fill_(within * self.steps_per_epoch)
        self.rate.fill_(self.recipe.rate(self.epoch))
        if self.recipe.fresh_momentum and self.epoch in self.recipe.milestones:
            self.velocity.zero_()

    @torch.no_grad()
    def _refill(self, epoch: int) -> None:
        """Draw orders, augmentation and CutMix for a block of epochs."""
        device, n, k = self.lanes.device, self.length, self.steps_per_epoch
        epochs = torch.arange(epoch, epoch + self.epochs_per_block, device=device)
        if self.sample is None:
            order = rng.permutation(self.seed, rng.Purpose.ORDER, epochs, self.lanes, n)  # [E, R, N]
        else:
            position = (epochs[:, None, None] * n + torch.arange(n, device=device)).expand(-1, self.repeats, -1)
            decks = torch.full_like(self.lanes, len(self.images))
            order = rng.shuffled(self.seed, rng.Purpose.ORDER, position, self.lanes, decks)
        padded = functional.pad(order, (0, k * self.batch - n)).unflatten(-1, (k, self.batch))
        self.index.copy_(padded.movedim(2, 1).flatten(0, 1))
        steps = torch.arange(epoch * k, (epoch + self.epochs_per_block) * k, device=device)
        usual, more = self.batch * UNIFORMS, self.batch * self.photo.shape[-1]
        draws = rng.uniform(self.seed, rng.Purpose.TRAIN_AUGMENT, steps, self.lanes, usual + more)
        uniforms = draws[..., :usual].unflatten(-1, (self.batch, UNIFORMS))
        uniforms[..., 0] = uniforms[..., :1, 0]  # one choice of operation per network and batch
        numbers = self.recipe.augment.parameters(uniforms.flatten(0, 2), self._size).packed()
        self.augmentation.copy_(numbers.view(self.augmentation.shape))
        self.photo.copy_(draws[..., usual:].unflatten(-1, self.photo.shape[-2:]))
        self.mix.copy_(rng.uniform(self.seed, rng.Purpose.CUTMIX, steps, self.lanes, 4))
        self.partner.copy_(rng.bits(self.seed, rng.Purpose.PARTNER, steps, self.lanes, self.batch))

    def _take_step(self, size: int) -> None:
        while True:
            try:
                self._step_of(size)()
                return
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                self._train_fewer_at_once(error)

    def _train_fewer_at_once(self, error: RuntimeError) -> None:
        """Half as many networks at a time. Memory runs out before anything moved, so the step is simply tried again."""
        if self.at_once == 1:
            raise M3DError(
                f"one network and {self.batch} images do not fit into memory; give a smaller batch or network"
            ) from error
        self.at_once = -(-self.at_once // 2)
        log.warning("not enough memory: %d networks at a time from here on", self.at_once)
        self._steps.clear()  # what was recorded belongs to the larger group
        if self.runtime.device.type == "cuda":
            torch.cuda.empty_cache()

    def _step_of(self, size: int) -> Repeated:
        if size not in self._steps:
            self._steps[size] = Repeated(lambda: self._step(size), self.runtime)
        return self._steps[size]

    def _step(self, size: int) -> None:
        """One SGD step of every network on its own batch of ``size`` images."""
        batch = self._batch(size)
        groups = [
            self._gradient(*group) for group in zip(*(x.split(self.at_once) for x in (self.flat, *batch)), strict=True)
        ]
        gradients, known = (x[0] if len(x) == 1 else torch.cat(x) for x in zip(*groups, strict=True))
        with torch.no_grad():
            gradient = (gradients / self.runtime.loss_scale).add(self.flat, alpha=self.recipe.weight_decay)
            self.velocity.mul_(self.recipe.momentum).add_(gradient)
            self.flat.sub_(self.velocity * self.rate)
            if self.right is not None:
                self.right.add_(known)
        self.slot.add_(1)

    @torch.no_grad()
    def _batch(self, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(images [R, b, ...], labels, CutMix partners' labels, share of the first label [R]).

        Labels are [R, b] classes, or [R, b, K] probabilities.
        """
        index = pick(self.index, self.slot)[:, :size]
        images = self.images.plain(index)
        shape = images.shape
        if self.recipe.photo is not None:
            photo = pick(self.photo, self.slot)[:, :size].flatten(0, 1)
            images = self.recipe.photo(images.flatten(0, 1), photo).view(shape)
        images = self.images.seen(images)
        parameters = Parameters.unpacked(pick(self.augmentation, self.slot)[:, :size].flatten(0, 1))
        images = self.recipe.augment.apply(images.flatten(0, 1)[:, None], parameters).view(shape)
        labels = self.images.labels[index]
        if self.recipe.cutmix == 0:
            return images, labels, labels, torch.ones(self.repeats, device=images.device)
        partner = torch.argsort(pick(self.partner, self.slot)[:, :size], dim=-1, stable=True)
        images, share = cutmix(images, partner, pick(self.mix, self.slot), self.recipe.cutmix)
        return images, labels, labels[torch.arange(self.repeats, device=labels.device)[:, None], partner], share

    def _gradient(
        self, rows: Tensor, images: Tensor, labels: Tensor, other: Tensor, share: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(gradient [r, P] of the scaled loss, images known [r]) of some networks, ``rows`` [r, P]."""
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


def cutmix(images: Tensor, partner: Tensor, u: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    """Paste a box of each image's partner into it: one box per network, λ ~ U(0, 1), with ``probability``.

    ``images`` [R, b, ch, h, w]; ``partner`` [R, b] a permutation of the batch; ``u`` [R, 4] uniform numbers. Returns
    the images and the share of each image's own label [R], which is the area the box really left.
    """
    h, w = images.shape[-2:]
    side = torch.sqrt(1 - u[:, 1])  # λ is the share that stays

    def span(length: int, centre: Tensor) -> Tensor:  # [R, length]: inside the box along one axis
        half = torch.floor(length * side) / 2
        middle = torch.floor(centre * length)
        low, high = (middle - torch.floor(half)).clamp(min=0), (middle + torch.floor(half)).clamp(max=length)
        place = torch.arange(length, device=images.device)
        return (place >= low[:, None]) & (place < high[:, None])

    box = span(h, u[:, 2])[:, :, None] & span(w, u[:, 3])[:, None, :]
    box &= (u[:, 0] < probability)[:, None, None]
    others = images[torch.arange(len(images), device=images.device)[:, None], partner]
    mixed = torch.where(box[:, None, None], others, images)
    return mixed, 1 - box.float().mean((1, 2))
