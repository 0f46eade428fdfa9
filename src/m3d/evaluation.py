"""How good a set is: train fresh networks on it under a fixed protocol, and test them on real images.

The headline is the accuracy after the last epoch. ``best`` is the best of a few epochs that the protocol names in
advance; it is chosen on the test data and is reported only because published numbers often are.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from typing import Any

import torch

from m3d.augment import Augment
from m3d.batches import Images
from m3d.condensed import CondensedSet
from m3d.data.classes import ClassData, Dataset
from m3d.errors import M3DError
from m3d.files import sha256
from m3d.nets import make_net
from m3d.nets.flat import FlatNet
from m3d.photo import Photo
from m3d.registry import Registry, parse_spec
from m3d.run_folder import RunFolder
from m3d.runtime import Runtime, stop_politely
from m3d.saver import Saver
from m3d.train import Recipe, Trainer
from m3d.wording import option, with_sd

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Protocol:
    """A fixed way to train and test: the recipe, and the epochs at which accuracy is measured (last: the headline)."""

    name: str
    recipe: Recipe
    checks: tuple[int, ...]
    learned_lr: bool = False  # whether the learning rate that came with the set, if one did, replaces the recipe's

    def __post_init__(self) -> None:
        if not self.checks or self.checks[-1] != self.recipe.epochs or list(self.checks) != sorted(set(self.checks)):
            raise M3DError(f"protocol {self.name}: checks={self.checks} must rise and end at {self.recipe.epochs}")


PROTOCOLS: Registry[Protocol] = Registry("protocol")


def _quarters(epochs: int) -> tuple[int, ...]:
    return tuple(sorted({max(1, epochs * k // 4) for k in (1, 2, 3, 4)}))


@PROTOCOLS.register("paper")
def paper(*, epochs: int = 1000, batch: int = 64) -> Protocol:
    """The paper's (IDC's) recipe: SGD 0.01, ×0.2 at 2/3 and 5/6, per-image augmentation, CutMix with probability ½."""
    recipe = Recipe(
        epochs=epochs,
        batch=batch,
        lr=0.01,
        milestones=(max(1, 2 * epochs // 3), max(1, 5 * epochs // 6)),
        gamma=0.2,
        augment=Augment(always=("flip", "color"), one_of=("crop", "scale", "rotate")),
        cutmix=0.5,
    )
    return Protocol("paper", recipe, _quarters(epochs))


@PROTOCOLS.register("dsa")
def dsa(*, epochs: int = 1000, batch: int = 256) -> Protocol:
    """The DC family's recipe: SGD 0.01, ×0.1 at half time with a new optimiser, one augmentation per batch."""
    recipe = Recipe(
        epochs=epochs,
        batch=batch,
        lr=0.01,
        milestones=(epochs // 2 + 1,),
        gamma=0.1,
        fresh_momentum=True,
        augment=Augment.any_one(),
    )
    return Protocol("dsa", recipe, _quarters(epochs))


@PROTOCOLS.register("dc")
def dc(*, epochs: int = 300, batch: int = 256) -> Protocol:
    """DC's recipe: as dsa, but 300 epochs without augmentation."""
    augmented = dsa(epochs=epochs, batch=batch)
    return replace(augmented, name="dc", recipe=replace(augmented.recipe, augment=Augment()))


@PROTOCOLS.register("dc-mnist")
def dc_mnist(*, epochs: int = 1000, batch: int = 256) -> Protocol:
    """DC's recipe for MNIST, which alone it augments: one of crop, scale and rotate per batch, 1,000 epochs."""
    plain = dc(epochs=epochs, batch=batch)
    operations = Augment(one_of=("crop", "scale", "rotate"))
    return replace(plain, name="dc-mnist", recipe=replace(plain.recipe, augment=operations))


@PROTOCOLS.register("cafe")
def cafe(*, epochs: int = 600, batch: int = 256) -> Protocol:
    """CAFE's recipe: as dc, but 600 epochs (CAFE+DSA uses dsa)."""
    return replace(dc(epochs=epochs, batch=batch), name="cafe")


@PROTOCOLS.register("datadam")
def datadam(*, epochs: int = 1800, batch: int = 64) -> Protocol:
    """DataDAM's recipe: as dsa, but 1,800 epochs of smaller batches."""
    return replace(dsa(epochs=epochs, batch=batch), name="datadam")


@PROTOCOLS.register("idm")
def idm(*, epochs: int = 1000, batch: int = 256) -> Protocol:
    """IDM's recipe: as dsa (cutout among the augmentations, no CutMix), on the decoded images."""
    return replace(dsa(epochs=epochs, batch=batch), name="idm")


@PROTOCOLS.register("mtt")
def mtt(*, epochs: int = 1000, batch: int = 256) -> Protocol:
    """MTT's recipe: as dsa, at the learning rate that was learned with the images."""
    return replace(dsa(epochs=epochs, batch=batch), name="mtt", learned_lr=True)


@PROTOCOLS.register("quick")
def quick(*, epochs: int = 200, batch: int = 64) -> Protocol:
    """The paper's recipe in fewer epochs at a larger rate: for demonstrations and searches, not for reports."""
    full = paper(epochs=epochs, batch=batch)
    return replace(full, name="quick", recipe=replace(full.recipe, lr=0.02))


@PROTOCOLS.register("whole")
def whole(*, epochs: int = 100, batch: int = 128) -> Protocol:
    """For training on a whole dataset: SGD 0.02, ×0.2 at 1/2 and 3/4, per-image augmentation."""
    recipe = Recipe(
        epochs=epochs,
        batch=batch,
        lr=0.02,
        milestones=(max(1, epochs // 2), max(1, 3 * epochs // 4)),
        gamma=0.2,
        augment=Augment(always=("flip",), one_of=("crop", "scale", "rotate", "color")),
    )
    return Protocol("whole", recipe, _quarters(epochs))


@PROTOCOLS.register("imagenet")
def imagenet(*, epochs: int = 1000, batch: int = 64) -> Protocol:
    """The paper's (IDC's) recipe for ImageNet-10: as paper, but photographs' augmentation and CutMix always."""
    full = paper(epochs=epochs, batch=batch)
    recipe = replace(full.recipe, augment=Augment(always=("flip",)), cutmix=1.0, photo=Photo())
    return replace(full, name="imagenet", recipe=recipe)


@PROTOCOLS.register("imagenet100")
def imagenet100(*, epochs: int = 600, batch: int = 128) -> Protocol:
    """The same for ImageNet-100: SGD 0.1, weight decay 1e-4, larger batches, fewer epochs."""
    small = imagenet(epochs=epochs, batch=batch)
    return replace(small, name="imagenet100", recipe=replace(small.recipe, lr=0.1, weight_decay=1e-4))


def make_protocol(name: str, **options: object) -> Protocol:
    """The protocol called ``name``, or ``name:epochs=300,batch=32``; options are ``epochs`` and ``batch``."""
    plain, typed = parse_spec(name)
    entry = PROTOCOLS.get(plain)
    given = {k: v for k, v in options.items() if v is not None}
    for key in typed.keys() & given.keys():
        raise M3DError(f"protocol {name!r}: {key} is given twice, and is {given[key]} elsewhere")
    return entry.build(**entry.resolve({**typed, **given}))


@dataclass(frozen=True)
class Result:
    """Accuracies (percent) of the trained networks, and everything needed to obtain them again."""

    last: list[float]  # one per network: the headline
    best: list[float]  # one per network: best of the protocol's checks
    checks: dict[int, float]  # mean accuracy at each checked epoch
    seconds: float
    record: dict[str, Any]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.last)

    @property
    def sd(self) -> float:
        """Sample standard deviation over networks; 0 for a single one."""
        return statistics.stdev(self.last) if len(self.last) > 1 else 0.0

    def as_record(self) -> dict[str, Any]:
        best_sd = statistics.stdev(self.best) if len(self.best) > 1 else 0.0
        return {
            "accuracy": round(self.mean, 3),
            "sd": round(self.sd, 3),
            "n": len(self.last),
            "best_of_checks": round(statistics.fmean(self.best), 3),
            "best_sd": round(best_sd, 3),
            "last": [round(v, 3) for v in self.last],
            "checks": {str(k): round(v, 3) for k, v in self.checks.items()},
            "seconds": round(self.seconds, 2),
            **self.record,
        }

    def __str__(self) -> str:
        return f"{with_sd(self.mean, self.sd, len(self.last))} % (last epoch, n={len(self.last)})"


def evaluate(
    condensed: CondensedSet,
    data: Dataset,
    *,
    net: str = "convnet3",
    protocol: Protocol | str = "paper",
    repeats: int = 10,
    seed: int = 0,
    split: str = "test",
    runtime: Runtime | None = None,
    report: Callable[[int, int], None] | None = None,
    folder: RunFolder | None = None,
    checkpoint_seconds: float = 60.0,
) -> Result:
    """Train ``repeats`` fresh networks on the condensed set and measure them on ``data``'s test (or val) split.

    With ``folder`` a long evaluation is checkpointed there, and goes on from its checkpoint when asked for again.
    ``report`` is called after every epoch with its number and how many there will be.
    """
    condensed.require(data.class_names, data.shape, data.name)
    pixels, labels = condensed.decoded()
    source = {
        "method": condensed.manifest["method"],
        "ipc": condensed.manifest["ipc"],
        "factor": condensed.manifest["factor"],
        "chroma": condensed.tiles.chroma,
        "set": condensed.fingerprint,
        "steps": condensed.manifest.get("steps"),
        "labels": condensed.label_kind,
        "storage": condensed.storage,  # bytes
    }
    cut = {"cell_height": condensed.tiles.cell, "margin": condensed.tiles.margin}
    source |= {name: pixels for name, pixels in cut.items() if pixels}
    if condensed.soft is not None:
        source |= {"soft_set": sha256(condensed.soft), "soft_labels": condensed.manifest.get("soft_labels")}
    protocol = make_protocol(protocol) if isinstance(protocol, str) else protocol
    protocol = with_learned(protocol, condensed.manifest.get("learned", {}))
    settings = _Settings(net, protocol, repeats, seed, split, runtime, report, Saver(folder, checkpoint_seconds))
    return _train_and_test(pixels, labels, data, source, settings)


def with_learned(protocol: Protocol, learned: Mapping[str, float]) -> Protocol:
    """The protocol with the set's own learning rate, where it asks for one and the set has it."""
    if not protocol.learned_lr or "lr" not in learned:
        return protocol
    if not learned["lr"] > 0:
        raise M3DError(f"the set's learned rate {learned['lr']} is not positive; use another protocol (dsa)")
    return replace(protocol, recipe=replace(protocol.recipe, lr=learned["lr"]))


def evaluate_whole(
    data: Dataset,
    *,
    net: str = "convnet3",
    protocol: Protocol | str = "whole",
    repeats: int = 5,
    seed: int = 0,
    split: str = "test",
    runtime: Runtime | None = None,
    report: Callable[[int, int], None] | None = None,
    folder: RunFolder | None = None,
    checkpoint_seconds: float = 60.0,
) -> Result:
    """Train on the whole training data: the upper bound a condensed set is measured against."""
    source = {"method": "whole", "ipc": None, "labels": "hard"}
    pixels, labels = data.train.images, data.train.labels()
    settings = _Settings(net, protocol, repeats, seed, split, runtime, report, Saver(folder, checkpoint_seconds))
    return _train_and_test(pixels, labels, data, source, settings)


@dataclass(frozen=True)
class _Settings:
    """How an evaluation is made; the public functions' keyword arguments."""

    net: str
    protocol: Protocol | str
    repeats: int
    seed: int
    split: str
    runtime: Runtime | None
    report: Callable[[int, int], None] | None
    saver: Saver


@cache  # said once
def _tell_of_a_small_last_batch(images: int, batch: int) -> None:
    """The published protocols drop no images, and a step on two of them undoes what many others taught."""
    left = images % batch
    if images > batch and 0 < left <= batch // 16:
        even = next(size for size in range(batch, images + 1) if images % size == 0 or images % size > batch // 16)
        log.warning(
            "of %d images the last batch of an epoch has %d; steps on so few can cost points of accuracy, "
            "%s makes none",
            images, left, option("batch", even),
        )  # fmt: skip


def _train_and_test(
    pixels: torch.Tensor, labels: torch.Tensor, data: Dataset, source: dict[str, Any], settings: _Settings
) -> Result:
    runtime = settings.runtime or Runtime.choose()
    with runtime.counting_memory():
        return _result(pixels, labels, data, source, settings, runtime)


def _result(
    pixels: torch.Tensor,
    labels: torch.Tensor,
    data: Dataset,
    source: dict[str, Any],
    settings: _Settings,
    runtime: Runtime,
) -> Result:
    net, repeats, seed, split, saver = settings.net, settings.repeats, settings.seed, settings.split, settings.saver
    protocol = make_protocol(settings.protocol) if isinstance(settings.protocol, str) else settings.protocol
    if repeats < 1:
        raise M3DError(f"repeats={repeats} is not valid; allowed: 1 and more")
    recipe = protocol.recipe.suited(mirror=data.mirror, cutmix=data.cutmix)
    _tell_of_a_small_last_batch(len(pixels), recipe.batch)
    device, began = runtime.device, time.perf_counter()
    flat_net = FlatNet(make_net(net, data.shape, data.classes), device)
    test = _images(_split_of(data, split), data, device)
    train = Images(pixels.to(device), labels.to(device), data.normalise(device)).prepared()
    record = {
        **source,
        "data": {"name": data.name, "fingerprint": data.train.fingerprint, "split": split, **data.transform},
        "net": net,
        "protocol": {"name": protocol.name, **asdict(recipe), "augment": str(recipe.augment)},
        "repeats": repeats,
        "seed": seed,
        "precision": runtime.precision,
    }
    with runtime.active(), saver.claimed(record):
        trainer = Trainer(flat_net, train, recipe, repeats, seed, runtime)
        measured, earlier = saver.begin(trainer, protocol.checks)
        with stop_politely() as stopping:
            while trainer.epoch < recipe.epochs:
                trainer.run(trainer.epoch + 1)
                if trainer.epoch in protocol.checks:
                    measured[trainer.epoch] = trainer.accuracy(test).cpu()  # [R]
                if settings.report is not None:
                    settings.report(trainer.epoch, recipe.epochs)
                saver.tend(trainer, measured, earlier + time.perf_counter() - began, stopping.is_set())
        saver.finish()
    values = torch.stack([measured[epoch] for epoch in protocol.checks])
    record |= {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "peak_memory": runtime.peak_memory(),
        **runtime.describe(),
    }
    seconds = earlier + time.perf_counter() - began
    means = {epoch: float(v.mean()) for epoch, v in measured.items()}
    return Result(values[-1].tolist(), values.max(0).values.tolist(), means, seconds, record)


def _split_of(data: Dataset, split: str) -> ClassData:
    if split == "test":
        return data.test
    if split == "val" and data.val is not None:
        return data.val
    if split == "val":
        raise M3DError(f"split 'val': no part of {data.name} was held out; load it with {option('val_fraction')}")
    raise M3DError(f"split {split!r} is not valid; allowed: test, and val where a val_fraction was held out")


def _images(part: ClassData, data: Dataset, device: torch.device) -> Images:
    return Images(part.images.to(device), part.labels().to(device), data.normalise(device)).prepared()
