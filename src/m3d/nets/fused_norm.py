"""Instance norm, ReLU and 2×2 average pooling as one Triton kernel, forward and backward.

The convolution's output is read once and a quarter of it written; everything in between is float32. Activations are
[n, h, w, c]; networks trained side by side have their channels side by side, so one launch serves them all. A map that
does not fit into registers goes through in tiles: read for its mean, for its variance and for the result, the later
times mostly from the cache. The plain PyTorch path of ``m3d.nets.convnet`` computes the same function; tests compare
the two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

EPS = 1e-5
_MOST_POOLED = 256  # pooled pixels of an image that are kept in registers at once: 32×32 maps and smaller


def norm_fits(height: int, width: int, channels: int) -> bool:
    """Whether ``norm_relu_pool`` takes maps of this size."""
    return height % 2 == 0 and width % 2 == 0 and height > 0 and width > 0 and channels % 16 == 0


@triton.jit
def _norm_forward(
    y_ptr, gain_ptr, shift_ptr, out_ptr, mean_ptr, rstd_ptr,
    height, width, channels, eps,
    Q: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One image, BC channels: mean and variance over all pixels, then norm, ReLU and the mean of each 2×2 square."""
    image = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    half = width // 2
    q = tl.arange(0, Q)
    inside = (q < (height // 2) * half)[:, None] & (channel < channels)[None, :]
    corner = ((q // half) * 2 * width + (q % half) * 2)[:, None] * channels + channel[None, :]
    base = y_ptr + image * height * width * channels
    a = tl.load(base + corner, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(base + corner + channels, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(base + corner + width * channels, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(base + corner + (width + 1) * channels, mask=inside, other=0.0).to(tl.float32)
    pixels = height * width
    mean = tl.sum(a + b + c + d, axis=0) / pixels
    a, b, c, d = a - mean[None, :], b - mean[None, :], c - mean[None, :], d - mean[None, :]
    squares = tl.where(inside, a * a + b * b + c * c + d * d, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / pixels + eps)
    gain = tl.load(gain_ptr + channel, mask=channel < channels, other=0.0)
    shift = tl.load(shift_ptr + channel, mask=channel < channels, other=0.0)
    scale = (gain * rstd)[None, :]
    total = tl.maximum(a * scale + shift[None, :], 0.0) + tl.maximum(b * scale + shift[None, :], 0.0)
    total += tl.maximum(c * scale + shift[None, :], 0.0) + tl.maximum(d * scale + shift[None, :], 0.0)
    place = (image * (height // 2) * half + q[:, None]) * channels + channel[None, :]
    tl.store(out_ptr + place, (total * 0.25).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(mean_ptr + image * channels + channel, mean, mask=channel < channels)
    tl.store(rstd_ptr + image * channels + channel, rstd, mask=channel < channels)


@triton.jit
def _square(base, tile, half, pooled, width, channels, channel, Q: tl.constexpr):
    """(four pixels of each of Q squares [Q, BC] in float32, which of them are inside, the squares' numbers [Q])."""
    q = tile * Q + tl.arange(0, Q)
    inside = (q < pooled)[:, None] & (channel < channels)[None, :]
    corner = base + ((q // half) * 2 * width + (q % half) * 2)[:, None] * channels + channel[None, :]
    a = tl.load(corner, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(corner + channels, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(corner + width * channels, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(corner + (width + 1) * channels, mask=inside, other=0.0).to(tl.float32)
    return a, b, c, d, inside, q


@triton.jit
def _norm_forward_tiled(
    y_ptr, gain_ptr, shift_ptr, out_ptr, mean_ptr, rstd_ptr,
    height, width, channels, eps,
    Q: tl.constexpr, BC: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """``_norm_forward`` for maps of any size, Q squares at a time."""
    image = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    half, pooled, pixels = width // 2, (height // 2) * (width // 2), height * width
    base = y_ptr + image * pixels * channels
    total = tl.zeros([Q, BC], tl.float32)
    for tile in range(TILES):
        a, b, c, d, _, _ = _square(base, tile, half, pooled, width, channels, channel, Q)
        total += a + b + c + d
    mean = tl.sum(total, axis=0) / pixels
    total = tl.zeros([Q, BC], tl.float32)
    for tile in range(TILES):
        a, b, c, d, inside, _ = _square(base, tile, half, pooled, width, channels, channel, Q)
        a, b, c, d = a - mean[None, :], b - mean[None, :], c - mean[None, :], d - mean[None, :]
        total += tl.where(inside, a * a + b * b + c * c + d * d, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(total, axis=0) / pixels + eps)
    gain = tl.load(gain_ptr + channel, mask=channel < channels, other=0.0)
    shift = tl.load(shift_ptr + channel, mask=channel < channels, other=0.0)
    scale, level = (gain * rstd)[None, :], (shift - mean * gain * rstd)[None, :]
    for tile in range(TILES):
        a, b, c, d, inside, q = _square(base, tile, half, pooled, width, channels, channel, Q)
        total = tl.maximum(a * scale + level, 0.0) + tl.maximum(b * scale + level, 0.0)
        total += tl.maximum(c * scale + level, 0.0) + tl.maximum(d * scale + level, 0.0)
        place = (image * pooled + q[:, None]) * channels + channel[None, :]
        tl.store(out_ptr + place, (total * 0.25).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(mean_ptr + image * channels + channel, mean, mask=channel < channels)
    tl.store(rstd_ptr + image * channels + channel, rstd, mask=channel < channels)


@triton.jit
def _through_relu(value, mean, rstd, gain, shift, gradient):
    """(normalised value, gradient that passes the ReLU)."""
    hat = (value - mean[None, :]) * rstd[None, :]
    return hat, tl.where(hat * gain[None, :] + shift[None, :] > 0, gradient, 0.0)


@triton.jit
def _norm_backward(
    grad_ptr, y_ptr, mean_ptr, rstd_ptr, gain_ptr, shift_ptr, out_ptr, dgain_ptr, dshift_ptr,
    height, width, channels,
    Q: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The reverse: gradients of the convolution's output, and of gain and shift for each image."""
    image = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    known = channel < channels
    half = width // 2
    q = tl.arange(0, Q)
    inside = (q < (height // 2) * half)[:, None] & known[None, :]
    corner = ((q // half) * 2 * width + (q % half) * 2)[:, None] * channels + channel[None, :]
    base = image * height * width * channels + corner
    place = (image * (height // 2) * half + q[:, None]) * channels + channel[None, :]
    incoming = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32) * 0.25
    gain = tl.load(gain_ptr + channel, mask=known, other=0.0)
    shift = tl.load(shift_ptr + channel, mask=known, other=0.0)
    mean = tl.load(mean_ptr + image * channels + channel, mask=known, other=0.0)
    rstd = tl.load(rstd_ptr + image * channels + channel, mask=known, other=0.0)
    a = tl.load(y_ptr + base, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(y_ptr + base + channels, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(y_ptr + base + width * channels, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(y_ptr + base + (width + 1) * channels, mask=inside, other=0.0).to(tl.float32)
    a, ga = _through_relu(a, mean, rstd, gain, shift, incoming)
    b, gb = _through_relu(b, mean, rstd, gain, shift, incoming)
    c, gc = _through_relu(c, mean, rstd, gain, shift, incoming)
    d, gd = _through_relu(d, mean, rstd, gain, shift, incoming)
    dshift = tl.sum(ga + gb + gc + gd, axis=0)
    dgain = tl.sum(ga * a + gb * b + gc * c + gd * d, axis=0)
    tl.store(dshift_ptr + image * channels + channel, dshift, mask=known)
    tl.store(dgain_ptr + image * channels + channel, dgain, mask=known)
    level, slope, scale = dshift / (height * width), dgain / (height * width), gain * rstd
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr + base, ((ga - level[None, :] - a * slope[None, :]) * scale[None, :]).to(kind), mask=inside)
    tl.store(
        out_ptr + base + channels, ((gb - level[None, :] - b * slope[None, :]) * scale[None, :]).to(kind), mask=inside
    )
    low = out_ptr + base + width * channels
    tl.store(low, ((gc - level[None, :] - c * slope[None, :]) * scale[None, :]).to(kind), mask=inside)
    tl.store(low + channels, ((gd - level[None, :] - d * slope[None, :]) * scale[None, :]).to(kind), mask=inside)


@triton.jit
def _norm_backward_tiled(
    grad_ptr, y_ptr, mean_ptr, rstd_ptr, gain_ptr, shift_ptr, out_ptr, dgain_ptr, dshift_ptr,
    height, width, channels,
    Q: tl.constexpr, BC: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """``_norm_backward`` for maps of any size: the two sums first, then the gradients."""
    image = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    known = channel < channels
    half, pooled = width // 2, (height // 2) * (width // 2)
    start = image * height * width * channels
    gain = tl.load(gain_ptr + channel, mask=known, other=0.0)
    shift = tl.load(shift_ptr + channel, mask=known, other=0.0)
    mean = tl.load(mean_ptr + image * channels + channel, mask=known, other=0.0)
    rstd = tl.load(rstd_ptr + image * channels + channel, mask=known, other=0.0)
    passed, weighed = tl.zeros([Q, BC], tl.float32), tl.zeros([Q, BC], tl.float32)
    for tile in range(TILES):
        a, b, c, d, inside, q = _square(y_ptr + start, tile, half, pooled, width, channels, channel, Q)
        place = (image * pooled + q[:, None]) * channels + channel[None, :]
        incoming = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32) * 0.25
        a, ga = _through_relu(a, mean, rstd, gain, shift, incoming)
        b, gb = _through_relu(b, mean, rstd, gain, shift, incoming)
        c, gc = _through_relu(c, mean, rstd, gain, shift, incoming)
        d, gd = _through_relu(d, mean, rstd, gain, shift, incoming)
        passed += ga + gb + gc + gd
        weighed += ga * a + gb * b + gc * c + gd * d
    dshift, dgain = tl.sum(passed, axis=0), tl.sum(weighed, axis=0)
    tl.store(dshift_ptr + image * channels + channel, dshift, mask=known)
    tl.store(dgain_ptr + image * channels + channel, dgain, mask=known)
    level, slope = (dshift / (height * width))[None, :], (dgain / (height * width))[None, :]
    scale = (gain * rstd)[None, :]
    kind = out_ptr.dtype.element_ty  # by itself: the compiler (unlike the interpreter) takes no type within a tuple
    for tile in range(TILES):
        a, b, c, d, inside, q = _square(y_ptr + start, tile, half, pooled, width, channels, channel, Q)
        place = (image * pooled + q[:, None]) * channels + channel[None, :]
        incoming = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32) * 0.25
        a, ga = _through_relu(a, mean, rstd, gain, shift, incoming)
        b, gb = _through_relu(b, mean, rstd, gain, shift, incoming)
        c, gc = _through_relu(c, mean, rstd, gain, shift, incoming)
        d, gd = _through_relu(d, mean, rstd, gain, shift, incoming)
        corner = out_ptr + start + ((q // half) * 2 * width + (q % half) * 2)[:, None] * channels + channel[None, :]
        low = corner + width * channels
        tl.store(corner, ((ga - level - a * slope) * scale).to(kind), mask=inside)
        tl.store(corner + channels, ((gb - level - b * slope) * scale).to(kind), mask=inside)
        tl.store(low, ((gc - level - c * slope) * scale).to(kind), mask=inside)
        tl.store(low + channels, ((gd - level - d * slope) * scale).to(kind), mask=inside)


def _norm_blocks(height: int, width: int, channels: int) -> tuple[bool, dict[str, int]]:
    """(whether a map is too large for registers, how the kernel is launched).

    64 values a thread, so that several programs overlap; in tiles 32 channels, whose pixels fill a line of the cache.
    """
    pooled = (height // 2) * (width // 2)
    if pooled > _MOST_POOLED:
        return True, {"Q": 64, "BC": 32, "TILES": triton.cdiv(pooled, 64), "num_warps": 4}
    q = triton.next_power_of_2(pooled)
    bc = min(triton.next_power_of_2(channels), max(16, 2048 // q), 128)
    return False, {"Q": q, "BC": bc, "num_warps": 8 if q * bc >= 4096 else 4}


@torch.library.custom_op("m3d::norm_relu_pool", mutates_args=())
def _norm_op(y: Tensor, gain: Tensor, shift: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    n, height, width, channels = y.shape
    out = y.new_empty(n, height // 2, width // 2, channels, dtype=out_dtype)
    mean, rstd = (y.new_empty(n, channels, dtype=torch.float32) for _ in range(2))
    tiled, blocks = _norm_blocks(height, width, channels)
    kernel = _norm_forward_tiled if tiled else _norm_forward
    kernel[(n, triton.cdiv(channels, blocks["BC"]))](
        y, gain, shift, out, mean, rstd, height, width, channels, EPS, **blocks
    )
    return out, mean, rstd


@_norm_op.register_fake
def _(y: Tensor, gain: Tensor, shift: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    n, height, width, channels = y.shape
    out = y.new_empty(n, height // 2, width // 2, channels, dtype=out_dtype)
    return out, y.new_empty(n, channels, dtype=torch.float32), y.new_empty(n, channels, dtype=torch.float32)


@torch.library.custom_op("m3d::norm_relu_pool_backward", mutates_args=())
def _norm_backward_op(
    grad: Tensor, y: Tensor, mean: Tensor, rstd: Tensor, gain: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    n, height, width, channels = y.shape
    out = torch.empty_like(y)
    dgain, dshift = torch.empty_like(mean), torch.empty_like(mean)
    tiled, blocks = _norm_blocks(height, width, channels)
    kernel = _norm_backward_tiled if tiled else _norm_backward
    kernel[(n, triton.cdiv(channels, blocks["BC"]))](
        grad.contiguous(), y, mean, rstd, gain, shift, out, dgain, dshift,
        height, width, channels, **blocks,
    )  # fmt: skip
    return out, dgain, dshift


@_norm_backward_op.register_fake
def _(
    grad: Tensor, y: Tensor, mean: Tensor, rstd: Tensor, gain: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(y), torch.empty_like(mean), torch.empty_like(mean)


def _remember(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, torch.dtype], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    y, gain, shift, _ = inputs
    ctx.save_for_backward(y, output[1], output[2], gain, shift)


def _differentiate(ctx: Any, grad: Tensor, _mean: Tensor, _rstd: Tensor) -> tuple[Tensor | None, ...]:
    y, mean, rstd, gain, shift = ctx.saved_tensors
    dy, dgain, dshift = _norm_backward_op(grad, y, mean, rstd, gain, shift)
    asked = ctx.needs_input_grad  # of frozen encoders nobody asks for the sums
    return dy, dgain.sum(0) if asked[1] else None, dshift.sum(0) if asked[2] else None, None


_norm_op.register_autograd(_differentiate, setup_context=_remember)


def norm_relu_pool(y: Tensor, gain: Tensor, shift: Tensor, out_dtype: torch.dtype) -> Tensor:
    """[n, h/2, w/2, c] from a convolution's output ``y`` [n, h, w, c]; ``gain`` and ``shift`` [c] float32."""
    out: Tensor = _norm_op(y.contiguous(), gain.contiguous(), shift.contiguous(), out_dtype)[0]
    return out
