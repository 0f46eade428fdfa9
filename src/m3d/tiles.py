"""How stored pixels become the images a network sees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from m3d.errors import M3DError, unknown
from m3d.upsamplers import UPSAMPLERS, bilinear_matrix

# Decoding takes factor² times a set's memory, and with halved colours twice that: a small file must not ask for all.
_LARGEST_FACTOR = 16

Chroma = Literal["full", "half"]
CHROMAS: tuple[str, ...] = get_args(Chroma)


@dataclass(frozen=True)
class Tiles:
    """Factor & up-sampling: stored images are cut into small ones, each of which is enlarged to full size (Eq. 10).

    ``factor`` l makes an l × l mosaic of each stored image; 1 stores images as they are. Where l does not divide a
    side, the image is padded to the right and below with 0.5 before it is cut (224 → 225 → 75-pixel cells).

    ``cell`` says instead how high cells are, in pixels (0: by the factor), and so allows any size: the stored images of
    a class are read as one row of numbers, which is cut into as many cells as fit. Ten images of 28×28 pixels hold
    nineteen of 20×20.

    Cells are enlarged by ``bilinear`` interpolation as in the paper, or by ``bicubic`` or ``cosine``, which are sharper
    and overshoot (what leaves [0, 1] is cut off). They fill the image but for a black frame of ``margin`` pixels, which
    costs no stored ones. What a real image shows in its frame is lost: of MNIST's ink 0.2 % at two pixels, 3 % at four.

    ``chroma`` ``half`` stores a cell as JPEG does: its luminance, and two colour differences at half the resolution,
    which together are half as many numbers as red, green and blue. So every cell holds two images: the first two
    of its channels are their luminances, and the third is cut into four, which hold their colour differences.

    Images that start a mosaic are made small by taking the ``nearest`` pixel, or by ``bilinear`` interpolation (at
    factor 2 the mean of each 2×2 square); cells of their own size, and framed ones, start as what comes nearest to them
    (least squares, cut off at 0 and 1).
    """

    factor: int = 2
    shrink: Literal["nearest", "bilinear"] = "nearest"
    upsample: str = "bilinear"
    chroma: str = "full"
    cell: int = 0
    margin: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.factor <= _LARGEST_FACTOR:
            raise M3DError(f"factor={self.factor} is not valid; allowed: 1 to {_LARGEST_FACTOR}")
        if self.cell and self.factor != 1:
            raise M3DError(f"cell={self.cell} and factor={self.factor} both say how images are cut; give one of them")
        if self.cell < 0:
            raise M3DError(f"cell={self.cell} is not valid; allowed: a height in pixels, or 0: by the factor")
        if self.margin < 0:
            raise M3DError(f"margin={self.margin} is not valid; allowed: a width in pixels, 0 and more")
        if self.upsample not in UPSAMPLERS:
            raise unknown("upsample", self.upsample, UPSAMPLERS)
        if self.chroma not in CHROMAS:
            raise unknown("chroma", self.chroma, CHROMAS)

    @property
    def halved(self) -> bool:
        """Whether colours are stored at half the resolution."""
        return self.chroma == "half"

    @property
    def _plain(self) -> bool:
        return self.factor == 1 and not self.cell and not self.halved and not self.margin

    def count(self, ipc: int, shape: tuple[int, int, int]) -> int:
        """Decoded images of ``ipc`` stored ones of a class."""
        return self._cells(ipc, *shape[1:]) * (2 if self.halved else 1)

    def _cells(self, ipc: int, h: int, w: int) -> int:
        if not self.cell:
            return ipc * self.factor**2
        cell_h, cell_w = self._cell(h, w)
        return ipc * h * w // (cell_h * cell_w)

    def require(self, shape: tuple[int, int, int]) -> None:
        """Refuse images that cannot be cut up like this."""
        h, w = shape[1:]
        if self.cell:
            self._require_cell(h, w)
        else:
            self._require_factor(h, w)
        if self.halved and not self.fits(shape):
            rows, columns = self._cell(h, w)
            cut, sides = f"factor={self.factor}", f"sides that {2 * self.factor} divides"
            if self.cell:
                cut, sides = f"cells of {rows}×{columns} pixels", "cells of even sides"
            raise M3DError(
                f"chroma=half does not go with {shape[0]}×{h}×{w} images and {cut}; "
                f"allowed: three channels, and {sides}"
            )

    def _require_factor(self, h: int, w: int) -> None:
        rows, columns = self._cell(h, w)
        if rows * (self.factor - 1) >= h or columns * (self.factor - 1) >= w:
            raise M3DError(f"factor={self.factor} leaves cells without a pixel in images of {h}×{w}")
        widest = min(h - rows, w - columns) // 2
        if self.margin > widest:
            allowed = f"0 to {widest}" if widest else "0; a larger factor, or a cell, makes them smaller"
            raise M3DError(
                f"margin={self.margin} leaves less of images of {h}×{w} than the {rows}×{columns} pixels of a cell "
                f"(factor={self.factor}); allowed: {allowed}"
            )

    def _require_cell(self, h: int, w: int) -> None:
        heights = self.cells(h, w)
        if self.cell not in heights:
            framed = f" and margin={self.margin}" if self.margin else ""
            allowed = f"{heights[0]} to {heights[-1]}" if heights else "none, the margin leaves too little"
            raise M3DError(f"cell={self.cell} does not go with images of {h}×{w}{framed}; allowed: {allowed}")

    def cells(self, h: int, w: int) -> list[int]:
        """The heights that cells of images of this size may have."""

        def fits(height: int) -> bool:
            sizes = replace(self, factor=1, cell=height)._cell(h, w)
            return all(
                size * _LARGEST_FACTOR >= side and size <= side - 2 * self.margin
                for size, side in zip(sizes, (h, w), strict=True)
            )

        return [height for height in range(1, h + 1) if fits(height)]

    def fits(self, shape: tuple[int, int, int]) -> bool:
        """Whether images of this shape can be stored with halved colours, cut like this."""
        sides = self._cell(*shape[1:]) if self.cell else shape[1:]
        return shape[0] == 3 and not any(side % (2 * self.factor) for side in sides)

    def decode(self, stored: Tensor, enlarge: tuple[Tensor, ...] | None = None) -> Tensor:
        """[..., n, ch, h, w], the stored images of a class → [..., N, ch, h, w] as seen by a network; ``enlarge`` where
        it is known."""
        if self._plain:
            return stored
        matrices = enlarge or self.enlarge(stored.shape[-2], stored.shape[-1], stored.device)
        cells = self._cut(stored)
        if self.halved:
            return _coloured(cells, matrices).flatten(-5, -4).clamp(0, 1)
        images = matrices[0] @ cells @ matrices[1]
        return images if self.upsample == "bilinear" else images.clamp(0, 1)

    def enlarge(self, h: int, w: int, device: torch.device | str) -> tuple[Tensor, ...]:
        """([h, cell_h], [cell_w, w]): what a cell is multiplied by, from the left and from the right.

        With halved colours the two matrices for these follow.
        """
        cell_h, cell_w = self._cell(h, w)
        sizes = [(cell_h, cell_w), *([(cell_h // 2, cell_w // 2)] if self.halved else [])]
        return tuple(
            m for rows, columns in sizes for m in (self._framed(h, rows, device), self._framed(w, columns, device).mT)
        )

    def _framed(self, target: int, source: int, device: torch.device | str) -> Tensor:
        """[target, source]: enlarges to all but the margins, which stay 0."""
        inner = UPSAMPLERS[self.upsample](target - 2 * self.margin, source, device)
        return functional.pad(inner, (0, 0, self.margin, self.margin))

    def encode(self, images: Tensor) -> Tensor:
        """[..., N, ch, h, w], the images that a class starts from → [..., n, ch, h, w] stored."""
        if self._plain:
            return images
        h, w = images.shape[-2:]
        small = self._shrunk(images, *self._cell(h, w))
        small = _subsampled(small.unflatten(-4, (-1, 2))).clamp(0, 1) if self.halved else small  # yellow rounds below 0
        return self._joined(small, h, w)

    def pictures(self, stored: Tensor) -> Tensor:
        """The stored images of a class [..., n, ch, h, w] as pictures: mosaics, with halved colours two of each image,
        or cells one by one where they have a size of their own."""
        if not self.halved:
            return self._cut(stored) if self.cell else stored
        h, w = stored.shape[-2:]
        cell_h, cell_w = self._cell(h, w)
        matrix, device = UPSAMPLERS[self.upsample], stored.device
        own = (torch.eye(cell_h, device=device), torch.eye(cell_w, device=device))
        larger = (matrix(cell_h, cell_h // 2, device), matrix(cell_w, cell_w // 2, device).mT)
        cells = _coloured(self._cut(stored), (*own, *larger)).clamp(0, 1)  # [..., P, 2, ch, cell_h, cell_w]
        if self.cell:
            return cells.flatten(-5, -4)
        return self._joined(cells.unflatten(-5, (-1, self.factor**2)).transpose(-5, -4).flatten(-6, -4), h, w)

    def _cell(self, h: int, w: int) -> tuple[int, int]:
        if self.cell:
            return self.cell, max(1, (2 * self.cell * w + h) // (2 * h))  # the nearest width of the same shape
        return -(-h // self.factor), -(-w // self.factor)

    def _cut(self, stored: Tensor) -> Tensor:
        """[..., n, ch, h, w] → [..., P, ch, cell_h, cell_w], cells of one image after the other."""
        l, n, (h, w) = self.factor, stored.shape[-4], stored.shape[-2:]
        cell_h, cell_w = size = self._cell(h, w)
        if self.cell:
            count = self._cells(n, h, w)
            row = stored.transpose(-4, -3).flatten(-3)[..., : count * cell_h * cell_w]  # [..., ch, P·cell_h·cell_w]
            packed: Tensor = row.unflatten(-1, (count, *size)).transpose(-4, -3)
            return packed
        padded = functional.pad(stored, (0, cell_w * l - w, 0, cell_h * l - h), value=0.5)
        # [..., n, ch, l, cell_h, l, cell_w]
        cells: Tensor = padded.unflatten(-1, (l, cell_w)).unflatten(-3, (l, cell_h))
        return cells.movedim((-4, -2), (-5, -4)).flatten(-6, -4)

    def _joined(self, cells: Tensor, h: int, w: int) -> Tensor:
        """[..., P, ch, cell_h, cell_w] → [..., n, ch, h, w], 0.5 where there is no cell."""
        if self.cell:
            row = cells.transpose(-4, -3).flatten(-3)  # [..., ch, P·cell_h·cell_w]
            row = functional.pad(row, (0, -row.shape[-1] % (h * w)), value=0.5)
            packed: Tensor = row.unflatten(-1, (-1, h, w)).transpose(-4, -3)
            return packed
        square = cells.unflatten(-4, (-1, self.factor, self.factor))  # [..., n, l, l, ch, cell_h, cell_w]
        joined: Tensor = square.movedim((-5, -4), (-4, -2)).flatten(-4, -3).flatten(-2, -1)
        return joined[..., :h, :w]

    def _shrunk(self, images: Tensor, cell_h: int, cell_w: int) -> Tensor:
        h, w = images.shape[-2:]
        if self.cell or self.margin:
            inner = images[..., self.margin : h - self.margin, self.margin : w - self.margin]
            rows, columns = self._fitted(inner.shape[-2], cell_h), self._fitted(inner.shape[-1], cell_w)
            return (rows.to(images) @ inner @ columns.mT.to(images)).clamp(0, 1)
        if self.shrink == "bilinear":
            return bilinear_matrix(cell_h, h, images.device) @ images @ bilinear_matrix(cell_w, w, images.device).mT
        rows = torch.arange(cell_h, device=images.device) * h // cell_h
        columns = torch.arange(cell_w, device=images.device) * w // cell_w
        return images[..., rows, :][..., columns]

    def _fitted(self, target: int, source: int) -> Tensor:
        """[source, target]: what of an image is enlarged to come as near to it as it can (least squares)."""
        inverse: Tensor = torch.linalg.pinv(UPSAMPLERS[self.upsample](target, source, "cpu").double()).float()
        return inverse


# Options of methods, which are tried before there are data.
Factor = Annotated[int, Tiles]
CellHeight = Annotated[int, lambda height: Tiles(1, cell=height)]
Margin = Annotated[int, lambda width: Tiles(1, margin=width)]

_LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue, as in JPEG (ITU-R BT.601)
_RED, _BLUE = 2 * (1 - _LUMINANCE[0]), 2 * (1 - _LUMINANCE[2])  # per unit of the red and the blue difference


def _coloured(cells: Tensor, enlarge: tuple[Tensor, ...]) -> Tensor:
    """[..., P, 3, cell_h, cell_w] with halved colours → [..., P, 2, 3, h, w]: enlarged, red, green and blue."""
    pairs = cells[..., 2, :, :].unflatten(-1, (2, -1)).unflatten(-3, (2, -1))  # [..., 2, cell_h/2, 2, cell_w/2]
    light = enlarge[0] @ cells[..., :2, :, :] @ enlarge[1]  # [..., P, 2, h, w]
    blue, red = (enlarge[2] @ (pairs.movedim(-2, -3) - 0.5) @ enlarge[3]).unbind(-3)
    r, b = light + _RED * red, light + _BLUE * blue
    g = (light - _LUMINANCE[0] * r - _LUMINANCE[2] * b) / _LUMINANCE[1]
    return torch.stack((r, g, b), -3)


def _subsampled(images: Tensor) -> Tensor:
    """[..., P, 2, 3, cell_h, cell_w] red, green and blue → [..., P, 3, cell_h, cell_w]: two images in one cell."""
    r, g, b = images.unbind(-3)
    light = _LUMINANCE[0] * r + _LUMINANCE[1] * g + _LUMINANCE[2] * b  # [..., P, 2, cell_h, cell_w]
    differences = torch.stack(((b - light) / _BLUE, (r - light) / _RED), -3) + 0.5  # [..., P, 2, 2, cell_h, cell_w]
    small = differences.unflatten(-1, (-1, 2)).mean(-1).unflatten(-2, (-1, 2)).mean(-2)
    colours = small.movedim(-3, -2).flatten(-2, -1).flatten(-3, -2)  # [..., P, cell_h, cell_w]
    return torch.cat((light, colours[..., None, :, :]), -3)
