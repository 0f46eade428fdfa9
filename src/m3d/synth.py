"""What is learned: the synthetic images, and how stored pixels become the images a network sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from m3d.errors import M3DError, unknown
from m3d.normalise import Normalise

# Decoding takes factor² times a set's memory, and with halved colours twice that: a small file must not ask for all.
_LARGEST_FACTOR = 16

Upsample = Literal["bilinear", "bicubic", "cosine"]
Chroma = Literal["full", "half"]
CHROMAS: tuple[str, ...] = get_args(Chroma)


@dataclass(frozen=True)
class Tiles:
    """Factor & up-sampling: an l × l mosaic of small images, each enlarged to full size (Eq. 10).

    ``factor`` 1 stores images as they are. Where l does not divide a side, the image is padded to the right and below
    with 0.5 before it is cut (224 → 225 → 75-pixel cells). Cells are enlarged by ``bilinear`` interpolation as in the
    paper, or by ``bicubic`` or ``cosine``, which are sharper and overshoot (what leaves [0, 1] is cut off). Images that
    start a mosaic are made small by taking the ``nearest`` pixel, or by ``bilinear`` interpolation (at factor 2 the
    mean of each 2×2 square).

    ``chroma`` ``half`` stores a cell as JPEG does: its luminance, and two colour differences at half the resolution,
    which together are half as many numbers as red, green and blue. So a stored image holds two mosaics: the first two
    of its channels are their luminances, and each cell of the third is cut into four, which hold the colour
    differences of the two cells in its place.
    """

    factor: int = 2
    shrink: Literal["nearest", "bilinear"] = "nearest"
    upsample: str = "bilinear"
    chroma: str = "full"

    def __post_init__(self) -> None:
        if not 1 <= self.factor <= _LARGEST_FACTOR:
            raise M3DError(f"factor={self.factor} is not valid; allowed: 1 to {_LARGEST_FACTOR}")
        if self.upsample not in UPSAMPLERS:
            raise unknown("upsample", self.upsample, UPSAMPLERS)
        if self.chroma not in CHROMAS:
            raise unknown("chroma", self.chroma, CHROMAS)

    @property
    def halved(self) -> bool:
        """Whether colours are stored at half the resolution."""
        return self.chroma == "half"

    @property
    def cells(self) -> int:
        """Decoded images per stored one."""
        return self.factor**2 * (2 if self.halved else 1)

    def require(self, shape: tuple[int, int, int]) -> None:
        """Refuse images too small for this factor: every cell must hold some of the image, not padding alone."""
        for side in shape[1:]:
            if -(-side // self.factor) * (self.factor - 1) >= side:
                raise M3DError(f"factor={self.factor} leaves cells without a pixel in images of {shape[1]}×{shape[2]}")
        if self.halved and not self.fits(shape):
            raise M3DError(
                f"chroma=half does not go with {shape[0]}×{shape[1]}×{shape[2]} images and factor={self.factor}; "
                f"allowed: three channels, and sides that {2 * self.factor} divides"
            )

    def fits(self, shape: tuple[int, int, int]) -> bool:
        """Whether images of this shape can be stored with halved colours at this factor."""
        return shape[0] == 3 and not any(side % (2 * self.factor) for side in shape[1:])

    def decode(self, stored: Tensor, enlarge: tuple[Tensor, ...] | None = None) -> Tensor:
        """[..., n, ch, h, w] stored → [..., n·cells, ch, h, w] as seen by a network; ``enlarge`` where it is known."""
        if self.factor == 1 and not self.halved:
            return stored
        matrices = enlarge or self.enlarge(stored.shape[-2], stored.shape[-1], stored.device)
        cells = self._cut(stored)  # [..., n, l², ch, cell_h, cell_w]
        if self.halved:
            return _coloured(cells, matrices).flatten(-6, -4).clamp(0, 1)
        images = matrices[0] @ cells.flatten(-5, -4) @ matrices[1]
        return images if self.upsample == "bilinear" else images.clamp(0, 1)

    def enlarge(self, h: int, w: int, device: torch.device | str) -> tuple[Tensor, ...]:
        """([h, cell_h], [cell_w, w]): what a cell is multiplied by, from the left and from the right.

        With halved colours the two matrices for these follow.
        """
        cell_h, cell_w = self._cell(h, w)
        matrix = UPSAMPLERS[self.upsample]
        sizes = [(cell_h, cell_w), *([(cell_h // 2, cell_w // 2)] if self.halved else [])]
        return tuple(m for rows, columns in sizes for m in (matrix(h, rows, device), matrix(w, columns, device).mT))

    def encode(self, images: Tensor) -> Tensor:
        """[..., n·cells, ch, h, w] → [..., n, ch, h, w] stored: each cell a different image."""
        if self.factor == 1 and not self.halved:
            return images
        h, w = images.shape[-2:]
        small = self._shrunk(images, *self._cell(h, w))
        small = _subsampled(small.unflatten(-4, (-1, 2))).clamp(0, 1) if self.halved else small  # yellow rounds below 0
        return self._joined(small.unflatten(-4, (-1, self.factor**2)))[..., :h, :w]

    def mosaics(self, stored: Tensor) -> Tensor:
        """[..., n, ch, h, w] stored → [..., n or 2n, ch, h, w]: the same to look at, of halved colours both mosaics."""
        if not self.halved:
            return stored
        cell_h, cell_w = self._cell(stored.shape[-2], stored.shape[-1])
        matrix, device = UPSAMPLERS[self.upsample], stored.device
        own = (torch.eye(cell_h, device=device), torch.eye(cell_w, device=device))
        larger = (matrix(cell_h, cell_h // 2, device), matrix(cell_w, cell_w // 2, device).mT)
        cells = _coloured(self._cut(stored), (*own, *larger))  # [..., n, l², 2, ch, cell_h, cell_w]
        return self._joined(cells.movedim(-4, -5)).clamp(0, 1).flatten(-5, -4)

    def _joined(self, cells: Tensor) -> Tensor:
        """[..., l², ch, cell_h, cell_w] → [..., ch, l·cell_h, l·cell_w]."""
        square = cells.unflatten(-4, (self.factor, self.factor))  # [..., l, l, ch, cell_h, cell_w]
        joined: Tensor = square.movedim((-5, -4), (-4, -2)).flatten(-4, -3).flatten(-2, -1)
        return joined

    def _cell(self, h: int, w: int) -> tuple[int, int]:
        return -(-h // self.factor), -(-w // self.factor)

    def _cut(self, stored: Tensor) -> Tensor:
        """[..., n, ch, h, w] → [..., n, l², ch, cell_h, cell_w]."""
        l, (h, w) = self.factor, stored.shape[-2:]
        cell_h, cell_w = self._cell(h, w)
        padded = functional.pad(stored, (0, cell_w * l - w, 0, cell_h * l - h), value=0.5)
        # [..., n, ch, l, cell_h, l, cell_w]
        cells: Tensor = padded.unflatten(-1, (l, cell_w)).unflatten(-3, (l, cell_h))
        return cells.movedim((-4, -2), (-5, -4)).flatten(-5, -4)

    def _shrunk(self, images: Tensor, cell_h: int, cell_w: int) -> Tensor:
        h, w = images.shape[-2:]
        if self.shrink == "bilinear":
            return bilinear_matrix(cell_h, h, images.device) @ images @ bilinear_matrix(cell_w, w, images.device).mT
        rows = torch.arange(cell_h, device=images.device) * h // cell_h
        columns = torch.arange(cell_w, device=images.device) * w // cell_w
        return images[..., rows, :][..., columns]


_LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue, as in JPEG (ITU-R BT.601)
_RED, _BLUE = 2 * (1 - _LUMINANCE[0]), 2 * (1 - _LUMINANCE[2])  # per unit of the red and the blue difference


def _coloured(cells: Tensor, enlarge: tuple[Tensor, ...]) -> Tensor:
    """[..., n, l², 3, cell_h, cell_w] with halved colours → [..., n, l², 2, 3, h, w]: enlarged, red, green and blue."""
    pairs = cells[..., 2, :, :].unflatten(-1, (2, -1)).unflatten(-3, (2, -1))  # [..., 2, cell_h/2, 2, cell_w/2]
    light = enlarge[0] @ cells[..., :2, :, :] @ enlarge[1]  # [..., n, l², 2, h, w]
    blue, red = (enlarge[2] @ (pairs.movedim(-2, -3) - 0.5) @ enlarge[3]).unbind(-3)
    r, b = light + _RED * red, light + _BLUE * blue
    g = (light - _LUMINANCE[0] * r - _LUMINANCE[2] * b) / _LUMINANCE[1]
    return torch.stack((r, g, b), -3)


def _subsampled(images: Tensor) -> Tensor:
    """[..., n, 2, 3, cell_h, cell_w] red, green and blue → [..., n, 3, cell_h, cell_w]: two images in one cell."""
    r, g, b = images.unbind(-3)
    light = _LUMINANCE[0] * r + _LUMINANCE[1] * g + _LUMINANCE[2] * b  # [..., n, 2, cell_h, cell_w]
    differences = torch.stack(((b - light) / _BLUE, (r - light) / _RED), -3) + 0.5  # [..., n, 2, 2, cell_h, cell_w]
    small = differences.unflatten(-1, (-1, 2)).mean(-1).unflatten(-2, (-1, 2)).mean(-2)
    colours = small.movedim(-3, -2).flatten(-2, -1).flatten(-3, -2)  # [..., n, cell_h, cell_w]
    return torch.cat((light, colours[..., None, :, :]), -3)


def bilinear_matrix(target: int, source: int, device: torch.device | str = "cpu") -> Tensor:
    """[target, source]: bilinear resizing of one axis (half-pixel centres, edges repeated).

    As a matrix product, resizing is deterministic in both directions; the library's interpolation adds its gradients
    atomically on CUDA.
    """
    place = (torch.arange(target, device=device, dtype=torch.float64) + 0.5) * source / target - 0.5
    distance = place.clamp(0, source - 1)[:, None] - torch.arange(source, device=device)
    return (1 - distance.abs()).clamp(min=0).float()


def bicubic_matrix(target: int, source: int, device: torch.device | str = "cpu") -> Tensor:
    """[target, source]: bicubic resizing of one axis (Keys' kernel, a = −¾; half-pixel centres, edges repeated)."""
    place = (torch.arange(target, dtype=torch.float64) + 0.5) * source / target - 0.5
    tap = torch.floor(place)[:, None] + torch.arange(-1, 3)  # [target, 4]
    d, a = (place[:, None] - tap).abs(), -0.75
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    matrix = torch.zeros(target, source, dtype=torch.float64)
    matrix.scatter_add_(1, tap.long().clamp(0, source - 1), torch.where(d <= 1, near, far))
    return matrix.float().to(device)


def cosine_matrix(target: int, source: int, device: torch.device | str = "cpu") -> Tensor:
    """[target, source], source ≤ target: resizing of one axis by its type-II cosine transform, higher frequencies zero.

    Its columns are orthogonal, so that enlarging weakens no pattern of a cell; and what it can show, all images without
    high frequencies, leaves hardly more of real images out than their principal components do (LAB.md).
    """
    numbers = torch.arange(source, dtype=torch.float64)
    large, small = (
        torch.cos(torch.pi * (torch.arange(n, dtype=torch.float64)[:, None] + 0.5) * numbers / n)  # [n, source]
        for n in (target, source)
    )
    weights = torch.where(numbers == 0, 1.0, 2.0) / source
    return ((large * weights) @ small.mT).float().to(device)


UPSAMPLERS: dict[str, Callable[[int, int, torch.device | str], Tensor]] = {
    "bilinear": bilinear_matrix,
    "bicubic": bicubic_matrix,
    "cosine": cosine_matrix,
}


class Synthetic(nn.Module):
    """The learned pixels [C, ipc, ch, h, w] and their decoder."""

    def __init__(
        self, pixels: Tensor, tiles: Tiles, normalise: Normalise, standardised: bool = False, bounded: bool = True
    ):
        """With ``standardised`` the optimiser moves normalised pixels, in which some methods state their learning
        rates; otherwise plain ones. They stay in [0, 1] only if they are ``bounded``."""
        super().__init__()
        self.tiles, self.normalise, self.standardised, self.bounded = tiles, normalise, standardised, bounded
        pixels = pixels.clamp(0, 1) if bounded else pixels
        self.latent = nn.Parameter(normalise(pixels) if standardised else pixels.clone())
        self._enlarge = tiles.enlarge(
            pixels.shape[-2], pixels.shape[-1], pixels.device
        )  # kept: a step would make them again

    def pixels(self, latent: Tensor | None = None) -> Tensor:
        """[C, ipc, ch, h, w], 0 black and 1 white, of the learned images or of ``latent`` in their place."""
        latent = self.latent if latent is None else latent
        return self.normalise.inverse(latent) if self.standardised else latent

    def decoded(self) -> Tensor:
        """[C, ipc·l², ch, h, w]: as a network is trained on them, before normalisation."""
        return self.tiles.decode(self.pixels())

    def forward(self, classes: Tensor) -> Tensor:
        """[c, ipc·l², ch, h, w]: the images of ``classes`` [c], which rise, decoded and normalised.

        All of them are taken as they are: the gradient of an indexing operation is sorted and added up on a GPU.
        """
        pixels = self.pixels()
        chosen = pixels if len(classes) == len(pixels) else pixels[classes]
        images: Tensor = self.normalise(self.tiles.decode(chosen, self._enlarge))
        return images

    @torch.no_grad()
    def project_(self) -> None:
        """Bring every pixel back into [0, 1], where they are bounded."""
        if not self.bounded:
            return
        if self.standardised:
            self.normalise.clamp_(self.latent)
        else:
            self.latent.clamp_(0, 1)
