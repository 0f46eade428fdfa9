"""What is learned: the synthetic images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from m3d.normalise import Normalise
from m3d.tiles import Tiles


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
        """[C, N, ch, h, w]: as a network is trained on them, before normalisation."""
        return self.tiles.decode(self.pixels())

    def forward(self, classes: Tensor) -> Tensor:
        """[c, N, ch, h, w]: the images of ``classes`` [c], which rise, decoded and normalised.

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
