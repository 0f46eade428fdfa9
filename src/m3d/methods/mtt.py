"""MTT: Cazenavette et al., "Dataset Distillation by Matching Training Trajectories", CVPR 2022.

100 experts are trained on the real data (SGD 0.01, no momentum, one augmentation per batch of 256) and written down
after every epoch. Each of 5,000 steps picks an expert and an epoch t < max_start, lets a student that starts at θ_t
take N steps of rate α on augmented mini-batches of the synthetic images, and moves the images and α so that the student
ends where the expert was M epochs later: ‖θ̂ − θ_{t+M}‖² / ‖θ_t − θ_{t+M}‖². No real image is read meanwhile. α is kept
in the set's manifest, and the protocol ``mtt`` trains with it.

The published CIFAR-10 numbers at 1 and 10 images per class, and CIFAR-100's at 1 and 50, are of ZCA-whitened data
(``--zca``); the rates below are for images as networks take them, whitened where the data are.

As published, pixels may leave [0, 1]: brought back after each step (``bounded``), whitened images lose what the steps
gain, and the loss rises again. Pictures of a set cut off what lies outside.

Departures: experts stop at the last epoch that can be asked for, which changes none before it; where a mini-batch does
not divide the images, the smaller one ends a pass instead of beginning it; the last step's set is the result, not the
best of all by test accuracy. Settings are published for each dataset: images of 128 pixels and more stand here for its
ImageNet subsets (of one image per class), those from 64 pixels for Tiny ImageNet, each with its deeper ConvNet, and
smaller ones of other names for CIFAR-10. Images below 24 pixels take as small a part of the images' rate as in ``m3d``:
at the whole of it the digits are lost within a hundred steps (LAB.md).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from m3d.augment import Augment
from m3d.method import Matching, Method
from m3d.methods import METHODS, Task
from m3d.methods.m3d import size_rate
from m3d.objectives import EndPoint
from m3d.players import Descent
from m3d.pools.experts import Experts
from m3d.select import InitSpec, make_init
from m3d.tiles import Factor, Tiles
from m3d.train import Recipe
from m3d.unroll import Lessons, Unroll


class Published(NamedTuple):
    """Settings of one dataset and IPC; ``batch_syn`` None: all images in every mini-batch."""

    syn_steps: int
    span: int
    max_start: int
    lr: float
    lr_lr: float
    lr_teacher: float
    batch_syn: int | None = None


_CIFAR10 = {
    1: Published(50, 2, 2, 100.0, 1e-7, 0.01),
    10: Published(30, 2, 20, 100.0, 1e-5, 0.001),
    50: Published(30, 2, 40, 1000.0, 1e-5, 0.001),
}
_CIFAR100 = {
    1: Published(20, 3, 20, 1000.0, 1e-5, 0.01),
    10: Published(20, 2, 20, 1000.0, 1e-5, 0.01),
    50: Published(80, 2, 40, 1000.0, 1e-5, 0.01, 125),
}
_TINY = {
    1: Published(10, 2, 10, 10_000.0, 1e-4, 0.01),
    10: Published(20, 2, 40, 10_000.0, 1e-4, 0.01, 200),
    50: Published(20, 2, 40, 10_000.0, 1e-4, 0.01, 300),
}
_IMAGENET = {1: Published(20, 2, 10, 1000.0, 1e-6, 0.01)}
# Pixels of all mini-batches of a step up to which their graphs are kept. ConvNet-3 in float32 keeps 2.4 KB for each on
# a CPU (measured), which makes 10 GB; CUDA's path keeps more.
_KEPT = 2**22


def published(task: Task) -> tuple[str, Published]:
    """(network, settings) of the data that ``task`` is most like, at the nearest smaller published IPC."""
    side = min(task.shape[1:])
    if side >= 128:
        network, rows = "convnet5", _IMAGENET
    elif side >= 64:
        network, rows = "convnet4", _TINY
    else:
        network, rows = "convnet3", _CIFAR100 if task.data == "cifar100" else _CIFAR10
    return network, rows[max(known for known in rows if known <= task.ipc)]


@METHODS.register("mtt", paper="Cazenavette et al., CVPR 2022", equation="Eq. 2, trajectory matching", cost="very high")
def mtt(
    task: Task,
    *,
    steps: int = 5000,
    lr: float | None = None,
    momentum: float = 0.5,
    factor: Factor = 1,
    syn_steps: int | None = None,
    span: int | None = None,
    max_start: int | None = None,
    lr_lr: float | None = None,
    lr_teacher: float | None = None,
    batch_syn: int | None = None,
    experts: int = 100,
    expert_epochs: int = 50,
    augment: str | None = None,
    init: InitSpec = "real",
    bounded: bool = False,
    recompute: bool | None = None,
) -> Method:
    """Match where training on synthetic images leads with where recorded training on real images led."""
    tiles = Tiles(factor)
    network, known = published(task)
    known = known._replace(lr=known.lr * size_rate(task.shape))
    given: dict[str, Any] = {"syn_steps": syn_steps, "span": span, "max_start": max_start, "lr": lr, "lr_lr": lr_lr}
    given |= {"lr_teacher": lr_teacher, "batch_syn": batch_syn}
    known = known._replace(**{name: value for name, value in given.items() if value is not None})
    operations = Augment.any_one(task.mirror) if augment is None else Augment.parse(augment)
    lessons = Lessons(known.syn_steps, known.batch_syn)
    decoded = tiles.count(task.ipc, task.shape)
    if recompute is None:
        pixels = sum(lessons.sizes(task.classes * decoded)) * task.shape[1] * task.shape[2]
        recompute = pixels > _KEPT
    return Method(
        init=make_init(init),
        tiles=tiles,
        network=network,
        matching=Matching(
            steps=steps,
            pool=Experts(
                recipe=Recipe(expert_epochs, 256, 0.01, momentum=0.0, weight_decay=0.0, augment=operations),
                lessons=lessons,
                experts=experts,
                span=known.span,
                max_start=known.max_start,
            ),
            objective=EndPoint(),
            player=Descent(known.lr, momentum),
            probe=Unroll(lessons, known.lr_teacher, Descent(known.lr_lr, momentum), operations, recompute=recompute),
            batch_real=1,  # none is read
            batch_syn_max=decoded,  # mini-batches are drawn from them all
            standardised=True,
            bounded=bounded,
        ),
        settled={**known._asdict(), "augment": str(operations), "recompute": recompute},
        gpu_precision="tf32",  # a student's 20 to 80 steps are differentiated as one: bf16's errors would add up
    )
