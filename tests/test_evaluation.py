"""Evaluation: honest records, and long ones that survive a stop."""

import dataclasses
import json
import re
import signal

import pytest
import torch
from toys import make_dataset

import m3d
from m3d.errors import Interrupted, M3DError
from m3d.evaluation import Protocol, evaluate, evaluate_whole, make_protocol
from m3d.run_folder import RunFolder
from m3d.runtime import Runtime
from m3d.train import Recipe

CPU = Runtime.choose("cpu")
NET = "convnet2:width=8"


@pytest.fixture
def condensed(tiny):
    return m3d.condense(tiny, 2, "random")


def test_the_headline_is_the_last_epoch(tiny, condensed):
    result = evaluate(condensed, tiny, net=NET, protocol=make_protocol("paper", epochs=8), repeats=3, runtime=CPU)
    assert len(result.last) == 3 and list(result.checks) == [2, 4, 6, 8]
    assert result.mean == pytest.approx(sum(result.last) / 3) == pytest.approx(result.checks[8])
    assert all(b >= v for b, v in zip(result.best, result.last, strict=True))
    record = json.loads(json.dumps(result.as_record()))
    assert record["set"] == condensed.fingerprint and record["data"]["fingerprint"] == tiny.train.fingerprint
    assert record["n"] == 3 and record["sd"] == pytest.approx(result.sd, abs=1e-3) and record["method"] == "random"
    assert {"commit", "command", "torch", "device", "when", "seconds", "peak_memory"} <= set(record)
    assert f"{result.mean:.2f}" in str(result) and "n=3" in str(result)


def test_best_is_each_networks_best_of_the_checks(tiny, condensed, monkeypatch):
    """Accuracies that rise and fall: the last stands for itself, the best is taken network by network."""
    measured = iter(torch.tensor([[10.0, 50.0], [40.0, 20.0], [30.0, 60.0], [20.0, 30.0]], dtype=torch.float64))
    monkeypatch.setattr("m3d.train.Trainer.accuracy", lambda self, test: next(measured))
    result = evaluate(condensed, tiny, net=NET, protocol=make_protocol("paper", epochs=4), repeats=2, runtime=CPU)
    assert result.last == [20.0, 30.0] and result.best == [40.0, 60.0] and result.checks == {1: 30, 2: 30, 3: 45, 4: 25}


def test_it_learns_easy_data_and_a_seed_repeats_it(tiny, condensed):
    protocol = make_protocol("quick", epochs=60)
    first, again, other = (
        evaluate(condensed, tiny, net=NET, protocol=protocol, repeats=2, seed=s, runtime=CPU) for s in (0, 0, 1)
    )
    assert first.mean > 90
    assert first.last == again.last and first.checks == again.checks
    assert other.record["seed"] == 1


@pytest.mark.parametrize(("images", "batch", "told"), [
    (33, 16, "of 33 images the last batch of an epoch has 1; .* batch=17 makes none"),
    (132, 64, "of 132 images the last batch of an epoch has 4; .* batch=66 makes none"),  # 65 would leave 2
    (33, 17, None), (135, 64, None), (30, 15, None), (3, 64, None),
])  # fmt: skip
def test_a_last_batch_of_a_few_images_is_told(caplog, images, batch, told):
    data = make_dataset(3, images // 3)
    evaluate_whole(data, net="convnet1:width=1", protocol=f"paper:batch={batch},epochs=1", repeats=1, runtime=CPU)
    assert re.search(told, caplog.text) if told else not caplog.text


def test_whole_data_and_splits(tiny):
    held = tiny.hold_out(0.25, 0)
    result = evaluate_whole(
        held, net=NET, protocol=make_protocol("whole", epochs=8), repeats=1, split="val", runtime=CPU
    )
    assert result.record["method"] == "whole" and result.record["data"]["split"] == "val"
    with pytest.raises(M3DError, match="split 'val': no part of tiny was held out"):
        evaluate_whole(tiny, net=NET, protocol=make_protocol("whole", epochs=1), repeats=1, split="val", runtime=CPU)


def test_mirrors_are_left_out_where_they_change_the_class(digits):
    condensed = m3d.condense(digits, 1, "random")
    for protocol in ("paper", "dsa"):
        result = evaluate(
            condensed, digits, net=NET, protocol=make_protocol(protocol, epochs=1), repeats=1, runtime=CPU
        )
        assert "flip" not in result.record["protocol"]["augment"] and "flip" in str(
            make_protocol(protocol).recipe.augment
        )


def test_images_are_not_mixed_where_that_spoils_them(digits):
    condensed, protocol = m3d.condense(digits, 1, "random"), make_protocol("paper", epochs=1)
    for data, probability in ((digits, 0.5), (dataclasses.replace(digits, cutmix=False), 0.0)):
        result = evaluate(condensed, data, net=NET, protocol=protocol, repeats=1, runtime=CPU)
        assert result.record["protocol"]["cutmix"] == probability


def test_a_stopped_evaluation_goes_on_as_if_never_stopped(tiny, condensed, tmp_path):
    settings = {"net": NET, "protocol": make_protocol("paper", epochs=40), "repeats": 2, "runtime": CPU}
    whole = evaluate(condensed, tiny, **settings)
    folder = RunFolder(tmp_path)

    def stop(epoch, epochs):
        if epoch == 20:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted, match="stopped after 20 epochs"):
        evaluate(condensed, tiny, report=stop, folder=folder, **settings)
    assert len(list(tmp_path.glob("evaluation-*.safetensors"))) == 1
    other = evaluate(condensed, tiny, folder=folder, **{**settings, "repeats": 1})  # another one: not this checkpoint
    assert len(other.last) == 1
    seen = []
    resumed = evaluate(condensed, tiny, folder=folder, report=lambda e, n: seen.append(e), **settings)
    assert seen == list(range(21, 41))  # the first half was not trained again
    assert resumed.last == whole.last and resumed.best == whole.best and resumed.checks == whole.checks
    assert not list(tmp_path.glob("evaluation-*"))


def test_checkpoints_by_the_clock_and_torn_ones(tiny, condensed, tmp_path):
    settings = {"net": NET, "protocol": make_protocol("paper", epochs=6), "repeats": 1, "runtime": CPU}
    folder = RunFolder(tmp_path)
    found = []

    def look(epoch, epochs):
        found.extend(tmp_path.glob("evaluation-*"))

    evaluate(condensed, tiny, folder=folder, checkpoint_seconds=0.0, report=look, **settings)
    assert found and not list(tmp_path.glob("evaluation-*"))
    path = tmp_path / found[0].name
    path.write_bytes(b"torn")
    with pytest.raises(M3DError, match="not a whole safetensors file"):
        evaluate(condensed, tiny, folder=folder, **settings)


def test_wrong_requests(tiny, condensed, digits):
    with pytest.raises(M3DError, match="they must be the same"):
        evaluate(condensed, digits, runtime=CPU)
    with pytest.raises(M3DError, match="must rise and end at 4"):
        Protocol("odd", Recipe(epochs=4, batch=2, lr=0.1), (1, 2))
