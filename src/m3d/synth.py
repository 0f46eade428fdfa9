"""What is learned: the synthetic images, and how stored pixels become the images a network sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from m3d.errors import M3DError, unknown
from m3d.normalise import Normalise

_LARGEST_FACTOR = 16  # decoding takes factor² times a set's memory: a small file must not ask for all there is


@dataclass(frozen=True)
class Tiles:
    """Factor & up-sampling: an l × l mosaic of small images, each enlarged to full size (Eq. 10).

    ``factor`` 1 stores images as they are. Where l does not divide a side, the image is padded to the right and below
    with 0.5 before it is cut (224 → 225 → 75-pixel cells). Cells are enlarged by ``bilinear`` interpolation as in the
    paper, or by ``bicubic``, which is sharper and overshoots (what leaves [0, 1] is cut off). Images that start a
    mosaic are made small by taking the ``nearest`` pixel, or by ``bilinear`` interpolation (at factor 2 the mean of
    each 2×2 square).
    """

    factor: int = 2
    shrink: Literal["nearest", "bilinear"] = "nearest"
    upsample: str = "bilinear"

    def __post_init__(self) -> None:
        if not 1 <= self.factor <= _LARGEST_FACTOR:
            raise M3DError(f"factor={self.factor} is not valid; allowed: 1 to {_LARGEST_FACTOR}")
        if self.upsample not in UPSAMPLERS:
            raise unknown("upsample", self.upsample, UPSAMPLERS)

    @property
    def cells(self) -> int:
        """Decoded images per stored one."""
        return self.factor**2

    def require(self, shape: tuple[int, int, int]) -> None:
        """Refuse images too small for this factor: every cell must hold some of the image, not padding alone."""
        for side in shape[1:]:
            if -(-side // self.factor) * (self.factor - 1) >= side:
                raise M3DError(f"factor={self.factor} leaves cells without a pixel in images of {shape[1]}×{shape[2]}")

    def decode(self, stored: Tensor, enlarge: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """[..., n, ch, h, w] stored → [..., n·l², ch, h, w] as seen by a network; ``enlarge`` where it is known."""
        if self.factor == 1:
            return stored
        l, (h, w) = self.factor, stored.shape[-2:]
        cell_h, cell_w = -(-h // l), -(-w // l)
        down, right = enlarge or self.enlarge(h, w, stored.device)
        padded = functional.pad(stored, (0, cell_w * l - w, 0, cell_h * l - h), value=0.5)
        # [..., n, ch, l, cell_h, l, cell_w]
        cells: Tensor = padded.unflatten(-1, (l, cell_w)).unflatten(-3, (l, cell_h))
        cells = cells.movedim((-4, -2), (-5, -4)).flatten(-6, -4)  # [..., n·l², ch, cell_h, cell_w]
        images = down @ cells @ right
        return images if self.upsample == "bilinear" else images.clamp(0, 1)

    def enlarge(self, h: int, w: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """([h, cell_h], [cell_w, w]): what a cell is multiplied by, from the left and from the right."""
        cell_h, cell_w = -(-h // self.factor), -(-w // self.factor)
        matrix = UPSAMPLERS[self.upsample]
        return matrix(h, cell_h, device), matrix(w, cell_w, device).mT

    def encode(self, images: Tensor) -> Tensor:
        """[..., n·l², ch, h, w] → [..., n, ch, h, w] stored: each cell a different image."""
        if self.factor == 1:
            return images
        l, (h, w) = self.factor, images.shape[-2:]
        cell_h, cell_w = -(-h // l), -(-w // l)
        if self.shrink == "bilinear":
            small = bilinear_matrix(cell_h, h, images.device) @ images @ bilinear_matrix(cell_w, w, images.device).mT
        else:
            rows = torch.arange(cell_h, device=images.device) * h // cell_h
            columns = torch.arange(cell_w, device=images.device) * w // cell_w
            small = images[..., rows, :][..., columns]
        cells = small.unflatten(-4, (-1, l, l))  # [..., n, l, l, ch, cell_h, cell_w]
        mosaic: Tensor = cells.movedim((-5, -4), (-4, -2)).flatten(-4, -3).flatten(-2, -1)
        return mosaic[..., :h, :w]


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


UPSAMPLERS: dict[str, Callable[[int, int, torch.device | str], Tensor]] = {
    "bilinear": bilinear_matrix,
    "bicubic": bicubic_matrix,
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
