"""IDC: Kim et al., "Dataset Condensation via Efficient Synthetic-Data Parameterization", ICML 2022.

Gradient matching with three changes to DC: the network is trained on *real* images between steps, a stored image is a
mosaic of smaller ones (factor 2, 3 for photographs; ``idc-i`` is factor 1), and gradients of the convolutions alone are
compared by the sum of squared (CIFAR, SVHN) or absolute (MNIST, Fashion-MNIST, ImageNet) differences. 2,000 networks of
100 steps each; for subsets of ImageNet 500, each trained on all real images before its first step. With the factor
MNIST is matched without cutout. The learning rate grows with images per class and with pixels: the published one times
IPC / 10 · (side / side₀)², side₀ being the side it was published for. Only 32 pixels have been measured here.

Departures: all classes move in one step with momentum 0.5 instead of one after the other through a shared momentum
buffer, which in the long run moves them as far; the number of real images per step of training counts whole images, not
batches. For ImageNet-100 ten networks are trained beforehand and come back in turns in the publication, here each of
the 500 is new. Data of other names stand for SVHN, photographs (128 pixels and more) for ImageNet-10.

With g_c the gradient of one convolution's weights, of the cross-entropy on a class's images:

    Σ_c ‖g_c(real) − g_c(synthetic)‖²    or    Σ_c ‖g_c(real) − g_c(synthetic)‖₁
"""

from __future__ import annotations

from typing import Any, NamedTuple

from m3d.augment import Augment
from m3d.method import Matching, Method
from m3d.methods import METHODS, Task
from m3d.objectives import PowerDistance
from m3d.players import Descent
from m3d.pools import TrainedOnReal
from m3d.probes import Gradient
from m3d.select import InitSpec, make_init
from m3d.tiles import Factor, Tiles
from m3d.train import Recipe


class _Published(NamedTuple):
    """What the publication sets by dataset."""

    lr: float  # at ten images per class, of images of ``side`` pixels
    side: int = 32
    power: int = 2  # of the differences
    train_images: int = 500
    train_before: int = 0  # epochs
    networks: int = 2000


_CIFAR = _Published(5e-3, train_images=2000)
_PHOTOS = _Published(3e-3, 224, power=1, train_before=10, networks=500)
_PUBLISHED = {
    "cifar10": _CIFAR,
    "cifar100": _CIFAR,
    "mnist": _Published(1e-4, 28, power=1),
    "fashion-mnist": _Published(1e-4, power=1),  # 28 pixels as well, but the authors' rule names MNIST alone
    "imagenet10": _PHOTOS,
    "imagenet100": _Published(1e-3, 224, power=1, train_before=5, networks=500),
}
_SVHN = _Published(5e-3)


@METHODS.register("idc", paper="Kim et al., ICML 2022", equation="gradient matching, convolutions", cost="very high")
def idc(
    task: Task,
    *,
    steps: int | None = None,
    lr: float | None = None,
    momentum: float = 0.5,
    factor: Factor | None = None,
    per_network: int = 100,
    train_images: int | None = None,
    train_before: int | None = None,
    train_cutmix: float | None = None,
    batch_real: int = 64,
    batch_syn_max: int = 128,
    augment: str | None = None,
    init: InitSpec = "real",
) -> Method:
    """Match gradients of networks trained on real images, with factor & up-sampling."""
    side = min(task.shape[1:])
    published = _PUBLISHED.get(_whole(task.data), _PHOTOS if side >= 128 else _SVHN)
    steps = published.networks * 100 if steps is None else steps
    lr = published.lr * (side / published.side) ** 2 * task.ipc / 10 if lr is None else lr
    factor = (3 if side >= 128 else 2) if factor is None else factor
    train_images = published.train_images if train_images is None else train_images
    train_before = published.train_before if train_before is None else train_before
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
            pool=TrainedOnReal(per_network, train_images, recipe, train_before),
            objective=PowerDistance(published.power),
            player=Descent(lr=lr, momentum=momentum),
            probe=Gradient("convolutions", compile_from=20_000),  # half the milliseconds, after a minute (LAB.md)
            augment=Augment.parse(augment),
            batch_real=batch_real,
            batch_syn_max=batch_syn_max,
            diverged_at=1e6,  # gradients of a fresh and of a trained network differ by orders of magnitude
        ),
        settled={
            "steps": steps,
            "lr": lr,
            "factor": factor,
            "train_images": train_images,
            "train_before": train_before,
            "train_cutmix": train_cutmix,
            "augment": augment,
        },
    )


def _whole(data: str) -> str:
    """The dataset that a sub-task (imagenet100-3) is part of."""
    return "imagenet100" if data.startswith("imagenet100-") else data


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
