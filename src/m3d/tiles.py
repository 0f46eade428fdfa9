"""How stored pixels become the images a network sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from m3d.errors import M3DError, unknown
from m3d.layouts import LARGEST_FACTOR, Mosaic, Packed
from m3d.upsamplers import UPSAMPLERS, bilinear_matrix

Chroma = Literal["full", "half"]
CHROMAS: tuple[str, ...] = get_args(Chroma)


@dataclass(frozen=True)
class Tiles:
    """Factor & up-sampling: stored images are cut into small ones, each of which is enlarged to full size (Eq. 10).

    ``factor`` l makes an l × l mosaic of each stored image; 1 stores images as they are. ``cell`` says instead how high
    cells are, in pixels (0: by the factor), and so allows any size: as many as a class's stored numbers hold.

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
        if not 1 <= self.factor <= LARGEST_FACTOR:
            raise M3DError(f"factor={self.factor} is not valid; allowed: 1 to {LARGEST_FACTOR}")
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
    def layout(self) -> Mosaic | Packed:
        """Where cells lie."""
        return Packed(self.cell) if self.cell else Mosaic(self.factor)

    @property
    def _plain(self) -> bool:
        return self.factor == 1 and not self.cell and not self.halved and not self.margin

    def count(self, ipc: int, shape: tuple[int, int, int]) -> int:
        """Decoded images of ``ipc`` stored ones of a class."""
        return self.layout.count(ipc, *shape[1:]) * (2 if self.halved else 1)

    def require(self, shape: tuple[int, int, int]) -> None:
        """Refuse images that cannot be cut up like this."""
        h, w = shape[1:]
        self.layout.require(h, w, self.margin)
        if self.halved and not self.fits(shape):
            what, wanted = f"{shape[0]}×{h}×{w} images and {self.layout.in_words(h, w)}", self.layout.halves_wanted()
            raise M3DError(f"chroma=half does not go with {what}; allowed: three channels, and {wanted}")

    def fits(self, shape: tuple[int, int, int]) -> bool:
        """Whether images of this shape can be stored with halved colours, cut like this."""
        return shape[0] == 3 and self.layout.halves(*shape[1:])

    def decode(self, stored: Tensor, enlarge: tuple[Tensor, ...] | None = None) -> Tensor:
        """[..., n, ch, h, w], the stored images of a class → [..., N, ch, h, w] as seen by a network; ``enlarge`` where
        it is known."""
        if self._plain:
            return stored
        matrices = enlarge or self.enlarge(stored.shape[-2], stored.shape[-1], stored.device)
        cells = self.layout.cut(stored)
        if self.halved:
            return _coloured(cells, matrices).flatten(-5, -4).clamp(0, 1)
        images = matrices[0] @ cells @ matrices[1]
        return images if self.upsample == "bilinear" else images.clamp(0, 1)

    def enlarge(self, h: int, w: int, device: torch.device | str) -> tuple[Tensor, ...]:
        """([h, cell_h], [cell_w, w]): what a cell is multiplied by, from the left and from the right.

        With halved colours the two matrices for these follow.
        """
        cell_h, cell_w = self.layout.cell(h, w)
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
        small = self._shrunk(images, *self.layout.cell(h, w))
        small = _subsampled(small.unflatten(-4, (-1, 2))).clamp(0, 1) if self.halved else small  # yellow rounds below 0
        return self.layout.joined(small, h, w)

    def pictures(self, stored: Tensor) -> Tensor:
        """The stored images of a class [..., n, ch, h, w] as pictures: mosaics, with halved colours two of each image,
        or cells one by one where they have a size of their own."""
        h, w = stored.shape[-2:]
        cells = self.layout.cut(stored)
        return self.layout.shown(self._in_colour(cells) if self.halved else cells.unsqueeze(-4), h, w)

    def _in_colour(self, cells: Tensor) -> Tensor:
        """[..., P, 3, cell_h, cell_w] with halved colours → [..., P, 2, 3, cell_h, cell_w], not enlarged."""
        (cell_h, cell_w), device = cells.shape[-2:], cells.device
        matrix = UPSAMPLERS[self.upsample]
        own = (torch.eye(cell_h, device=device), torch.eye(cell_w, device=device))
        larger = (matrix(cell_h, cell_h // 2, device), matrix(cell_w, cell_w // 2, device).mT)
        return _coloured(cells, (*own, *larger)).clamp(0, 1)

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


def one_layout(options: Mapping[str, Any]) -> None:
    """Refuse a method's options where both a factor and a cell say how images are cut."""
    if options["factor"] is not None and options["cell"]:
        Tiles(options["factor"], cell=options["cell"])


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
