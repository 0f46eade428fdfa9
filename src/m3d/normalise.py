"""From pixels in [0, 1] to what networks take, and back: standardised, and whitened where the data ask for it.

Pixels are what is stored, clamped and shown; every network, on real and on synthetic images, sees them through the same
:class:`Normalise`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from m3d.errors import M3DError

# Added to the covariance's eigenvalues; those of standardised CIFAR-10 run from 4e-5 to 1,372, 771 of 3,072 exceed it.
EPSILON = 0.1
_LARGEST = 12_288  # values of an image: a 64×64 colour image has a matrix of 600 MB


class Whitening(NamedTuple):
    """y = matrix · (x − centre) for a standardised, flattened image x of d values."""

    centre: Tensor  # [d]
    matrix: Tensor  # [d, d], symmetric
    inverse: Tensor  # [d, d]


class Zca:
    """ZCA whitening of some images: W = (Σ + ε)^(−1/2), Σ the covariance of their standardised values.

    Of all whitenings it changes images least, so convolutions and augmentation still make sense. ε = 0.1 and the
    unbiased covariance are those of the public code of MTT. It is worked out in float64 when first asked for, on the
    device that asks, and kept for that device; being a smooth function of Σ it does not depend on the eigenvectors.
    """

    def __init__(self, images: Tensor, mean: Sequence[float], std: Sequence[float], epsilon: float = EPSILON):
        """``images`` [N, ch, h, w] uint8: a whole training split."""
        values = images[0].numel()
        if values > _LARGEST:
            raise M3DError(f"zca: images of {values} values are too large; allowed: at most {_LARGEST}; lower --size")
        if len(images) < 2:
            raise M3DError("zca: one image has no covariance; allowed: two and more")
        self.images, self.mean, self.std, self.epsilon = images, tuple(mean), tuple(std), epsilon
        self._made: dict[torch.device, Whitening] = {}

    def __str__(self) -> str:
        return f"zca:epsilon={self.epsilon}"

    def on(self, device: torch.device) -> Whitening:
        """The whitening in float32 on ``device``."""
        device = torch.empty(0, device=device).device  # "cuda" by its number
        if device not in self._made:
            self._made[device] = self._make(device)
        return self._made[device]

    def _make(self, device: torch.device) -> Whitening:
        centre, covariance = _moments(self.images, Normalise(self.mean, self.std, device=device).double())
        values, vectors = torch.linalg.eigh(covariance)
        root = (values.clamp(min=0) + self.epsilon).sqrt()
        parts = (centre, (vectors / root) @ vectors.mT, (vectors * root) @ vectors.mT)
        return Whitening(*(part.float().contiguous() for part in parts))


def _moments(images: Tensor, standardise: Normalise) -> tuple[Tensor, Tensor]:
    """(mean [d], unbiased covariance [d, d]) of standardised ``images`` [N, ch, h, w] uint8, in float64."""
    device, n, d = standardise.mean.device, len(images), images[0].numel()
    total = torch.zeros(d, dtype=torch.float64, device=device)
    square = torch.zeros(d, d, dtype=torch.float64, device=device)
    for chunk in torch.split(images, 4096):
        rows = standardise(chunk.to(device).double() / 255).flatten(1)
        total += rows.sum(0)
        square += rows.mT @ rows
    mean = total / n
    return mean, (square - n * mean[:, None] * mean) / (n - 1)


class Normalise(nn.Module):
    """(x − mean) / std, then the whitening if there is one; differentiable, with its inverse."""

    mean: Tensor  # [ch, 1, 1]
    std: Tensor  # [ch, 1, 1]

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        whitening: Whitening | None = None,
        device: torch.device | str = "cpu",
    ):
        super().__init__()
        for name, values in (("mean", mean), ("std", std)):
            tensor = torch.tensor(list(values), dtype=torch.float32, device=device)
            self.register_buffer(name, tensor[:, None, None], persistent=False)
        self.whitening = whitening

    def forward(self, pixels: Tensor) -> Tensor:
        """``pixels`` [..., ch, h, w] in [0, 1] as networks take them."""
        images = (pixels - self.mean) / self.std
        if self.whitening is None:
            return images
        return ((images.flatten(-3) - self.whitening.centre) @ self.whitening.matrix).view(images.shape)

    def inverse(self, images: Tensor) -> Tensor:
        """Pixels [..., ch, h, w] of what networks take."""
        if self.whitening is not None:
            rows = images.flatten(-3) @ self.whitening.inverse + self.whitening.centre
            images = rows.view(images.shape)
        return images * self.std + self.mean

    @torch.no_grad()
    def clamp_(self, images: Tensor) -> None:
        """Bring what networks take back to where every pixel lies in [0, 1], in place."""
        if self.whitening is None:
            low, high = self(torch.zeros_like(self.mean)), self(torch.ones_like(self.mean))
            images.copy_(torch.minimum(torch.maximum(images, low), high))
        else:
            images.copy_(self(self.inverse(images).clamp(0, 1)))
