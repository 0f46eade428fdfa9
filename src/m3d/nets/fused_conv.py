"""A convolution of every network on its own few channels: Triton kernels for the maps and for the weights' gradient.

A library's grouped convolution is fast where a group has many channels and a multiple of eight of them. Networks side
by side have narrow layers too: three colours, growths of twelve, 1×1 convolutions, strides. For those cuDNN goes
network by network, cutting channels out and putting them back, ten times a layer. Here a program makes a tile of one
network's output from the pixels that its taps see; the images' gradient is the same kernel with the taps turned around,
and looks between the steps of a stride. The weights' gradient is summed over parts of the pixels, then over the parts,
in a fixed order. Activations are [n, h, w, R·c]; products are of the activations' precision, sums of float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PIXELS = 128  # of a program's tile of output
_SUMMED = 64  # pixels that a program adds to its sum of weights' gradients at a time
_MOST, _DEPTH = 64, 32  # channels of a tile, and how many are multiplied at a time
_PROGRAMS = 2048  # enough to keep a large device busy
# Sizes of layers are numbers like others: a kernel is not compiled anew for each, but what channels are multiples of.
_SIZES = ["pixels", "each", "in_height", "in_width", "height", "width", "nets", "ins", "outs"]


@triton.jit(do_not_specialize=_SIZES)
def _conv(
    x_ptr, weight_ptr, out_ptr,
    pixels, in_height, in_width, height, width, nets, ins, outs,
    STRIDE: tl.constexpr, SPREAD: tl.constexpr, K: tl.constexpr, TURNED: tl.constexpr,
    AI: tl.constexpr, AO: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """M pixels of N of a network's output channels. There are ``ins``·AI input and ``outs``·AO output channels; the
    output's pixels lie STRIDE of the input's apart, or the input's SPREAD of the output's."""
    inputs, outputs = ins * AI, outs * AO
    tiles = tl.cdiv(outputs, N)
    net, first = tl.program_id(1) // tiles, (tl.program_id(1) % tiles) * N
    pixel = tl.program_id(0) * M + tl.arange(0, M)
    row, column = (pixel // width) % height, pixel % width
    corner = (pixel // (width * height)).to(tl.int64) * in_height
    out = first + tl.arange(0, N)
    chunks = tl.cdiv(inputs, D)
    total = tl.zeros([M, N], tl.float32)
    for turn in range(K * K * chunks):
        tap, c = turn // chunks, (turn % chunks) * D + tl.arange(0, D)
        i, j = row * STRIDE + tap // K - K // 2, column * STRIDE + tap % K - K // 2
        seen = (pixel < pixels) & (i >= 0) & (j >= 0) & (i < in_height * SPREAD) & (j < in_width * SPREAD)
        if SPREAD > 1:
            seen = seen & (i % SPREAD == 0) & (j % SPREAD == 0)
            i, j = i // SPREAD, j // SPREAD
        place = ((corner + i) * in_width + j) * (nets * inputs) + net * inputs
        a = tl.load(x_ptr + place[:, None] + c[None, :], mask=seen[:, None] & (c < inputs)[None, :], other=0.0)
        kept = K * K - 1 - tap if TURNED else tap
        weights = weight_ptr + (net * K * K + kept).to(tl.int64) * inputs * outputs
        known = (c < inputs)[:, None] & (out < outputs)[None, :]
        if TURNED:  # channels exchanged as well
            b = tl.load(weights + c[:, None] + out[None, :] * inputs, mask=known, other=0.0)
        else:
            b = tl.load(weights + c[:, None] * outputs + out[None, :], mask=known, other=0.0)
        total += tl.dot(a, b, input_precision=PRECISION)
    place = pixel.to(tl.int64) * (nets * outputs) + net * outputs
    inside = (pixel < pixels)[:, None] & (out < outputs)[None, :]
    tl.store(out_ptr + place[:, None] + out[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def _weights(
    x_ptr, grad_ptr, parts_ptr,
    pixels, each, in_height, in_width, height, width, nets, ins, outs,
    STRIDE: tl.constexpr, K: tl.constexpr,
    AI: tl.constexpr, AO: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tap's weights between D input and N output channels of a network, summed over ``each`` pixels."""
    inputs, outputs = ins * AI, outs * AO
    part, net, tap = tl.program_id(0), tl.program_id(1) // (K * K), tl.program_id(1) % (K * K)
    tiles = tl.cdiv(outputs, N)
    c = (tl.program_id(2) // tiles) * D + tl.arange(0, D)
    out = (tl.program_id(2) % tiles) * N + tl.arange(0, N)
    total = tl.zeros([D, N], tl.float32)
    for start in range(0, each, M):
        pixel = part * each + start + tl.arange(0, M)
        i = (pixel // width) % height * STRIDE + tap // K - K // 2
        j = pixel % width * STRIDE + tap % K - K // 2
        inside = pixel < pixels
        seen = inside & (i >= 0) & (j >= 0) & (i < in_height) & (j < in_width)
        image = (pixel // (width * height)).to(tl.int64)
        place = ((image * in_height + i) * in_width + j) * (nets * inputs) + net * inputs
        a = tl.load(x_ptr + place[:, None] + c[None, :], mask=seen[:, None] & (c < inputs)[None, :], other=0.0)
        place = pixel.to(tl.int64) * (nets * outputs) + net * outputs
        known = inside[:, None] & (out < outputs)[None, :]
        b = tl.load(grad_ptr + place[:, None] + out[None, :], mask=known, other=0.0)
        total += tl.dot(tl.trans(a), b, input_precision=PRECISION)
    base = parts_ptr + ((part * nets + net).to(tl.int64) * (K * K) + tap) * inputs * outputs
    known = (c < inputs)[:, None] & (out < outputs)[None, :]
    tl.store(base + c[:, None] * outputs + out[None, :], total, mask=known)


def _tile(channels: int) -> int:
    return int(min(_MOST, max(16, triton.next_power_of_2(channels))))


def _aligned(channels: int) -> int:
    """The largest power of two up to 16 that divides it: how many numbers may be read at once."""
    return min(16, channels & -channels)


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"  # the latter has no meaning in half precision


def _maps(
    x: Tensor, weight: Tensor, size: tuple[int, int], inputs: int, outputs: int, stride: int, spread: int, turned: bool
) -> Tensor:
    """[n, *size, R·outputs] of ``x`` [n, h, w, R·inputs] by ``weight`` [R, k, k, c, o], read as it is or turned."""
    nets, kernel = weight.shape[:2]
    out = x.new_empty(x.shape[0], *size, nets * outputs)
    pixels, tile = out.shape[0] * size[0] * size[1], _tile(outputs)
    _conv[(triton.cdiv(pixels, _PIXELS), nets * triton.cdiv(outputs, tile))](
        x, weight, out, pixels, x.shape[1], x.shape[2], *size, nets,
        inputs // _aligned(inputs), outputs // _aligned(outputs),
        STRIDE=stride, SPREAD=spread, K=kernel, TURNED=turned, AI=_aligned(inputs), AO=_aligned(outputs),
        M=_PIXELS, N=tile, D=min(_DEPTH, _tile(inputs)), PRECISION=_precision(x.dtype), num_warps=4,
    )  # fmt: skip
    return out


def laid_out(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[R, k, k, I, O] of ``weight`` [R, O, I, k, k] in ``dtype``."""
    nets, outputs, inputs, height, width = weight.shape
    low = weight.new_empty(nets, height, width, inputs, outputs, dtype=dtype)
    return low.copy_(weight.permute(0, 3, 4, 2, 1))


def convolved(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """[n, h', w', R·O] of ``x`` [n, h, w, R·I] by ``weight`` [R, O, I, k, k], k odd, padded by its half."""
    size = (-(-x.shape[1] // stride), -(-x.shape[2] // stride))
    return _maps(x, laid_out(weight, x.dtype), size, weight.shape[2], weight.shape[1], stride, 1, False)


def images_gradient(grad: Tensor, weight: Tensor, size: tuple[int, int], stride: int) -> Tensor:
    """[n, *size, R·I]: of ``x`` in :func:`convolved`, for the gradient ``grad`` of its result."""
    return _maps(grad, laid_out(weight, grad.dtype), size, weight.shape[1], weight.shape[2], 1, stride, True)


def weights_gradient(grad: Tensor, x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """[R, O, I, k, k]: of ``weight`` in :func:`convolved`, in float32."""
    nets, outputs, inputs, kernel, _ = weight.shape
    height, width = grad.shape[1:3]
    pixels, tiles = grad.shape[0] * height * width, (_tile(inputs), _tile(outputs))
    products = triton.cdiv(inputs, tiles[0]) * triton.cdiv(outputs, tiles[1])
    parts = min(triton.cdiv(_PROGRAMS, nets * kernel**2 * products), triton.cdiv(pixels, 8 * _SUMMED))
    each = triton.cdiv(triton.cdiv(pixels, parts), _SUMMED) * _SUMMED
    summed = x.new_empty(parts, nets, kernel, kernel, inputs, outputs, dtype=torch.float32)
    _weights[(parts, nets * kernel**2, products)](
        x, grad, summed, pixels, each, x.shape[1], x.shape[2], height, width, nets,
        inputs // _aligned(inputs), outputs // _aligned(outputs),
        STRIDE=stride, K=kernel, AI=_aligned(inputs), AO=_aligned(outputs),
        M=_SUMMED, N=tiles[1], D=tiles[0], PRECISION=_precision(x.dtype), num_warps=4,
    )  # fmt: skip
    whole = summed[0] if parts == 1 else summed.sum(0)
    return whole.permute(0, 4, 3, 1, 2)
