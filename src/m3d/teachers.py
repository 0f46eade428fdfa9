"""Soft labels for a finished set: what networks trained on the real data say of its images.

Any method's set can be labelled. The labels are stored with it, count in its storage, and never replace the classes:
``CondensedSet.hard()`` is the set as it was.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from m3d.condensed import CondensedSet
from m3d.costs import borrowing
from m3d.data.classes import Dataset
from m3d.errors import M3DError
from m3d.nets import make_net
from m3d.runtime import Runtime
from m3d.trained import Trained, default_recipe, trained_networks

_REFERENCE = 1024  # real images that give batch norms their statistics


@dataclass(frozen=True)
class Teachers:
    """Who labels: ``teachers`` networks called ``teacher``, trained on the real data for ``epochs``."""

    teacher: str = "convnet3"
    teachers: int = 5
    epochs: int = 20
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("teachers", self.teachers), ("epochs", self.epochs)):
            if value < 1:
                raise M3DError(f"{name}={value} is not valid; allowed: 1 and more")
        if not 0 < self.temperature < float("inf"):
            raise M3DError(f"temperature={self.temperature} is not valid; allowed: a positive number")

    @classmethod
    def of(cls, condensed: CondensedSet) -> Teachers:
        """Those who labelled ``condensed``."""
        told = condensed.manifest.get("soft_labels")
        names = cls.__dataclass_fields__
        if not isinstance(told, Mapping) or not set(names) <= set(told):
            raise M3DError("the set does not say who made its soft labels; make them with: m3d relabel RUN")
        return cls(**{name: told[name] for name in names})


def relabel(condensed: CondensedSet, data: Dataset, teachers: Teachers, runtime: Runtime) -> CondensedSet:
    """``condensed`` with soft labels: p = mean over the teachers of softmax(logits / temperature).

    The teachers see the decoded images, normalised and not augmented. They come from the cache if they are there.
    """
    condensed.require(data.class_names, data.shape, data.name)
    make_net(teachers.teacher, data.shape, data.classes)  # a wrong name is said before anything is trained
    began = time.perf_counter()
    recipe = default_recipe(teachers.epochs)
    with borrowing() as paid:  # a teacher from the cache costs what its training took
        trained = trained_networks(data, teachers.teacher, recipe, teachers.teachers, teachers.seed, runtime)
    images, classes = condensed.hard().decoded()
    soft = averaged_softmax(trained, images, data, teachers.temperature, runtime).cpu()
    told: dict[str, Any] = {
        **asdict(teachers),
        "agreement": round(float((soft.argmax(1) == classes).double().mean()), 6),  # with the images' classes
        "precision": runtime.precision,
        "seconds": round(time.perf_counter() - began + paid.seconds, 3),
    }
    return replace(condensed, manifest={**condensed.manifest, "soft_labels": told}, soft=soft)


@torch.no_grad()
def averaged_softmax(
    trained: Trained, pixels: Tensor, data: Dataset, temperature: float, runtime: Runtime, chunk: int = 1000
) -> Tensor:
    """[N, K] float32: the mean over networks of softmax(logits / temperature), for ``pixels`` [N, ch, h, w]."""
    device, train, normalise = runtime.device, data.train, data.normalise(runtime.device)
    some = torch.linspace(0, len(train) - 1, min(len(train), _REFERENCE), device=train.device).long()
    reference = normalise(train.images[some].to(device).float() / 255)[None]  # [1, m, ch, h, w]
    parts = []
    with runtime.active():
        for part in pixels.split(chunk):
            images = normalise(part.to(device))[None]
            rows = trained.final.split(1)  # one network at a time: each sees the same images
            logits = [trained.net.calibrated(row, images, reference, runtime.dtype).logits[0].float() for row in rows]
            parts.append(torch.softmax(torch.stack(logits) / temperature, dim=-1).mean(0))
    return torch.cat(parts)
