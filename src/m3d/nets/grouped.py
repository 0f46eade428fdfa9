"""A convolution of every network on its own images, networks' channels side by side, with a backward of its own.

A grouped convolution of the library is fast forward and for the weights' gradient; for the images' gradient cuDNN went
network by network, cutting its channels out and putting them back: a third of the time of training ten networks
(LAB.md). The images' gradient of a convolution that keeps the size is itself such a convolution, of the incoming
gradient with the weights turned by 180° and their channels exchanged, so it is computed as one; where the convolution
has a stride, the incoming gradient is first spread out, with zeros between. Narrow convolutions in half precision go
through kernels of ours on a GPU (``m3d.nets.fused_conv``). Kernels are odd and padded by their half. Activations are
[n, h, w, R·c].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from m3d.own_kernels import HAS_KERNELS

# Whether narrow convolutions in half precision on a GPU go through kernels of ours: off only to compare
# (benchmarks/networks.py). With them a step of ten DenseNet-121, whose convolutions are nearly all narrow, took 185 ms
# instead of 308 (LAB.md); other networks have not been timed.
NARROW_KERNELS = True
_WIDE = 64  # channels of a network, in multiples of which a convolution is left to cuDNN
_HALF = (torch.bfloat16, torch.float16)
_PLAIN = (1, 1)  # a stride or dilation that changes nothing


def _laid_out(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[R·O, I, k, k] of ``weight`` [R, O, I, k, k] in ``dtype``, channels last: cast and moved in one go."""
    nets, outputs, inputs, height, width = weight.shape
    low = weight.new_empty(nets, outputs, height, width, inputs, dtype=dtype)
    low.permute(0, 1, 4, 2, 3).copy_(weight)
    return low.flatten(0, 1).permute(0, 3, 1, 2)


def _padding(weight: Tensor) -> tuple[int, int]:
    return (weight.shape[3] // 2, weight.shape[4] // 2)


def _ours(x: Tensor, weight: Tensor) -> bool:
    """Whether a convolution goes through our kernels."""
    narrow = weight.shape[1] % _WIDE > 0 or weight.shape[2] % _WIDE > 0
    return NARROW_KERNELS and narrow and HAS_KERNELS and x.is_cuda and x.dtype in _HALF


def _convolved(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """[n, h', w', R·O] of ``x`` [n, h, w, R·I], in its precision."""
    laid_out, padding = _laid_out(weight, x.dtype), _padding(weight)
    y = functional.conv2d(x.permute(0, 3, 1, 2), laid_out, None, stride, padding, groups=len(weight))
    return y.permute(0, 2, 3, 1).contiguous()


def _spread(grad: Tensor, size: tuple[int, int], stride: int) -> Tensor:
    """[n, *size, c]: ``grad`` [n, h', w', c] where a convolution with ``stride`` looked, zeros between."""
    wide = grad.new_zeros(grad.shape[0], *size, grad.shape[3])
    wide[:, ::stride, ::stride] = grad
    return wide


def _images_gradient(grad: Tensor, x: Tensor, weight: Tensor, stride: int) -> Tensor:
    spread = grad if stride == 1 else _spread(grad, (x.shape[1], x.shape[2]), stride)
    return _convolved(spread, weight.transpose(1, 2).flip(3, 4), 1)


def _weights_gradient(grad: Tensor, x: Tensor, weight: Tensor, stride: int) -> Tensor:
    nets, outputs, inputs, height, width = weight.shape
    like = x.new_empty(nets * outputs, height, width, inputs).permute(0, 3, 1, 2)  # only its size and layout are read
    _, found, _ = torch.ops.aten.convolution_backward(
        grad.permute(0, 3, 1, 2), x.permute(0, 3, 1, 2), like, None, (stride, stride), _padding(weight), _PLAIN, False,
        (0, 0), nets, (False, True, False),
    )  # fmt: skip
    gradient: Tensor = found.unflatten(0, (nets, outputs))
    return gradient


@torch.library.custom_op("m3d::conv_each", mutates_args=())
def _conv_op(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    if _ours(x, weight):
        from m3d.nets import fused_conv

        return fused_conv.convolved(x, weight, stride)
    return _convolved(x, weight, stride)


@_conv_op.register_fake
def _(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    height, width = (-(-side // stride) for side in x.shape[1:3])
    return x.new_empty(x.shape[0], height, width, weight.shape[0] * weight.shape[1])


@torch.library.custom_op("m3d::conv_each_backward", mutates_args=())
def _conv_backward_op(
    grad: Tensor, x: Tensor, weight: Tensor, stride: int, images: bool, weights: bool
) -> tuple[Tensor, Tensor]:
    dx, dweight = x.new_empty(1), weight.new_empty(1)
    if _ours(x, weight):
        from m3d.nets import fused_conv

        if images:
            dx = fused_conv.images_gradient(grad, weight, (x.shape[1], x.shape[2]), stride)
        if weights:
            dweight = weight.new_empty(weight.shape).copy_(fused_conv.weights_gradient(grad, x, weight, stride))
        return dx, dweight
    if images:
        dx = _images_gradient(grad, x, weight, stride)
    if weights:
        dweight = weight.new_empty(weight.shape).copy_(_weights_gradient(grad, x, weight, stride))
    return dx, dweight


@_conv_backward_op.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, stride: int, images: bool, weights: bool) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(x) if images else x.new_empty(1),
        weight.new_empty(weight.shape) if weights else weight.new_empty(1),
    )


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    x, weight, ctx.stride = inputs
    ctx.save_for_backward(x, weight)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight = ctx.saved_tensors
    images, weights = ctx.needs_input_grad[:2]
    dx, dweight = _conv_backward_op(grad.contiguous(), x, weight, ctx.stride, images, weights)
    return dx if images else None, dweight if weights else None, None


_conv_op.register_autograd(_differentiate, setup_context=_remember)


def conv_each(x: Tensor, weight: Tensor, stride: int = 1) -> Tensor:
    """[n, h', w', R·O] from ``x`` [n, h, w, R·I] and ``weight`` [R, O, I, k, k], k odd; padded by half a kernel and
    computed in the precision of ``x``."""
    out: Tensor = _conv_op(x.contiguous(), weight, stride)
    return out
