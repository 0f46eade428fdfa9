"""A plan small enough to run in a test: the embedded digits, a tiny network. As a script, the command line knows it."""

from __future__ import annotations

import sys

from m3d.grid.cells import WHOLE, Cell, Source
from m3d.reproduce.cells import FACTS, Column, Facts, Plan, Row, Table
from m3d.reproduce.plans import PLANS

NET = "convnet2:width=8"
OPTIONS = (("augment", "none"), ("batch_real", 8), ("steps", 300))


def small_plan(name: str = "small", epochs: int = 60) -> Plan:
    """M3D (two seeds) and a random selection of digits, their moments and pictures, and the whole data."""
    common = {"net": NET, "protocol": "quick", "epochs": epochs, "repeats": 2}
    cells = [
        Cell(
            f"digits/1/m3d/seed{seed}",
            "digits/1",
            "M3D",
            (Source("digits", 1, "m3d", OPTIONS, NET, seed),),
            ("accuracy", "moments", "picture"),
            **common,
        )
        for seed in (0, 1)
    ]
    cells.append(
        Cell("digits/1/random/seed0", "digits/1", "Random", (Source("digits", 1, "random", (), NET),), **common)
    )
    whole = {**common, "protocol": "whole", "epochs": 1}
    cells.append(Cell("digits/whole/seed0", "digits/*", "Whole", (Source("digits", 0, WHOLE, (), NET),), **whole))
    columns = (
        Column("M3D", "M3D"),
        Column("Random", "Random"),
        Column("Whole", "Whole"),
        Column("seconds", "M3D", "seconds"),
        Column("1st", "M3D", "distance 1"),
    )
    table = Table("Digits", ("dataset",), (Row("digits/1", ("digits",)),), columns)
    return Plan(name, (), "a small plan", tuple(cells), (table,))


def know_small_plans(epochs: int = 60) -> None:
    FACTS["digits"] = Facts("digits", 10, 1347, 450, (1, 8, 8))
    PLANS["small"] = small_plan(epochs=epochs)


if __name__ == "__main__":
    import torch

    from m3d.cli import main

    torch.set_num_threads(1)
    know_small_plans(epochs=int(sys.argv[1]))
    main(sys.argv[2:])
