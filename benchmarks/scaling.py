"""How the cost of a step grows with classes, images per class, image size and real batch.

    python benchmarks/scaling.py                         # on the GPU, a few minutes
    python benchmarks/scaling.py --device cpu --small    # a check that it runs
    python benchmarks/scaling.py --memory-gib 24         # the same on a card with 24 GiB (a cap set in this process)
    python benchmarks/scaling.py --only ImageNet         # one series, by the beginning of its name

Each series varies one quantity around CIFAR-10 at 10 images per class, the last the classes of an ImageNet subset (224
pixels, ResNetAP-10, factor 3). Writes benchmarks/results/scaling-DEVICE.json and a plot beside it, with --only under a
name of their own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from speed import RESULTS, our_step, random_dataset, seconds, wait

from m3d.pictures import save_figure
from m3d.runtime import Runtime

_IMAGENET = {"side": 224, "per_class": 200, "network": "resnetap10", "factor": 3}
SERIES: dict[str, list[dict[str, Any]]] = {
    "classes": [{"classes": c} for c in (10, 20, 50, 100)],
    "images per class": [{"ipc": i} for i in (1, 10, 50)],
    "side in pixels": [{"side": s, "per_class": 200} for s in (32, 64, 128, 224)],
    "real images per class": [{"batch_real": b} for b in (32, 64, 128, 256, 512)],
    "classes at 50 images each": [{"classes": 100, "ipc": 50}],
    "ImageNet subset, classes": [{**_IMAGENET, "classes": c} for c in (10, 20)],
}
SMALL: dict[str, list[dict[str, Any]]] = {"classes": [{"classes": c, "batch_real": 4, "ipc": 1} for c in (2, 4)]}


def measure(
    runtime: Runtime,
    classes: int = 10,
    ipc: int = 10,
    side: int = 32,
    batch_real: int = 128,
    per_class: int = 1000,
    network: str = "convnet3",
    factor: int = 2,
) -> dict[str, Any]:
    """Milliseconds of a step and its peak memory for one setting; classes are halved as the engine would where they do
    not fit."""
    device = str(runtime.device)
    data = random_dataset(classes, max(per_class, 4 * ipc), side, device)
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    setting: dict[str, Any] = {"classes": classes, "ipc": ipc, "side": side, "batch_real": batch_real}
    setting |= {"network": network, "factor": factor}
    chunk = classes
    while True:
        step = our_step(data, ipc, runtime, chunk, network=network, batch_real=batch_real, factor=factor)
        try:
            for _ in range(6):
                step()
            wait(device)
            break
        except torch.OutOfMemoryError:
            if chunk == 1:
                return {**setting, "ms": None, "peak_gib": None}
            del step
            chunk = -(-chunk // 2)
            torch.cuda.empty_cache()
    per_step = min(seconds(step, 2 if device == "cpu" else 50, device) for _ in range(3))
    return {**setting, "classes_at_once": chunk, "ms": per_step * 1e3, "peak_gib": runtime.peak_memory() / 2**30}


def plot(series: dict[str, list[dict[str, Any]]], title: str, path: Path) -> None:
    names = [name for name, points in series.items() if len(points) > 1]
    figure = Figure(figsize=(2.6 * len(names), 2.6))
    keys = {
        "classes": "classes",
        "images per class": "ipc",
        "side in pixels": "side",
        "real images per class": "batch_real",
        "ImageNet subset, classes": "classes",
    }
    for k, name in enumerate(names):
        axes = figure.add_subplot(1, len(names), k + 1)
        known = [p for p in series[name] if p["ms"] is not None]
        axes.plot([p[keys[name]] for p in known], [p["ms"] for p in known], marker="o", color="#08519c")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks([p[keys[name]] for p in known], [str(p[keys[name]]) for p in known])
        axes.set_yticks(marks := _spread([p["ms"] for p in known]), [f"{ms:.3g}" for ms in marks])
        axes.minorticks_off()
        axes.set_xlabel(name)
        axes.spines[["top", "right"]].set_visible(False)
        if k == 0:
            axes.set_ylabel("ms per step")
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    save_figure(figure, path)


def _spread(values: list[float]) -> list[float]:
    """Those of ``values`` that stand far enough apart on a logarithmic axis to be labelled, the largest among them."""
    chosen: list[float] = []
    for value in sorted(values, reverse=True):
        if not chosen or chosen[-1] / value > (max(values) / min(values)) ** 0.12:
            chosen.append(value)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--memory-gib", type=float, default=None, help="let this process use no more than this")
    parser.add_argument("--only", default="", help="series whose names begin so")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    runtime = Runtime.choose(
        options.device, step_mode="eager"
    )  # compiling every setting would take longer than all steps
    if options.memory_gib is not None:
        total = torch.cuda.get_device_properties(runtime.device).total_memory
        torch.cuda.set_per_process_memory_fraction(options.memory_gib * 2**30 / total)
    label = f"scaling-{runtime.device.type}" + (f"-{options.memory_gib:g}gib" if options.memory_gib else "")
    label += f"-{options.only.lower().replace(' ', '-')}" if options.only else ""
    planned = SMALL if options.small else SERIES
    chosen = {name: settings for name, settings in planned.items() if name.startswith(options.only)}
    if not chosen:
        parser.error(f"no series begins with {options.only!r}; allowed: {', '.join(planned)}")
    series: dict[str, list[dict[str, Any]]] = {}
    with runtime.active():
        for name, settings in chosen.items():
            series[name] = []
            for setting in settings:
                with runtime.counting_memory():
                    point = measure(runtime, **setting)
                series[name].append(point)
                print(name, point, flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    report = {**runtime.describe(), "memory_gib": options.memory_gib, "series": series}
    (options.out / f"{label}.json").write_text(json.dumps(report, indent=2) + "\n")
    title = f"{report['device']}, torch {report['torch']}, {report['precision']}, uncompiled"
    cap = f", at most {options.memory_gib:g} GiB" if options.memory_gib else ""
    plot(series, title + cap, options.out / f"{label}.png")


if __name__ == "__main__":
    main()
