"""A 3×3 convolution of every network on its own images, as one grouped convolution with a backward of its own.

cuDNN's grouped convolution is fast forward and for the weights' gradient, but for the images' gradient it went network
by network, cutting its channels out and putting them back: a third of the time of training ten networks (LAB.md). The
images' gradient of a convolution with padding 1 is itself such a convolution, of the incoming gradient with the weights
turned by 180° and their channels exchanged, so it is computed as one. Activations are [n, h, w, R·c], the networks'
channels side by side.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_SAME = (1, 1)  # padding, stride and dilation: a 3×3 convolution that keeps the size


def _laid_out(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[R·O, I, 3, 3] of ``weight`` [R, O, I, 3, 3] in ``dtype``, channels last: cast and moved in one go."""
    nets, outputs, inputs = weight.shape[:3]
    low = weight.new_empty(nets, outputs, 3, 3, inputs, dtype=dtype)
    low.permute(0, 1, 4, 2, 3).copy_(weight)
    return low.flatten(0, 1).permute(0, 3, 1, 2)


def _convolved(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, h, w, R·O] of ``x`` [n, h, w, R·I]."""
    y = functional.conv2d(x.permute(0, 3, 1, 2), _laid_out(weight, dtype), padding=_SAME, groups=len(weight))
    return y.permute(0, 2, 3, 1).contiguous()


@torch.library.custom_op("m3d::conv_each", mutates_args=())
def _conv_op(x: Tensor, weight: Tensor) -> Tensor:
    return _convolved(x, weight, x.dtype)


@_conv_op.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:3], weight.shape[0] * weight.shape[1])


@torch.library.custom_op("m3d::conv_each_backward", mutates_args=())
def _conv_backward_op(grad: Tensor, x: Tensor, weight: Tensor, images: bool, weights: bool) -> tuple[Tensor, Tensor]:
    dx, dweight = x.new_empty(1), weight.new_empty(1)
    if images:
        dx = _convolved(grad, weight.transpose(1, 2).flip(3, 4), grad.dtype)
    if weights:
        nets, outputs, inputs = weight.shape[:3]
        like = x.new_empty(nets * outputs, 3, 3, inputs).permute(0, 3, 1, 2)  # only its size and layout are read
        _, found, _ = torch.ops.aten.convolution_backward(
            grad.permute(0, 3, 1, 2), x.permute(0, 3, 1, 2), like, None, _SAME, _SAME, _SAME, False, (0, 0), nets,
            (False, True, False),
        )  # fmt: skip
        dweight = weight.new_empty(weight.shape).copy_(found.unflatten(0, (nets, outputs)))
    return dx, dweight


@_conv_backward_op.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, images: bool, weights: bool) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(x) if images else x.new_empty(1),
        weight.new_empty(weight.shape) if weights else weight.new_empty(1),
    )


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    images, weights = ctx.needs_input_grad
    dx, dweight = _conv_backward_op(grad.contiguous(), x, weight, images, weights)
    return dx if images else None, dweight if weights else None


_conv_op.register_autograd(_differentiate, setup_context=_remember)


def conv_each(x: Tensor, weight: Tensor) -> Tensor:
    """[n, h, w, R·O] from ``x`` [n, h, w, R·I] and ``weight`` [R, O, I, 3, 3]; computed in the precision of ``x``."""
    out: Tensor = _conv_op(x.contiguous(), weight)
    return out
