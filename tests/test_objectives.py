"""Objectives: shape, zero on equal readings, no leak between classes, and their algebra."""

import pytest
import torch

from m3d.errors import M3DError
from m3d.kernels import Gaussian, Linear
from m3d.objectives import MMD
from m3d.types import Seen


def seen(*shape: int, seed: int = 0) -> Seen:
    features = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Seen((), features, features)


@pytest.mark.parametrize("objective", [MMD(Gaussian()), MMD(Linear()), MMD(Gaussian()) + 0.1 * MMD(Linear())])
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
