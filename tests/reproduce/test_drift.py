"""The results of this repository, held against what its methods would do today."""

from __future__ import annotations

from pathlib import Path

from m3d.grid.cells import Cell, Overrides, Source
from m3d.grid.drift import Change, drift
from m3d.reproduce.plans import PLANS
from m3d.reproduce.records import Records
from m3d.reproduce.runner import todays_settings

RESULTS = Path(__file__).parents[2] / "results" / "reproduce"


def test_published_results_were_made_with_todays_defaults():
    """Whoever changes a default makes the cells that rest on it anew, or says in the plan what they were made with."""
    plain, compared = Overrides(), 0
    for plan in PLANS.values():
        records = Records(RESULTS, plan, plain)
        for cell in plan.cells:
            record = records.of(cell)
            if record is None or "condensation" not in record:
                continue
            changes = drift(cell, record, plain, todays_settings)
            assert not changes, f"{plan.name} {cell.key}: {', '.join(map(str, changes))}"
            compared += 1
    assert compared > 100


def test_what_a_task_decides_is_compared_too():
    """A learning rate and a factor that the method chose are in the record; a rule that chooses otherwise shows."""
    cell = Cell("mnist/10/m3d/seed0", "", "", (Source("mnist", 10, "m3d"),))
    now = todays_settings(cell.sources[0])
    assert (now["lr"], now["factor"]) == (10.0, 2)
    record = {"condensation": [{"options": {**now, "factor": 1, "lr": 5.0, "momentum": None}}]}
    found = drift(cell, record, Overrides(), todays_settings)
    assert sorted(found) == [Change("factor", 1, 2), Change("lr", 5.0, 10.0)]
    assert str(found[0]) in ("factor=1 (today 2)", "lr=5.0 (today 10.0)")
    assert todays_settings(Source("svhn", 1, "idm"))["batch_real"] == 4659  # a class has no more
    # An option that came later is compared with what every set had before.
    coloured = Cell("cifar10/10/m3d+/seed0", "", "", (Source("cifar10", 10, "m3d+"),))
    today = dict(todays_settings(coloured.sources[0]))
    assert today.pop("chroma") == "half"
    early = {"condensation": [{"options": today}]}
    assert drift(coloured, early, Overrides(), todays_settings) == [Change("chroma", "full", "half")]
    # Fewer steps by request are no change; a plan's own options are its own.
    short = {"condensation": [{"options": {**now, "steps": 7}}]}
    assert drift(cell, short, Overrides(steps=7), todays_settings) == []
    assert drift(cell, short, Overrides(), todays_settings) == [Change("steps", 7, 10_000)]
    assert (
        drift(Cell("mnist/whole/seed0", "", "", (Source("mnist", 0, "whole"),)), {}, Overrides(), todays_settings) == []
    )
