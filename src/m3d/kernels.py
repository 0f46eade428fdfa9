"""Kernels over leading class dimensions, their sums and products, and the bandwidth rule.

Every input is [..., n, d] and every Gram matrix [..., n, m]; the class axis is just such a leading dimension, so no
kernel loops over classes. Kernels compose: ``Gaussian() + 0.5 * Linear()``, ``Linear() * Polynomial()``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from m3d.errors import M3DError
from m3d.own_kernels import HAS_KERNELS
from m3d.registry import Registry, parse_spec

_LEAST_SPREAD = 1e-4  # of a point's mean square; bandwidths of real features are about as large as that itself

_MOST = 16  # bandwidths, or a degree: float32 holds no more of either

KERNELS: Registry[Kernel] = Registry("kernel")


class Kernel(nn.Module):
    """A symmetric function of two points. Subclasses write ``forward``; ``scale`` and ``mean`` have defaults."""

    scales: int = 0  # how many data-dependent bandwidths this kernel needs
    universal: bool = False  # whether the mean map is injective (Theorem 1)
    rate: float | None = None  # M3D's default learning rate is rate × IPC: each kernel's gradient has its own size

    def scale(self, x: Tensor, y: Tensor) -> Tensor:
        """[..., scales]: bandwidths from the stack [x; y], detached, shared by the three terms of MMD²."""
        return x.new_ones((*x.shape[:-2], 0))

    def forward(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        """Gram matrix [..., n, m] of ``x`` [..., n, d] and ``y`` [..., m, d]."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(x, y, scale)")

    def mean(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        """[...]: the Gram matrix's mean; a kernel overrides this where a closed form is cheaper."""
        return torch.as_tensor(self(x, y, scale)).mean((-2, -1))

    def means(self, real: Tensor, synthetic: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """K̂_TT, K̂_SS and K̂_TS, each [...]: the means of the three Gram matrices of MMD².

        What depends on the synthetic points is one Gram matrix of them against [synthetic; real].
        """
        n = synthetic.shape[-2]
        gram: Tensor = self(synthetic, torch.cat([synthetic, real], dim=-2), scale)
        return self.mean(real, real, scale), gram[..., :n].mean((-2, -1)), gram[..., n:].mean((-2, -1))

    def mmd2(self, real: Tensor, synthetic: Tensor) -> Tensor:
        """[...]: biased MMD² of ``real`` [..., m, d] and ``synthetic`` [..., n, d], the bandwidths held."""
        tt, ss, ts = self.means(real, synthetic, self.scale(synthetic, real))
        return tt + ss - 2 * ts

    def __add__(self, other: object) -> Kernel:
        return Sum(self, _operand(other, "+"))

    def __mul__(self, other: object) -> Kernel:
        return Scaled(self, other) if isinstance(other, int | float) else Product(self, _operand(other, "*"))

    def __rmul__(self, other: object) -> Kernel:
        return self * other


def _operand(other: object, sign: str) -> Kernel:
    if not isinstance(other, Kernel):
        raise M3DError(f"kernel {sign} {other!r}: allowed are another kernel and, for *, a number")
    return other


class Gaussian(Kernel):
    """K(x, y) = Σ_m exp(−‖x−y‖² / (b·m)), b the mean squared distance within the stack [x; y].

    The paper's default (there written exp(−λ‖x−x'‖²)); the sum over five bandwidths around b follows the public code.
    """

    scales = 1
    universal = True
    rate = 1.0

    def __init__(self, multiples: Sequence[float] = (0.25, 0.5, 1.0, 2.0, 4.0)):
        super().__init__()
        if not multiples or min(multiples) <= 0:
            raise M3DError(
                f"gaussian: multiples={tuple(multiples)} is not valid; allowed: one or more positive numbers"
            )
        self.multiples = tuple(multiples)
        largest = max(multiples)
        # exp(−D/(b·m)) = exp(−D/(b·largest))^(largest/m): with doubling multiples one exp and four squarings do.
        self._powers = sorted(largest / m for m in multiples)
        self._doubling = self._powers == [2.0**k for k in range(len(multiples))]

    def scale(self, x: Tensor, y: Tensor) -> Tensor:
        return mean_squared_distance(torch.cat([x, y], dim=-2).detach()).unsqueeze(-1)

    def forward(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        rate = squared_distance(x, y) / (scale[..., None] * max(self.multiples))
        if not self._doubling:
            return torch.stack([torch.exp(-rate * p) for p in self._powers]).sum(0)
        power = torch.exp(-rate)
        total = power
        for _ in self._powers[1:]:
            power = power.square()
            total = total + power
        return total

    def mmd2(self, real: Tensor, synthetic: Tensor) -> Tensor:
        if synthetic.is_cuda and self.fits(real, synthetic):
            return self.fused_mmd2(real, synthetic)
        return super().mmd2(real, synthetic)

    def fits(self, real: Tensor, synthetic: Tensor) -> bool:
        """Whether one kernel can do all of it where there is a GPU."""
        if not HAS_KERNELS or not self._doubling or type(self) is not Gaussian:  # a subclass may compute otherwise
            return False
        from m3d.fused_mmd import mmd_fits

        return mmd_fits(real, synthetic)

    def fused_mmd2(self, real: Tensor, synthetic: Tensor) -> Tensor:
        from m3d.fused_mmd import gaussian_mmd2

        return gaussian_mmd2(real, synthetic, len(self.multiples), max(self.multiples), _LEAST_SPREAD)


class Polynomial(Kernel):
    """K(x, y) = (⟨x, y⟩ + c)^degree: sees moments up to ``degree`` and no further."""

    def __init__(self, degree: int = 2, offset: float = 1.0):
        super().__init__()
        if not (1 <= degree <= _MOST and 0 <= offset < math.inf):
            raise M3DError(
                f"polynomial: degree={degree}, offset={offset} is not valid; allowed: degree 1 to {_MOST}, offset ≥ 0"
            )
        self.degree, self.offset = degree, offset
        # First step as long as the Gaussian's on CIFAR-10, where ⟨x, y⟩ is about 400: K' = degree · ⟨x, y⟩^(degree−1).
        self.rate = 5.2e-3 / (degree * 400.0 ** (degree - 1))

    def forward(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return (x @ y.mT + self.offset) ** self.degree


class Linear(Kernel):
    """K(x, y) = ⟨x, y⟩: its MMD² is DM's loss, the squared distance of the means."""

    rate = 5.2e-3  # first step as long as the Gaussian's on CIFAR-10

    def forward(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return x @ y.mT

    def mean(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return (x.mean(-2) * y.mean(-2)).sum(-1)

    def means(self, real: Tensor, synthetic: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pairs = ((real, real), (synthetic, synthetic), (synthetic, real))
        tt, ss, ts = (self.mean(x, y, scale) for x, y in pairs)
        return tt, ss, ts


class Scaled(Kernel):
    """weight · K."""

    def __init__(self, kernel: Kernel, weight: float):
        super().__init__()
        if not weight > 0:
            raise M3DError(f"a kernel times {weight} is no kernel; allowed: a positive number")
        self.kernel, self.weight = kernel, float(weight)
        self.scales, self.universal = kernel.scales, kernel.universal
        self.rate = None if kernel.rate is None else kernel.rate / self.weight

    def scale(self, x: Tensor, y: Tensor) -> Tensor:
        return self.kernel.scale(x, y)

    def forward(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return self.weight * torch.as_tensor(self.kernel(x, y, scale))

    def mean(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return self.weight * self.kernel.mean(x, y, scale)


class _Pair(Kernel):
    """Two kernels and their bandwidths side by side."""

    def __init__(self, first: Kernel, second: Kernel):
        super().__init__()
        self.first, self.second = first, second
        self.scales = first.scales + second.scales

    def scale(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([self.first.scale(x, y), self.second.scale(x, y)], dim=-1)

    def _split(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        return scale[..., : self.first.scales], scale[..., self.first.scales :]


class Sum(_Pair):
    """K₁ + K₂: universal if either is."""

    def __init__(self, first: Kernel, second: Kernel):
        super().__init__(first, second)
        self.universal = first.universal or second.universal
        if first.rate is not None and second.rate is not None:
            self.rate = min(first.rate, second.rate)  # the steeper one limits the step

    def forward(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        a, b = self._split(scale)
        return torch.as_tensor(self.first(x, y, a) + self.second(x, y, b))

    def mean(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        a, b = self._split(scale)
        return self.first.mean(x, y, a) + self.second.mean(x, y, b)


class Product(_Pair):
    """K₁ · K₂."""

    def forward(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        a, b = self._split(scale)
        return torch.as_tensor(self.first(x, y, a) * self.second(x, y, b))


def squared_distance(x: Tensor, y: Tensor) -> Tensor:
    """[..., n, m]: ‖xᵢ − yⱼ‖² of ``x`` [..., n, d] and ``y`` [..., m, d], as ‖x‖² + ‖y‖² − 2⟨x, y⟩.

    Both are first moved by y's mean: distances do not change, and float32 loses less to cancellation.
    """
    centre = y.mean(-2, keepdim=True).detach()
    x, y = x - centre, y - centre
    squares = x.square().sum(-1)[..., :, None] + y.square().sum(-1)[..., None, :]
    return (squares - 2 * (x @ y.mT)).clamp(min=0)


def mean_squared_distance(z: Tensor) -> Tensor:
    """[...]: the mean of ‖zᵢ − zⱼ‖² over ordered pairs i ≠ j of ``z`` [..., N, d].

    Σᵢⱼ‖zᵢ−zⱼ‖² = 2N·Σᵢ‖zᵢ−z̄‖², so no N × N matrix is needed.
    """
    n = z.shape[-2]
    centred = z - z.mean(-2, keepdim=True)
    total = 2 * n * centred.square().sum((-2, -1))
    # Points that are all the same have only rounding between them: it must not become the unit of distance.
    floor = _LEAST_SPREAD * z.square().sum(-1).mean(-1) + torch.finfo(z.dtype).tiny
    return torch.maximum(total / (n * n - n), floor)


@KERNELS.register("gaussian")
def gaussian(*, bandwidths: int = 5) -> Kernel:
    """Sum of five Gaussians around the mean squared distance; universal, the paper's default."""
    if not 1 <= bandwidths <= _MOST:
        raise M3DError(
            f"gaussian: bandwidths={bandwidths} is not valid; allowed: 1 to {_MOST}, each twice the one before"
        )
    return Gaussian([2.0 ** (k - (bandwidths - 1) / 2) for k in range(bandwidths)])


@KERNELS.register("polynomial")
def polynomial(*, degree: int = 2, offset: float = 1.0) -> Kernel:
    """(⟨x, y⟩ + offset)^degree: moments up to the degree."""
    return Polynomial(degree, offset)


@KERNELS.register("linear")
def linear() -> Kernel:
    """⟨x, y⟩: the first moment only; DM's loss."""
    return Linear()


def make_kernel(spec: str) -> Kernel:
    """The kernel that ``spec`` names, e.g. ``gaussian`` or ``polynomial:degree=3``."""
    name, options = parse_spec(spec)
    entry = KERNELS.get(name)
    given: dict[str, Any] = entry.resolve(options)
    return entry.build(**given)


KernelSpec = Annotated[str, make_kernel]  # an option that names a kernel
