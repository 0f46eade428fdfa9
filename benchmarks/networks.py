"""Ten networks trained side by side, as channels of one, against the same ten one after the other: ms of a step.

    python benchmarks/networks.py                    # the networks of the cross-architecture table, on a GPU
    python benchmarks/networks.py --nets 'resnet18;vgg11' --repeats 5 --side 64

Side by side they are timed twice: through the library's convolutions, and with our kernels for the narrow ones. All
ways take the same steps: batches, augmentation and CutMix of the ``paper`` protocol and SGD are in every number.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from speed import RESULTS, wait

from m3d.batches import Images
from m3d.evaluation import make_protocol
from m3d.nets import FlatNet, grouped, make_net
from m3d.nets.single import Grouped, Single
from m3d.normalise import Normalise
from m3d.runtime import Runtime
from m3d.train import Trainer

NETS = ("resnet10:width=32,norm=batch", "densenet121:growth=12,norm=batch")
WARM_UP, EPOCHS = 2, 4


@contextmanager
def one_by_one() -> Iterator[None]:
    together = Grouped.stacked
    Grouped.stacked = Single.stacked  # type: ignore[method-assign]
    try:
        yield
    finally:
        Grouped.stacked = together  # type: ignore[method-assign]


@contextmanager
def narrow_kernels(wanted: bool) -> Iterator[None]:
    usual = grouped.NARROW_KERNELS
    grouped.NARROW_KERNELS = wanted
    try:
        yield
    finally:
        grouped.NARROW_KERNELS = usual


def milliseconds(spec: str, side: int, images: int, repeats: int, runtime: Runtime) -> float:
    """Of a step of ``repeats`` networks."""
    device = runtime.device
    pixels = torch.rand(images, 3, side, side, device=device)
    labels = torch.arange(images, device=device) % 10
    train = Images(pixels, labels, Normalise((0.5,) * 3, (0.25,) * 3).to(device))
    net = FlatNet(make_net(spec, (3, side, side), 10), device)
    trainer = Trainer(net, train, make_protocol("paper").recipe, repeats, 0, runtime)
    trainer.run(WARM_UP)
    wait(str(device))
    began = time.perf_counter()
    trainer.run(WARM_UP + EPOCHS)
    wait(str(device))
    return 1e3 * (time.perf_counter() - began) / (EPOCHS * trainer.batches.steps_per_epoch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default=";".join(NETS), help="separated by semicolons")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--images", type=int, default=640)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    runtime = Runtime.choose(options.device)
    if runtime.device.type != "cuda":
        parser.error(f"on {runtime.device.type} all networks run one by one; side by side they do on a GPU alone")
    report: dict[str, Any] = {**runtime.describe(), "repeats": options.repeats, "side": options.side, "ms": {}}
    sizes = (options.side, options.images, options.repeats, runtime)
    with runtime.active():
        for spec in options.nets.split(";"):
            found = report["ms"][spec] = {}
            with narrow_kernels(False):
                found["side by side"] = milliseconds(spec, *sizes)
            with narrow_kernels(True):
                found["side by side, our kernels"] = milliseconds(spec, *sizes)
            with one_by_one():
                found["one by one"] = milliseconds(spec, *sizes)
            print(f"{spec}: " + ", ".join(f"{way} {ms:.2f} ms" for way, ms in found.items()), flush=True)
    out = options.out or RESULTS / f"networks-{runtime.device.type}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
