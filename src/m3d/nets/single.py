"""Networks written for one network at a time: a plain ``forward`` is all they need.

Those made of the layers here alone (:class:`Grouped`) run R copies at once: the copies' channels lie side by side, a
convolution is one of R groups, and a layer knows how many copies it serves by comparing its input with its own width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from m3d.errors import M3DError
from m3d.nets.flat import Law, Stackable
from m3d.nets.grouped import conv_each
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


class Grouped(Single):
    """One that consists of the layers of ``m3d.nets.single`` and ``m3d.nets.norms``, pooling and activations: on a GPU
    R copies are one pass over R times as many channels, where one after the other R small passes left it idle."""

    def stacked(self, p: Mapping[str, Tensor], images: Tensor, dtype: torch.dtype, maps: bool = False) -> Seen:
        """As :meth:`Single.stacked`. With ``maps``, where what is seen may be differentiated twice, one by one."""
        if maps or len(images) == 1 or not images.is_cuda:
            return super().stacked(p, images, dtype, maps)
        return self.side_by_side(p, images, dtype)

    def side_by_side(self, p: Mapping[str, Tensor], images: Tensor, dtype: torch.dtype) -> Seen:
        """The same in one pass, without the maps; its gradient has no gradient."""
        nets = len(images)
        x = images.to(dtype).transpose(0, 1).flatten(1, 2)  # [n, R·ch, h, w]
        own = {name: q.flatten(0, 1) for name, q in p.items()}
        seen: Seen = functional_call(self, own, (x.contiguous(memory_format=torch.channels_last),))
        features, logits = (y.unflatten(1, (nets, -1)).transpose(0, 1) for y in (seen.features, seen.logits))
        return Seen((), features, logits)


class Conv(nn.Conv2d):
    """A convolution in the precision of its input, of as many networks as this has times its channels."""

    def forward(self, x: Tensor) -> Tensor:
        """[n, R·o, h', w'] for ``x`` [n, R·c, h, w]."""
        nets = x.shape[1] // self.in_channels
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if nets == 1 or self.padding != (self.kernel_size[0] // 2, self.kernel_size[1] // 2):
            return functional.conv2d(x, self.weight.to(x.dtype), bias, self.stride, self.padding, groups=nets)
        y = conv_each(x.permute(0, 2, 3, 1), self.weight.unflatten(0, (nets, -1)), self.stride[0])
        return (y if bias is None else y + bias).permute(0, 3, 1, 2)


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


class Classifier(nn.Linear):
    """A linear layer of as many networks as its input has times its features."""

    def forward(self, x: Tensor) -> Tensor:
        """[n, R·K] for ``x`` [n, R·C]."""
        nets = x.shape[1] // self.in_features
        if nets == 1:
            return functional.linear(x, self.weight, self.bias)
        each, weight = x.unflatten(1, (nets, -1)).transpose(0, 1), self.weight.unflatten(0, (nets, -1))
        y = torch.baddbmm(self.bias.view(nets, 1, -1), each, weight.mT)  # [R, n, K]
        return y.transpose(0, 1).flatten(1)


def beside(x: Tensor, y: Tensor, channels: int) -> Tensor:
    """[n, R·(c + d), h, w]: every network's ``channels`` c of ``x`` and, after them, its d channels of ``y``."""
    nets = x.shape[1] // channels
    if nets == 1:
        return torch.cat([x, y], dim=1)
    each = [part.permute(0, 2, 3, 1).unflatten(3, (nets, -1)) for part in (x, y)]  # [n, h, w, R, c]
    return torch.cat(each, dim=4).flatten(3).permute(0, 3, 1, 2)


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
