"""Pre-trained encoders: where between their ends they lie, their training kept, resumed and paid for."""

import io
import logging
import re
import signal
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import m3d
from m3d import rng
from m3d.batches import Images
from m3d.costs import borrowing
from m3d.engine import condense
from m3d.errors import Interrupted, M3DError
from m3d.methods import Task, make_method
from m3d.nets import FlatNet, make_net
from m3d.pools import World
from m3d.pools.pretrained import Pretrained, encoder_recipe
from m3d.runtime import Runtime, time_limit
from m3d.terminal import said
from m3d.train import Recipe, Trainer
from m3d.trained import cache_folder, trained_networks

CPU = Runtime.choose("cpu")
NET = "convnet2:width=4"
SMALL = {"encoders": 2, "encoder_epochs": 2, "batch_real": 5}


def live(data, **settings):
    net = FlatNet(make_net(NET, data.shape, 3))
    return Pretrained(encoder_recipe(2), **{"networks": 3, **settings}).start(World(net, data, None, 0, CPU))


def share_of(pool, row):
    """λ of the current encoder, if it lies between the initial and the trained weights of network ``row``."""
    initial, final = pool.networks.initial[row].double(), pool.networks.final[row].double()
    way = initial - final
    share = float((pool.parameters_flat.double() - final) @ way / (way @ way))
    torch.testing.assert_close(pool.parameters_flat.double(), final + share * way, atol=1e-6, rtol=1e-5)
    return share


def test_an_encoder_lies_between_the_initial_and_the_trained_weights_of_one_network(tiny):
    pool = live(tiny, low=0.2, high=0.6)
    place = pool.eyes().flat.data_ptr(), pool.eyes().trained.data_ptr()
    shares, rows = [], []
    for step in range(240):
        assert pool.due(step)
        pool.draw(step)
        (row,) = [r for r in range(3) if torch.equal(pool.eyes().trained, pool.networks.final[r])]
        rows.append(row)
        shares.append(share_of(pool, row))
    assert (pool.eyes().flat.data_ptr(), pool.eyes().trained.data_ptr()) == place  # a recorded step reads these
    assert min(torch.bincount(torch.tensor(rows))) > 55
    shares = torch.tensor(shares)
    assert 0.2 <= shares.min() < 0.22 and 0.58 < shares.max() <= 0.6 and abs(shares.mean() - 0.4) < 0.03
    by_row = [shares[torch.tensor(rows) == r].mean() for r in range(3)]
    assert max(by_row) - min(by_row) < 0.07  # independent of each other
    assert pool.eyes().trust is None and not pool.state_dict()  # a function of (seed, step): nothing is saved


def test_ends_of_the_range_and_iterations_per_model(tiny):
    trained, fresh = live(tiny, low=0.0, high=0.0, every=4), live(tiny, low=1.0, high=1.0)
    assert [trained.due(step) for step in range(5)] == [True, False, False, False, True]
    trained.draw(4)
    assert torch.equal(trained.parameters_flat, trained.trained)
    first = trained.parameters_flat.clone()
    trained.restore(7)  # the middle of the same encoder's turn
    assert torch.equal(trained.parameters_flat, first)
    fresh.draw(0)
    assert any(torch.equal(fresh.parameters_flat, row) for row in fresh.networks.initial)
    assert not torch.equal(fresh.parameters_flat, fresh.trained)


def test_draws_are_made_in_blocks_and_each_depends_on_its_number_alone(tiny):
    pool = live(tiny, low=0.1, high=0.8, every=2)
    for step in (0, 1, 126, 128, 130, 2):  # both sides of a block's end, and back
        pool.draw(step)
        words = rng.bits(0, rng.Purpose.MIXTURE, torch.tensor([step // 2]), torch.arange(2), 1)[0, :, 0]
        row, share = int(words[0] % 3), 0.1 + 0.7 * float(words[1] >> 8) * 2.0**-24
        assert torch.equal(pool.trained, pool.networks.final[row])
        expected = torch.lerp(pool.networks.final[row], pool.networks.initial[row], share)
        torch.testing.assert_close(pool.parameters_flat, expected)


def test_the_ramp_raises_the_trust_in_proportion(tiny):
    pool = live(tiny, ramp=4, every=2)
    trusts = []
    for step in range(0, 8, 2):
        pool.draw(step)
        trusts.append(float(pool.eyes().trust))
    assert trusts == [0.25, 0.75, 1.0, 1.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"networks": 0}, "encoders=0"),
        ({"every": 0}, "ipm=0"),
        ({"ramp": -1}, "ramp=-1"),
        ({"low": 0.7, "high": 0.3}, r"mix_low=0\.7, mix_high=0\.3"),
        ({"high": 1.5}, r"mix_high=1\.5"),
    ],
)
def test_bad_pools_are_refused(settings, message):
    with pytest.raises(M3DError, match=message):
        Pretrained(encoder_recipe(2), **settings)


def test_training_that_is_stopped_goes_on_where_it_was(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("M3D_CACHE", str(tmp_path / "whole"))
    whole = trained_networks(tiny, NET, encoder_recipe(3), 2, 0, CPU)
    assert whole.seconds > 0 and whole.earlier == 0
    monkeypatch.setenv("M3D_CACHE", str(tmp_path / "stopped"))
    for done in (1, 2):
        with time_limit(0), pytest.raises(Interrupted, match=f"after {done} epochs? of training"):
            trained_networks(tiny, NET, encoder_recipe(3), 2, 0, CPU)
    resumed = trained_networks(tiny, NET, encoder_recipe(3), 2, 0, CPU)
    assert torch.equal(resumed.final, whole.final) and 0 < resumed.earlier < resumed.seconds
    assert [file.suffix for file in cache_folder().iterdir()] == [".safetensors"]
    again = trained_networks(tiny, NET, encoder_recipe(3), 2, 0, CPU)
    assert again.seconds == again.earlier == resumed.seconds


def test_held_out_images_are_neither_learned_from_nor_mistaken_for(tiny, monkeypatch, tmp_path):
    """Networks of data with a part held out are others than those of all of them, and never see that part."""
    held = tiny.hold_out(0.25, 0)
    assert held.val is not None and len(held.train) < len(tiny.train)
    recipe = Recipe(2, 8, 0.05)
    whole, part = (trained_networks(data, NET, recipe, 2, 0, CPU).final for data in (tiny, held))
    assert not torch.equal(whole, part)
    spoiled = replace(held, val=held.test)
    monkeypatch.setenv("M3D_CACHE", str(tmp_path))  # nothing is there
    assert torch.equal(trained_networks(spoiled, NET, recipe, 2, 0, CPU).final, part)


def test_memory_of_networks_from_the_cache_counts(tiny, monkeypatch):
    """On a GPU training takes more of it than the steps; whoever finds the networks made pays as well."""
    monkeypatch.setattr(Runtime, "peak_memory", lambda self: 2**30)
    trained_networks(tiny, NET, Recipe(1, 8, 0.05), 2, 0, CPU)
    monkeypatch.setattr(Runtime, "peak_memory", lambda self: 5)
    with borrowing() as paid:
        trained_networks(tiny, NET, Recipe(1, 8, 0.05), 2, 0, CPU)
    assert paid.memory == 2**30 and paid.seconds > 0
    method = make_method("dance", Task("tiny", tiny.shape, 3, 1), {**SMALL, "steps": 2})[0]
    for _ in range(2):
        outcome = condense(method, tiny, FlatNet(make_net(NET, tiny.shape, 3)), 1, 0, CPU)
    assert outcome.borrowed_memory == 5


def test_weights_that_blow_up_are_not_kept(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("M3D_CACHE", str(tmp_path))
    with pytest.raises(M3DError, match="not finite"):
        trained_networks(tiny, NET, encoder_recipe(3, lr=1e38), 1, 0, CPU)
    assert not list(tmp_path.iterdir())


def test_the_training_counts_as_the_run_s_time(tiny, monkeypatch, tmp_path, caplog):
    """Also when an earlier run paid for it, and once only when the run is interrupted and resumed."""
    monkeypatch.setenv("M3D_CACHE", str(tmp_path))
    monkeypatch.setattr("m3d.engine._REPORT_SECONDS", 0.0)
    options = {**SMALL, "steps": 2}
    with caplog.at_level(logging.INFO, "m3d"):
        m3d.condense(tiny, 1, "m3d+", net=NET, **options)
    assert "training 2" in caplog.text and "trained in" in caplog.text
    (file,) = tmp_path.iterdir()
    monkeypatch.setattr("m3d.trained.read_checked", lambda path: (m3d.files.read_checked(path)[0], {"seconds": 1000.0}))
    assert file.exists() and 1000 < m3d.condense(tiny, 1, "m3d+", net=NET, **options).manifest["seconds"] < 1500

    def stop(progress):
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        m3d.condense(tiny, 1, "m3d+", net=NET, out=tmp_path / "run", report=stop, **options)
    assert 1000 < m3d.resume(tmp_path / "run", data=tiny).manifest["seconds"] < 1500


def test_what_is_logged_is_shown(tiny, monkeypatch, tmp_path):
    """Line by line, and how far the training is as a bar."""
    monkeypatch.setenv("M3D_CACHE", str(tmp_path))
    monkeypatch.setattr("m3d.trained._REPORT_SECONDS", 0.0)
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with said(console):
        trained_networks(tiny, NET, Recipe(3, 8, 0.05), 2, 0, CPU)
    logging.getLogger("m3d.trained").info("nobody listens")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    assert "training 2" in text and "3/3 epochs" in text and "nobody" not in text


def test_a_linear_schedule_falls_to_zero(tiny):
    recipe = Recipe(4, 8, 0.2, schedule="linear")
    assert [recipe.rate(e) for e in range(4)] == pytest.approx([0.2, 0.15, 0.1, 0.05])
    with pytest.raises(M3DError, match="linear schedule"):
        Recipe(4, 8, 0.2, schedule="linear", milestones=(2,))
    # keys of networks trained before there was a schedule stay what they were
    assert "schedule" not in Recipe(4, 8, 0.2).record() and recipe.record()["schedule"] == "linear"
    images = Images(tiny.train.images, tiny.train.labels(), tiny.normalise())
    trainer = Trainer(FlatNet(make_net(NET, tiny.shape, 3)), images, recipe, 1, 0, CPU)
    trainer.run(3)
    assert float(trainer.rate) == pytest.approx(0.1)
