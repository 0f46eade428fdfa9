"""Class-sorted images, resident on one device, and the dataset made of them (others: :mod:`m3d.data.streamed`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from m3d import rng
from m3d.errors import M3DError
from m3d.normalise import Normalise, Zca
from m3d.wording import counted

_VALUES = 2**20  # looked at together: a wider copy of a whole dataset would not fit
Statistics: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of each channel


class Reader(Protocol):
    """Where a run's steps get their real images: fixed addresses, whatever is behind them."""

    def bring(self, step: int) -> None:
        """See to it, before the step, that its images are on the device."""
        ...

    def take(self, index: Tensor, classes: Tensor) -> Tensor:
        """Within the step: images [c, n, ch, h, w] float32 in [0, 1] of ``classes`` [c], ``index`` [c, n] its deck."""
        ...


class _ResidentReader:
    """All images are on the device already: a step's are one indexing operation."""

    def __init__(self, data: ClassData):
        self.data = data

    def bring(self, step: int) -> None:
        """They are there."""

    def take(self, index: Tensor, classes: Tensor) -> Tensor:
        return self.data.take(index, classes)


class ClassData:
    """All images of a split in one uint8 tensor, sorted by class: class c is ``images[start[c]:start[c] + count[c]]``.

    A step's images of every class are one indexing operation: ``data.take(data.deck(...))``.
    """

    def __init__(self, images: Tensor, count: Tensor):
        """``images`` [N, ch, h, w] uint8, sorted by class; ``count`` [C] int64, how many each class has."""
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise M3DError(f"images must be uint8 [N, ch, h, w], got {images.dtype} {list(images.shape)}")
        if int(count.sum()) != len(images):
            raise M3DError(f"{len(images)} images but class counts that sum to {int(count.sum())}")
        self._images = images
        self.count = count
        self.start = torch.cumsum(count, 0) - count  # [C]

    @classmethod
    def from_labels(cls, images: np.ndarray, labels: np.ndarray, class_names: Sequence[str], split: str) -> ClassData:
        """From ``images`` [N, h, w, ch] uint8 and ``labels`` [N] in any order. Every class must have an image."""
        if len(images) != len(labels):
            raise M3DError(f"{split}: {len(images)} images but {len(labels)} labels")
        if len(labels) and not 0 <= labels.min() <= labels.max() < len(class_names):
            raise M3DError(
                f"{split}: labels run from {labels.min()} to {labels.max()}; allowed: 0 to {len(class_names) - 1}"
            )
        count = np.bincount(labels, minlength=len(class_names))
        for name, n in zip(class_names, count, strict=True):
            if n == 0:
                raise M3DError(f"{split}: class {name!r} has no image; every class needs at least one")
        order = np.argsort(labels, kind="stable")
        pixels = np.ascontiguousarray(images[order].transpose(0, 3, 1, 2))
        return cls(torch.from_numpy(pixels), torch.from_numpy(count.astype(np.int64)))

    @property
    def images(self) -> Tensor:
        """[N, ch, h, w] uint8."""
        return self._images

    def __len__(self) -> int:
        return len(self.images)

    @property
    def classes(self) -> int:
        return len(self.count)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(ch, h, w) of an image."""
        ch, h, w = self.images.shape[1:]
        return ch, h, w

    @property
    def device(self) -> torch.device:
        return self.images.device

    def to(self, device: torch.device | str) -> ClassData:
        moved = ClassData(self.images.to(device), self.count.to(device))
        if "fingerprint" in self.__dict__:  # cached: it would be read back from the device and worked out again
            moved.__dict__["fingerprint"] = self.fingerprint
        return moved

    def labels(self) -> Tensor:
        """[N] int64."""
        return torch.repeat_interleave(torch.arange(self.classes, device=self.device), self.count)

    def take(self, index: Tensor, classes: Tensor | None = None) -> Tensor:
        """Images [C, n, ch, h, w] float32 in [0, 1] for ``index`` [C, n] within each class, or each of ``classes``."""
        start = self.start if classes is None else self.start[classes]
        return self.images[start[:, None] + index].float() / 255

    def deck(
        self,
        seed: int,
        steps: Tensor,
        n: int,
        purpose: rng.Purpose = rng.Purpose.REAL,
        classes: Tensor | None = None,
    ) -> Tensor:
        """[S, C, n]: which images of each class, or each of ``classes``, enter each of ``steps`` [S].

        Every class is read in shuffled passes, each image once a pass; step t takes positions t·n to t·n + n - 1.
        """
        position = steps[:, None, None] * n + torch.arange(n, device=steps.device)
        lanes = torch.arange(self.classes, device=steps.device) if classes is None else classes
        return rng.shuffled(seed, purpose, position, lanes, self.count[lanes])

    def reader(
        self, seed: int, n: int, purpose: rng.Purpose = rng.Purpose.REAL, classes: range | None = None
    ) -> Reader:
        """Reads the deck of ``n`` images per class and step of :meth:`deck`, of some classes (None: all)."""
        return _ResidentReader(self)

    def part(self, index: Tensor, count: Tensor) -> ClassData:
        """The images number ``index`` [M] of these, sorted by class, ``count`` [C] of each class."""
        return ClassData(self.images[index], count)

    def statistics(self) -> Statistics:
        return channel_statistics(self.images)

    def split(self, fraction: float, seed: int) -> tuple[ClassData, ClassData]:
        """(rest, held out): a stratified part of ``fraction`` of every class, at least one image each side."""
        (keep, kept), (away, held) = stratified(
            self.count.cpu(), fraction, seed, rng.Purpose.SPLIT, f"val_fraction={fraction}"
        )
        here = self.device
        return self.part(keep.to(here), kept.to(here)), self.part(away.to(here), held.to(here))

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over shape, class counts and pixels: equal for equal data, whatever file it came from."""
        digest = hashlib.sha256(repr((tuple(self.images.shape), self.count.tolist())).encode())
        digest.update(self.images.cpu().numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Dataset:
    """A labelled image dataset: what ``m3d.load_data`` returns."""

    name: str
    train: ClassData
    test: ClassData
    class_names: tuple[str, ...]
    mean: tuple[float, ...]  # per channel, of pixels in [0, 1]
    std: tuple[float, ...]
    mirror: bool = True  # whether a mirrored image still shows its class (not so for digits)
    val: ClassData | None = None  # the held-out part of the training data, if one was asked for
    recipe: Mapping[str, Any] = field(default_factory=dict)  # arguments that load this dataset again
    zca: Zca | None = None  # the whitening that follows standardisation, if one was asked for
    cutmix: bool = True  # whether training may paste parts of its images into others (not so for MNIST)
    resident: str = "auto"  # whether the device of a run holds all training images: yes, no, or if they fit

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.train.shape

    @property
    def transform(self) -> dict[str, str]:
        """What happens to images beside standardisation, as an entry of records and of cache keys; empty: nothing."""
        return {} if self.zca is None else {"transform": str(self.zca)}

    def normalise(self, device: torch.device | None = None) -> Normalise:
        """How pixels of this dataset become what networks take, on ``device`` (None: where the images are)."""
        device = self.train.device if device is None else device
        return Normalise(self.mean, self.std, None if self.zca is None else self.zca.on(device), device)

    def to(self, device: torch.device | str) -> Dataset:
        from m3d.data.streamed import placed  # which extends ClassData

        val = None if self.val is None else self.val.to(device)
        train = placed(self.train, device, self.resident)
        return replace(self, train=train, test=self.test.to(device), val=val)

    def hold_out(self, fraction: float, seed: int) -> Dataset:
        """The same dataset with a stratified ``fraction`` of the training data moved to ``val``; 0 changes nothing."""
        if not 0 <= fraction < 1:
            raise M3DError(f"val_fraction={fraction} is not valid; allowed: 0 up to, but not including, 1")
        if fraction == 0:
            return self
        rest, held = self.train.split(fraction, seed)
        return replace(self, train=rest, val=held)


def stratified(
    count: Tensor, fraction: float, seed: int, purpose: rng.Purpose, name: str
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(rest, held out) of images sorted by class, ``count`` [C] of each: which ones, and how many of each class.

    Held out is ``fraction`` of every class, at least one image on each side; ``name`` says what asked for it.
    """
    held = (count * fraction).round().long().clamp(min=1)
    if bool((held >= count).any()):
        least = int(count.min())
        raise M3DError(f"{name}: the smallest class has {counted(least, 'images')}, too few to hold out a part")
    keep, away, start = [], [], 0
    for c in range(len(count)):
        lane, size = torch.tensor([c]), count[c : c + 1]
        position = torch.arange(int(size))[None, None]
        order = rng.shuffled(seed, purpose, position, lane, size).flatten() + start
        away.append(order[: held[c]].sort().values)
        keep.append(order[held[c] :].sort().values)
        start += int(size)
    return (torch.cat(keep), count - held), (torch.cat(away), held)


def channel_statistics(images: Tensor | Iterable[Tensor]) -> Statistics:
    """Mean and standard deviation of each channel of ``images`` [N, ch, h, w] uint8, as pixels in [0, 1].

    Sums of whole numbers are exact, so images that come some at a time have the statistics of all at once.
    """
    n, total, square = 0, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for part in (images,) if isinstance(images, Tensor) else images:
        for chunk in torch.split(part, max(1, _VALUES // part[0].numel())):
            pixels = chunk.int()
            n += pixels.shape[0] * pixels.shape[2] * pixels.shape[3]
            total = total + pixels.sum((0, 2, 3)).cpu()
            square = square + pixels.square().sum((0, 2, 3)).cpu()
    mean = total.double() / n / 255
    std = (square.double() / n / 255**2 - mean.square()).clamp(min=1e-6).sqrt()
    return tuple(mean.tolist()), tuple(std.tolist())
