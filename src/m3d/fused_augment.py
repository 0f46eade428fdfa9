"""Colour, crop, mirror and cutout in one Triton kernel, forward and backward.

One operation after the other, PyTorch reads and writes every image a dozen times, and its compiler spends longer on
this than on the rest of a step; here an image is read twice and written once, and nothing is compiled but two small
kernels. The plain path of ``m3d.augment`` computes the same function; tests compare the two.

All of it is linear in the pixels but for a constant. With v the value of a pixel in one channel, g its mean over the
channels and m the mean of the whole image, brightness b, saturation s and contrast c make of it

    c · (s · v + (1 − s) · g) + (1 − c) · m + b,

which is moved by whole pixels and mirrored, with zeros where nothing comes from or the cutout square lies. The gradient
is moved back and mixed by the same formula without b, m being the mean of what came back.
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
_SIGN, _DOWN, _RIGHT = tl.constexpr(6), tl.constexpr(7), tl.constexpr(8)
_HOLE, _HOLE_SIDE = tl.constexpr(9), tl.constexpr(11)


def augment_fits(images: Tensor) -> bool:
    """Whether ``augment`` takes these images [G, n, ch, h, w]."""
    return images.dtype == torch.float32 and images.shape[2] <= _MOST_CHANNELS


@triton.jit
def _across(x, sign, width):
    """A column, mirrored if ``sign`` is −1."""
    return tl.where(sign > 0, x, width - 1 - x)


@triton.jit
def _shown(y, x, row, column, numbers, height, width):
    """Whether the pixel (y, x) of the result shows one of the image, (row, column): not outside, not cut out."""
    tall, wide = tl.load(numbers + _HOLE_SIDE), tl.load(numbers + _HOLE_SIDE + 1)
    below, beside = y - tl.load(numbers + _HOLE), x - tl.load(numbers + _HOLE + 1)
    cut = (below >= 0) & (below < tall) & (beside >= 0) & (beside < wide)
    return (row >= 0) & (row < height) & (column >= 0) & (column < width) & (cut == 0)


@triton.jit
def _mixed(value, grey, level, saturation, contrast):
    return contrast * (saturation * value + (1.0 - saturation) * grey) + (1.0 - contrast) * level


@triton.jit
def _augment_forward(
    x_ptr, numbers_ptr, out_ptr,
    group, height, width,
    CHANNELS: tl.constexpr, NUMBERS: tl.constexpr, B: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One image: its mean first, then every pixel of the result from where it comes."""
    image = tl.program_id(0).to(tl.int64)
    numbers = numbers_ptr + (image // group) * NUMBERS
    pixels = height * width
    start = image * CHANNELS * pixels
    total = tl.zeros([B], tl.float32)
    for tile in range(TILES):
        q = tile * B + tl.arange(0, B)
        for channel in tl.static_range(CHANNELS):
            total += tl.load(x_ptr + start + channel * pixels + q, mask=q < pixels, other=0.0)
    level = tl.sum(total, axis=0) / (CHANNELS * pixels)
    brightness = tl.load(numbers + _BRIGHTNESS)
    saturation, contrast = tl.load(numbers + _SATURATION), tl.load(numbers + _CONTRAST)
    sign = tl.load(numbers + _SIGN)
    down, right = tl.load(numbers + _DOWN).to(tl.int32), tl.load(numbers + _RIGHT).to(tl.int32)
    for tile in range(TILES):
        q = tile * B + tl.arange(0, B)
        y, x = q // width, q % width
        row, column = y + down, _across(x, sign, width) + right
        shown = (q < pixels) & _shown(y, x, row, column, numbers, height, width)
        source = x_ptr + start + row * width + column
        grey = tl.zeros([B], tl.float32)
        for channel in tl.static_range(CHANNELS):
            grey += tl.load(source + channel * pixels, mask=shown, other=0.0)
        grey = grey / CHANNELS
        for channel in tl.static_range(CHANNELS):
            value = tl.load(source + channel * pixels, mask=shown, other=0.0)
            value = _mixed(value, grey, level, saturation, contrast) + brightness
            tl.store(out_ptr + start + channel * pixels + q, tl.where(shown, value, 0.0), mask=q < pixels)


@triton.jit
def _augment_backward(
    grad_ptr, numbers_ptr, out_ptr,
    group, height, width,
    CHANNELS: tl.constexpr, NUMBERS: tl.constexpr, B: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The adjoint: the mean of what is shown of the gradient first, then every pixel's from where it went."""
    image = tl.program_id(0).to(tl.int64)
    numbers = numbers_ptr + (image // group) * NUMBERS
    pixels = height * width
    start = image * CHANNELS * pixels
    sign = tl.load(numbers + _SIGN)
    down, right = tl.load(numbers + _DOWN).to(tl.int32), tl.load(numbers + _RIGHT).to(tl.int32)
    total = tl.zeros([B], tl.float32)
    for tile in range(TILES):
        q = tile * B + tl.arange(0, B)
        y, x = q // width, q % width
        shown = (q < pixels) & _shown(y, x, y + down, _across(x, sign, width) + right, numbers, height, width)
        for channel in tl.static_range(CHANNELS):
            total += tl.load(grad_ptr + start + channel * pixels + q, mask=shown, other=0.0)
    level = tl.sum(total, axis=0) / (CHANNELS * pixels)
    saturation, contrast = tl.load(numbers + _SATURATION), tl.load(numbers + _CONTRAST)
    for tile in range(TILES):
        q = tile * B + tl.arange(0, B)
        row, column = q // width, q % width
        y, x = row - down, _across(column - right, sign, width)
        there = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        shown = (q < pixels) & there & _shown(y, x, row, column, numbers, height, width)
        source = grad_ptr + start + y * width + x
        grey = tl.zeros([B], tl.float32)
        for channel in tl.static_range(CHANNELS):
            grey += tl.load(source + channel * pixels, mask=shown, other=0.0)
        grey = grey / CHANNELS
        for channel in tl.static_range(CHANNELS):
            value = tl.load(source + channel * pixels, mask=shown, other=0.0)
            value = _mixed(value, grey, level, saturation, contrast)
            tl.store(out_ptr + start + channel * pixels + q, value, mask=q < pixels)


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


def augment(images: Tensor, numbers: Tensor) -> Tensor:
    """``images`` [G, n, ch, h, w] as ``numbers`` [G, NUMBERS] say: packed parameters that neither scale nor turn."""
    out: Tensor = _augment_op(images.contiguous(), numbers.contiguous())
    return out
