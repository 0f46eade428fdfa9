"""How two readings are compared: one value per class."""

from m3d.objectives.base import Objective
from m3d.objectives.characteristic import CharacteristicGap
from m3d.objectives.features import MMD, Attention, LayersMMD, Moment
from m3d.objectives.gradients import CosineRows, PowerDistance
from m3d.objectives.layers import Discriminate, LayerMeans
from m3d.objectives.semantic import Covariance, History
from m3d.objectives.trajectories import EndPoint

__all__ = [
    "MMD",
    "Attention",
    "CharacteristicGap",
    "CosineRows",
    "Covariance",
    "Discriminate",
    "EndPoint",
    "History",
    "LayerMeans",
    "LayersMMD",
    "Moment",
    "Objective",
    "PowerDistance",
]
