"""What a run costs beside its own time: the seconds of work that it found in a cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_borrowed: ContextVar[list[float] | None] = ContextVar("borrowed", default=None)


@contextmanager
def borrowing() -> Iterator[list[float]]:
    """Collect the seconds of work that is taken from a cache in here: another run paid them, and they count all the
    same, so that a run's cost does not depend on what was run before."""
    found: list[float] = []
    token = _borrowed.set(found)
    try:
        yield found
    finally:
        _borrowed.reset(token)


def borrow(seconds: float) -> None:
    """Say that work of so many seconds was taken from a cache."""
    if (found := _borrowed.get()) is not None:
        found.append(seconds)
