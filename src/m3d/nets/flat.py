"""One flat buffer for all parameters of a network: refilled in place, stacked for many, moved as one vector."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from m3d import rng
from m3d.errors import M3DError
from m3d.types import Seen

_CPU_MAPS = 2**23  # bytes
_INDEXABLE = 2**31 - 1  # values of a map: convolution libraries count them in 32 bits
_DRAWS = 2**23  # random numbers made at once, so that the generator's integers stay a fraction of the memory
_NORMAL_LANES = 2**31  # normal draws take the upper half of the lanes, which no repeat or class ever reaches


class Law(NamedTuple):
    """Where a parameter starts: base + spread · U(−1, 1) + deviation · N(0, 1)."""

    base: float = 0.0
    spread: float = 0.0
    deviation: float = 0.0


class Stackable(nn.Module):
    """A network that can run many copies of itself side by side: the contract of everything in ``m3d.nets``."""

    spec = ""  # the name and all options it was made by, where it was: equal for equal networks

    def stacked(self, p: Mapping[str, Tensor], images: Tensor, dtype: torch.dtype, maps: bool = False) -> Seen:
        """What R networks, with parameters ``p`` [R, ...], see in ``images`` [R, n, ch, h, w]; block maps if asked."""
        raise NotImplementedError(f"{type(self).__name__} must define stacked(p, images, dtype, maps)")


class MixesImages(nn.Module):
    """A layer whose answer for an image depends on the others (batch norm): its batches may not be split."""

    reference: int = 0  # how many of the first images it looks at; 0: all


class FlatNet:
    """A network as a pure function of a flat parameter vector.

    PyTorch's default initialisation is θ = base + spread · U(−1, 1) with one ``base`` and one ``spread`` per parameter
    (and He's adds deviation · N(0, 1)), so a fresh random network is a single elementwise expression over the whole
    buffer, on the device, with no module built. A module with another law states it by ``initial_law()``: a
    :class:`Law` for each of its own parameters' names.
    """

    def __init__(self, net: Stackable, device: torch.device | str = "cpu"):
        if any(True for _ in net.buffers()):
            raise M3DError(f"{type(net).__name__} has buffers (running statistics); only parameters can be kept flat")
        self.net: Stackable = net.to("meta")  # the module is only a recipe: its own storage is never used
        self.spec = net.spec
        self.names = [name for name, _ in net.named_parameters()]
        self.shapes = [p.shape for _, p in net.named_parameters()]
        self.sizes = [s.numel() for s in self.shapes]
        self.mixes_images = any(isinstance(module, MixesImages) for module in net.modules())
        base, spread, deviation = _initial_law(net)
        self.base, self.spread = base.to(device), spread.to(device)  # [P] each
        self.deviation = deviation.to(device) if deviation.any() else None  # [P]; None: nothing normal is drawn

    @property
    def size(self) -> int:
        """P, the number of parameters."""
        return sum(self.sizes)

    def fresh(self, seed: int, purpose: rng.Purpose, index: Tensor, lanes: Tensor) -> Tensor:
        """[R, P]: randomly initialised parameters number ``index`` [1], one row for each of ``lanes`` [R]."""
        parts = lanes.split(max(1, _DRAWS // self.size))  # a draw depends on its own lane alone
        return torch.cat([self._fresh(seed, purpose, index, part) for part in parts])

    def _fresh(self, seed: int, purpose: rng.Purpose, index: Tensor, lanes: Tensor) -> Tensor:
        u = rng.uniform(seed, purpose, index, lanes, self.size)[0]
        uniform = self.base + self.spread * (2 * u - 1)
        if self.deviation is None:
            return uniform
        return uniform + self.deviation * rng.normal(seed, purpose, index, lanes + _NORMAL_LANES, self.size)[0]

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Named views [R, ...] of ``flat`` [R, P]; gradients flow back into it through one split."""
        parts = flat.split(self.sizes, dim=1)
        return {n: part.view(len(flat), *s) for n, part, s in zip(self.names, parts, self.shapes, strict=True)}

    def __call__(self, flat: Tensor, images: Tensor, dtype: torch.dtype = torch.float32, maps: bool = False) -> Seen:
        """What R networks ``flat`` [R, P] see in ``images`` [R, n, ch, h, w]; convolutions compute in ``dtype``."""
        parameters = self.unflatten(flat)
        size = images.shape[1] if self.mixes_images else _images_at_once(images)
        if images.shape[1] <= size:
            return self.net.stacked(parameters, images, dtype, maps)
        parts = [self.net.stacked(parameters, part, dtype, maps) for part in torch.split(images, size, dim=1)]
        each = zip(*(part.maps for part in parts), strict=True)
        features, logits = ([part.features for part in parts], [part.logits for part in parts])
        return Seen(tuple(torch.cat(m, dim=1) for m in each), torch.cat(features, dim=1), torch.cat(logits, dim=1))

    def calibrated(self, flat: Tensor, images: Tensor, reference: Tensor, dtype: torch.dtype) -> Seen:
        """What R networks see in ``images`` [R, n, ...] when batch norms take their statistics from ``reference``
        [R, m, ...], the images the networks were trained on. Networks without batch norm do not look at it."""
        if not self.mixes_images:
            return self(flat, images, dtype)
        mixing = [module for module in self.net.modules() if isinstance(module, MixesImages)]
        count = reference.shape[1]
        try:
            for module in mixing:
                module.reference = count
            seen = self(flat, torch.cat([reference, images], dim=1), dtype)
        finally:
            for module in mixing:
                module.reference = 0
        return Seen((), seen.features[:, count:], seen.logits[:, count:])


def _images_at_once(images: Tensor) -> int:
    """On a GPU as many as a layer's maps (of 128 channels) can be indexed for: 16,383 of 32×32, 334 of 224×224 pixels;
    on a CPU as many as keep them in its caches: 1.8 times as fast."""
    values = images.shape[-2] * images.shape[-1] * 128
    if images.device.type != "cpu":
        return max(1, _INDEXABLE // (values * images.shape[0]))
    return max(1, _CPU_MAPS // (values * 4))


def _initial_law(net: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """(base, spread, deviation), each [P], in the order of ``net.named_parameters()``."""
    law: dict[int, Law] = {}  # by identity of the parameter
    for module in net.modules():
        own = dict(module.named_parameters(recurse=False))
        state = getattr(module, "initial_law", None)
        stated: dict[str, Law] = state() if state else _usual_law(module, own)
        law |= {id(p): stated[name] for name, p in own.items()}
    sizes = torch.tensor([p.numel() for p in net.parameters()])
    values = torch.tensor([law[id(p)] for p in net.parameters()])  # [parameters, 3]
    base, spread, deviation = values.repeat_interleave(sizes, dim=0).unbind(1)
    return base.contiguous(), spread.contiguous(), deviation.contiguous()


def _usual_law(module: nn.Module, own: Mapping[str, Tensor]) -> dict[str, Law]:
    """PyTorch's own initialisation of a layer with the parameters ``own``."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        fan_in = own["weight"][0].numel()
        return dict.fromkeys(own, Law(spread=1 / math.sqrt(fan_in)))
    if {"weight", "bias"} == set(own) and own["weight"].ndim == 1:  # a normalisation's affine part
        return {"weight": Law(base=1.0), "bias": Law()}
    if own:
        raise M3DError(f"no initialisation is known for the parameters of {type(module).__name__}")
    return {}
