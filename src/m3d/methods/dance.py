"""DANCE: Zhang et al., "DANCE: Dual-View Distribution Alignment for Dataset Condensation", IJCAI 2024.

DM's loss on the representation under encoders between the initial and the trained weights of pre-trained networks, and
the cross-entropy of the synthetic images under the trained one:

    ‖mean f_λ(real) − mean f_λ(synthetic)‖² + ce_weight · CE(f_trained, synthetic),    λ ~ U(0, 1) anew each step

Published settings: five networks (of twenty that are trained) of 60 epochs (80 for images of 128 pixels and more),
learning rate 0.01 · IPC (0.1 · IPC for such images), 10,000 iterations, 128 real images, factor & up-sampling.

Departures:
- Both losses move the images in one step, on the same augmented images; the authors make a second pass, class after
  class, for the cross-entropy. All classes move together with momentum 0.5, which in the long run moves them as far.
- The five networks that are used are all that are trained. How the authors train them is not in our sources; here it
  is SGD 0.05, falling linearly to 0, with augmentation. The cross-entropy has weight 1.
"""

from __future__ import annotations

from m3d.augment import Augment
from m3d.guides import CrossEntropy
from m3d.kernels import Linear
from m3d.method import Matching, Method
from m3d.methods import METHODS, Task
from m3d.methods.m3d import default_factor
from m3d.objectives import MMD
from m3d.players import Descent
from m3d.pools.pretrained import Pretrained, default_batch, encoder_recipe
from m3d.select import InitSpec, make_init
from m3d.tiles import Factor, Tiles


@METHODS.register(
    "dance", paper="Zhang et al., IJCAI 2024", equation="means, trained encoders, cross-entropy", cost="low"
)
def dance(
    task: Task,
    *,
    steps: int = 10_000,
    lr: float | None = None,
    momentum: float = 0.5,
    factor: Factor | None = None,
    ce_weight: float = 1.0,
    encoders: int = 5,
    encoder_epochs: int | None = None,
    encoder_batch: int | None = None,
    encoder_lr: float = 0.05,
    mix_low: float = 0.0,
    mix_high: float = 1.0,
    ipm: int = 1,
    batch_real: int = 128,
    batch_syn_max: int = 200,
    augment: str = "color+crop+cutout",
    init: InitSpec = "real",
) -> Method:
    """Match means under encoders between random and trained ones; a trained network must recognise the images."""
    large = min(task.shape[1:]) >= 128
    if lr is None:
        lr = (0.1 if large else 0.01) * task.ipc
    if encoder_epochs is None:
        encoder_epochs = 80 if large else 60
    encoder_batch = default_batch(task.shape) if encoder_batch is None else encoder_batch
    factor = default_factor(task.shape) if factor is None else factor
    recipe = encoder_recipe(encoder_epochs, encoder_batch, encoder_lr)
    return Method(
        init=make_init(init),
        tiles=Tiles(factor),
        matching=Matching(
            steps=steps,
            pool=Pretrained(recipe, encoders, mix_low, mix_high, ipm),
            objective=MMD(Linear()),
            guide=CrossEntropy(ce_weight) if ce_weight else None,
            player=Descent(lr, momentum),
            augment=Augment.parse(augment),
            batch_real=batch_real,
            batch_syn_max=batch_syn_max,
            diverged_at=100.0,  # the size of the loss depends on the encoder of the moment
        ),
        settled={"lr": lr, "factor": factor, "encoder_epochs": encoder_epochs, "encoder_batch": encoder_batch},
    )
