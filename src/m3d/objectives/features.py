"""Objectives on what a network sees: maximum mean discrepancy, and single moments."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from m3d.errors import M3DError
from m3d.kernels import Kernel
from m3d.types import Seen


class Objective(nn.Module):
    """A comparison of real and synthetic readings, [C]. Objectives add and take weights: ``a + 0.1 * b``."""

    across_classes = False  # whether a class's value depends on other classes; if not, classes may go in chunks

    def forward(self, goal: Seen, seen: Seen) -> Tensor:
        """[C]: how far the synthetic reading ``seen`` is from the real one ``goal``, class by class."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(goal, seen)")

    def __add__(self, other: object) -> Objective:
        if not isinstance(other, Objective):
            raise M3DError(f"objective + {other!r}: only another objective can be added")
        return Weighted([(1.0, self), (1.0, other)])

    def __mul__(self, weight: object) -> Objective:
        if not isinstance(weight, int | float):
            raise M3DError(f"objective * {weight!r}: only a number can be a weight")
        return Weighted([(float(weight), self)])

    __rmul__ = __mul__


class Weighted(Objective):
    """Σ weight · objective."""

    def __init__(self, terms: list[tuple[float, Objective]]):
        super().__init__()
        self.weights = [weight for weight, _ in terms]
        self.terms = nn.ModuleList(term for _, term in terms)
        self.across_classes = any(term.across_classes for _, term in terms)

    def forward(self, goal: Seen, seen: Seen) -> Tensor:
        values = [w * term(goal, seen) for w, term in zip(self.weights, self.terms, strict=True)]
        return torch.stack(values).sum(0)


class MMD(Objective):
    """L_M3D = K̂_TT + K̂_SS − 2·K̂_TS, the biased estimate of MMD² for every class at once (Eq. 9).

    The means include the diagonal, so one synthetic image per class is enough. One bandwidth per class, taken from the
    stack of both sides and detached, serves all three terms. K̂_TT has no gradient and is kept so that the value is the
    paper's: zero when both sides agree.
    """

    def __init__(self, kernel: Kernel):
        super().__init__()
        self.kernel = kernel

    def forward(self, goal: Seen, seen: Seen) -> Tensor:
        return mmd2(self.kernel, goal.features.float(), seen.features.float())


def mmd2(kernel: Kernel, real: Tensor, synthetic: Tensor) -> Tensor:
    """[...]: biased MMD² of ``real`` [..., m, d] and ``synthetic`` [..., n, d]."""
    scale = kernel.scale(synthetic, real)
    tt, ss, ts = kernel.means(real, synthetic, scale)
    return tt + ss - 2 * ts


class Moment(Objective):
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
