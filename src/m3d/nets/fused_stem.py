"""A ConvNet's first block as one Triton kernel: 3×3 convolution, instance norm, ReLU, 2×2 average pooling.

With one to three input channels the convolution is cheap and its output large: 1,280 CIFAR images make 335 MB of it in
bf16, written once and read twice. Here it is computed twice instead (once for the statistics, once for the result) and
never written. Backward computes it again. Convolutions multiply in the given precision; all else is float32.

A convolution's bias has no effect before an instance norm, which subtracts the mean, so there is none here.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

EPS = 1e-5
_MOST_CHANNELS = 128  # output channels that one program keeps together
_TILE = 64  # pooled pixels a program works on at a time


def stem_fits(height: int, width: int, inputs: int, channels: int) -> bool:
    """Whether ``stem`` takes a convolution with ``inputs`` channels in and these output maps."""
    power_of_two = channels & (channels - 1) == 0
    return height % 2 == 0 and width % 2 == 0 and inputs <= 3 and power_of_two and 16 <= channels <= _MOST_CHANNELS


@triton.jit
def _patches(x_ptr, row, column, inside, height, width, padding, TAPS: tl.constexpr, K: tl.constexpr):
    """[Q, K]: the 3×3 neighbourhood (k = (input channel, dy, dx)) of each output pixel, zeros outside the image."""
    k = tl.arange(0, K)
    channel, dy, dx = k // 9, (k % 9) // 3, k % 3
    y = row[:, None] + dy[None, :] - padding
    x = column[:, None] + dx[None, :] - padding
    known = inside[:, None] & (k < TAPS)[None, :] & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    return tl.load(x_ptr + (channel[None, :] * height + y) * width + x, mask=known, other=0.0)


@triton.jit
def _convolve(patches, weight, LOW: tl.constexpr):
    """[Q, O] float32: the convolution at these pixels, multiplied in bf16 (LOW) or float32."""
    if LOW:
        return tl.dot(patches.to(tl.bfloat16), weight.to(tl.bfloat16))
    return tl.dot(patches.to(tl.float32), weight, input_precision="ieee")


@triton.jit
def _stem_forward(
    x_ptr, weight_ptr, gain_ptr, shift_ptr, out_ptr, mean_ptr, rstd_ptr,
    per_net, eps,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, PADDING: tl.constexpr,
    INPUTS: tl.constexpr, K: tl.constexpr, O: tl.constexpr, Q: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """One image, all channels."""
    image = tl.program_id(0).to(tl.int64)
    net = image // per_net
    channel, k = tl.arange(0, O), tl.arange(0, K)
    taps: tl.constexpr = INPUTS * 9
    weight = tl.load(
        weight_ptr + (net * O + channel[None, :]) * taps + k[:, None], mask=(k < taps)[:, None], other=0.0
    ).to(tl.float32)
    x_ptr += image * INPUTS * HEIGHT * WIDTH
    half, pooled = OUT_WIDTH // 2, (OUT_HEIGHT // 2) * (OUT_WIDTH // 2)
    total, squares = tl.zeros([O], tl.float32), tl.zeros([O], tl.float32)
    for first in range(0, pooled, Q):
        q = first + tl.arange(0, Q)
        for corner in tl.static_range(4):
            row, column = (q // half) * 2 + corner // 2, (q % half) * 2 + corner % 2
            y = _convolve(_patches(x_ptr, row, column, q < pooled, HEIGHT, WIDTH, PADDING, taps, K), weight, LOW)
            total += tl.sum(y, axis=0)
            squares += tl.sum(y * y, axis=0)
    pixels = OUT_HEIGHT * OUT_WIDTH
    mean = total / pixels
    rstd = 1.0 / tl.sqrt(tl.maximum(squares / pixels - mean * mean, 0.0) + eps)
    tl.store(mean_ptr + image * O + channel, mean)
    tl.store(rstd_ptr + image * O + channel, rstd)
    scale = tl.load(gain_ptr + net * O + channel) * rstd
    offset = tl.load(shift_ptr + net * O + channel) - mean * scale
    for first in range(0, pooled, Q):
        q = first + tl.arange(0, Q)
        result = tl.zeros([Q, O], tl.float32)
        for corner in tl.static_range(4):
            row, column = (q // half) * 2 + corner // 2, (q % half) * 2 + corner % 2
            y = _convolve(_patches(x_ptr, row, column, q < pooled, HEIGHT, WIDTH, PADDING, taps, K), weight, LOW)
            result += tl.maximum(y * scale[None, :] + offset[None, :], 0.0)
        place = (image * pooled + q[:, None]) * O + channel[None, :]
        tl.store(out_ptr + place, (result * 0.25).to(out_ptr.dtype.element_ty), mask=(q < pooled)[:, None])


@triton.jit
def _stem_backward(
    grad_ptr, x_ptr, weight_ptr, gain_ptr, shift_ptr, mean_ptr, rstd_ptr,
    columns_ptr, dweight_ptr, dgain_ptr, dshift_ptr,
    per_net,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, PADDING: tl.constexpr,
    INPUTS: tl.constexpr, K: tl.constexpr, O: tl.constexpr, Q: tl.constexpr, LOW: tl.constexpr,
    IMAGES: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """One image: gradients of its patches (IMAGES; summed into pixels by ``_fold``) or of the weights (WEIGHTS)."""
    image = tl.program_id(0).to(tl.int64)
    net = image // per_net
    channel, k = tl.arange(0, O), tl.arange(0, K)
    taps: tl.constexpr = INPUTS * 9
    weight = tl.load(
        weight_ptr + (net * O + channel[None, :]) * taps + k[:, None], mask=(k < taps)[:, None], other=0.0
    ).to(tl.float32)
    x_ptr += image * INPUTS * HEIGHT * WIDTH
    half, pooled = OUT_WIDTH // 2, (OUT_HEIGHT // 2) * (OUT_WIDTH // 2)
    gain, shift = tl.load(gain_ptr + net * O + channel), tl.load(shift_ptr + net * O + channel)
    mean, rstd = tl.load(mean_ptr + image * O + channel), tl.load(rstd_ptr + image * O + channel)
    dgain, dshift = tl.zeros([O], tl.float32), tl.zeros([O], tl.float32)
    for first in range(0, pooled, Q):
        q = first + tl.arange(0, Q)
        place = (image * pooled + q[:, None]) * O + channel[None, :]
        incoming = tl.load(grad_ptr + place, mask=(q < pooled)[:, None], other=0.0).to(tl.float32) * 0.25
        for corner in tl.static_range(4):
            row, column = (q // half) * 2 + corner // 2, (q % half) * 2 + corner % 2
            y = _convolve(_patches(x_ptr, row, column, q < pooled, HEIGHT, WIDTH, PADDING, taps, K), weight, LOW)
            hat = (y - mean[None, :]) * rstd[None, :]
            passed = tl.where(hat * gain[None, :] + shift[None, :] > 0, incoming, 0.0)
            dshift += tl.sum(passed, axis=0)
            dgain += tl.sum(passed * hat, axis=0)
    tl.store(dgain_ptr + image * O + channel, dgain)
    tl.store(dshift_ptr + image * O + channel, dshift)
    pixels = OUT_HEIGHT * OUT_WIDTH
    level, slope, scale = dshift / pixels, dgain / pixels, gain * rstd
    dweight = tl.zeros([K, O], tl.float32)
    for first in range(0, pooled, Q):
        q = first + tl.arange(0, Q)
        place = (image * pooled + q[:, None]) * O + channel[None, :]
        incoming = tl.load(grad_ptr + place, mask=(q < pooled)[:, None], other=0.0).to(tl.float32) * 0.25
        for corner in tl.static_range(4):
            row, column = (q // half) * 2 + corner // 2, (q % half) * 2 + corner % 2
            patches = _patches(x_ptr, row, column, q < pooled, HEIGHT, WIDTH, PADDING, taps, K)
            hat = (_convolve(patches, weight, LOW) - mean[None, :]) * rstd[None, :]
            passed = tl.where(hat * gain[None, :] + shift[None, :] > 0, incoming, 0.0)
            dy = (passed - level[None, :] - hat * slope[None, :]) * scale[None, :]
            dy = tl.where((q < pooled)[:, None], dy, 0.0)
            if IMAGES:
                columns = _convolve(dy, tl.trans(weight), LOW)  # [Q, K]
                spot = (image * pixels + row * OUT_WIDTH + column)[:, None] * K + k[None, :]
                tl.store(columns_ptr + spot, columns.to(columns_ptr.dtype.element_ty), mask=(q < pooled)[:, None])
            if WEIGHTS:
                dweight += _convolve(tl.trans(patches.to(tl.float32)), dy, LOW)
    if WEIGHTS:
        spot = (image * O + channel[None, :]) * taps + k[:, None]
        tl.store(dweight_ptr + spot, dweight, mask=(k < taps)[:, None])


@triton.jit
def _fold(
    columns_ptr, out_ptr, count,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, PADDING: tl.constexpr,
    INPUTS: tl.constexpr, K: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Each input pixel's gradient: the sum of what the (at most nine) patches that contain it received."""
    place = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    known = place < count
    x, y = place % WIDTH, (place // WIDTH) % HEIGHT
    channel, image = (place // (WIDTH * HEIGHT)) % INPUTS, place // (WIDTH * HEIGHT * INPUTS)
    total = tl.zeros([B], tl.float32)
    for tap in tl.static_range(9):
        row, column = y - tap // 3 + PADDING, x - tap % 3 + PADDING
        inside = known & (row >= 0) & (row < OUT_HEIGHT) & (column >= 0) & (column < OUT_WIDTH)
        spot = ((image * OUT_HEIGHT + row) * OUT_WIDTH + column) * K + channel * 9 + tap
        total += tl.load(columns_ptr + spot, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, total, mask=known)


def _sizes(x: Tensor, padding: int) -> dict[str, int]:
    height, width = x.shape[-2:]
    return {
        "HEIGHT": height,
        "WIDTH": width,
        "OUT_HEIGHT": height + 2 * padding - 2,
        "OUT_WIDTH": width + 2 * padding - 2,
        "PADDING": padding,
    }


def _constants(x: Tensor, weight: Tensor, low: bool) -> dict[str, Any]:
    inputs, channels = x.shape[1], weight.shape[1]
    return {"INPUTS": inputs, "K": max(16, triton.next_power_of_2(inputs * 9)), "O": channels, "Q": _TILE, "LOW": low}


@torch.library.custom_op("m3d::stem", mutates_args=())
def _stem_op(
    x: Tensor, weight: Tensor, gain: Tensor, shift: Tensor, padding: int, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    sizes, channels = _sizes(x, padding), weight.shape[1]
    out = x.new_empty(len(x), sizes["OUT_HEIGHT"] // 2, sizes["OUT_WIDTH"] // 2, channels, dtype=out_dtype)
    mean, rstd = (x.new_empty(len(x), channels, dtype=torch.float32) for _ in range(2))
    constants = _constants(x, weight, out_dtype == torch.bfloat16)
    _stem_forward[(len(x),)](
        x, weight, gain, shift, out, mean, rstd, len(x) // len(weight), EPS, **sizes, **constants,
        num_warps=8, num_stages=1,
    )  # fmt: skip
    return out, mean, rstd


@_stem_op.register_fake
def _(
    x: Tensor, weight: Tensor, gain: Tensor, shift: Tensor, padding: int, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    sizes, channels = _sizes(x, padding), weight.shape[1]
    out = x.new_empty(len(x), sizes["OUT_HEIGHT"] // 2, sizes["OUT_WIDTH"] // 2, channels, dtype=out_dtype)
    return out, x.new_empty(len(x), channels, dtype=torch.float32), x.new_empty(len(x), channels, dtype=torch.float32)


@torch.library.custom_op("m3d::stem_backward", mutates_args=())
def _stem_backward_op(
    grad: Tensor, x: Tensor, weight: Tensor, gain: Tensor, shift: Tensor, mean: Tensor, rstd: Tensor,
    padding: int, images: bool, weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    sizes, constants = _sizes(x, padding), _constants(x, weight, grad.dtype == torch.bfloat16)
    pixels, k = sizes["OUT_HEIGHT"] * sizes["OUT_WIDTH"], constants["K"]
    columns = x.new_empty(len(x) * pixels * k if images else 1, dtype=grad.dtype)
    dweight = x.new_empty(len(x), *weight.shape[1:], dtype=torch.float32) if weights else x.new_empty(1)
    dgain, dshift = torch.empty_like(mean), torch.empty_like(mean)
    _stem_backward[(len(x),)](
        grad.contiguous(), x, weight, gain, shift, mean, rstd, columns, dweight, dgain, dshift,
        len(x) // len(weight), **sizes, **constants, IMAGES=images, WEIGHTS=weights, num_warps=8, num_stages=1,
    )  # fmt: skip
    dx = torch.empty_like(x) if images else x.new_empty(1)
    if images:
        block = 256
        _fold[(triton.cdiv(x.numel(), block),)](columns, dx, x.numel(), **sizes, INPUTS=x.shape[1], K=k, B=block)
    return dx, dweight, dgain, dshift


@_stem_backward_op.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, gain: Tensor, shift: Tensor, mean: Tensor, rstd: Tensor,
    padding: int, images: bool, weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dx = torch.empty_like(x) if images else x.new_empty(1)
    dweight = x.new_empty(len(x), *weight.shape[1:], dtype=torch.float32) if weights else x.new_empty(1)
    return dx, dweight, torch.empty_like(mean), torch.empty_like(mean)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, gain, shift, padding, _ = inputs
    ctx.save_for_backward(x, weight, gain, shift, output[1], output[2])
    ctx.padding = padding


def _differentiate(ctx: Any, grad: Tensor, _mean: Tensor, _rstd: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, gain, shift, mean, rstd = ctx.saved_tensors
    images, weights = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:4])
    dx, dweight, dgain, dshift = _stem_backward_op(
        grad, x, weight, gain, shift, mean, rstd, ctx.padding, images, weights
    )
    if not weights:
        return dx, None, None, None, None, None
    nets = len(weight)
    return (
        dx if images else None,
        dweight.view(nets, -1, *weight.shape[1:]).sum(1),
        dgain.view(nets, -1, gain.shape[1]).sum(1),
        dshift.view(nets, -1, gain.shape[1]).sum(1),
        None,
        None,
    )


_stem_op.register_autograd(_differentiate, setup_context=_remember)


def stem(x: Tensor, weight: Tensor, gain: Tensor, shift: Tensor, padding: int, out_dtype: torch.dtype) -> Tensor:
    """[N, h/2, w/2, O] from images ``x`` [N, ch, h, w]; ``weight`` [R, O, ch, 3, 3]; ``gain`` and ``shift`` [R, O]."""
    arguments = (t.float().contiguous() for t in (x, weight, gain, shift))
    out: Tensor = _stem_op(*arguments, padding, out_dtype)[0]
    return out
