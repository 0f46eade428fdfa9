"""The field's ConvNet: blocks of convolution, norm, ReLU and average pooling, then one linear layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from m3d.errors import M3DError
from m3d.nets.flat import Stackable
from m3d.nets.grouped import conv_each
from m3d.nets.norms import Affine, BatchNorm, batch_norm
from m3d.nets.pooling import halved
from m3d.nets.single import wide
from m3d.own_kernels import HAS_KERNELS
from m3d.types import Seen

NormName = Literal["instance", "batch", "none"]
_COLUMNS = 2**30  # values of neighbourhoods laid out at once, at most


class ConvNet(Stackable):
    """``depth`` × [3×3 convolution → norm → ReLU → 2×2 average pooling] → linear.

    28×28 images are padded to 32×32 by the first convolution (padding 3), as in the published experiments. Many
    networks run side by side (``stacked``); one network is the case R = 1. Convolutions compute in the given precision,
    norms, pooling and the classifier always in float32. The norm is the field's instance norm, or batch norm with the
    statistics of each network's own images.
    """

    def __init__(
        self, shape: tuple[int, int, int], classes: int, depth: int = 3, width: int = 128, norm: str = "instance"
    ):
        super().__init__()
        channels, height, side = shape
        if depth < 1 or width < 1:
            raise M3DError(f"convnet: depth={depth}, width={width} is not valid; allowed: 1 and more")
        self.paddings = [3 if (height, side) == (28, 28) else 1] + [1] * (depth - 1)
        grown = 2 * (self.paddings[0] - 1)
        self.sizes = [((height + grown) >> k, (side + grown) >> k) for k in range(depth + 1)]  # of each block's maps
        if min(self.sizes[-1]) < 1:
            raise M3DError(
                f"convnet{depth} halves an image {depth} times: {shape[1]}×{shape[2]} is too small; "
                f"allowed: at least {2**depth}×{2**depth}, or a smaller depth"
            )
        self.widths = [channels] + [width] * depth  # of the image and of each block's maps
        self.convs = nn.ModuleList(nn.Conv2d(self.widths[k], width, 3, padding=self.paddings[k]) for k in range(depth))
        kinds: dict[str, type[Affine]] = {"instance": Affine, "batch": BatchNorm}
        self.norms = nn.ModuleList(kinds[norm](width) for _ in range(depth if norm in kinds else 0))
        self.batch_norm = norm == "batch"
        self.classifier = nn.Linear(width * self.sizes[-1][0] * self.sizes[-1][1], classes)
        self.fused = self._fits()  # whether to use the fused kernels where they run; set to False to compare

    def forward(self, images: Tensor) -> Seen:
        """What this network sees in ``images`` [n, ch, h, w]."""
        own = {name: p[None] for name, p in self.named_parameters()}
        maps, features, logits = self.stacked(own, images[None], images.dtype, maps=True)
        return Seen(tuple(m[0] for m in maps), features[0], logits[0])

    def stacked(self, p: Mapping[str, Tensor], images: Tensor, dtype: torch.dtype, maps: bool = False) -> Seen:
        """What R networks, with parameters ``p`` [R, ...], see in ``images`` [R, n, ch, h, w]; block maps if asked."""
        if self.fused and not maps and images.is_cuda:
            return self._fused(p, images, dtype)
        if _likes_large_operations(images):
            seen, last = self._side_by_side(p, images, dtype, maps)
        else:
            seen, last = self._one_by_one(p, images, dtype, maps)
        return self._classify(p, last.flatten(2), tuple(seen))

    def _side_by_side(
        self, p: Mapping[str, Tensor], images: Tensor, dtype: torch.dtype, maps: bool
    ) -> tuple[list[Tensor], Tensor]:
        """The maps of every block, if asked, and the last ones pooled."""
        seen, x = [], images
        together = maps and len(images) > 1 and self._columns(images) < _COLUMNS
        convolve = _convolve_together if together else _convolve
        for k in range(len(self.convs)):
            y = convolve(x, p[f"convs.{k}.weight"], p[f"convs.{k}.bias"], self.paddings[k], dtype)
            y = functional.relu(self._normalise(y, p, k), inplace=True)
            if maps:
                seen.append(y)
            x = halved(y)
        return seen, x

    def _one_by_one(
        self, p: Mapping[str, Tensor], images: Tensor, dtype: torch.dtype, maps: bool
    ) -> tuple[list[Tensor], Tensor]:
        """The same, one network after the other: its maps stay in a CPU's caches, and are not copied between blocks."""
        split = {name: q.unbind(0) for name, q in p.items()}
        each = [
            self._one({name: q[r] for name, q in split.items()}, x, dtype, maps) for r, x in enumerate(images.unbind(0))
        ]
        seen, last = zip(*each, strict=True)
        return [_stack(list(same)) for same in zip(*seen, strict=True)], _stack(list(last))

    def _one(self, p: Mapping[str, Tensor], x: Tensor, dtype: torch.dtype, maps: bool) -> tuple[list[Tensor], Tensor]:
        """The same for one network's parameters and images."""
        seen = []
        for k in range(len(self.convs)):
            weight, bias = p[f"convs.{k}.weight"].to(dtype), p[f"convs.{k}.bias"].to(dtype)
            y = wide(functional.conv2d(x.to(dtype), weight, bias, padding=self.paddings[k]))
            if self.norms:
                y = self._normalise_one(y, p[f"norms.{k}.weight"], p[f"norms.{k}.bias"], k)
            y = functional.relu(y, inplace=True)
            if maps:
                seen.append(y)
            x = halved(y)
        return seen, x

    def _columns(self, images: Tensor) -> int:
        """Values of the largest matrix that :func:`_convolve_together` makes of ``images`` [R, n, ch, h, w]."""
        maps = max(channels * h * w for channels, (h, w) in zip(self.widths, self.sizes, strict=True))
        return images.shape[0] * images.shape[1] * 9 * maps

    def _normalise(self, y: Tensor, p: Mapping[str, Tensor], k: int) -> Tensor:
        """Every channel of every image (or of every network's batch) to mean 0 and variance 1, then an affine map."""
        y = wide(y)
        if not self.norms:
            return y
        if self.batch_norm:
            weights = zip(y.unbind(0), p[f"norms.{k}.weight"], p[f"norms.{k}.bias"], strict=True)
            return _stack([self._normalise_one(x, gain, shift, k) for x, gain, shift in weights])
        var, mean = torch.var_mean(y, dim=(3, 4), keepdim=True, correction=0)
        gain, shift = (p[f"norms.{k}.{name}"][:, None, :, None, None] for name in ("weight", "bias"))
        return (y - mean) * (torch.rsqrt(var + 1e-5) * gain) + shift

    def _normalise_one(self, y: Tensor, gain: Tensor, shift: Tensor, k: int) -> Tensor:
        """The same for one network, through the library's norms, which do not fuse with their neighbours."""
        if self.batch_norm:
            return batch_norm(y, gain, shift, cast(BatchNorm, self.norms[k]).reference)
        return functional.group_norm(y, y.shape[1], gain, shift)

    def _classify(self, p: Mapping[str, Tensor], features: Tensor, maps: tuple[Tensor, ...]) -> Seen:
        weight, bias = p["classifier.weight"], p["classifier.bias"]
        return Seen(maps, features, torch.baddbmm(bias[:, None], features, weight.mT))

    def _fits(self) -> bool:
        if not HAS_KERNELS or not self.norms or self.batch_norm:  # the kernels know instance norm alone
            return False
        if len(self.convs) == 1:  # the first block's maps may be rounded, the representation may not
            return False
        from m3d.nets.fused_norm import norm_fits
        from m3d.nets.fused_stem import stem_fits

        width, inputs = self.convs[0].out_channels, self.convs[0].in_channels
        assert isinstance(width, int) and isinstance(inputs, int)
        later = all(norm_fits(h, w, width) for h, w in self.sizes[1:-1])
        return stem_fits(*self.sizes[0], inputs, width) and later

    def _fused(self, p: Mapping[str, Tensor], images: Tensor, dtype: torch.dtype) -> Seen:
        """The same through the fused kernels; activations are [n, h, w, R·c], convolutions grouped by network."""
        from m3d.nets.fused_norm import norm_relu_pool
        from m3d.nets.fused_stem import stem

        last, nets = len(self.convs) - 1, len(images)
        gain, shift = p["norms.0.weight"], p["norms.0.bias"]
        x = stem(images.flatten(0, 1), p["convs.0.weight"], gain, shift, self.paddings[0], dtype)
        for k in range(1, last + 1):
            y = _convolve_fused(x, p[f"convs.{k}.weight"])  # no bias: the norm would remove it
            gain, shift = (p[f"norms.{k}.{name}"].flatten() for name in ("weight", "bias"))
            x = norm_relu_pool(y, gain, shift, torch.float32 if k == last else dtype)
        features = x.unflatten(3, (nets, -1)).permute(3, 0, 4, 1, 2).flatten(2).float()
        return self._classify(p, features, ())


def _convolve_fused(x: Tensor, weight: Tensor) -> Tensor:
    """[n, h, w, R·o] of ``x`` [n, h, w, R·c] by ``weight`` [R, o, c, 3, 3], in the precision of ``x``."""
    if len(weight) > 1:
        return conv_each(x, weight)
    y = functional.conv2d(x.permute(0, 3, 1, 2), weight[0].to(x.dtype), padding=1)
    return y.permute(0, 2, 3, 1)


def _likes_large_operations(x: Tensor) -> bool:
    """Whether few large operations are faster where ``x`` lies than many small ones: not on CPUs, for their caches."""
    return x.is_cuda


def _convolve(x: Tensor, weight: Tensor, bias: Tensor, padding: int, dtype: torch.dtype) -> Tensor:
    """[R, n, o, h, w]: one convolution per network."""
    parts = [
        functional.conv2d(images.to(dtype), w.to(dtype), b.to(dtype), padding=padding)
        for images, w, b in zip(x.unbind(0), weight.unbind(0), bias.unbind(0), strict=True)
    ]
    return _stack(parts)


def _convolve_together(x: Tensor, weight: Tensor, bias: Tensor, padding: int, dtype: torch.dtype) -> Tensor:
    """The same as one matrix product for all networks.

    Differentiated twice, a convolution per network becomes some ten operations each; these stay as few however many
    networks there are, and a compiler traces them in seconds.
    """
    height, width = x.shape[3] + 2 * padding - 2, x.shape[4] + 2 * padding - 2
    padded = functional.pad(x.to(dtype), (padding,) * 4).transpose(1, 2)  # [R, c, n, h, w]
    shifted = [padded[..., i : i + height, j : j + width] for i in range(3) for j in range(3)]
    columns = torch.stack(shifted, dim=2).flatten(3).flatten(1, 2)  # [R, c·9, n·h·w]
    y = torch.baddbmm(bias.to(dtype)[:, :, None], weight.flatten(2).to(dtype), columns)  # [R, o, n·h·w]
    maps: Tensor = y.unflatten(2, (-1, height, width)).transpose(1, 2)
    return maps


def _stack(parts: list[Tensor]) -> Tensor:
    return parts[0][None] if len(parts) == 1 else torch.stack(parts)
