"""DM: Zhao & Bilen, "Dataset Condensation with Distribution Matching", WACV 2023. The paper's Eq. 3.

Match the mean representation of real and synthetic images of each class, under a new random encoder every step. Its
loss is the MMD² of the linear kernel:

    Σ_c ‖mean f(real) − mean f(synthetic)‖² [+ second · ‖var_T − var_S‖² + third · ‖skew_T − skew_S‖²]

Published settings: no factor, one iteration per encoder, 256 real images, one augmentation drawn from the full list,
and images moved in standardised units (in which its learning rate of 1 is stated).

Two variations of the M3D paper: ``moments`` 2 or 3 adds the distance of the variances (and skewnesses), as in its Table
1; ``objective`` m3d puts L_M3D in place of DM's loss and changes nothing else, as in its compatibility table.

Departures: at most 200 images of a class serve a step (``batch_syn_max``; published: all). Images are clamped to
[0, 1] after each step (unless ``bounded=false``). Neither the weights of the added moments nor the learning rate with
L_M3D are published: the weights are 1, and the rate is M3D's own (IPC in plain pixels), which is 25 · IPC in
standardised ones (std² is about 0.04).
"""

from __future__ import annotations

from typing import Literal

from m3d.augment import Augment
from m3d.errors import M3DError
from m3d.kernels import Gaussian, Linear
from m3d.method import Matching, Method
from m3d.methods import METHODS, Task
from m3d.objectives import MMD, Moment, Objective
from m3d.players import Descent
from m3d.pools import Fresh
from m3d.select import InitSpec, make_init
from m3d.tiles import Factor, Tiles
from m3d.types import Seen


@METHODS.register("dm", paper="Zhao & Bilen, WACV 2023", equation="Eq. 3", cost="low")
def dm(
    task: Task,
    *,
    steps: int = 20_000,
    lr: float | None = None,
    momentum: float = 0.5,
    factor: Factor = 1,
    ipm: int = 1,
    batch_real: int = 256,
    batch_syn_max: int = 200,
    augment: str | None = None,
    init: InitSpec = "real",
    bounded: bool = True,
    objective: Literal["dm", "m3d"] = "dm",
    moments: int = 1,
    second: float = 1.0,
    third: float = 1.0,
) -> Method:
    """Match the mean representation of each class under random encoders."""
    operations = Augment.any_one(task.mirror) if augment is None else Augment.parse(augment)
    if lr is None:
        lr = 25.0 * task.ipc if objective == "m3d" else 10.0 if task.ipc >= 100 else 1.0
    return Method(
        init=make_init(init),
        tiles=Tiles(factor),
        matching=Matching(
            steps=steps,
            pool=Fresh(every=ipm),
            objective=_loss(objective, moments, second, third),
            player=Descent(lr=lr, momentum=momentum),
            augment=operations,
            batch_real=batch_real,
            batch_syn_max=batch_syn_max,
            standardised=True,
            bounded=bounded,
        ),
        settled={"lr": lr, "augment": str(operations)},
    )


def _loss(objective: str, moments: int, second: float, third: float) -> Objective[Seen]:
    if moments not in (1, 2, 3):
        raise M3DError(f"moments={moments} is not valid; allowed: 1, 2, 3")
    total: Objective[Seen] = MMD(Gaussian() if objective == "m3d" else Linear())
    for order, weight in ((2, second), (3, third)):
        if order <= moments:
            total = total + weight * Moment(order)
    return total
