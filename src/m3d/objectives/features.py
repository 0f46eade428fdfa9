"""Objectives on what a network sees: maximum mean discrepancy, single moments, spatial attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from m3d.errors import M3DError
from m3d.kernels import Kernel
from m3d.objectives.base import Objective
from m3d.types import Seen


class MMD(Objective[Seen]):
    """L_M3D = K̂_TT + K̂_SS − 2·K̂_TS, the biased estimate of MMD² for every class at once (Eq. 9).

    The means include the diagonal, so one synthetic image per class is enough. One bandwidth per class, taken from the
    stack of both sides and detached, serves all three terms. K̂_TT has no gradient and is kept so that the value is the
    paper's: zero when both sides agree.
    """

    def __init__(self, kernel: Kernel):
        super().__init__()
        self.kernel = kernel

    def forward(self, goal: Seen, seen: Seen) -> Tensor:
        return self.kernel.mmd2(goal.features.float(), seen.features.float())


class LayersMMD(Objective[Seen]):
    """MMD² of the representation + weight · Σ MMD² of the last ``layers`` blocks' maps, each pooled to a vector.

    Every reading has its own bandwidth. A probe must read block maps (``Forward(maps=True)``).
    """

    def __init__(self, kernel: Kernel, layers: int, weight: float = 1.0):
        super().__init__()
        if layers < 1:
            raise M3DError(f"layers={layers} is not valid; allowed: 1 and more (none is MMD)")
        if not 0 <= weight < float("inf"):
            raise M3DError(f"layer_weight={weight} is not valid; allowed: 0 and more")
        self.kernel, self.layers, self.weight = kernel, layers, weight

    def forward(self, goal: Seen, seen: Seen) -> Tensor:
        """[C]."""
        if len(seen.maps) < self.layers:
            raise M3DError(f"layers={self.layers} is not valid; the network shows the maps of {len(seen.maps)} blocks")
        pairs = zip(goal.maps[-self.layers :], seen.maps[-self.layers :], strict=True)
        maps = [self.kernel.mmd2(real.float().mean((-2, -1)), own.float().mean((-2, -1))) for real, own in pairs]
        return self.kernel.mmd2(goal.features.float(), seen.features.float()) + self.weight * torch.stack(maps).sum(0)


class Moment(Objective[Seen]):
    """‖m_q(real) − m_q(synthetic)‖², m_q the central moment of order q of every feature: 2 variance, 3 skewness.

    The regularisation of the paper's Table 1, which does not define it; central moments, feature by feature, are ours.
    """

    def __init__(self, order: int):
        super().__init__()
        if order < 2:
            raise M3DError(f"a moment of order {order} is not valid; allowed: 2 and more (the mean is MMD(Linear()))")
        self.order = order

    def forward(self, goal: Seen, seen: Seen) -> Tensor:
        real, synthetic = (central_moment(s.features.float(), self.order) for s in (goal, seen))
        return (real - synthetic).square().sum(-1)


def central_moment(x: Tensor, order: int) -> Tensor:
    """[..., d]: mean over n of (x − mean)^order for ``x`` [..., n, d]; the mean itself for order 1."""
    mean = x.mean(-2)
    return mean if order == 1 else (x - mean[..., None, :]).pow(order).mean(-2)


class Attention(Objective[Seen]):
    """Σ over all block maps but the last of ‖mean A(real) − mean A(synthetic)‖²: DataDAM's spatial attention matching.

    A(F) = v / ‖v‖₂ with v = Σ over channels of |F|^power, one number per place of the map: where a network looks, not
    how strongly. A probe must read block maps (``Forward(maps=True)``).
    """

    def __init__(self, power: int = 4):
        super().__init__()
        if power < 1:  # below 1 a power has no derivative at zero, where most of a ReLU's map lies
            raise M3DError(f"power={power} is not valid; allowed: 1 and more")
        self.power = power

    def forward(self, goal: Seen, seen: Seen) -> Tensor:
        """[C]."""
        if len(seen.maps) < 2:
            raise M3DError(
                f"attention is matched in all block maps but the last, and the network shows {len(seen.maps)}; "
                f"allowed: a network of two blocks and more"
            )
        parts = [
            (attention(real, self.power).mean(1) - attention(synthetic, self.power).mean(1)).square().sum(-1)
            for real, synthetic in zip(goal.maps[:-1], seen.maps[:-1], strict=True)
        ]
        return torch.stack(parts).sum(0)


def attention(maps: Tensor, power: int) -> Tensor:
    """[..., h·w]: Σ over channels of |x|^power of ``maps`` [..., c, h, w], flattened to a vector of length 1."""
    return functional.normalize(maps.abs().pow(power).sum(-3).flatten(-2), dim=-1)
