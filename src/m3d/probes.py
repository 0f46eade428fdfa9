"""What is read from images through a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from m3d.nets.flat import FlatNet
from m3d.types import Batch, Seen


class Probe(Protocol):
    """Reads a class-major batch through the network with parameters ``flat`` [P]."""

    def __call__(self, net: FlatNet, flat: Tensor, batch: Batch, dtype: torch.dtype) -> Seen: ...


@dataclass(frozen=True)
class Forward:
    """One forward pass, all classes together: representation and logits, each [C, n, ...], and block maps if asked."""

    maps: bool = False

    def __call__(self, net: FlatNet, flat: Tensor, batch: Batch, dtype: torch.dtype) -> Seen:
        classes, n = batch.images.shape[:2]
        seen = net(flat[None], batch.images.flatten(0, 1)[None], dtype, self.maps)

        def by_class(x: Tensor) -> Tensor:
            return x[0].reshape(classes, n, *x.shape[2:])

        return Seen(tuple(map(by_class, seen.maps)), by_class(seen.features), by_class(seen.logits))
