"""What is settled before any long work: devices, weights, evaluations on the way, and what would save nothing."""

from __future__ import annotations

import signal
import weakref
from dataclasses import replace

import pytest
import torch
from short import CPU, NET, method_of, run
from toys import make_dataset

import m3d
from m3d import trained
from m3d.errors import Interrupted, M3DError
from m3d.evaluation import make_protocol
from m3d.methods import METHODS
from m3d.nets import FlatNet, make_net
from m3d.objectives import MMD
from m3d.pools.experts import train_experts
from m3d.runtime import Runtime
from m3d.step import Step
from m3d.train import Recipe, Trainer
from m3d.trained import default_recipe, trained_networks

QUICK = {"net": NET, "device": "cpu", "batch_real": 4}


@pytest.mark.parametrize("name", ["auto:1", "cpu:0", "cpu:x", "cuda:", "cuda:-1", "cuda:1.0", "gpu"])
def test_devices_that_are_none(name):
    with pytest.raises(M3DError, match=f"unknown device '{name}'"):
        Runtime.choose(name)


def test_one_of_several_gpus(monkeypatch):
    """Streams, recordings and kernels go to the current device, which must be the one that was asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen = Runtime.choose("cuda:01")
    assert (chosen.device, chosen.precision) == (torch.device("cuda", 1), "bf16")
    entered: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or torch.no_grad())
    for runtime, expected in ((Runtime.choose("cuda"), []), (chosen, [torch.device("cuda", 1)])):
        with runtime.active():
            assert entered == expected
    with pytest.raises(M3DError, match="device 'cuda:2': PyTorch sees 2 CUDA devices here"):
        Runtime.choose("cuda:2")


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("cafe", {"discriminate": -1}, "a weight of -1.0 is not valid"),
        ("datadam", {"balance": -0.5}, "a weight of -50.0 is not valid"),
        ("dm", {"moments": 2, "second": -1}, "a weight of -1.0 is not valid"),
        ("m3d+", {"encoder_lr": -0.05}, "a learning rate of -0.05 is not valid to train networks"),
        ("m3d+", {"encoder_lr": 0}, "a learning rate of 0.0 is not valid to train networks"),
        ("m3d+", {"decay": -1}, "the learning rate times -1.0 is not valid"),
        ("m3d", {"kernel": "polynomial:degree=300"}, "degree=300.*allowed: degree 1 to 16"),
        ("m3d", {"kernel": "polynomial:offset=inf"}, "offset=inf"),
        ("m3d", {"kernel": "gaussian:bandwidths=200"}, "bandwidths=200.*allowed: 1 to 16"),
    ],
)
def test_numbers_that_would_spoil_a_run(tiny, method, options, message):
    with pytest.raises(M3DError, match=message):
        m3d.condense(tiny, 2, method, steps=2, **QUICK, **options)


def test_nothing_is_a_weight():
    assert (0.0 * MMD(m3d.kernels.Linear())).weights == [0.0]
    with pytest.raises(M3DError, match="a weight of nan"):
        MMD(m3d.kernels.Linear()) * float("nan")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"net": "convnt3"}, "convnt3"),
        ({"protocol": "papre"}, "papre"),
        ({"repeats": 0}, "repeats=0"),
        ({"repeats": True}, "repeats=True"),
    ],
)
def test_wrong_evaluations_on_the_way_are_refused_before_the_first_step(tiny, tmp_path, wrong, message):
    seen = []
    with pytest.raises(M3DError, match=message):
        m3d.condense(
            tiny.hold_out(0.25, 0), 2, steps=4, eval_every=2, eval_options=wrong, out=tmp_path / "run",
            report=seen.append, **QUICK,
        )  # fmt: skip
    assert not seen and not (tmp_path / "run").exists()


def test_a_protocol_itself_judges_a_run_that_is_not_kept(tiny, tmp_path):
    given = {"steps": 2, "eval_every": 2, "eval_options": {"protocol": make_protocol("quick", epochs=1), "repeats": 1}}
    made = m3d.condense(tiny.hold_out(0.25, 0), 2, **given, **QUICK)
    assert [step for step, _ in made.manifest["validation"]] == [2]
    with pytest.raises(M3DError, match="needs the name of its protocol"):
        m3d.condense(tiny.hold_out(0.25, 0), 2, **given, **QUICK, out=tmp_path / "run")


def test_evaluation_options_without_evaluations(tiny):
    with pytest.raises(M3DError, match=r"eval_options=.*without eval_every"):
        m3d.condense(tiny, 2, steps=2, eval_options={"repeats": 1}, **QUICK)


@pytest.mark.parametrize(("method", "net"), [("cafe", NET), ("m3d", "convnet2:width=8,norm=batch")])
def test_classes_that_go_together_are_not_promised_to_go_apart(tiny, method, net):
    with pytest.raises(M3DError, match=f"{method} takes no classes_at_once=1: its .* all go through at once"):
        m3d.condense(tiny, 2, method, steps=2, classes_at_once=1, **{**QUICK, "net": net})
    assert len(m3d.condense(tiny, 2, "m3d", steps=2, classes_at_once=1, **QUICK).images) == 6


def test_fewer_classes_at_once_take_less_memory_not_more(monkeypatch):
    """However many chunks there are, their gradients, each as large as the set, are never kept side by side."""
    data = make_dataset(classes=6)
    method, net = method_of(data, 2), FlatNet(make_net(NET, data.shape, 6))
    step = Step(method, data, net, method.tiles.encode(method.init(data, 8, 0, CPU)), 0, CPU)
    step.chunk = 1
    step.refill(0)
    step.pool.draw(0)
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    original = torch.autograd.grad

    def grad(*arguments, **settings):
        alive.append(sum(reference() is not None for reference in made))
        found = original(*arguments, **settings)
        made.extend(map(weakref.ref, found))
        return found

    monkeypatch.setattr(torch.autograd, "grad", grad)
    step.advance()
    assert alive == [0, 1, 2, 2, 2, 2]  # the sum so far, and what was just added to it


@pytest.mark.parametrize("options", [{}, {"augment": "none"}])
def test_a_set_of_all_images_does_not_diverge_from_nothing(options):
    """Real and synthetic images are the same: the loss is zero but for rounding, and stays there."""
    data = make_dataset(per_class=4)
    outcome = run(data, ipc=4, steps=64, factor=1, lr=1e-6, **options)
    assert len(outcome.losses) == 64


@pytest.mark.parametrize("name", ["paper", "quick", "whole"])
def test_a_single_epoch_is_trained_at_the_full_rate(name):
    recipe = make_protocol(name, epochs=1).recipe
    assert recipe.rate(0) == recipe.lr and default_recipe(1).rate(0) == default_recipe(1).lr


def test_trained_networks_are_those_of_the_same_arithmetic_and_units(tiny):
    recipe = Recipe(epochs=1, batch=8, lr=0.1)
    first = trained_networks(tiny, NET, recipe, 1, 0, CPU)
    assert first.earlier == 0 and trained_networks(tiny, NET, recipe, 1, 0, CPU).earlier > 0
    strict = Runtime.choose("cpu", deterministic=True)
    assert trained_networks(tiny, NET, recipe, 1, 0, strict).earlier == 0
    darker = trained_networks(replace(tiny, mean=(0.1, 0.1, 0.1)), NET, recipe, 1, 0, CPU)
    assert darker.earlier == 0 and not torch.equal(darker.final, first.final)


def test_training_experts_stops_when_asked_and_goes_on(tiny, monkeypatch):
    net, recipe, epochs = FlatNet(make_net(NET, tiny.shape, 3)), Recipe(epochs=4, batch=8, lr=0.05, momentum=0.0), []
    original = Trainer.run

    def once(self, until):
        epochs.append(until)
        original(self, until)
        if until == 2 and epochs.count(2) == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Trainer, "run", once)
    with pytest.raises(Interrupted, match="2 epochs of training its experts"):
        train_experts(net, tiny, recipe, 1, 4, 0, CPU)
    train_experts(net, tiny, recipe, 1, 4, 0, CPU)
    assert epochs == [1, 2, 3, 4]


def test_sub_tasks_count_the_networks_they_share_once(tiny, monkeypatch):
    given = {"encoders": 1, "encoder_epochs": 1, "steps": 1, **QUICK}
    m3d.condense(tiny, 2, "m3d+", **given)  # trains them
    original = trained._read
    monkeypatch.setattr(trained, "_read", lambda *arguments: (original(*arguments)[0], 1000.0, 0))
    for parts in (1, 3):
        made = m3d.condense(tiny, 2, "m3d+", subtasks=parts, **given)
        assert 1000 < made.manifest["seconds"] < 2000


def test_the_way_is_judged_by_the_learned_rate(tiny, monkeypatch):
    rates = []
    monkeypatch.setattr(
        "m3d.prepare.evaluate_set",
        lambda condensed, data, **settings: rates.append(condensed.manifest.get("learned")) or _Judged(),
    )
    options = {"experts": 1, "expert_epochs": 3, "max_start": 1, "span": 1, "syn_steps": 2}
    made = m3d.condense(
        tiny.hold_out(0.25, 0), 2, "mtt", net=NET, device="cpu", steps=2, eval_every=2,
        eval_options={"protocol": "mtt"}, **options,
    )  # fmt: skip
    assert rates == [made.manifest["learned"]]


def test_numbers_that_broke_are_named_before_they_are_judged(tiny):
    options = {"experts": 1, "expert_epochs": 3, "max_start": 1, "span": 1, "syn_steps": 2, "lr_lr": 1e30}
    judged = {"eval_every": 2, "eval_options": {"protocol": "mtt:epochs=1", "repeats": 1}}
    with pytest.raises(M3DError, match=r"the loss of class .* is nan"):
        m3d.condense(tiny.hold_out(0.25, 0), 2, "mtt", net=NET, device="cpu", steps=6, **judged, **options)


def test_what_experts_cost_does_not_depend_on_the_cache(tiny):
    from m3d.files import read_json, write_json
    from m3d.trained import cache_folder

    options = {"experts": 1, "expert_epochs": 3, "max_start": 2, "span": 1, "syn_steps": 2, "steps": 1, "seed": 11}
    before = set(cache_folder().glob("experts-*/seconds.json"))
    m3d.condense(tiny, 2, "mtt", net=NET, device="cpu", **options)
    (told,) = set(cache_folder().glob("experts-*/seconds.json")) - before
    each = read_json(told)
    assert sorted(each) == [f"experts-0-0-epoch-{k}.safetensors" for k in range(3)] and min(each.values()) >= 0
    write_json(told, {**each, "experts-0-0-epoch-2.safetensors": 1000.0})
    assert 1000 < m3d.condense(tiny, 2, "mtt", net=NET, device="cpu", **options).manifest["seconds"] < 1100
    told.write_text("[")
    assert m3d.condense(tiny, 2, "mtt", net=NET, device="cpu", **options).manifest["seconds"] < 100


class _Judged:
    mean = 1.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lrr": 3}, "unknown option of m3d 'lrr'"),
        ({"lr": "much"}, "lr='much' is not valid"),
        ({"method": "m3"}, "unknown method 'm3'"),
        ({"kernel": "gausian"}, "unknown kernel 'gausian'. Did you mean 'gaussian'"),
        ({"kernel": "polynomial:degre=3"}, "unknown option of polynomial 'degre'"),
        ({"init": "hering"}, "unknown initialisation 'hering'. Did you mean 'herding'"),
        ({"method": "dsa", "init": "hering"}, "unknown initialisation 'hering'"),  # a variant's option
        ({"net": "convnet3,width=16"}, "options follow a colon, as in convnet3:width=16"),
        ({"net": "convnet3:widht=16"}, "unknown option of convnet3 'widht'"),
        ({"factor": 17}, "factor=17 is not valid; allowed: 1 to 16"),
        ({"method": "idc", "factor": 0}, "factor=0 is not valid"),
        ({"cell": -1}, "cell=-1 is not valid"),
        ({"method": "random", "margin": -2}, "margin=-2 is not valid"),
        *[
            ({"method": name, "factor": 2, "cell": 9}, "cell=9 and factor=2 both say how images are cut")
            for name in METHODS.names()
            if {"factor", "cell"} <= METHODS.get(name).options().keys()
        ],
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"precision": "fp8"}, "unknown precision 'fp8'"),
        ({"ipc": 0}, "ipc=0 is not valid"),
        ({"eval_every": -1}, "eval_every=-1 is not valid"),
        ({"checkpoint_seconds": 0}, "checkpoint_seconds=0 is not valid"),
    ],
)
def test_a_slip_is_said_before_any_image_is_read(monkeypatch, tmp_path, wrong, message):
    """A folder of 100,000 images takes half a minute to read."""
    monkeypatch.setattr("m3d.api.load_data", lambda *_, **__: pytest.fail("the data were read"))
    with pytest.raises(M3DError, match=message):
        m3d.condense(tmp_path, **{"ipc": 1, "method": "m3d", **wrong})


def test_fewer_images_are_advised_with_the_settings_they_would_have():
    """One image per class has sixteen cells by default, two have eight together."""
    few, more = make_dataset(3, 6, (3, 32, 32)), make_dataset(3, 20, (3, 32, 32))
    with pytest.raises(M3DError, match="take factor=1, or noise instead"):
        m3d.condense(few, 2, "m3d+", device="cpu")
    with pytest.raises(M3DError, match="take ipc=1 at most, or factor=1"):
        m3d.condense(few, 2, "m3d+", factor=2, device="cpu")
    with pytest.raises(M3DError, match="take ipc=5 at most, or factor=1"):
        m3d.condense(more, 6, "m3d+", device="cpu")


def test_too_few_images_and_what_would_fit():
    data = make_dataset(3, 20, (3, 32, 32))
    for options, told in (
        ({"method": "random", "ipc": 200}, r"but 200 different ones are needed.*; take ipc=20 at most$"),
        ({"method": "m3d", "ipc": 6}, r"take ipc=5 at most, or factor=1, or noise instead \(init='noise'\)$"),
        (
            {"method": "random", "ipc": 3, "factor": 2, "chroma": "half"},
            "take ipc=2 at most, or chroma='full', or factor=1$",
        ),
        ({"method": "random", "ipc": 1, "factor": 5}, r"\(1 stored, which hold 25 images\); take factor=4$"),
        ({"method": "random", "ipc": 6, "factor": 2, "margin": 4}, r"which hold 24 images\); take ipc=5 at most$"),
        ({"method": "random", "ipc": 1, "factor": 4, "chroma": "half"}, "take chroma='full', or factor=2$"),
        ({"method": "random", "ipc": 6, "cell": 14}, "take ipc=4 at most, or cell=18$"),
    ):
        with pytest.raises(M3DError, match=told):
            m3d.condense(data, device="cpu", **options)
