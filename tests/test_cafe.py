"""CAFE: its objectives against loops in float64, its two dynamic loops against written-out ones, and its settings."""

import signal

import pytest
import torch
from torch.nn import functional
from toys import make_dataset

from m3d.augment import Augment
from m3d.engine import condense
from m3d.errors import Interrupted, M3DError
from m3d.evaluation import make_protocol
from m3d.methods import Task, make_method
from m3d.methods.cafe import milestones
from m3d.nets import FlatNet, make_net
from m3d.objectives import Discriminate, LayerMeans
from m3d.pools import World
from m3d.pools.watched import Watched, _WatchedPool
from m3d.probes import Forward
from m3d.rng import Purpose
from m3d.run_folder import RunFolder
from m3d.runtime import Runtime
from m3d.select import Noise, RandomReal
from m3d.step import Step
from m3d.synth import Synthetic
from m3d.tiles import Tiles
from m3d.types import Batch, Eyes, Seen
from m3d.watch import Watch

CPU = Runtime.choose("cpu")
NET = "convnet2:width=4"


def readings(depth, classes=3):
    """(network, real images [C, 5, ...], their reading, synthetic images [C, 2, ...] that want a gradient, theirs)."""
    net = FlatNet(make_net(f"convnet{depth}:width=4", (3, 8, 8), classes))
    flat = net.fresh(0, Purpose.ENCODER, torch.tensor([0]), torch.tensor([0]))[0].double()
    generator = torch.Generator().manual_seed(0)
    real, own = (torch.randn(classes, n, 3, 8, 8, generator=generator, dtype=torch.float64) for n in (5, 2))
    own.requires_grad_()
    module = make_net(f"convnet{depth}:width=4", (3, 8, 8), classes).double()
    module.load_state_dict({name: v[0] for name, v in net.unflatten(flat[None]).items()})
    labels = torch.arange(classes)[:, None]
    goal, seen = (
        Forward(maps=True)(net, Eyes(flat), Batch(x, labels.expand(x.shape[:2])), torch.float64) for x in (real, own)
    )
    return module, real, goal, own, seen


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_layer_means_against_one_class_and_layer_at_a_time(depth):
    module, real, goal, own, seen = readings(depth)
    value = LayerMeans(early=0.1, last=1.0, features=2.0)(goal, seen)
    (gradient,) = torch.autograd.grad(value.sum(), own)
    assert value.shape == (3,)
    for c in range(3):
        images = own[c].detach().clone().requires_grad_()
        theirs, mine = module(real[c]), module(images)
        expected = torch.zeros((), dtype=torch.float64)
        for k in range(depth):
            mean_gap = sum(theirs.maps[k]) / 5 - sum(mine.maps[k]) / 2
            expected = expected + (1.0 if k == depth - 1 else 0.1) * (mean_gap**2).sum()
        # The last block's maps, pooled, and the same numbers flattened: one term each.
        pooled = [functional.avg_pool2d(seen_by.maps[-1], 2) for seen_by in (theirs, mine)]
        expected = expected + ((sum(pooled[0]) / 5 - sum(pooled[1]) / 2) ** 2).sum()
        expected = expected + ((sum(theirs.features) / 5 - sum(mine.features) / 2) ** 2).sum()
        torch.testing.assert_close(value[c], expected)
        torch.testing.assert_close(gradient[c], torch.autograd.grad(expected, images)[0])


def test_layer_means_are_zero_on_equal_readings_and_need_maps():
    _, _, goal, _, seen = readings(2)
    objective = LayerMeans(early=0.1, last=1.0, features=2.0)
    assert not objective.across_classes and torch.equal(objective(goal, goal), torch.zeros(3, dtype=torch.float64))
    with pytest.raises(M3DError, match="Forward\\(maps=True\\)"):
        objective(goal._replace(maps=()), seen._replace(maps=()))
    with pytest.raises(M3DError, match=r"early=-0\.1"):
        LayerMeans(early=-0.1, last=1.0, features=2.0)


def test_discrimination_against_one_image_at_a_time():
    """The value of every class, and the gradient, which reaches all classes' images, in float64."""
    module, real, goal, own, seen = readings(2)
    value = Discriminate()(goal, seen)
    assert value.shape == (3,) and Discriminate.across_classes
    images = own.detach().clone().requires_grad_()
    centres = [module(images[c]).features.mean(0) for c in range(3)]
    expected = []
    for c in range(3):
        total = torch.zeros((), dtype=torch.float64)
        for image in real[c]:
            scores = torch.stack([module(image[None]).features[0].detach() @ centre for centre in centres]).exp()
            total = total - torch.log(scores[c] / scores.sum())
        expected.append(total)
    torch.testing.assert_close(value, torch.stack(expected))
    (mine,) = torch.autograd.grad(value[1], own)
    torch.testing.assert_close(mine, torch.autograd.grad(expected[1], images)[0])
    assert all(mine[c].abs().sum() > 0 for c in range(3))


def test_discrimination_rewards_centres_that_classify():
    right = torch.eye(3)[:, None] * 4
    real = Seen((), right.expand(3, 5, 3), right)
    good, wrong = (Seen((), centres, centres) for centres in (right, right.roll(1, 0)))
    assert (Discriminate()(real, good) < 1e-4).all() and (Discriminate()(real, wrong) > 50).all()


def start(data, **options):
    """(pool, its synthetic images): two images per class."""
    net = FlatNet(make_net(NET, data.shape, data.classes))
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(data.classes, 2, *data.shape, generator=generator)
    synthetic = Synthetic(pixels, Tiles(1), data.normalise())
    settings = {"outer_stop": 0.04, "inner_stop": 0.03, "outer_max": 100, "inner_max": 50, "queries": 8} | options
    pool = Watched(**settings).start(World(net, data, synthetic, 0, CPU))
    return pool, synthetic


def scripted(pool, after_steps, after_epochs):
    """Put given accuracies in place of measured ones, and count epochs instead of training."""
    epochs = []

    def ask():
        source = after_epochs if epochs and epochs[-1] else after_steps
        pool.accuracy.fill_(next(source))

    def run(until):
        epochs[-1] += 1

    pool._ask, pool.trainer.run = ask, run

    def age(step):
        epochs.append(0)
        pool.age(step)
        return epochs[-1]

    return age


def test_a_network_is_replaced_when_its_accuracies_settle(tiny):
    """A window of 4, of accuracies that floats hold exactly: four in a row that span less than 1/16 end the network."""
    pool, _ = start(tiny, window=4, inner_max=1, outer_stop=0.0625)
    after_steps = [0.125, 0.3125, 0.4375, 0.375, 0.4375, 0.40625, 0.25, 0.25, 0.25, 0.3, 0.25]
    age = scripted(pool, iter(after_steps), iter([0.0] * 20))
    assert pool.due(0)
    pool.draw(0)
    first, due = pool.parameters_flat.clone(), []
    for step in range(6):
        trained = age(step)
        due.append(pool.due(step + 1))
        assert trained == (0 if due[-1] else 1)  # a network that is replaced is not trained any more
    assert due == [False] * 6  # the last four span 1/16, which is not less than 1/16
    for step in range(6, 10):
        age(step)
        due.append(pool.due(step + 1))
    assert due[6:] == [False, False, False, True]
    pool.draw(10)
    assert not torch.equal(pool.parameters_flat, first) and int(pool.taken) == 0
    age(10)
    assert not pool.due(11)  # the new network begins with an empty window


def test_training_ends_when_the_accuracy_has_moved(tiny):
    """A window of 3: a spread of exactly 1/16 is not more than that; one of 1/8 at the sixth epoch ends training."""
    pool, _ = start(tiny, window=3, inner_max=9, inner_stop=0.0625)
    after_epochs = iter([0.5, 0.5, 0.5, 0.5625, 0.5, 0.4375, 0.1, 0.2, 0.2, *[0.3] * 9])
    age = scripted(pool, iter([0.1, 0.2, 0.3]), after_epochs)
    pool.draw(0)
    assert age(0) == 6
    assert age(1) == 3  # no decision before the window is full, though two accuracies differ already
    assert age(2) == 9  # never moves: the bound


def test_both_loops_are_bounded(tiny):
    pool, _ = start(tiny, outer_stop=0.0, inner_stop=1.0, outer_max=3, inner_max=4, window=2)
    fresh = []
    for step in range(7):
        if pool.due(step):
            pool.draw(step)
            fresh.append(step)
        pool.age(step)
        assert int(pool.slot) == (1 if pool.due(step + 1) else 5)  # accuracies measured
    assert fresh == [0, 3, 6]


def test_training_and_measuring_against_written_out_loops(tiny):
    """Windows as lists that lose their oldest member, accuracies counted image by image, plain SGD on all images."""
    pool, synthetic = start(tiny, window=3, inner_max=6, outer_stop=0.2, inner_stop=0.05)
    net, images = pool.trainer.net, synthetic(torch.arange(3)).detach().flatten(0, 1)
    labels, everything = torch.arange(3).repeat_interleave(2), synthetic.normalise(tiny.train.images.float() / 255)
    truth = tiny.train.labels()

    def accuracy(flat, chosen):  # chosen [C, q]
        places = (tiny.train.start[:, None] + chosen).flatten()
        right = [int(net(flat[None], everything[p][None, None]).logits.argmax()) == int(truth[p]) for p in places]
        return sum(right) / len(right)

    replaced, epochs, outer, flat = [], [], [], None
    for step in range(12):
        if pool.due(step):
            pool.draw(step)
            outer, flat = [], pool.parameters_flat.clone()
        pool.age(step)
        numbers = torch.arange(step * 7, step * 7 + 7)
        queries = tiny.train.deck(0, numbers, 8, Purpose.QUERY)
        outer.append(accuracy(flat, queries[0]))
        if len(outer) == 3 and max(outer) - min(outer) < 0.2:
            replaced.append(step)
            assert pool.due(step + 1)
            continue
        outer = outer[-2:]
        inner, count = [], 0
        while count < 6:
            flat = flat.requires_grad_()
            loss = functional.cross_entropy(net(flat[None], images[None]).logits[0], labels)
            flat = (flat - 0.01 * torch.autograd.grad(loss, flat)[0]).detach()
            count += 1
            inner.append(accuracy(flat, queries[count]))
            if len(inner) == 3:
                if max(inner) - min(inner) > 0.05:
                    break
                inner.pop(0)
        epochs.append(count)
        assert int(pool.slot) - 1 == count and not pool.due(step + 1)
        torch.testing.assert_close(pool.parameters_flat, flat, atol=1e-6, rtol=1e-5)
    assert replaced and len(set(epochs)) > 1  # both rules decided something


def test_the_images_are_those_of_now_and_the_queries_are_fresh(tiny):
    pool, synthetic = start(tiny, inner_max=2, queries=4)
    pool.draw(0)
    with torch.no_grad():
        synthetic.latent.mul_(0.5)
    asked = []
    for step in range(2):
        pool.age(step)
        asked.append(pool.index.clone())
        assert torch.equal(pool.trainer.images.pixels, synthetic.decoded().detach().flatten(0, 1))
    order = torch.cat(asked).movedim(1, 0).flatten(1)  # [C, 24] of 12 images: two passes, each image once in each
    for row in order:
        assert torch.equal(row[:12].sort().values, torch.arange(12)) and row[12:].unique().numel() == 12
    matched = tiny.train.deck(0, torch.arange(6), 4).movedim(1, 0).flatten(1)
    assert not torch.equal(order, matched)  # drawn independently of the images that are matched


def test_more_queries_than_images(tiny):
    pool, _ = start(tiny, inner_max=1, queries=40)
    pool.draw(0)
    pool.age(0)
    assert pool.index.max() < 12 and len(pool.asked) == 120 and 0 <= float(pool.accuracy) <= 1


@pytest.mark.parametrize(("name", "stop"), [("cafe", 2), ("cafe", 5), ("cafe", 6), ("cafe", 8), ("cafe-dsa", 5)])
def test_a_stopped_run_resumes_bit_identically(tiny, tmp_path, monkeypatch, name, stop):
    monkeypatch.setattr("m3d.engine._REPORT_SECONDS", 0.0)
    drawn, draw = [], _WatchedPool.draw
    monkeypatch.setattr(_WatchedPool, "draw", lambda pool, step: (drawn.append(step), draw(pool, step))[1])
    options = {"steps": 10, "batch_real": 4, "outer_max": 6, "inner_max": 4}
    if name == "cafe":
        options |= {"window": 3, "outer_stop": 0.1, "inner_stop": 0.02, "queries": 12}
    method = make_method(name, Task("tiny", tiny.shape, 3, 2), options)[0]
    net = FlatNet(make_net(NET, tiny.shape, 3))
    whole = condense(method, tiny, net, 2, 0, CPU)
    before, folder, asked = list(drawn), RunFolder(tmp_path), []
    assert len(before) > 1 and before[1] < 10  # networks do change during the run

    def ask_to_stop(progress):
        if progress.step == stop and not asked:
            asked.append(1)
            signal.raise_signal(signal.SIGINT)

    drawn.clear()
    with pytest.raises(Interrupted):
        condense(method, tiny, net, 2, 0, CPU, Watch(report=ask_to_stop, folder=folder))
    resumed = condense(method, tiny, net, 2, 0, CPU, Watch(folder=folder))
    assert drawn == before
    assert torch.equal(resumed.pixels, whole.pixels) and resumed.losses == whole.losses


def test_all_a_pool_carries_between_steps_is_saved(tiny):
    pool, _ = start(tiny)
    assert set(pool.state_dict()) == {"parameters_flat", "accuracies", "taken"}


@pytest.mark.parametrize(
    ("classes", "shape", "net"),
    [
        (2, (1, 28, 28), "convnet3:width=4"),
        (5, (3, 12, 20), "convnet1:width=4"),
        (13, (3, 8, 8), "convnet2:width=4,norm=none"),
        (3, (3, 16, 16), "resnet10:width=4,norm=batch"),
    ],
)
def test_any_number_of_classes_any_size_any_network(classes, shape, net):
    data = make_dataset(classes, 5, shape)
    method = make_method("cafe", Task("tiny", shape, classes, 1), {"steps": 3, "batch_real": 4, "inner_max": 2})[0]
    outcome = condense(method, data, FlatNet(make_net(net, shape, classes)), 1, 0, CPU)
    assert outcome.pixels.shape == (classes, 1, *shape) and len(outcome.losses) == 3


def test_the_loss_falls(tiny):
    method = make_method("cafe", Task("tiny", tiny.shape, 3, 1), {"steps": 60, "batch_real": 8, "inner_max": 3})[0]
    losses = condense(method, tiny, FlatNet(make_net(NET, tiny.shape, 3)), 1, 0, CPU).losses
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


def test_published_settings(tiny):
    cafe, dsa = (make_method(n, Task("cifar10", (3, 32, 32), 10, 10), {})[0] for n in ("cafe", "cafe-dsa"))
    for method in (cafe, dsa):
        player, pool = method.matching.player, method.matching.pool
        assert (player.lr, player.momentum, player.gamma) == (0.1, 0.5, 0.5)
        assert player.milestones == (12_000, 16_000, 18_000) and method.steps == 20_000
        assert (method.matching.batch_real, method.matching.batch_syn_max) == (256, 10)
        assert method.matching.standardised
        assert (pool.outer_stop, pool.inner_stop, pool.window, pool.queries) == (0.04, 0.03, 10, 128)
        assert (pool.batch, pool.lr, pool.outer_max, pool.inner_max) == (256, 0.01, 100, 50)
        layers, discrimination = method.matching.objective.terms
        assert method.matching.objective.weights == [1.0, 1.0] and discrimination.weights == [0.01]
        assert (layers.early, layers.last, layers.features) == (0.1, 1.0, 2.0)
    assert cafe.init == Noise() and cafe.matching.augment == cafe.matching.pool.augment == Augment()
    assert dsa.init == RandomReal()
    assert str(dsa.matching.augment) == "color|crop|cutout|flip|scale|rotate" == str(dsa.matching.pool.augment)
    digits = make_method("cafe-dsa", Task("digits", (1, 8, 8), 10, 1, mirror=False), {})[0]
    assert "flip" not in str(digits.matching.augment)
    assert milestones(2000) == (1200, 1600, 1800) and milestones(1) == (1, 1, 1)


@pytest.mark.parametrize("name", ["cafe", "cafe-dsa"])
def test_every_option_arrives(name):
    given = {
        "steps": 100,
        "lr": 0.2,
        "momentum": 0.25,
        "early": 0.3,
        "discriminate": 0.05,
        "outer_stop": 0.2,
        "inner_stop": 0.1,
        "outer_max": 7,
        "inner_max": 8,
        "window": 5,
        "queries": 9,
        "batch_real": 11,
        "augment": "crop",
        "init": "real",
        "bounded": False,
    }
    method, resolved = make_method(name, Task("tiny", (3, 8, 8), 3, 2), given)
    assert resolved == given
    matching = method.matching
    assert (matching.steps, matching.batch_real, method.init) == (100, 11, RandomReal())
    assert (matching.player.lr, matching.player.momentum, matching.player.milestones) == (0.2, 0.25, (60, 80, 90))
    assert matching.objective.terms[0].early == 0.3 and matching.objective.terms[1].weights == [0.05]
    assert matching.augment == Augment(always=("crop",)) and not matching.bounded
    assert matching.pool == Watched(0.2, 0.1, 7, 8, window=5, queries=9, augment=Augment(always=("crop",)))


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("outer_max", 0, "1 and more"),
        ("inner_max", 0, "1 and more"),
        ("window", 1, "2 and more"),
        ("queries", 0, "1 and more"),
        ("outer_stop", -0.1, "from 0 to 1"),
        ("inner_stop", 4.0, "from 0 to 1"),
    ],
)
def test_options_out_of_range_are_refused(name, value, allowed):
    with pytest.raises(M3DError, match=f"{name}={value} is not valid; allowed: .*{allowed}"):
        make_method("cafe", Task("tiny", (3, 8, 8), 3, 2), {name: value})


def test_the_learning_rate_is_halved_at_the_published_shares(tiny):
    """Ten steps, one of them cut out of each stretch: displacement ÷ velocity is the rate."""
    method = make_method("cafe", Task("tiny", tiny.shape, 3, 1), {"steps": 10, "batch_real": 4, "inner_max": 1})[0]
    step = Step(method, tiny, FlatNet(make_net(NET, tiny.shape, 3)), torch.full((3, 1, 3, 8, 8), 0.5), 0, CPU)
    player, target, rates = step.players[0], step.synthetic.latent, []
    for _ in range(10):
        before = target.detach().clone()
        player.step(torch.full_like(before, 1e-3))
        rates.append(float(((before - target.detach()) / player.velocity).mean()))
    assert rates == pytest.approx([0.1] * 6 + [0.05] * 2 + [0.025, 0.0125], rel=1e-3)


def test_the_protocols_are_the_published_ones():
    plain, augmented = make_protocol("cafe").recipe, make_protocol("dsa").recipe
    assert (plain.epochs, plain.batch, plain.lr, plain.augment) == (600, 256, 0.01, Augment())
    assert (augmented.epochs, str(augmented.augment)) == (1000, "color|crop|cutout|flip|scale|rotate")
