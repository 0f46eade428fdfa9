"""Objectives: shape, zero on equal readings, no leak between classes, and their algebra."""

import pytest
import torch

from m3d.errors import M3DError
from m3d.kernels import Gaussian, Linear
from m3d.objectives import MMD, Moment
from m3d.objectives.features import central_moment
from m3d.types import Seen


def seen(*shape: int, seed: int = 0) -> Seen:
    features = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Seen((), features, features)


OBJECTIVES = [
    MMD(Gaussian()),
    MMD(Linear()),
    MMD(Gaussian()) + 0.1 * MMD(Linear()),
    Moment(2),
    MMD(Linear()) + Moment(3),
]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_keeps_the_contract(objective):
    goal, own = seen(3, 7, 5), seen(3, 4, 5, seed=1)
    value = objective(goal, own)
    assert value.shape == (3,) and (value > 0).all()
    torch.testing.assert_close(objective(goal, goal), torch.zeros(3), atol=1e-5, rtol=0)
    for c in range(3):  # batched equals loop
        alone = objective(
            Seen((), goal.features[c : c + 1], goal.logits), Seen((), own.features[c : c + 1], own.logits)
        )
        torch.testing.assert_close(alone[0], value[c])


def test_a_class_moves_only_its_own_images():
    goal, own = seen(3, 7, 5), seen(3, 4, 5, seed=1)
    features = own.features.requires_grad_()
    (gradient,) = torch.autograd.grad(MMD(Gaussian())(goal, Seen((), features, features))[1], features)
    assert gradient[1].abs().sum() > 0
    assert gradient[0].abs().sum() == 0 and gradient[2].abs().sum() == 0


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
