"""DC and DSA: matching gradients.

DC: Zhao, Mopuri & Bilen, "Dataset Condensation with Gradient Matching", ICLR 2021. For each of 1,000 random networks, T
times: move the synthetic images so that the gradient of the network's loss on them equals the one on real images, class
by class (Σ over weights, Σ over output rows of 1 − cosine), then train the network on the synthetic images. Images
start from noise.

DSA: Zhao & Bilen, "Dataset Condensation with Differentiable Siamese Augmentation", ICML 2021. The same from real
images, with one augmentation per class and step shared by both sides, and augmented training of the network.

With g_l(c) the gradient of weight l (its rows r each belong to one output) of the cross-entropy on class c's images:

    Σ_c Σ_l Σ_r (1 − ⟨g_lr(real), g_lr(synthetic)⟩ / (‖g_lr(real)‖ ‖g_lr(synthetic)‖))

Departures: at most 200 images of a class serve a step (``batch_syn_max``; published: all). Images are clamped to
[0, 1] after each step, and noise is clipped too (unless ``bounded=false``). Networks with batch norm normalise the
images of a class by their own statistics; published ones are frozen before a step at those of 16 real images per class.
The published numbers are of instance norm.
"""

from __future__ import annotations

from typing import Any

from m3d.augment import Augment
from m3d.method import Matching, Method
from m3d.methods import METHODS, Task
from m3d.objectives import CosineRows
from m3d.players import Descent
from m3d.pools import TrainedOnSynthetic
from m3d.probes import Gradient
from m3d.select import InitSpec, make_init
from m3d.tiles import Factor, Tiles

# Images per class → (steps per network, epochs of training after each), as published.
_LOOPS = {1: (1, 1), 10: (10, 50), 20: (20, 25), 30: (30, 20), 40: (40, 15), 50: (50, 10)}


def loops(ipc: int) -> tuple[int, int]:
    """Published numbers where there are some; in between, those of the nearest smaller published IPC."""
    return _LOOPS[max(known for known in _LOOPS if known <= ipc)]


@METHODS.register("dc", paper="Zhao et al., ICLR 2021", equation="gradient matching", cost="high")
def dc(
    task: Task,
    *,
    steps: int | None = None,
    lr: float = 0.1,
    momentum: float = 0.5,
    factor: Factor = 1,
    outer: int | None = None,
    inner: int | None = None,
    batch_real: int = 256,
    batch_syn_max: int = 200,
    augment: str = "none",
    init: InitSpec = "noise",
    bounded: bool = True,
) -> Method:
    """Match the gradients that real and synthetic images give a network trained on the synthetic ones."""
    known_outer, known_inner = loops(task.ipc)
    outer = known_outer if outer is None else outer
    inner = known_inner if inner is None else inner
    steps = 1000 * outer if steps is None else steps
    operations = Augment.parse(augment)
    return Method(
        init=make_init(init),
        tiles=Tiles(factor),
        matching=Matching(
            steps=steps,
            pool=TrainedOnSynthetic(every=outer, epochs=inner, augment=operations),
            objective=CosineRows(),
            player=Descent(lr=lr, momentum=momentum),
            probe=Gradient(),
            augment=operations,
            batch_real=batch_real,
            batch_syn_max=batch_syn_max,
            standardised=True,
            bounded=bounded,
        ),
        settled={"steps": steps, "outer": outer, "inner": inner, "augment": augment},
    )


@METHODS.variant("dsa", of=dc, paper="Zhao & Bilen, ICML 2021", equation="gradient matching", cost="high")
def dsa(task: Task, *, augment: str | None = None, init: InitSpec = "real", **options: Any) -> Method:
    """DC from real images with siamese augmentation."""
    return dc(task, augment=siamese(task) if augment is None else augment, init=init, **options)


def siamese(task: Task) -> str:
    """DSA's strategy: one operation of all that the data allow."""
    return str(Augment.any_one(task.mirror))
