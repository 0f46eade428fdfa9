"""How a step is executed: global switches, precision, compiling where it pays, what records say of the machine."""

import pytest
import torch
from short import CPU, NET, method_of, run

from m3d.errors import M3DError
from m3d.methods import Task, make_method
from m3d.nets import FlatNet, make_net
from m3d.registry import parse_spec
from m3d.runtime import COMPILE_FROM, COMPILE_OWN_FROM, Runtime
from m3d.step import Step


def test_global_switches_are_put_back():
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.allow_tf32,
    )
    for deterministic in (True, False):
        with Runtime.choose("cpu", "fp32", deterministic).active():
            assert torch.are_deterministic_algorithms_enabled() is deterministic
            assert torch.backends.cudnn.benchmark is not deterministic and not torch.backends.cudnn.allow_tf32
    after = (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.allow_tf32,
    )
    assert before == after


def test_memory_is_counted_from_the_beginning_of_the_outermost_work(monkeypatch):
    began: list[str] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: began.append(str(device)))
    gpu = Runtime(torch.device("cuda"), "bf16")
    with gpu.counting_memory(), gpu.counting_memory():  # a set judged while it is made
        pass
    assert began == ["cuda"]
    with pytest.raises(ValueError, match="broken"), gpu.counting_memory():
        raise ValueError("broken")
    with gpu.counting_memory(), CPU.counting_memory():
        pass
    assert began == ["cuda"] * 3


def test_only_fp16_scales_its_losses():
    half, other = Runtime(torch.device("cuda"), "fp16"), Runtime(torch.device("cuda"), "bf16")
    assert (half.dtype, half.loss_scale) == (torch.float16, 1024.0)
    assert (other.dtype, other.loss_scale) == (torch.bfloat16, 1.0)


def test_scaling_the_loss_changes_no_bit_where_nothing_is_lost(tiny, monkeypatch):
    plain = run(tiny)
    monkeypatch.setattr(Runtime, "loss_scale", property(lambda self: 2.0**10))
    assert torch.equal(run(tiny).pixels, plain.pixels)


def test_compiled_step_equals_eager_in_one_graph(tiny):
    """One graph without breaks; losses and gradients equal to 1e-5; a second set of draws does not recompile."""
    method = method_of(tiny, 3, batch_syn_max=5)
    net = FlatNet(make_net(NET, tiny.shape, 3))
    step = Step(method, tiny, net, method.tiles.encode(method.init(tiny, 12, 0, CPU)), 0, CPU)
    step.refill(0)
    torch._dynamo.reset()  # it compiles one function for at most eight different methods
    compiled = torch.compile(step.loss, backend="aot_eager", fullgraph=True, dynamic=False)
    for k in range(3):
        step.pool.draw(k)
        draws = (step.lanes, step.real_index[k], step.syn_index[k], step.augmentation[k])
        values = []
        for loss in (step.loss, compiled):
            with torch._dynamo.config.patch(error_on_recompile=k > 0):
                value = loss(*draws)
            values.append((value, torch.autograd.grad(value.sum(), step.synthetic.latent)[0]))
        torch.testing.assert_close(values[1], values[0], atol=1e-5, rtol=1e-5)


def test_records_say_what_part_of_a_device_a_run_had(monkeypatch):
    assert "device_share" not in Runtime.choose("cpu").describe()
    monkeypatch.setenv("M3D_DEVICE_SHARE", "0.25")
    assert Runtime.choose("cpu").describe()["device_share"] == 0.25
    for wrong in ("0", "1.5", "a half", "nan"):
        monkeypatch.setenv("M3D_DEVICE_SHARE", wrong)
        with pytest.raises(M3DError, match=f"M3D_DEVICE_SHARE='{wrong}'"):
            Runtime.choose("cpu")


@pytest.mark.parametrize(
    ("method", "network", "steps", "compiled"),
    [
        ("m3d", "convnet2:width=16", COMPILE_OWN_FROM, True),
        ("m3d", "convnet2:width=16", COMPILE_OWN_FROM - 1, False),
        ("m3d:augment=none", "convnet2:width=16", COMPILE_OWN_FROM - 1, False),
        ("m3d:augment=rotate", "convnet2:width=16", COMPILE_FROM, True),
        ("m3d", "convnet2:width=8", COMPILE_FROM, True),
        ("m3d", "convnet2:width=8", COMPILE_FROM - 1, False),
        ("datadam", "convnet2:width=16,norm=batch", COMPILE_FROM, True),
        ("datadam", "convnet2:width=16", COMPILE_FROM, True),
        ("idc", NET, 19_999, False),
        ("idc", NET, 20_000, True),
        ("dsa", NET, 10**6, False),
    ],
)
def test_a_step_is_compiled_where_that_pays(tiny, monkeypatch, method, network, steps, compiled):
    """Later where our own kernels do most of it, not where a network, an augmentation or block maps keep them out.

    Gradients of gradients take long to compile: more steps must gain by it, and DSA's do not.
    """
    monkeypatch.setattr(Runtime, "compiles", lambda self, n, least=COMPILE_FROM: asked.append(n >= least))
    asked: list[bool] = []
    name, options = parse_spec(method)
    built, _ = make_method(name, Task("tiny", tiny.shape, 3, 1), {**options, "steps": steps, "batch_real": 2})
    net = FlatNet(make_net(network, tiny.shape, 3))
    Step(built, tiny, net, built.tiles.encode(built.init(tiny, built.tiles.count(1, tiny.shape), 0, CPU)), 0, CPU)
    assert asked == [compiled]


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_fewer_classes_at_a_time_are_compiled_anew(tiny, mode):
    """Each size is another version of the step; nothing is compiled before it is called."""
    method, net = method_of(tiny, 2), FlatNet(make_net(NET, tiny.shape, 3))
    pixels = method.tiles.encode(method.init(tiny, method.tiles.count(2, tiny.shape), 0, CPU))
    step = Step(method, tiny, net, pixels, 0, Runtime.choose("cpu", step_mode=mode))
    step.chunk, before = 3, step._loss
    step.take_fewer_classes()
    assert step.chunk == 2 and (step._loss != before) is (mode == "compile")


def test_every_run_has_its_own_versions_of_the_compiled_step(tiny):
    """More runs than the compiler keeps versions of one function: each is compiled, none silently falls back."""
    torch._dynamo.reset()
    compiled: list[int] = []

    def backend(graph, inputs):
        compiled.append(1)
        return graph.forward

    net, steps = FlatNet(make_net(NET, tiny.shape, 3)), []  # all kept: what is freed makes room
    for k in range(3):
        method = method_of(tiny, 3, batch_real=2 + k)
        steps.append(Step(method, tiny, net, method.tiles.encode(method.init(tiny, 12, 0, CPU)), 0, CPU))
        steps[-1].refill(0)
        draws = (steps[-1].lanes, steps[-1].real_index[0], steps[-1].syn_index[0], steps[-1].augmentation[0])
        with torch._dynamo.config.patch(recompile_limit=1, error_on_recompile=True):
            value = torch.compile(steps[-1].own_loss(), backend=backend, fullgraph=True, dynamic=False)(*draws)
        assert len(compiled) == k + 1
        torch.testing.assert_close(value, steps[-1].loss(*draws))


def test_a_method_says_what_precision_it_needs_on_a_gpu(tiny, monkeypatch):
    from m3d.prepare import prepare

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # nothing is put on the device here
    request = {"ipc": 1, "options": {}, "net": NET, "device": "auto", "deterministic": False, "step_mode": "auto"}
    request |= {"checkpoint_seconds": 60.0, "eval_every": 0, "seed": 0}
    asked = [("m3d", "auto", "bf16"), ("mtt", "auto", "tf32"), ("mtt", "bf16", "bf16"), ("m3d", "fp32", "fp32")]
    for method, precision, settled in asked:
        assert prepare({**request, "method": method, "precision": precision}, tiny).runtime.precision == settled
