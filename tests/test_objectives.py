"""Objectives: shape, zero on equal readings, no leak between classes, and their algebra."""

import pytest
import torch

from m3d import objectives
from m3d.errors import M3DError
from m3d.kernels import Gaussian, Linear, Polynomial
from m3d.objectives import (
    MMD,
    Attention,
    CharacteristicGap,
    CosineRows,
    Covariance,
    Discriminate,
    EndPoint,
    History,
    LayerMeans,
    LayersMMD,
    Moment,
    Objective,
    PowerDistance,
)
from m3d.objectives.features import central_moment
from m3d.types import Grads, Seen


def seen(*shape: int, seed: int = 0) -> Seen:
    draw = torch.Generator().manual_seed(seed)
    features, *maps = (
        torch.randn(*sizes, generator=draw, dtype=torch.float64)
        for sizes in (shape, (*shape[:2], 3, 4, 4), (*shape[:2], 2, 2, 2))
    )
    return Seen(tuple(maps), features, features)


def grads(*shape: int, seed: int = 0) -> Grads:
    draw = torch.Generator().manual_seed(seed)
    return Grads(tuple(torch.randn(3, 4, k, generator=draw, dtype=torch.float64) for k in (5, 2)))


def started(objective: Objective) -> Objective:
    """As before its first step: what depends on a reading's shape is made, what is random drawn."""
    objective.start(0, lambda: seen(1, 1, 5))
    objective.draw(torch.tensor([0]))
    return objective


APART = {  # each class by itself: the objective, and how its readings are made
    "MMD, Gaussian": (MMD(Gaussian()), seen),
    "MMD, linear": (MMD(Linear()), seen),
    "MMD, polynomial": (MMD(Polynomial()), seen),
    "a sum": (MMD(Gaussian()) + 0.1 * MMD(Linear()), seen),
    "LayersMMD": (LayersMMD(Gaussian(), 2, 0.5), seen),
    "Moment 2": (Moment(2), seen),
    "Moment 3 and means": (MMD(Linear()) + Moment(3), seen),
    "Attention": (Attention(), seen),
    "LayerMeans": (LayerMeans(0.1, 1.0, 2.0), seen),
    "Covariance": (Covariance(), seen),
    "CharacteristicGap": (started(CharacteristicGap(8)), seen),
    "CosineRows": (CosineRows(), grads),
    "PowerDistance 1": (PowerDistance(1), grads),
    "PowerDistance 2": (PowerDistance(2), grads),
}
# Those that see all classes together have tests of their own: test_cafe, test_dsdm, test_trajectories.
TOGETHER = {"Discriminate": Discriminate(), "History": History(3, 0.5, 1), "EndPoint": EndPoint()}


def leaves(reading: Seen | Grads) -> list[torch.Tensor]:
    return [*reading.maps, reading.features] if isinstance(reading, Seen) else list(reading.weights)


def of_classes(reading: Seen | Grads, which: slice) -> Seen | Grads:
    if isinstance(reading, Seen):
        return Seen(tuple(m[which] for m in reading.maps), reading.features[which], reading.logits[which])
    return Grads(tuple(w[which] for w in reading.weights))


def test_the_sweep_covers_every_objective():
    swept = {type(objective).__name__ for objective, _ in APART.values()} | set(TOGETHER)
    assert swept - {"Weighted"} == set(objectives.__all__) - {"Objective"} and len(APART) + len(TOGETHER) == 17
    assert not any(objective.across_classes or objective.remembers for objective, _ in APART.values())
    assert all(objective.across_classes or objective.remembers for objective in TOGETHER.values())


@pytest.mark.parametrize("name", APART)
def test_every_objective_keeps_the_contract(name):
    objective, read = APART[name]
    goal, own = read(3, 7, 5), read(3, 4, 5, seed=1)
    value = objective(goal, own)
    assert value.shape == (3,) and (value > 0).all()
    torch.testing.assert_close(objective(goal, goal).double(), torch.zeros(3).double(), atol=1e-5, rtol=0)
    for c in range(3):  # batched equals loop
        alone = objective(of_classes(goal, slice(c, c + 1)), of_classes(own, slice(c, c + 1)))
        torch.testing.assert_close(alone[0], value[c])


@pytest.mark.parametrize("name", APART)
def test_a_class_moves_only_its_own_images(name):
    objective, read = APART[name]
    goal, own = read(3, 7, 5), read(3, 4, 5, seed=1)
    moved = [leaf.requires_grad_() for leaf in leaves(own)]
    found = torch.autograd.grad(objective(goal, own)[1], moved, allow_unused=True, materialize_grads=True)
    assert sum(g[1].abs().sum() for g in found) > 0
    assert all(g[0].abs().sum() == 0 and g[2].abs().sum() == 0 for g in found)


def test_weights_and_sums():
    goal, own = seen(2, 7, 5), seen(2, 4, 5, seed=1)
    a, b = MMD(Gaussian()), MMD(Linear())
    torch.testing.assert_close((a + 0.25 * b)(goal, own), a(goal, own) + 0.25 * b(goal, own))
    with pytest.raises(M3DError, match="objective \\+ 1"):
        a + 1
    with pytest.raises(M3DError, match="weight"):
        a * "x"


def test_moments_against_their_definition():
    goal, own = seen(2, 7, 3), seen(2, 4, 3, seed=1)
    for order in (2, 3):
        value = Moment(order)(goal, own)
        for c in range(2):
            expected = 0.0
            for k in range(3):
                a, b = goal.features[c, :, k], own.features[c, :, k]
                expected += float((((a - a.mean()) ** order).mean() - ((b - b.mean()) ** order).mean()) ** 2)
            assert abs(float(value[c]) - expected) < 1e-5 * max(1, expected)
    assert torch.equal(central_moment(goal.features, 1), goal.features.mean(1))
    with pytest.raises(M3DError, match="order 1"):
        Moment(1)


def test_a_moment_sees_what_the_mean_does_not():
    wide, narrow = (torch.tensor([-v, v]).view(1, 2, 1) for v in (2.0, 1.0))
    readings = [Seen((), x, x) for x in (wide, narrow)]
    assert (
        float(MMD(Linear())(*readings)) == 0 and float(Moment(2)(*readings)) == 9 and float(Moment(3)(*readings)) == 0
    )
