"""How numbers and options are said to a person."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_typed = False  # whether the person typed a command, and did not call a function


@contextmanager
def typed() -> Iterator[None]:
    """Within, options are named as on the command line."""
    global _typed
    before, _typed = _typed, True
    try:
        yield
    finally:
        _typed = before


def option(name: str, value: object = None, of_method: bool = False) -> str:
    """``--batch-real 32``, or ``--set cell=9`` of a method's option without a flag of its own; in Python
    ``batch_real=32``."""
    if not _typed:
        return name if value is None else f"{name}={value!r}"
    if of_method:
        return f"--set {name}={value}"
    flag = "--" + name.replace("_", "-")
    return flag if value is None or value is True else f"{flag} {value}"


def resuming(folder: Path) -> str:
    """What continues the run in ``folder``."""
    return f"m3d condense --resume {folder}" if _typed else f"m3d.resume({str(folder)!r})"


def counted(number: int, things: str) -> str:
    """A number of things: ``1 image``, ``10 images``. The plural is given, and its first word ends in s."""
    noun, space, rest = things.partition(" ")
    return f"{number} {noun.removesuffix('s') if number == 1 else noun}{space}{rest}"


def with_sd(mean: float, sd: float, n: int) -> str:
    """An accuracy with its deviation over ``n`` networks, which a single one does not have."""
    return f"{mean:.2f} ± {sd:.2f}" if n > 1 else f"{mean:.2f}"
