"""Objectives on stretches of training: where a network ends that started where another did."""

from __future__ import annotations

from torch import Tensor

from m3d.objectives.base import Objective
from m3d.types import Segment


class EndPoint(Objective[Segment]):
    """‖θ̂ − θ_end‖² / ‖θ_start − θ_end‖²: how far a student ends from its expert, for the way the expert went.

    All classes train one network together, so there is one value for all of them.
    """

    across_classes = True

    def forward(self, goal: Segment, seen: Segment) -> Tensor:
        """[1]."""
        return (seen.end - goal.end).square().sum()[None] / (goal.start - goal.end).square().sum()
