"""Kernels of networks and augmentation compiled by a second process while PyTorch compiles the step: a sooner start.

A Triton compilation holds Python's lock, so threads would not help. The second process (this file, run as a script)
augments images of the run's sizes and sends them through the network once, which leaves the kernels in Triton's cache
on the disk, where the run finds them. Nothing else comes of it: if it fails or is late, the run compiles its kernels
itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import NamedTuple

import torch
from torch import Tensor

from m3d.augment import UNIFORMS, Augment
from m3d.nets import make_net
from m3d.nets.flat import FlatNet
from m3d.rng import Purpose
from m3d.version import __version__

_ROOM = 8 * 2**30  # bytes that must be free on the device
_started: list[Popen[bytes]] = []  # kept: Python complains of a process that is forgotten while it runs


class Sizes(NamedTuple):
    """Of a step: the classes that go through at once, and the images of each."""

    classes: int
    real: int
    synthetic: int


def start(
    net: FlatNet, shape: tuple[int, int, int], classes: int, sizes: Sizes, augment: Augment, dtype: torch.dtype
) -> Popen[bytes] | None:
    """Begin it for a step of ``sizes``, unless that was done before with the same cache."""
    if torch.cuda.mem_get_info()[0] < _ROOM:  # it takes memory for a moment, as a step does
        return None
    device = torch.cuda.get_device_name()
    task = [net.spec, list(shape), classes, list(sizes), str(augment), str(dtype).removeprefix("torch.")]
    digest = hashlib.sha256(json.dumps([__version__, torch.__version__, device, task]).encode()).hexdigest()[:16]
    command = [sys.executable, "-m", __name__, json.dumps(task)]
    try:
        folder = _cache()
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"m3d-rehearsed-{digest}").open("a") as mark:
            # PyTorch's compiler moves the cache in the middle of a run unless it is named, and it can be used.
            os.environ.setdefault("TRITON_CACHE_DIR", str(folder))
            if mark.tell():  # done before
                return None
            mark.write("begun\n")
        _started.append(Popen(command, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL))
    except (OSError, RuntimeError):  # nothing can be kept, or begun: the run does without
        return None
    return _started[-1]


def _cache() -> Path:
    """Where Triton keeps what it compiles."""
    given, home = os.environ.get("TRITON_CACHE_DIR"), os.environ.get("TRITON_HOME")
    return Path(given) if given else Path(home or Path.home()) / ".triton" / "cache"


def rehearse(
    spec: str, shape: Sequence[int], classes: int, sizes: Sequence[int], augment: str, dtype: str, device: str = "cuda"
) -> Tensor:
    """Augment images and send them through the network as a step does: real ones forward, synthetic ones and back."""
    channels, height, width = shape
    net = FlatNet(make_net(spec, (channels, height, width), classes), device)
    first = torch.zeros(1, dtype=torch.long, device=device)
    flat = net.fresh(0, Purpose.ENCODER, first, first)
    kind: torch.dtype = getattr(torch, dtype)
    at_once, real, synthetic = sizes
    operations = Augment.parse(augment)
    parameters = operations.parameters(torch.rand(at_once, UNIFORMS, device=device), (height, width))

    def features(images: Tensor) -> Tensor:
        return net(flat, operations.apply(images, parameters).flatten(0, 1)[None], kind).features.float()

    with torch.no_grad():
        features(torch.rand(at_once, real, *shape, device=device))
    images = torch.rand(at_once, synthetic, *shape, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(features(images).sum(), images)
    return gradient


if __name__ == "__main__":
    rehearse(*json.loads(sys.argv[1]))
