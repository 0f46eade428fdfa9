"""What a step of every method takes: all of it, the training of networks between steps included.

    python benchmarks/methods.py                         # CIFAR-10 sizes, 1 and 10 images per class, on the GPU
    python benchmarks/methods.py --methods dc,dsa --compile
    python benchmarks/methods.py --device cpu --small    # a check that it runs

Data are random images of CIFAR-10's size; networks that are trained before the first step are trained for an epoch
only. Prints milliseconds a step (the fastest of some rounds) and peak memory; writes
benchmarks/results/methods-DEVICE.json.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from speed import RESULTS, our_step, random_dataset, seconds

from m3d.data import Dataset
from m3d.methods import METHODS, Task, make_method
from m3d.runtime import Runtime

# What is trained before the first step, as little of it as will do: it is no part of a step.
_TRAINED_BEFORE: dict[str, dict[str, Any]] = {
    **{name: {"encoders": 2, "encoder_epochs": 1} for name in ("m3d+", "dance", "dsdm", "ncfm")},
    "mtt": {"experts": 1},
}


def measure(name: str, data: Dataset, ipc: int, runtime: Runtime, small: bool) -> dict[str, Any]:
    """Milliseconds a step, peak memory, and seconds until the first steps were done."""
    device, rounds, most = str(runtime.device), 1 if small else 3, 1.0  # seconds a round, about
    options = {**_TRAINED_BEFORE.get(name, {}), **({"batch_real": 4} if small and name != "mtt" else {})}
    if device.startswith("cuda"):
        precision = make_method(name, Task(data.name, data.shape, data.classes, ipc), options)[0].gpu_precision
        runtime = replace(runtime, precision=precision)
        torch.cuda.empty_cache()
    with runtime.active(), runtime.counting_memory():
        began = time.perf_counter()
        call = our_step(data, ipc, runtime, name=name, **options)
        first = seconds(call, 1 if small else 6, device)  # libraries choose, the step is recorded
        ready = time.perf_counter() - began
        times = max(1, min(500, int(most / max(min(first, seconds(call, 1, device)), 1e-4))))
        fastest = min(seconds(call, times, device) for _ in range(rounds))
    return {"ms": fastest * 1e3, "peak_gib": runtime.peak_memory() / 2**30, "ready_seconds": ready, "steps": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--methods", default="", help="some of them, with commas between; default all")
    parser.add_argument("--ipc", default="1,10")
    parser.add_argument("--compile", action="store_true", help="compile every step")
    parser.add_argument("--small", action="store_true", help="few small images: a check that it runs")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    mode = "compile" if given.compile else "eager"
    runtime = Runtime.choose(given.device, step_mode=mode)
    device = str(runtime.device)
    data = random_dataset(10, 16 if given.small else 5000, 16 if given.small else 32, device)
    moving = [n for n in METHODS.names() if make_method(n, Task(data.name, data.shape, 10, 1), {})[0].matching]
    names = given.methods.split(",") if given.methods else moving
    out = given.out or RESULTS / f"methods-{runtime.device.type}{'-compiled' if given.compile else ''}.json"
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["M3D_CACHE"] = cache
        for name in names:
            for ipc in map(int, given.ipc.split(",")):
                row = {"method": name, "ipc": ipc, **measure(name, data, ipc, runtime, given.small)}
                rows.append(row)
                print(f"{name:10} ipc {ipc:3}  {row['ms']:9.2f} ms  {row['peak_gib']:6.2f} GiB", flush=True)
                record = {"mode": mode, **runtime.describe(), "methods": rows}
                out.write_text(json.dumps(record, indent=1) + "\n")  # what is measured stands, wherever it is stopped


if __name__ == "__main__":
    main()
