"""How numbers are said to a person."""

from __future__ import annotations


def counted(number: int, things: str) -> str:
    """A number of things: ``1 image``, ``10 images``. The plural is given, and its first word ends in s."""
    noun, space, rest = things.partition(" ")
    return f"{number} {noun.removesuffix('s') if number == 1 else noun}{space}{rest}"


def with_sd(mean: float, sd: float, n: int) -> str:
    """An accuracy with its deviation over ``n`` networks, which a single one does not have."""
    return f"{mean:.2f} ± {sd:.2f}" if n > 1 else f"{mean:.2f}"
