"""A plan of the paper, handed to the one loop over cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from m3d.grid.cells import Cell, Overrides
from m3d.grid.runner import Job, Summary
from m3d.grid.runner import run as run_job
from m3d.grid.work import Place
from m3d.reproduce.cells import Plan
from m3d.reproduce.cost import estimate
from m3d.reproduce.measures import MEASURES
from m3d.reproduce.records import Records


def run(plan: Plan, cells: Sequence[Cell], place: Place, overrides: Overrides, **settings: Any) -> Summary:
    """Make the missing ones of ``cells``; ``settings`` are those of :func:`m3d.grid.runner.run`."""

    def cost(cell: Cell, made: set[str]) -> float:
        return estimate(cell, overrides, made).seconds

    return run_job(Job(cells, Records(place.out, plan, overrides).journal, place, MEASURES, cost), **settings)
