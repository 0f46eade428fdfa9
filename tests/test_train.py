"""The trainer against a plain PyTorch loop, CutMix by hand, and stacked networks against single ones."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from m3d import rng
from m3d.augment import UNIFORMS, Augment
from m3d.batches import Images, cutmix, steps_ahead
from m3d.errors import M3DError
from m3d.evaluation import PROTOCOLS, make_protocol
from m3d.nets import FlatNet, make_net
from m3d.nets.norms import BatchNorm
from m3d.normalise import Normalise
from m3d.rng import Purpose
from m3d.runtime import Runtime
from m3d.train import Recipe, Trainer, cross_entropy

CPU = Runtime.choose("cpu")
SHAPE = (3, 8, 8)
SHAPE16 = (3, 16, 16)


def images(n=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.rand(n, *SHAPE, generator=generator)
    return Images(pixels, torch.randint(0, 3, (n,), generator=generator), Normalise((0.5, 0.4, 0.3), (0.2, 0.3, 0.2)))


def trainer(recipe, repeats=2, n=10, seed=0, **more):
    return Trainer(FlatNet(make_net("convnet2:width=4", SHAPE, 3)), images(n), recipe, repeats, seed, CPU, **more)


def naive_cutmix(x, labels, partner, u, probability):
    """One network's batch, one box, by slicing."""
    h, w = x.shape[-2:]
    if u[0] >= probability:
        return x, 1.0
    side = float((1 - u[1]).sqrt())
    cut_h, cut_w, cy, cx = int(h * side), int(w * side), int(u[2] * h), int(u[3] * w)
    top, bottom = max(cy - cut_h // 2, 0), min(cy + cut_h // 2, h)
    left, right = max(cx - cut_w // 2, 0), min(cx + cut_w // 2, w)
    out = x.clone()
    out[:, :, top:bottom, left:right] = x[partner][:, :, top:bottom, left:right]
    return out, 1 - (bottom - top) * (right - left) / (h * w)


RECIPE = Recipe(
    epochs=8,
    batch=4,
    lr=0.1,
    milestones=(3, 5),
    gamma=0.2,
    augment=Augment(always=("flip", "color"), one_of=("crop", "scale", "rotate")),
    cutmix=0.5,
)


@pytest.mark.parametrize("fresh_momentum", [False, True])
def test_trainer_equals_a_plain_loop_with_the_same_draws(fresh_momentum):
    """24 steps (8 epochs of 3 batches, the last of 2 images) of each network against torch.optim.SGD, to 1e-4."""
    recipe = Recipe(**{**RECIPE.__dict__, "fresh_momentum": fresh_momentum})
    fast = trainer(recipe)
    start = fast.flat.detach().clone()
    fast.batches._refill(0)  # the draws of all 8 epochs lie in the buffers now
    index, mix, partners = (b.clone() for b in (fast.batches.index, fast.batches.mix, fast.batches.partner))
    uniforms = rng.uniform(0, rng.Purpose.TRAIN_AUGMENT, torch.arange(24), torch.arange(2), 4 * UNIFORMS)
    uniforms = uniforms.unflatten(-1, (4, UNIFORMS))
    data = images()
    fast.run(8)
    for r in range(2):
        net = make_net("convnet2:width=4", SHAPE, 3)
        views = FlatNet(make_net("convnet2:width=4", SHAPE, 3)).unflatten(start)
        net.load_state_dict({name: value[r] for name, value in views.items()})
        optimiser = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        for step in range(24):
            epoch, k = divmod(step, 3)
            if k == 0 and epoch in (3, 5):
                optimiser.param_groups[0]["lr"] *= 0.2
                if fresh_momentum:
                    optimiser.state.clear()
            size = 4 if k < 2 else 2
            chosen = index[step, r, :size]
            x, y = data.take(chosen), data.labels[chosen]
            u = uniforms[step, r, :size]
            u[:, 0] = u[0, 0]  # one choice of operation per batch
            x = recipe.augment.apply(x[:, None], recipe.augment.parameters(u, (8, 8)))[:, 0]
            partner = partners[step, r, :size].argsort(stable=True)
            x, share = naive_cutmix(x, y, partner, mix[step, r], 0.5)
            logits = net(x).logits
            loss = share * functional.cross_entropy(logits, y) + (1 - share) * functional.cross_entropy(
                logits, y[partner]
            )
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        slow = torch.cat([p.detach().flatten() for p in net.parameters()])
        torch.testing.assert_close(fast.flat[r].detach(), slow, atol=1e-4, rtol=1e-4)
        assert (slow - start[r]).norm() > 0.05  # it did move


def test_stacked_networks_equal_single_ones():
    """21 steps of three networks in one pass, as on a GPU, against the same three alone: equal to 1e-6."""
    together = trainer(RECIPE, repeats=3)
    together.at_once = 3
    together.run(7)
    for r in range(3):
        alone = trainer(RECIPE, repeats=1, first=r)
        alone.run(7)
        torch.testing.assert_close(alone.flat[0].detach(), together.flat[r].detach(), atol=1e-6, rtol=1e-5)


def test_who_is_trained_beside_a_network_does_not_change_it():
    """On a CPU, bit for bit, for any division of five networks; none at all is a division too."""
    together = trainer(RECIPE, repeats=5)
    together.run(7)
    for edges in ((0, 1, 2, 3, 4, 5), (0, 2, 5), (0, 0, 4, 5)):
        parts = []
        for first, last in pairwise(edges):
            parts.append(trainer(RECIPE, repeats=last - first, first=first))
            parts[-1].run(7)
            assert parts[-1].epoch == 7
        assert torch.equal(torch.cat([part.flat for part in parts]), together.flat)
        assert torch.equal(torch.cat([part.accuracy(images()) for part in parts]), together.accuracy(images()))


@pytest.mark.parametrize(
    ("ahead", "batch", "runs"), [(3, 4, (8,)), (8, 4, (2, 3, 8)), (40, 4, (1, 8)), (5, 10, (7, 8))]
)
def test_batches_made_ahead_are_those_made_step_by_step(ahead, batch, runs):
    """Bit for bit, for any number made together and any division of the epochs; the last batch has 2 images, or 10.

    Only runs of more than half that many steps make any ahead.
    """
    recipe = Recipe(**{**RECIPE.__dict__, "batch": batch})
    plain, fast = trainer(recipe), trainer(recipe)
    fast.batches.ahead = ahead
    before = 0
    for until in runs:
        plain.run(until)
        fast.run(until)
        assert torch.equal(plain.flat, fast.flat) and not torch.equal(fast.flat, trainer(recipe).flat)
        steps = (until - before) * fast.batches.steps_per_epoch
        assert (fast.batches._left < ahead and fast.batches._ready is not None) or 2 * steps <= ahead
        before = until
    assert any(made for _, made in fast._steps)


def test_batches_made_ahead_follow_images_that_change_between_runs():
    recipe = Recipe(**{**RECIPE.__dict__, "batch": 10})
    plain, fast = trainer(recipe), trainer(recipe)
    fast.batches.ahead = 5
    for until in (3, 7):
        for made in (plain, fast):
            made.images.pixels.mul_(0.5)  # as a step of condensation moves them
            made.run(until)
    assert torch.equal(plain.flat, fast.flat)


@pytest.mark.parametrize(
    ("per_epoch", "images", "expected"),
    [(32, 64, 32), (2, 1000, 2), (7, 640, 4), (1, 100, 27), (1, 10, 64), (1, 4096, 1)],
)
def test_how_many_batches_are_made_ahead(per_epoch, images, expected):
    """Of 32×32 images: IDC, large batches, ten networks of an evaluation, DC with ten images and with one, no room."""
    assert steps_ahead(per_epoch, images * 3072, "cuda") == expected
    assert steps_ahead(per_epoch, images * 3072, "cpu") == 1


def test_every_image_is_seen_once_an_epoch_and_the_last_batch_is_kept():
    fast = trainer(RECIPE)
    fast.batches._refill(0)
    for r in range(2):
        epoch = torch.cat([fast.batches.index[k, r, : 4 if k < 2 else 2] for k in range(3)])
        assert torch.equal(epoch.sort().values, torch.arange(10))
    assert not torch.equal(fast.batches.index[0, 0], fast.batches.index[0, 1]) and not torch.equal(
        fast.batches.index[0, 0], fast.batches.index[3, 0]
    )


def test_networks_go_in_smaller_groups_when_memory_is_short(monkeypatch, caplog):
    """Three at once do not fit, two do not either: one at a time, the same result, and nothing is lost on the way."""
    whole = trainer(RECIPE, repeats=3)
    whole.at_once = 3
    whole.run(3)
    tried, see = [], FlatNet.__call__

    def hungry(self, flat, *rest, **more):
        tried.append(len(flat))
        if len(flat) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return see(self, flat, *rest, **more)

    monkeypatch.setattr(FlatNet, "__call__", hungry)
    small = trainer(RECIPE, repeats=3)
    small.at_once = 3
    small.run(3)
    assert tried[:3] == [3, 2, 1] and set(tried[2:]) == {1} and "1 networks at a time" in caplog.text
    torch.testing.assert_close(small.flat, whole.flat, atol=1e-6, rtol=1e-5)

    def starving(self, *rest, **more):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(FlatNet, "__call__", starving)
    with pytest.raises(M3DError, match="one network and 4 images do not fit"):
        trainer(RECIPE, repeats=1).run(1)


def test_repeats_differ_in_every_draw():
    fast = trainer(RECIPE)
    fast.batches._refill(0)
    assert not torch.equal(fast.flat[0], fast.flat[1])
    for buffer in (fast.batches.augmentation, fast.batches.mix, fast.batches.partner):
        assert not torch.equal(buffer[:, 0], buffer[:, 1])


def test_same_seed_same_bits_other_seed_other_bits():
    runs = []
    for seed in (0, 0, 1):
        runs.append(trainer(RECIPE, seed=seed))
        runs[-1].run(3)
    assert torch.equal(runs[0].flat, runs[1].flat) and not torch.equal(runs[0].flat, runs[2].flat)


@pytest.mark.parametrize("probability", [0.0, 0.5, 1.0])
def test_cutmix_by_hand(probability):
    generator = torch.Generator().manual_seed(1)
    x, u = torch.rand(20, 6, 3, 8, 8, generator=generator), torch.rand(20, 4, generator=generator)
    partner = torch.stack([torch.randperm(6, generator=generator) for _ in range(20)])
    mixed, share = cutmix(x, partner, u, probability)
    for r in range(20):
        expected, own = naive_cutmix(x[r], None, partner[r], u[r], probability)
        assert torch.equal(mixed[r], expected)
        assert abs(float(share[r]) - own) < 1e-6


def test_accuracy_counts():
    fast = trainer(RECIPE, n=10)
    data = images(7, seed=3)
    expected = []
    for r in range(2):
        logits = fast.net(fast.flat.detach()[r : r + 1], data.take(torch.arange(7))[None]).logits[0]
        expected.append(float((logits.argmax(1) == data.labels).sum()) * 100 / 7)
    torch.testing.assert_close(fast.accuracy(data, chunk=3), torch.tensor(expected, dtype=torch.float64))


def test_batch_norm_is_tested_with_statistics_of_the_training_images():
    """Against the library's batch norm in evaluation mode, its running statistics set to the training images' own; and
    a test image's answer does not depend on those beside it."""
    net = FlatNet(make_net("resnet10:width=8,norm=batch", (3, 16, 16), 3))
    generator = torch.Generator().manual_seed(0)
    train, test = torch.randn(12, 3, 16, 16, generator=generator), torch.randn(6, 3, 16, 16, generator=generator)
    flat = net.fresh(0, Purpose.CLASSIFIER, torch.tensor([0]), torch.tensor([0]))
    together = net.calibrated(flat, test[None], train[None], torch.float32).logits[0]
    alone = torch.cat([net.calibrated(flat, x[None, None], train[None], torch.float32).logits[0] for x in test])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(together, net(flat, test[None]).logits[0], atol=1e-2)  # batch statistics say otherwise
    x = torch.randn(10, 5, 4, 4, generator=generator)
    mine, theirs = BatchNorm(5), nn.BatchNorm2d(5, momentum=1.0)
    theirs(x[:7])
    theirs.running_var = x[:7].var((0, 2, 3), correction=0)
    mine.reference = 7
    torch.testing.assert_close(mine(x)[7:], theirs.eval()(x[7:]), atol=1e-5, rtol=1e-4)


def test_a_network_with_batch_norm_learns_and_is_measured():
    recipe = Recipe(epochs=30, batch=8, lr=0.05)
    data = images(12)
    made = Trainer(FlatNet(make_net("resnet10:width=8,norm=batch", SHAPE16, 3)), _large(data), recipe, 1, 0, CPU)
    made.run(30)
    assert float(made.accuracy(_large(data))[0]) > 90


def _large(data):
    """The same images at 16 pixels."""
    pixels = functional.interpolate(data.pixels, (16, 16))
    return Images(pixels, data.labels, Normalise((0.5, 0.4, 0.3), (0.2, 0.3, 0.2)))


def test_paper_protocol_is_the_published_recipe():
    recipe = make_protocol("paper").recipe
    assert (recipe.epochs, recipe.batch, recipe.lr, recipe.momentum, recipe.weight_decay) == (1000, 64, 0.01, 0.9, 5e-4)
    assert [recipe.rate(e) for e in (0, 665, 666, 832, 833, 999)] == pytest.approx(
        [0.01, 0.01, 0.002, 0.002, 0.0004, 0.0004]
    )
    assert str(recipe.augment) == "flip+color+crop|scale|rotate" and recipe.cutmix == 0.5
    recipe = make_protocol("dsa").recipe
    assert (recipe.batch, recipe.fresh_momentum, recipe.milestones, recipe.cutmix) == (256, True, (501,), 0.0)
    recipe = make_protocol("dc").recipe
    assert (recipe.epochs, str(recipe.augment), recipe.cutmix) == (300, "none", 0.0)
    digits = make_protocol("dc-mnist").recipe
    assert (digits.epochs, digits.milestones, str(digits.augment)) == (1000, (501,), "crop|scale|rotate")
    assert make_protocol("cafe").recipe.epochs == 600 and make_protocol("datadam").recipe.batch == 64
    for name in PROTOCOLS.names():
        assert make_protocol(name).checks[-1] == make_protocol(name).recipe.epochs


def test_large_images_are_tested_a_few_at_a_time(monkeypatch):
    """The same accuracy, whatever fits together."""
    made = Trainer(FlatNet(make_net("convnet2:width=4", SHAPE, 3)), images(), RECIPE, 2, 0, Runtime.choose("cpu"))
    made.run(1)
    whole, sizes, calibrated = made.accuracy(images()), [], made.net.calibrated
    monkeypatch.setattr("m3d.train._TEST_PIXELS", 3 * SHAPE[1] * SHAPE[2])

    def watched(row, batch, reference, dtype):
        sizes.append(batch.shape[1])
        return calibrated(row, batch, reference, dtype)

    monkeypatch.setattr(made.net, "calibrated", watched)
    assert torch.equal(made.accuracy(images()), whole) and max(sizes) == 3


def test_bad_recipes_are_refused():
    with pytest.raises(M3DError, match="epochs=0"):
        make_protocol("paper", epochs=0)
    with pytest.raises(M3DError, match="cutmix=2"):
        Recipe(epochs=1, batch=1, lr=0.1, cutmix=2)
    with pytest.raises(M3DError, match=r"unknown protocol 'papers'.*'paper'"):
        make_protocol("papers")


def test_bf16_training_stays_close_to_float32():
    """bf16 keeps eight bits: after 6 steps the weights agree to about that."""
    runs = []
    for precision in ("fp32", "bf16"):
        made = Trainer(
            FlatNet(make_net("convnet2:width=4", SHAPE, 3)), images(), RECIPE, 1, 0, Runtime.choose("cpu", precision)
        )
        made.run(2)
        runs.append(made.flat.detach())
    assert runs[0].dtype == runs[1].dtype == torch.float32
    assert 0 < (runs[0] - runs[1]).norm() / runs[0].norm() < 0.02


def test_unused_module_storage_is_never_touched():
    module = make_net("convnet2:width=4", SHAPE, 3)
    assert isinstance(module, nn.Module)
    assert all(p.is_meta for p in FlatNet(module).net.parameters())


def test_cross_entropy_of_classes_is_that_of_certain_probabilities():
    """Value and gradient; the backward must not scatter, whose deterministic form cannot be recorded on CUDA."""
    scores = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)).log_softmax(-1).requires_grad_()
    classes = torch.tensor([[0, 1, 2, 1, 0], [2, 2, 0, 1, 1]])
    results = []
    for target in (classes, functional.one_hot(classes, 3).float()):
        value = cross_entropy(scores, target)
        results.append((value, torch.autograd.grad(value.sum(), scores)[0]))
    torch.testing.assert_close(*results)
    assert "Gather" not in repr(_graph(cross_entropy(scores, classes).grad_fn))


def _graph(node):
    return [node, *(below for child, _ in node.next_functions if child is not None for below in _graph(child))]
