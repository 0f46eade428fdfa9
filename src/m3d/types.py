"""The few shapes everything agrees on. The class axis always comes first.

Shape letters used throughout: C classes, n images of a class, ch × h × w an image, d features, K outputs, P parameters,
R networks trained at once, S steps.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from torch import Tensor


class Batch(NamedTuple):
    """Images of every class."""

    images: Tensor  # [C, n, ch, h, w]
    labels: Tensor  # [C, n] class indices


class Seen(NamedTuple):
    """What a network sees in images. Leading axes are [n] from a network and [C, n] from a probe."""

    maps: tuple[Tensor, ...]  # each [..., c, h, w]: every block's activation before pooling
    features: Tensor  # [..., d]: the representation, i.e. the classifier's input
    logits: Tensor  # [..., K]


class Grads(NamedTuple):
    """Gradients of a network's loss, each class's own."""

    weights: tuple[Tensor, ...]  # each [C, outputs, inputs]: one matrix per weight, a row per output


Reading: TypeAlias = Seen | Grads
