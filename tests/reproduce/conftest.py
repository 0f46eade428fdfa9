"""The small plan, known for as long as a test runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from small import know_small_plans

from m3d.reproduce.cells import FACTS
from m3d.reproduce.plans import PLANS


@pytest.fixture
def small_known():
    before = dict(FACTS), dict(PLANS)
    know_small_plans()
    yield PLANS["small"]
    for table, kept in zip((FACTS, PLANS), before, strict=True):
        table.clear()
        table.update(kept)
