"""DM: Zhao & Bilen, "Dataset Condensation with Distribution Matching", WACV 2023. The paper's Eq. 3.

Match the mean representation of real and synthetic images of each class, under a new random encoder every step. Its
loss is the MMD² of the linear kernel, so it is M3D's parent record with another kernel, and published settings of its
own: no factor, one iteration per encoder, 256 real images, one augmentation drawn from the full list, and images moved
in standardised units (in which its learning rate of 1 is stated).

Departure: images are clamped to [0, 1] after each step so that they can be stored and shown.
"""

from __future__ import annotations

from m3d.augment import Augment
from m3d.engine import Matching, Method
from m3d.kernels import Linear
from m3d.methods import METHODS, Task
from m3d.objectives.features import MMD
from m3d.players import Descent
from m3d.pools import Fresh
from m3d.select import make_init
from m3d.synth import Tiles


@METHODS.register("dm", paper="Zhao & Bilen, WACV 2023", equation="Eq. 3", cost="low")
def dm(
    task: Task,
    *,
    steps: int = 20_000,
    lr: float | None = None,
    momentum: float = 0.5,
    factor: int = 1,
    ipm: int = 1,
    batch_real: int = 256,
    batch_syn_max: int = 200,
    augment: str | None = None,
    init: str = "real",
) -> Method:
    """Match the mean representation of each class under random encoders."""
    operations = Augment(one_of=("color", "crop", "cutout", "flip", "scale", "rotate"))
    if augment is not None:
        operations = Augment.parse(augment)
    elif not task.mirror:
        operations = operations.without("flip")
    return Method(
        init=make_init(init),
        tiles=Tiles(factor),
        matching=Matching(
            steps=steps,
            pool=Fresh(every=ipm),
            objective=MMD(Linear()),
            player=Descent(lr=(10.0 if task.ipc >= 100 else 1.0) if lr is None else lr, momentum=momentum),
            augment=operations,
            batch_real=batch_real,
            batch_syn_max=batch_syn_max,
            standardised=True,
        ),
    )
