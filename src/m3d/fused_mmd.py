"""MMD² under a sum of Gaussians with its gradient, from one Gram matrix, in two Triton kernels.

Written as PyTorch operations it is a hundred small ones on matrices of a few hundred rows, and each costs a launch.
Here, with Z the points of both sides moved to their mean, one kernel makes G = ZZᵀ. The library gives one program a
tile of G, however many features there are, which leaves most of a device idle; here several share them, and float32
factors are split in three so that tensor cores lose nothing. The other kernel reads the distances
D_ij = G_ii + G_jj − 2·G_ij, the bandwidth b (the mean of D over pairs of different points) and the kernel's values off
G, adds up

    MMD² = Σ_ij w_ij · K(D_ij),    w = 1/n² (both synthetic), 1/m² (both real), −1/nm (one of each),

and writes the matrix A of its gradient, ∂/∂s_i = Σ_j A_ij z_j: with a_ij = 2·w_ij·K'(D_ij), A_ij = −2·a_ij off the
diagonal and A_ii = −2·a_ii + 2·Σ_j a_ij. The bandwidth is held, as in the plain path of ``m3d.kernels``; tests compare
the two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS = 16, 128  # of the Gram matrix that a program works on at a time
_TILE, _DEPTH = 32, 32  # of the Gram matrix that a program makes, and how many features it takes at a time
_PROGRAMS = 1024  # enough to keep a large device busy
_LEAST_DEPTH = 128  # features that a program takes at least


@triton.jit
def _gram(
    points_ptr, parts_ptr, points, width,
    T: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """One tile of one class's Gram matrix, and its mirror image, from EACH of the features."""
    group = tl.program_id(1).to(tl.int64)
    row, column = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    if row <= column:
        i, j = row * T + tl.arange(0, T), column * T + tl.arange(0, T)
        base = points_ptr + group * points * width
        first = tl.program_id(2) * EACH
        total = tl.zeros([T, T], tl.float32)
        for start in range(0, EACH, K):
            k = first + start + tl.arange(0, K)
            here, there = (i < points)[:, None] & (k < width)[None, :], (j < points)[None, :] & (k < width)[:, None]
            a = tl.load(base + i[:, None] * width + k[None, :], mask=here, other=0.0)
            b = tl.load(base + j[None, :] * width + k[:, None], mask=there, other=0.0)
            total += tl.dot(a, b, input_precision="tf32x3")
        out = parts_ptr + (tl.program_id(2) * tl.num_programs(1) + group) * points * points
        inside = (i < points)[:, None] & (j < points)[None, :]
        tl.store(out + i[:, None] * points + j[None, :], total, mask=inside)
        if row < column:
            tl.store(out + j[None, :] * points + i[:, None], total, mask=inside)


@triton.jit
def _discrepancy(
    gram_ptr, centre_ptr, value_ptr, pull_ptr,
    synthetic, points, largest, least, tiny,
    BANDS: tl.constexpr, R: tl.constexpr, B: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """R rows of one class's Gram matrix: their part of MMD², and of A where they are synthetic."""
    group = tl.program_id(0).to(tl.int64)
    gram = gram_ptr + group * points * points
    total = tl.zeros([B], tl.float32)
    for tile in range(TILES):
        j = tile * B + tl.arange(0, B)
        total += tl.load(gram + j * (points + 1), mask=j < points, other=0.0)
    spread = tl.sum(total, axis=0)
    floor = least * (spread / points + tl.load(centre_ptr + group)) + tiny
    rate = 1.0 / (tl.maximum(2.0 * spread / (points - 1), floor) * largest)
    n, m = synthetic * 1.0, (points - synthetic) * 1.0  # not .to(): an argument that is 1 is a constant
    i = tl.program_id(1) * R + tl.arange(0, R)
    mine = i < synthetic
    own = tl.load(gram + i * (points + 1), mask=i < points, other=0.0)
    value, pulled = tl.zeros([R], tl.float32), tl.zeros([R], tl.float32)
    for tile in range(TILES):
        j = tile * B + tl.arange(0, B)
        inside = (i < points)[:, None] & (j < points)[None, :]
        product = tl.load(gram + i[:, None] * points + j[None, :], mask=inside, other=0.0)
        other = tl.load(gram + j * (points + 1), mask=j < points, other=0.0)
        distance = tl.maximum(own[:, None] + other[None, :] - 2.0 * product, 0.0)
        power = tl.exp(-distance * rate)
        kernel, slope = power, power  # K and −K' / rate
        weight = 1.0
        for _ in tl.static_range(BANDS - 1):
            power = power * power
            weight = weight * 2.0
            kernel += power
            slope += weight * power
        beside = (j < synthetic)[None, :]
        share = tl.where(mine[:, None], tl.where(beside, 1.0 / (n * n), -1.0 / (n * m)),
                         tl.where(beside, -1.0 / (n * m), 1.0 / (m * m)))  # fmt: skip
        share = tl.where(inside, share, 0.0)
        value += tl.sum(share * kernel, axis=1)
        a = -2.0 * share * slope * rate
        pulled += tl.sum(a, axis=1)
        place = pull_ptr + (group * synthetic + i[:, None]) * points + j[None, :]
        tl.store(place, -2.0 * a, mask=inside & mine[:, None] & (i[:, None] != j[None, :]))
    itself = -2.0 / (n * n) * ((1 << BANDS) - 1) * rate  # a_ii: at distance 0 every power is 1
    tl.store(pull_ptr + (group * synthetic + i) * points + i, 2.0 * pulled - 2.0 * itself, mask=mine)
    tl.store(value_ptr + group * tl.num_programs(1) + tl.program_id(1), tl.sum(value, axis=0))


def _gram_of(points: Tensor) -> Tensor:
    """[C, m, m] float32: all products of ``points`` [C, m, d], which are contiguous."""
    groups, many, width = points.shape
    tiles = triton.cdiv(many, _TILE)
    split = max(1, min(_PROGRAMS // (groups * tiles * (tiles + 1) // 2), width // _LEAST_DEPTH))
    each = triton.cdiv(triton.cdiv(width, split), _DEPTH) * _DEPTH
    split = triton.cdiv(width, each)
    parts = points.new_empty(split, groups, many, many)
    _gram[(tiles * tiles, groups, split)](
        points, parts, many, width, T=_TILE, K=_DEPTH, TILES=tiles, EACH=each, num_warps=4
    )
    return parts[0] if split == 1 else parts.sum(0)


@torch.library.custom_op("m3d::gaussian_mmd2", mutates_args=())
def _mmd_op(synthetic: Tensor, real: Tensor, bands: int, largest: float, least: float) -> tuple[Tensor, Tensor, Tensor]:
    points = torch.cat([synthetic, real], dim=1)
    centre = points.mean(1, keepdim=True)
    points -= centre
    gram = _gram_of(points)
    groups, n, many = len(points), synthetic.shape[1], points.shape[1]
    blocks = triton.cdiv(many, _ROWS)
    value, pull = points.new_empty(groups, blocks), points.new_empty(groups, n, many)
    _discrepancy[(groups, blocks)](
        gram, centre.square().sum((1, 2)), value, pull,
        n, many, largest, least, torch.finfo(torch.float32).tiny,
        BANDS=bands, R=_ROWS, B=_COLUMNS, TILES=triton.cdiv(many, _COLUMNS), num_warps=4,
    )  # fmt: skip
    return value.sum(1), pull, points


@_mmd_op.register_fake
def _(synthetic: Tensor, real: Tensor, bands: int, largest: float, least: float) -> tuple[Tensor, Tensor, Tensor]:
    groups, n, d = synthetic.shape
    many = n + real.shape[1]
    return synthetic.new_empty(groups), synthetic.new_empty(groups, n, many), synthetic.new_empty(groups, many, d)


@torch.library.custom_op("m3d::gaussian_mmd2_backward", mutates_args=())
def _pull_op(grad: Tensor, pull: Tensor, points: Tensor) -> Tensor:
    """An operation by itself, so that differentiating it again is refused and not forgotten."""
    return (pull * grad[:, None, None]) @ points


@_pull_op.register_fake
def _(grad: Tensor, pull: Tensor, points: Tensor) -> Tensor:
    return points.new_empty(len(points), pull.shape[1], points.shape[2])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[1:])


def _differentiate(ctx: Any, grad: Tensor, _pull: Tensor, _points: Tensor) -> tuple[Tensor, None, None, None, None]:
    pull, points = ctx.saved_tensors
    return _pull_op(grad, pull, points), None, None, None, None


_mmd_op.register_autograd(_differentiate, setup_context=_remember)


def mmd_fits(real: Tensor, synthetic: Tensor) -> bool:
    """Whether ``gaussian_mmd2`` takes these points."""
    return synthetic.dtype == real.dtype == torch.float32 and synthetic.ndim == 3 and not real.requires_grad


def gaussian_mmd2(real: Tensor, synthetic: Tensor, bands: int, largest: float, least: float) -> Tensor:
    """[C]: MMD² of ``real`` [C, m, d], which gets no gradient, and ``synthetic`` [C, n, d].

    The kernel is the sum of ``bands`` Gaussians whose bandwidths are b · ``largest``, half of that, and so on; b is at
    least ``least`` times the mean square of a point.
    """
    out: Tensor = _mmd_op(synthetic, real, bands, largest, least)[0]
    return out
