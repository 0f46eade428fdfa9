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


class Segment(NamedTuple):
    """A stretch of a network's training: its parameters before and after."""

    start: Tensor  # [P]
    end: Tensor  # [P]


Reading: TypeAlias = Seen | Grads | Segment


class Eyes(NamedTuple):
    """Through what a step looks: all that a pool of networks offers to it."""

    flat: Tensor  # [P]: the network that images are matched through
    trained: Tensor | None = None  # [P]: the network that may judge synthetic images, where it is another one
    trust: Tensor | None = None  # []: how much its judgement counts; None: fully
    goal: Reading | None = None  # a reading recorded in advance, in place of one of real images
    draws: tuple[Tensor, ...] = ()  # random numbers that the probe needs beside the images
