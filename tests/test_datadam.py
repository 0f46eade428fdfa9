"""DataDAM: attention and the whole loss against their definitions, and a method's own network."""

import json
import signal

import pytest
import torch
from torch import nn

import m3d
from m3d.engine import condense
from m3d.errors import Interrupted, M3DError
from m3d.evaluation import make_protocol
from m3d.listing import overview
from m3d.methods import Task, make_method
from m3d.nets import FlatNet, make_net
from m3d.objectives import Attention
from m3d.run_folder import RunFolder
from m3d.runtime import Runtime
from m3d.step import Step
from m3d.types import Seen
from m3d.watch import Watch

CPU = Runtime.choose("cpu")
NET = "convnet3:width=8,norm=batch"


def naive_attention(image_map, power):
    """One image: a sum over channels at each place, divided by the length of it all."""
    channels, height, width = image_map.shape
    places = []
    for y in range(height):
        for x in range(width):
            places.append(sum(image_map[c, y, x].abs() ** power for c in range(channels)))
    vector = torch.stack(places)
    return vector / vector.square().sum().sqrt()


def naive_loss(real, synthetic, power):
    """One class: the maps of each layer, n images [n, c, h, w]; the last layer is left out."""
    total = torch.zeros((), dtype=torch.float64)
    for a, b in zip(real[:-1], synthetic[:-1], strict=True):
        means = [torch.stack([naive_attention(m, power) for m in maps]).mean(0) for maps in (a, b)]
        total = total + (means[0] - means[1]).square().sum()
    return total


def maps(n, seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((2, 4), (3, 2), (3, 1))
    return [torch.randn(2, n, c, s, s, generator=generator, dtype=torch.float64).relu() for c, s in sizes]


@pytest.mark.parametrize("power", [1, 4])
def test_attention_and_its_gradient_against_their_definition(power):
    real, synthetic = maps(5, 0), [m.requires_grad_() for m in maps(3, 1)]
    nothing = torch.zeros(2, 1, 1)
    value = Attention(power)(Seen(tuple(real), nothing, nothing), Seen(tuple(synthetic), nothing, nothing))
    assert value.shape == (2,) and (value > 0).all()
    mine = torch.autograd.grad(value.sum(), synthetic[:-1])
    for c in range(2):
        own = [m.detach()[c].clone().requires_grad_() for m in synthetic]
        expected = naive_loss([m[c] for m in real], own, power)
        torch.testing.assert_close(value[c], expected)
        for got, wanted in zip(mine, torch.autograd.grad(expected, own[:-1]), strict=True):
            torch.testing.assert_close(got[c], wanted)


def test_attention_is_about_where_and_not_how_much():
    real, nothing = maps(3, 0), torch.zeros(2, 1, 1)
    goal, louder = Seen(tuple(real), nothing, nothing), Seen(tuple(3 * m for m in real), nothing, nothing)
    torch.testing.assert_close(Attention()(goal, louder), torch.zeros(2, dtype=torch.float64), atol=1e-12, rtol=0)


def test_bad_attention_is_refused(tiny):
    with pytest.raises(M3DError, match="power=0"):
        Attention(0)
    with pytest.raises(M3DError, match="two blocks"):
        m3d.condense(tiny, 1, "datadam", net="convnet1:width=8", steps=1)


def step_of(data, **options):
    method = make_method("datadam", Task("tiny", data.shape, 3, 2), {"steps": 4, "batch_real": 5, **options})[0]
    pixels = method.init(data, 2, 0, CPU)
    step = Step(method, data, FlatNet(make_net(NET, data.shape, 3)), pixels, 0, CPU)
    step.refill(0)
    step.pool.draw(0)
    return step


def plain_module(step):
    """The encoder from the library's own layers, in training mode."""
    layers = []
    for k in range(3):
        layers += [nn.Conv2d(3 if k == 0 else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2)]
    module = nn.Sequential(*layers, nn.Flatten()).train()
    values = {name: v[0] for name, v in step.net.unflatten(step.pool.parameters_flat[None]).items()}
    with torch.no_grad():
        for k in range(3):
            for part, layer in (("convs", module[4 * k]), ("norms", module[4 * k + 1])):
                layer.weight.copy_(values[f"{part}.{k}.weight"])
                layer.bias.copy_(values[f"{part}.{k}.bias"])
    return module


def seen_by(module, images):
    """(maps after each ReLU, flattened feature) of all classes in one batch."""
    found, x = [], images
    for layer in module:
        x = layer(x)
        if isinstance(layer, nn.ReLU):
            found.append(x)
    return found, x


def test_the_loss_is_that_of_plain_batch_norm_modules_with_all_classes_in_one_batch(tiny):
    step = step_of(tiny, augment="none", balance=0.03)
    assert step.together and step.chunk == 3
    draws = (step.lanes, step.real_index[0], step.syn_index[0], step.augmentation[0])
    value = step.loss(*draws)
    (gradient,) = torch.autograd.grad(value.sum(), step.synthetic.latent)
    module = plain_module(step)
    latent = step.synthetic.latent.detach().clone().requires_grad_()
    real = step.synthetic.normalise(tiny.train.take(step.real_index[0]))
    with torch.no_grad():
        goal_maps, goal = seen_by(module, real.flatten(0, 1))
    own_maps, own = seen_by(module, latent.flatten(0, 1))
    for c in range(3):
        a, b = slice(5 * c, 5 * c + 5), slice(2 * c, 2 * c + 2)
        expected = 100 * naive_loss([m[a] for m in goal_maps], [m[b] for m in own_maps], 4)
        expected = expected + 100 * 0.03 * (goal[a].mean(0) - own[b].mean(0)).square().sum()
        torch.testing.assert_close(value[c].double(), expected, atol=1e-4, rtol=1e-4)
        (one,) = torch.autograd.grad(expected, latent, retain_graph=True)
        latent.grad = one if latent.grad is None else latent.grad + one
    torch.testing.assert_close(gradient, latent.grad, atol=1e-3, rtol=1e-3)
    (of_one,) = torch.autograd.grad(step.loss(*draws)[1], step.synthetic.latent)
    assert of_one[0].abs().sum() > 0  # batch norm ties the classes together


def test_published_settings():
    def record(shape, ipc, mirror=True, **options):
        return make_method("datadam", Task("any", shape, 10, ipc, mirror), options)[0]

    small = record((3, 32, 32), 10)
    assert (small.steps, small.matching.batch_real, small.matching.standardised) == (8000, 64, True)
    assert (small.matching.player.lr, small.matching.player.momentum, small.tiles.factor) == (1.0, 0.5, 1)
    assert record((3, 32, 32), 51).matching.player.lr == 10.0 and record((3, 32, 32), 50).matching.player.lr == 1.0
    assert [t.weights for t in small.matching.objective.terms] == [[100.0], [1.0]]
    assert small.matching.objective.terms[0].terms[0].power == 4
    assert [t.weights for t in record((3, 64, 64), 1).matching.objective.terms] == [[100.0], [2.0]]
    assert record((3, 32, 32), 1, power=1).matching.objective.terms[0].terms[0].power == 1
    nets = [record((3, side, side), 1).network for side in (32, 64, 128)]
    assert nets == ["convnet3:norm=batch", "convnet4:norm=batch", "convnet5:norm=batch"]
    assert small.matching.probe.maps and small.matching.pool.every == 1
    assert str(small.matching.augment) == "color|crop|cutout|flip|scale|rotate"
    assert "flip" not in str(record((1, 28, 28), 1, mirror=False).matching.augment)


def test_the_loss_falls(tiny):
    options = {"steps": 60, "lr": 0.1, "batch_real": 12, "augment": "none", "init": "noise"}
    method = make_method("datadam", Task("tiny", tiny.shape, 3, 1), options)[0]
    losses = condense(method, tiny, FlatNet(make_net(NET, tiny.shape, 3)), 1, 0, CPU).losses
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


@pytest.mark.parametrize("stop_at", [1, 5])
def test_resume_is_bit_identical(tiny, tmp_path, monkeypatch, stop_at):
    monkeypatch.setattr("m3d.engine._REPORT_SECONDS", 0.0)
    method = make_method("datadam", Task("tiny", tiny.shape, 3, 2), {"steps": 7, "batch_real": 4, "ipm": 3})[0]
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


def test_compiled_equals_eager_with_batch_norm(tiny):
    torch._dynamo.reset()  # what the other methods' steps left
    step = step_of(tiny)
    compiled = torch.compile(step.loss, backend="aot_eager", fullgraph=True, dynamic=False)
    draws = (step.lanes, step.real_index[0], step.syn_index[0], step.augmentation[0])
    values = [(v := f(*draws), torch.autograd.grad(v.sum(), step.synthetic.latent)[0]) for f in (step.loss, compiled)]
    torch.testing.assert_close(values[0], values[1], atol=1e-4, rtol=1e-4)


def test_a_method_names_its_own_network(tiny, tiny_file, tmp_path):
    own = m3d.condense(tiny, 1, "datadam", steps=1, batch_real=2)
    assert own.manifest["net"] == "convnet3:norm=batch"
    assert m3d.condense(tiny, 1, "m3d", steps=1, batch_real=2).manifest["net"] == "convnet3"
    asked = m3d.condense(tiny_file, 1, "datadam", net="convnet2:width=8", steps=1, batch_real=2, out=tmp_path / "asked")
    assert asked.manifest["net"] == "convnet2:width=8" and asked.fingerprint != own.fingerprint
    m3d.condense(tiny_file, 1, "datadam", steps=1, batch_real=2, out=tmp_path / "own")
    written = json.loads((tmp_path / "own" / RunFolder.RUN).read_text())
    assert written["net"] == "convnet3:norm=batch"  # as resolved, so that a resumed run keeps it
    with pytest.raises(M3DError, match="unknown network"):
        m3d.condense(tiny, 1, "datadam", net="convnett", steps=1)


def test_an_interrupted_run_goes_on_through_the_same_network(tiny_file, tmp_path, monkeypatch):
    monkeypatch.setattr("m3d.engine._REPORT_SECONDS", 0.0)
    options = {"steps": 4, "batch_real": 2}
    whole = m3d.condense(tiny_file, 1, "datadam", **options)

    def stop(progress):
        if progress.step == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        m3d.condense(tiny_file, 1, "datadam", out=tmp_path / "run", report=stop, **options)
    assert m3d.resume(tmp_path / "run").fingerprint == whole.fingerprint


def test_the_listing_shows_the_network_of_methods_that_match():
    rows = {row["name"]: row for row in overview("methods")}
    assert rows["datadam"]["net"] == "convnet3:norm=batch" and rows["m3d"]["net"] == "convnet3"
    assert "net" not in rows["random"] and "net" not in overview("kernels")[0]


def test_protocol():
    protocol = make_protocol("datadam")
    assert (protocol.recipe.epochs, protocol.recipe.batch, protocol.recipe.cutmix) == (1800, 64, 0.0)
    assert protocol.recipe.milestones == (901,) and protocol.recipe.fresh_momentum
    assert str(protocol.recipe.augment) == "color|crop|cutout|flip|scale|rotate"
