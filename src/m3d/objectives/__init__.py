"""How two readings are compared: one value per class."""

from m3d.objectives.base import Objective
from m3d.objectives.features import MMD, Attention, Moment
from m3d.objectives.gradients import CosineRows, PowerDistance

__all__ = ["MMD", "Attention", "CosineRows", "Moment", "Objective", "PowerDistance"]
