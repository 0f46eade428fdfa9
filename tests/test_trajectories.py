"""Trajectory matching against an unrolled loop of plain autograd in float64; recorded experts; the learned rate."""

import signal

import pytest
import torch
from torch.nn import functional

import m3d
from m3d import rng
from m3d.augment import UNIFORMS, Augment
from m3d.batches import Images
from m3d.engine import condense
from m3d.errors import Interrupted, M3DError
from m3d.evaluation import make_protocol
from m3d.methods import Task, make_method
from m3d.methods.mtt import published
from m3d.nets import FlatNet, make_net
from m3d.nets.convnet import ConvNet
from m3d.objectives import EndPoint
from m3d.players import Descent
from m3d.pools import World
from m3d.pools.experts import GROUP, Experts, Trajectories, train_experts
from m3d.run_folder import RunFolder
from m3d.runtime import Runtime
from m3d.step import Step
from m3d.tiles import Tiles
from m3d.train import Recipe, Trainer
from m3d.trained import cache_folder
from m3d.types import Batch, Eyes, Segment
from m3d.unroll import Lessons, Unroll
from m3d.watch import Watch

CPU = Runtime.choose("cpu")
NET = "convnet2:width=4"
DSA = Augment(one_of=("color", "crop", "cutout", "flip", "scale", "rotate"))
TINY = {"syn_steps": 3, "experts": 3, "max_start": 3, "lr": 0.05, "lr_lr": 1e-6, "batch_syn": 4}


def flat_net() -> FlatNet:
    return FlatNet(make_net(NET, (3, 8, 8), 3))


def setting(lessons: Lessons, n=2):
    """(network, where it starts and should end, images [3, n, ...], labels, draws), all float64."""
    net = flat_net()
    start, end = net.fresh(0, rng.Purpose.ENCODER, torch.tensor([0]), torch.tensor([0, 1])).double()
    images = torch.randn(3, n, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.arange(3)[:, None].expand(3, n)
    orders, uniforms = lessons.draw(0, 5, 3 * n, torch.device("cpu"))
    return net, start, end, images, labels, (orders, uniforms.double())


def naive_student(net, start, images, labels, rate, lessons, draws):
    """A plain module, one image augmented at a time, autograd.grad with create_graph, an SGD step written out."""
    module = make_net(NET, (3, 8, 8), 3).double()
    values = {name: v[0].clone().requires_grad_() for name, v in net.unflatten(start[None]).items()}
    flat_images, flat_labels = images.flatten(0, 1), labels.flatten()
    for k, count in enumerate(lessons.sizes(len(flat_images))):
        shown = []
        for j in range(count):
            parameters = DSA.parameters(draws[1][k, j][None], (8, 8))
            shown.append(DSA.apply(flat_images[draws[0][k, j]][None, None], parameters)[0, 0])
        logits = torch.func.functional_call(module, values, (torch.stack(shown),)).logits
        loss = functional.cross_entropy(logits, flat_labels[draws[0][k, :count]])
        gradients = torch.autograd.grad(loss, list(values.values()), create_graph=True)
        values = {name: v - rate * g for (name, v), g in zip(values.items(), gradients, strict=True)}
    return torch.cat([v.flatten() for v in values.values()])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("batch", [None, 4])
def test_the_unrolled_student_and_its_derivatives(recompute, batch):
    """Where it ends, the loss, and the gradients for the images and the rate."""
    lessons = Lessons(4, batch)
    net, start, end, images, labels, draws = setting(lessons)
    probe = Unroll(lessons, 0.3, Descent(0.1), DSA, recompute=recompute).double()
    mine = images.clone().requires_grad_()
    goal = Segment(start, end)
    seen = probe(net, Eyes(start, goal=goal, draws=draws), Batch(mine, labels), torch.float64)
    loss = EndPoint()(goal, seen)
    assert loss.shape == (1,) and torch.equal(seen.start, start)

    theirs, rate = images.clone().requires_grad_(), probe.rate.detach().clone().requires_grad_()
    expected = naive_student(net, start, theirs, labels, rate, lessons, draws)
    torch.testing.assert_close(seen.end, expected)
    naive = ((expected - end) ** 2).sum() / ((start - end) ** 2).sum()
    torch.testing.assert_close(loss[0], naive)
    ours = torch.autograd.grad(loss.sum(), [mine, probe.rate])
    naive_gradients = torch.autograd.grad(naive, [theirs, rate])
    assert all(float(g.abs().max()) > 1e-6 for g in naive_gradients)
    for a, b in zip(ours, naive_gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_derivatives_of_the_rate_and_the_images_equal_eager_ones(tiny, recompute):
    method = make_method("mtt", Task("tiny", tiny.shape, 3, 2), {**TINY, "syn_steps": 2, "recompute": recompute})[0]
    step = Step(method, tiny, flat_net(), torch.rand(3, 2, 3, 8, 8), 0, CPU)
    step.refill(0)
    step.pool.draw(0)
    draws = (step.lanes, step.real_index[0], step.syn_index[0], step.augmentation[0])
    torch._dynamo.reset()
    compiled = torch.compile(step.loss, backend="aot_eager", fullgraph=True, dynamic=False)
    eager = torch.autograd.grad(step.loss(*draws).sum(), step.learned)
    assert len(eager) == 2 and eager[1].shape == ()
    torch.testing.assert_close(torch.autograd.grad(compiled(*draws).sum(), step.learned), eager, atol=1e-5, rtol=1e-4)


def test_recomputing_keeps_no_graph_of_the_inner_steps():
    def names(recompute):
        """Of all nodes that a student's end depends on."""
        lessons = Lessons(3)
        net, start, _, images, labels, draws = setting(lessons)
        probe = Unroll(lessons, 0.1, Descent(0.1), recompute=recompute).double()
        end = probe(net, Eyes(start, draws=draws), Batch(images.requires_grad_(), labels), torch.float64).end
        waiting, seen = [end.grad_fn], {}
        while waiting:
            node = waiting.pop()
            if node is not None and node not in seen:
                seen[node] = node.name()
                waiting += [following for following, _ in node.next_functions]
        return list(seen.values())

    kept, again = names(False), names(True)
    assert sum("Convolution" in name for name in kept) > 6
    assert not any("Convolution" in name for name in again) and again.count("_RecomputedBackward") == 3


def test_the_objective():
    start, end, other = torch.randn(3, 7, dtype=torch.float64)
    goal = Segment(start, end)
    assert EndPoint.across_classes
    assert float(EndPoint()(goal, Segment(start, end))) == 0
    assert float(EndPoint()(goal, Segment(start, start))) == pytest.approx(1)
    expected = sum((other - end) ** 2) / sum((start - end) ** 2)
    torch.testing.assert_close(EndPoint()(goal, Segment(start, other)), expected[None])


def test_lessons_are_shuffled_passes_with_one_operation_each():
    lessons = Lessons(7, 4)
    assert lessons.sizes(10) == [4, 4, 2, 4, 4, 2, 4] and Lessons(2).sizes(10) == [10, 10]
    assert Lessons(2, 40).sizes(10) == [10, 10]
    orders, uniforms = lessons.draw(0, 3, 10, torch.device("cpu"))
    assert orders.shape == (7, 4) and uniforms.shape == (7, 4, UNIFORMS)
    for first in (0, 3):
        passed = torch.cat([orders[first + k, :count] for k, count in enumerate((4, 4, 2))])
        assert torch.equal(passed.sort().values, torch.arange(10))
    assert not torch.equal(orders[:3], orders[3:6])
    assert torch.equal(uniforms[..., 0], uniforms[:, :1, 0].expand(7, 4)) and uniforms[:, 0, 0].unique().numel() == 7
    assert uniforms[..., 1:].unique().numel() > 0.99 * 7 * 4 * (UNIFORMS - 1)
    again, other = lessons.draw(0, 3, 10, torch.device("cpu")), lessons.draw(0, 4, 10, torch.device("cpu"))
    assert torch.equal(again[0], orders) and torch.equal(again[1], uniforms)
    assert not torch.equal(other[0], orders) and not torch.equal(other[1], uniforms)
    with pytest.raises(M3DError, match="syn_steps=0"):
        Lessons(0)
    with pytest.raises(M3DError, match="batch_syn=0"):
        Lessons(1, 0)


RECIPE = Recipe(50, 16, 0.05, momentum=0.0, weight_decay=0.0, augment=DSA)


def test_an_expert_is_plain_training_on_real_images(tiny):
    """Two epochs of expert 1 against an SGD loop written out, with the trainer's own order."""
    net, recipe = flat_net(), Recipe(50, 16, 0.05, momentum=0.0, weight_decay=0.0)
    recorded = train_experts(net, tiny, recipe, 2, 2, 7, CPU)
    images = Images(tiny.train.images, tiny.train.labels(), tiny.normalise())
    trainer = Trainer(net, images, recipe, 1, 7, CPU, first=1)
    trainer._begin_epoch()
    flat = recorded.read(1, 0)
    torch.testing.assert_close(
        flat, net.fresh(7, rng.Purpose.EXPERT, torch.tensor([0]), torch.tensor([1]))[0], atol=0, rtol=0
    )
    for step in range(6):  # 36 images: batches of 16, 16 and 4
        chosen = trainer.batches.index[step, 0, : 4 if step % 3 == 2 else 16]
        flat = flat.clone().requires_grad_()
        loss = functional.cross_entropy(net(flat[None], images.take(chosen)[None]).logits[0], images.labels[chosen])
        flat = (flat - 0.05 * torch.autograd.grad(loss, flat)[0]).detach()
    torch.testing.assert_close(recorded.read(1, 2), flat, atol=1e-6, rtol=1e-5)
    assert (flat - recorded.read(1, 0)).norm() > 0.01


def test_experts_are_kept_continued_and_checked(tiny, monkeypatch, caplog):
    net = flat_net()
    first = train_experts(net, tiny, RECIPE, GROUP + 2, 3, 1, CPU)
    assert first.groups() == [range(GROUP), range(GROUP, GROUP + 2)] and first.folder.parent == cache_folder()
    content = {file.name: file.read_bytes() for file in first.folder.glob("*.safetensors")}
    assert len(content) == 2 * 4
    assert not torch.equal(first.read(0, 3), first.read(GROUP, 3))
    # a session killed in the third epoch of the second group: the rest is trained again, with the same bits
    for epoch in (2, 3):
        first.file(range(GROUP, GROUP + 2), epoch).unlink()
    trained = []
    original = Trainer.run
    monkeypatch.setattr(
        Trainer, "run", lambda self, until: (trained.append((self.repeats, until)), original(self, until))
    )
    train_experts(net, tiny, RECIPE, GROUP + 2, 3, 1, CPU)
    assert trained == [(2, 2), (2, 3)]
    assert {file.name: file.read_bytes() for file in first.folder.glob("*.safetensors")} == content
    train_experts(net, tiny, RECIPE, GROUP + 2, 2, 1, CPU)  # all there
    train_experts(net, tiny, RECIPE, GROUP, 4, 1, CPU)  # one epoch more of the first group
    assert trained[2:] == [(GROUP, 4)]
    broken = first.file(range(GROUP), 1)
    broken.write_bytes(broken.read_bytes()[:-4] + b"\0\0\0\1")
    train_experts(net, tiny, RECIPE, GROUP, 3, 1, CPU)
    assert trained[3:] == [(GROUP, 1), (GROUP, 2), (GROUP, 3)] and broken.read_bytes() == content[broken.name]
    assert "experts-0-9-epoch-1" in caplog.text and "trained again" in caplog.text


def test_what_decides_experts_decides_where_they_are_kept(tiny):
    """Another seed, recipe, network, precision or mean is another folder; the recipe's length is not."""
    from dataclasses import replace

    def folder(data=tiny, recipe=RECIPE, spec=NET, seed=0, runtime=CPU):
        return train_experts(FlatNet(make_net(spec, data.shape, 3)), data, recipe, 1, 1, seed, runtime).folder

    folders = [
        folder(),
        folder(seed=1),
        folder(recipe=replace(RECIPE, lr=0.06)),
        folder(recipe=replace(RECIPE, augment=Augment())),
        folder(spec="convnet2:width=5"),
        folder(runtime=Runtime.choose("cpu", "bf16")),
        folder(runtime=Runtime.choose("cpu", deterministic=True)),
        folder(data=replace(tiny, mean=(0.4, 0.5, 0.5))),
        folder(data=replace(tiny, mirror=False)),
    ]
    assert len(set(folders)) == len(folders)
    assert folder(recipe=replace(RECIPE, epochs=9)) == folders[0] == folder(spec="convnet2:width=4,norm=instance")
    for wrong in (replace(RECIPE, momentum=0.9), replace(RECIPE, milestones=(3,))):
        with pytest.raises(M3DError, match="without momentum and at a constant rate"):
            folder(recipe=wrong)
    with pytest.raises(M3DError, match="make it by make_net"):
        train_experts(FlatNet(ConvNet(tiny.shape, 3, 2, 4)), tiny, RECIPE, 1, 1, 0, CPU)


def test_a_row_that_is_gone_is_named(tmp_path):
    with pytest.raises(M3DError, match=r"experts-0-2-epoch-4.*cannot be read"):
        Trajectories(tmp_path, 3).read(1, 4)


def test_the_pool_shows_every_expert_and_every_start(tiny):
    lessons = Lessons(3, 4)
    record = Experts(RECIPE, lessons, experts=3, span=2, max_start=4)
    assert record.needed == 5
    method = make_method("mtt", Task("tiny", tiny.shape, 3, 2), {**TINY, "steps": 2})[0]
    step = Step(method, tiny, flat_net(), torch.rand(3, 2, 3, 8, 8), 0, CPU)
    pool = record.start(World(step.net, tiny, step.synthetic, 0, CPU))
    stretches = [pool.stretch(k) for k in range(60)]
    assert all(sorted(e for e, _ in stretches[k : k + 3]) == [0, 1, 2] for k in range(0, 60, 3))
    assert {t for _, t in stretches} == {0, 1, 2, 3}
    addresses = [t.data_ptr() for t in (pool.eyes().flat, pool.eyes().goal.end, *pool.eyes().draws)]
    for k in (0, 1, 7):
        assert pool.due(k)
        pool.draw(k)
        eyes, (expert, first) = pool.eyes(), stretches[k]
        assert torch.equal(eyes.flat, pool.trajectories.read(expert, first)) and torch.equal(eyes.goal.start, eyes.flat)
        assert torch.equal(eyes.goal.end, pool.trajectories.read(expert, first + 2))
        orders, uniforms = lessons.draw(0, k, 6, torch.device("cpu"))
        assert torch.equal(eyes.draws[0], orders) and torch.equal(eyes.draws[1], uniforms)
    assert addresses == [t.data_ptr() for t in (pool.eyes().flat, pool.eyes().goal.end, *pool.eyes().draws)]
    assert not pool.state_dict()  # a function of (seed, step)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": 0}, "experts=0"),
        ({"span": 0}, "span=0"),
        ({"max_start": 0}, "max_start=0"),
        ({"max_start": 50, "span": 2}, "reach epoch 51, but experts are trained for 50"),
        ({"expert_epochs": 3, "max_start": 3, "span": 2}, "reach epoch 4, but experts are trained for 3"),
        ({"lr_teacher": 0.0}, "lr_teacher=0.0"),
        ({"syn_steps": 0}, "syn_steps=0"),
        ({"lr_lr": 0.0}, "lr=0.0"),
    ],
)
def test_wrong_settings_are_refused(options, message):
    with pytest.raises(M3DError, match=message):
        make_method("mtt", Task("tiny", (3, 8, 8), 3, 2), options)


@pytest.mark.parametrize("stop_at", [1, 4])
def test_a_stopped_run_continues_bit_identically(tiny, tmp_path, monkeypatch, stop_at):
    monkeypatch.setattr("m3d.engine._REPORT_SECONDS", 0.0)
    method = make_method("mtt", Task("tiny", tiny.shape, 3, 2), {**TINY, "steps": 6})[0]
    whole = condense(method, tiny, flat_net(), 2, 0, CPU)
    folder, asked = RunFolder(tmp_path), []

    def stop(progress):
        if progress.step == stop_at and not asked:
            asked.append(1)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        condense(method, tiny, flat_net(), 2, 0, CPU, Watch(report=stop, folder=folder))
    resumed = condense(method, tiny, flat_net(), 2, 0, CPU, Watch(folder=folder))
    assert torch.equal(resumed.pixels, whole.pixels) and resumed.losses == whole.losses
    assert resumed.learned == whole.learned and whole.learned["lr"] != pytest.approx(0.01, rel=1e-6)


def test_a_run_killed_while_its_experts_train_is_resumed(tiny_file, tmp_path, monkeypatch):
    """Nothing but run.json and some epochs is there; the outcome is that of a run that never stopped."""
    options = {**TINY, "net": NET, "steps": 2}
    monkeypatch.setenv("M3D_CACHE", str(tmp_path / "one"))
    whole = m3d.condense(tiny_file, 2, "mtt", **options)
    monkeypatch.setenv("M3D_CACHE", str(tmp_path / "other"))
    original = Trainer.run

    def killed(self, until):
        if until == 3:
            raise KeyboardInterrupt
        original(self, until)

    monkeypatch.setattr(Trainer, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        m3d.condense(tiny_file, 2, "mtt", out=tmp_path / "run", **options)
    assert len(list((tmp_path / "other").glob("*/*-epoch-*"))) == 3
    monkeypatch.setattr(Trainer, "run", original)
    assert m3d.resume(tmp_path / "run").fingerprint == whole.fingerprint


def test_the_student_comes_nearer_and_no_real_image_is_read(tiny, monkeypatch):
    def refuse(*_):
        raise AssertionError("a real image was read")

    monkeypatch.setattr(Step, "_goal", refuse)
    options = {**TINY, "steps": 60, "syn_steps": 5, "lr": 3.0, "lr_teacher": 0.002, "lr_lr": 1e-12, "max_start": 1}
    method = make_method("mtt", Task("tiny", tiny.shape, 3, 1), {**options, "batch_syn": 3, "augment": "none"})[0]
    losses = condense(method, tiny, flat_net(), 1, 0, CPU).losses
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])


def test_the_learned_rate_is_kept_and_used(tiny, tmp_path):
    held = tiny.hold_out(0.25, 0)
    quick = {"protocol": "quick", "repeats": 1}
    condensed = m3d.condense(
        held, 2, "mtt", net=NET, out=tmp_path, **TINY, steps=4, eval_every=2, eval_options=quick, device="cpu"
    )
    learned = condensed.manifest["learned"]["lr"]
    best = m3d.CondensedSet.load(tmp_path / RunFolder.BEST)
    assert learned > 0 and learned != pytest.approx(0.01, rel=1e-6)
    assert (best.manifest["learned"]["lr"] == learned) == (best.manifest["steps"] == 4)
    settings = {"net": NET, "repeats": 1, "device": "cpu"}
    rules = make_protocol("mtt", epochs=2)
    assert m3d.evaluate(condensed, held, protocol=rules, **settings).record["protocol"]["lr"] == learned
    dsa = make_protocol("dsa", epochs=2)
    assert m3d.evaluate(condensed, held, protocol=dsa, **settings).record["protocol"]["lr"] == 0.01
    random = m3d.condense(held, 2, "random", net=NET, device="cpu")
    assert "learned" not in random.manifest
    assert m3d.evaluate(random, held, protocol=rules, **settings).record["protocol"]["lr"] == 0.01
    negative = m3d.CondensedSet(condensed.images, condensed.labels, {**condensed.manifest, "learned": {"lr": -0.1}})
    with pytest.raises(M3DError, match=r"learned rate -0\.1 is not positive"):
        m3d.evaluate(negative, held, protocol=rules, **settings)


def test_the_best_set_keeps_the_rate_of_its_own_step(tiny, tmp_path):
    """The judge likes the first measurement best; the run is stopped and continued after it."""
    method = make_method("mtt", Task("tiny", tiny.shape, 3, 2), {**TINY, "steps": 4})[0]
    half = make_method("mtt", Task("tiny", tiny.shape, 3, 2), {**TINY, "steps": 2})[0]
    outcome = condense(method, tiny, flat_net(), 2, 0, CPU, Watch(judge=lambda now: -now.step, judge_every=2))
    assert outcome.best[1] == 2 and outcome.best_learned == condense(half, tiny, flat_net(), 2, 0, CPU).learned
    assert outcome.best_learned != outcome.learned
    folder = RunFolder(tmp_path)

    def judge(now):
        if now.step == 4:
            raise Interrupted(now.step)
        return -now.step

    with pytest.raises(Interrupted):
        condense(method, tiny, flat_net(), 2, 0, CPU, Watch(folder=folder, judge=judge, judge_every=2))
    resumed = condense(
        method, tiny, flat_net(), 2, 0, CPU, Watch(folder=folder, judge=lambda now: -now.step, judge_every=2)
    )
    assert resumed.best_learned == outcome.best_learned


def test_published_settings_and_every_option():
    def known(data: str, ipc: int, side: int = 32):
        return published(Task(data, (3, side, side), 10, ipc))

    assert known("cifar10", 1) == ("convnet3", (50, 2, 2, 100, 1e-7, 0.01, None)) == known("svhn", 5)
    assert known("cifar10", 10)[1][:6] == (30, 2, 20, 100, 1e-5, 0.001)
    assert known("cifar100", 60) == ("convnet3", (80, 2, 40, 1000, 1e-5, 0.01, 125))
    assert known("tiny", 1, 64) == ("convnet4", (10, 2, 10, 10_000, 1e-4, 0.01, None))
    assert known("tiny", 10, 64)[1] == (20, 2, 40, 10_000, 1e-4, 0.01, 200)
    assert known("tiny", 50, 64)[1] == (20, 2, 40, 10_000, 1e-4, 0.01, 300)
    assert known("nette", 10, 128) == ("convnet5", (20, 2, 10, 1000, 1e-6, 0.01, None))
    photos = make_method("mtt", Task("photos", (3, 64, 64), 10, 10), {})[0]
    assert photos.network == "convnet4" and photos.matching.probe.lessons == Lessons(20, 200)
    task = Task("cifar10", (3, 32, 32), 10, 10)
    method = make_method("mtt", task, {})[0]
    matching, pool, probe = method.matching, method.matching.pool, method.matching.probe
    assert (method.steps, method.tiles, matching.standardised, matching.batch_syn_max) == (5000, Tiles(1), True, 10)
    assert (pool.experts, pool.span, pool.max_start, pool.needed) == (100, 2, 20, 21)
    assert pool.recipe == Recipe(50, 256, 0.01, momentum=0.0, weight_decay=0.0, augment=DSA)
    assert (matching.player, probe.player) == (Descent(100, 0.5), Descent(1e-5, 0.5))
    assert (probe.lessons, float(probe.rate.detach()), probe.augment) == (Lessons(30), pytest.approx(0.001), DSA)
    assert (
        not probe.recompute and make_method("mtt", Task("cifar10", (3, 32, 32), 10, 50), {})[0].matching.probe.recompute
    )
    given = {"syn_steps": 4, "span": 1, "max_start": 3, "lr": 7.0, "lr_lr": 0.5, "lr_teacher": 0.25, "batch_syn": 6}
    more = {"steps": 9, "momentum": 0.2, "factor": 2, "experts": 5, "expert_epochs": 3, "augment": "crop|flip"}
    method = make_method("mtt", task, {**given, **more, "init": "noise", "recompute": True})[0]
    matching, pool, probe = method.matching, method.matching.pool, method.matching.probe
    assert (method.steps, method.tiles, matching.batch_syn_max) == (9, Tiles(2), 40)
    assert (pool.experts, pool.span, pool.max_start, pool.recipe.epochs) == (5, 1, 3, 3)
    assert (matching.player, probe.player) == (Descent(7.0, 0.2), Descent(0.5, 0.2))
    assert (probe.lessons, pool.lessons, float(probe.rate.detach())) == (Lessons(4, 6), Lessons(4, 6), 0.25)
    assert str(probe.augment) == "crop|flip" == str(pool.recipe.augment) and probe.recompute
    assert type(method.init).__name__ == "Noise"
    digits = make_method("mtt", Task("digits", (1, 8, 8), 10, 1, mirror=False), {})[0]
    assert digits.matching.probe.augment == DSA.without("flip")
    assert digits.matching.player.lr == pytest.approx(100 / 64)  # a small image takes less of the rate
