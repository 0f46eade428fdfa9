"""What networks are shown in training: which images of the data, how augmented, mixed with which others.

Draws are made for a block of epochs at a time, keyed by (seed, step, network), into fixed buffers. On CUDA the batches
of many steps are also made together where they are small: a network that sees 64 images a step would otherwise wait for
dozens of tiny operations on them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from m3d import rng
from m3d.augment import NUMBERS, UNIFORMS, Augment, Parameters
from m3d.errors import M3DError
from m3d.normalise import Normalise
from m3d.photo import UNIFORMS as PHOTO_UNIFORMS
from m3d.photo import Photo
from m3d.runtime import Repeated, Runtime

_BLOCK_STEPS = 64  # draws are made for at least this many steps together
_VALUES_AHEAD = 2**23  # of the images that are made together: 32 MB, and some times that on the way
_FEW_STEPS = 16  # of an epoch: up to here batches are made ahead for several epochs, for longer ones within each
_LAST = 2**40  # larger than any number that orders partners


class Images:
    """Labelled images on the device, uint8 or float pixels (0 black, 1 white), normalised when taken."""

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
        """Float32 pixels for ``index``."""
        pixels = self.pixels[index]
        return pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels

    def prepared(self) -> Images:
        """The same images, for reading many times: whitened once, where they are whitened (4 bytes a value)."""
        if self.normalise is None or self.normalise.whitening is None:
            return self
        parts = torch.arange(len(self), device=self.pixels.device).split(1000)
        return Images(torch.cat([self.take(part) for part in parts]), self.labels, None)


class Looks(NamedTuple):
    """What is done to an image on its way into a batch."""

    augment: Augment  # drawn for every image; one_of is decided once per batch
    cutmix: float = 0.0  # probability of CutMix per batch
    photo: Photo | None = None  # what is done to photographs first, before they are normalised


class Shown(NamedTuple):
    """A step's batch of each of R networks."""

    images: Tensor  # [R, b, ch, h, w], as networks take them
    labels: Tensor  # [R, b] classes, or [R, b, K] probabilities
    other: Tensor  # the same of the CutMix partners
    share: Tensor  # [R]: how much the first label counts


class Batches:
    """The batches of R networks, ``batch`` images each, epoch after epoch; the last one of an epoch may be smaller."""

    def __init__(
        self, images: Images, looks: Looks, batch: int, lanes: Tensor, seed: int, runtime: Runtime, sample: int | None
    ):
        """``lanes`` [R] number the networks. With ``sample`` an epoch is that many images, the next ones of an endless
        shuffled reading of them all."""
        if looks.photo is not None and images.normalise is None:
            raise M3DError("photographs are augmented before they are normalised; whitened images (zca) cannot be")
        device, shape, repeats = images.pixels.device, images.pixels.shape[1:], len(lanes)
        self.images, self.looks, self.lanes, self.seed = images, looks, lanes, seed
        self.sample, self.length = sample, sample or len(images)  # images an epoch has
        self.batch = min(batch, self.length)
        self.steps_per_epoch = -(-self.length // self.batch)
        self.epochs_per_block = max(1, _BLOCK_STEPS // self.steps_per_epoch)
        self._size = (int(shape[-2]), int(shape[-1]))
        self._filled = -1  # which block of epochs the draws below belong to
        block = self.epochs_per_block * self.steps_per_epoch
        self.slot = torch.zeros(1, dtype=torch.long, device=device)  # which step of the block is next
        self.index = torch.zeros(block, repeats, self.batch, dtype=torch.long, device=device)
        self.augmentation = torch.zeros(block, repeats, self.batch, NUMBERS, device=device)
        self.photo = torch.zeros(block, repeats, self.batch, PHOTO_UNIFORMS if looks.photo else 0, device=device)
        self.mix = torch.zeros(block, repeats, 4, device=device)
        self.partner = torch.zeros(block, repeats, self.batch, dtype=torch.long, device=device)
        # Batches made ahead: how many together, their buffers, which of them is next, and how many are left.
        self.ahead = steps_ahead(self.steps_per_epoch, repeats * self.batch * shape.numel(), device.type)
        self._ready: Shown | None = None
        self._next = torch.zeros_like(self.slot)
        self._left = 0
        self._make_ahead = Repeated(self._fill_ready, runtime)

    def size(self, step: int) -> int:
        """Images per network in step ``step`` of an epoch."""
        return min(self.batch, self.length - step * self.batch)

    def begin(self, epoch: int) -> None:
        """Draw what ``epoch`` needs, and point at its first step."""
        block, within = divmod(epoch, self.epochs_per_block)
        if block != self._filled:
            self._refill(block * self.epochs_per_block)
            self._filled = block
        self.slot.fill_(within * self.steps_per_epoch)

    @torch.no_grad()
    def _refill(self, epoch: int) -> None:
        """Draw orders, augmentation and CutMix for a block of epochs."""
        device, n, k, repeats = self.lanes.device, self.length, self.steps_per_epoch, len(self.lanes)
        epochs = torch.arange(epoch, epoch + self.epochs_per_block, device=device)
        if self.sample is None:
            order = rng.permutation(self.seed, rng.Purpose.ORDER, epochs, self.lanes, n)  # [E, R, N]
        else:
            position = (epochs[:, None, None] * n + torch.arange(n, device=device)).expand(-1, repeats, -1)
            decks = torch.full_like(self.lanes, len(self.images))
            order = rng.shuffled(self.seed, rng.Purpose.ORDER, position, self.lanes, decks)
        padded = functional.pad(order, (0, k * self.batch - n)).unflatten(-1, (k, self.batch))
        self.index.copy_(padded.movedim(2, 1).flatten(0, 1))
        steps = torch.arange(epoch * k, (epoch + self.epochs_per_block) * k, device=device)
        usual, more = self.batch * UNIFORMS, self.batch * self.photo.shape[-1]
        draws = rng.uniform(self.seed, rng.Purpose.TRAIN_AUGMENT, steps, self.lanes, usual + more)
        uniforms = draws[..., :usual].unflatten(-1, (self.batch, UNIFORMS))
        uniforms[..., 0] = uniforms[..., :1, 0]  # one choice of operation per network and batch
        numbers = self.looks.augment.parameters(uniforms.flatten(0, 2), self._size).packed()
        self.augmentation.copy_(numbers.view(self.augmentation.shape))
        self.photo.copy_(draws[..., usual:].unflatten(-1, self.photo.shape[-2:]))
        self.mix.copy_(rng.uniform(self.seed, rng.Purpose.CUTMIX, steps, self.lanes, 4))
        self.partner.copy_(rng.bits(self.seed, rng.Purpose.PARTNER, steps, self.lanes, self.batch))
        self.partner[k - 1 :: k, :, self.size(k - 1) :] = _LAST  # a smaller batch is mixed within itself

    def worth_looking_ahead(self, steps: int) -> bool:
        """Before ``steps`` steps: whether to make their batches ahead. What was made before is forgotten, for the
        images may have changed."""
        self._left = 0
        return self.ahead > 1 and 2 * steps > self.ahead

    def look_ahead(self, step: int) -> None:
        """Make sure that the batch of step ``step`` of the block is ready."""
        if self._left == 0:
            self._make_ahead()
            self._left = min(self.ahead, len(self.index) - step)
        self._left -= 1

    @torch.no_grad()
    def _fill_ready(self) -> None:
        """Make the next ``ahead`` batches; past the end of the block the last one again."""
        offsets = torch.arange(self.ahead, device=self.slot.device)
        made = self.make((self.slot + offsets).clamp(max=len(self.index) - 1))
        if self._ready is None:
            self._ready = Shown(*(part.clone() for part in made))
        for place, part in zip(self._ready, made, strict=True):
            place.copy_(part)
        self._next.zero_()

    def take(self, size: int, ahead: bool) -> Shown:
        """The next step's batch, ``size`` images of each network; made ahead, or now."""
        if ahead:
            assert self._ready is not None
            shown = Shown(*(part.index_select(0, self._next)[0] for part in self._ready))
        else:
            shown = Shown(*(part[0] for part in self.make(self.slot)))
        return Shown(shown.images[:, :size], shown.labels[:, :size], shown.other[:, :size], shown.share)

    def advance(self) -> None:
        self.slot.add_(1)
        self._next.add_(1)

    @torch.no_grad()
    def make(self, slots: Tensor) -> Shown:
        """The whole batches of steps ``slots`` [m] of the block: every part of :class:`Shown` has m in front."""
        index = self.index[slots]  # [m, R, b]
        images = self.images.plain(index)
        shape = images.shape
        if self.looks.photo is not None:
            images = self.looks.photo(images.flatten(0, 2), self.photo[slots].flatten(0, 2)).view(shape)
        images = self.images.seen(images)
        parameters = Parameters.unpacked(self.augmentation[slots].flatten(0, 2))
        images = self.looks.augment.apply(images.flatten(0, 2)[:, None], parameters).view(shape)
        labels = self.images.labels[index]
        if self.looks.cutmix == 0:
            return Shown(images, labels, labels, torch.ones(shape[:2], device=images.device))
        partner = torch.argsort(self.partner[slots], dim=-1, stable=True)
        mixed, share = cutmix(
            images.flatten(0, 1), partner.flatten(0, 1), self.mix[slots].flatten(0, 1), self.looks.cutmix
        )
        return Shown(mixed.view(shape), labels, self.images.labels[index.gather(2, partner)], share.view(shape[:2]))


def steps_ahead(per_epoch: int, values: int, device: str) -> int:
    """How many steps' batches, of ``values`` values each, are made together: as many as fit, and as will be used."""
    if device != "cuda":
        return 1  # small operations stay in a CPU's caches
    used = per_epoch if per_epoch > _FEW_STEPS else _BLOCK_STEPS // per_epoch * per_epoch
    return max(1, min(_VALUES_AHEAD // max(1, values), used))


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
