"""Experts: networks whose training on the real data is recorded epoch by epoch, and the pool that shows parts of it.

Experts are trained a group at a time and written down after every epoch, one file per group and epoch, in the cache of
:mod:`m3d.trained`. Their rate is constant and they have no momentum, so a file is all that training needs to go on: a
killed session loses at most an epoch, and more epochs or more experts are added to those that are there. Files are read
a row at a time, so memory holds no more than a step needs (the system keeps what fits). Several processes share a
group; the first one reads and writes the files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from m3d import rng
from m3d.batches import Images
from m3d.costs import borrow
from m3d.data.classes import Dataset
from m3d.errors import Interrupted, M3DError
from m3d.files import read_checked, read_json, read_row, write_checked, write_json
from m3d.nets.flat import FlatNet
from m3d.pools import LivePool, World
from m3d.runtime import Runtime, stop_politely
from m3d.shards import Ranks
from m3d.train import Recipe, Trainer
from m3d.trained import cache_folder
from m3d.types import Eyes, Segment
from m3d.unroll import Lessons

log = logging.getLogger(__name__)
_SECONDS = "seconds.json"  # beside the recorded epochs: what each took
GROUP = 10  # experts trained side by side and kept in one file: 2,560 images a step fill a GPU


@dataclass(frozen=True)
class Trajectories:
    """The recorded training of experts 0, 1, …: their parameters after every epoch, on disk."""

    folder: Path
    experts: int

    def groups(self) -> list[range]:
        return [range(first, min(first + GROUP, self.experts)) for first in range(0, self.experts, GROUP)]

    def file(self, group: range, epoch: int) -> Path:
        return self.folder / f"experts-{group[0]}-{group[-1]}-epoch-{epoch}.safetensors"

    def read(self, expert: int, epoch: int) -> Tensor:
        """[P], on the CPU: the expert's parameters after ``epoch`` epochs (0: as it began)."""
        group = self.groups()[expert // GROUP]
        return read_row(self.file(group, epoch), "flat", expert - group[0])


def train_experts(
    net: FlatNet,
    data: Dataset,
    recipe: Recipe,
    experts: int,
    epochs: int,
    seed: int,
    runtime: Runtime,
    ranks: Ranks | None = None,
) -> Trajectories:
    """Experts with ``epochs`` recorded epochs each; those in the cache are checked and taken, the rest trained.

    Several processes ``ranks`` must all ask; each trains its share of every group.
    """
    ranks = ranks or Ranks()
    if recipe.momentum or recipe.milestones or recipe.schedule == "linear":
        raise M3DError("experts are trained without momentum and at a constant rate; the recipe has one of them")
    if not net.spec:
        raise M3DError("experts are kept by their network's name; this one has none, make it by make_net")
    recipe = recipe.suited(mirror=data.mirror, cutmix=data.cutmix)
    asked = {
        "data": data.train.fingerprint,
        "mean": list(data.mean),
        "std": list(data.std),
        **data.transform,
        "net": net.spec,
        "recipe": {**recipe.record(), "epochs": None},  # each epoch has its own file
        "seed": seed,
        "precision": runtime.precision,
        "deterministic": runtime.deterministic,
    }
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:24]
    trajectories = Trajectories(cache_folder() / f"experts-{digest}", experts)
    images = Images(data.train.images, data.train.labels(), data.normalise()).prepared()
    for group in trajectories.groups():
        files = [trajectories.file(group, epoch) for epoch in range(epochs + 1)]
        recorded = _recorded(files, (len(group), net.size), ranks)
        borrow(_seconds(files[:recorded], ranks))
        if recorded < len(files):
            with ranks.alike():
                own = ranks.share(len(group))
                trainer = Trainer(net, images, recipe, len(own), seed, runtime, first=group.start + own.start)
            _train(trainer, group, files, recorded, asked, ranks)
    return trajectories


def _recorded(files: list[Path], shape: tuple[int, int], ranks: Ranks) -> int:
    """How many of a group's files, from the first on, the first process has."""
    count = 0
    with ranks.alike():
        if ranks.leads:
            count = next((e for e, file in enumerate(files) if not _whole(file, shape)), len(files))
    return int(ranks.told(count))


def _seconds(files: list[Path], ranks: Ranks) -> float:
    """What training to these files took, as far as it was written down."""
    spent = 0.0
    with ranks.alike():
        if ranks.leads and files and (told := files[0].parent / _SECONDS).exists():
            try:
                each = read_json(told)
                spent = sum(float(each.get(file.name, 0.0)) for file in files)
            except (M3DError, TypeError, ValueError) as error:
                log.warning("%s: what the experts cost is not known (%s)", told, error)
    return float(ranks.told(spent))


def _whole(file: Path, shape: tuple[int, int]) -> bool:
    """Whether a file is there and holds [experts, P]; a damaged one is trained again, which costs time and is said."""
    if not file.exists():
        return False
    try:
        flat = read_checked(file)[0].get("flat")
    except M3DError as error:
        log.warning("%s; these experts are trained again from there", error)
        return False
    if flat is None or flat.shape != shape:
        log.warning("%r does not hold %d × %d parameters; these experts are trained again", str(file), *shape)
        return False
    return True


def _train(
    trainer: Trainer, group: range, files: list[Path], recorded: int, asked: dict[str, object], ranks: Ranks
) -> None:
    """Train a group on from the last of its ``recorded`` files, and write down every further epoch."""
    log.info("training experts %d to %d, epochs %d to %d", group[0], group[-1], recorded, len(files) - 1)

    began = time.perf_counter()

    def write(epoch: int, flat: Tensor) -> None:
        nonlocal began
        with ranks.alike():
            if ranks.leads:
                write_checked(files[epoch], {"flat": flat}, asked)
                now = time.perf_counter()
                _tell_seconds(files[epoch], now - began)
                began = now

    own, start = ranks.share(len(group)), _start(trainer, group, files[:recorded], ranks)
    if recorded == 0:
        write(0, start)
    mine, first = start[own.start : own.stop], max(1, recorded)
    trainer.load({"flat": mine, "velocity": torch.zeros_like(mine), "epoch": torch.tensor(first - 1)})
    with stop_politely() as stopping:
        for epoch in range(first, len(files)):
            with ranks.alike():
                trainer.run(epoch)
            flat = ranks.gathered(trainer.flat.detach(), len(group))
            if not bool(torch.isfinite(flat).all()):
                raise M3DError(f"an expert's weights are not finite after epoch {epoch}; try --precision fp32")
            write(epoch, flat)
            log.info("epoch %d of %d", epoch, len(files) - 1, extra={"done": (epoch, len(files) - 1)})
            if ranks.any(stopping.is_set()):  # all stop after the same epoch, which is kept
                raise Interrupted(epoch, "epochs of training its experts")


def _tell_seconds(file: Path, seconds: float) -> None:
    """Write down, beside the files, what one of them took."""
    told = file.parent / _SECONDS
    try:
        each = read_json(told) if told.exists() else {}
    except M3DError:
        each = {}
    write_json(told, {**each, file.name: round(seconds, 3)})


def _start(trainer: Trainer, group: range, recorded: list[Path], ranks: Ranks) -> Tensor:
    """[experts, P] of a whole group: as it began, or as the last of its ``recorded`` files has it."""
    lanes = torch.arange(group.start, group.stop, device=trainer.lanes.device)
    flat = trainer.net.fresh(trainer.seed, rng.Purpose.EXPERT, lanes.new_zeros(1), lanes)
    if not recorded:
        return flat
    with ranks.alike():
        if ranks.leads:
            flat = read_checked(recorded[-1])[0]["flat"].to(flat)
    return ranks.given(flat)


@dataclass(frozen=True)
class Experts:
    """Each step another stretch of another expert: epochs t to t + ``span``, t uniform below ``max_start``.

    Experts come in shuffled passes over them all. Only epochs that can be shown are trained and kept; the recipe's own
    number of epochs is the most there may be.
    """

    recipe: Recipe
    lessons: Lessons
    experts: int = 100
    span: int = 2
    max_start: int = 20

    def __post_init__(self) -> None:
        for name, value in (("experts", self.experts), ("span", self.span), ("max_start", self.max_start)):
            if value < 1:
                raise M3DError(f"{name}={value} is not valid; allowed: 1 and more")
        if self.needed > self.recipe.epochs:
            raise M3DError(
                f"max_start={self.max_start} and span={self.span} reach epoch {self.needed}, but experts are trained "
                f"for {self.recipe.epochs}; raise expert_epochs"
            )

    @property
    def needed(self) -> int:
        """The last epoch that a step may look at."""
        return self.max_start - 1 + self.span

    def start(self, world: World) -> LivePool:
        trajectories = train_experts(
            world.net, world.data, self.recipe, self.experts, self.needed, world.seed, world.runtime, world.ranks
        )
        return _ExpertPool(self, world, trajectories)


class _ExpertPool(LivePool):
    """A start, an end and the lessons between; all of it a function of (seed, step), so nothing is saved."""

    end: Tensor  # [P]
    orders: Tensor  # [N, b]
    uniforms: Tensor  # [N, b, UNIFORMS]

    def __init__(self, record: Experts, world: World, trajectories: Trajectories):
        super().__init__()
        self.record, self.seed, self.trajectories = record, world.seed, trajectories
        classes, ipc = world.synthetic.latent.shape[:2]
        self.images = classes * world.synthetic.tiles.count(ipc, world.data.shape)
        orders, uniforms = record.lessons.draw(self.seed, 0, self.images, world.net.base.device)
        for name, value in (
            ("parameters_flat", torch.zeros_like(world.net.base)),
            ("end", torch.zeros_like(world.net.base)),
            ("orders", orders),
            ("uniforms", uniforms),
        ):
            self.register_buffer(name, value, persistent=False)

    def eyes(self) -> Eyes:
        goal = Segment(self.parameters_flat, self.end)
        return Eyes(self.parameters_flat, goal=goal, draws=(self.orders, self.uniforms))

    def due(self, step: int) -> bool:
        return True

    def stretch(self, step: int) -> tuple[int, int]:
        """(expert, first epoch) of this step, worked out on the host, which reads the files."""
        lane = torch.zeros(1, dtype=torch.long)
        position = torch.full((1, 1, 1), step)
        expert = rng.shuffled(self.seed, rng.Purpose.SEGMENT, position, lane, lane + self.record.experts)
        first = rng.bits(self.seed, rng.Purpose.SEGMENT, lane + step, lane + 1, 1) % self.record.max_start
        return int(expert), int(first)

    @torch.no_grad()
    def draw(self, step: int) -> None:
        expert, first = self.stretch(step)
        self.parameters_flat.copy_(self.trajectories.read(expert, first))
        self.end.copy_(self.trajectories.read(expert, first + self.record.span))
        orders, uniforms = self.record.lessons.draw(self.seed, step, self.images, self.orders.device)
        self.orders.copy_(orders)
        self.uniforms.copy_(uniforms)
