"""DSDM: Li et al., "Diversified Semantic Distribution Matching for Dataset Distillation", ACM MM 2024.

The means of a class's features and their covariances are matched under trained networks, one of them drawn each step;
from step 2,000 on the synthetic mean also stays near its own running mean, whatever network looks at the moment:

    ‖m_T − m_S‖² + cov_weight · ‖Cov_T − Cov_S‖_F² / d + history_weight · ‖m_S − past‖² / d

Published settings: ten networks of 20 epochs (SGD 0.01, batches of 256, colour, crop and CutMix), learning rate 0.01 ·
IPC, 10,000 iterations, 256 real images, factor & up-sampling, cov_weight 50, history_weight 0.2, of the past 0.99 is
kept.

Departures:
- All classes move in one step with momentum 0.5 instead of one after the other, as in ``m3d``.
- The past is made of the means that the loss itself saw, before the images moved; the authors show the moved images
  once more, under another augmentation.
- The result is the last step's set, not the best of all by test accuracy.
"""

from __future__ import annotations

from m3d.augment import Augment
from m3d.kernels import Linear
from m3d.method import Matching, Method
from m3d.methods import METHODS, Task
from m3d.methods.m3d import default_factor
from m3d.objectives import MMD, Covariance, History, Objective
from m3d.players import Descent
from m3d.pools.pretrained import Pretrained, default_batch
from m3d.select import InitSpec, make_init
from m3d.tiles import Factor, Tiles
from m3d.train import Recipe
from m3d.types import Seen


@METHODS.register("dsdm", paper="Li et al., ACM MM 2024", equation="means, covariances, history", cost="low")
def dsdm(
    task: Task,
    *,
    steps: int = 10_000,
    lr: float | None = None,
    momentum: float = 0.5,
    factor: Factor | None = None,
    cov_weight: float = 50.0,
    history_weight: float = 0.2,
    history_keep: float = 0.99,
    history_after: int = 2_000,
    encoders: int = 10,
    encoder_epochs: int = 20,
    encoder_batch: int | None = None,
    encoder_lr: float = 0.01,
    mix_low: float = 0.0,
    mix_high: float = 0.0,
    ipm: int = 1,
    batch_real: int = 256,
    batch_syn_max: int = 256,
    augment: str = "color+crop+cutout",
    init: InitSpec = "real",
) -> Method:
    """Match means and covariances under trained networks, and keep each class's mean near its own past."""
    lr = 0.01 * task.ipc if lr is None else lr
    encoder_batch = min(256, default_batch(task.shape)) if encoder_batch is None else encoder_batch
    factor = default_factor(task.shape) if factor is None else factor
    looks = Augment(always=("color", "crop"))
    recipe = Recipe(encoder_epochs, encoder_batch, encoder_lr, augment=looks, cutmix=0.5 if task.cutmix else 0.0)
    loss: Objective[Seen] = MMD(Linear()) + cov_weight * Covariance()
    if history_weight:
        loss = loss + history_weight * History(task.classes, history_keep, history_after)
    return Method(
        init=make_init(init),
        tiles=Tiles(factor),
        matching=Matching(
            steps=steps,
            pool=Pretrained(recipe, encoders, mix_low, mix_high, ipm),
            objective=loss,
            player=Descent(lr, momentum),
            augment=Augment.parse(augment),
            batch_real=batch_real,
            batch_syn_max=batch_syn_max,
            diverged_at=100.0,  # the size of the loss depends on the encoder of the moment
        ),
        settled={"lr": lr, "factor": factor, "encoder_batch": encoder_batch},
    )
