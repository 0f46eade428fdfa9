"""Random selection: the coreset every method must beat."""

from __future__ import annotations

from m3d.engine import Method
from m3d.methods import METHODS, Task
from m3d.select import RandomReal
from m3d.synth import Tiles


@METHODS.register("random", paper="baseline", equation="none", cost="none")
def random(task: Task, *, factor: int = 1) -> Method:
    """Random real images of each class, kept as they are."""
    return Method(init=RandomReal(), tiles=Tiles(factor))
