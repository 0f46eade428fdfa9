"""A plan of the paper, handed to the one loop over cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from m3d.data.official import find
from m3d.grid.cells import Cell, Overrides, Source
from m3d.grid.runner import Job, Summary
from m3d.grid.runner import run as run_job
from m3d.grid.work import Place
from m3d.prepare import settings_of
from m3d.reproduce.cells import FACTS, Plan
from m3d.reproduce.cost import estimate
from m3d.reproduce.measures import MEASURES
from m3d.reproduce.records import Records


def run(plan: Plan, cells: Sequence[Cell], place: Place, overrides: Overrides, **settings: Any) -> Summary:
    """Make the missing ones of ``cells``; ``settings`` are those of :func:`m3d.grid.runner.run`."""

    def cost(cell: Cell, made: set[str]) -> float:
        return estimate(cell, overrides, made).seconds

    journal = Records(place.out, plan, overrides).journal
    return run_job(Job(cells, journal, place, MEASURES, cost, todays_settings), **settings)


def todays_settings(source: Source) -> Mapping[str, Any]:
    """Every option a source's set would be made with, without its data."""
    facts, known = FACTS[source.data], find(source.data)
    mirror, cutmix = (known.mirror, known.cutmix) if known else (True, True)
    described: dict[str, Any] = {"data": source.data, "shape": facts.shape, "classes": facts.classes, "ipc": source.ipc}
    described |= {"mirror": mirror, "cutmix": cutmix, "smallest": facts.smallest}
    return settings_of(source.method, dict(source.options), **described)
