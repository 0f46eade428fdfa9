"""The demonstration's step on a CPU: threads, precision and compiling, measured in turn.

    python benchmarks/demo.py            # minutes, most of them the compiler's
    python benchmarks/demo.py --small    # a check that it runs, without compiling

Writes results/demo-cpu.json: milliseconds a step of ``m3d demo`` (the embedded digits, one image per class) for each
way, and what compiling costs before the first step. Nothing else should be running.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from speed import RESULTS, our_step, seconds

from m3d.data import load_data
from m3d.demo import NET, OPTIONS
from m3d.runtime import Runtime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "demo-cpu.json")
    given = parser.parse_args()
    cores, usual = os.cpu_count() or 1, torch.get_num_threads()
    ways = [(threads, precision, "eager") for precision in ("fp32", "bf16") for threads in sorted({1, cores})]
    ways += [] if given.small else [(cores, "fp32", "compile")]
    data, steps = load_data("digits"), 3 if given.small else 100
    calls, ready = [], []
    for threads, precision, mode in ways:
        torch.set_num_threads(threads)
        runtime = Runtime.choose("cpu", precision, step_mode=mode)
        with runtime.active():
            began = time.perf_counter()
            calls.append(our_step(data, 1, runtime, network=NET, **OPTIONS))
            calls[-1]()
            ready.append(time.perf_counter() - began)
    rounds: list[list[float]] = [[] for _ in ways]
    for _ in range(1 if given.small else given.rounds):
        for (threads, precision, _), call, found in zip(ways, calls, rounds, strict=True):
            torch.set_num_threads(threads)
            with Runtime.choose("cpu", precision).active():
                found.append(seconds(call, steps, "cpu") * 1e3)
    torch.set_num_threads(usual)
    rows: list[dict[str, Any]] = []
    for (threads, precision, mode), first, found in zip(ways, ready, rounds, strict=True):
        row = {"threads": threads, "precision": precision, "mode": mode, "ms": statistics.median(found)}
        rows.append({**row, "rounds_ms": found, "first_step_seconds": first})
        print(f"{threads} threads, {precision}, {mode}: {row['ms']:.2f} ms a step, first step after {first:.1f} s")
    report = {**Runtime.choose("cpu").describe(), "cores": cores, "step": rows}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
