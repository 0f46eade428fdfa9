"""What is read from images through a network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from m3d.nets.flat import FlatNet
from m3d.types import Batch, Eyes, Grads, Reading, Seen

R_co = TypeVar("R_co", bound=Reading, covariant=True)


class Probe(Protocol[R_co]):
    """Reads a class-major batch through ``eyes``. A probe that learns is a module and names its ``player``.

    One that takes long to compile names the steps from which it pays (``compile_from``).
    """

    def __call__(self, net: FlatNet, eyes: Eyes, batch: Batch, dtype: torch.dtype) -> R_co: ...


@dataclass(frozen=True)
class Forward:
    """One forward pass, all classes together: representation and logits, each [C, n, ...], and block maps if asked."""

    maps: bool = False

    def __call__(self, net: FlatNet, eyes: Eyes, batch: Batch, dtype: torch.dtype) -> Seen:
        classes, n = batch.images.shape[:2]
        seen = net(eyes.flat[None], batch.images.flatten(0, 1)[None], dtype, self.maps)

        def by_class(x: Tensor) -> Tensor:
            return x[0].reshape(classes, n, *x.shape[2:])

        return Seen(tuple(map(by_class, seen.maps)), by_class(seen.features), by_class(seen.logits))


@dataclass(frozen=True)
class Gradient:
    """The gradient of the mean cross-entropy of each class's images, class by class, in one pass.

    The network is copied once per class and the copies run side by side, so one differentiation of the summed losses
    gives every class's own gradient. Where images are to move it is differentiable again; real ones take the networks'
    fastest path. Weights of one dimension (biases, norms) are left out; ``keep`` convolutions leaves out the classifier
    too.
    """

    keep: Literal["matrices", "convolutions"] = "matrices"
    compile_from: float = math.inf  # steps: it takes a minute, and pays only where little else is done between them

    def __call__(self, net: FlatNet, eyes: Eyes, batch: Batch, dtype: torch.dtype) -> Grads:
        classes, n = batch.images.shape[:2]
        again = batch.images.requires_grad or torch.compiler.is_compiling()  # which follows no other differentiation

        def loss(copies: Tensor) -> Tensor:  # [C, P] -> the sum of the classes' losses
            logits = net(copies, batch.images, dtype, maps=again).logits  # maps: the path that differentiates twice
            return functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")

        copies = eyes.flat.expand(classes, -1)
        gradient: Tensor
        if again:
            gradient = torch.func.grad(loss)(copies)
        else:
            with torch.enable_grad():
                own = copies.detach().clone().requires_grad_()
                (gradient,) = torch.autograd.grad(loss(own), own)
        named = net.unflatten(gradient / n)
        least = 4 if self.keep == "convolutions" else 2
        kept = [g for name, g in named.items() if g.ndim - 1 >= least]
        return Grads(tuple(g.flatten(2) for g in kept))
