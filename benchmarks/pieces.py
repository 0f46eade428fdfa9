"""Pieces of a step beside the library's own way of computing them, each recorded as a graph and timed in turns.

    python benchmarks/pieces.py                       # on the GPU, a quarter of a minute
    python benchmarks/pieces.py --device cpu          # on one thread, minutes (Triton's part is left out)
    python benchmarks/pieces.py --device cpu --small  # a check that it runs

Sizes are those of CIFAR-10: ten networks trained on 64 images each, ten classes of 128 real and 40 synthetic images.
Writes results/pieces-DEVICE.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from speed import RESULTS, seconds
from torch import Tensor, nn
from torch.nn import functional

from m3d.nets import FlatNet, make_net
from m3d.nets.grouped import conv_each
from m3d.nets.pooling import halved
from m3d.own_kernels import HAS_KERNELS
from m3d.rng import Purpose
from m3d.runtime import Repeated, Runtime

Ways = dict[str, Callable[[], None]]


def convolution(side: int, nets: int, images: int, width: int, runtime: Runtime) -> Ways:
    """Every network's own 3×3 convolution, forward and back to images and weights."""
    device, dtype = runtime.device, runtime.dtype
    x = torch.randn(images, side, side, nets * width, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(nets, width, width, 3, 3, device=device) / width).requires_grad_()
    direction = torch.randn_like(x)

    def library(x: Tensor, weight: Tensor) -> Tensor:
        low = weight.flatten(0, 1).to(dtype)
        return functional.conv2d(x.permute(0, 3, 1, 2), low, padding=1, groups=nets).permute(0, 2, 3, 1)

    def apart(x: Tensor) -> Tensor:
        return x.unflatten(3, (nets, width)).permute(3, 0, 4, 1, 2)  # [R, n, c, h, w]

    def one(x: Tensor, weight: Tensor) -> Tensor:
        return functional.conv2d(x, weight.to(dtype), padding=1)

    def loop(x: Tensor, weight: Tensor) -> Tensor:
        return torch.stack([one(a, w) for a, w in zip(apart(x), weight, strict=True)]).permute(1, 3, 4, 0, 2).flatten(3)

    def mapped(x: Tensor, weight: Tensor) -> Tensor:
        return torch.vmap(one)(apart(x), weight).permute(1, 3, 4, 0, 2).flatten(3)

    def way(convolve: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
        def both() -> None:
            torch.autograd.grad(convolve(x, weight), (x, weight), direction)

        return both

    expected = library(x, weight)
    for other in (conv_each, loop, mapped):
        torch.testing.assert_close(other(x, weight), expected, rtol=0.05, atol=0.05)
    return {"library": way(library), "ours": way(conv_each), "loop": way(loop), "vmap": way(mapped)}


def gram(classes: int, points: int, features: int, runtime: Runtime) -> Ways:
    """All products of each class's points, in float32."""
    x = torch.randn(classes, points, features, device=runtime.device)

    def library() -> None:
        x @ x.mT

    if runtime.device.type != "cuda" or not HAS_KERNELS:
        return {"library": library}
    from m3d.fused_mmd import _gram_of

    def ours() -> None:
        _gram_of(x)

    return {"library": library, "ours": ours}


def logits(nets: int, images: int, features: int, classes: int, runtime: Runtime) -> Ways:
    """Every network's own linear layer, forward and back, in float32; with the features in several parts, summed."""
    device = runtime.device
    x = torch.randn(nets, images, features, device=device, requires_grad=True)
    weight = torch.randn(nets, classes, features, device=device, requires_grad=True)
    bias = torch.randn(nets, classes, device=device, requires_grad=True)
    direction = torch.randn(nets, images, classes, device=device)

    def way(parts: int) -> Callable[[], None]:
        def both() -> None:
            if parts == 1:
                y = torch.baddbmm(bias[:, None], x, weight.mT)
            else:
                a, b = (t.unflatten(2, (parts, -1)).transpose(1, 2) for t in (x, weight))
                y = (a @ b.mT).sum(1) + bias[:, None]
            torch.autograd.grad(y, (x, weight, bias), direction)

        return both

    return {"library": way(1), **{f"{parts} parts": way(parts) for parts in (4, 8, 16)}}


def pooling(side: int, images: int, width: int, runtime: Runtime) -> Ways:
    """The mean of every 2×2 square, forward and back."""
    x = torch.randn(images, width, side, side, device=runtime.device, requires_grad=True)
    direction = torch.randn(images, width, side // 2, side // 2, device=runtime.device)

    def way(pool: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        def both() -> None:
            torch.autograd.grad(pool(x), x, direction)

        return both

    return {"library": way(lambda x: functional.avg_pool2d(x, 2)), "ours": way(halved)}


def network(width: int, images: int, runtime: Runtime) -> Ways:
    """A ConvNet-3, its loss and the gradients of weights and images, against the library's layers in a row."""
    net = FlatNet(make_net(f"convnet3:width={width}", (3, 32, 32), 10), runtime.device)
    first = torch.zeros(1, dtype=torch.long, device=runtime.device)
    flat = net.fresh(0, Purpose.ENCODER, first, first).requires_grad_()
    x = torch.randn(1, images, 3, 32, 32, device=runtime.device, requires_grad=True)
    blocks = [
        layer
        for k in range(3)
        for layer in (
            nn.Conv2d(width if k else 3, width, 3, padding=1),
            nn.GroupNorm(width, width),
            nn.ReLU(inplace=True),
            nn.AvgPool2d(2),
        )
    ]
    plain = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(16 * width, 10)).to(runtime.device)
    weights = list(plain.parameters())

    def library() -> None:
        loss = plain(x[0]).log_softmax(-1)[:, 0].mean()
        torch.autograd.grad(loss, (*weights, x))

    def ours() -> None:
        loss = net(flat, x, runtime.dtype).logits.log_softmax(-1)[..., 0].mean()
        torch.autograd.grad(loss, (flat, x))

    return {"library": library, "ours": ours}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="small tensors and few calls: a check that it runs")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    runtime = Runtime.choose(given.device)
    device = str(runtime.device)
    if device == "cpu":
        torch.set_num_threads(1)
    times = 2 if given.small else 200 if runtime.device.type == "cuda" else 10
    nets, images, width, features = (2, 3, 8, 64) if given.small else (10, 64, 128, 2048)
    with runtime.active():
        pieces = {
            "convolution, second block": convolution(16, nets, images, width, runtime),
            "convolution, third block": convolution(8, nets, images, width, runtime),
            "Gram matrix": gram(nets, 168, features, runtime),
            "linear layer": logits(nets, images, features, 10, runtime),
        }
        if runtime.device.type == "cpu":  # on a GPU pooling is the library's, and speed.py times whole steps
            pieces["pooling, first block"] = pooling(32, images, width, runtime)
            pieces["ConvNet-3, narrow"] = network(width // 4, images, runtime)
            pieces["ConvNet-3"] = network(width, images, runtime)
        found = {name: timed(ways, times, given.rounds, runtime) for name, ways in pieces.items()}
    for name, ways in found.items():
        print(f"{name:<28}" + "   ".join(f"{way} {us:.1f} us" for way, us in ways.items()))
    if not given.small:
        out = given.out or RESULTS / f"pieces-{device.split(':')[0]}.json"
        out.write_text(json.dumps({**runtime.describe(), "microseconds": found}, indent=2) + "\n")


def timed(ways: Ways, times: int, rounds: int, runtime: Runtime) -> dict[str, float]:
    """Microseconds of each way, the median over rounds in which they take turns."""
    recorded = {name: Repeated(call, runtime) for name, call in ways.items()}
    for call in recorded.values():
        for _ in range(5):
            call()
    each: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in recorded.items():
            each[name].append(seconds(call, times, str(runtime.device)) * 1e6)
    return {name: round(statistics.median(values), 2) for name, values in each.items()}


if __name__ == "__main__":
    main()
