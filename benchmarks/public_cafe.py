"""CAFE's public loop, restated readably, beside m3d's: do both reach the same accuracy from the same settings?

    python benchmarks/public_cafe.py cifar10 --steps 1200          # on a GPU
    python benchmarks/public_cafe.py cifar10 --steps 1200 --dsa
    python benchmarks/public_cafe.py cifar10 --steps 200 --width 32 --batch-real 32 --queries 128      # on a CPU

The restatement is written from a description of how the public code works: one class after the other for images,
accuracies as a list that loses its oldest member, and a tenth of each accuracy added to the next (m3d leaves that out;
``--plain`` leaves it out here too). Loops without end are given the bounds m3d has. Images are in standardised space
and never clamped. Both sides see a tenth of the training data held out; their sets are tested on it by one evaluation.
Seconds are those of condensing. Writes results/public-cafe[-dsa][-plain]-DEVICE.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from public_loop import colour, crop, cutout
from speed import RESULTS
from stacked import accuracies
from torch import Tensor, nn
from torch.nn import functional

import m3d
from m3d.batches import Images
from m3d.data.classes import Dataset
from m3d.evaluation import make_protocol
from m3d.nets import FlatNet, make_net
from m3d.runtime import Runtime

_WEIGHTS = (0.1, 0.1, 1.0, 1.0)  # of the three blocks' maps and the last pooling
_OUTER_STOP, _INNER_STOP, _WINDOW = 0.04, 0.03, 10
_OUTER_MAX, _INNER_MAX = 100, 50  # m3d's bounds
_QUARTERS = 4
_SIDES = ("public", "m3d")


class Network(nn.Module):
    """ConvNet-3 from the library's layers, which returns what its layers see beside its answer."""

    def __init__(self, classes: int, width: int):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(w, width, 3, padding=1), nn.GroupNorm(width, width), nn.ReLU())
            for w in (3, width, width)
        )
        self.classifier = nn.Linear(width * 16, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        seen = []
        for block in self.blocks:
            seen.append(block(x))
            x = functional.avg_pool2d(seen[-1], 2)
        flat = x.flatten(1)
        return self.classifier(flat), [*seen, x, flat]


class PublicCafe:
    """The public loop over one dataset; ``run`` yields the images after every step."""

    def __init__(self, data: Dataset, options: argparse.Namespace, device: torch.device):
        self.options, self.device, train = options, device, data.train
        pixels = data.normalise(device)(train.images.to(device).float() / 255)
        labels = train.labels().to(device)
        self.classes = data.classes
        self.by_class = [pixels[labels == c] for c in range(self.classes)]
        start = torch.randn(self.classes * options.ipc, *data.shape, device=device)
        if options.dsa:  # as m3d's cafe-dsa: from real images
            start = torch.cat([self._some(c, options.ipc) for c in range(self.classes)])
        self.images = start.clone().requires_grad_()
        self.labels = torch.arange(self.classes, device=device).repeat_interleave(options.ipc)
        self.networks = 0  # that served
        self.epochs: list[int] = []  # after each step

    def run(self) -> Iterator[Tensor]:
        steps = self.options.steps
        descent = torch.optim.SGD([self.images], lr=0.1, momentum=0.5)
        taken = 0
        while taken < steps:
            net = Network(self.classes, self.options.width).to(self.device)
            learn = torch.optim.SGD(net.parameters(), lr=0.01)
            self.networks += 1
            watched: list[float] = []
            earlier = 0.0
            for _ in range(_OUTER_MAX):
                descent.param_groups[0]["lr"] = 0.1 * 0.5 ** sum(taken >= steps * part for part in (0.6, 0.8, 0.9))
                descent.zero_grad()
                self._loss(net).backward()
                descent.step()
                taken += 1
                yield self.images.detach()
                if taken == steps:
                    return
                earlier = self._accuracy(net, earlier)
                watched.append(earlier)
                if len(watched) == _WINDOW:
                    if max(watched) - min(watched) < _OUTER_STOP:
                        break
                    watched.pop(0)
                self._learn(net, learn)

    def _loss(self, net: Network) -> Tensor:
        real, synthetic = [], []
        for c in range(self.classes):
            theirs, mine = self._some(c, self.options.batch_real), self.images[self.labels == c]
            if self.options.dsa:
                theirs, mine = siamese(theirs, mine)
            real.append(theirs)
            synthetic.append(mine)
        with torch.no_grad():
            _, goal = net(torch.cat(real))
        _, seen = net(torch.cat(synthetic))
        means = [[self._class_means(x) for x in layers] for layers in (goal, seen)]
        gaps = [(mine - theirs).square().sum() for theirs, mine in zip(*means, strict=True)]
        loss = sum((w * gap for w, gap in zip(_WEIGHTS, gaps, strict=False)), start=gaps[-1])
        answers = torch.arange(self.classes, device=self.device).repeat_interleave(len(real[0]))
        return loss + 0.01 * functional.cross_entropy(goal[-1] @ means[1][-1].T, answers, reduction="sum")

    def _class_means(self, x: Tensor) -> Tensor:
        return x.view(self.classes, -1, *x.shape[1:]).mean(1)

    def _learn(self, net: Network, learn: torch.optim.Optimizer) -> None:
        watched: list[float] = []
        earlier = 0.0
        self.epochs.append(0)
        for _ in range(_INNER_MAX):
            images = self.images.detach()
            images = dsa(images, siamese=False) if self.options.dsa else images
            learn.zero_grad()
            functional.cross_entropy(net(images)[0], self.labels).backward()
            learn.step()
            self.epochs[-1] += 1
            earlier = self._accuracy(net, earlier)
            watched.append(earlier)
            if len(watched) == _WINDOW:
                if max(watched) - min(watched) > _INNER_STOP:
                    break
                watched.pop(0)

    @torch.no_grad()
    def _accuracy(self, net: Network, earlier: float) -> float:
        """The mean over classes on fresh images, with a tenth of the ``earlier`` one as in the public code."""
        asked = torch.cat([self._some(c, self.options.queries) for c in range(self.classes)])
        answers = net(asked)[0].argmax(1).view(self.classes, -1)
        right = answers == torch.arange(self.classes, device=self.device)[:, None]
        return float(right.float().mean()) + (0.0 if self.options.plain else earlier / self.classes)

    def _some(self, c: int, n: int) -> Tensor:
        images = self.by_class[c]
        return images[torch.randperm(len(images), device=self.device)[:n]]


def siamese(real: Tensor, synthetic: Tensor) -> list[Tensor]:
    """Both changed alike: one operation, with one set of numbers."""
    return list(dsa(torch.cat([real, synthetic]), siamese=True).split([len(real), len(synthetic)]))


def dsa(x: Tensor, siamese: bool) -> Tensor:
    """One of six operations on all images; with ``siamese`` all have the same numbers."""
    n, h = len(x), x.shape[2]

    def draw(*shape: int) -> Tensor:
        u = torch.rand(n, *shape, device=x.device)
        return u[:1].expand_as(u) if siamese else u

    def warped(matrix: Tensor) -> Tensor:
        grid = functional.affine_grid(matrix, list(x.shape), align_corners=True)
        return functional.grid_sample(x, grid, align_corners=True)

    matrix = torch.zeros(n, 2, 3, device=x.device)
    which = int(torch.randint(6, ()))
    if which == 0:
        return torch.where(draw(1, 1, 1) < 0.5, x.flip(3), x)
    if which == 1:
        return colour(x, draw(1, 1, 1), draw(1, 1, 1), draw(1, 1, 1))
    if which == 2:
        return crop(x, (draw(2) * (h // 4 + 1)).long() - h // 8)
    if which == 3:
        return cutout(x, (draw(2) * (h + 1)).long() - h // 4)
    if which == 4:
        matrix[:, 0, 0], matrix[:, 1, 1] = (draw() * (1.2 - 1 / 1.2) + 1 / 1.2 for _ in range(2))
        return warped(matrix)
    angle = (draw() - 0.5) * 2 * 15 / 180 * torch.pi
    matrix[:, 0, 0], matrix[:, 0, 1] = torch.cos(angle), -torch.sin(angle)
    matrix[:, 1, 0], matrix[:, 1, 1] = torch.sin(angle), torch.cos(angle)
    return warped(matrix)


def public_side(data: Dataset, options: argparse.Namespace, judge: Any, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(options.seed)
    loop, at, began, judging = PublicCafe(data, options, device), {}, time.perf_counter(), 0.0
    for step, images in enumerate(loop.run(), 1):
        if step % (options.steps // _QUARTERS) == 0:
            _wait(device)
            stopped = time.perf_counter()
            at[step] = judge(images, loop.labels)
            judging += time.perf_counter() - stopped
            print(f"public, step {step}: {told(at[step])}, {loop.networks} networks", flush=True)
    epochs = statistics.fmean(loop.epochs) if loop.epochs else 0.0
    seconds = time.perf_counter() - began - judging
    return {"accuracies": at, "networks": loop.networks, "epochs_after_a_step": epochs, "seconds": seconds}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def own_side(data: Dataset, options: argparse.Namespace, judge: Any, runtime: Runtime) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out, began = Path(folder, "run"), time.perf_counter()
        settings = {"steps": options.steps, "batch_real": options.batch_real, "queries": options.queries}
        every = options.steps // _QUARTERS
        m3d.condense(
            data,
            options.ipc,
            "cafe-dsa" if options.dsa else "cafe",
            net=f"convnet3:width={options.width}",
            seed=options.seed,
            out=out,
            device=str(runtime.device),
            keep_every=every,
            bounded=False,
            **settings,
        )
        seconds, at = time.perf_counter() - began, {}
        for step in range(every, options.steps + 1, every):
            name = "condensed" if step == options.steps else f"step-{step}"
            pixels, labels = m3d.CondensedSet.load(out / f"{name}.safetensors").decoded()
            at[step] = judge(data.normalise(runtime.device)(pixels.to(runtime.device)), labels.to(runtime.device))
            print(f"m3d, step {step}: {told(at[step])}", flush=True)
    return {"accuracies": at, "seconds": seconds}


def told(values: list[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.2f} ± {spread:.2f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--dsa", action="store_true")
    parser.add_argument("--sides", default=",".join(_SIDES))
    parser.add_argument("--ipc", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch-real", type=int, default=256)
    parser.add_argument("--queries", type=int, default=128)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if options.steps % _QUARTERS:
        parser.error(f"--steps {options.steps} is not valid; allowed: a multiple of {_QUARTERS}")
    sides = options.sides.split(",")
    if not set(sides) <= set(_SIDES):
        parser.error(f"--sides {options.sides} is not valid; allowed: {', '.join(_SIDES)}, with a comma between them")
    runtime = Runtime.choose(options.device)
    device, data = runtime.device, m3d.load_data(options.data, val_fraction=0.1)
    assert data.val is not None
    test = Images(data.val.images.to(device), data.val.labels().to(device), data.normalise(device))
    net = FlatNet(make_net(f"convnet3:width={options.width}", data.shape, data.classes), device)
    recipe = make_protocol("dsa" if options.dsa else "cafe", epochs=options.epochs).recipe

    def judge(images: Tensor, labels: Tensor) -> list[float]:
        with runtime.active():
            set_ = Images(images.clone(), labels, None)
            return accuracies(set_, test, net, options.repeats, options.repeats, recipe, runtime)[0]

    settings = {k: v for k, v in vars(options).items() if k not in ("out", "device")}
    report: dict[str, Any] = {**runtime.describe(), "settings": settings, "sides": {}}
    for side in sides:
        report["sides"][side] = (
            public_side(data, options, judge, device) if side == "public" else own_side(data, options, judge, runtime)
        )
    variant = "-dsa" * options.dsa + "-plain" * options.plain
    out = options.out or RESULTS / f"public-cafe{variant}-{device.type}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
