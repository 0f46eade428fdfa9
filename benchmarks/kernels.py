"""Where a step's time goes: every kernel that a step of condensation, or of evaluation, launches, longest first.

    python benchmarks/kernels.py                      # on the GPU, the step as it is recorded, uncompiled
    python benchmarks/kernels.py --compile            # as the compiler makes it
    python benchmarks/kernels.py --eval-net densenet121:growth=12,norm=batch    # other networks in the evaluation
    python benchmarks/kernels.py --device cpu --small # a check that it runs: operations instead of kernels

The sizes are those of speed.py. Prints microseconds a step and launches a step; the sum is the time the device is busy,
to be held against the milliseconds of a step beside it: what is missing is waiting.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from speed import MEAN, STD, our_step, random_dataset, seconds, wait
from torch.profiler import ProfilerActivity, profile

from m3d.batches import Images
from m3d.evaluation import make_protocol
from m3d.nets import FlatNet, make_net
from m3d.normalise import Normalise
from m3d.runtime import Runtime
from m3d.train import Trainer


def kernels(call: Callable[[], Any], times: int, device: str) -> dict[str, tuple[float, float]]:
    """Of every kernel: (microseconds, launches), each per call."""
    gpu = device.startswith("cuda")
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(times):
            call()
        wait(device)
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in profiler.key_averages():
        spent = event.self_device_time_total if gpu else event.self_cpu_time_total
        found[event.key][0] += spent / times
        found[event.key][1] += event.count / times
    return {name: (spent, many) for name, (spent, many) in found.items() if spent > 0}


def show(title: str, call: Callable[[], Any], times: int, device: str, most: int) -> None:
    alone = seconds(call, times, device) * 1e6
    found = sorted(kernels(call, times, device).items(), key=lambda item: -item[1][0])
    busy, launches = (sum(value[k] for _, value in found) for k in (0, 1))
    print(f"\n{title}: {alone:.0f} us a call, busy {busy:.0f} us in {launches:.0f} launches of {len(found)} kinds")
    for name, (spent, many) in found[:most]:
        print(f"{spent:9.1f} us {many:6.1f} x  {name[:140]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--method", default="m3d")
    parser.add_argument("--ipc", type=int, default=10)
    parser.add_argument("--eval-net", default="convnet3", help="the networks of the evaluation")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--small", action="store_true", help="few small images: a check that it runs")
    parser.add_argument("--most", type=int, default=40, help="how many kernels to list")
    given = parser.parse_args()
    runtime = Runtime.choose(given.device, step_mode="compile" if given.compile else "eager")
    device, side = str(runtime.device), 16 if given.small else 32
    data = random_dataset(10, 16 if given.small else 1000, side, device)
    times, repeats = (1, 2) if given.small else (100, 10)
    with runtime.active():
        options = {"batch_real": 4} if given.small else {}
        step = our_step(data, given.ipc, runtime, name=given.method, **options)
        seconds(step, 2 if given.small else 10, device)  # libraries choose, the step is recorded
        show(f"a step of {given.method}, {given.ipc} images per class", step, times, device, given.most)
        images = Images(torch.rand(640, 3, side, side, device=device), torch.arange(640, device=device) % 10,
                        Normalise(MEAN, STD, device=device))  # fmt: skip
        net = FlatNet(make_net(given.eval_net, (3, side, side), 10), device)
        trainer = Trainer(net, images, make_protocol("paper").recipe, repeats, 0, runtime)

        def epoch() -> None:
            trainer.run(trainer.epoch + 1)

        seconds(epoch, 1 if given.small else 4, device)
        show(
            f"an epoch of {repeats} {given.eval_net}, ten batches of 64",
            epoch,
            1 if given.small else 20,
            device,
            given.most,
        )


if __name__ == "__main__":
    main()
