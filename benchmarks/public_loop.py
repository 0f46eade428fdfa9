"""The field's public per-class loop, restated readably: what m3d is measured against.

Written from a description of how the public code works, not from the code: images as a Python list, one class after the
other, each with its own forward pass, loss, backward pass, optimiser step and a loss value fetched to the host; a new
network module every five iterations; augmentation as a chain of separate operations; float32 throughout. The
arithmetic is M3D's own (Gaussian kernel over five bandwidths, factor 2, momentum 0.5).
"""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor, nn
from torch.nn import functional


def make_network(classes: int, channels: int = 3) -> nn.Module:
    """ConvNet-3 from the library's layers, GroupNorm as instance norm."""
    layers: list[nn.Module] = []
    for k in range(3):
        layers += [
            nn.Conv2d(channels if k == 0 else 128, 128, 3, padding=1),
            nn.GroupNorm(128, 128),
            nn.ReLU(),
            nn.AvgPool2d(2),
        ]
    return nn.Sequential(nn.Sequential(*layers), nn.Flatten(), nn.Linear(2048, classes))


class EndlessClassSampler:
    """Batches of one class, shuffled anew each pass."""

    def __init__(self, images: list[Tensor], indices: list[int], batch: int):
        self.images, self.indices, self.batch = images, list(indices), batch
        self.left: list[int] = []

    def next(self) -> Tensor:
        if len(self.left) < self.batch:
            self.left = random.sample(self.indices, len(self.indices))
        chosen, self.left = self.left[: self.batch], self.left[self.batch :]
        return torch.stack([self.images[i] for i in chosen])


def augment(x: Tensor) -> Tensor:
    """In matching: brightness, saturation, contrast, crop by padding and indexing, cutout by indexing, one draw for the
    whole batch."""
    n, _, h, _ = x.shape

    def draw(*shape: int) -> Tensor:
        u = torch.rand(n, *shape, device=x.device)
        u[:] = u[0].clone()
        return u

    x = colour(x, draw(1, 1, 1), draw(1, 1, 1), draw(1, 1, 1))
    x = crop(x, (draw(2) * 9).long() - 4)
    return cutout(x, (draw(2) * (h + 1)).long() - h // 4)


def augment_training(x: Tensor) -> Tensor:
    """In training: mirrored half of the time, the colours, and one of crop, scale and rotate drawn for the batch; each
    image has its own numbers. No cutout, for there is CutMix."""
    n = len(x)

    def draw(*shape: int) -> Tensor:
        return torch.rand(n, *shape, device=x.device)

    x = torch.where(draw(1, 1, 1) < 0.5, x.flip(3), x)
    x = colour(x, draw(1, 1, 1), draw(1, 1, 1), draw(1, 1, 1))
    which = random.choice(("crop", "scale", "rotate"))
    if which == "crop":
        return crop(x, (draw(2) * 9).long() - 4)
    turn = torch.zeros(n, 2, 3, device=x.device)
    if which == "scale":
        turn[:, 0, 0], turn[:, 1, 1] = (draw() * (1.2 - 1 / 1.2) + 1 / 1.2 for _ in range(2))
    else:
        angle = (draw() - 0.5) * 2 * 15 / 180 * math.pi
        turn[:, 0, 0], turn[:, 0, 1] = torch.cos(angle), -torch.sin(angle)
        turn[:, 1, 0], turn[:, 1, 1] = torch.sin(angle), torch.cos(angle)
    grid = functional.affine_grid(turn, list(x.shape), align_corners=True)
    return functional.grid_sample(x, grid, align_corners=True)


def colour(x: Tensor, brightness: Tensor, saturation: Tensor, contrast: Tensor) -> Tensor:
    x = x + (brightness - 0.5)
    grey = x.mean(1, keepdim=True)
    x = (x - grey) * (saturation * 2) + grey
    level = x.mean((1, 2, 3), keepdim=True)
    return (x - level) * (contrast + 0.5) + level


def cutout(x: Tensor, corner: Tensor) -> Tensor:
    n, _, h, w = x.shape
    batch, rows, columns = torch.meshgrid(
        torch.arange(n, device=x.device),
        torch.arange(h // 2, device=x.device),
        torch.arange(w // 2, device=x.device),
        indexing="ij",
    )
    rows = torch.clamp(rows + corner[:, 0].view(-1, 1, 1), 0, h - 1)
    columns = torch.clamp(columns + corner[:, 1].view(-1, 1, 1), 0, w - 1)
    mask = torch.ones(n, h, w, dtype=x.dtype, device=x.device)
    mask[batch, rows, columns] = 0
    return x * mask.unsqueeze(1)


def crop(x: Tensor, shift: Tensor) -> Tensor:
    n, _, h, w = x.shape
    batch, rows, columns = torch.meshgrid(
        torch.arange(n, device=x.device),
        torch.arange(h, device=x.device),
        torch.arange(w, device=x.device),
        indexing="ij",
    )
    rows = torch.clamp(rows + shift[:, 0].view(-1, 1, 1) + 1, 0, h + 1)
    columns = torch.clamp(columns + shift[:, 1].view(-1, 1, 1) + 1, 0, w + 1)
    padded = functional.pad(x, [1, 1, 1, 1])
    return padded.permute(0, 2, 3, 1).contiguous()[batch, rows, columns].permute(0, 3, 1, 2).contiguous()


def mmd(x: Tensor, y: Tensor) -> Tensor:
    stack = torch.cat([x, y])
    distance = torch.cdist(stack, stack) ** 2
    n, m = len(stack), len(x)
    bandwidth = (distance.sum() / (n * n - n)).detach()
    kernel = sum(torch.exp(-distance / (bandwidth * 2.0**k)) for k in range(-2, 3))
    assert isinstance(kernel, Tensor)
    return kernel[:m, :m].mean() - 2 * kernel[:m, m:].mean() + kernel[m:, m:].mean()


def decode(x: Tensor) -> Tensor:
    """Factor 2: four cells, each enlarged."""
    h = x.shape[-1] // 2
    cells = [x[:, :, i * h : (i + 1) * h, j * h : (j + 1) * h] for i in range(2) for j in range(2)]
    return torch.cat([functional.interpolate(c, scale_factor=2, mode="bilinear", align_corners=False) for c in cells])


class PublicCondenser:
    """One iteration a call, class by class."""

    def __init__(self, images: Tensor, labels: Tensor, classes: int, ipc: int, lr: float, mean: Tensor, std: Tensor):
        """``images`` [N, ch, h, w] float32 in [0, 1] on the device."""
        listed = list(images)
        by_class = [torch.nonzero(labels == c).flatten().tolist() for c in range(classes)]
        self.samplers = [EndlessClassSampler(listed, indices, 128) for indices in by_class]
        start = torch.cat([torch.stack([listed[i] for i in indices[:ipc]]) for indices in by_class])
        self.images = start.clone().requires_grad_()
        self.optimiser = torch.optim.SGD([self.images], lr=lr, momentum=0.5)
        self.classes, self.ipc, self.mean, self.std = classes, ipc, mean, std
        self.iteration = 0

    def __call__(self) -> float:
        self.images.data.clamp_(0, 1)
        if self.iteration % 5 == 0:
            self.encoder = make_network(self.classes)[:2].to(self.images.device)
        total = 0.0
        for c, sampler in enumerate(self.samplers):
            real = sampler.next()
            synthetic = decode(self.images[c * self.ipc : (c + 1) * self.ipc])
            both = augment((torch.cat([real, synthetic]) - self.mean) / self.std)
            with torch.no_grad():
                goal = self.encoder(both[: len(real)])
            loss = mmd(self.encoder(both[len(real) :]), goal)
            self.optimiser.zero_grad()
            loss.backward()
            self.optimiser.step()
            total += loss.item()
        self.iteration += 1
        return total / self.classes


def public_epoch(
    net: nn.Module, optimiser: torch.optim.Optimizer, images: list[Tensor], labels: list[int], mean: Tensor, std: Tensor
) -> float:
    """One epoch of the public evaluation: images collated one by one, CutMix, loss and accuracy fetched every batch."""
    device, total = mean.device, 0.0
    order = torch.randperm(len(images)).tolist()
    for first in range(0, len(order), 64):
        chosen = order[first : first + 64]
        x = torch.stack([images[i] for i in chosen])
        y = torch.tensor([labels[i] for i in chosen]).to(device)
        x = augment_training((x - mean) / std)
        if random.random() < 0.5:
            share = torch.distributions.Beta(1.0, 1.0).sample().item()
            partner = torch.randperm(len(x), device=device)
            top, left, bottom, right = _box(x.shape[-2], x.shape[-1], share)
            x[:, :, top:bottom, left:right] = x[partner, :, top:bottom, left:right]
            share = 1 - (bottom - top) * (right - left) / (x.shape[-1] * x.shape[-2])
            output = net(x)
            loss = functional.cross_entropy(output, y) * share + functional.cross_entropy(output, y[partner]) * (
                1 - share
            )
        else:
            output = net(x)
            loss = functional.cross_entropy(output, y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        total += loss.item()
        (output.argmax(1) == y).float().mean().cpu().numpy()
    return total


def _box(h: int, w: int, share: float) -> tuple[int, int, int, int]:
    side = (1 - share) ** 0.5
    cy, cx, half_h, half_w = random.randrange(h), random.randrange(w), int(h * side) // 2, int(w * side) // 2
    return max(cy - half_h, 0), max(cx - half_w, 0), min(cy + half_h, h), min(cx + half_w, w)
