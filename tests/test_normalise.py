"""Standardising and whitening: against their definitions, through a run and an evaluation, and back."""

import json

import numpy as np
import pytest
import torch

import m3d
from m3d.batches import Images
from m3d.cli import main
from m3d.condensed import CondensedDataset
from m3d.errors import M3DError
from m3d.evaluation import make_protocol
from m3d.export import export
from m3d.methods import Task, make_method
from m3d.nets import FlatNet, make_net
from m3d.normalise import EPSILON, Normalise, Zca
from m3d.pools import TrainedOnReal, World
from m3d.runtime import Runtime
from m3d.step import Step
from m3d.synth import Synthetic
from m3d.tiles import Tiles
from m3d.train import Recipe
from m3d.trained import default_recipe, trained_networks

CPU = Runtime.choose("cpu")
NET = "convnet2:width=4"
MTT = {"steps": 2, "syn_steps": 2, "experts": 2, "max_start": 2, "lr": 0.05}


@pytest.fixture
def white(tiny_file):
    return m3d.load_data(tiny_file, zca=True)


def rows(data) -> np.ndarray:
    """[N, d] float64: the standardised training images."""
    mean, std = (np.array(v)[:, None, None] for v in (data.mean, data.std))
    return ((data.train.images.numpy() / 255 - mean) / std).reshape(len(data.train), -1)


def test_whitened_training_images_have_unit_covariance_up_to_epsilon(white):
    """By numpy from the definition; of a direction with variance λ, λ / (λ + ε) is left."""
    x = rows(white)
    values, vectors = np.linalg.eigh(np.cov(x, rowvar=False))
    matrix = vectors @ np.diag((np.clip(values, 0, None) + EPSILON) ** -0.5) @ vectors.T
    seen = white.normalise()(white.train.images.float() / 255)
    assert seen.shape == (36, 3, 8, 8)
    expected = torch.tensor((x - x.mean(0)) @ matrix).view_as(seen).float()
    torch.testing.assert_close(seen, expected, atol=2e-4, rtol=1e-3)
    left = np.linalg.eigvalsh(np.cov(seen.flatten(1).double().numpy(), rowvar=False))
    np.testing.assert_allclose(left, np.sort(values / (values + EPSILON)), atol=1e-3)
    assert left[-1] > 0.95 and abs(float(seen.mean())) < 1e-4 and EPSILON == 0.1


def test_the_whitening_turns_images_least():
    """ZCA and no other whitening: its matrix is symmetric and positive, and it undoes itself."""
    images = torch.randint(0, 256, (50, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    made = Zca(images, (0.5,), (0.25,)).on(torch.device("cpu"))
    torch.testing.assert_close(made.matrix, made.matrix.mT)
    assert torch.linalg.eigvalsh(made.matrix.double()).min() > 0
    torch.testing.assert_close(made.matrix @ made.inverse, torch.eye(16), atol=1e-5, rtol=0)


@pytest.mark.parametrize("zca", [False, True])
def test_the_inverse_and_the_clamp(tiny_file, zca):
    data = m3d.load_data(tiny_file, zca=zca)
    normalise = data.normalise()
    pixels = torch.rand(2, 3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(normalise.inverse(normalise(pixels)), pixels, atol=1e-5, rtol=0)
    outside = pixels * 3 - 1
    moved = normalise(outside).clone()
    normalise.clamp_(moved)
    torch.testing.assert_close(normalise.inverse(moved), outside.clamp(0, 1), atol=1e-5, rtol=0)
    again = moved.clone()
    normalise.clamp_(again)
    torch.testing.assert_close(again, moved, atol=1e-4, rtol=0)


def test_whitening_is_made_once_for_a_device_and_shared(white, monkeypatch):
    made = []
    original = Zca._make
    monkeypatch.setattr(Zca, "_make", lambda self, device: (made.append(device), original(self, device))[1])
    first, held = white.normalise(), white.hold_out(0.25, 0).to("cpu").normalise()
    assert first.whitening.matrix is held.whitening.matrix and len(made) == 1  # the whole split's, as mean and std are
    assert white.transform == {"transform": "zca:epsilon=0.1"}


def test_what_cannot_be_whitened_is_refused(tiny):
    large = torch.zeros(2, 3, 65, 65, dtype=torch.uint8)
    with pytest.raises(M3DError, match="12675 values are too large"):
        Zca(large, (0.5,) * 3, (0.2,) * 3)
    with pytest.raises(M3DError, match="two and more"):
        Zca(tiny.train.images[:1], tiny.mean, tiny.std)
    assert tiny.transform == {} and tiny.normalise().whitening is None


@pytest.mark.parametrize("standardised", [False, True])
@pytest.mark.parametrize("factor", [1, 2])
def test_synthetic_images_are_whitened_as_real_ones(white, standardised, factor):
    pixels = torch.rand(3, 2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    synthetic = Synthetic(pixels, Tiles(factor), white.normalise(), standardised)
    torch.testing.assert_close(synthetic.pixels(), pixels, atol=1e-5, rtol=0)
    expected = white.normalise()(Tiles(factor).decode(pixels))
    seen = synthetic(torch.arange(3))
    torch.testing.assert_close(seen, expected, atol=1e-4, rtol=1e-4)
    (gradient,) = torch.autograd.grad(seen[0].sum(), synthetic.latent)
    assert gradient[0].abs().sum() > 0 and gradient[1].abs().sum() == 0
    with torch.no_grad():
        synthetic.latent.mul_(4)
    synthetic.project_()
    assert synthetic.pixels().min() > -1e-4 and synthetic.pixels().max() < 1 + 1e-4
    assert set(synthetic.state_dict()) == {"latent"}  # the whitening is the data's


def test_prepared_images_are_the_same(white):
    images = Images(white.train.images, white.train.labels(), white.normalise())
    index = torch.tensor([[3, 0], [35, 7]])
    ready = images.prepared()
    torch.testing.assert_close(ready.take(index), images.take(index))
    assert ready.normalise is None and ready.prepared() is ready
    plain = Images(white.train.images, white.train.labels(), Normalise(white.mean, white.std))
    assert plain.prepared() is plain


def test_a_step_of_whitened_data_compiles(white):
    method = make_method("mtt", Task("tiny", white.shape, 3, 2), MTT)[0]
    step = Step(method, white, FlatNet(make_net(NET, white.shape, 3)), torch.rand(3, 2, 3, 8, 8), 0, CPU)
    step.refill(0)
    step.pool.draw(0)
    draws = (step.lanes, step.real_index[0], step.syn_index[0], step.augmentation[0])
    torch._dynamo.reset()
    compiled = torch.compile(step.loss, backend="aot_eager", fullgraph=True, dynamic=False)
    values = [torch.autograd.grad(loss(*draws).sum(), step.learned) for loss in (step.loss, compiled)]
    torch.testing.assert_close(values[0], values[1], atol=1e-5, rtol=1e-4)


def test_networks_of_whitened_data_are_other_networks(tiny, white, tmp_path, monkeypatch):
    """In the cache, and for the pool that trains on real images."""
    monkeypatch.setenv("M3D_CACHE", str(tmp_path / "cache"))
    finals = [trained_networks(data, NET, default_recipe(1), 1, 0, CPU).final for data in (tiny, white)]
    assert tiny.train.fingerprint == white.train.fingerprint and len(list((tmp_path / "cache").iterdir())) == 2
    assert not torch.allclose(finals[0], finals[1])
    net = FlatNet(make_net(NET, white.shape, 3))
    pool = TrainedOnReal(3, 8, Recipe(1, 8, 0.1)).start(World(net, white, None, 0, CPU))
    torch.testing.assert_close(
        pool.trainer.images.take(torch.tensor([5])), white.normalise()(white.train.images[5:6].float() / 255)
    )


def test_a_run_remembers_the_whitening_and_its_evaluation_uses_it(tiny_file, tmp_path):
    condensed = m3d.condense(tiny_file, 2, "mtt", net=NET, out=tmp_path / "run", load_options={"zca": True}, **MTT)
    assert condensed.manifest["data"]["recipe"]["zca"] is True
    plain = m3d.condense(tiny_file, 2, "mtt", net=NET, bounded=True, **MTT)
    assert condensed.fingerprint != plain.fingerprint and "transform" not in plain.manifest["data"]
    assert plain.images.min() >= 0 and plain.images.max() <= 1 and plain.bounded and not condensed.bounded
    loaded = m3d.CondensedSet.load(tmp_path / "run")
    settings = {"net": NET, "repeats": 2, "protocol": make_protocol("dsa", epochs=8)}
    own = m3d.evaluate(loaded, **settings)
    named = m3d.evaluate(loaded, tiny_file, **settings)  # other data follow the set
    given = m3d.evaluate(loaded, m3d.load_data(tiny_file, zca=True), **settings)
    without = m3d.evaluate(loaded, m3d.load_data(tiny_file), **settings)
    assert own.record["data"]["transform"] == "zca:epsilon=0.1" and "transform" not in without.record["data"]
    assert own.last == named.last == given.last


def test_an_evaluation_sees_training_and_test_images_whitened(white, monkeypatch):
    from m3d import evaluation

    seen = {}

    class Watched(evaluation.Trainer):
        def __init__(self, net, images, *others):
            seen["train"] = images.take(torch.tensor([4]))
            super().__init__(net, images, *others)

        def accuracy(self, test, *others):
            seen["test"] = test.take(torch.tensor([9]))
            return super().accuracy(test, *others)

    monkeypatch.setattr(evaluation, "Trainer", Watched)
    condensed = m3d.condense(white, 2, "random", net=NET)
    m3d.evaluate(condensed, white, net=NET, repeats=1, protocol=make_protocol("dsa", epochs=1))
    normalise = white.normalise()
    torch.testing.assert_close(seen["train"], normalise(condensed.decoded()[0][4:5]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(seen["test"], normalise(white.test.images[9:10].float() / 255), atol=1e-4, rtol=1e-4)


def test_a_resumed_run_is_whitened_too(tiny_file, tmp_path, monkeypatch):
    monkeypatch.setattr("m3d.engine._REPORT_SECONDS", 0.0)
    options = {"net": NET, "load_options": {"zca": True}, **MTT, "steps": 4}
    whole = m3d.condense(tiny_file, 2, "mtt", **options)

    def stop(progress):
        if progress.step == 2:
            import signal

            signal.raise_signal(signal.SIGINT)

    with pytest.raises(m3d.errors.Interrupted):
        m3d.condense(tiny_file, 2, "mtt", out=tmp_path / "run", report=stop, **options)
    assert m3d.resume(tmp_path / "run").fingerprint == whole.fingerprint


def test_a_set_of_whitened_data_asks_for_the_whitening(white, tmp_path):
    condensed = m3d.condense(white, 2, "random", net=NET)
    with pytest.raises(M3DError, match=r"transformed by zca:epsilon=0\.1.*load_data\(\.\.\., zca=True\)"):
        CondensedDataset(condensed)
    images = CondensedDataset(condensed, normalise=white.normalise()).images
    torch.testing.assert_close(images, white.normalise()(condensed.images))
    assert torch.equal(CondensedDataset(condensed, normalise=False).images, condensed.images)
    export(condensed, "npz", tmp_path / "set.npz")
    assert str(np.load(tmp_path / "set.npz")["transform"]) == "zca:epsilon=0.1"
    export(condensed, "pt", tmp_path / "set.pt")
    assert torch.load(tmp_path / "set.pt", weights_only=True)["transform"] == "zca:epsilon=0.1"
    path = export(condensed, "imagefolder", tmp_path / "folder")
    assert json.loads((path / "manifest.json").read_text())["data"]["transform"] == "zca:epsilon=0.1"


def test_the_command_line_whitens(capsys, tiny_file, tmp_path):
    def record(*arguments):
        with pytest.raises(SystemExit):
            main([str(a) for a in arguments])
        return json.loads(capsys.readouterr().out)

    run, small = tmp_path / "run", ["--net", NET, "--json"]
    made = record("condense", tiny_file, "--method", "random", "--ipc", 1, "--zca", "--out", run, *small)
    assert made["data"]["transform"] == "zca:epsilon=0.1"
    brief = [*small, "--epochs", 1, "--repeats", 1]
    assert record("evaluate", run, *brief)["data"]["transform"] == "zca:epsilon=0.1"
    assert record("evaluate", run, "--data", tiny_file, *brief)["data"]["transform"] == "zca:epsilon=0.1"
    assert "transform" not in record("evaluate", run, "--no-zca", *brief)["data"]
    assert "transform" not in record("evaluate", "--full", tiny_file, *brief)["data"]
    assert record("evaluate", "--full", tiny_file, "--zca", *brief)["data"]["transform"] == "zca:epsilon=0.1"
