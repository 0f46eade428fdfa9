"""The base of all objectives, and their algebra."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from m3d.errors import M3DError
from m3d.players import Player
from m3d.types import Reading

R = TypeVar("R", bound=Reading)


class Objective(nn.Module, Generic[R]):
    """A comparison of real and synthetic readings, [C]. Objectives add and take weights: ``a + 0.1 * b``.

    ``R`` is the kind of reading compared, so a type checker refuses a gradient distance on features.
    """

    player: Player | None = None  # who moves its own parameters, where it has some
    learns = False  # whether ``start`` will give it parameters of its own, which all classes share
    across_classes = False  # whether a class's value depends on other classes; if not, classes may go in chunks
    remembers = False  # whether it keeps a row of every class from step to step: all are seen together, in their order

    def forward(self, goal: R, seen: R) -> Tensor:
        """[C]: how far the synthetic reading ``seen`` is from the real one ``goal``, class by class.

        [1] where the classes cannot be told apart.
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward(goal, seen)")

    def start(self, seed: int, sample: Callable[[], R]) -> None:
        """Once before a run: make what depends on the seed or on the shape of a reading, of which ``sample`` gives one.

        Most objectives need neither.
        """

    def draw(self, step: Tensor) -> None:
        """Before step number ``step`` [1]: refill what is drawn anew or follows from the step before, in place and
        without waiting for the host."""

    def __add__(self, other: object) -> Objective[R]:
        if not isinstance(other, Objective):
            raise M3DError(f"objective + {other!r}: only another objective can be added")
        return Weighted([(1.0, self), (1.0, other)])

    def __mul__(self, weight: object) -> Objective[R]:
        if not isinstance(weight, int | float):
            raise M3DError(f"objective * {weight!r}: only a number can be a weight")
        if not 0 <= weight < math.inf:  # a negative one would drive both sides apart
            raise M3DError(f"a weight of {weight} is not valid; allowed: 0 and more")
        return Weighted([(float(weight), self)])

    __rmul__ = __mul__


class Weighted(Objective[R]):
    """Σ weight · objective."""

    def __init__(self, terms: list[tuple[float, Objective[R]]]):
        super().__init__()
        self.weights = [weight for weight, _ in terms]
        self.terms = nn.ModuleList(term for _, term in terms)
        self.across_classes = any(term.across_classes for _, term in terms)
        self.remembers = any(term.remembers for _, term in terms)
        self.learns = any(term.learns for _, term in terms)

    def start(self, seed: int, sample: Callable[[], R]) -> None:
        for term in self._parts():
            term.start(seed, sample)

    def draw(self, step: Tensor) -> None:
        for term in self._parts():
            term.draw(step)

    def _parts(self) -> list[Objective[R]]:
        return [cast(Objective[R], term) for term in self.terms]

    def forward(self, goal: R, seen: R) -> Tensor:
        values = [w * term(goal, seen) for w, term in zip(self.weights, self.terms, strict=True)]
        return torch.stack(values).sum(0)
