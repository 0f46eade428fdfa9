"""CAFE: Wang et al., "CAFE: Learning to Condense Dataset by Aligning Features", CVPR 2022.

Layer-wise feature alignment: the mean maps of each class after every block's ReLU (weight 0.1, the last block's 1),
after the last pooling (1) and as a flattened feature (1) shall agree between real and synthetic images. Discrimination:
the class means of synthetic features shall classify the real features (0.01 · the sum of cross-entropies). Dynamic
bi-level optimisation: a network is trained on the synthetic images after each step until its accuracy on real images
has moved by more than λ₂, and replaced once it moved by less than λ₁ over ten steps. Images start from noise.

With F_l the maps of layer l, f the representation and s_k the mean f of class k's synthetic images:

    Σ_c Σ_l w_l ‖mean F_l(real) − mean F_l(synthetic)‖² + 0.01 · Σ_real CE(softmax_k ⟨f(real), s_k⟩, class)

``cafe-dsa`` adds one augmentation per class and step, shared by both sides, and augmented training of the network, and
starts from real images as DSA does (our choice: the public commands name no start, their default is ``init=noise``;
in a small try it made little difference, LAB.md).

Departures. The publication counts networks: 2,000 of them, the learning rate halved after 1,200, 1,600 and 1,800; how
many steps that takes is known only afterwards: at least ten each, about twenty in short runs on CIFAR-10. Here the
number of steps is given, 20,000 being the least the published run can take, and the rate is halved after the same
shares of it (60, 80 and 90 %). Both loops are bounded (``outer_max``, ``inner_max``): the published ones may never end.
Accuracies are the mean over classes; the public code adds a tenth of the previous accuracy to each. In ConvNets the
last pooled map and the flattened feature are the same numbers, so they are one term of weight 2, the representation's
in any network; all blocks but the last get 0.1, however many there are. Images are clamped to [0, 1] after each step,
and noise is clipped too (unless ``bounded=false``): at full size it changes nothing (LAB.md).

All classes go through at once, and the maps of all real images of a step are held together: 0.7 MB for each with
ConvNet-3 at 32×32 pixels, and a few times that while they are made.
"""

from __future__ import annotations

from typing import Any

from m3d.augment import Augment
from m3d.method import Matching, Method
from m3d.methods import METHODS, Task
from m3d.methods.dc import siamese
from m3d.objectives import Discriminate, LayerMeans
from m3d.players import Descent
from m3d.pools.watched import Watched
from m3d.probes import Forward
from m3d.select import InitSpec, make_init
from m3d.tiles import Tiles


@METHODS.register("cafe", paper="Wang et al., CVPR 2022", equation="layer-wise alignment, discrimination", cost="high")
def cafe(
    task: Task,
    *,
    steps: int = 20_000,
    lr: float = 0.1,
    momentum: float = 0.5,
    early: float = 0.1,
    discriminate: float = 0.01,
    outer_stop: float = 0.04,
    inner_stop: float = 0.03,
    outer_max: int = 100,
    inner_max: int = 50,
    window: int = 10,
    queries: int = 128,
    batch_real: int = 256,
    augment: str = "none",
    init: InitSpec = "noise",
    bounded: bool = True,
) -> Method:
    """Match the mean maps of every layer, and let the synthetic features' class means classify the real ones."""
    operations = Augment.parse(augment)
    pool = Watched(
        outer_stop=outer_stop,
        inner_stop=inner_stop,
        outer_max=outer_max,
        inner_max=inner_max,
        window=window,
        queries=queries,
        augment=operations,
    )
    return Method(
        init=make_init(init),
        tiles=Tiles(1),
        matching=Matching(
            steps=steps,
            pool=pool,
            objective=LayerMeans(early=early, last=1.0, features=2.0) + discriminate * Discriminate(),
            player=Descent(lr=lr, momentum=momentum, milestones=milestones(steps), gamma=0.5),
            probe=Forward(maps=True),
            augment=operations,
            batch_real=batch_real,
            batch_syn_max=task.ipc,  # all of them, as published
            standardised=True,
            bounded=bounded,
        ),
        settled={"augment": augment},
    )


def milestones(steps: int) -> tuple[int, ...]:
    """After 60, 80 and 90 % of the steps, rounded up."""
    return tuple(-(-steps * tenths // 10) for tenths in (6, 8, 9))


@METHODS.variant(
    "cafe-dsa", of=cafe, paper="Wang et al., CVPR 2022", equation="layer-wise alignment, discrimination", cost="high"
)
def cafe_dsa(task: Task, *, augment: str | None = None, init: InitSpec = "real", **options: Any) -> Method:
    """CAFE from real images with siamese augmentation."""
    return cafe(task, augment=siamese(task) if augment is None else augment, init=init, **options)
