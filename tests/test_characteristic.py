"""NCFM's loss against its definition, written out with complex numbers in float64."""

import math

import pytest
import torch

from m3d.errors import M3DError
from m3d.kernels import Linear
from m3d.objectives import MMD, CharacteristicGap
from m3d.objectives.characteristic import characteristic, gap
from m3d.players import AdamW
from m3d.types import Seen


def seen(*shape: int, seed: int = 0) -> Seen:
    features = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Seen((), features, features)


def started(**settings):
    objective = CharacteristicGap(**{"frequencies": 6, **settings})
    objective.start(0, lambda: seen(1, 1, 5))
    objective.draw(torch.tensor([3]))
    return objective


def by_definition(real, synthetic, frequencies, amplitude):
    """Of one class: [n, d], [m, d], [F, d]."""
    total = torch.zeros((), dtype=torch.float64)
    for t in frequencies:
        phi = []
        for points in (real, synthetic):
            angles = torch.stack([(t * (x / x.norm())).sum() for x in points])
            phi.append(torch.exp(1j * angles).mean())
        lengths = phi[0].abs(), phi[1].abs()
        phase = 2 * (lengths[0] * lengths[1] - (phi[0] * phi[1].conj()).real)
        total = total + torch.sqrt(amplitude * (lengths[0] - lengths[1]) ** 2 + (1 - amplitude) * phase)
    return 300 * total / len(frequencies)


@pytest.mark.parametrize("amplitude", [0.0, 0.3, 0.5, 1.0])
def test_value_and_gradient_against_the_definition(amplitude):
    goal, own = seen(3, 7, 5), seen(3, 4, 5, seed=1)
    frequencies = torch.randn(6, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mine, theirs = (own.features.clone().requires_grad_() for _ in range(2))
    moved, other = (frequencies.clone().requires_grad_() for _ in range(2))
    values = 300 * gap(characteristic(goal.features, moved), characteristic(mine, moved), amplitude).mean(-1)
    expected = torch.stack([by_definition(goal.features[c], theirs[c], other, amplitude) for c in range(3)])
    torch.testing.assert_close(values, expected, atol=1e-3, rtol=1e-5)  # 300 · 1e-6 keeps the root from its corner
    gradients = torch.autograd.grad(values.sum(), (mine, moved))
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.sum(), (theirs, other)), atol=1e-3, rtol=1e-4)


def test_the_usual_loss_is_the_distance_of_the_characteristic_functions():
    goal, own = seen(2, 7, 5), seen(2, 4, 5, seed=1)
    objective = started()
    phi = []
    for side in (goal, own):
        unit = side.features / side.features.norm(dim=-1, keepdim=True)
        phi.append(torch.exp(1j * (unit @ objective.noise.double().mT)).mean(1))
    expected = 300 * (phi[0] - phi[1]).abs().mean(-1) / math.sqrt(2)
    torch.testing.assert_close(objective(goal, own).double(), expected, atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("climber", [None, AdamW(0.001, ascent=True)])
def test_the_contract_of_objectives(climber):
    objective = started(climber=climber)
    goal, own = seen(3, 7, 5), seen(3, 4, 5, seed=1)
    features = own.features.requires_grad_()
    value = objective(goal, Seen((), features, features))
    assert value.shape == (3,) and (value > 0).all()
    torch.testing.assert_close(objective(goal, goal), torch.zeros(3), atol=1e-5, rtol=0)
    (gradient,) = torch.autograd.grad(value[1], features, retain_graph=True)
    assert gradient[1].abs().sum() > 0 and gradient[0].abs().sum() == gradient[2].abs().sum() == 0
    for c in range(3):  # batched equals loop
        sides = [Seen((), side.features[c : c + 1], side.logits) for side in (goal, own)]
        torch.testing.assert_close(objective(*sides)[0], value[c])
    same = goal.features.float().requires_grad_()  # the root has a corner where both sides agree
    (gradient,) = torch.autograd.grad(objective(Seen((), same.detach(), same), Seen((), same, same)).sum(), same)
    assert torch.isfinite(gradient).all()


def test_frequencies_are_drawn_anew_each_step_in_place():
    objective = started(frequencies=500)
    place, first = objective.noise.data_ptr(), objective.noise.clone()
    assert abs(float(first.mean())) < 0.07 and abs(float(first.std()) - 1) < 0.05
    objective.draw(torch.tensor([4]))
    assert not torch.equal(objective.noise, first) and objective.noise.data_ptr() == place
    objective.draw(torch.tensor([3]))
    assert torch.equal(objective.noise, first)
    assert torch.equal(started(frequencies=9).noise, first[:9])
    assert not objective.state_dict()


def test_a_sum_starts_and_draws_its_terms():
    alone, total = started(), MMD(Linear()) + 2.0 * CharacteristicGap(6)
    total.start(0, lambda: seen(1, 1, 5))
    total.draw(torch.tensor([3]))
    goal, own = seen(3, 7, 5), seen(3, 4, 5, seed=1)
    torch.testing.assert_close(total(goal, own), MMD(Linear())(goal, own) + 2 * alone(goal, own))


def test_the_generator_names_its_player_and_begins_from_the_seed():
    climber = AdamW(0.001, ascent=True)
    objective, again = started(climber=climber), started(climber=climber)
    assert [p.shape for p in objective.parameters()] == [(256, 256), (256,), (256, 256), (256,), (5, 256), (5,)]
    assert objective.generator.player is climber and objective.noise.shape == (6, 256)
    assert all(torch.equal(a, b) for a, b in zip(objective.parameters(), again.parameters(), strict=True))
    weights = [p.detach() for p in objective.parameters()]
    expected = objective.noise
    for k in range(3):
        expected = (torch.tanh(expected) if k else expected) @ weights[2 * k].T + weights[2 * k + 1]
    torch.testing.assert_close(objective.generator(objective.noise), expected)


def test_bad_settings_are_refused():
    with pytest.raises(M3DError, match="frequencies=0"):
        CharacteristicGap(0)
    with pytest.raises(M3DError, match=r"amplitude=1\.5"):
        CharacteristicGap(4, amplitude=1.5)
