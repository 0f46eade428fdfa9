"""Coresets: real images kept as they are. A selection is an initialisation with no step after it.

``random`` is the baseline every method must beat. ``herding`` (Welling, 2009) and ``k-center`` (Gonzalez, 1985; Sener &
Savarese, 2018) choose from the representation f of a network trained on the whole data (kept in a cache), or from
pixels. Of a class with mean μ, when k images are chosen, the next one is

    herding:   argmin_x ‖f(x) − ((k + 1) · μ − Σ_chosen f)‖
    k-center:  argmax_x min_chosen ‖f(x) − f(chosen)‖,   the first one argmin_x ‖f(x) − μ‖

Herding takes the point *nearest* to what is missing to the class mean; some public code takes the farthest.

Departures: how long the network of the published selections is trained is not in our sources; ours has 20 epochs, and
its representation is the classifier's input. With one image per class both rules choose the same.
"""

from __future__ import annotations

from typing import Any

from m3d.method import Method
from m3d.methods import METHODS, Task
from m3d.select import ByFeatures, Features, RandomReal, Rule, herding, k_center
from m3d.tiles import CellHeight, Chroma, Factor, Margin, Tiles, one_layout


@METHODS.register("random", together=one_layout, paper="baseline", equation="none", cost="none")
def random(
    task: Task,
    *,
    factor: Factor = 1,
    chroma: Chroma = "full",
    cell: CellHeight = 0,
    margin: Margin = 0,
) -> Method:
    """Random real images of each class, kept as they are."""
    return Method(init=RandomReal(), tiles=Tiles(factor, chroma=chroma, cell=cell, margin=margin))


def _chosen(
    task: Task,
    rule: Rule,
    *,
    factor: Factor = 1,
    chroma: Chroma = "full",
    cell: CellHeight = 0,
    margin: Margin = 0,
    features: Features = "network",
    network: str = "convnet3",
    epochs: int = 20,
) -> Method:
    return Method(
        init=ByFeatures(rule, features, network, epochs),
        tiles=Tiles(factor, chroma=chroma, cell=cell, margin=margin),
    )


@METHODS.variant(
    "herding",
    of=_chosen,
    together=one_layout,
    paper="Welling, ICML 2009",
    equation="greedy mean matching",
    cost="one training",
)
def herding_coreset(task: Task, **options: Any) -> Method:
    """Real images whose running mean stays nearest to the class mean in a trained network's representation."""
    return _chosen(task, herding, **options)


@METHODS.variant(
    "k-center",
    of=_chosen,
    together=one_layout,
    paper="Sener & Savarese, ICLR 2018",
    equation="farthest-first cover",
    cost="one training",
)
def k_center_coreset(task: Task, **options: Any) -> Method:
    """Real images that cover each class: always the farthest from those chosen before."""
    return _chosen(task, k_center, **options)
