"""How far a condensed set's moments are from the real data's, in the representation of random encoders."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from m3d import rng
from m3d.condensed import CondensedSet
from m3d.data import Dataset
from m3d.nets import FlatNet, make_net
from m3d.objectives.features import central_moment
from m3d.runtime import Runtime

ENCODERS = 10
ORDERS = (1, 2, 3)
_SEED = 1_000_003  # of the encoders: none of those that any set was condensed with
_AT_ONCE = 1024  # images through an encoder together


def moment_distances(
    condensed: CondensedSet, data: Dataset, net: str, runtime: Runtime, encoders: int = ENCODERS
) -> dict[str, Any]:
    """‖m_q(real) − m_q(synthetic)‖₂ for q = 1, 2, 3, the mean over classes and random encoders: raw, and divided by
    ‖m_q(real)‖₂.

    m_q is the central moment of order q of every feature of the representation (the mean for q = 1), over all training
    images of a class and over all its decoded synthetic ones, without augmentation.
    """
    device = runtime.device
    flat_net = FlatNet(make_net(net, data.shape, data.classes), device)
    lanes, index = torch.arange(encoders, device=device), torch.zeros(1, dtype=torch.long, device=device)
    parameters = flat_net.fresh(_SEED, rng.Purpose.ENCODER, index, lanes)  # [E, P]
    pixels, labels = condensed.decoded()
    train = data.train
    raw, relative = torch.zeros(2, encoders, data.classes, len(ORDERS), dtype=torch.float64)
    with torch.no_grad(), runtime.active():
        for c in range(data.classes):
            first, count = int(train.start[c]), int(train.count[c])
            sides = (train.images[first : first + count], pixels[labels == c])
            for e in range(encoders):
                real, synthetic = (_moments(flat_net, parameters[e], side, data, runtime) for side in sides)
                gap = (real - synthetic).norm(dim=1)  # [orders]
                raw[e, c], relative[e, c] = gap, gap / real.norm(dim=1)
    return {
        "orders": list(ORDERS),
        "raw": [round(v, 6) for v in raw.mean((0, 1)).tolist()],
        "normalised": [round(v, 6) for v in relative.mean((0, 1)).tolist()],
        "encoders": encoders,
        "net": net,
        "layer": "representation",
        "images": int((labels == 0).sum()),
    }


def _moments(net: FlatNet, flat: Tensor, images: Tensor, data: Dataset, runtime: Runtime) -> Tensor:
    """[orders, d] in float64: the moments of ``images`` [n, ch, h, w] in the encoder's representation."""
    mean, std = (torch.tensor(v, device=runtime.device)[:, None, None] for v in (data.mean, data.std))
    parts = []
    for part in images.split(_AT_ONCE):
        moved = part.to(runtime.device)
        moved = moved.float() / 255 if moved.dtype == torch.uint8 else moved
        parts.append(net(flat[None], ((moved - mean) / std)[None], runtime.dtype).features[0].double())
    features = torch.cat(parts)
    return torch.stack([central_moment(features, order) for order in ORDERS]).cpu()
