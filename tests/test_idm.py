"""IDM: the queue of learning networks and the loss against written-out ones, and exact resumption."""

import dataclasses
import signal

import pytest
import torch
from torch.nn import functional

import m3d
from m3d.earlier import completed
from m3d.engine import condense
from m3d.errors import Interrupted, M3DError
from m3d.evaluation import make_protocol
from m3d.kernels import Gaussian
from m3d.methods import Task, make_method
from m3d.methods.idm import class_by_class, published
from m3d.nets import FlatNet, make_net
from m3d.pools import World
from m3d.pools.queue import Queue
from m3d.rng import Purpose
from m3d.run_folder import RunFolder
from m3d.runtime import Runtime
from m3d.step import Step
from m3d.train import Recipe
from m3d.watch import Watch

CPU = Runtime.choose("cpu")
NET = "convnet2:width=4"
RECIPE = Recipe(epochs=1, batch=8, lr=0.01)


def live(data, **settings):
    net = FlatNet(make_net(NET, data.shape, 3))
    return Queue(RECIPE, **settings).start(World(net, data, None, 0, CPU))


def random_network(pool, number):
    return pool.net.fresh(0, Purpose.ENCODER, torch.tensor([number]), torch.tensor([0]))[0]


def test_networks_enter_one_by_one_and_the_oldest_leaves(tiny):
    """Three at first, one more before steps 0, 2, 4, …; room for five."""
    pool = live(tiny, every=2, capacity=5)
    numbers = []
    for step in range(9):
        pool.momenta.fill_(1.0)
        pool.draw(step)
        last = 3 + step // 2  # the newest network's number
        present = set(range(max(0, last - 4), last + 1))
        for number in present:
            assert torch.equal(pool.networks[number % 5], random_network(pool, number))
        if step % 2 == 0:  # a new network starts without momentum
            assert pool.momenta[last % 5].abs().sum() == 0
        assert pool.momenta[(last - 1) % 5].min() == (0 if step == 0 else 1)
        (served,) = [n for n in present if torch.equal(pool.parameters_flat, random_network(pool, n))]
        numbers.append(served)
    assert len(set(numbers)) > 2


def test_who_serves_and_who_learns_is_drawn_evenly_from_those_present(tiny):
    pool = live(tiny, every=1000, capacity=6)
    serves = torch.zeros(6)
    learn = torch.zeros(6)
    together = 0
    for step in range(900):
        (row,) = pool._rows(step, 0, 1)
        rows = pool._rows(step, 1, 2)
        assert len(set(rows)) == 2
        serves[row] += 1
        learn[rows] += 1
        together += row in rows
    assert serves[4:].sum() == learn[4:].sum() == 0  # four networks are present
    assert (serves[:4] - 225).abs().max() < 45 and (learn[:4] - 450).abs().max() < 60
    assert abs(together - 450) < 60  # independent of each other


def test_learning_is_sgd_on_unaugmented_real_images(tiny):
    """Two networks, three steps of eight images, twice: against a written-out loop with the trainer's own order."""
    pool = live(tiny, every=100, capacity=3, initial=1, train_steps=3, recount=0)
    pool.draw(0)
    networks, momenta = pool.networks.clone(), torch.zeros_like(pool.networks)
    right, asked = [0, 0], [0, 0]
    pixels = tiny.train.images.float() / 255
    images = (pixels - torch.tensor(tiny.mean)[:, None, None]) / torch.tensor(tiny.std)[:, None, None]
    labels = tiny.train.labels()
    for step in range(2):
        pool.age(step)
        rows = pool._rows(step, 1, 2)
        assert sorted(rows) == [0, 1]
        for place, row in enumerate(rows):
            for k in range(3):
                chosen = pool.trainer.batches.index[3 * step + k, place]
                assert len(chosen.unique()) == 8
                flat = networks[row].clone().requires_grad_()
                logits = pool.net(flat[None], images[chosen][None]).logits[0]
                right[row] += int((logits.argmax(1) == labels[chosen]).sum())
                asked[row] += 8
                (gradient,) = torch.autograd.grad(functional.cross_entropy(logits, labels[chosen]), flat)
                momenta[row] = 0.9 * momenta[row] + gradient + 5e-4 * networks[row]
                networks[row] -= 0.01 * momenta[row]
    torch.testing.assert_close(pool.networks, networks, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(pool.momenta, momenta, atol=1e-5, rtol=1e-4)
    assert pool.right.tolist() == [*right, 0] and pool.asked.tolist() == [*asked, 0] == [48, 48, 0]
    assert 0 < right[0] < 48


def test_trust_is_the_training_accuracy_in_percent(tiny):
    pool = live(tiny, every=100, capacity=4, train_steps=2, recount=6)
    storage = [t.data_ptr() for t in (pool.eyes().flat, pool.eyes().trust)]
    trusts = []
    for step in range(7):
        pool.draw(step)
        (row,) = pool._rows(step, 0, 1)
        counted = int(pool.asked[row])
        assert float(pool.eyes().trust) == pytest.approx(100 * int(pool.right[row]) / counted if counted else 0.0)
        assert torch.equal(pool.eyes().flat, pool.networks[row])
        trusts.append(float(pool.eyes().trust))
        if step < 6:
            pool.age(step)
    assert trusts[0] == 0 and max(trusts[1:6]) > 0
    assert int(pool.asked.sum()) == 0 and trusts[6] == 0  # counted anew from step 6 on
    assert [t.data_ptr() for t in (pool.eyes().flat, pool.eyes().trust)] == storage  # a recorded step reads these


def test_networks_learn_while_they_wait(tiny):
    pool = live(tiny, every=100, capacity=4, recount=0)
    for step in range(30):
        pool.draw(step)
        pool.age(step)
    early, late = (float(100 * pool.right.sum() / pool.asked.sum()), None)
    pool.right.zero_()
    pool.asked.zero_()
    for step in range(30, 40):
        pool.age(step)
    late = float(100 * pool.right.sum() / pool.asked.sum())
    assert late > early > 40


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"capacity": 1}, "capacity=1"),
        ({"initial": 0}, "initial=0"),
        ({"train_steps": 0}, "train_steps=0"),
        ({"recount": -1}, "recount=-1"),
    ],
)
def test_bad_queues_are_refused(settings, message):
    with pytest.raises(M3DError, match=message):
        Queue(RECIPE, **settings)


def step_of(data, **options):
    method = make_method("idm", Task("tiny", data.shape, 3, 2), {"steps": 4, "batch_real": 5, **options})[0]
    pixels = method.tiles.encode(method.init(data, method.tiles.count(2, data.shape), 0, CPU))
    step = Step(method, data, FlatNet(make_net(NET, data.shape, 3)), pixels, 0, CPU)
    step.refill(0)
    return step


@pytest.mark.parametrize("objective", ["dm", "m3d"])
def test_the_loss_is_matching_plus_what_the_network_is_trusted_to_say(tiny, objective):
    step = step_of(tiny, augment="none", ce_weight=0.3, objective=objective, m3d_weight=70.0, train_steps=5)
    for k in range(3):  # until the network that serves has learned
        step.pool.draw(k)
        step.pool.age(k)
    step.pool.draw(3)
    trust = float(step.pool.trust)
    assert trust > 0
    draws = (step.lanes, step.real_index[3], step.syn_index[3], step.augmentation[3])
    value = step.loss(*draws)
    (gradient,) = torch.autograd.grad(value.sum(), step.synthetic.latent)
    latent = step.synthetic.latent.detach().clone().requires_grad_()
    total = torch.zeros(())
    flat = step.pool.parameters_flat[None]
    for c in range(3):
        real = step.synthetic.normalise(tiny.train.take(step.real_index[3])[c])
        std, mean = (torch.tensor(v)[:, None, None] for v in (tiny.std, tiny.mean))
        shown = step.synthetic.normalise(step.synthetic.tiles.decode(latent[c] * std + mean))
        a, b = step.net(flat, real[None]), step.net(flat, shown[None])
        if objective == "dm":
            matching = (a.features[0].mean(0) - b.features[0].mean(0)).square().sum()
        else:
            matching = 70 * Gaussian().mmd2(a.features[0], b.features[0])
        judged = functional.cross_entropy(b.logits[0], torch.full((8,), c))
        expected = matching + 0.3 * trust * judged
        torch.testing.assert_close(value[c], expected, atol=1e-4, rtol=1e-4)
        total = total + expected
    torch.testing.assert_close(gradient, torch.autograd.grad(total, latent)[0], atol=1e-3, rtol=1e-3)


def test_one_step_moves_as_far_as_turns_through_a_shared_momentum():
    """Ten classes pulled to their targets, class after class by one SGD with momentum, against one step for all.

    Positions are compared when a class comes to its turn, where its gradient is taken.
    """
    classes, lr, momentum = 10, 0.05, 0.5
    target = torch.linspace(-1, 1, classes, dtype=torch.float64)
    x, velocity = torch.zeros_like(target), torch.zeros_like(target)
    mine = torch.zeros_like(target)
    rate = class_by_class(lr, momentum, classes)
    for _ in range(12):
        met = torch.zeros_like(target)
        for c in range(classes):
            met[c] = x[c]
            gradient = torch.zeros_like(target)
            gradient[c] = x[c] - target[c]
            velocity = momentum * velocity + gradient
            x = x - lr * velocity
        torch.testing.assert_close(met, mine, atol=2e-3, rtol=0)
        mine = mine - rate * (mine - target)
    assert rate == pytest.approx(0.1, rel=1e-3) and (mine - target).abs().max() < 0.35
    assert class_by_class(0.2, 0.0, 10) == 0.2
    with pytest.raises(M3DError, match=r"momentum=1\.0"):
        class_by_class(0.2, 1.0, 10)


def test_published_settings():
    def task(shape, classes, ipc, smallest=None):
        return Task("any", shape, classes, ipc, True, smallest)

    small, tiny_images, large = (3, 32, 32), (3, 64, 64), (3, 224, 224)
    assert [published(task(small, 10, i)).ce_weight for i in (1, 10, 50)] == [0.5, 0.5, 0.1]
    assert [published(task(small, 100, i)).ce_weight for i in (1, 10, 50)] == [0.5, 0.1, 0.1]
    assert [published(task(tiny_images, 200, i)).ce_weight for i in (1, 10, 50)] == [0.5, 0.5, 0.8]
    assert [published(task(large, 100, i)).ce_weight for i in (1, 10)] == [3.0, 3.0]
    assert [published(task(small, 100, i)).train_steps for i in (1, 10, 50)] == [10, 50, 10]
    assert [published(task(tiny_images, 200, i)).train_steps for i in (1, 10, 50)] == [10, 10, 50]
    assert [published(task(small, 10, i)).push_every for i in (1, 10, 50)] == [5, 30, 30]
    assert [published(task(small, 10, i)).recount for i in (1, 10, 50)] == [100, 100, 500]
    assert [published(task(tiny_images, 200, i)).recount for i in (1, 10, 50)] == [100, 500, 1000]
    assert [published(task(large, 100, i)).recount for i in (1, 10, 50)] == [200, 1000, 500]
    photos, said = make_method("idm", task(large, 10, 1), {})
    assert photos.matching.pool.recipe.batch == said["train_batch"] == 128
    assert completed({}, said) == {"train_batch": 256}  # of runs that were begun before there was the option
    assert published(task(small, 10, 1)).batch_real == 5000 and published(task(small, 10, 10)).batch_real == 256
    assert (
        published(task(small, 100, 1, 500)).batch_real == 500 and published(task(small, 10, 1, 9000)).batch_real == 5000
    )
    assert (
        published(task(large, 100, 1))[:4] == ("convnet6", 3.0, 50, 50) and published(task(large, 100, 50)).queue == 100
    )
    method = make_method("idm", task(small, 10, 10), {})[0]
    assert (method.steps, method.tiles.factor, method.tiles.shrink, method.network) == (
        20_000,
        2,
        "bilinear",
        "convnet3",
    )
    assert (method.matching.pool.capacity, method.matching.pool.initial, method.matching.pool.learners) == (100, 3, 2)
    recipe = method.matching.pool.recipe
    assert (recipe.lr, recipe.momentum, recipe.weight_decay, recipe.batch) == (0.01, 0.9, 5e-4, 256)
    assert str(recipe.augment) == "none" and recipe.cutmix == 0 and method.matching.standardised
    assert method.matching.player.lr == pytest.approx(0.4, rel=2e-3) and method.matching.player.momentum == 0
    assert str(method.matching.augment) == "color|crop|cutout|flip|scale|rotate"
    quiet = make_method("idm", Task("any", small, 10, 10, False), {})[0]
    assert "flip" not in str(quiet.matching.augment)


def test_options_reach_the_queue_and_m3d_changes_the_loss_alone():
    task = Task("any", (3, 32, 32), 10, 10)
    options = {"push_every": 7, "queue": 9, "train_steps": 4, "recount": 0, "ce_weight": 0.2, "batch_real": 8}
    options["train_batch"] = 16
    own, swapped = (make_method("idm", task, {**options, "objective": o})[0] for o in ("dm", "m3d"))
    pool = own.matching.pool
    assert (pool.every, pool.capacity, pool.train_steps, pool.recount) == (7, 9, 4, 0)
    assert own.matching.guide.weight == 0.2 and own.matching.batch_real == 8 and pool.recipe.batch == 16
    assert isinstance(swapped.matching.objective.terms[0].kernel, Gaussian)
    assert swapped.matching.objective.weights == [200.0]
    same = dataclasses.replace(swapped.matching, objective=own.matching.objective)
    assert dataclasses.replace(swapped, matching=same) == own


def test_at_one_image_the_whole_class_is_read(tiny):
    """Twelve images a class: every step reads each of them once."""
    method = make_method("idm", Task("tiny", tiny.shape, 3, 1, True, 12), {"steps": 2})[0]
    assert method.matching.batch_real == 12
    pixels = method.tiles.encode(method.init(tiny, 4, 0, CPU))
    step = Step(method, tiny, FlatNet(make_net(NET, tiny.shape, 3)), pixels, 0, CPU)
    step.refill(0)
    assert torch.equal(step.real_index[0].sort().values, torch.arange(12).expand(3, 12))
    assert m3d.condense(tiny, 1, "idm", steps=1, net=NET).manifest["options"]["batch_real"] == 12


@pytest.mark.parametrize(("objective", "stop_at"), [("dm", 1), ("dm", 4), ("dm", 7), ("m3d", 6)])
def test_resume_is_bit_identical(tiny, tmp_path, monkeypatch, objective, stop_at):
    """Networks enter before steps 0, 3, 6, … and leave from step 6 on; the count begins anew at 5."""
    monkeypatch.setattr("m3d.engine._REPORT_SECONDS", 0.0)
    options = {"steps": 9, "batch_real": 4, "push_every": 3, "queue": 4, "train_steps": 2, "recount": 5, "lr": 0.01}
    task = Task("tiny", tiny.shape, 3, 2)
    method = make_method("idm", task, {**options, "objective": objective})[0]
    net = FlatNet(make_net(NET, tiny.shape, 3))
    whole, asked = condense(method, tiny, net, 2, 0, CPU), []

    def stop(progress):
        if progress.step == stop_at and not asked:
            asked.append(1)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        condense(method, tiny, net, 2, 0, CPU, Watch(report=stop, folder=RunFolder(tmp_path)))
    resumed = condense(method, tiny, net, 2, 0, CPU, Watch(folder=RunFolder(tmp_path)))
    assert torch.equal(resumed.pixels, whole.pixels) and resumed.losses == whole.losses


def test_the_images_come_to_be_recognised(tiny):
    """After 60 steps a network that the run never saw tells their classes apart, which it cannot at the start."""
    data = tiny
    options = {"steps": 60, "batch_real": 12, "augment": "none", "init": "noise", "push_every": 10, "lr": 0.02}
    method = make_method("idm", Task("tiny", data.shape, 3, 1), options)[0]
    net = FlatNet(make_net("convnet2:width=8", data.shape, 3))
    made = condense(method, data, net, 1, 0, CPU)
    judge = Queue(RECIPE, capacity=2, initial=1, train_steps=100).start(World(net, data, None, 7, CPU))
    judge.draw(0)
    judge.age(0)
    mean, std = (torch.tensor(v)[:, None, None] for v in (data.mean, data.std))

    def judged(pixels):
        shown = (method.tiles.decode(pixels) - mean) / std
        logits = net(judge.networks[:1], shown.flatten(0, 1)[None]).logits[0]
        return float(functional.cross_entropy(logits, torch.arange(3).repeat_interleave(4)))

    start = method.tiles.encode(method.init(data, 4, 0, CPU))
    assert judged(made.pixels) < 0.5 * judged(start)


def test_protocol():
    protocol, dsa = make_protocol("idm"), make_protocol("dsa")
    assert (protocol.name, protocol.recipe.epochs, protocol.recipe.batch) == ("idm", 1000, 256)
    assert "cutout" in str(protocol.recipe.augment) and protocol.recipe.cutmix == 0
    assert protocol.recipe == dsa.recipe
