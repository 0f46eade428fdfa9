"""What of real images each up-sampler can show at all: the rest that no cell of so many pixels could learn.

    python benchmarks/upsamplers.py cifar10
    python benchmarks/upsamplers.py digits --factors 2 --images 200

An enlarged cell lies in the columns of the up-sampler's matrix, rows and columns of the image alike. Training images,
less their mean colour, are projected on that space; what is left is given as a share of their variance, beside what as
many principal components of the rows and of the columns leave.
Writes results/upsamplers.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from speed import RESULTS
from torch import Tensor

import m3d
from m3d.runtime import Runtime
from m3d.upsamplers import UPSAMPLERS


def left(images: Tensor, rows: Tensor, columns: Tensor) -> float:
    """The share of ``images`` [N, ch, h, w] outside the spaces that orthonormal ``rows`` and ``columns`` span."""
    shown = rows @ (rows.mT @ images @ columns) @ columns.mT
    return float((images - shown).square().sum() / images.square().sum())


def components(lines: Tensor, count: int) -> Tensor:
    """[side, count]: the directions in which ``lines`` [n, side] vary most."""
    return torch.linalg.eigh(lines.mT @ lines)[1][:, -count:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--factors", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--out", type=Path, default=RESULTS / "upsamplers.json")
    options = parser.parse_args()
    data = m3d.load_data(options.data)
    order = torch.randperm(len(data.train.images), generator=torch.Generator().manual_seed(0))[: options.images]
    images = data.train.images[order].double() / 255
    images = images - images.mean((0, 2, 3), keepdim=True)
    h, w = images.shape[-2:]
    shares: dict[str, Any] = {}
    for factor in options.factors:
        cell_h, cell_w = -(-h // factor), -(-w // factor)
        of = {
            name: left(images, *(torch.linalg.qr(matrix(n, k).double())[0] for n, k in ((h, cell_h), (w, cell_w))))
            for name, matrix in UPSAMPLERS.items()
        }
        vertical, horizontal = images.mT.reshape(-1, h), images.reshape(-1, w)
        of["components"] = left(images, components(vertical, cell_h), components(horizontal, cell_w))
        shares[str(factor)] = of
        print(f"factor {factor}: " + ", ".join(f"{name} {share:.2%}" for name, share in of.items()), flush=True)
    report = {**Runtime.choose("cpu").describe(), "data": options.data, "images": len(images), "left": shares}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
