"""Step and evaluation side by side with the public loop, in one process, alternating.

    python benchmarks/speed.py                      # CIFAR-10 sizes on the GPU, a few minutes
    python benchmarks/speed.py --device cpu --small # a quick look anywhere

Work per step: 10 classes, 10 images each, factor 2, 128 real images per class, ConvNet-3, Gaussian kernel. Data are
random images of CIFAR-10's size (speed does not depend on what they show). Prints ratios, milliseconds, peak memory,
and the achieved TFLOP/s and GB/s beside the device's measured ceilings; writes benchmarks/results/speed-DEVICE.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from public_loop import PublicCondenser, make_network, public_epoch

from m3d.batches import Images
from m3d.data import ClassData, Dataset
from m3d.evaluation import make_protocol
from m3d.methods import Task, make_method
from m3d.nets import FlatNet, make_net
from m3d.normalise import Normalise
from m3d.runtime import Repeated, Runtime
from m3d.step import BLOCK, Step
from m3d.train import Trainer

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
RESULTS = Path(__file__).parent / "results"


def random_dataset(classes: int, per_class: int, side: int, device: str) -> Dataset:
    pixels = np.random.default_rng(0).integers(0, 256, (classes * per_class, side, side, 3), dtype=np.uint8)
    names = tuple(map(str, range(classes)))
    train = ClassData.from_labels(pixels, np.arange(len(pixels)) % classes, names, "train")
    return Dataset("random", train, train, names, MEAN, STD).to(device)


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def seconds(call: Callable[[], Any], times: int, device: str) -> float:
    """Mean seconds of one call; the device is idle before and after."""
    wait(device)
    began = time.perf_counter()
    for _ in range(times):
        call()
    wait(device)
    return (time.perf_counter() - began) / times


def our_step(
    data: Dataset,
    ipc: int,
    runtime: Runtime,
    chunk: int | None = None,
    name: str = "m3d",
    network: str | None = None,
    **options: Any,
) -> Callable[[], None]:
    """A step of method ``name`` as the engine takes it, ``chunk`` classes at a time, through ``network`` or the
    method's own: from its draws and the refill of its encoder to the training of the encoder, where there is some."""
    method, _ = make_method(name, Task(data.name, data.shape, data.classes, ipc), options)
    assert method.matching is not None
    net = FlatNet(make_net(network or method.network, data.shape, data.classes), runtime.device)
    pixels = method.tiles.encode(method.init(data, method.tiles.count(ipc, data.shape), 0, runtime))
    step = Step(method, data, net, pixels, 0, runtime)
    step.chunk = chunk or step.chunk
    advance, counter = Repeated(step.advance, runtime), iter(range(10**9))

    def call() -> None:
        k = next(counter)
        if k % BLOCK == 0:
            step.refill(k)
        if step.pool.due(k):
            step.pool.draw(k)
        step.real.bring(k)
        advance()
        step.pool.age(k)

    return call


def public_step(data: Dataset, ipc: int) -> Callable[[], float]:
    mean, std = (torch.tensor(v, device=data.train.device)[:, None, None] for v in (MEAN, STD))
    images = data.train.images.float() / 255
    return PublicCondenser(images, data.train.labels(), data.classes, ipc, float(ipc), mean, std)


def alternate(
    first: Callable[[], Any], second: Callable[[], Any], times: tuple[int, int], rounds: int, device: str
) -> tuple[list[float], list[float]]:
    """Seconds per call of both, measured in turn ``rounds`` times."""
    measured: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        measured[0].append(seconds(first, times[0], device))
        measured[1].append(seconds(second, times[1], device))
    return measured


def step_work(classes: int, ipc: int, batch_real: int, side: int = 32) -> tuple[float, float]:
    """(floating-point operations, fewest bytes) of one step: real forward, synthetic forward and input gradient."""
    per_image, maps, width, channels = 0.0, 0.0, 128, 3
    for k in range(3):
        pixels = (side >> k) ** 2
        per_image += 2 * pixels * width * channels * 9
        maps += (pixels * width + pixels * width / 4) * 2 if k else pixels * width / 4 * 2
        channels = width
    real, synthetic = classes * batch_real, classes * ipc * 4
    return per_image * (real + 2 * synthetic), maps * (real + 2 * synthetic)


def ceilings(device: str) -> dict[str, float]:
    """Measured copy bandwidth (GB/s, read plus written) and bf16 matrix rate (TFLOP/s) of this device."""
    if not device.startswith("cuda"):
        return {}
    source = torch.empty(2**30, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    copy = seconds(lambda: target.copy_(source), 20, device)
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds(lambda: a @ b, 3, device)
    product = seconds(lambda: a @ b, 10, device)
    return {"copy_gb_s": 2 * 2**30 / copy / 1e9, "bf16_tflop_s": 2 * 8192**3 / product / 1e12}


def measure_step(data: Dataset, runtime: Runtime, rounds: int, small: bool) -> dict[str, Any]:
    device = str(runtime.device)
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    with runtime.active(), runtime.counting_memory():
        began = time.perf_counter()
        ours = our_step(data, 10, runtime)
        for _ in range(8):
            ours()
        wait(device)
        first = time.perf_counter() - began
        peak = runtime.peak_memory()
        public = public_step(data, 10)
        public()
        mine, theirs = alternate(ours, public, (4, 1) if small else (500, 10), rounds, device)
    operations, traffic = step_work(data.classes, 10, 128)
    median = statistics.median(mine)
    return {
        "ms": median * 1e3,
        "public_ms": statistics.median(theirs) * 1e3,
        "ratio": statistics.median(theirs) / median,
        "rounds_ms": [s * 1e3 for s in mine],
        "public_rounds_ms": [s * 1e3 for s in theirs],
        "first_steps_seconds": first,
        "peak_gib": peak / 2**30,
        "tflop_s": operations / median / 1e12,
        "least_gb_s": traffic / median / 1e9,
    }


def measure_evaluation(runtime: Runtime, rounds: int, small: bool) -> dict[str, Any]:
    """One epoch of 10 networks on 400 images, ours together, the public way one after the other."""
    device, repeats = str(runtime.device), 2 if small else 10
    generator = torch.Generator().manual_seed(0)
    pixels, labels = torch.rand(400, 3, 32, 32, generator=generator), torch.arange(400) % 10
    recipe = make_protocol("paper").recipe
    with runtime.active():
        images = Images(pixels.to(device), labels.to(device), Normalise(MEAN, STD, device=device))
        began = time.perf_counter()
        trainer = Trainer(FlatNet(make_net("convnet3", (3, 32, 32), 10), device), images, recipe, repeats, 0, runtime)
        trainer.run(1 if small else 4)
        wait(device)
        first = time.perf_counter() - began
        net = make_network(10).to(device)
        optimiser = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
        listed, classes = list(pixels.to(device)), labels.tolist()
        mean, std = (torch.tensor(v, device=device)[:, None, None] for v in (MEAN, STD))
        public_epoch(net, optimiser, listed, classes, mean, std)
        mine, theirs = alternate(
            lambda: trainer.run(trainer.epoch + 1),
            lambda: public_epoch(net, optimiser, listed, classes, mean, std),
            (1, 1) if small else (20, 5),
            rounds,
            device,
        )
    ours, public = statistics.median(mine), statistics.median(theirs) * repeats
    return {
        "networks": repeats,
        "epoch_ms": ours * 1e3,
        "public_epoch_ms": public * 1e3,
        "ratio": public / ours,
        "seconds_for_1000_epochs": ours * 1000,
        "public_minutes_for_1000_epochs": public * 1000 / 60,
        "first_epochs_seconds": first,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="few images and calls: a check that it runs")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    runtime = Runtime.choose(options.device, step_mode="auto" if options.small else "compile")
    data = random_dataset(10, 200 if options.small else 5000, 32, str(runtime.device))
    report = {
        **runtime.describe(),
        "ceilings": ceilings(str(runtime.device)),
        "step": measure_step(data, runtime, options.rounds, options.small),
        "evaluation": measure_evaluation(runtime, options.rounds, options.small),
    }
    out = options.out or RESULTS / f"speed-{runtime.device.type}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    step, evaluation = report["step"], report["evaluation"]
    print(f"{report['device']}, torch {report['torch']}, precision {report['precision']}")
    print(f"step        {step['ms']:9.3f} ms   public loop {step['public_ms']:9.2f} ms   {step['ratio']:6.1f}×")
    traffic = f"at least {step['least_gb_s']:.0f} GB/s (as if each map were written once and never read)"
    print(f"            {step['tflop_s']:.0f} TFLOP/s, {traffic}, peak {step['peak_gib']:.2f} GiB")
    print(f"            ceilings of this device: {report['ceilings']}")
    print(
        f"evaluation  {evaluation['epoch_ms']:9.3f} ms   public loop {evaluation['public_epoch_ms']:9.2f} ms   "
        f"{evaluation['ratio']:6.1f}×   (an epoch of {evaluation['networks']} networks)"
    )
    ours, public = evaluation["seconds_for_1000_epochs"], evaluation["public_minutes_for_1000_epochs"]
    print(f"            1000 epochs: {ours:.1f} s against {public:.1f} min")


if __name__ == "__main__":
    main()
