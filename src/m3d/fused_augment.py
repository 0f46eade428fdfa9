"""Colour, geometry and cutout in one Triton kernel, forward and, where images move by whole pixels, backward.

One operation after the other, PyTorch reads and writes every image a dozen times, and its compiler spends longer on
this than on the rest of a step; here an image is read for its mean, then, mostly from the cache, for the result, and
written once. The plain path of ``m3d.augment`` computes the same function; tests compare the two.

All of it is linear in the pixels but for a constant. With v the value of a pixel in one channel, g its mean over the
channels and m the mean of the whole image, brightness b, saturation s and contrast c make of it

    c · (s · v + (1 − s) · g) + (1 − c) · m + b,

which is moved by whole pixels and mirrored, with zeros where nothing comes from or the cutout square lies. The gradient
is moved back and mixed by the same formula without b, m being the mean of what came back.

Images that are scaled or turned are sampled between pixels by the same formula, without a gradient: those that networks
are trained on need none.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST_CHANNELS = 4
_TILE = 1024  # pixels a program works on at a time
# Where a group's numbers stand in ``Parameters.packed()``.
_BRIGHTNESS, _SATURATION, _CONTRAST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_MATRIX, _SIGN, _DOWN, _RIGHT = tl.constexpr(3), tl.constexpr(6), tl.constexpr(7), tl.constexpr(8)
_HOLE, _HOLE_SIDE = tl.constexpr(9), tl.constexpr(11)


def augment_fits(images: Tensor) -> bool:
    """Whether ``augment`` takes these images [G, n, ch, h, w]."""
    exact = images.shape[3] * images.shape[4] <= 2**24  # pixels that float32 can number
    return images.dtype == torch.float32 and images.shape[2] <= _MOST_CHANNELS and exact


@triton.jit
def _mean(x_ptr, start, pixels, CHANNELS: tl.constexpr, B: tl.constexpr, TILES: tl.constexpr):
    """Of an image that begins at ``start``, over pixels and channels."""
    total = tl.zeros([B], tl.float32)
    for tile in range(TILES):
        q = tile * B + tl.arange(0, B)
        for channel in tl.static_range(CHANNELS):
            total += tl.load(x_ptr + start + channel * pixels + q, mask=q < pixels, other=0.0)
    return tl.sum(total, axis=0) / (CHANNELS * pixels)


@triton.jit
def _across(x, sign, width):
    """A column, mirrored if ``sign`` is −1."""
    return tl.where(sign > 0, x, width - 1 - x)


@triton.jit
def _kept(y, x, numbers):
    """Whether the pixel (y, x) of the result lies outside the cutout square."""
    tall, wide = tl.load(numbers + _HOLE_SIDE), tl.load(numbers + _HOLE_SIDE + 1)
    below, beside = y - tl.load(numbers + _HOLE), x - tl.load(numbers + _HOLE + 1)
    return (below < 0) | (below >= tall) | (beside < 0) | (beside >= wide)


@triton.jit
def _inside(row, column, height, width):
    return (row >= 0) & (row < height) & (column >= 0) & (column < width)


@triton.jit
def _own(numbers_ptr, group, height, width, CHANNELS: tl.constexpr, NUMBERS: tl.constexpr):
    """(its group's numbers, how many pixels it has, where it begins) of this program's image."""
    image = tl.program_id(0).to(tl.int64)
    pixels = height * width
    return numbers_ptr + (image // group) * NUMBERS, pixels, image * CHANNELS * pixels


@triton.jit
def _write_mixed(source, out, there, shown, constant, numbers, pixels, CHANNELS: tl.constexpr, B: tl.constexpr):
    """c · (s · v + (1 − s) · g) + ``constant`` to ``out``, where ``there``; v and g, from ``source``, are 0 unless
    ``shown``."""
    saturation, contrast = tl.load(numbers + _SATURATION), tl.load(numbers + _CONTRAST)
    grey = tl.zeros([B], tl.float32)
    for channel in tl.static_range(CHANNELS):
        grey += tl.load(source + channel * pixels, mask=shown, other=0.0)
    rest = contrast * (1.0 - saturation) * (grey / CHANNELS) + constant
    for channel in tl.static_range(CHANNELS):
        value = tl.load(source + channel * pixels, mask=shown, other=0.0)
        tl.store(out + channel * pixels, contrast * saturation * value + rest, mask=there)


@triton.jit
def _augment_forward(
    x_ptr, numbers_ptr, out_ptr,
    group, height, width,
    CHANNELS: tl.constexpr, NUMBERS: tl.constexpr, B: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One image: its mean first, then every pixel of the result from where it comes."""
    numbers, pixels, start = _own(numbers_ptr, group, height, width, CHANNELS, NUMBERS)
    level = _mean(x_ptr, start, pixels, CHANNELS, B, TILES)
    constant = (1.0 - tl.load(numbers + _CONTRAST)) * level + tl.load(numbers + _BRIGHTNESS)
    sign = tl.load(numbers + _SIGN)
    down, right = tl.load(numbers + _DOWN).to(tl.int32), tl.load(numbers + _RIGHT).to(tl.int32)
    for tile in range(TILES):
        q = tile * B + tl.arange(0, B)
        y, x = q // width, q % width
        row, column = y + down, _across(x, sign, width) + right
        shown = (q < pixels) & _inside(row, column, height, width) & _kept(y, x, numbers)
        source, out = x_ptr + start + row * width + column, out_ptr + start + q
        _write_mixed(source, out, q < pixels, shown, tl.where(shown, constant, 0.0), numbers, pixels, CHANNELS, B)


@triton.jit
def _augment_backward(
    grad_ptr, numbers_ptr, out_ptr,
    group, height, width,
    CHANNELS: tl.constexpr, NUMBERS: tl.constexpr, B: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The adjoint: the mean of what is shown of the gradient first, then every pixel's from where it went."""
    numbers, pixels, start = _own(numbers_ptr, group, height, width, CHANNELS, NUMBERS)
    sign = tl.load(numbers + _SIGN)
    down, right = tl.load(numbers + _DOWN).to(tl.int32), tl.load(numbers + _RIGHT).to(tl.int32)
    total = tl.zeros([B], tl.float32)
    for tile in range(TILES):
        q = tile * B + tl.arange(0, B)
        y, x = q // width, q % width
        row, column = y + down, _across(x, sign, width) + right
        shown = (q < pixels) & _inside(row, column, height, width) & _kept(y, x, numbers)
        for channel in tl.static_range(CHANNELS):
            total += tl.load(grad_ptr + start + channel * pixels + q, mask=shown, other=0.0)
    level = tl.sum(total, axis=0) / (CHANNELS * pixels)
    constant = (1.0 - tl.load(numbers + _CONTRAST)) * level
    for tile in range(TILES):
        q = tile * B + tl.arange(0, B)
        row, column = q // width, q % width
        y, x = row - down, _across(column - right, sign, width)
        shown = (q < pixels) & _inside(y, x, height, width) & _kept(y, x, numbers)
        source, out = grad_ptr + start + y * width + x, out_ptr + start + q
        _write_mixed(source, out, q < pixels, shown, constant, numbers, pixels, CHANNELS, B)


@triton.jit
def _corner(row, column, height, width, K: tl.constexpr):
    """(how near the K-th of the four pixels around a place is, whether there is one, its number in the image)."""
    y, x = tl.floor(row) + K // 2, tl.floor(column) + K % 2
    near = (1.0 - tl.abs(row - y)) * (1.0 - tl.abs(column - x))
    return near, _inside(y, x, height, width), (y * width + x).to(tl.int32)


@triton.jit
def _augment_between(
    x_ptr, numbers_ptr, out_ptr,
    group, height, width,
    CHANNELS: tl.constexpr, NUMBERS: tl.constexpr, B: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """``_augment_forward`` for any matrix: every pixel of the result is a mean of four, weighted by their nearness."""
    numbers, pixels, start = _own(numbers_ptr, group, height, width, CHANNELS, NUMBERS)
    level = _mean(x_ptr, start, pixels, CHANNELS, B, TILES)
    saturation, contrast = tl.load(numbers + _SATURATION), tl.load(numbers + _CONTRAST)
    constant = (1.0 - contrast) * level + tl.load(numbers + _BRIGHTNESS)
    yy, yx = tl.load(numbers + _MATRIX), tl.load(numbers + _MATRIX + 1)
    xy, xx = tl.load(numbers + _MATRIX + 2), tl.load(numbers + _MATRIX + 3)
    middle_y, middle_x = (height - 1) * 0.5, (width - 1) * 0.5
    down, right = tl.load(numbers + _DOWN) + middle_y, tl.load(numbers + _RIGHT) + middle_x
    for tile in range(TILES):
        q = tile * B + tl.arange(0, B)
        y, x = q // width, q % width
        from_y, from_x = y - middle_y, x - middle_x
        row, column = yy * from_y + yx * from_x + down, xy * from_y + xx * from_x + right
        kept = (q < pixels) & _kept(y, x, numbers)
        weight, grey = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
        for k in tl.static_range(4):
            near, there, place = _corner(row, column, height, width, k)
            weight += tl.where(kept & there, near, 0.0)
            for channel in tl.static_range(CHANNELS):
                source = x_ptr + start + channel * pixels + place
                grey += near * tl.load(source, mask=kept & there, other=0.0)
        rest = contrast * (1.0 - saturation) * (grey / CHANNELS) + constant * weight
        for channel in tl.static_range(CHANNELS):
            value = tl.zeros([B], tl.float32)
            for k in tl.static_range(4):
                near, there, place = _corner(row, column, height, width, k)
                source = x_ptr + start + channel * pixels + place
                value += near * tl.load(source, mask=kept & there, other=0.0)
            tl.store(out_ptr + start + channel * pixels + q, contrast * saturation * value + rest, mask=q < pixels)


def _launch(kernel: Any, images: Tensor, numbers: Tensor) -> Tensor:
    groups, n, channels, height, width = images.shape
    out = torch.empty_like(images)
    tile = min(_TILE, triton.next_power_of_2(height * width))
    kernel[(groups * n,)](
        images, numbers, out, n, height, width,
        CHANNELS=channels, NUMBERS=numbers.shape[1], B=tile, TILES=triton.cdiv(height * width, tile), num_warps=4,
    )  # fmt: skip
    return out


@torch.library.custom_op("m3d::augment", mutates_args=())
def _augment_op(images: Tensor, numbers: Tensor) -> Tensor:
    return _launch(_augment_forward, images, numbers)


@torch.library.custom_op("m3d::augment_backward", mutates_args=())
def _augment_backward_op(gradient: Tensor, numbers: Tensor) -> Tensor:
    return _launch(_augment_backward, gradient, numbers)


@_augment_op.register_fake
def _(images: Tensor, numbers: Tensor) -> Tensor:
    return torch.empty_like(images)


@_augment_backward_op.register_fake
def _(gradient: Tensor, numbers: Tensor) -> Tensor:
    return torch.empty_like(gradient)


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (numbers,) = ctx.saved_tensors
    return _augment_backward_op(gradient.contiguous(), numbers), None


_augment_op.register_autograd(_differentiate, setup_context=_remember)


@torch.library.custom_op("m3d::augment_between", mutates_args=())
def _between_op(images: Tensor, numbers: Tensor) -> Tensor:
    return _launch(_augment_between, images, numbers)


@_between_op.register_fake
def _(images: Tensor, numbers: Tensor) -> Tensor:
    return torch.empty_like(images)


def augment_between(images: Tensor, numbers: Tensor) -> Tensor:
    """``images`` [G, n, ch, h, w] as ``numbers`` [G, NUMBERS] say, whatever they say; without a gradient."""
    out: Tensor = _between_op(images.contiguous(), numbers.contiguous())
    return out


def augment(images: Tensor, numbers: Tensor) -> Tensor:
    """``images`` [G, n, ch, h, w] as ``numbers`` [G, NUMBERS] say: packed parameters that neither scale nor turn."""
    out: Tensor = _augment_op(images.contiguous(), numbers.contiguous())
    return out
