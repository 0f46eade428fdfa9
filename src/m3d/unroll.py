"""A probe that trains: a few differentiable steps of a network on synthetic images, with a learned rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from m3d import rng
from m3d.augment import UNIFORMS, Augment, Parameters
from m3d.errors import M3DError
from m3d.nets.flat import FlatNet
from m3d.players import Player
from m3d.types import Batch, Eyes, Segment


@dataclass(frozen=True)
class Lessons:
    """How a student is taught: ``steps`` mini-batches of ``batch`` images (None: all), in shuffled passes over them.

    Where ``batch`` does not divide the images, the last mini-batch of a pass is smaller.
    """

    steps: int
    batch: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("syn_steps", self.steps), ("batch_syn", self.batch)):
            if value is not None and value < 1:
                raise M3DError(f"{name}={value} is not valid; allowed: 1 and more")

    def sizes(self, images: int) -> list[int]:
        """[N]: how many of ``images`` each mini-batch has."""
        batch = min(self.batch or images, images)
        per_pass = -(-images // batch)
        return [min(batch, images - k % per_pass * batch) for k in range(self.steps)]

    def draw(self, seed: int, step: int, images: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(which images [N, b], uniform numbers of their augmentation [N, b, UNIFORMS]) of this step's lessons.

        Which operation is drawn is the same for all images of a mini-batch, its parameters are each image's own.
        """
        batch = min(self.batch or images, images)
        per_pass = -(-images // batch)
        steps = torch.tensor([step], device=device)
        passes = torch.arange(-(-self.steps // per_pass), device=device)
        order = rng.permutation(seed, rng.Purpose.LESSON, steps, passes, images)[0]  # [passes, images]
        order = functional.pad(order, (0, per_pass * batch - images)).view(-1, batch)[: self.steps]
        lanes = torch.arange(self.steps, device=device)
        uniforms = rng.uniform(seed, rng.Purpose.LESSON_AUGMENT, steps, lanes, batch * UNIFORMS)[0]
        uniforms = uniforms.unflatten(-1, (batch, UNIFORMS))
        uniforms[..., 0] = uniforms[..., :1, 0]
        return order, uniforms


class Unroll(nn.Module):
    """θ̂ after N steps θ ← θ − α ∇ℓ(θ; mini-batch) from ``eyes.flat``, differentiable in the images and in α.

    ``eyes.draws`` are those of :meth:`Lessons.draw`. α is a parameter and moved by ``player``. With ``recompute`` the
    graph of a step is not kept but made again when it is differentiated: a quarter more time (20 steps of ConvNet-3
    on a CPU) for the memory of one step instead of N.
    """

    def __init__(
        self, lessons: Lessons, rate: float, player: Player, augment: Augment | None = None, *, recompute: bool = False
    ):
        super().__init__()
        if not 0 < rate < float("inf"):
            raise M3DError(f"lr_teacher={rate} is not valid; allowed: a positive number")
        self.lessons, self.player, self.recompute = lessons, player, recompute
        self.augment = augment or Augment()
        self.rate = nn.Parameter(torch.tensor(rate))

    def learned(self) -> dict[str, float]:
        """What a later training on the images may use."""
        return {"lr": float(self.rate.detach())}

    def forward(self, net: FlatNet, eyes: Eyes, batch: Batch, dtype: torch.dtype) -> Segment:
        """The student's way, from the expert's start."""
        orders, uniforms = eyes.draws
        images, labels = batch.images.flatten(0, 1), batch.labels.flatten()  # [C·n, ch, h, w], [C·n]
        # All lessons' at once: some fifty small operations a lesson would be a good part of a recorded step.
        numbers = self.augment.parameters(uniforms.flatten(0, 1), (images.shape[-2], images.shape[-1])).packed()
        numbers = numbers.view(*uniforms.shape[:2], -1)
        flat = eyes.flat
        for k, count in enumerate(self.lessons.sizes(len(images))):
            chosen = orders[k, :count]
            parameters = Parameters.unpacked(numbers[k, :count])
            shown = self.augment.apply(images.index_select(0, chosen)[:, None], parameters)[:, 0]
            flat = flat - self.rate * self._gradient(net, flat, shown, labels[chosen], dtype)
        return Segment(eyes.flat, flat)

    def _gradient(self, net: FlatNet, flat: Tensor, images: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """[P]: of the mean cross-entropy."""

        def loss(parameters: Tensor, pixels: Tensor) -> Tensor:
            seen = net(parameters[None], pixels[None], dtype, maps=True)  # maps: the path differentiable twice
            return functional.cross_entropy(seen.logits[0], labels)

        gradient = torch.func.grad(loss)
        if not self.recompute:
            kept: Tensor = gradient(flat, images)
            return kept
        again: Tensor = _Recomputed.apply(gradient, flat, images)  # type: ignore[no-untyped-call]
        return again


class _Recomputed(torch.autograd.Function):
    """A function of two tensors that keeps them alone, and computes itself again to be differentiated."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor, Tensor], Tensor], flat: Tensor, images: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(flat, images)
        return function(flat, images)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[None, Tensor, Tensor]:
        pull = torch.func.vjp(ctx.function, *ctx.saved_tensors)[1]
        for_flat, for_images = pull(*cotangents)
        return None, for_flat, for_images
