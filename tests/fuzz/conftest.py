"""How many cases there are, and the count at the end: 1,000 by default, $M3D_FUZZ_CASES for more."""

from __future__ import annotations

from collections import Counter

import pytest

_CASES: Counter[str] = Counter()


@pytest.fixture
def count():
    """Called with the target's name once per case."""

    def one_more(target: str) -> None:
        _CASES[target] += 1

    return one_more


def pytest_terminal_summary(terminalreporter) -> None:
    if _CASES:
        parts = ", ".join(f"{name} {n}" for name, n in sorted(_CASES.items()))
        terminalreporter.write_line(f"fuzzing: {sum(_CASES.values())} cases ({parts})")
