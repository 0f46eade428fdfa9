"""Where the small images of a class lie among its stored numbers: in mosaics, or packed one after the other.

Both answer the same questions of images of h×w pixels: how large a small image (``cell``) is, how many there are, where
each lies (``cut``, and ``joined`` back), how they are drawn (``shown``), whether such images can be cut up so at all
(``require``), and whether their colours can be stored at half the resolution (``halves``; ``halves_wanted`` says what
that takes, and ``in_words`` how images are cut up).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from m3d.errors import M3DError

LARGEST_FACTOR = 16  # decoding takes factor² times a set's memory: a small file must not ask for all there is


@dataclass(frozen=True)
class Mosaic:
    """A stored image is ``factor`` × ``factor`` cells; 1: it is one. Where the factor does not divide a side, the image
    is padded to the right and below with 0.5 before it is cut (224 → 225 → 75-pixel cells)."""

    factor: int

    def cell(self, h: int, w: int) -> tuple[int, int]:
        return -(-h // self.factor), -(-w // self.factor)

    def count(self, stored: int, h: int, w: int) -> int:
        return stored * self.factor**2

    def require(self, h: int, w: int, margin: int) -> None:
        rows, columns = self.cell(h, w)
        if rows * (self.factor - 1) >= h or columns * (self.factor - 1) >= w:
            raise M3DError(f"factor={self.factor} leaves cells without a pixel in images of {h}×{w}")
        widest = min(h - rows, w - columns) // 2
        if margin > widest:
            allowed = f"0 to {widest}" if widest else "0; a larger factor, or a cell, makes them smaller"
            raise M3DError(
                f"margin={margin} leaves less of images of {h}×{w} than the {rows}×{columns} pixels of a cell "
                f"(factor={self.factor}); allowed: {allowed}"
            )

    def halves(self, h: int, w: int) -> bool:
        return not h % (2 * self.factor) and not w % (2 * self.factor)

    def halves_wanted(self) -> str:
        return f"sides that {2 * self.factor} divides"

    def in_words(self, h: int, w: int) -> str:
        return f"factor={self.factor}"

    def cut(self, stored: Tensor) -> Tensor:
        """[..., n, ch, h, w] → [..., P, ch, cell_h, cell_w], cells of one image after the other."""
        l, (h, w) = self.factor, stored.shape[-2:]
        cell_h, cell_w = self.cell(h, w)
        padded = functional.pad(stored, (0, cell_w * l - w, 0, cell_h * l - h), value=0.5)
        # [..., n, ch, l, cell_h, l, cell_w]
        cells: Tensor = padded.unflatten(-1, (l, cell_w)).unflatten(-3, (l, cell_h))
        return cells.movedim((-4, -2), (-5, -4)).flatten(-6, -4)

    def joined(self, cells: Tensor, h: int, w: int) -> Tensor:
        """[..., P, ch, cell_h, cell_w] → [..., n, ch, h, w]."""
        square = cells.unflatten(-4, (-1, self.factor, self.factor))  # [..., n, l, l, ch, cell_h, cell_w]
        stored: Tensor = square.movedim((-5, -4), (-4, -2)).flatten(-4, -3).flatten(-2, -1)
        return stored[..., :h, :w]

    def shown(self, cells: Tensor, h: int, w: int) -> Tensor:
        """[..., P, k, ch, cell_h, cell_w], k images in the place of each cell → k mosaics of each stored image."""
        return self.joined(cells.unflatten(-5, (-1, self.factor**2)).transpose(-5, -4).flatten(-6, -4), h, w)


@dataclass(frozen=True)
class Packed:
    """The stored images of a class are read as one row of numbers, channel by channel, and cut into as many cells of
    ``height`` pixels as fit. Ten images of 28×28 pixels hold nineteen of 20×20."""

    height: int

    def cell(self, h: int, w: int) -> tuple[int, int]:
        return self.height, max(1, (2 * self.height * w + h) // (2 * h))  # the nearest width of the same shape

    def count(self, stored: int, h: int, w: int) -> int:
        rows, columns = self.cell(h, w)
        return stored * h * w // (rows * columns)

    def require(self, h: int, w: int, margin: int) -> None:
        heights = [height for height in range(1, h + 1) if Packed(height)._fits(h, w, margin)]
        if self.height not in heights:
            framed = f" and margin={margin}" if margin else ""
            allowed = f"{heights[0]} to {heights[-1]}" if heights else "none, the margin leaves too little"
            raise M3DError(f"cell={self.height} does not go with images of {h}×{w}{framed}; allowed: {allowed}")

    def _fits(self, h: int, w: int, margin: int) -> bool:
        sides = zip(self.cell(h, w), (h, w), strict=True)
        return all(size * LARGEST_FACTOR >= side and size <= side - 2 * margin for size, side in sides)

    def halves(self, h: int, w: int) -> bool:
        rows, columns = self.cell(h, w)
        return not rows % 2 and not columns % 2

    def halves_wanted(self) -> str:
        return "cells of even sides"

    def in_words(self, h: int, w: int) -> str:
        rows, columns = self.cell(h, w)
        return f"cells of {rows}×{columns} pixels"

    def cut(self, stored: Tensor) -> Tensor:
        """[..., n, ch, h, w] → [..., P, ch, cell_h, cell_w]."""
        h, w = stored.shape[-2:]
        rows, columns = self.cell(h, w)
        count = self.count(stored.shape[-4], h, w)
        row = stored.transpose(-4, -3).flatten(-3)[..., : count * rows * columns]  # [..., ch, P·cell_h·cell_w]
        cells: Tensor = row.unflatten(-1, (count, rows, columns)).transpose(-4, -3)
        return cells

    def joined(self, cells: Tensor, h: int, w: int) -> Tensor:
        """[..., P, ch, cell_h, cell_w] → [..., n, ch, h, w], 0.5 where there is no cell."""
        row = cells.transpose(-4, -3).flatten(-3)  # [..., ch, P·cell_h·cell_w]
        row = functional.pad(row, (0, -row.shape[-1] % (h * w)), value=0.5)
        stored: Tensor = row.unflatten(-1, (-1, h, w)).transpose(-4, -3)
        return stored

    def shown(self, cells: Tensor, h: int, w: int) -> Tensor:
        """[..., P, k, ch, cell_h, cell_w] → the images one by one."""
        return cells.flatten(-5, -4)
