"""What a run costs beside its own time and memory: the work that it found in a cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class Borrowed:
    """Work that another run did."""

    seconds: float = 0.0
    memory: int = 0  # bytes of the device that it used at most


_borrowed: ContextVar[Borrowed | None] = ContextVar("borrowed", default=None)


@contextmanager
def borrowing() -> Iterator[Borrowed]:
    """Collect the work that is taken from a cache in here: another run paid for it, and it counts all the same, so that
    a run's cost does not depend on what was run before."""
    found = Borrowed()
    token = _borrowed.set(found)
    try:
        yield found
    finally:
        _borrowed.reset(token)


def borrow(seconds: float, memory: int = 0) -> None:
    """Say that work of so many seconds, in so much memory, was taken from a cache."""
    if (found := _borrowed.get()) is not None:
        found.seconds += seconds
        found.memory = max(found.memory, memory)
