"""How two readings are compared: one value per class."""

from m3d.objectives.base import Objective
from m3d.objectives.features import MMD, Moment
from m3d.objectives.gradients import CosineRows, PowerDistance
from m3d.objectives.trajectories import EndPoint

__all__ = ["MMD", "CosineRows", "EndPoint", "Moment", "Objective", "PowerDistance"]
