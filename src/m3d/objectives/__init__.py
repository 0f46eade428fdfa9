"""How two readings are compared: one value per class."""

from m3d.objectives.features import MMD, Moment, Objective

__all__ = ["MMD", "Moment", "Objective"]
