"""The engine: reproducible, class-batched equal to a loop over classes."""

import dataclasses
import math

import pytest
import torch
from short import CPU, NET, method_of, run

from m3d.augment import Parameters
from m3d.data import ClassData
from m3d.engine import condense
from m3d.errors import M3DError
from m3d.guides import CrossEntropy
from m3d.kernels import Gaussian, Linear
from m3d.methods import Task, make_method
from m3d.nets import FlatNet, make_net
from m3d.objectives import MMD
from m3d.players import Descent
from m3d.pools import Fresh, World
from m3d.select import RandomReal
from m3d.step import BLOCK, Step
from m3d.tiles import Tiles
from m3d.types import Batch, Eyes, Seen


def test_same_seed_same_bits_and_another_seed_another_set(tiny):
    first, again, other = run(tiny), run(tiny), run(tiny, seed=1)
    assert torch.equal(first.pixels, again.pixels) and first.losses == again.losses
    assert not torch.equal(first.pixels, other.pixels)
    assert first.pixels.shape == (3, 2, 3, 8, 8) and first.pixels.min() >= 0 and first.pixels.max() <= 1


def test_the_loss_falls_on_easy_data(tiny):
    losses = run(tiny, ipc=1, steps=200, lr=0.02, augment="none", factor=1, ipm=1, init="noise").losses
    assert len(losses) == 200
    assert sum(losses[-20:]) < 0.7 * sum(losses[:20])


@pytest.mark.parametrize("factor", [1, 2])
def test_class_batched_step_equals_a_class_by_class_loop(tiny, factor):
    """Gradients of one step over all classes against one class at a time, written out from Algorithm 1, to 1e-5."""
    method = method_of(tiny, 2, factor=factor)
    net = FlatNet(make_net(NET, tiny.shape, 3))
    pixels = method.tiles.encode(method.init(tiny, 2 * factor**2, 0, CPU))
    step = Step(method, tiny, net, pixels, 0, CPU)
    step.refill(0)
    step.pool.draw(0)
    loss = step.loss(step.lanes, step.real_index[0], step.syn_index[0], step.augmentation[0])
    (gradient,) = torch.autograd.grad(loss.sum(), step.synthetic.latent)
    mean, std = (torch.tensor(v)[:, None, None] for v in (tiny.mean, tiny.std))
    augment = method.matching.augment
    for c in range(3):
        latent = pixels[c].clone().requires_grad_()
        start = int(tiny.train.start[c])
        real = tiny.train.images[start + step.real_index[0, c]].float() / 255
        parameters = Parameters.unpacked(step.augmentation[0, c : c + 1])

        def features(x, parameters=parameters):
            x = augment.apply(((x - mean) / std)[None], parameters)[0]
            return net(step.pool.parameters_flat[None], x[None]).features[0]

        goal, own = features(real).detach(), features(Tiles(factor).decode(latent))
        kernel = Gaussian()
        scale = kernel.scale(own, goal)
        value = kernel(goal, goal, scale).mean() + kernel(own, own, scale).mean() - 2 * kernel(own, goal, scale).mean()
        (alone,) = torch.autograd.grad(value, latent)
        torch.testing.assert_close(loss[c], value, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(gradient[c], alone, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 2])
def test_chunks_of_classes_are_exact(tiny, chunk):
    """Any chunk size gives the step of all classes together, to rounding."""
    method = method_of(tiny, 2)
    net = FlatNet(make_net(NET, tiny.shape, 3))
    results = []
    for size in (3, chunk):
        step = Step(method, tiny, net, method.tiles.encode(method.init(tiny, 8, 0, CPU)), 0, CPU)
        step.chunk = size
        step.refill(0)
        step.pool.draw(0)
        for _ in range(3):
            step.advance()
        results.append((step.synthetic.latent.detach(), step.losses[:3]))
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-5)


def test_linear_m3d_is_dm(tiny):
    """With the same settings the linear kernel's run is DM's, bit for bit."""
    shared = {"steps": 5, "batch_real": 4, "factor": 1, "ipm": 1, "augment": "color+crop", "lr": 0.01}
    net = FlatNet(make_net(NET, tiny.shape, 3))
    linear = method_of(tiny, 2, kernel="linear", **shared)
    dm = method_of(tiny, 2, "dm", **shared)
    dm = dataclasses.replace(dm, matching=dataclasses.replace(dm.matching, standardised=False))
    results = [condense(m, tiny, net, 2, 0, CPU).pixels for m in (linear, dm)]
    assert torch.equal(*results)


def test_dm_takes_moments_and_the_m3d_loss(tiny):
    """The variations of the paper's Table 1 and compatibility table are other objectives in the same record."""
    plain, second, third = (method_of(tiny, 2, "dm", moments=k).matching.objective for k in (1, 2, 3))
    m3d_loss = method_of(tiny, 2, "dm", objective="m3d").matching
    goal, seen = (Seen((), x, x) for x in torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0)))
    assert (second(goal, seen) > plain(goal, seen)).all() and (third(goal, seen) > second(goal, seen)).all()
    torch.testing.assert_close(m3d_loss.objective(goal, seen), MMD(Gaussian())(goal, seen))
    default = make_method("dm", Task("tiny", tiny.shape, 3, 2), {"objective": "m3d"})[0].matching.player
    assert default == Descent(lr=50.0, momentum=0.5)
    with pytest.raises(M3DError, match="moments=4"):
        method_of(tiny, 2, "dm", moments=4)
    assert run(tiny, name="dm", moments=3).losses[-1] > 0


def test_standardised_units_move_by_std_squared(tiny):
    """One small step of DM: Δpixels = std² · (Δpixels of the same step in plain pixels)."""
    options = {"steps": 1, "batch_real": 4, "lr": 1e-4, "augment": "none", "momentum": 0.0}
    dm = method_of(tiny, 2, "dm", **options)
    plain = dataclasses.replace(dm, matching=dataclasses.replace(dm.matching, standardised=False))
    net = FlatNet(make_net(NET, tiny.shape, 3))
    start = dm.init(tiny, 2, 0, CPU)
    moved = [condense(m, tiny, net, 2, 0, CPU).pixels - start for m in (dm, plain)]
    std = torch.tensor(tiny.std)[:, None, None]
    inside = (start > 0.01) & (start < 0.99)
    torch.testing.assert_close(moved[0][inside], (moved[1] * std**2)[inside], atol=2e-7, rtol=5e-2)


def test_a_guide_adds_its_own_loss_of_synthetic_images(tiny):
    """weight · trust · mean cross-entropy of each class under the judge, against a plain loop."""
    method = method_of(tiny, 2)
    guided = dataclasses.replace(method, matching=dataclasses.replace(method.matching, guide=CrossEntropy(0.3)))
    net = FlatNet(make_net(NET, tiny.shape, 3))
    pixels = method.tiles.encode(method.init(tiny, method.tiles.count(2, tiny.shape), 0, CPU))
    steps = [Step(m, tiny, net, pixels, 0, CPU) for m in (method, guided)]
    for step in steps:
        step.refill(0)
        step.pool.draw(0)
    plain, with_guide = (s.loss(s.lanes, s.real_index[0], s.syn_index[0], s.augmentation[0]) for s in steps)
    parameters = Parameters.unpacked(steps[0].augmentation[0])
    seen = method.matching.augment.apply(steps[0].synthetic(steps[0].lanes), parameters)
    for c in range(3):
        logits = net(steps[0].pool.parameters_flat[None], seen[c][None]).logits[0]
        expected = torch.stack([-logits[k].log_softmax(0)[c] for k in range(len(logits))]).mean()
        torch.testing.assert_close(with_guide[c] - plain[c], 0.3 * expected, atol=1e-5, rtol=1e-4)
    batch = Batch(seen, torch.arange(3)[:, None].expand(3, seen.shape[1]))
    flat, judge = steps[0].pool.parameters_flat, torch.zeros_like(steps[0].pool.parameters_flat)
    doubtful = CrossEntropy(1.0)(net, Eyes(flat, trained=judge, trust=torch.tensor(0.5)), batch, torch.float32)
    torch.testing.assert_close(doubtful, torch.full((3,), 0.5 * math.log(3)))  # a network of zeros knows nothing
    with pytest.raises(M3DError, match=r"-1.*allowed"):
        CrossEntropy(-1)


class Scaled(MMD):
    """A linear-kernel MMD with a learned scale: an objective with something of its own to learn."""

    def __init__(self):
        super().__init__(Linear())
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.player = Descent(lr=1e-3, milestones=(2,), gamma=0.1)

    def forward(self, goal, seen):
        return self.scale * super().forward(goal, seen)


def test_what_an_objective_learns_is_moved_by_its_own_player(tiny):
    method = method_of(tiny, 2)
    matching = dataclasses.replace(method.matching, objective=Scaled(), steps=4, player=Descent(1e-3))
    step = Step(dataclasses.replace(method, matching=matching), tiny, FlatNet(make_net(NET, tiny.shape, 3)),
                method.tiles.encode(method.init(tiny, method.tiles.count(2, tiny.shape), 0, CPU)), 0, CPU)  # fmt: skip
    step.refill(0)
    step.pool.draw(0)
    values, losses = [1.0], []
    for _ in range(4):
        step.advance()
        values.append(step.objective.scale.item())
        losses.append(step.losses[len(losses)].sum().item())
    rates = [1e-3, 1e-3, 1e-4, 1e-4]
    for k in range(4):  # d loss / d scale = loss / scale
        assert values[k + 1] == pytest.approx(values[k] - rates[k] * losses[k] / values[k], rel=1e-5)
    assert matching.objective.scale.item() == 1.0  # the record itself has not moved
    assert {"objective.scale", "_players.1.velocity", "_players.1.taken"} <= set(step.state_dict())


def test_at_most_batch_syn_max_images_enter_a_step(tiny):
    counts = []

    class Spy:
        def __call__(self, net, eyes, batch: Batch, dtype):
            from m3d.probes import Forward

            counts.append(batch.images.shape[1])
            return Forward()(net, eyes, batch, dtype)

    method = method_of(tiny, 3, batch_syn_max=5)
    method = dataclasses.replace(method, matching=dataclasses.replace(method.matching, probe=Spy()))
    condense(method, tiny, FlatNet(make_net(NET, tiny.shape, 3)), 3, 0, CPU)
    assert set(counts[0::2]) == {4} and set(counts[1::2]) == {5}  # real, then synthetic: 5 of 12


def test_which_synthetic_images_enter_is_drawn_anew(tiny):
    """With room for 5 of 12, every decoded image enters now and then, and steps differ."""
    method = method_of(tiny, 3, batch_syn_max=5)
    net = FlatNet(make_net(NET, tiny.shape, 3))
    step = Step(method, tiny, net, method.tiles.encode(method.init(tiny, 12, 0, CPU)), 0, CPU)
    step.refill(0)
    assert step.syn_index.shape == (BLOCK, 3, 5)
    for c in range(3):
        assert set(step.syn_index[:, c].flatten().tolist()) == set(range(12))
        assert all(len(set(row.tolist())) == 5 for row in step.syn_index[:, c])
    assert not torch.equal(step.syn_index[0], step.syn_index[1]) and not torch.equal(
        step.syn_index[0, 0], step.syn_index[0, 1]
    )


def test_the_papers_settings_are_the_defaults():
    for ipc in (1, 10, 50):
        method = make_method("m3d", Task("cifar10", (3, 32, 32), 10, ipc), {})[0]
        m = method.matching
        assert (m.steps, m.pool.every, m.batch_real, m.batch_syn_max) == (10_000, 5, 128, 200)
        assert m.player == Descent(lr=float(ipc), momentum=0.5) and str(m.augment) == "color+crop+cutout"
        assert method.tiles == Tiles(2) and isinstance(m.objective.kernel, Gaussian) and not m.standardised
        assert m.average_from == 0.8  # ours: the paper's text keeps the last images
        assert m.objective.kernel.multiples == (0.25, 0.5, 1.0, 2.0, 4.0) and isinstance(method.init, RandomReal)
    shapes = {(3, 224, 224): (3, 10.0), (1, 28, 28): (2, 10.0), (1, 8, 8): (1, 10 / 64)}
    for shape, (factor, lr) in shapes.items():
        method = make_method("m3d", Task("x", shape, 10, 10), {})[0]
        assert method.tiles == Tiles(factor) and method.matching.player.lr == lr
    for ipc, tiles in (
        (1, Tiles(2, upsample="bicubic")),
        (9, Tiles(2, upsample="bicubic")),
        (10, Tiles(1)),
        (50, Tiles(1)),
    ):  # held-out data
        method, options = make_method("m3d", Task("fashion-mnist", (1, 28, 28), 10, ipc), {})
        assert method.tiles == tiles and options["augment"] == str(method.matching.augment) == "color+crop"
        assert method.matching.player.lr == ipc
    kernels = {"linear": 5.2e-2, "polynomial": 6.5e-5}
    for name, lr in kernels.items():
        player = make_method("m3d", Task("cifar10", (3, 32, 32), 10, 10), {"kernel": name})[0].matching.player
        assert player.lr == pytest.approx(lr)


def test_dms_published_settings_are_its_defaults():
    for mirror, augment in ((True, "color|crop|cutout|flip|scale|rotate"), (False, "color|crop|cutout|scale|rotate")):
        method = make_method("dm", Task("x", (3, 32, 32), 10, 10, mirror), {})[0]
        m = method.matching
        assert (m.steps, m.pool.every, m.batch_real, m.standardised) == (20_000, 1, 256, True)
        assert str(m.augment) == augment and m.player == Descent(lr=1.0, momentum=0.5) and method.tiles == Tiles(1)


def test_equal_images_do_not_move():
    """One image per class: start and target are the same, so there is nothing to gain and nothing happens."""
    from toys import make_dataset

    data = make_dataset(per_class=1)
    start = RandomReal()(data, 1, 0, CPU)
    outcome = run(data, ipc=1, factor=1, steps=20, lr=0.01)
    assert (outcome.pixels - start).abs().mean() < 0.01 and max(outcome.losses) < 1


def test_the_encoder_changes_every_ipm_steps(tiny):
    net = FlatNet(make_net(NET, tiny.shape, 3))
    world = World(net, tiny, None, 0, CPU)
    pool = Fresh(every=3).start(world)
    seen = []
    for step in range(7):
        if pool.due(step):
            pool.draw(step)
        seen.append(pool.parameters_flat.clone())
    assert torch.equal(seen[0], seen[2]) and not torch.equal(seen[2], seen[3]) and torch.equal(seen[3], seen[5])
    other = Fresh(every=3).start(world)
    other.restore(5)
    assert torch.equal(other.parameters_flat, seen[5])


def test_momentum_is_the_librarys_sgd():
    x, reference = torch.ones(3), torch.nn.Parameter(torch.ones(3))
    player, sgd = Descent(0.1, 0.5).start(x), torch.optim.SGD([reference], lr=0.1, momentum=0.5)
    for k in range(4):
        gradient = torch.tensor([1.0, -2.0, 0.5]) * (k + 1)
        player.step(gradient)
        reference.grad = gradient
        sgd.step()
    torch.testing.assert_close(x, reference.detach())


def test_coresets_are_methods_without_steps(tiny):
    method = make_method("random", Task("tiny", tiny.shape, 3, 2), {})[0]
    outcome = condense(method, tiny, FlatNet(make_net(NET, tiny.shape, 3)), 2, 0, CPU)
    assert outcome.losses == [] and method.steps == 0
    for c in range(3):
        own = tiny.train.images[int(tiny.train.start[c]) :][:12].float() / 255
        for picture in outcome.pixels[c]:
            assert (own == picture).flatten(1).all(1).any()


def test_a_class_smaller_than_the_batch_is_read_in_passes():
    from toys import make_dataset

    data = make_dataset(per_class=5)
    index = data.train.deck(0, torch.arange(2), 8)
    for c in range(3):
        seen = index[:, c].flatten()
        assert torch.equal(seen[:5].sort().values, torch.arange(5))
        assert torch.equal(seen[5:10].sort().values, torch.arange(5))
    assert isinstance(data.train, ClassData)
    assert len(run(data, ipc=1, batch_real=8).losses) == 6
