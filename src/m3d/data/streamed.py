"""Class data that stay on the host, in memory or mapped from a file, and come to the device a few steps at a time."""

from __future__ import annotations

import hashlib
import mmap
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from m3d import rng
from m3d.data.classes import ClassData, Reader, Statistics, channel_statistics
from m3d.errors import M3DError
from m3d.wording import option

_STAGED = 2**28  # bytes of images that wait on the device at once; twice as many wait on the host
_MOST_STEPS = 64
_AT_ONCE = 2**23  # bytes read in one go, after which the pages of a mapped file are let go
_DEVICE_SHARE = 0.5  # of the device's free memory that images may take; the rest is for networks


class HostImages:
    """Images [N, ch, h, w] uint8 of which only those asked for are touched."""

    def __init__(self, pixels: np.ndarray, source: mmap.mmap | None = None):
        self.pixels, self._source = pixels, source

    @classmethod
    def mapped(cls, file: Path, shape: tuple[int, ...]) -> HostImages:
        """The images in a file of nothing but pixels."""
        with file.open("rb") as handle:
            source = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        if len(source) != int(np.prod(shape)):
            raise ValueError(f"{file.name} has {len(source)} bytes, expected {int(np.prod(shape))}")
        if hasattr(mmap, "MADV_RANDOM"):
            source.madvise(mmap.MADV_RANDOM)  # neighbours of an image are not wanted next
        return cls(np.frombuffer(source, np.uint8).reshape(shape), source)

    def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Images number ``rows`` [n] into ``out`` [n, ch, h, w]."""
        step = max(1, _AT_ONCE // self.pixels[0].nbytes)
        for first in range(0, len(rows), step):
            part = slice(first, first + step)
            np.take(self.pixels, rows[part], axis=0, out=out[part], mode="clip")  # any other mode copies twice
            self.release()

    def release(self) -> None:
        """Give the pages back: they stay in the system's file cache, but not in this process's memory."""
        if self._source is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._source.madvise(mmap.MADV_DONTNEED)


class StreamedData(ClassData):
    """Class data on the host, for a run on ``device``. ``rows`` [N]: which images of the host's these are (None: all).

    A step's images are gathered by the reader; :attr:`images` brings all of them at once, where they fit.
    """

    def __init__(
        self,
        host: HostImages,
        count: np.ndarray | Tensor,
        rows: np.ndarray | None = None,
        device: torch.device | str = "cpu",
        known: tuple[str, Statistics] | None = None,
    ):
        """``known``: fingerprint and statistics, where an earlier look at all pixels has left them."""
        self.host, self.rows, self._device, self._known = host, rows, torch.device(device), known
        self.count = torch.as_tensor(count, dtype=torch.int64).to(device)
        self.start = torch.cumsum(self.count, 0) - self.count
        if int(self.count.sum()) != len(self):
            raise M3DError(f"{len(self)} images but class counts that sum to {int(self.count.sum())}")

    def __len__(self) -> int:
        return len(self.host.pixels) if self.rows is None else len(self.rows)

    @property
    def shape(self) -> tuple[int, int, int]:
        ch, h, w = self.host.pixels.shape[1:]
        return ch, h, w

    @property
    def device(self) -> torch.device:
        return self._device

    def to(self, device: torch.device | str) -> StreamedData:
        """The same images on the host, for use on ``device``."""
        return StreamedData(self.host, self.count, self.rows, device, self._known)

    @cached_property
    def _all(self) -> Tensor:
        need, free = len(self) * int(np.prod(self.shape)), free_memory(self.device)
        if self.device.type == "cpu" and self.rows is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that it cannot be written to: nobody does
                return torch.from_numpy(self.host.pixels)
        if need > free:
            raise M3DError(
                f"this needs all {len(self)} images at once, {need / 1e9:.1f} GB, and {self.device} has "
                f"{free / 1e9:.1f} GB free; lower {option('size')}, or use a method that reads a batch at a time "
                f"(m3d, dm, dc)"
            )
        images = torch.empty(len(self), *self.shape, dtype=torch.uint8, device=self.device)
        first = 0
        for chunk in self.chunks():
            images[first : first + len(chunk)] = chunk.to(self.device)
            first += len(chunk)
        return images

    @property
    def images(self) -> Tensor:
        """All images on the device at once, for what cannot do without."""
        return self._all

    def chunks(self) -> Iterator[Tensor]:
        """All images in order, some at a time, on the host."""
        step = max(1, _AT_ONCE // int(np.prod(self.shape)))
        for first in range(0, len(self), step):
            rows = np.arange(first, min(first + step, len(self)))
            yield torch.from_numpy(self._gather(rows))

    def _gather(self, index: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Images [n, ch, h, w] number ``index`` [n] of these."""
        out = np.empty((len(index), *self.shape), np.uint8) if out is None else out
        self.host.gather(index if self.rows is None else self.rows[index], out)
        return out

    def take(self, index: Tensor, classes: Tensor | None = None) -> Tensor:
        start = self.start if classes is None else self.start[classes]
        rows = (start[:, None] + index).cpu().numpy()
        pixels = self._gather(rows.ravel()).reshape(*rows.shape, *self.shape)
        return torch.from_numpy(pixels).to(self.device).float() / 255

    def reader(
        self, seed: int, n: int, purpose: rng.Purpose = rng.Purpose.REAL, classes: range | None = None
    ) -> Reader:
        return StreamedReader(self, seed, n, purpose, range(self.classes) if classes is None else classes)

    def part(self, index: Tensor, count: Tensor) -> StreamedData:
        chosen = index.cpu().numpy()
        return StreamedData(self.host, count, chosen if self.rows is None else self.rows[chosen], self.device)

    def statistics(self) -> Statistics:
        return self._known[1] if self._known else channel_statistics(self.chunks())

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint that the same images have in memory."""
        if self._known:
            return self._known[0]
        digest = hashlib.sha256(repr(((len(self), *self.shape), self.count.tolist())).encode())
        for chunk in self.chunks():
            digest.update(chunk.numpy().data)
        return digest.hexdigest()


class StreamedReader:
    """The images of some steps at fixed addresses on the device, while a thread gathers those of the next steps.

    The thread makes no call to the device: another thread's would spoil the recording of a CUDA graph.
    """

    def __init__(self, data: StreamedData, seed: int, n: int, purpose: rng.Purpose, classes: range):
        self.host, self.seed, self.n, self.purpose, self.classes = data.to("cpu"), seed, n, purpose, classes
        step_bytes = len(classes) * n * int(np.prod(data.shape))
        self.steps = min(_MOST_STEPS, max(1, _STAGED // step_bytes))
        shape, self.cuda = (self.steps, len(classes), n, *data.shape), data.device.type == "cuda"
        self.staged = torch.zeros(shape, dtype=torch.uint8, device=data.device)
        self.slot = torch.zeros(1, dtype=torch.long, device=data.device)
        self._buffers = [torch.empty(shape, dtype=torch.uint8, pin_memory=self.cuda) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)] if self.cuda else []
        self._first = self._ahead = -1  # first of the steps that are staged, and of those being gathered
        self._thread = ThreadPoolExecutor(1)
        self._gathering: Future[None] | None = None

    def bring(self, step: int) -> None:
        """Have the images of ``step`` on the device, and begin to gather those that follow."""
        first = step - step % self.steps
        if first != self._first:
            if first != self._ahead:
                self._begin(first)
            assert self._gathering is not None
            self._gathering.result()
            side = first // self.steps % 2
            self.staged.copy_(self._buffers[side], non_blocking=True)
            if self.cuda:
                self._copied[side].record()
            self._first = first
            self._begin(first + self.steps)
        self.slot.fill_(step - first)

    def _begin(self, first: int) -> None:
        """Gather the images of the steps from ``first`` on in the background."""
        if self._gathering is not None:
            self._gathering.result()
        side = first // self.steps % 2
        if self.cuda:
            self._copied[side].synchronize()  # what was there before has reached the device
        self._ahead = first
        self._gathering = self._thread.submit(self._gather, first, self._buffers[side])

    def _gather(self, first: int, out: Tensor) -> None:
        lanes = torch.arange(self.classes.start, self.classes.stop)
        deck = self.host.deck(self.seed, torch.arange(first, first + self.steps), self.n, self.purpose, lanes)
        rows = (self.host.start[lanes, None] + deck).flatten().numpy()  # [S · c · n]
        self.host._gather(rows, out.numpy().reshape(-1, *self.host.shape))

    def take(self, index: Tensor, classes: Tensor) -> Tensor:
        """Images [c, n, ch, h, w] float32 in [0, 1] of ``classes`` in the step brought last; ``index`` is its deck."""
        return self.staged[self.slot, classes - self.classes.start].float() / 255


def placed(data: ClassData, device: torch.device | str, resident: str) -> ClassData:
    """``data`` for a run on ``device``: all of it there, or streamed to it (auto: where it takes half of what is free).

    On the CPU data are left where loading has put them.
    """
    device = torch.device(device)
    need = len(data) * int(np.prod(data.shape))
    if device.type == "cpu" and resident != "yes":
        return data.to(device)
    fits = device == data.device or need <= _DEVICE_SHARE * free_memory(device)
    if resident == "no" or (resident == "auto" and not fits):
        if isinstance(data, StreamedData):
            return data.to(device)
        return StreamedData(HostImages(data.images.cpu().numpy()), data.count, None, device)
    if isinstance(data, StreamedData):
        return ClassData(data.to(device).images, data.count.to(device))
    return data.to(device)


def free_memory(device: torch.device) -> int:
    """Bytes free on ``device``."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_memory()


def available_memory() -> int:
    """Bytes of main memory that can be had without swapping, as far as the system says; a container's limit counts."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file, start in (("/proc/meminfo", "MemAvailable:"), ("/sys/fs/cgroup/memory.max", "")):
        try:
            lines = [line for line in Path(file).read_text().splitlines() if line.startswith(start)]
        except OSError:
            continue  # not on this system
        words = lines[0].removeprefix(start).split() if lines else []
        if words and words[0].isdigit():
            free = min(free, int(words[0]) * (1024 if start else 1))
    return free
