"""Networks trained on the real data, many at once, kept for every later run that asks for the same ones.

The cache is a folder of safetensors (``$M3D_CACHE``, else ``~/.cache/m3d/networks``); a file's name is a digest of
everything that decides its contents: data, network, recipe, seed and precision.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from m3d import rng
from m3d.augment import Augment
from m3d.data.classes import Dataset
from m3d.errors import Interrupted, M3DError
from m3d.files import read_checked, write_checked
from m3d.nets import make_net
from m3d.nets.flat import FlatNet
from m3d.runtime import Runtime, stop_politely
from m3d.train import Images, Recipe, Trainer

log = logging.getLogger(__name__)
_REPORT_SECONDS = 5.0


@dataclass(frozen=True)
class Trained:
    """R networks before and after training."""

    net: FlatNet
    initial: Tensor  # [R, P]
    final: Tensor  # [R, P]
    seconds: float = 0.0  # that their training took
    earlier: float = 0.0  # of these, spent in another session and taken from the cache


def default_recipe(epochs: int) -> Recipe:
    """SGD 0.05 at batch 256 with two drops, one augmentation per batch."""
    return Recipe(
        epochs=epochs,
        batch=256,
        lr=0.05,
        milestones=(epochs // 2, 3 * epochs // 4),
        gamma=0.2,
        augment=Augment(one_of=("color", "crop", "cutout", "flip", "scale", "rotate")),
    )


def trained_networks(data: Dataset, spec: str, recipe: Recipe, repeats: int, seed: int, runtime: Runtime) -> Trained:
    """``repeats`` networks called ``spec``, trained on ``data``'s training images, from the cache if they are there."""
    if not data.mirror:
        recipe = replace(recipe, augment=recipe.augment.without("flip"))
    net = FlatNet(make_net(spec, data.shape, data.classes), runtime.device)
    asked = {
        "data": data.train.fingerprint,
        "net": spec,
        "recipe": recipe.record(),
        "repeats": repeats,
        "seed": seed,
        "precision": runtime.precision,
        **data.transform,
    }
    path = cache_folder() / f"{hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:24]}.safetensors"
    initial = net.fresh(seed, rng.Purpose.TEACHER, _zero(runtime), torch.arange(repeats, device=runtime.device))
    kept = _kept(path, initial.shape)
    if kept is not None:
        final, seconds = kept
        log.info("%d trained %s come from the cache; their training took %.1f s", repeats, spec, seconds)
        return Trained(net, initial, final.to(runtime.device), seconds, seconds)
    log.info("training %d %s for %d epochs on %s", repeats, spec, recipe.epochs, data.name)
    began = time.perf_counter()
    images = _images(data, runtime)
    with runtime.active():
        trainer = Trainer(net, images, recipe, repeats, seed, runtime)
        with torch.no_grad():
            trainer.flat.copy_(initial)
        earlier = _run(trainer, path.with_suffix(".begun"))
        accuracy = trainer.accuracy(images).tolist()  # waits for the device
    final, seconds = trainer.flat.detach(), earlier + time.perf_counter() - began
    log.info("trained in %.1f s to a training accuracy of %.1f %%", seconds, sum(accuracy) / repeats)
    if not bool(torch.isfinite(final).all()):
        raise M3DError(f"{spec}: weights are not finite after training on {data.name}; try --precision fp32")
    _keep(path, {"final": final}, {**asked, "training_accuracy": accuracy, "seconds": seconds})
    path.with_suffix(".begun").unlink(missing_ok=True)
    return Trained(net, initial, final, seconds, earlier)


def _keep(path: Path, tensors: dict[str, Tensor], about: dict[str, object]) -> None:
    try:
        write_checked(path, tensors, about)
    except M3DError as error:  # a cache that cannot be written costs time, not the run
        log.warning("the trained networks are not kept: %s", error)


def _run(trainer: Trainer, begun: Path) -> float:
    """Train to the last epoch, from where an interrupted session left off in ``begun``; returns its seconds."""
    epochs, earlier = trainer.recipe.epochs, 0.0
    if begun.exists():
        tensors, about = read_checked(begun)
        trainer.load(tensors)
        earlier = float(about["seconds"])
    start = shown = time.perf_counter()
    with stop_politely() as stopping:
        while trainer.epoch < epochs:
            trainer.run(trainer.epoch + 1)
            now = time.perf_counter()
            if stopping.is_set():
                _keep(begun, trainer.state(), {"seconds": earlier + now - start})
                raise Interrupted(trainer.epoch, "epochs of training the networks it needs")
            if now - shown > _REPORT_SECONDS:
                log.info("epoch %d of %d", trainer.epoch, epochs)
                shown = now
    return earlier


def _kept(path: Path, shape: torch.Size) -> tuple[Tensor, float] | None:
    """([R, P], seconds of training) of a file of the cache; None if it is not there, or damaged, which is said."""
    if not path.exists():
        return None
    try:
        tensors, about = read_checked(path)
        final, seconds = tensors.get("final"), float(about.get("seconds", 0.0))
    except (M3DError, TypeError, ValueError) as error:
        log.warning("%s; its networks are trained again", error)
        return None
    if final is None or final.shape != shape:
        log.warning("%r does not hold the networks it is named for; they are trained again", str(path))
        return None
    return final, seconds


def cache_folder() -> Path:
    given = os.environ.get("M3D_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "m3d" / "networks"


def _images(data: Dataset, runtime: Runtime) -> Images:
    train = data.train.to(runtime.device)
    return Images(train.images, train.labels(), data.normalise(runtime.device)).prepared()


def _zero(runtime: Runtime) -> Tensor:
    return torch.zeros(1, dtype=torch.long, device=runtime.device)


@torch.no_grad()
def representations(trained: Trained, data: Dataset, runtime: Runtime, chunk: int = 1000) -> Tensor:
    """[N, d] float32: the first network's representation of every training image, in the data's order."""
    images = _images(data, runtime)
    with runtime.active():
        parts = [
            trained.net(trained.final[:1], images.take(index)[None], runtime.dtype).features[0]
            for index in torch.split(torch.arange(len(images), device=runtime.device), chunk)
        ]
    return torch.cat(parts).float()
