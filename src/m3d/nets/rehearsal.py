"""Own Triton kernels compiled by a second process while PyTorch compiles the step, so that a first run starts sooner.

A Triton compilation holds Python's lock, so threads would not help. The second process (this file, run as a script)
sends images of the run's sizes through the network once, which leaves its kernels in Triton's cache on the disk, where
the run finds them. Nothing else comes of it: if it fails or is late, the run compiles its kernels itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, Popen

import torch
from torch import Tensor

from m3d.nets import make_net
from m3d.nets.flat import FlatNet
from m3d.rng import Purpose
from m3d.version import __version__

_ROOM = 8 * 2**30  # bytes that must be free on the device
_started: list[Popen[bytes]] = []  # kept: Python complains of a process that is forgotten while it runs


def start(
    net: FlatNet, shape: tuple[int, int, int], classes: int, real: int, synthetic: int, dtype: torch.dtype
) -> Popen[bytes] | None:
    """Begin it for ``real`` and ``synthetic`` images, unless that was done before with the same cache."""
    if torch.cuda.mem_get_info()[0] < _ROOM:  # it takes memory for a moment, as a step does
        return None
    device = torch.cuda.get_device_name()
    task = [net.spec, list(shape), classes, real, synthetic, str(dtype).removeprefix("torch.")]
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
    spec: str, shape: Sequence[int], classes: int, real: int, synthetic: int, dtype: str, device: str = "cuda"
) -> Tensor:
    """Send images through the network as a step does: real ones forward, synthetic ones forward and back."""
    channels, height, width = shape
    net = FlatNet(make_net(spec, (channels, height, width), classes), device)
    first = torch.zeros(1, dtype=torch.long, device=device)
    flat = net.fresh(0, Purpose.ENCODER, first, first)
    kind: torch.dtype = getattr(torch, dtype)
    with torch.no_grad():
        net(flat, torch.rand(1, real, *shape, device=device), kind)
    images = torch.rand(1, synthetic, *shape, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(net(flat, images, kind).features.float().sum(), images)
    return gradient


if __name__ == "__main__":
    rehearse(*json.loads(sys.argv[1]))
