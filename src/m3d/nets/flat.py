"""One flat buffer for all parameters of a network: refilled in place, stacked for many, moved as one vector."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from m3d import rng
from m3d.errors import M3DError
from m3d.types import Seen

_CPU_MAPS = 2**23  # bytes


class Stackable(nn.Module):
    """A network that can run many copies of itself side by side: the contract of everything in ``m3d.nets``."""

    def stacked(self, p: Mapping[str, Tensor], images: Tensor, dtype: torch.dtype, maps: bool = False) -> Seen:
        """What R networks, with parameters ``p`` [R, ...], see in ``images`` [R, n, ch, h, w]; block maps if asked."""
        raise NotImplementedError(f"{type(self).__name__} must define stacked(p, images, dtype, maps)")


class FlatNet:
    """A network as a pure function of a flat parameter vector.

    PyTorch's default initialisation is θ = base + spread · U(−1, 1) with one ``base`` and one ``spread`` per parameter,
    so a fresh random network is a single elementwise expression over the whole buffer, on the device, with no module
    built.
    """

    def __init__(self, net: Stackable, device: torch.device | str = "cpu"):
        if any(True for _ in net.buffers()):
            raise M3DError(f"{type(net).__name__} has buffers (running statistics); only parameters can be kept flat")
        self.net: Stackable = net.to("meta")  # the module is only a recipe: its own storage is never used
        self.names = [name for name, _ in net.named_parameters()]
        self.shapes = [p.shape for _, p in net.named_parameters()]
        self.sizes = [s.numel() for s in self.shapes]
        base, spread = _initial_law(net)
        self.base, self.spread = base.to(device), spread.to(device)  # [P] each

    @property
    def size(self) -> int:
        """P, the number of parameters."""
        return sum(self.sizes)

    def fresh(self, seed: int, purpose: rng.Purpose, index: Tensor, lanes: Tensor) -> Tensor:
        """[R, P]: randomly initialised parameters number ``index`` [1], one row for each of ``lanes`` [R]."""
        u = rng.uniform(seed, purpose, index, lanes, self.size)[0]
        return self.base + self.spread * (2 * u - 1)

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Named views [R, ...] of ``flat`` [R, P]; gradients flow back into it through one split."""
        parts = flat.split(self.sizes, dim=1)
        return {n: part.view(len(flat), *s) for n, part, s in zip(self.names, parts, self.shapes, strict=True)}

    def __call__(self, flat: Tensor, images: Tensor, dtype: torch.dtype = torch.float32, maps: bool = False) -> Seen:
        """What R networks ``flat`` [R, P] see in ``images`` [R, n, ch, h, w]; convolutions compute in ``dtype``."""
        parameters, size = self.unflatten(flat), _images_at_once(images)
        if images.shape[1] <= size:
            return self.net.stacked(parameters, images, dtype, maps)
        parts = [self.net.stacked(parameters, part, dtype, maps) for part in torch.split(images, size, dim=1)]
        each = zip(*(part.maps for part in parts), strict=True)
        features, logits = ([part.features for part in parts], [part.logits for part in parts])
        return Seen(tuple(torch.cat(m, dim=1) for m in each), torch.cat(features, dim=1), torch.cat(logits, dim=1))


def _images_at_once(images: Tensor) -> int:
    """All on a GPU; on a CPU as many as keep a layer's maps (of 128 channels) in its caches: 1.8 times as fast."""
    if images.device.type != "cpu":
        return images.shape[1]
    return max(1, _CPU_MAPS // (images.shape[-2] * images.shape[-1] * 128 * 4))


def _initial_law(net: nn.Module) -> tuple[Tensor, Tensor]:
    """(base, spread), each [P], in the order of ``net.named_parameters()``."""
    law: dict[int, tuple[float, float]] = {}  # by identity of the parameter
    for module in net.modules():
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, nn.Conv2d | nn.Linear):
            fan_in = own["weight"][0].numel()
            for p in own.values():
                law[id(p)] = (0.0, 1 / math.sqrt(fan_in))
        elif {"weight", "bias"} == set(own) and own["weight"].ndim == 1:  # a normalisation's affine part
            law[id(own["weight"])], law[id(own["bias"])] = (1.0, 0.0), (0.0, 0.0)
        elif own:
            raise M3DError(f"no initialisation is known for the parameters of {type(module).__name__}")
    values = [(p.numel(), *law[id(p)]) for p in net.parameters()]
    base = torch.cat([torch.full((n,), b) for n, b, _ in values])
    spread = torch.cat([torch.full((n,), s) for n, _, s in values])
    return base, spread
