"""How two readings are compared: one value per class."""

from m3d.objectives.base import Objective
from m3d.objectives.features import MMD, Moment
from m3d.objectives.gradients import CosineRows, PowerDistance

__all__ = ["MMD", "CosineRows", "Moment", "Objective", "PowerDistance"]
