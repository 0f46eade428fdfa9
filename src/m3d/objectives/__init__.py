"""How two readings are compared: one value per class."""

from m3d.objectives.base import Objective
from m3d.objectives.features import MMD, Attention, Moment
from m3d.objectives.gradients import CosineRows, PowerDistance
from m3d.objectives.layers import Discriminate, LayerMeans
from m3d.objectives.trajectories import EndPoint

__all__ = [
    "MMD",
    "Attention",
    "CosineRows",
    "Discriminate",
    "EndPoint",
    "LayerMeans",
    "Moment",
    "Objective",
    "PowerDistance",
]
