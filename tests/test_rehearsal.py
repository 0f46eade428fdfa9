"""The process that compiles our own kernels ahead of a run: started once, and harmless."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from toys import make_dataset

from m3d import rehearsal
from m3d.augment import Augment
from m3d.methods import Task, make_method
from m3d.nets import FlatNet, make_net
from m3d.probes import Forward
from m3d.runtime import Runtime
from m3d.step import Step

NET = "convnet2:width=16"


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The commands that would be run, instead of running them; a GPU by name."""
    commands = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (64 * 2**30, 80 * 2**30))
    monkeypatch.setattr(rehearsal, "Popen", lambda command, **silent: commands.append(command))
    return commands


def begin(net=NET, real=32, **changed):
    flat = FlatNet(make_net(net, (3, 16, 16), 4))
    augment = Augment.parse(changed.get("augment", "color+crop"))
    sizes = rehearsal.Sizes(4, real, 2)
    rehearsal.start(flat, (3, 16, 16), 4, sizes, augment, changed.get("dtype", torch.float32))


def test_once_for_the_same_kernels(started, tmp_path):
    begin()
    begin()
    assert len(started) == 1
    begin(real=64)
    begin(net="convnet2:width=32")
    begin(dtype=torch.bfloat16)
    begin(augment="crop")
    assert len(started) == 5
    for mark in (tmp_path / "triton").iterdir():  # the cache is emptied: everything is compiled anew
        mark.unlink()
    begin()
    assert len(started) == 6


def test_nothing_is_begun_where_nothing_can_be_kept(started, monkeypatch, tmp_path):
    """And Triton is not sent to a place that it cannot use."""
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "file"))
    begin()
    assert started == [] and "TRITON_CACHE_DIR" not in os.environ
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    begin()
    assert len(started) == 1 and os.environ["TRITON_CACHE_DIR"] == str(tmp_path / ".triton" / "cache")
    begin()
    assert len(started) == 1
    monkeypatch.delenv("TRITON_CACHE_DIR")  # set by the call, so not undone by itself


def test_a_device_without_room_is_left_alone_and_a_process_that_cannot_begin_does_no_harm(started, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 80 * 2**30))
    begin()
    assert started == []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (64 * 2**30, 80 * 2**30))

    def fails(command, **silent):
        raise OSError("no process")

    monkeypatch.setattr(rehearsal, "Popen", fails)
    begin(real=48)


def test_what_it_runs_can_be_run(started):
    begin()
    ((python, *rest),) = started
    assert python == sys.executable
    spec, shape, *others = json.loads(rest[-1])
    gradient = rehearsal.rehearse(spec, shape, *others, device="cpu")
    assert gradient.shape == (4, 2, 3, 16, 16) and gradient.abs().sum() > 0
    if not torch.cuda.is_available():  # as a script it asks for the GPU at once
        whole = subprocess.run([python, *rest], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
        assert whole.returncode != 0 and any(word in whole.stderr for word in (b"CUDA", b"NVIDIA"))


def test_a_compiled_step_on_a_gpu_begins_it_with_its_own_sizes(monkeypatch):
    calls, data = [], make_dataset(classes=4, per_class=20, shape=(3, 16, 16))
    monkeypatch.setattr(rehearsal, "start", lambda *arguments: calls.append(arguments))
    method = make_method("m3d", Task("tiny", data.shape, 4, 2), {"steps": 4, "batch_real": 8, "factor": 2})[0]
    net = FlatNet(make_net(NET, data.shape, 4))
    pixels = torch.rand(4, 2, 3, 16, 16)
    step = Step(method, data, net, pixels, 0, Runtime.choose("cpu", step_mode="compile"))
    assert calls == []  # the CPU has no kernels of ours
    step.runtime = Runtime(torch.device("cuda"), "bf16")
    step.chunk = 3
    step._rehearse()
    assert calls == [(net, (3, 16, 16), 4, (3, 8, 8), Augment.parse("color+crop+cutout"), torch.bfloat16)]
    step.matching = replace(step.matching, probe=Forward(maps=True))  # no kernel of ours keeps maps
    step._rehearse()
    assert len(calls) == 1
