"""What stops a run or makes it smaller: numbers that break, a loss that rises, too little memory, wrong settings."""

import copy

import pytest
import torch
from short import CPU, NET, method_of, run

import m3d
from m3d.engine import condense
from m3d.errors import M3DError
from m3d.kernels import Linear
from m3d.method import Matching, Method
from m3d.methods import Task, make_method
from m3d.nets import FlatNet, make_net
from m3d.objectives import MMD, Objective
from m3d.players import Descent
from m3d.pools import Fresh
from m3d.runtime import Runtime
from m3d.select import RandomReal
from m3d.step import Step
from m3d.tiles import Tiles


class Poisoned(Objective):
    """NaN for class 1 from the third step on."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, goal, seen):
        self.calls += 1
        value = MMD(Linear())(goal, seen)
        return value * torch.tensor([1.0, float("nan") if self.calls > 3 else 1.0, 1.0])


class Growing(Poisoned):
    def forward(self, goal, seen):
        self.calls += 1
        return MMD(Linear())(goal, seen) * torch.tensor([1.0, 1.0, 10.0 ** (self.calls / 20)])


class Spiking(Poisoned):
    """One step of a thousandfold loss."""

    def forward(self, goal, seen):
        self.calls += 1
        return MMD(Linear())(goal, seen) * (1000.0 if self.calls == 20 else 1.0)


def matching_with(objective, steps=10):
    return Method(RandomReal(), Tiles(1), Matching(steps, Fresh(), objective, Descent(1e-3), batch_real=4))


def test_classes_are_halved_when_memory_runs_out(tiny, monkeypatch, caplog):
    """At most one class fits: the run shrinks its chunks, and its result is that of chunks of one."""
    whole, loss, tried = run(tiny), Step.loss, []

    def hungry(self, classes, *draws):
        tried.append(len(classes))
        if len(classes) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss(self, classes, *draws)

    monkeypatch.setattr(Step, "loss", hungry)
    result = run(tiny)
    assert tried[:3] == [3, 2, 1] and set(tried[2:]) == {1} and "not enough memory" in caplog.text
    torch.testing.assert_close(result.pixels, whole.pixels, atol=1e-5, rtol=1e-4)

    def starving(self, classes, *draws):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Step, "loss", starving)
    with pytest.raises(M3DError, match="step 0 does not fit into memory with 1 class"):
        run(tiny)


def test_nan_stops_with_the_step_and_the_class(tiny):
    net = FlatNet(make_net(NET, tiny.shape, 3))
    with pytest.raises(M3DError, match=r"step 3: the loss of class 'class 1' is nan; try a smaller lr"):
        condense(matching_with(Poisoned()), tiny, net, 1, 0, CPU)


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_divergence_stops_with_the_class_at_a_step_that_no_clock_decides(tiny, seconds, monkeypatch):
    monkeypatch.setattr(
        "m3d.engine._REPORT_SECONDS", seconds
    )  # reports after every step, as on a slow machine, or never
    net = FlatNet(make_net(NET, tiny.shape, 3))
    with pytest.raises(M3DError, match=r"^step 64: the loss rose from .* most in class 'class 2'; the run diverges"):
        condense(matching_with(Growing(), steps=300), tiny, net, 1, 0, CPU)
    with pytest.raises(M3DError, match=r"^step 50: the loss rose"):
        condense(matching_with(Growing(), steps=50), tiny, net, 1, 0, CPU)
    condense(matching_with(Spiking(), steps=70), tiny, net, 1, 0, CPU)


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_black_and_white_images_stop_a_run_at_a_step_that_no_clock_decides(tiny, seconds, monkeypatch):
    monkeypatch.setattr("m3d.engine._REPORT_SECONDS", seconds)
    for steps in (5, 70):
        with pytest.raises(M3DError, match=rf"^step {min(steps, 64)}: .* pushed to black or white"):
            run(tiny, steps=steps, lr=1e6, factor=1)


def test_too_few_images_are_named(tiny):
    with pytest.raises(M3DError, match=r"class 'class 0' has 12 training images, but 40 different ones"):
        run(tiny, ipc=10)
    noise = run(tiny, ipc=10, init="noise", steps=1)
    assert noise.pixels.shape == (3, 10, 3, 8, 8)


def test_a_kernel_without_a_rate_asks_for_one(tiny):
    from m3d.kernels import KERNELS

    KERNELS.register("rateless")(lambda: Linear() * Linear())
    try:
        with pytest.raises(M3DError, match="no default learning rate; give one with lr"):
            make_method("m3d", Task("tiny", tiny.shape, 3, 1), {"kernel": "rateless"})
        assert make_method("m3d", Task("tiny", tiny.shape, 3, 1), {"kernel": "rateless", "lr": 0.1})[0].steps == 10_000
    finally:
        del KERNELS._entries["rateless"]


def test_wrong_settings_fail_before_any_work(tiny):
    for options, message in (
        ({"steps": 0}, "steps=0"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"ipm": 0}, "ipm=0"),
        ({"batch_real": 0}, "batch_real=0"),
        ({"kernel": "gauss"}, "Did you mean 'gaussian'"),
        ({"augment": "colour"}, "Did you mean 'color'"),
    ):
        with pytest.raises(M3DError, match=message):
            method_of(tiny, 1, **options)
    with pytest.raises(M3DError, match="ipc=0"):
        run(tiny, ipc=0)
    for arguments, message in (
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"precision": "fp8"}, "unknown precision 'fp8'"),
        ({"device": "cpu", "precision": "tf32"}, "CUDA only"),
        ({"device": "cpu", "precision": "fp16"}, "CUDA only"),
        ({"step_mode": "fast"}, "unknown step mode"),
    ):
        with pytest.raises(M3DError, match=message):
            Runtime.choose(**arguments)


@pytest.mark.parametrize("method", ["dm", "dc", "dsa", "cafe", "cafe-dsa", "datadam", "idm", "mtt"])
def test_pixels_leave_their_range_only_where_they_may(tmp_path, method):
    from toys import make_dataset

    data = make_dataset(per_class=20)
    settings = {"net": NET, "steps": 2, "lr": 50.0, "device": "cpu"}
    settings |= {"experts": 1, "expert_epochs": 3, "max_start": 1, "syn_steps": 2} if method == "mtt" else {}
    free = m3d.condense(data, 1, method, out=tmp_path / "free", bounded=False, **settings)
    assert not free.bounded and (free.images.min() < 0 or free.images.max() > 1)
    assert m3d.CondensedSet.load(tmp_path / "free").fingerprint == free.fingerprint
    held = m3d.condense(data, 1, method, bounded=True, **settings)
    assert held.bounded and held.images.min() >= 0 and held.images.max() <= 1


def test_noise_is_clipped_only_where_pixels_are_bounded(tiny):
    assert (tiny_noise := run(tiny, init="noise", steps=1).pixels).min() >= 0 and tiny_noise.max() <= 1
    method = make_method("dc", Task("tiny", tiny.shape, 3, 1), {"steps": 1, "lr": 1e-9, "bounded": False})[0]
    free = condense(method, tiny, FlatNet(make_net(NET, tiny.shape, 3)), 1, 0, CPU).pixels
    assert free.min() < 0 and free.max() > 1


def test_the_record_is_not_changed_by_a_run(tiny):
    method = matching_with(Poisoned(), steps=2)
    before = copy.deepcopy(method.matching.objective.calls)
    condense(method, tiny, FlatNet(make_net(NET, tiny.shape, 3)), 1, 0, CPU)
    assert method.matching.objective.calls == before
