"""Networks trained on real data: trained once, by all processes together, and bit for bit those of one process."""

import json
from itertools import chain

import pytest
import scenes
import torch
from launch import SCENES, start, together
from safetensors.torch import load_file

from m3d.errors import Interrupted
from m3d.runtime import time_limit
from m3d.shards import Ranks
from m3d.train import Trainer

ALL = ("encode", "experts", "condense")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """(folder, what one process told of every scene)."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("M3D_CACHE", "")  # put back afterwards
        patch.setattr(Trainer, "run", scenes._counted)
        for name in ALL:
            scenes.play(folder, name)
    return folder, [json.loads((folder / f"{name}-0.json").read_text()) for name in ALL]


def kept(folder):
    """The files of the first process's cache; no other process has one."""
    assert [path.name for path in folder.glob("cache-*")] == ["cache-0"]
    return {path.name: load_file(path) for path in (folder / "cache-0").rglob("*.safetensors")}


def same(tensors, others):
    return set(tensors) == set(others) and all(torch.equal(tensors[name], others[name]) for name in tensors)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_processes_share_the_training_and_all_hold_what_one_would_make(alone, tmp_path, ranks):
    folder, single = alone
    encode, experts, condense = shared = together(ranks, tmp_path, *ALL)
    whole = load_file(folder / "encoders-0.safetensors")
    for rank in range(ranks):
        assert same(load_file(tmp_path / f"encoders-{rank}.safetensors"), whole)
    files, expected = kept(tmp_path), kept(folder)
    assert set(files) == set(expected) and all(same(files[name], expected[name]) for name in files)
    assert len(files) == 4 + 2 * 4  # networks of four kinds; two groups of experts, epochs 0 to 3
    assert all(told["sets"] == single[2]["sets"] for told in condense)
    # Each network goes through each epoch once, in one of the processes.
    for told, one in zip(shared, single, strict=True):
        assert [sum(counts) for counts in zip(*(t["trained"] for t in told), strict=True)] == one["trained"]
    for told in (encode, experts):
        assert all(max(counts) - min(counts) <= 1 for counts in zip(*(t["trained"] for t in told), strict=True))
    assert single[0]["trained"] == [5] * 3 + [2] * 3 and single[1]["trained"] == [10, 10, 2, 2, 10, 2]
    assert single[2]["trained"] == [3 * 2, 2 * 6, 1 * 2]  # encoders × epochs, learners × steps, network × epochs
    # From the cache nothing is trained anywhere, and the time it once took counts.
    assert all(told["later"] == [] and told["earlier"] > 0 for told in encode)
    assert all(told["grouped"] for told in encode) and not single[0]["grouped"]
    # A group whose threads outlive its run aborts one process of forty when it ends (where /proc shows threads).
    assert all(told["threads"] <= 1 for told in condense)


def test_training_that_is_stopped_goes_on_with_another_number_of_processes(tmp_path, monkeypatch):
    """One process for an epoch, two for the next, one for the rest."""
    monkeypatch.setenv("M3D_CACHE", str(tmp_path / "whole"))
    whole = scenes.encoders(3, Ranks(), 4)
    monkeypatch.setenv("M3D_CACHE", str(tmp_path / "cache-0"))
    with time_limit(0), pytest.raises(Interrupted, match="after 1 epoch of"):
        scenes.encoders(3, Ranks(), 4)
    (told,) = together(2, tmp_path, "stop")
    assert [t["trained"] for t in told] == [[1], [2]]
    assert all(t["kind"] == "Interrupted" and "stopped after 2 epochs" in t["error"] for t in told)
    assert not (tmp_path / "cache-1").exists()
    monkeypatch.setattr(scenes, "done", [])
    monkeypatch.setattr(Trainer, "run", scenes._counted)
    resumed = scenes.encoders(3, Ranks(), 4)
    assert scenes.done == [3, 3] and torch.equal(resumed.final, whole.final) and resumed.earlier > 0


def test_a_process_that_fails_says_why_and_the_others_repeat_it(tmp_path):
    (told,) = together(3, tmp_path, "fail")
    assert told[2]["kind"] == "RuntimeError" and told[2]["error"].startswith("the device fell off the bus — ")
    for other in told[:2]:
        assert other["kind"] == "M3DError" and len(other["error"]) < 1100
        assert other["error"].startswith(
            "process 2 of 3 failed, and with it the run: RuntimeError: the device fell off"
        )
    assert not list(tmp_path.glob("cache-*"))


def test_a_process_that_is_gone_is_noticed(tmp_path):
    process = start(2, SCENES, tmp_path, "die")
    process.communicate(timeout=120)
    assert process.returncode != 0
    told = json.loads((tmp_path / "die-0.json").read_text())
    assert "another process of this run has stopped" in told["error"] and not (tmp_path / "die-1.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu does it with NCCL")
def test_every_process_exchanges_tensors_on_its_own_device(tmp_path):
    (told,) = together(2, tmp_path, "here")
    alone = scenes.condensed_here()
    for rank, one in enumerate(told):
        assert one["device"] == "cpu" and one["backend"] == "ProcessGroupGloo" and one["rank"] == rank
        assert one["joined"] == [[0.0] * 3, [1.0] * 3] and one["given"] == [[0.0] * 3] and one["set"] == alone


def test_what_torchrun_says_of_one_process(monkeypatch):
    """It talks to itself as several do to each other, and knows that it was started anew."""
    assert Ranks.from_environment() == Ranks() and Ranks().alone
    told = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "TORCHELASTIC_RESTART_COUNT": 2, "TORCHELASTIC_RUN_ID": "none"}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))
    ranks = Ranks.from_environment()
    assert ranks == Ranks(restarts=2, launched=True) and not ranks.alone and ranks.leads
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Ranks.from_environment() == Ranks(0, 2, 0, 2, True)


def test_a_share_is_consecutive_and_even():
    for world in (1, 2, 3, 8):
        for count in (0, 1, 5, 16):
            shares = [Ranks(rank, world).share(count) for rank in range(world)]
            assert list(chain.from_iterable(shares)) == list(range(count))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
            assert sum(map(bool, shares)) == Ranks(0, world).workers(count)
