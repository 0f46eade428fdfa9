"""Every registered method gets every check; the suite says how many it swept."""

import dataclasses
import json
import signal

import pytest
import torch

import m3d
from m3d.engine import condense
from m3d.errors import Interrupted
from m3d.method import Method
from m3d.methods import METHODS, Task, make_method
from m3d.nets import FlatNet, make_net
from m3d.runtime import Runtime
from m3d.step import Step

CPU = Runtime.choose("cpu")
NET = "convnet2:width=8"
NAMES = METHODS.names()
MATCHING = [name for name in NAMES if METHODS.get(name).options().get("steps")]  # all but the coresets


def short(name: str) -> dict[str, object]:
    """Options that make any method's run a matter of milliseconds."""
    known = METHODS.get(name).options()
    wanted = {"steps": 2, "batch_real": 4, "lr": 0.01, "network": NET, "epochs": 2}
    wanted |= {"syn_steps": 2, "batch_syn": 4, "experts": 2, "max_start": 2}
    wanted |= {"encoders": 2, "encoder_epochs": 1, "frequencies": 8}
    return {k: v for k, v in wanted.items() if k in known}


def first_step(name: str, data: m3d.Dataset) -> Step:
    method, _ = make_method(name, Task("tiny", data.shape, 3, 2), short(name))
    pixels = method.tiles.encode(method.init(data, method.tiles.count(2, data.shape), 0, CPU))
    step = Step(method, data, FlatNet(make_net(NET, data.shape, 3)), pixels, 0, CPU)
    step.refill(0)
    step.objective.draw(step.number)
    return step


def test_the_sweep_is_complete():
    expected = {"m3d", "dm", "random", "herding", "k-center", "dc", "dsa", "idc", "idc-i", "cafe", "cafe-dsa", "idm"}
    assert expected | {"datadam", "mtt", "m3d+", "dance", "ncfm", "dsdm"} <= set(NAMES)
    assert len(NAMES) == 18  # raise this with every method added: a sweep that shrinks is a failure
    assert set(NAMES) - set(MATCHING) == {"random", "herding", "k-center"}


@pytest.mark.parametrize("name", NAMES)
def test_documented(name):
    entry = METHODS.get(name)
    assert entry.summary.endswith(".") and len(entry.summary) > 20
    assert {"paper", "equation", "cost"} <= set(entry.about)


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_bits_and_a_round_trip(name, tiny, tmp_path):
    first = m3d.condense(tiny, 2, name, net=NET, out=tmp_path / "run", **short(name))
    again = m3d.condense(tiny, 2, name, net=NET, **short(name))
    other = m3d.condense(tiny, 2, name, net=NET, seed=1, **short(name))
    assert first.fingerprint == again.fingerprint
    if name != "k-center":  # its choice hardly depends on the network's seed
        assert first.fingerprint != other.fingerprint
    loaded = m3d.CondensedSet.load(tmp_path / "run")
    assert loaded.fingerprint == first.fingerprint
    # the manifest rebuilds the record
    options = json.loads(json.dumps(loaded.manifest["options"]))
    rebuilt = m3d.condense(tiny, 2, loaded.manifest["method"], net=loaded.manifest["net"], **options)
    assert rebuilt.fingerprint == first.fingerprint


@pytest.mark.parametrize("name", NAMES)
def test_the_record_is_frozen_and_its_options_are_checked(name, tiny):
    task = Task("tiny", tiny.shape, 3, 2)
    method, resolved = make_method(name, task, short(name))
    assert isinstance(method, Method) and set(resolved) == set(METHODS.get(name).options())
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.init = None
    with pytest.raises(m3d.M3DError, match="unknown option"):
        make_method(name, task, {"no_such_option": 1})


def parts(value: object) -> object:
    """All that a record is made of, as plain values: ``repr`` leaves out what modules hold."""
    if isinstance(value, torch.nn.Module):
        own = {k: parts(v) for k, v in vars(value).items() if not k.startswith("_")}
        inside = {k: parts(v) for k, v in (*value.named_children(), *value.named_parameters(), *value.named_buffers())}
        return type(value).__name__, own, inside
    if dataclasses.is_dataclass(value):
        return type(value).__name__, {f.name: parts(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return [parts(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, float, str, dict)) else repr(value)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_leaves_its_record_as_it_was(name, tiny):
    """Whatever a run makes and learns is its own: the same record gives the same set again."""
    method, _ = make_method(name, Task("tiny", tiny.shape, 3, 2), short(name))
    before, net = parts(method), FlatNet(make_net(NET, tiny.shape, 3))
    first = condense(method, tiny, net, 2, 0, CPU)
    assert parts(method) == before
    assert torch.equal(condense(method, tiny, net, 2, 0, CPU).pixels, first.pixels)


TASKS = [
    Task("cifar10", (3, 32, 32), 10, 1, True, 5000),
    Task("cifar100", (3, 32, 32), 100, 50, True, 500),
    Task("mnist", (1, 28, 28), 10, 10, False, 5421, False),
    Task("photos", (3, 224, 224), 10, 100, True, 1000),
]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.data)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_left_to_the_method_is_told_and_makes_the_same_record(name, task):
    """So a manifest says which learning rate was used, and a later version's rules do not change a resumed run."""
    method, told = make_method(name, task, {})
    unsaid = {option for option, value in told.items() if value is None}
    assert unsaid <= ({"batch_syn"} if name == "mtt" else set())  # MTT without mini-batches: all images
    again, same = make_method(name, task, json.loads(json.dumps(told)))
    assert parts(again) == parts(method) and same == told


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("name", MATCHING)
def test_a_run_stopped_after_any_step_goes_on_to_the_same_bits(name, at, tiny_file, tmp_path, monkeypatch):
    monkeypatch.setattr("m3d.engine._REPORT_SECONDS", 0.0)
    options = {**short(name), "steps": 3}
    whole = m3d.condense(tiny_file, 2, name, net=NET, **options)

    def stop(progress):
        if progress.step == at:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        m3d.condense(tiny_file, 2, name, net=NET, out=tmp_path / "run", report=stop, **options)
    assert m3d.resume(tmp_path / "run").fingerprint == whole.fingerprint


@pytest.mark.parametrize("name", MATCHING)
def test_compiled_equals_eager_without_breaks_or_recompilation(name, tiny):
    torch._dynamo.reset()  # it keeps eight versions of a function, and there are more methods
    step = first_step(name, tiny)
    compiled = torch.compile(step.loss, backend="aot_eager", fullgraph=True, dynamic=False)
    for k in range(2):
        step.pool.draw(k)
        draws = (step.lanes, step.real_index[k], step.syn_index[k], step.augmentation[k])
        with torch._dynamo.config.patch(error_on_recompile=k > 0):
            values = [
                (v := loss(*draws), torch.autograd.grad(v.sum(), step.synthetic.latent)[0])
                for loss in (step.loss, compiled)
            ]
        torch.testing.assert_close(values[0], values[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MATCHING)
def test_a_class_moves_only_its_own_images(name, tiny):
    step = first_step(name, tiny)
    step.pool.draw(0)
    loss = step.loss(step.lanes, step.real_index[0], step.syn_index[0], step.augmentation[0])
    (gradient,) = torch.autograd.grad(loss[1 % len(loss)], step.synthetic.latent)
    assert gradient[1].abs().sum() > 0
    if not step.objective.across_classes:
        assert gradient[0].abs().sum() == 0 and gradient[2].abs().sum() == 0
