"""Ten networks trained at once against the same ten one by one: accuracies and seconds.

    python benchmarks/stacked.py RUN                 # a condensed CIFAR-10 set, on the GPU, about two minutes
    python benchmarks/stacked.py RUN --epochs 20 --repeats 2

Network number r starts from the same weights and sees the same images, augmentation and CutMix both ways; only rounding
differs, and grows over thousands of steps, so the single accuracies differ while their means must agree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from speed import RESULTS, wait

import m3d
from m3d.api import load_source
from m3d.batches import Images
from m3d.evaluation import make_protocol
from m3d.nets import FlatNet, make_net
from m3d.runtime import Runtime
from m3d.train import Recipe, Trainer


def accuracies(
    train: Images, test: Images, net: FlatNet, repeats: int, at_once: int, recipe: Recipe, runtime: Runtime
) -> tuple[list[float], float]:
    """(accuracy of each network, seconds of training) in groups of ``at_once``."""
    values: list[float] = []
    spent = 0.0
    for first in range(0, repeats, at_once):
        began = time.perf_counter()
        trainer = Trainer(net, train, recipe, at_once, 0, runtime, first=first)
        trainer.run(recipe.epochs)
        wait(str(runtime.device))
        spent += time.perf_counter() - began
        values += trainer.accuracy(test).tolist()
    return values, spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--net", default="convnet3")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    condensed = m3d.CondensedSet.load(options.run)
    data, runtime = load_source(condensed), Runtime.choose(options.device)
    device = runtime.device
    pixels, labels = (x.to(device) for x in condensed.decoded())
    train = Images(pixels, labels, data.normalise(device))
    test = Images(data.test.images.to(device), data.test.labels().to(device), data.normalise(device))
    net = FlatNet(make_net(options.net, data.shape, data.classes), device)
    recipe = make_protocol("paper", epochs=options.epochs).recipe
    report: dict[str, Any] = {**runtime.describe(), "set": condensed.fingerprint, "repeats": options.repeats}
    with runtime.active():
        for name, at_once in (("at once", options.repeats), ("one by one", 1)):
            values, spent = accuracies(train, test, net, options.repeats, at_once, recipe, runtime)
            report[name] = {"mean": statistics.fmean(values), "accuracies": values, "seconds": spent}
            print(f"{name}: {statistics.fmean(values):.2f} %, {spent:.1f} s", flush=True)
    out = options.out or RESULTS / f"stacked-{device.type}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
