"""Networks written for one network at a time: a plain ``forward`` is all they need."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from m3d.errors import M3DError
from m3d.nets.flat import Law, Stackable
from m3d.types import Seen


class Single(Stackable):
    """A network whose ``forward(images)`` returns :class:`Seen`; R copies run one after the other.

    The precision of the images is that of the convolutions (:class:`Conv`); norms compute in float32 and hand on the
    precision they were given; pooling over the whole map and the classifier are float32 (see ``wide``).
    """

    def stacked(self, p: Mapping[str, Tensor], images: Tensor, dtype: torch.dtype, maps: bool = False) -> Seen:
        """What R networks, with parameters ``p`` [R, ...], see in ``images`` [R, n, ch, h, w]; block maps if asked."""
        split = {name: q.unbind(0) for name, q in p.items()}  # unbound once: R selections would each fill R gradients
        rows: list[Seen] = []
        for r, own in enumerate(images.unbind(0)):
            seen = functional_call(self, {name: q[r] for name, q in split.items()}, (own.to(dtype),))
            rows.append(seen if maps else seen._replace(maps=()))
        each = [_stack([wide(m) for m in same]) for same in zip(*(row.maps for row in rows), strict=True)]
        return Seen(tuple(each), _stack([row.features for row in rows]), _stack([row.logits for row in rows]))


class Conv(nn.Conv2d):
    """A convolution in the precision of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """[n, o, h', w'] for ``x`` [n, c, h, w]."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return functional.conv2d(x, self.weight.to(x.dtype), bias, self.stride, self.padding)


class HeConv(Conv):
    """A convolution that starts He-normal: N(0, 2 / fan-out), fan-out = output channels × kernel area."""

    def initial_law(self) -> dict[str, Law]:
        """Of the weight; the bias, where there is one, starts at zero."""
        fan_out = self.out_channels * math.prod(self.kernel_size)
        return {"weight": Law(deviation=math.sqrt(2 / fan_out)), "bias": Law()}

    def reset_parameters(self) -> None:
        """The same law in the module's own storage."""
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def wide(x: Tensor) -> Tensor:
    """``x`` in float32, or in float64 if it is."""
    return x if x.dtype == torch.float64 else x.float()


def pooled(x: Tensor) -> Tensor:
    """[n, c]: the mean of every map of ``x`` [n, c, h, w]."""
    return wide(x).mean((2, 3))


def require_size(name: str, shape: tuple[int, int, int], least: int, more: str = "") -> None:
    """Refuse images with a side below ``least``: their last maps would be empty, or one pixel that a norm erases."""
    if min(shape[1:]) < least:
        raise M3DError(
            f"{name}: images of {shape[1]}×{shape[2]} are too small; allowed: at least {least}×{least}{more}"
        )


def _stack(parts: Sequence[Tensor]) -> Tensor:
    return parts[0][None] if len(parts) == 1 else torch.stack(list(parts))
