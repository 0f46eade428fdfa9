"""A ConvNet's first block as Triton kernels: 3×3 convolution, instance norm, ReLU, 2×2 average pooling.

With one to three input channels the convolution is cheap and its output large: 1,280 CIFAR images make 335 MB of it in
bf16, written once and read twice. Here it is computed where it is needed and never written:

- ``_gather`` lays out every pixel's 3×3 neighbourhood as a row of K numbers (27 of 32 for three channels), 84 MB for
  the same images, in the order of the pooling squares. One spare column holds ones.
- The statistics need no convolution: with M = PᵀP of an image's patches P, a channel with weights w has mean wᵀ·(row of
  M that belongs to the ones) / n and mean square wᵀMw / n.
- Forward multiplies patches by weights square by square and writes the pooled result; backward does it again.

Products are bf16 or float32 as asked, everything else float32. A convolution's bias has no effect before an instance
norm, which subtracts the mean, so there is none here.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

EPS = 1e-5
_MOST_CHANNELS = 128  # output channels that one program keeps together
_TILE = (
    32  # pooled pixels a program works on at a time; 64 rows would select Hopper's asynchronous products, slower here
)
_GATHER = 128  # patches a gathering program writes
_WARPS = 4


def stem_fits(height: int, width: int, inputs: int, channels: int) -> bool:
    """Whether ``stem`` takes a convolution with ``inputs`` channels in and these output maps."""
    power_of_two = channels & (channels - 1) == 0
    return height % 2 == 0 and width % 2 == 0 and inputs <= 3 and power_of_two and 16 <= channels <= _MOST_CHANNELS


@triton.jit
def _gather(
    x_ptr, patches_ptr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, PADDING: tl.constexpr,
    INPUTS: tl.constexpr, K: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Patches of B pixels of one image; row = corner of the pooling square × pooled pixels + pooled pixel."""
    image = tl.program_id(0).to(tl.int64)
    place, k = tl.program_id(1) * B + tl.arange(0, B), tl.arange(0, K)
    pixels: tl.constexpr = OUT_HEIGHT * OUT_WIDTH
    taps: tl.constexpr = INPUTS * 9
    corner, q = place // (pixels // 4), place % (pixels // 4)
    row = (q // (OUT_WIDTH // 2)) * 2 + corner // 2
    column = (q % (OUT_WIDTH // 2)) * 2 + corner % 2
    y = row[:, None] + ((k % 9) // 3)[None, :] - PADDING
    x = column[:, None] + (k % 3)[None, :] - PADDING
    known = (k < taps)[None, :] & (place < pixels)[:, None] & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
    source = ((image * INPUTS + (k // 9)[None, :]) * HEIGHT + y) * WIDTH + x
    value = tl.load(x_ptr + source, mask=known, other=0.0)
    value = tl.where((k == taps)[None, :], 1.0, value)
    target = (image * pixels + place[:, None]) * K + k[None, :]
    tl.store(patches_ptr + target, value.to(patches_ptr.dtype.element_ty), mask=(place < pixels)[:, None])


@triton.jit
def _weights(weight_ptr, net, INPUTS: tl.constexpr, K: tl.constexpr, O: tl.constexpr):
    """[K, O] float32: one network's convolution, zero for the spare columns."""
    channel, k = tl.arange(0, O), tl.arange(0, K)
    place = (net * O + channel[None, :]) * (INPUTS * 9) + k[:, None]
    return tl.load(weight_ptr + place, mask=(k < INPUTS * 9)[:, None], other=0.0)


@triton.jit
def _rows(patches_ptr, image, first, PIXELS: tl.constexpr, K: tl.constexpr, B: tl.constexpr):
    """[B, K]: patches ``first`` to ``first + B - 1`` of an image, zeros past its last."""
    place, k = first + tl.arange(0, B), tl.arange(0, K)
    spot = (image * PIXELS + place[:, None]) * K + k[None, :]
    return tl.load(patches_ptr + spot, mask=(place < PIXELS)[:, None], other=0.0)


@triton.jit
def _times(a, b):
    """a·b with float32 sums; float32 factors are split in three so that nothing is lost to TF32."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _stem_forward(
    patches_ptr, weight_ptr, gain_ptr, shift_ptr, out_ptr, mean_ptr, rstd_ptr,
    per_net, nets, eps,
    PIXELS: tl.constexpr, INPUTS: tl.constexpr, K: tl.constexpr, O: tl.constexpr, Q: tl.constexpr,
):  # fmt: skip
    """One image, all channels."""
    image = tl.program_id(0).to(tl.int64)
    net = image // per_net
    channel, k = tl.arange(0, O), tl.arange(0, K)
    low = _weights(weight_ptr, net, INPUTS, K, O).to(patches_ptr.dtype.element_ty)
    weight = low.to(tl.float32)  # the statistics are of what is multiplied, rounded as it is
    moments = tl.zeros([K, K], tl.float32)
    for first in range(0, PIXELS, 4 * Q):
        rows = _rows(patches_ptr, image, first, PIXELS, K, 4 * Q)
        moments += _times(tl.trans(rows), rows)
    sums = tl.sum(tl.where((k == INPUTS * 9)[:, None], moments, 0.0), axis=0)  # the row of the ones
    mean = tl.sum(weight * sums[:, None], axis=0) / PIXELS
    square = tl.sum(weight * _times(moments, weight), axis=0) / PIXELS
    rstd = 1.0 / tl.sqrt(tl.maximum(square - mean * mean, 0.0) + eps)
    tl.store(mean_ptr + image * O + channel, mean)
    tl.store(rstd_ptr + image * O + channel, rstd)
    scale = tl.load(gain_ptr + net * O + channel) * rstd
    offset = tl.load(shift_ptr + net * O + channel) - mean * scale
    pooled: tl.constexpr = PIXELS // 4
    for first in range(0, pooled, Q):
        result = tl.zeros([Q, O], tl.float32)
        for corner in tl.static_range(4):
            y = _times(_rows(patches_ptr, image, corner * pooled + first, PIXELS, K, Q), low)
            result += tl.maximum(y * scale[None, :] + offset[None, :], 0.0)
        q = first + tl.arange(0, Q)
        place = (((image % per_net) * pooled + q[:, None]) * nets + net) * O + channel[None, :]
        tl.store(out_ptr + place, (result * 0.25).to(out_ptr.dtype.element_ty), mask=(q < pooled)[:, None])


@triton.jit
def _stem_backward(
    grad_ptr, patches_ptr, weight_ptr, gain_ptr, shift_ptr, mean_ptr, rstd_ptr,
    dy_ptr, dweight_ptr, dgain_ptr, dshift_ptr,
    per_net, nets,
    PIXELS: tl.constexpr, INPUTS: tl.constexpr, K: tl.constexpr, O: tl.constexpr, Q: tl.constexpr,
    IMAGES: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """One image: gradients of the convolution's output (IMAGES; the host goes on from there) and of the weights."""
    image = tl.program_id(0).to(tl.int64)
    net = image // per_net
    channel, k = tl.arange(0, O), tl.arange(0, K)
    kind = patches_ptr.dtype.element_ty
    low = _weights(weight_ptr, net, INPUTS, K, O).to(kind)
    gain, shift = tl.load(gain_ptr + net * O + channel), tl.load(shift_ptr + net * O + channel)
    mean, rstd = tl.load(mean_ptr + image * O + channel), tl.load(rstd_ptr + image * O + channel)
    pooled: tl.constexpr = PIXELS // 4
    passed_sum, hat_sum = tl.zeros([Q, O], tl.float32), tl.zeros([Q, O], tl.float32)
    for first in range(0, pooled, Q):
        q = first + tl.arange(0, Q)
        place = (((image % per_net) * pooled + q[:, None]) * nets + net) * O + channel[None, :]
        incoming = tl.load(grad_ptr + place, mask=(q < pooled)[:, None], other=0.0).to(tl.float32) * 0.25
        for corner in tl.static_range(4):
            y = _times(_rows(patches_ptr, image, corner * pooled + first, PIXELS, K, Q), low)
            hat = (y - mean[None, :]) * rstd[None, :]
            passed = tl.where(hat * gain[None, :] + shift[None, :] > 0, incoming, 0.0)
            passed_sum += passed
            hat_sum += passed * hat
    dshift, dgain = tl.sum(passed_sum, axis=0), tl.sum(hat_sum, axis=0)
    tl.store(dgain_ptr + image * O + channel, dgain)
    tl.store(dshift_ptr + image * O + channel, dshift)
    level, slope, scale = dshift / PIXELS, dgain / PIXELS, gain * rstd
    dweight = tl.zeros([K, O], tl.float32)
    for first in range(0, pooled, Q):
        q = first + tl.arange(0, Q)
        place = (((image % per_net) * pooled + q[:, None]) * nets + net) * O + channel[None, :]
        incoming = tl.load(grad_ptr + place, mask=(q < pooled)[:, None], other=0.0).to(tl.float32) * 0.25
        for corner in tl.static_range(4):
            rows = _rows(patches_ptr, image, corner * pooled + first, PIXELS, K, Q)
            hat = (_times(rows, low) - mean[None, :]) * rstd[None, :]
            passed = tl.where(hat * gain[None, :] + shift[None, :] > 0, incoming, 0.0)
            dy = (passed - level[None, :] - hat * slope[None, :]) * scale[None, :]
            dy = tl.where((q < pooled)[:, None], dy, 0.0).to(kind)
            if IMAGES:
                spot = (image * PIXELS + corner * pooled + q)[:, None] * O + channel[None, :]
                tl.store(dy_ptr + spot, dy, mask=(q < pooled)[:, None])
            if WEIGHTS:
                dweight += _times(tl.trans(rows), dy)
    if WEIGHTS:
        spot = (image * O + channel[None, :]) * (INPUTS * 9) + k[:, None]
        tl.store(dweight_ptr + spot, dweight, mask=(k < INPUTS * 9)[:, None])


@triton.jit
def _fold(
    columns_ptr, out_ptr, count,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, PADDING: tl.constexpr,
    INPUTS: tl.constexpr, K: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Each input pixel's gradient: the sum of what the (at most nine) patches that contain it received."""
    place = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    x, y = place % WIDTH, (place // WIDTH) % HEIGHT
    channel, image = (place // (WIDTH * HEIGHT)) % INPUTS, place // (WIDTH * HEIGHT * INPUTS)
    pixels: tl.constexpr = OUT_HEIGHT * OUT_WIDTH
    total = tl.zeros([B], tl.float32)
    for tap in tl.static_range(9):
        row, column = y - tap // 3 + PADDING, x - tap % 3 + PADDING
        inside = (place < count) & (row >= 0) & (row < OUT_HEIGHT) & (column >= 0) & (column < OUT_WIDTH)
        patch = ((row % 2) * 2 + column % 2) * (pixels // 4) + (row // 2) * (OUT_WIDTH // 2) + column // 2
        spot = (image * pixels + patch) * K + channel * 9 + tap
        total += tl.load(columns_ptr + spot, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, total, mask=place < count)


def _sizes(x: Tensor, padding: int) -> dict[str, int]:
    height, width = x.shape[-2:]
    return {
        "HEIGHT": height,
        "WIDTH": width,
        "OUT_HEIGHT": height + 2 * padding - 2,
        "OUT_WIDTH": width + 2 * padding - 2,
        "PADDING": padding,
    }


def _columns(x: Tensor) -> int:
    """K: taps of a patch and the column of ones, rounded up to what tensor cores take."""
    return max(16, int(triton.next_power_of_2(x.shape[1] * 9 + 1)))


def _outputs(x: Tensor, weight: Tensor, padding: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty (result, mean, rstd, patches)."""
    sizes, (nets, channels) = _sizes(x, padding), weight.shape[:2]
    height, width = sizes["OUT_HEIGHT"], sizes["OUT_WIDTH"]
    out = x.new_empty(len(x) // nets, height // 2, width // 2, nets * channels, dtype=dtype)
    mean, rstd = (x.new_empty(len(x), channels, dtype=torch.float32) for _ in range(2))
    return out, mean, rstd, x.new_empty(len(x), height * width, _columns(x), dtype=dtype)


@torch.library.custom_op("m3d::stem", mutates_args=())
def _stem_op(
    x: Tensor, weight: Tensor, gain: Tensor, shift: Tensor, padding: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, mean, rstd, patches = _outputs(x, weight, padding, dtype)
    pixels, k = patches.shape[1:]
    inputs, (nets, channels) = x.shape[1], weight.shape[:2]
    _gather[(len(x), triton.cdiv(pixels, _GATHER))](x, patches, **_sizes(x, padding), INPUTS=inputs, K=k, B=_GATHER)
    _stem_forward[(len(x),)](
        patches, weight, gain, shift, out, mean, rstd, len(x) // nets, nets, EPS,
        PIXELS=pixels, INPUTS=inputs, K=k, O=channels, Q=_TILE, num_warps=_WARPS,
    )  # fmt: skip
    return out, mean, rstd, patches


@_stem_op.register_fake
def _(
    x: Tensor, weight: Tensor, gain: Tensor, shift: Tensor, padding: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _outputs(x, weight, padding, dtype)


def _gradients(
    x: Tensor, weight: Tensor, mean: Tensor, images: bool, weights: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty (dx, dweight per image, dgain per image, dshift per image); what is not asked for has one element."""
    dx = torch.empty_like(x) if images else x.new_empty(1)
    dweight = x.new_empty(len(x), *weight.shape[1:], dtype=torch.float32) if weights else x.new_empty(1)
    return dx, dweight, torch.empty_like(mean), torch.empty_like(mean)


@torch.library.custom_op("m3d::stem_backward", mutates_args=())
def _stem_backward_op(
    grad: Tensor, x: Tensor, patches: Tensor, weight: Tensor, gain: Tensor, shift: Tensor, mean: Tensor, rstd: Tensor,
    padding: int, images: bool, weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dx, dweight, dgain, dshift = _gradients(x, weight, mean, images, weights)
    pixels, k = patches.shape[1:]
    inputs, (nets, channels) = x.shape[1], weight.shape[:2]
    dy = patches.new_empty(nets, len(x) // nets * pixels, channels) if images else patches
    _stem_backward[(len(x),)](
        grad.contiguous(), patches, weight, gain, shift, mean, rstd, dy, dweight, dgain, dshift,
        len(x) // nets, nets, PIXELS=pixels, INPUTS=inputs, K=k, O=channels, Q=_TILE,
        IMAGES=images, WEIGHTS=weights, num_warps=_WARPS,
    )  # fmt: skip
    if images:
        taps = weight.flatten(2).to(dy.dtype)  # [R, O, taps]
        columns = dy @ torch.nn.functional.pad(taps, (0, k - taps.shape[2]))  # [R, n·pixels, K]: of the patches
        block, sizes = 256, _sizes(x, padding)
        _fold[(triton.cdiv(x.numel(), block),)](columns, dx, x.numel(), **sizes, INPUTS=inputs, K=k, B=block)
    return dx, dweight, dgain, dshift


@_stem_backward_op.register_fake
def _(
    grad: Tensor, x: Tensor, patches: Tensor, weight: Tensor, gain: Tensor, shift: Tensor, mean: Tensor, rstd: Tensor,
    padding: int, images: bool, weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _gradients(x, weight, mean, images, weights)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, gain, shift, padding, _ = inputs
    ctx.save_for_backward(x, output[3], weight, gain, shift, output[1], output[2])
    ctx.padding = padding


def _differentiate(ctx: Any, grad: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
    x, patches, weight, gain, shift, mean, rstd = ctx.saved_tensors
    images, weights = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:4])
    dx, dweight, dgain, dshift = _stem_backward_op(
        grad, x, patches, weight, gain, shift, mean, rstd, ctx.padding, images, weights
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


def stem(x: Tensor, weight: Tensor, gain: Tensor, shift: Tensor, padding: int, dtype: torch.dtype) -> Tensor:
    """[n, h/2, w/2, R·O] from images ``x`` [R·n, ch, h, w] of R networks, ``weight`` [R, O, ch, 3, 3], ``gain`` and
    ``shift`` [R, O]: the networks' channels side by side, as a grouped convolution takes them."""
    arguments = (t.float().contiguous() for t in (x, weight, gain, shift))
    out: Tensor = _stem_op(*arguments, padding, dtype)[0]
    return out
