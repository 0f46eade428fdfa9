"""DSDM: covariances against the library's, the past against a written-out mean, its settings, resuming with a past."""

import signal

import pytest
import torch

from m3d.engine import condense
from m3d.errors import Interrupted, M3DError
from m3d.methods import Task, make_method
from m3d.nets import FlatNet, make_net
from m3d.objectives import Covariance, History
from m3d.objectives.base import Weighted
from m3d.run_folder import RunFolder
from m3d.runtime import Runtime
from m3d.select import Noise
from m3d.step import Step
from m3d.types import Seen
from m3d.watch import Watch

CPU = Runtime.choose("cpu")
NET = "convnet2:width=4"
SMALL = {"batch_real": 6, "encoders": 2, "encoder_epochs": 1, "augment": "none"}


def seen(*shape, seed=0):
    features = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Seen((), features, features)


@pytest.mark.parametrize(("real", "own"), [(9, 5), (4, 9), (6, 2)])
def test_covariances_against_the_library_s(real, own):
    goal, mine = seen(3, real, 7), seen(3, own, 7, seed=1)
    features = mine.features.requires_grad_()
    value = Covariance()(goal, Seen((), features, features))
    (gradient,) = torch.autograd.grad(value.sum(), features)
    assert value.shape == (3,)
    for c in range(3):
        x = features[c].detach().clone().requires_grad_()
        expected = (torch.cov(goal.features[c].mT) - torch.cov(x.mT)).square().sum() / 7
        torch.testing.assert_close(value[c].double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient[c], torch.autograd.grad(expected, x)[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(Covariance()(goal, goal), torch.zeros(3), atol=1e-6, rtol=0)


def test_one_image_has_no_covariance():
    goal, own = seen(2, 6, 5), seen(2, 1, 5, seed=1)
    expected = torch.stack([torch.cov(goal.features[c].mT).square().sum() / 5 for c in range(2)])
    torch.testing.assert_close(Covariance()(goal, own).double(), expected, rtol=1e-5, atol=1e-6)


def test_the_past_is_a_running_mean_of_the_steps_before():
    objective = History(classes=3, keep=0.75, after=3)
    objective.start(0, lambda: seen(1, 1, 5))
    past = None
    for step in range(6):
        own = seen(3, 4, 5, seed=10 + step)
        objective.draw(torch.tensor([step]))
        value = objective(seen(3, 2, 5), own)
        mean = own.features.float().mean(1)
        if step < 3:
            assert torch.equal(value, torch.zeros(3))
        else:
            torch.testing.assert_close(value, (mean - past).square().sum(1) / 5)
        past = mean if past is None else 0.75 * past + 0.25 * mean
    assert objective.remembers and not objective.across_classes
    assert set(objective.state_dict()) == {"past", "latest", "counts"}


def test_the_past_gives_no_gradient_but_the_present_does():
    objective = History(classes=2, keep=0.5, after=1)
    objective.start(0, lambda: seen(1, 1, 3))
    for step in range(2):
        features = seen(2, 4, 3, seed=step).features.float().requires_grad_()
        objective.draw(torch.tensor([step]))
        value = objective(seen(2, 2, 3), Seen((), features, features))
    (gradient,) = torch.autograd.grad(value.sum(), features)
    expected = 2 * (features.mean(1) - objective.past) / 3 / 4
    torch.testing.assert_close(gradient, expected[:, None].expand_as(gradient))


def test_the_loss_is_the_three_terms(tiny):
    options = {**SMALL, "steps": 8, "history_after": 2, "history_weight": 0.3, "cov_weight": 7.0}
    method = make_method("dsdm", Task("tiny", tiny.shape, 3, 2), options)[0]
    step = Step(method, tiny, FlatNet(make_net(NET, tiny.shape, 3)), torch.rand(3, 2, *tiny.shape), 0, CPU)
    step.refill(0)
    past = None
    for number in range(4):
        if step.pool.due(number):
            step.pool.draw(number)
        eyes = step.pool.parameters_flat[None].clone()
        real = step.synthetic.normalise(tiny.train.take(step.real_index[number]))
        shown = step.synthetic(step.lanes).detach()
        means, expected = [], []
        for c in range(3):
            a, b = (step.net(eyes, x[None]).features[0].double() for x in (real[c], shown[c]))
            gap = (a.mean(0) - b.mean(0)).square().sum()
            gap = gap + 7.0 * (torch.cov(a.mT) - torch.cov(b.mT)).square().sum() / a.shape[1]
            if number >= 2:
                gap = gap + 0.3 * (b.mean(0) - past[c]).square().sum() / a.shape[1]
            expected.append(gap)
            means.append(b.mean(0))
        step.advance()
        torch.testing.assert_close(step.losses[number].double(), torch.stack(expected), atol=1e-5, rtol=1e-4)
        now = torch.stack(means)
        past = now if past is None else 0.99 * past + 0.01 * now


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_stopped_run_keeps_its_past(tiny, tmp_path, monkeypatch, stop):
    monkeypatch.setattr("m3d.engine._REPORT_SECONDS", 0.0)
    options = {**SMALL, "steps": 6, "history_after": 2, "history_weight": 50.0, "lr": 0.05}
    method = make_method("dsdm", Task("tiny", tiny.shape, 3, 2), options)[0]
    net = FlatNet(make_net(NET, tiny.shape, 3))
    whole, folder, asked = condense(method, tiny, net, 2, 0, CPU), RunFolder(tmp_path), []

    def ask_to_stop(progress):
        if progress.step == stop and not asked:
            asked.append(1)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        condense(method, tiny, net, 2, 0, CPU, Watch(report=ask_to_stop, folder=folder))
    resumed = condense(method, tiny, net, 2, 0, CPU, Watch(folder=folder))
    assert torch.equal(resumed.pixels, whole.pixels) and resumed.losses == whole.losses
    without = make_method("dsdm", Task("tiny", tiny.shape, 3, 2), {**options, "history_weight": 0.0})[0]
    assert not torch.equal(condense(without, tiny, net, 2, 0, CPU).pixels, whole.pixels)


def terms(objective, weight=1.0):
    """(objective, weight) of all that a sum is made of."""
    if not isinstance(objective, Weighted):
        return [(objective, weight)]
    pairs = zip(objective.terms, objective.weights, strict=True)
    return [found for term, own in pairs for found in terms(term, weight * own)]


def test_published_settings():
    method = make_method("dsdm", Task("any", (3, 32, 32), 10, 10), {})[0]
    matching = method.matching
    assert (method.steps, matching.player.lr, matching.player.momentum, matching.batch_real) == (10_000, 0.1, 0.5, 256)
    assert (method.tiles.factor, matching.pool.networks, matching.pool.recipe.epochs) == (2, 10, 20)
    assert (matching.pool.low, matching.pool.high) == (0, 0) and matching.guide is None
    weighted = dict(terms(matching.objective))
    assert {type(term).__name__: weight for term, weight in weighted.items()} == {
        "MMD": 1.0,
        "Covariance": 50.0,
        "History": 0.2,
    }
    recipe = matching.pool.recipe
    assert (recipe.batch, recipe.lr, recipe.momentum, recipe.weight_decay, recipe.cutmix) == (256, 0.01, 0.9, 5e-4, 0.5)
    assert (str(recipe.augment), recipe.schedule, matching.batch_syn_max) == ("color+crop", "milestones", 256)
    (history,) = (term for term in weighted if isinstance(term, History))
    assert (history.keep, history.after, history.classes) == (0.99, 2_000, 10)
    for side, ipc, lr in ((32, 1, 0.01), (32, 50, 0.5), (8, 1, 0.01)):
        method = make_method("dsdm", Task("any", (3, side, side), 10, ipc), {})[0]
        assert method.matching.player.lr == pytest.approx(lr)
    photos = make_method("dsdm", Task("photos", (3, 128, 128), 10, 1, cutmix=False), {})[0]
    assert (photos.matching.pool.recipe.batch, photos.matching.pool.recipe.cutmix, photos.tiles.factor) == (64, 0, 3)


def test_every_option_arrives():
    given = {"steps": 9, "lr": 0.2, "momentum": 0.25, "factor": 1, "cov_weight": 2.0, "history_weight": 0.5}
    given |= {"history_keep": 0.75, "history_after": 3, "encoders": 4, "encoder_epochs": 5, "encoder_batch": 6}
    given |= {"encoder_lr": 0.3, "mix_low": 0.1, "mix_high": 0.6, "ipm": 7, "batch_real": 11, "batch_syn_max": 12}
    given |= {"augment": "crop", "init": "noise"}
    method, resolved = make_method("dsdm", Task("any", (3, 32, 32), 10, 10), given)
    assert resolved == given
    matching, pool = method.matching, method.matching.pool
    assert (method.steps, method.tiles.factor, method.init) == (9, 1, Noise())
    assert (matching.player.lr, matching.player.momentum) == (0.2, 0.25)
    assert {type(term).__name__: weight for term, weight in terms(matching.objective)} == {
        "MMD": 1.0,
        "Covariance": 2.0,
        "History": 0.5,
    }
    (history,) = (term for term, _ in terms(matching.objective) if isinstance(term, History))
    assert (history.keep, history.after) == (0.75, 3)
    assert (pool.networks, pool.recipe.epochs, pool.recipe.batch, pool.recipe.lr) == (4, 5, 6, 0.3)
    assert (pool.low, pool.high, pool.every) == (0.1, 0.6, 7)
    assert (matching.batch_real, matching.batch_syn_max, str(matching.augment)) == (11, 12, "crop")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("history_keep", 1.0, "history_keep=1.0 is not valid; allowed: from 0 to less than 1"),
        ("history_after", 0, "history_after=0 is not valid; allowed: 1 and more"),
        ("cov_weight", -1.0, "a weight of -1.0 is not valid"),
    ],
)
def test_options_out_of_range_are_refused(name, value, message):
    with pytest.raises(M3DError, match=message):
        make_method("dsdm", Task("any", (3, 32, 32), 10, 1), {name: value})
