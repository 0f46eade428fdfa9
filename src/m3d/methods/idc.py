"""IDC: Kim et al., "Dataset Condensation via Efficient Synthetic-Data Parameterization", ICML 2022.

Gradient matching with three changes to DC: the network is trained on *real* images between steps, a stored image is a
mosaic of smaller ones (factor 2; ``idc-i`` is factor 1), and gradients of the convolutions alone are compared by the
sum of squared (CIFAR, SVHN) or absolute (MNIST, Fashion-MNIST) differences. 2,000 networks of 100 steps each. With the
factor MNIST is matched without cutout.

Departures: all classes move in one step with momentum 0.5 instead of one after the other through a shared momentum
buffer, which in the long run moves them as far; the number of real images per step of training counts whole images, not
batches. The published settings of ImageNet subsets (absolute differences, other rates, networks trained beforehand) are
not built in: such data get those of SVHN.
"""

from __future__ import annotations

from typing import Any

from m3d.augment import Augment
from m3d.method import Matching, Method
from m3d.methods import METHODS, Task
from m3d.objectives import PowerDistance
from m3d.players import Descent
from m3d.pools import TrainedOnReal
from m3d.probes import Gradient
from m3d.select import make_init
from m3d.synth import Tiles
from m3d.train import Recipe

_GREY = ("mnist", "fashion-mnist")


@METHODS.register("idc", paper="Kim et al., ICML 2022", equation="gradient matching, convolutions", cost="very high")
def idc(
    task: Task,
    *,
    steps: int = 200_000,
    lr: float | None = None,
    momentum: float = 0.5,
    factor: int = 2,
    per_network: int = 100,
    train_images: int | None = None,
    train_cutmix: float | None = None,
    batch_real: int = 64,
    batch_syn_max: int = 128,
    augment: str | None = None,
    init: str = "real",
) -> Method:
    """Match gradients of networks trained on real images, with factor & up-sampling."""
    grey = task.data in _GREY
    if lr is None:
        lr = (1e-4 if grey else 5e-3) * task.ipc / 10
    if train_images is None:
        train_images = 2000 if task.data.startswith("cifar") else 500
    if train_cutmix is None:
        train_cutmix = 0.5 if task.cutmix else 0.0
    if augment is None:
        augment = "color+crop" if task.data == "mnist" and factor > 1 else "color+crop+cutout"
    recipe = Recipe(epochs=1, batch=64, lr=0.01, augment=Augment(always=("color", "crop")), cutmix=train_cutmix)
    return Method(
        init=make_init(init),
        tiles=Tiles(factor),
        matching=Matching(
            steps=steps,
            pool=TrainedOnReal(every=per_network, images=train_images, recipe=recipe),
            objective=PowerDistance(1 if grey else 2),
            player=Descent(lr=lr, momentum=momentum),
            probe=Gradient("convolutions", compile_from=20_000),  # half the milliseconds, after a minute (LAB.md)
            augment=Augment.parse(augment),
            batch_real=batch_real,
            batch_syn_max=batch_syn_max,
            diverged_at=1e6,  # gradients of a fresh and of a trained network differ by orders of magnitude
        ),
        settled={"lr": lr, "train_images": train_images, "train_cutmix": train_cutmix, "augment": augment},
    )


@METHODS.variant(
    "idc-i",
    of=idc,
    without=("factor",),
    paper="Kim et al., ICML 2022",
    equation="gradient matching, convolutions",
    cost="very high",
)
def idc_i(task: Task, **options: Any) -> Method:
    """IDC without factor & up-sampling."""
    return idc(task, factor=1, **options)
