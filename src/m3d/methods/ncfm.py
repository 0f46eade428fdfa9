"""NCFM: Wang et al., "Dataset Distillation with Neural Characteristic Function: A Minmax Perspective", CVPR 2025.

Real and synthetic images of a class are compared by the characteristic functions of their unit-length representations,
in amplitude and in phase, at random frequencies (:class:`m3d.objectives.CharacteristicGap`), under DANCE's interpolated
encoders, with the cross-entropy of the synthetic images under the trained network. With ``sampler`` learned a small
network proposes the frequencies and is trained by ascent on the same loss: the images minimise what it maximises.

    φ(t) = mean exp(i ⟨t, f⟩),  f at length 1
    300 · mean_t √(a (|φ_T| − |φ_S|)² + (1 − a) · 2 (|φ_T| |φ_S| − Re φ_T φ̄_S)) + ce_weight · CE(f_trained, synthetic)

Published settings: AdamW 0.001 on the images, 20,000 iterations, 4,096 frequencies in the code (1,024 in the paper).

Departures:
- All classes move in one step. The authors step class after class through one AdamW, in which a class moves on in the
  others' turns: about √classes times as far in a round. ``turns`` makes a step of ours such a round (1: a plain step).
- The learning rate is constant; the authors lower it when the loss stays on a plateau.
- The number of real images, the weight of the cross-entropy (1), the training of the encoders (DANCE's here) and the
  size and learning rate of the sampler are not in our sources. Pixels do not decay.
"""

from __future__ import annotations

from typing import Literal

from m3d.augment import Augment
from m3d.guides import CrossEntropy
from m3d.method import Matching, Method
from m3d.methods import METHODS, Task
from m3d.methods.m3d import default_factor
from m3d.objectives import CharacteristicGap
from m3d.players import AdamW
from m3d.pools.pretrained import Pretrained, default_batch, encoder_recipe
from m3d.select import InitSpec, make_init
from m3d.tiles import Factor, Tiles


@METHODS.register("ncfm", paper="Wang et al., CVPR 2025", equation="characteristic functions, min-max", cost="medium")
def ncfm(
    task: Task,
    *,
    steps: int = 20_000,
    lr: float = 0.001,
    turns: int | None = None,
    factor: Factor | None = None,
    sampler: Literal["normal", "learned"] = "normal",
    lr_sampler: float = 0.001,
    frequencies: int = 4096,
    amplitude: float = 0.5,
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
    """Match characteristic functions of representations, under encoders between random and trained ones."""
    climber = AdamW(lr_sampler, ascent=True)
    turns = task.classes if turns is None else turns
    if encoder_epochs is None:
        encoder_epochs = 80 if min(task.shape[1:]) >= 128 else 60  # DANCE's
    encoder_batch = default_batch(task.shape) if encoder_batch is None else encoder_batch
    factor = default_factor(task.shape) if factor is None else factor
    recipe = encoder_recipe(encoder_epochs, encoder_batch, encoder_lr)
    return Method(
        init=make_init(init),
        tiles=Tiles(factor),
        matching=Matching(
            steps=steps,
            pool=Pretrained(recipe, encoders, mix_low, mix_high, ipm),
            objective=CharacteristicGap(frequencies, amplitude, climber if sampler == "learned" else None),
            guide=CrossEntropy(ce_weight) if ce_weight else None,
            player=AdamW(lr, turns=turns),
            augment=Augment.parse(augment),
            batch_real=batch_real,
            batch_syn_max=batch_syn_max,
            diverged_at=100.0,  # the size of the loss depends on the encoder of the moment
        ),
        settled={
            "turns": turns,
            "factor": factor,
            "encoder_epochs": encoder_epochs,
            "encoder_batch": encoder_batch,
        },
    )
