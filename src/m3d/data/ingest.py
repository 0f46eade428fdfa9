"""From a listing of encoded images to class data: small ones decoded into memory, large ones into a file.

What cannot be decoded is an error, or left out and written down.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from m3d.data import cache
from m3d.data.cache import good_count
from m3d.data.classes import ClassData
from m3d.data.streamed import available_memory
from m3d.decode import BadImage, Encoded, Look, decode, is_grey
from m3d.errors import M3DError, unknown
from m3d.files import write_bytes
from m3d.wording import option

log = logging.getLogger(__name__)
RESIDENT = ("auto", "yes", "no")
ON_BAD_IMAGE = ("error", "skip")
_REPORT_EVERY = 100  # images
_SHARE = 0.25  # of the free memory: larger data stay on the disk, for splitting and moving them needs as much again


@dataclass(frozen=True)
class Handling:
    """What is done with images beyond looking at them."""

    on_bad_image: str = "error"
    resident: str = "auto"  # whether all images are held in memory
    progress: Callable[[int, int], None] | None = None  # (images decoded, images)

    def __post_init__(self) -> None:
        if self.on_bad_image not in ON_BAD_IMAGE:
            raise unknown("on_bad_image", self.on_bad_image, ON_BAD_IMAGE)
        if self.resident not in RESIDENT:
            raise unknown("resident", self.resident, RESIDENT)


class Source(Protocol):
    """Encoded images of a split, sorted by class."""

    class_names: tuple[str, ...]
    count: np.ndarray  # [C] int64, how many each class has

    def __len__(self) -> int: ...
    def name(self, index: int) -> str:
        """What a person calls this image."""
        ...

    def encoded(self, first: int, last: int) -> Sequence[Encoded]:
        """The images from number ``first`` up to, not including, ``last``."""
        ...

    def key(self) -> str:
        """A digest that changes with the images; cheap."""
        ...


def read(train: Source, test: Source, size: int | None, handling: Handling) -> tuple[ClassData, ClassData]:
    """Both splits, in memory or in the cache on the disk. Training images decide whether there are colours."""
    key = hashlib.sha256(f"1 {train.key()} {test.key()} {size}".encode()).hexdigest()[:32]
    if handling.resident != "yes" and cache.exists(key):
        return _judged((train, test), *cache.opened(key, (train, test)), handling, key)
    grey = _all_grey(train, handling.on_bad_image)
    look = Look(grey, size)
    shape, model = _model(train, look, handling.on_bad_image)
    task = Task(train, test, look, shape, model, handling)
    total = (len(train) + len(test)) * int(np.prod(shape))
    if handling.resident == "no" or (handling.resident == "auto" and total > _SHARE * available_memory()):
        cache.build(key, task)
        return _judged((train, test), *cache.opened(key, (train, test)), handling, key)
    images = len(train) + len(test)
    parts, bads = zip(
        *(_decode_all(task, s, before, images) for s, before in ((train, 0), (test, len(train)))), strict=True
    )
    return _judged((train, test), parts, bads, handling, key)


@dataclass(frozen=True)
class Task:
    """Two splits and what their images are brought to."""

    train: Source
    test: Source
    look: Look
    shape: tuple[int, int, int]  # (ch, h, w)
    model: str  # the image that the shape comes from
    handling: Handling

    def odd(self, name: str, width: int, height: int) -> M3DError:
        """The error for an image of another size than the first."""
        _, h, w = self.shape
        return M3DError(
            f"images differ in size: {self.model} is {w}×{h}, {name} is {width}×{height}; "
            f"bring them to one size with {option('size')}"
        )


def _all_grey(source: Source, on_bad_image: str) -> bool:
    """Whether no image has colours; the first that has ends the search."""
    for index in range(len(source)):
        try:
            if not is_grey(source.encoded(index, index + 1)[0]):
                return False
        except BadImage as error:
            if on_bad_image == "error":
                raise unreadable(source, index, str(error)) from error
    return True


def _model(source: Source, look: Look, on_bad_image: str) -> tuple[tuple[int, int, int], str]:
    """(shape, name) of the first image that can be read: all must have its size."""
    for index in range(len(source)):
        try:
            ch, h, w = decode(source.encoded(index, index + 1)[0], look).shape
        except BadImage as error:
            if on_bad_image == "error":
                raise unreadable(source, index, str(error)) from error
            continue
        return (ch, h, w), source.name(index)
    raise M3DError(f"{Path(source.name(0)).parent}: none of the {len(source)} images can be read")


def _decode_all(task: Task, source: Source, before: int, total: int) -> tuple[ClassData, dict[int, str]]:
    """All images of a split, decoded by several threads straight into the array that is kept; and the bad ones.

    ``before`` images of all ``total`` were decoded before.
    """
    images = np.empty((len(source), *task.shape), np.uint8)  # [N, ch, h, w]
    bad: dict[int, str] = {}

    def place(index: int) -> None:
        """Decode one image into its place."""
        try:
            pixels = decode(source.encoded(index, index + 1)[0], task.look)
        except BadImage as error:
            if task.handling.on_bad_image == "error":
                raise unreadable(source, index, str(error)) from error
            bad[index] = str(error)
            return
        if pixels.shape != task.shape:
            raise task.odd(source.name(index), pixels.shape[2], pixels.shape[1])
        images[index] = pixels

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # Pillow decodes outside Python's lock
        report = task.handling.progress
        for index, _ in enumerate(pool.map(place, range(len(source))), before + 1):
            # In order, so that of several bad images the first is named.
            if report is not None and (index % _REPORT_EVERY == 0 or index == total):
                report(index, total)
    images = np.delete(images, sorted(bad), axis=0) if bad else images
    return ClassData(torch.from_numpy(images), torch.from_numpy(good_count(source, bad))), bad


def _judged(
    sources: tuple[Source, Source],
    parts: Sequence[ClassData],
    bads: Sequence[dict[int, str]],
    handling: Handling,
    key: str,
) -> tuple[ClassData, ClassData]:
    """The two splits; bad images are an error, or named in a report. No class may be left without images."""
    lines = [f"{s.name(i)}\t{bad[i]}" for s, bad in zip(sources, bads, strict=True) for i in sorted(bad)]
    if lines and handling.on_bad_image == "error":
        source, bad = next((s, bad) for s, bad in zip(sources, bads, strict=True) if bad)
        raise unreadable(source, min(bad), bad[min(bad)])
    report = cache.root() / "bad-images" / f"{key}.txt"
    if lines:
        write_bytes(report, ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape"))
        log.warning("%d of %d images cannot be read and are left out: %s", len(lines), sum(map(len, sources)), report)
    for source, part in zip(sources, parts, strict=True):
        for c in (part.count == 0).nonzero().flatten().tolist():
            where = Path(source.name(int(source.count[:c].sum()))).parent
            raise M3DError(
                f"{where}: class {source.class_names[c]!r} has no image that can be read"
                f"{getattr(source, 'which', '')}; see {report}"
            )
    return parts[0], parts[1]


def unreadable(source: Source, index: int, reason: str) -> M3DError:
    """The error for an image that is none, or a damaged one."""
    return M3DError(
        f"{source.name(index)}: cannot be read as an image ({reason}); {option('on_bad_image', 'skip')} leaves it out"
    )
