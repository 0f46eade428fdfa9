"""Where synthetic images start. Every initialiser is a choice of images; a coreset is one with no step after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import torch
from torch import Tensor

from m3d import rng
from m3d.data.classes import Dataset
from m3d.errors import M3DError
from m3d.registry import Registry, parse_spec
from m3d.runtime import Runtime
from m3d.shards import Ranks
from m3d.trained import default_recipe, representations, trained_networks

_LLOYD = 20  # rounds of k-means: later ones move few points
_CANDIDATES = 1000  # points that its centres may start from


class Init(Protocol):
    """Chooses ``count`` starting images of every class."""

    def __call__(self, data: Dataset, count: int, seed: int, runtime: Runtime, ranks: Ranks | None = None) -> Tensor:
        """[C, count, ch, h, w] on the data's device, 0 black and 1 white; ``ranks`` may share the work of choosing."""
        ...

    def require(self, data: Dataset, count: int) -> None:
        """Raise, before any work is begun, if the data cannot give ``count`` starting images of every class."""
        ...


class _Selection:
    """A choice of real images; subclasses say which."""

    def require(self, data: Dataset, count: int) -> None:
        smallest = int(data.train.count.argmin())
        have = int(data.train.count[smallest])
        if have < count:
            raise M3DError(
                f"class {data.class_names[smallest]!r} has {have} training images, but {count} different ones are "
                f"needed to start"
            )


@dataclass(frozen=True)
class RandomReal(_Selection):
    """Different random real images of each class."""

    def __call__(self, data: Dataset, count: int, seed: int, runtime: Runtime, ranks: Ranks | None = None) -> Tensor:
        self.require(data, count)
        train = data.train
        position = torch.arange(count, device=train.device).expand(1, train.classes, count)
        lanes = torch.arange(train.classes, device=train.device)
        return train.take(rng.shuffled(seed, rng.Purpose.INIT, position, lanes, train.count)[0])


@dataclass(frozen=True)
class Noise:
    """Normal noise with the data's mean and standard deviation; where pixels are bounded, it is clipped later."""

    def __call__(self, data: Dataset, count: int, seed: int, runtime: Runtime, ranks: Ranks | None = None) -> Tensor:
        device, (ch, h, w) = data.train.device, data.shape
        lanes = torch.arange(data.classes, device=device)
        steps = torch.zeros(1, dtype=torch.long, device=device)
        draws = rng.normal(seed, rng.Purpose.INIT, steps, lanes, count * ch * h * w)[0]
        mean, std = (torch.tensor(v, device=device)[:, None, None] for v in (data.mean, data.std))
        return draws.view(data.classes, count, ch, h, w) * std + mean

    def require(self, data: Dataset, count: int) -> None:
        """Noise needs no image."""


Features = Literal["network", "pixels"]
Rule = Callable[[Tensor, int], Tensor]  # (features [n, d], count) -> indices [count], in the order of choice


@dataclass(frozen=True)
class ByFeatures(_Selection):
    """Real images chosen class by class from their features: a trained network's representation, or raw pixels."""

    rule: Rule
    features: Features = "network"
    network: str = "convnet3"
    epochs: int = 20

    def __call__(self, data: Dataset, count: int, seed: int, runtime: Runtime, ranks: Ranks | None = None) -> Tensor:
        self.require(data, count)
        features = self._features(data, seed, runtime, ranks)
        sizes = data.train.count.tolist()
        chosen = [self.rule(part, count) for part in torch.split(features, sizes)]
        return data.train.take(torch.stack(chosen).to(data.train.device))

    def _features(self, data: Dataset, seed: int, runtime: Runtime, ranks: Ranks | None) -> Tensor:
        if self.features == "pixels":
            return data.train.images.flatten(1).float() / 255
        trained = trained_networks(data, self.network, default_recipe(self.epochs), 1, seed, runtime, ranks)
        return representations(trained, data, runtime)


def herding(features: Tensor, count: int) -> Tensor:
    """[count]: greedily the point that brings the chosen ones' mean nearest to the mean of all.

    After k points with sum s the next is the nearest to (k + 1)·μ − s (Welling, 2009).
    """
    mean = features.mean(0)
    total, free = torch.zeros_like(mean), torch.ones(len(features), dtype=torch.bool, device=features.device)
    chosen = []
    for k in range(count):
        distance = (features - ((k + 1) * mean - total)).square().sum(1)
        best = torch.where(free, distance, torch.inf).argmin()
        chosen.append(best)
        free[best] = False
        total = total + features[best]
    return torch.stack(chosen)


def k_center(features: Tensor, count: int) -> Tensor:
    """[count]: first the point nearest to the mean, then always the one farthest from all chosen (Gonzalez, 1985)."""
    chosen = [(features - features.mean(0)).square().sum(1).argmin()]
    nearest = torch.full_like(features[:, 0], torch.inf)
    while len(chosen) < count:
        nearest = torch.minimum(nearest, (features - features[chosen[-1]]).square().sum(1))
        nearest[chosen[-1]] = -1.0  # equal images lie at distance 0: a chosen one is never chosen again
        chosen.append(nearest.argmax())
    return torch.stack(chosen)


def k_means(features: Tensor, count: int) -> Tensor:
    """[count]: the points nearest to the centres of ``count`` clusters (Lloyd, 1982).

    The first centres are chosen one by one, always the one of about a thousand points that brings all points nearest to
    a centre. A cluster that loses all its points keeps its centre; no point is chosen twice.
    """
    candidates = features[:: max(1, len(features) // max(_CANDIDATES, count))]
    far = torch.cdist(candidates, features).square()  # [candidates, n]
    nearest, first = torch.full_like(features[:, 0], torch.inf), []
    for _ in range(count):
        first.append(torch.minimum(far, nearest).sum(1).argmin())
        nearest = torch.minimum(far[first[-1]], nearest)
    centres = candidates[torch.stack(first)]
    numbers = torch.arange(count, device=features.device)[:, None]
    for _ in range(_LLOYD):
        owner = torch.cdist(features, centres).argmin(1)
        members = (owner == numbers).to(features.dtype)  # [count, n]; a product, so that sums are always the same
        sizes = members.sum(1, keepdim=True)
        centres = torch.where(sizes > 0, members @ features / sizes.clamp(min=1), centres)
    distance = torch.cdist(centres, features)  # [count, n]
    chosen = []
    for row in distance:
        chosen.append(row.argmin())
        distance[:, chosen[-1]] = torch.inf
    return torch.stack(chosen)


INITS: Registry[Init] = Registry("initialisation")


@INITS.register("random")  # as the selection of that name
@INITS.register("real")
def _real() -> Init:
    """Different random real images of each class."""
    return RandomReal()


@INITS.register("noise")
def _noise() -> Init:
    """Normal noise with the data's mean and standard deviation."""
    return Noise()


@INITS.register("herding")
def _herding(*, features: Features = "network", network: str = "convnet3", epochs: int = 20) -> Init:
    """Real images whose running mean stays nearest to the class mean."""
    return ByFeatures(herding, features, network, epochs)


@INITS.register("k-center")
def _k_center(*, features: Features = "network", network: str = "convnet3", epochs: int = 20) -> Init:
    """Real images that cover the class: each the farthest from those before it."""
    return ByFeatures(k_center, features, network, epochs)


@INITS.register("k-means")
def _k_means(*, features: Features = "network", network: str = "convnet3", epochs: int = 20) -> Init:
    """Real images nearest to the centres of the class's clusters."""
    return ByFeatures(k_means, features, network, epochs)


def make_init(spec: str) -> Init:
    """The initialisation that ``spec`` names, e.g. ``real`` or ``herding:features=pixels``."""
    name, options = parse_spec(spec)
    entry = INITS.get(name)
    return entry.build(**entry.resolve(options))


InitSpec = Annotated[str, make_init]  # an option that names an initialisation
