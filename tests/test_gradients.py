"""Gradient matching against naive per-class differentiation in float64, and the pools that train their encoders."""

import sys

import pytest
import torch
from torch.nn import functional

from m3d.augment import Augment
from m3d.engine import condense
from m3d.errors import Interrupted, M3DError
from m3d.methods import METHODS, Task, make_method
from m3d.methods.dc import loops
from m3d.nets import FlatNet, make_net
from m3d.objectives import CosineRows, PowerDistance
from m3d.pools import TrainedOnReal, TrainedOnSynthetic, World
from m3d.probes import Gradient
from m3d.rng import Purpose
from m3d.run_folder import RunFolder
from m3d.runtime import Runtime
from m3d.step import Step
from m3d.synth import Synthetic
from m3d.tiles import Tiles
from m3d.train import Recipe
from m3d.types import Batch, Eyes, Grads
from m3d.watch import Watch

CPU = Runtime.choose("cpu")
NET = "convnet2:width=4"


def setting(classes=3, n=4):
    net = FlatNet(make_net(NET, (3, 8, 8), classes))
    flat = net.fresh(0, Purpose.ENCODER, torch.tensor([0]), torch.tensor([0]))[0].double()
    images = torch.randn(2, classes, n, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.arange(classes)[:, None].expand(classes, n)
    return net, flat, images, labels


def naive_gradients(net, flat, images, label, create_graph=False):
    """One class: a plain module, a plain loss, plain autograd."""
    module = make_net(NET, (3, 8, 8), 3).double()
    values = {name: v[0].clone().requires_grad_() for name, v in net.unflatten(flat[None]).items()}
    logits = torch.func.functional_call(module, values, (images,)).logits
    loss = functional.cross_entropy(logits, torch.full((len(images),), label))
    gradients = torch.autograd.grad(loss, list(values.values()), create_graph=create_graph)
    return dict(zip(values, gradients, strict=True))


def naive_distance(real, synthetic):
    """Σ over weights with two dimensions and more, Σ over output rows of 1 − cosine."""
    total = torch.zeros((), dtype=torch.float64)
    for name, g in real.items():
        if g.ndim < 2:
            continue
        for a, b in zip(g.flatten(1), synthetic[name].flatten(1), strict=True):
            total = total + 1 - (a @ b) / (a.norm() * b.norm())
    return total


@pytest.fixture(params=[False, True], ids=["convolutions", "products"])
def together(request, monkeypatch):
    """Convolutions as they are computed on a CPU, and as on a GPU."""
    monkeypatch.setattr(sys.modules["m3d.nets.convnet"], "_likes_large_operations", lambda x: request.param)
    return request.param


@pytest.mark.parametrize("padding", [1, 3])
def test_convolutions_as_one_product_equal_a_convolution_each_and_so_do_their_derivatives(padding):
    module = sys.modules["m3d.nets.convnet"]
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()
        for shape in ((2, 3, 4, 6, 5), (2, 7, 4, 3, 3), (2, 7))
    )
    found = []
    for convolve in (module._convolve, module._convolve_together):
        y = convolve(x, weight, bias, padding, torch.float64)
        once = torch.autograd.grad(y.tanh().sum(), (x, weight, bias), create_graph=True)
        twice = torch.autograd.grad(sum(g.square().sum() for g in once), (x, weight, bias))
        found.append((y, *once, *twice))
    assert found[0][0].shape == (2, 3, 7, 4 + 2 * padding, 3 + 2 * padding)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_columns_that_would_not_fit_are_not_laid_out(monkeypatch):
    module, used = sys.modules["m3d.nets.convnet"], []
    monkeypatch.setattr(module, "_likes_large_operations", lambda x: True)
    monkeypatch.setattr(module, "_convolve_together", lambda *a: used.append(a) or module._convolve(*a))
    net, flat, images, labels = setting()  # 3 × 4 images; the second block's 4 maps of 4×4 are smaller than 3 of 8×8
    columns = 3 * 4 * 9 * max(3 * 8 * 8, 4 * 4 * 4)
    for most, together in ((columns, False), (columns + 1, True)):
        monkeypatch.setattr(module, "_COLUMNS", most)
        used.clear()
        Gradient()(net, Eyes(flat), Batch(images[0].clone().requires_grad_(), labels), torch.float64)
        assert bool(used) == together


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("keep", ["matrices", "convolutions"])
def test_gradients_of_all_classes_equal_one_class_at_a_time(keep, moves, together):
    net, flat, images, labels = setting()
    with torch.set_grad_enabled(moves):  # real images are read without a graph
        seen = Batch(images[0].clone().requires_grad_(moves), labels)
        read = Gradient(keep)(net, Eyes(flat), seen, torch.float64)
    for c in range(3):
        naive = [
            g
            for g in naive_gradients(net, flat, images[0, c], c).values()
            if g.ndim >= (4 if keep == "convolutions" else 2)
        ]
        assert len(naive) == len(read.weights) == (2 if keep == "convolutions" else 3)
        for mine, theirs in zip(read.weights, naive, strict=True):
            torch.testing.assert_close(mine[c], theirs.flatten(1))


def test_the_images_gradient_goes_through_the_gradient(together):
    """Distance and its derivative for the synthetic images against a naive double differentiation, float64."""
    net, flat, images, labels = setting()
    synthetic = images[1].clone().requires_grad_()
    goal = Gradient()(net, Eyes(flat), Batch(images[0], labels), torch.float64)
    goal = Grads(tuple(g.detach() for g in goal.weights))
    value = CosineRows()(goal, Gradient()(net, Eyes(flat), Batch(synthetic, labels), torch.float64))
    (mine,) = torch.autograd.grad(value.sum(), synthetic)
    assert value.shape == (3,)
    for c in range(3):
        own = images[1, c].clone().requires_grad_()
        real = naive_gradients(net, flat, images[0, c], c)
        distance = naive_distance(real, naive_gradients(net, flat, own, c, create_graph=True))
        torch.testing.assert_close(value[c], distance)
        torch.testing.assert_close(mine[c], torch.autograd.grad(distance, own)[0])


@pytest.mark.parametrize("power", [1, 2])
def test_power_distances_against_their_definition(power):
    net, flat, images, labels = setting()
    goal, own = (Gradient("convolutions")(net, Eyes(flat), Batch(x, labels), torch.float64) for x in images)
    value = PowerDistance(power)(goal, own)
    for c in range(3):
        expected = sum(
            float(((a[c] - b[c]).abs() ** power).sum()) for a, b in zip(goal.weights, own.weights, strict=True)
        )
        assert float(value[c]) == pytest.approx(expected, rel=1e-9)
    with pytest.raises(M3DError, match="power=3"):
        PowerDistance(3)


@pytest.mark.parametrize("objective", [CosineRows(), PowerDistance(1), PowerDistance(2)])
def test_equal_gradients_have_no_distance(objective):
    net, flat, images, labels = setting()
    read = Gradient()(net, Eyes(flat), Batch(images[0], labels), torch.float64)
    torch.testing.assert_close(objective(read, read), torch.zeros(3, dtype=torch.float64), atol=1e-9, rtol=0)


def test_training_on_real_images_reads_them_all_and_keeps_its_momentum(tiny):
    """36 images, 10 after each step: four steps read every image before any comes twice."""
    net = FlatNet(make_net(NET, tiny.shape, 3))
    recipe = Recipe(epochs=1, batch=4, lr=0.01)
    pool = TrainedOnReal(every=10, images=10, recipe=recipe).start(World(net, tiny, None, 0, CPU))
    pool.draw(0)
    seen = []
    for step in range(4):
        pool.age(step)
        first = step % pool.trainer.batches.epochs_per_block * 3
        seen.append(torch.cat([pool.trainer.batches.index[first + k, 0, : 4 if k < 2 else 2] for k in range(3)]))
    order = torch.cat(seen)
    assert torch.equal(order[:36].sort().values, torch.arange(36))
    assert pool.velocity.norm() > 0 and torch.equal(pool.velocity, pool.trainer.velocity[0])
    pool.draw(10)
    assert pool.velocity.norm() == 0


def test_training_before_the_first_step_reads_every_image_and_then_forgets_its_momentum(tiny):
    """36 images, 9 in an epoch of the trainer: two epochs of all are eight of those, against a written-out loop."""
    net = FlatNet(make_net(NET, tiny.shape, 3))
    pool = TrainedOnReal(10, 9, Recipe(1, batch=9, lr=0.1, weight_decay=0.0), before=2).start(
        World(net, tiny, None, 0, CPU)
    )
    plain = TrainedOnReal(10, 9, Recipe(1, batch=9, lr=0.1)).start(World(net, tiny, None, 0, CPU))
    pool.draw(0)
    plain.draw(0)
    flat, velocity, read = plain.parameters_flat.clone().requires_grad_(), 0.0, []
    images, labels = tiny.normalise()(tiny.train.images.float() / 255), tiny.train.labels()
    for epoch in range(8):
        chosen = pool.trainer.batches.index[epoch, 0]
        loss = functional.cross_entropy(net(flat[None], images[chosen][None]).logits[0], labels[chosen])
        velocity = 0.9 * velocity + torch.autograd.grad(loss, flat)[0]
        flat = (flat - 0.1 * velocity).detach().requires_grad_()
        read.append(chosen)
    torch.testing.assert_close(pool.parameters_flat, flat.detach(), atol=1e-6, rtol=1e-5)
    assert torch.equal(torch.cat(read).sort().values, torch.arange(36).repeat_interleave(2))
    assert pool.velocity.norm() == 0 and pool.trainer.epoch == 8
    pool.age(0)
    assert pool.trainer.epoch == 9
    pool.draw(10)  # the next encoder: eight epochs before, ten places for those after steps
    assert pool.trainer.epoch == 8 + 10 + 8
    with pytest.raises(M3DError, match="-1 epochs"):
        TrainedOnReal(10, 9, Recipe(1, 9, 0.1), before=-1)


def test_the_encoder_is_trained_on_the_synthetic_images_as_they_are(tiny):
    """Three epochs of plain SGD on all 6 images against a written-out loop with the trainer's own order."""
    net = FlatNet(make_net(NET, tiny.shape, 3))
    pixels = torch.rand(3, 2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    synthetic = Synthetic(pixels, Tiles(1), tiny.normalise())
    pool = TrainedOnSynthetic(every=3, epochs=3, batch=4).start(World(net, tiny, synthetic, 0, CPU))
    pool.draw(0)
    start = pool.parameters_flat.clone()
    with torch.no_grad():
        synthetic.latent.mul_(0.9)  # the images moved since the pool was made
    pool.age(0)
    flat = start.clone().requires_grad_()
    images, labels = synthetic(torch.arange(3)).detach().flatten(0, 1), torch.arange(3).repeat_interleave(2)
    for step in range(6):
        chosen = pool.trainer.batches.index[step, 0, : 4 if step % 2 == 0 else 2]
        loss = functional.cross_entropy(net(flat[None], images[chosen][None]).logits[0], labels[chosen])
        (gradient,) = torch.autograd.grad(loss, flat)
        flat = (flat - 0.01 * gradient).detach().requires_grad_()
    torch.testing.assert_close(pool.parameters_flat, flat.detach(), atol=1e-6, rtol=1e-5)
    assert not pool.trainer.images.pixels.requires_grad  # else every step's graph would be kept
    assert (pool.parameters_flat - start).norm() > 1e-3
    before = pool.parameters_flat.clone()
    pool.age(2)  # the last step of this encoder: a new one follows
    assert torch.equal(before, pool.parameters_flat) and pool.due(3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dc", {"outer": 4, "inner": 2}),
        ("dsa", {"outer": 4, "inner": 2}),
        ("idc", {"per_network": 4, "train_images": 7}),
        ("idc", {"per_network": 4, "train_images": 7, "train_before": 1}),
    ],
)
def test_a_trained_pool_resumes_bit_identically(tiny, tmp_path, monkeypatch, name, options):
    monkeypatch.setattr("m3d.engine._REPORT_SECONDS", 0.0)
    method = make_method(name, Task("tiny", tiny.shape, 3, 2), {"steps": 9, "batch_real": 4, **options})[0]
    net = FlatNet(make_net(NET, tiny.shape, 3))
    whole = condense(method, tiny, net, 2, 0, CPU)
    folder, asked = RunFolder(tmp_path), []

    def stop(progress):
        import signal

        if progress.step == 6 and not asked:
            asked.append(1)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        condense(method, tiny, net, 2, 0, CPU, Watch(report=stop, folder=folder))
    resumed = condense(method, tiny, net, 2, 0, CPU, Watch(folder=folder))
    assert torch.equal(resumed.pixels, whole.pixels) and resumed.losses == whole.losses


def test_the_distance_falls(tiny):
    method = make_method(
        "dsa", Task("tiny", tiny.shape, 3, 1), {"steps": 60, "batch_real": 8, "augment": "none", "init": "noise"}
    )[0]
    losses = condense(method, tiny, FlatNet(make_net(NET, tiny.shape, 3)), 1, 0, CPU).losses
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])


def test_published_loops_and_settings(tiny):
    assert [loops(i) for i in (1, 5, 10, 25, 50, 60)] == [(1, 1), (1, 1), (10, 50), (20, 25), (50, 10), (50, 10)]
    dc, dsa = (make_method(n, Task("cifar10", (3, 32, 32), 10, 10), {})[0] for n in ("dc", "dsa"))
    assert dc.steps == dsa.steps == 10_000 and dc.matching.augment == Augment()
    assert str(dsa.matching.augment) == "color|crop|cutout|flip|scale|rotate" == str(dsa.matching.pool.augment)
    assert (dc.matching.player.lr, dc.matching.player.momentum, dc.matching.batch_real) == (0.1, 0.5, 256)
    step = Step(
        make_method("dc", Task("tiny", tiny.shape, 3, 1), {"steps": 1})[0],
        tiny,
        FlatNet(make_net(NET, tiny.shape, 3)),
        torch.rand(3, 1, 3, 8, 8),
        0,
        CPU,
    )
    assert {"pool.parameters_flat", "synthetic.latent", "_players.0.velocity"} <= set(step.state_dict())


@pytest.mark.parametrize(
    ("name", "plain", "given"),
    [
        ("dsa", "dc", {"momentum": 0.25, "factor": 2, "outer": 3, "inner": 4, "batch_real": 5, "batch_syn_max": 6}),
        ("idc-i", "idc", {"momentum": 0.25, "train_images": 64, "train_cutmix": 0.1, "batch_syn_max": 6, "factor": 1}),
    ],
)
def test_a_variant_takes_what_its_method_takes(name, plain, given):
    """Every option of the one is an option of the other, but for what the variant settles, and arrives there."""
    task = Task("tiny", (3, 8, 8), 3, 2)
    given = {"steps": 12, "lr": 0.3, "augment": "crop", "init": "noise", **given}
    missing = set(METHODS.get(plain).options()) - set(METHODS.get(name).options())
    assert missing <= {"factor"}
    own = {key: value for key, value in given.items() if key not in missing}
    (a, said), (b, _) = make_method(name, task, own), make_method(plain, task, given)
    assert {key: said[key] for key in own} == own and (a.tiles, a.init) == (b.tiles, b.init)
    for part in ("steps", "pool", "player", "augment", "batch_real", "batch_syn_max"):
        assert getattr(a.matching, part) == getattr(b.matching, part), part


def test_idc_matches_mnist_without_cutout_where_it_has_a_factor():
    for data, options, augment in (("mnist", {}, "color+crop"), ("mnist", {"factor": 1}, "color+crop+cutout")):
        assert make_method("idc", Task(data, (1, 28, 28), 10, 10), options)[1]["augment"] == augment
    assert make_method("idc", Task("svhn", (3, 32, 32), 10, 10), {})[1]["augment"] == "color+crop+cutout"


@pytest.mark.parametrize(
    ("data", "shape", "expected"),
    [
        ("cifar100", (3, 32, 32), (200_000, 5e-3, 2, 2, 2000, 0)),
        ("svhn", (3, 32, 32), (200_000, 5e-3, 2, 2, 500, 0)),
        ("mnist", (1, 28, 28), (200_000, 1e-4, 1, 2, 500, 0)),
        ("fashion-mnist", (1, 28, 28), (200_000, 1e-4 * (28 / 32) ** 2, 1, 2, 500, 0)),
        ("imagenet10", (3, 224, 224), (50_000, 3e-3, 1, 3, 500, 10)),
        ("imagenet100-4", (3, 224, 224), (50_000, 1e-3, 1, 3, 500, 5)),
        ("imagenet10", (3, 112, 112), (50_000, 3e-3 / 4, 1, 2, 500, 10)),  # the rate goes by the size
        ("photos", (3, 64, 64), (200_000, 2e-2, 2, 2, 500, 0)),
        ("photos", (3, 224, 224), (50_000, 3e-3, 1, 3, 500, 10)),
    ],
)
def test_idcs_published_settings(data, shape, expected):
    method, options = make_method("idc", Task(data, shape, 10, 20), {})
    m = method.matching
    rate = m.player.lr / 2  # 20 images per class
    found = (m.steps, rate, m.objective.power, method.tiles.factor, m.pool.images, m.pool.before)
    assert found == pytest.approx(expected) and options["train_before"] == expected[-1]
