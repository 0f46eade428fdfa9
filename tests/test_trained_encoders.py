"""The methods on pre-trained encoders, m3d+, dance, dsdm and ncfm: losses, settings, averaging, exact resumption."""

import copy
import signal

import pytest
import torch
from torch.nn import functional

import m3d
from m3d.engine import condense
from m3d.errors import Interrupted, M3DError
from m3d.kernels import Gaussian, Linear
from m3d.methods import Task, make_method
from m3d.nets import FlatNet, make_net
from m3d.players import AdamW
from m3d.pools.pretrained import encoder_recipe
from m3d.run_folder import RunFolder
from m3d.runtime import Runtime
from m3d.step import Step
from m3d.tiles import Tiles
from m3d.trained import trained_networks
from m3d.watch import Watch

CPU = Runtime.choose("cpu")
NET = "convnet2:width=4"
SMALL = {"encoders": 2, "encoder_epochs": 2, "batch_real": 5}


def step_of(name, data, ipc=2, **options):
    method = make_method(name, Task("tiny", data.shape, 3, ipc), {**SMALL, "steps": 4, "augment": "none", **options})[0]
    pixels = method.tiles.encode(method.init(data, method.tiles.count(ipc, data.shape), 0, CPU))
    step = Step(method, data, FlatNet(make_net(NET, data.shape, 3)), pixels, 0, CPU)
    step.refill(0)
    step.pool.draw(0)
    step.objective.draw(step.number)
    return step


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("m3d+", {}),
        ("m3d+", {"ce_weight": 0.3, "ce_ramp": 0.5}),
        ("m3d+", {"layers": 2, "layer_weight": 0.5, "ce_weight": 0.0}),
        ("m3d+", {"kernel": "linear"}),
        ("dance", {}),
        ("dance", {"ce_weight": 0.0}),
    ],
)
def test_the_loss_is_matching_plus_what_the_trained_network_says(tiny, name, options):
    step = step_of(name, tiny, **options)
    value = step.loss(step.lanes, step.real_index[0], step.syn_index[0], step.augmentation[0])
    (gradient,) = torch.autograd.grad(value.sum(), step.synthetic.latent)
    linear = name == "dance" or options.get("kernel") == "linear"
    kernel = Linear() if linear else Gaussian()
    usual = 1.0 if name == "dance" else 0.01 / kernel.rate
    weight = options.get("ce_weight", usual) * (0.5 if "ce_ramp" in options else 1.0)  # step 1 of the ramp's 2
    latent = step.synthetic.latent.detach().clone().requires_grad_()
    total = torch.zeros(())
    for c in range(3):
        real = step.synthetic.normalise(tiny.train.take(step.real_index[0])[c])
        shown = step.synthetic.normalise(latent[c])
        a, b = (step.net(step.pool.parameters_flat[None], x[None], maps=True) for x in (real, shown))
        expected = kernel.mmd2(a.features[0], b.features[0])
        for k in range(options.get("layers", 0)):
            expected = expected + 0.5 * kernel.mmd2(*(s.maps[-1 - k][0].mean((-2, -1)) for s in (a, b)))
        judged = step.net(step.pool.trained[None], shown[None]).logits[0]
        expected = expected + weight * functional.cross_entropy(judged, torch.full((2,), c))
        torch.testing.assert_close(value[c], expected, atol=1e-5, rtol=1e-4)
        total = total + expected
    torch.testing.assert_close(gradient, torch.autograd.grad(total, latent)[0], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "options"),
    [("m3d+", {"layers": 2, "ce_ramp": 1.0}), ("ncfm", {"sampler": "learned", "frequencies": 8, "amplitude": 0.3})],
)
def test_variants_compile_without_breaks(tiny, name, options):
    torch._dynamo.reset()
    step = step_of(name, tiny, **options)
    compiled = torch.compile(step.loss, backend="aot_eager", fullgraph=True, dynamic=False)
    draws = (step.lanes, step.real_index[0], step.syn_index[0], step.augmentation[0])
    values = []
    for loss in (step.loss, compiled):
        value = loss(*draws)
        values.append((value, *torch.autograd.grad(value.sum(), step.learned)))
    torch.testing.assert_close(values[0], values[1], atol=1e-5, rtol=1e-4)


def test_published_settings_and_defaults():
    small, large = Task("any", (3, 32, 32), 10, 10), Task("any", (3, 128, 128), 10, 10)
    own, dance, ncfm = (make_method(name, small, {})[0] for name in ("m3d+", "dance", "ncfm"))
    assert (own.steps, own.tiles.factor, own.matching.player.lr, own.matching.guide.weight) == (12_000, 2, 10.0, 0.01)
    assert own.tiles.chroma == "half"
    for shape, options in (((1, 32, 32), {}), ((3, 8, 8), {}), ((3, 32, 32), {"factor": 1}), ((3, 34, 34), {})):
        assert make_method("m3d+", Task("any", shape, 10, 10), options)[0].tiles.chroma == "full"
    one = make_method("m3d+", Task("any", (3, 32, 32), 10, 1), {})[0]
    assert (one.tiles.factor, one.matching.player.lr, one.matching.guide.weight) == (4, 1.0, 0.03)
    assert make_method("m3d+", Task("any", (3, 8, 8), 10, 1), {})[0].tiles.factor == 1
    assert (own.matching.pool.networks, own.matching.pool.recipe.epochs, own.matching.pool.recipe.batch) == (5, 20, 512)
    recipe = own.matching.pool.recipe
    assert (recipe.lr, recipe.schedule, str(recipe.augment)) == (0.05, "linear", "color|crop|cutout|flip|scale|rotate")
    assert str(own.matching.augment) == "color+crop+cutout" and own.matching.average_from == 0.8
    assert (dance.steps, dance.matching.player.lr, dance.matching.pool.recipe.epochs) == (10_000, 0.1, 60)
    assert (dance.matching.batch_real, dance.matching.guide.weight, dance.matching.pool.networks) == (128, 1.0, 5)
    big = make_method("dance", large, {})[0]
    assert (big.matching.player.lr, big.matching.pool.recipe.epochs, big.tiles.factor) == (1.0, 80, 3)
    assert big.matching.pool.recipe.batch == 64 and dance.matching.pool.recipe.batch == 512
    for name in ("m3d+", "dance", "ncfm"):
        assert make_method(name, small, {"encoder_batch": 32})[0].matching.pool.recipe.batch == 32
    player = AdamW(0.001, turns=10)
    assert (ncfm.steps, ncfm.matching.player, ncfm.matching.objective.frequencies) == (20_000, player, 4096)
    assert make_method("ncfm", small, {"turns": 1})[0].matching.player == AdamW(0.001)
    for ipc, lr in ((1, 0.01), (50, 0.5)):
        assert make_method("dance", Task("any", (3, 32, 32), 10, ipc), {})[0].matching.player.lr == pytest.approx(lr)
    factors = {(1, 1): 2, (1, 10): 2, (3, 1): 4, (3, 10): 2}  # by channels and IPC: only colours stand sixteen cells
    for (channels, ipc), factor in factors.items():
        assert make_method("m3d+", Task("any", (channels, 32, 32), 10, ipc), {})[0].tiles.factor == factor
    epochs = [make_method("ncfm", task, {})[0].matching.pool.recipe.epochs for task in (small, large)]
    assert epochs == [60, 80]
    assert ncfm.matching.objective.scale == 300 and ncfm.matching.objective.climber is None
    learned = make_method("ncfm", small, {"sampler": "learned", "lr_sampler": 0.5})[0]
    assert learned.matching.objective.climber == AdamW(0.5, ascent=True)


def test_how_m3d_plus_cuts_up_grey_images():
    """As was found for the data, but only where nothing of it is given and the images have that size."""

    def cut(data, ipc, side=28, smallest=None, **options):
        method, record = make_method("m3d+", Task(data, (1, side, side), 10, ipc, smallest=smallest), options)
        tiles = method.tiles
        assert (record["factor"], record["cell"], record["margin"]) == (tiles.factor, tiles.cell, tiles.margin)
        return tiles, str(method.matching.augment)

    plain, garments = "color+crop+cutout", "color+crop"
    for ipc in (1, 9):
        assert cut("mnist", ipc) == (Tiles(1, cell=10, margin=2), plain)
        assert cut("fashion-mnist", ipc) == (Tiles(2, upsample="bicubic"), garments)
    for ipc in (10, 50):
        assert cut("mnist", ipc) == (Tiles(1, cell=12, margin=4), plain)
        assert cut("fashion-mnist", ipc) == (Tiles(1, cell=20), garments)
    assert cut("mnist", 10, upsample="cosine") == (Tiles(1, cell=12, margin=4, upsample="cosine"), plain)
    for given in ({"factor": 2}, {"cell": 0}, {"margin": 0}):
        assert cut("mnist", 10, **given) == (Tiles(2), plain)
    assert cut("mnist", 10, margin=2) == (Tiles(2, margin=2), plain)
    assert cut("fashion-mnist", 10, factor=1) == cut("fashion-mnist", 10, cell=0) == (Tiles(1), garments)
    assert cut("mnist", 10, side=8) == (Tiles(1), plain) and cut("mnist", 10, side=32) == (Tiles(2), plain)
    assert cut("mnist", 10, smallest=54) == cut("mnist", 10)  # as many real images to start from as there are cells
    assert cut("mnist", 10, smallest=53) == (Tiles(2), plain)


def test_options_of_m3d_plus_reach_the_record():
    task = Task("any", (3, 32, 32), 10, 10)
    options = {"steps": 100, "decay": 0.3, "ce_ramp": 0.25, "mix_low": 0.1, "mix_high": 0.9, "ipm": 3}
    options |= {"encoder_lr": 0.2, "average_from": 0.8, "layers": 1, "init": "k-means"}
    matching = make_method("m3d+", task, options)[0].matching
    pool = matching.pool
    assert (pool.low, pool.high, pool.every, pool.ramp, pool.recipe.lr) == (0.1, 0.9, 3, 25, 0.2)
    assert (matching.player.milestones, matching.player.gamma) == ((50, 75), 0.3)
    assert matching.average_start == 80 and matching.probe.maps
    assert make_method("m3d+", task, {"ce_weight": 0})[0].matching.guide is None
    for wrong, message in (
        ({"ce_ramp": 2}, "ce_ramp=2"),
        ({"average_from": -1}, "average_from=-1"),
        ({"layer_weight": -1, "layers": 1}, "layer_weight=-1"),
        ({"layers": -1}, "layers=-1"),
        ({"ce_weight": -1}, "weight -1"),
    ):
        with pytest.raises(M3DError, match=message):
            make_method("m3d+", task, wrong)


def test_more_layers_than_the_network_has(tiny):
    with pytest.raises(M3DError, match="layers=3 is not valid; the network shows the maps of 2"):
        m3d.condense(tiny, 1, "m3d+", net=NET, steps=1, layers=3, **SMALL)


def test_the_result_is_the_mean_of_the_last_images(tiny):
    """Of eight steps the last two, from 0.75 on: against the images after each step, in both kinds of units."""
    for name, extra in (("m3d+", {"lr": 0.05}), ("dm", {"lr": 0.05, "batch_real": 5})):
        given = {**SMALL, **extra, "average_from": 1.0} if name == "m3d+" else extra
        method = make_method(name, Task("tiny", tiny.shape, 3, 2), {**given, "steps": 8})[0]
        averaged = copy.copy(method)
        object.__setattr__(averaged, "matching", copy.copy(method.matching))
        object.__setattr__(averaged.matching, "average_from", 0.75)
        net, seen = FlatNet(make_net(NET, tiny.shape, 3)), {}

        def keep(now, seen=seen):
            seen[now.step] = now.pixels
            return 0.0

        last = condense(method, tiny, net, 2, 0, CPU, Watch(judge=keep, judge_every=1)).pixels
        steps = dict(seen)
        mean = condense(averaged, tiny, net, 2, 0, CPU, Watch(judge=keep, judge_every=1)).pixels
        torch.testing.assert_close(mean, (steps[7] + steps[8]) / 2, atol=1e-6, rtol=1e-6)
        assert torch.equal(last, steps[8]) and not torch.equal(mean, last)
        torch.testing.assert_close(seen[7], steps[7], atol=1e-6, rtol=1e-6)  # the first step of the mean
        assert torch.equal(seen[6], steps[6])  # before it begins


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("m3d+", {"ipm": 3, "ce_ramp": 0.5, "decay": 0.5, "average_from": 0.5, "layers": 1}),
        ("dance", {}),
        ("ncfm", {"frequencies": 8}),
        ("ncfm", {"frequencies": 8, "sampler": "learned"}),
        ("dsdm", {"history_after": 1}),
    ],
)
@pytest.mark.parametrize("stop_at", [2, 7])
def test_resume_is_bit_identical(tiny, tmp_path, monkeypatch, name, options, stop_at):
    monkeypatch.setattr("m3d.engine._REPORT_SECONDS", 0.0)
    method = make_method(name, Task("tiny", tiny.shape, 3, 2), {**SMALL, "steps": 10, "lr": 0.01, **options})[0]
    net, asked = FlatNet(make_net(NET, tiny.shape, 3)), []
    whole = condense(method, tiny, net, 2, 0, CPU)

    def stop(progress):
        if progress.step == stop_at and not asked:
            asked.append(1)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        condense(method, tiny, net, 2, 0, CPU, Watch(report=stop, folder=RunFolder(tmp_path)))
    resumed = condense(method, tiny, net, 2, 0, CPU, Watch(folder=RunFolder(tmp_path)))
    assert torch.equal(resumed.pixels, whole.pixels) and resumed.losses == whole.losses


def test_learned_frequencies_climb_where_the_images_descend(tiny):
    """One step of each, the others held: at the same noise the loss falls by the images and rises by the sampler."""
    step = step_of("ncfm", tiny, sampler="learned", frequencies=64, ce_weight=0.0, lr=0.01, lr_sampler=0.01)
    assert len(step.learned) == 7 and len(step.players) == 7  # images, three weights, three biases
    draws = (step.lanes, step.real_index[0], step.syn_index[0], step.augmentation[0])
    before = step.loss(*draws)
    gradients = torch.autograd.grad(before.sum(), step.learned)
    with torch.no_grad():
        for tensor, player, gradient in list(zip(step.learned, step.players, gradients, strict=True))[1:]:
            kept = tensor.clone()
            player.step(gradient)
            assert float(step.loss(*draws).sum()) > float(before.sum())
            tensor.copy_(kept)
        step.players[0].step(gradients[0])
        assert float(step.loss(*draws).sum()) < float(before.sum())


@pytest.mark.parametrize("name", ["m3d+", "dance", "dsdm", "ncfm"])
def test_the_images_come_to_be_recognised(tiny, name):
    """From noise, by a network that the run never saw, and much better than at the start."""
    options = {**SMALL, "steps": 60, "encoder_epochs": 30, "augment": "none", "init": "noise"}
    options |= {"lr": 0.03, "frequencies": 128} if name == "ncfm" else {"lr": 0.05}
    options |= {"ce_weight": 1.0} if name in ("m3d+", "dance") else {}
    method = make_method(name, Task("tiny", tiny.shape, 3, 1), options)[0]
    net = FlatNet(make_net("convnet2:width=8", tiny.shape, 3))
    made = condense(method, tiny, net, 1, 0, CPU)
    judge = trained_networks(tiny, "convnet2:width=8", encoder_recipe(60), 1, 7, CPU).final
    mean, std = (torch.tensor(v)[:, None, None] for v in (tiny.mean, tiny.std))

    def judged(pixels):
        logits = net(judge, ((pixels - mean) / std).flatten(0, 1)[None]).logits[0]
        return float(functional.cross_entropy(logits, torch.arange(3)))

    assert judged(made.pixels) < 0.5 * judged(method.init(tiny, 1, 0, CPU))


def test_the_name_with_a_plus_goes_through_the_command_line(tiny_file, tmp_path, monkeypatch, capsys):
    from m3d.cli import main

    monkeypatch.chdir(tmp_path)
    words = ["condense", tiny_file, "--method", "m3d+", "--ipc", "1", "--steps", "2", "--net", NET]
    with pytest.raises(SystemExit) as stop:
        main([*words, "--set", "encoders=1", "--set", "encoder_epochs=1", "--batch-real", "4"])
    assert stop.value.code in (0, None), capsys.readouterr().err
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name == "tiny-m3d+-ipc1-seed0" and m3d.CondensedSet.load(folder).manifest["method"] == "m3d+"
