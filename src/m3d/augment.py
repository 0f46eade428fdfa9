"""Differentiable augmentation without branches: parameters first, one apply for any mixture of operations.

Siamese matching draws one parameter set per class and applies it to the real and the synthetic images of that class;
training draws one per image. Both go through :meth:`Augment.apply`, so an operation is written once.

The ranges are those of the field's public code: brightness ± 0.5, saturation × U(0, 2), contrast × U(0.5, 1.5), crop =
translation by up to 1/8 of a side with zeros flowing in, cutout = one zero square of half a side, scale by up to 1.2 on
each axis, rotation up to 15°, mirror with probability ½. Images are normalised, so zero is the mean colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from m3d.errors import M3DError, unknown
from m3d.own_kernels import HAS_KERNELS

OPERATIONS = ("color", "crop", "cutout", "flip", "scale", "rotate")
UNIFORMS = 12  # how many uniform numbers decide one augmentation
NUMBERS = 13  # how many numbers describe it
_BRIGHTNESS, _SATURATION, _CONTRAST = 1.0, 2.0, 0.5
_CROP, _CUTOUT, _SCALE, _ROTATE = 0.125, 0.5, 1.2, 15.0


class Parameters(NamedTuple):
    """What is done to each of G groups of images."""

    color: Tensor  # [G, 3]: brightness, which is added; saturation and contrast, which are factors
    matrix: Tensor  # [G, 2, 2]: output to input coordinates, (y, x), relative to the centre
    shift: Tensor  # [G, 2]: added to the input coordinates, in pixels
    hole: Tensor  # [G, 2]: first row and column of the cutout square
    hole_side: Tensor  # [G, 2]: its sides, zero where nothing is cut

    def packed(self) -> Tensor:
        """[G, NUMBERS]: all of it in one tensor."""
        return torch.cat([self.color, self.matrix.flatten(1), self.shift, self.hole, self.hole_side], dim=1)

    @classmethod
    def unpacked(cls, numbers: Tensor) -> Parameters:
        """From [G, NUMBERS]."""
        color, matrix, shift, hole, hole_side = numbers.split((3, 4, 2, 2, 2), dim=1)
        return cls(color, matrix.unflatten(1, (2, 2)), shift, hole, hole_side)


@dataclass(frozen=True)
class Augment:
    """Operations applied every time, and operations of which one is drawn each time."""

    always: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self._names:
            if name not in OPERATIONS:
                raise unknown("augmentation", name, OPERATIONS)
        twice = sorted({name for name in self._names if self._names.count(name) > 1})
        if twice:
            raise M3DError(f"augmentation '{self}': {', '.join(twice)} stands there twice; allowed: each once")

    @property
    def _names(self) -> tuple[str, ...]:
        return (*self.always, *self.one_of)

    @classmethod
    def parse(cls, text: str) -> Augment:
        """``color+crop`` applies both; ``color|crop|flip`` draws one; ``flip+color+crop|scale`` mixes; ``none``."""
        if text.strip().lower() in ("", "none"):
            return cls()
        parts = [part.strip() for part in text.split("+")]
        choices = [part for part in parts if "|" in part]
        if len(choices) > 1:
            raise M3DError(f"augmentation {text!r}: only one part may have alternatives (a|b)")
        one_of = tuple(p.strip() for p in choices[0].split("|")) if choices else ()
        return cls(tuple(part for part in parts if "|" not in part), one_of)

    @classmethod
    def any_one(cls, mirror: bool = True) -> Augment:
        """DSA's way: one of all operations each time, mirroring only where it does not change the class."""
        full = cls(one_of=("color", "crop", "cutout", "flip", "scale", "rotate"))
        return full if mirror else full.without("flip")

    def __str__(self) -> str:
        return "+".join((*self.always, *(["|".join(self.one_of)] if self.one_of else []))) or "none"

    def without(self, *names: str) -> Augment:
        """The same without some operations (mirroring, where it changes the class)."""
        return Augment(tuple(n for n in self.always if n not in names), tuple(n for n in self.one_of if n not in names))

    def parameters(self, u: Tensor, size: tuple[int, int]) -> Parameters:
        """From uniform numbers ``u`` [G, UNIFORMS]; ``u[:, 0]`` decides which of ``one_of`` is applied."""
        chosen = (u[:, 0] * max(len(self.one_of), 1)).long()

        def gate(name: str) -> Tensor:  # [G]: 1 where the operation is applied
            if name in self.one_of:
                return (chosen == self.one_of.index(name)).float()
            return torch.full_like(u[:, 0], float(name in self.always))

        def per_axis(value: Callable[[int, int], Tensor]) -> Tensor:  # [G, 2] from (axis, side)
            return torch.stack([value(0, size[0]), value(1, size[1])], dim=-1)

        def shift(axis: int, side: int) -> Tensor:
            reach = math.floor(side * _CROP + 0.5)
            return torch.floor(u[:, 8 + axis] * (2 * reach + 1)) - reach

        def hole(axis: int, side: int) -> Tensor:
            centre = torch.floor(u[:, 10 + axis] * (side + 1 - _hole_side(side) % 2))
            return centre - _hole_side(side) // 2

        color, cutout, crop = gate("color"), gate("cutout"), gate("crop")
        matrix = _matrix(u[:, 4], u[:, 5:7], u[:, 7], gate("flip"), gate("scale"), gate("rotate"))
        return Parameters(
            color=torch.stack(
                [
                    color * (u[:, 1] - 0.5) * _BRIGHTNESS,
                    1 + color * (u[:, 2] * _SATURATION - 1),
                    1 + color * (u[:, 3] + _CONTRAST - 1),
                ],
                dim=1,
            ),
            matrix=matrix,
            shift=per_axis(shift) * crop[:, None],
            hole=per_axis(hole),
            hole_side=per_axis(lambda axis, side: cutout * _hole_side(side)),
        )

    def apply(self, images: Tensor, p: Parameters) -> Tensor:
        """Augment ``images`` [G, n, ch, h, w]: all n images of a group alike. Order: colour, geometry, cutout."""
        operations = {*self.always, *self.one_of}
        if images.is_cuda and self.fits(images):
            return self.fused(images, p)
        if "color" in operations:
            images = _color(images, p)
        if self._between:
            images = warp(images, p.matrix, p.shift)
        elif {"crop", "flip"} & operations:
            images = translate(images, p.matrix[:, 1, 1], p.shift)
        if "cutout" in operations:
            images = images * _keep(p, images.shape[-2], images.shape[-1])[:, None, None]
        return images

    def fits(self, images: Tensor) -> bool:
        """Whether one kernel can do all of it where there is a GPU."""
        if not HAS_KERNELS or self.empty or (self._between and images.requires_grad):
            return False
        from m3d.fused_augment import augment_fits

        return augment_fits(images)

    def fused(self, images: Tensor, p: Parameters) -> Tensor:
        """:meth:`apply` in one kernel."""
        from m3d.fused_augment import augment, augment_between

        return (augment_between if self._between else augment)(images, p.packed())

    @property
    def empty(self) -> bool:
        """Whether nothing is done to images."""
        return not (self.always or self.one_of)

    @property
    def _between(self) -> bool:
        """Whether images are sampled between their pixels."""
        return bool({"scale", "rotate"} & {*self.always, *self.one_of})


def _hole_side(side: int) -> int:
    return math.floor(side * _CUTOUT + 0.5)


def _matrix(mirror: Tensor, scale: Tensor, angle: Tensor, flips: Tensor, scales: Tensor, rotates: Tensor) -> Tensor:
    """[G, 2, 2] from uniform numbers and gates, each [G] (``scale`` [G, 2])."""
    sign = 1 - 2 * flips * (mirror < 0.5).float()
    low = 1 / _SCALE
    factor = 1 + scales[:, None] * (low + scale * (_SCALE - low) - 1)  # [G, 2]
    turn = rotates * (2 * angle - 1) * (_ROTATE * math.pi / 180)
    cos, sin = torch.cos(turn), torch.sin(turn)
    fy, fx = factor[:, 0], factor[:, 1] * sign
    rows = [cos * fy, -sin * fx, sin * fy, cos * fx]
    return torch.stack(rows, dim=-1).view(-1, 2, 2)


def _color(images: Tensor, p: Parameters) -> Tensor:
    brightness, saturation, contrast = p.color[:, :, None, None, None, None].unbind(1)
    images = images + brightness
    grey = images.mean(2, keepdim=True)
    images = (images - grey) * saturation + grey
    level = images.mean((2, 3, 4), keepdim=True)
    return (images - level) * contrast + level


def _keep(p: Parameters, h: int, w: int) -> Tensor:
    """[G, h, w]: 0 inside the cutout square, 1 outside."""

    def inside(axis: int, length: int) -> Tensor:  # [G, length]
        place = torch.arange(length, device=p.hole.device) - p.hole[:, axis, None]
        return (place >= 0) & (place < p.hole_side[:, axis, None])

    return 1 - (inside(0, h)[:, :, None] & inside(1, w)[:, None, :]).float()


def translate(images: Tensor, sign: Tensor, shift: Tensor) -> Tensor:
    """Whole-pixel shifts [G, 2] and mirrors (``sign`` [G] is −1) of ``images`` [G, n, ch, h, w], zeros outside.

    What :func:`warp` gives, exactly, and with a gradient that is itself a translation: no sums, so deterministic.
    """
    moved: Tensor = _Translate.apply(images, sign, shift)  # type: ignore[no-untyped-call]
    return moved


class _Translate(torch.autograd.Function):
    """out(y, x) = in(y + shift₀, ±x + shift₁), coordinates relative to the centre; the adjoint undoes it."""

    @staticmethod
    def forward(images: Tensor, sign: Tensor, shift: Tensor) -> Tensor:
        return _moved(images, sign, shift[:, 0], shift[:, 1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        sign, shift = ctx.saved_tensors
        return _moved(gradient, sign, -shift[:, 0], -sign * shift[:, 1]), None, None


def _moved(images: Tensor, sign: Tensor, down: Tensor, right: Tensor) -> Tensor:
    groups, n, ch, h, w = images.shape
    centre = (w - 1) / 2
    row = torch.arange(h, device=images.device) + down[:, None]  # [G, h]
    column = sign[:, None] * (torch.arange(w, device=images.device) - centre) + centre + right[:, None]  # [G, w]
    inside = ((row >= 0) & (row < h))[:, :, None] & ((column >= 0) & (column < w))[:, None, :]
    place = (row.clamp(0, h - 1)[:, :, None] * w + column.clamp(0, w - 1)[:, None, :]).long().flatten(1)  # [G, h·w]
    flat = images.reshape(groups, n * ch, h * w)
    moved = flat.gather(2, place[:, None].expand(flat.shape)).view(images.shape)
    return moved * inside[:, None, None]


def warp(images: Tensor, matrix: Tensor, shift: Tensor) -> Tensor:
    """Bilinear affine sampling of ``images`` [G, n, ch, h, w], zeros outside: out(q) = in(matrix·q + shift).

    Coordinates q = (y, x) are pixels relative to the centre. Whole-pixel shifts and mirrors reproduce pixels to
    rounding.
    """
    groups, n, ch, h, w = images.shape
    y = (torch.arange(h, device=images.device, dtype=matrix.dtype) - (h - 1) / 2)[:, None]
    x = torch.arange(w, device=images.device, dtype=matrix.dtype) - (w - 1) / 2
    m, t = matrix[..., None, None], shift[..., None, None]  # written out: fuses, where a tiny product would not
    row = m[:, 0, 0] * y + m[:, 0, 1] * x + t[:, 0] + (h - 1) / 2  # [G, h, w]
    column = m[:, 1, 0] * y + m[:, 1, 1] * x + t[:, 1] + (w - 1) / 2
    if torch.are_deterministic_algorithms_enabled() and images.is_cuda and images.requires_grad:
        return _sample_by_index(images, row, column)  # grid_sample's backward adds in random order on CUDA
    grid = torch.stack([(2 * column + 1) / w - 1, (2 * row + 1) / h - 1], dim=-1)
    flat = images.reshape(groups, n * ch, h, w)
    return functional.grid_sample(flat, grid, padding_mode="zeros", align_corners=False).view(images.shape)


def _sample_by_index(images: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """The same by indexing, whose backward is deterministic on every device. ``row`` and ``column`` [G, h, w]."""
    groups, n, ch, h, w = images.shape
    row, column = row.flatten(1), column.flatten(1)
    pixels = images.reshape(groups, n * ch, h * w).mT  # [G, hw, n·ch]
    group = torch.arange(groups, device=images.device)[:, None]
    top, left = torch.floor(row), torch.floor(column)
    total = torch.zeros_like(pixels)
    for dy in (0, 1):
        for dx in (0, 1):
            y, x = top + dy, left + dx
            weight = (1 - (row - y).abs()) * (1 - (column - x).abs())
            weight = weight * ((y >= 0) & (y < h) & (x >= 0) & (x < w))
            place = (y.clamp(0, h - 1) * w + x.clamp(0, w - 1)).long()
            total = total + pixels[group, place] * weight[..., None]
    return total.mT.reshape(images.shape)
