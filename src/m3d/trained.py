"""Networks trained on the real data, many at once, kept for every later run that asks for the same ones.

The cache is a folder of safetensors (``$M3D_CACHE``, else ``~/.cache/m3d/networks``); a file's name is a digest of
everything that decides its contents: data and their normalisation, network, recipe, seed, precision, determinism and
kind of device. Several processes share the training.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from m3d import rng
from m3d.augment import Augment
from m3d.batches import Images
from m3d.costs import borrow
from m3d.data.classes import Dataset
from m3d.errors import Interrupted, M3DError
from m3d.files import read_checked, write_checked
from m3d.nets import make_net
from m3d.nets.flat import FlatNet
from m3d.runtime import Runtime, stop_politely
from m3d.shards import Ranks
from m3d.train import Recipe, Trainer

log = logging.getLogger(__name__)
_REPORT_SECONDS = 1.0
_KEPT = ("flat", "velocity")  # [R, P] each, of training that was stopped


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
        milestones=(max(1, epochs // 2), max(1, 3 * epochs // 4)),
        gamma=0.2,
        augment=Augment.any_one(),
    )


def trained_networks(
    data: Dataset, spec: str, recipe: Recipe, repeats: int, seed: int, runtime: Runtime, ranks: Ranks | None = None
) -> Trained:
    """``repeats`` networks called ``spec``, trained on ``data``'s training images, from the cache if they are there.

    Several processes ``ranks`` must all ask: each trains its share of the networks, and all return all of them. The
    cache is that of the first one, which alone reads and writes it.
    """
    ranks = ranks or Ranks()
    recipe = recipe.suited(mirror=data.mirror, cutmix=data.cutmix)
    net = FlatNet(make_net(spec, data.shape, data.classes), runtime.device)
    asked = {
        "data": data.train.fingerprint,
        "net": spec,
        "recipe": recipe.record(),
        "repeats": repeats,
        "seed": seed,
        "precision": runtime.precision,
        "deterministic": runtime.deterministic,
        "device": runtime.device.type,
        "mean": list(data.mean),
        "std": list(data.std),
        **data.transform,
    }
    path = cache_folder() / f"{hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:24]}.safetensors"
    initial = net.fresh(seed, rng.Purpose.TEACHER, _zero(runtime), torch.arange(repeats, device=runtime.device))
    workers = ranks.workers(repeats)
    kept = _kept(path, initial, ranks)
    if kept is not None:
        final, seconds, memory = kept
        log.info("%d trained %s come from the cache; their training took %.1f s", repeats, spec, seconds)
        borrow(seconds / workers, memory)
        return Trained(net, initial, final, seconds / workers, seconds / workers)
    log.info("training %d %s for %d epochs on %s", repeats, spec, recipe.epochs, data.name)
    began = time.perf_counter()
    with runtime.active():
        with ranks.alike():
            training = _Training(net, _images(data, runtime), recipe, initial, seed, runtime, ranks)
        earlier = training.run(path.with_suffix(".begun"))
        final, accuracy = training.result()
    seconds = earlier + time.perf_counter() - began
    log.info("trained in %.1f s to a training accuracy of %.1f %%", seconds, sum(accuracy) / repeats)
    if not bool(torch.isfinite(final).all()):
        raise M3DError(f"{spec}: weights are not finite after training on {data.name}; try --precision fp32")
    if ranks.leads:
        paid = {"seconds": seconds * workers, "peak_memory": runtime.peak_memory()}
        _keep(path, {"final": final}, {**asked, "training_accuracy": accuracy, **paid})
        path.with_suffix(".begun").unlink(missing_ok=True)
    borrow(earlier)
    return Trained(net, initial, final, seconds, earlier)


class _Training:
    """Networks in training, spread over the processes: each has some of the rows [R, P] that the first one keeps.

    Seconds on disk are those that one process would need; as many processes as have a share divide them.
    """

    def __init__(
        self, net: FlatNet, images: Images, recipe: Recipe, initial: Tensor, seed: int, runtime: Runtime, ranks: Ranks
    ):
        self.images, self.ranks, self.networks = images, ranks, len(initial)
        self.own = ranks.share(len(initial))
        self.trainer = Trainer(net, images, recipe, len(self.own), seed, runtime, first=self.own.start)
        mine = self._mine(initial)
        self.trainer.load({"flat": mine, "velocity": torch.zeros_like(mine), "epoch": torch.tensor(0)})

    def _mine(self, rows: Tensor) -> Tensor:
        return rows[self.own.start : self.own.stop]

    def run(self, begun: Path) -> float:
        """Train to the last epoch, from where an interrupted session left off in ``begun``; returns its seconds."""
        trainer, ranks, epochs = self.trainer, self.ranks, self.trainer.recipe.epochs
        earlier = self._continue(begun)
        start = shown = time.perf_counter()
        with stop_politely() as stopping:
            while trainer.epoch < epochs:
                with ranks.alike():
                    trainer.run(trainer.epoch + 1)
                now = time.perf_counter()
                if ranks.any(stopping.is_set()):  # all stop after the same epoch
                    self._leave(begun, earlier + now - start)
                    raise Interrupted(trainer.epoch, "epochs of training the networks it needs")
                if now - shown > _REPORT_SECONDS:
                    trainer.runtime.wait()  # what was asked of a GPU is not yet done
                    log.info("epoch %d of %d", trainer.epoch, epochs, extra={"done": (trainer.epoch, epochs)})
                    shown = time.perf_counter()
        return earlier

    def result(self) -> tuple[Tensor, list[float]]:
        """(weights [R, P], accuracies on the training images) of all networks, on every process."""
        with self.ranks.alike():
            own = self.trainer.accuracy(self.images)  # waits for the device
        accuracy: list[float] = self.ranks.gathered(own, self.networks).tolist()
        return self.ranks.gathered(self.trainer.flat.detach(), self.networks), accuracy

    def _continue(self, begun: Path) -> float:
        """Go on from ``begun``, if the first process has it; returns the seconds spent until then."""
        trainer, ranks = self.trainer, self.ranks
        with ranks.alike():
            found = _begun(begun) if ranks.leads else None
        if not ranks.any(found is not None):
            return 0.0
        room = trainer.flat.new_empty(len(_KEPT), self.networks, trainer.flat.shape[1])
        rows, epoch, seconds = found or (room, 0, 0.0)
        flat, velocity = (self._mine(ranks.given(r)) for r in rows.to(room))
        trainer.load({"flat": flat, "velocity": velocity, "epoch": torch.tensor(int(ranks.told(epoch)))})
        return ranks.told(seconds) / ranks.workers(self.networks)

    def _leave(self, begun: Path, seconds: float) -> None:
        """What any number of processes can go on from, written by the first."""
        state = self.trainer.state()
        whole = {k: self.ranks.gathered(state[k], self.networks) for k in _KEPT}
        if self.ranks.leads:
            _keep(begun, {**whole, "epoch": state["epoch"]}, {"seconds": seconds * self.ranks.workers(self.networks)})


def _keep(path: Path, tensors: dict[str, Tensor], about: dict[str, object]) -> None:
    try:
        write_checked(path, tensors, about)
    except M3DError as error:  # a cache that cannot be written costs time, not the run
        log.warning("the trained networks are not kept: %s", error)


def _begun(path: Path) -> tuple[Tensor, int, float] | None:
    """(weights and velocities [2, R, P], epochs done, seconds) of training that was stopped, if there is any."""
    if not path.exists():
        return None
    tensors, about = read_checked(path)
    try:
        return torch.stack([tensors[k] for k in _KEPT]), int(tensors["epoch"]), float(about["seconds"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise M3DError(f"{str(path)!r} does not hold training that was stopped ({error}); delete it") from error


def _kept(path: Path, like: Tensor, ranks: Ranks) -> tuple[Tensor, float, int] | None:
    """(weights like ``like`` [R, P], seconds of training, bytes of memory) on every process, if the first one has them
    in its cache."""
    with ranks.alike():
        found = _read(path, like.shape) if ranks.leads else None
    if not ranks.any(found is not None):
        return None
    final, seconds, memory = found or (torch.empty_like(like), 0.0, 0)
    return ranks.given(final.to(like.device)), ranks.told(seconds), int(ranks.told(float(memory)))


def _read(path: Path, shape: torch.Size) -> tuple[Tensor, float, int] | None:
    """([R, P], seconds of training, bytes of memory) of a file of the cache; None if it is not there, or damaged, which
    is said."""
    if not path.exists():
        return None
    try:
        tensors, about = read_checked(path)
        final, seconds = tensors.get("final"), float(about.get("seconds", 0.0))
        memory = int(about.get("peak_memory", 0))
    except (M3DError, TypeError, ValueError) as error:
        log.warning("%s; its networks are trained again", error)
        return None
    if final is None or final.shape != shape:
        log.warning("%r does not hold the networks it is named for; they are trained again", str(path))
        return None
    return final, seconds, memory


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
