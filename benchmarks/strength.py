"""What it costs networks with batch norm that a set's images are stronger than real ones.

    python benchmarks/strength.py RUN                # a condensed set, tested on what was held out when it was made
    python benchmarks/strength.py RUN --epochs 20 --repeats 2

Through batch norm a method does not see how strong its images are, but a network trained on them is tested by their
statistics. The set is measured as it is, and with its images, as networks take them, brought to the real images'
standard deviation. Writes results/strength-DEVICE.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from speed import RESULTS
from stacked import accuracies

import m3d
from m3d.api import load_source
from m3d.batches import Images
from m3d.evaluation import make_protocol
from m3d.nets import FlatNet, make_net
from m3d.runtime import Runtime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--protocol", default="datadam")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    condensed = m3d.CondensedSet.load(options.run)
    data, runtime = load_source(condensed), Runtime.choose(options.device)
    device, normalise = runtime.device, data.normalise(runtime.device)
    judges = data.test if data.val is None else data.val
    test, real = (Images(part.images.to(device), part.labels().to(device), normalise) for part in (judges, data.train))
    pixels, labels = (x.to(device) for x in condensed.decoded())
    seen = normalise(pixels)
    usual = float(real.take(real.labels.new_tensor(range(0, len(real), 50))).std())
    net = FlatNet(make_net(condensed.manifest["net"], data.shape, data.classes), device)
    recipe = make_protocol(options.protocol, epochs=options.epochs).recipe.suited(
        mirror=data.mirror, cutmix=data.cutmix
    )
    report: dict[str, Any] = {
        **runtime.describe(),
        "set": condensed.fingerprint,
        "condensation": {k: condensed.manifest[k] for k in ("method", "options", "net", "seed", "command", "commit")},
        "split": "test" if data.val is None else "val",
        "protocol": {"name": options.protocol, "epochs": recipe.epochs},
        "deviation": {"real": usual, "set": float(seen.std())},
    }
    with runtime.active():
        for name, images in (("as it is", seen), ("as strong as real images", seen * (usual / seen.std()))):
            values, _ = accuracies(
                Images(images, labels, None), test, net, options.repeats, options.repeats, recipe, runtime
            )
            report[name] = {"mean": statistics.fmean(values), "accuracies": values}
            print(f"{name}: deviation {float(images.std()):.2f}, {statistics.fmean(values):.2f} %", flush=True)
    out = options.out or RESULTS / f"strength-{device.type}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
