"""Classes spread over processes and sub-tasks: the same set, bit for bit; a folder that resumes whatever happens."""

import dataclasses
import json
import os
import signal
import subprocess
import time

import numpy as np
import pytest
import torch
from launch import port, start
from toys import make_dataset

import m3d
from m3d.cli import main
from m3d.run_folder import RunFolder
from m3d.shards import Ranks, Shard, split

CLASSES = 5
SETTINGS = {"net": "convnet2:width=4", "batch_real": 4, "device": "cpu", "classes_at_once": 1}
STEPS = {"m3d": 66, "dc": 4}  # m3d: more than a block of draws
OPTIONS = {"m3d": {"factor": 2}, "dc": {"outer": 3, "inner": 2}}

# Several runs in one start of the processes, because starting them takes longer than the runs.
WORKER = """
import json, sys, m3d
for call in json.loads(sys.argv[1]):
    m3d.condense(**call)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    data = make_dataset(CLASSES)
    arrays = {}
    for name, part in (("train", data.train), ("test", data.test)):
        arrays[f"x_{name}"] = part.images.permute(0, 2, 3, 1).numpy()
        arrays[f"y_{name}"] = part.labels().numpy()
    path = tmp_path_factory.mktemp("data") / "five.npz"
    np.savez(path, class_names=np.array(data.class_names), **arrays)
    return str(path)


def call(file, out, method="m3d", **changed):
    options = {"steps": STEPS[method], **OPTIONS[method]}
    return {"data": file, "ipc": 1, "method": method, "out": str(out), **SETTINGS, **options, **changed}


@pytest.fixture(scope="module")
def alone(file, tmp_path_factory):
    """What one process makes."""
    torch.set_num_threads(1)
    return {
        name: m3d.condense(**call(file, tmp_path_factory.mktemp("alone") / name, name)).fingerprint for name in STEPS
    }


def worker(tmp_path, calls):
    (tmp_path / "worker.py").write_text(WORKER)
    return tmp_path / "worker.py", json.dumps(calls)


def command(file, out, *more):
    """The same run as :func:`call`'s on the command line, but without a mean, which would begin where the steps say."""
    given = {**SETTINGS, "steps": 100_000, **OPTIONS["m3d"], "out": out, "checkpoint_seconds": 0.05}
    options = [word for k, v in given.items() for word in (f"--{k.replace('_', '-')}", v)]
    return "-m", "m3d", "condense", file, *options, "--set", "average_from=1", *more


def wait_for(path, process):
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.02)


def children(process):
    """The ranks that torchrun started, by number."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True).stdout
    return sorted(int(pid) for pid in listed.split())


def test_classes_are_split_evenly_and_in_order():
    for classes in (1, 5, 10, 1000):
        for parts in range(1, min(classes, 70) + 1):
            pieces = split(range(classes), parts)
            assert [c for piece in pieces for c in piece] == list(range(classes))
            assert {len(piece) for piece in pieces} <= {classes // parts, -(-classes // parts)}
    shard = Shard(range(4, 9), Ranks(1, 2))
    assert list(shard.mine) == [6, 7, 8] and shard.rows == slice(2, 5)


def test_four_processes_share_five_classes_and_give_the_set_of_one(file, alone, tmp_path):
    calls = [call(file, tmp_path / "shared")]
    process = start(4, *worker(tmp_path, calls))
    assert process.wait(120) == 0, process.communicate()[1]
    made = m3d.CondensedSet.load(tmp_path / "shared")
    assert made.fingerprint == alone["m3d"] and made.manifest["processes"] == 4


def test_two_simulated_nodes_and_pools_that_look_at_all_classes(file, alone, tmp_path):
    """DC trains its encoders on the synthetic images of all classes, which the processes tell each other."""
    calls = [call(file, tmp_path / name, name) for name in STEPS]
    at = port()
    nodes = [start(1, *worker(tmp_path, calls), nodes=2, node=node, at=at) for node in (0, 1)]
    for process in nodes:
        assert process.wait(180) == 0, process.communicate()[1]
    for name in STEPS:
        made = m3d.CondensedSet.load(tmp_path / name)
        assert made.fingerprint == alone[name] and made.manifest["processes"] == 2
    history = (tmp_path / "m3d" / RunFolder.HISTORY).read_text().splitlines()
    assert len(history) == STEPS["m3d"] + 1


def finish_in_fewer_steps(folder):
    """The run's request with an end it has passed or soon reaches, so that the test need not make 100,000 steps."""
    from m3d.files import write_json

    _, state = RunFolder(folder).load_checkpoint()
    request = RunFolder(folder).request()
    request["options"]["steps"] = state["step"] + 5
    write_json(folder / RunFolder.RUN, request)
    return state["step"] + 5


def same_as_alone(folder, file, tmp_path, steps):
    """A resumed run against one that one process made without a stop."""
    resumed = m3d.resume(folder)
    whole = m3d.condense(**call(file, tmp_path / "whole", steps=steps, average_from=1))
    assert torch.equal(resumed.images, whole.images)


def test_a_killed_process_leaves_a_folder_that_one_process_resumes(file, tmp_path):
    folder = tmp_path / "run"
    process = start(2, *command(file, folder))
    wait_for(folder / RunFolder.PREVIOUS, process)
    os.kill(children(process)[1], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "another process of this run has stopped" in err and "--resume" in err
    same_as_alone(folder, file, tmp_path, finish_in_fewer_steps(folder))


def test_a_stop_of_one_process_stops_all_at_the_same_step(file, tmp_path):
    folder = tmp_path / "run"
    process = start(2, *command(file, folder, "--subtasks", "2"))
    part = folder / "subtask-1-of-2"
    wait_for(part / RunFolder.CHECKPOINT, process)
    os.kill(children(process)[1], signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert "continue with: m3d condense --resume" in err and err.count("stopped after") == 1
    tensors, state = RunFolder(part).load_checkpoint()
    assert f"stopped after {state['step']} steps" in err and len(tensors["synthetic.latent"]) == 2
    assert len(tensors["history"]) == state["step"]


def test_subtasks_give_the_same_set_and_leave_nothing_else(file, alone, tmp_path):
    seen, subtasks = [], 5
    made = m3d.condense(**call(file, tmp_path / "run", subtasks=subtasks), report=seen.append)
    assert made.fingerprint == alone["m3d"] and made.manifest["subtasks"] == subtasks
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == sorted(
        [RunFolder.CONDENSED, RunFolder.HISTORY, RunFolder.RUN]
    )
    steps = [p.step for p in seen]
    assert steps == sorted(steps) and steps[-1] == subtasks * STEPS["m3d"] == seen[-1].steps


def test_with_several_classes_at_once_only_rounding_differs(file, tmp_path):
    given = {"classes_at_once": None, "steps": 5}
    made = [m3d.condense(**call(file, tmp_path / str(n), subtasks=n, **given)).images for n in (1, 2)]
    torch.testing.assert_close(made[0], made[1], atol=1e-6, rtol=0)


def test_a_stopped_subtask_resumes_and_finished_ones_are_not_made_again(file, alone, tmp_path, monkeypatch):
    def stop(progress):
        if progress.step > STEPS["m3d"]:  # in the second of two sub-tasks
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("m3d.engine._REPORT_SECONDS", 0.0)
    with pytest.raises(m3d.errors.Interrupted):
        m3d.condense(**call(file, tmp_path / "run", subtasks=2), report=stop)
    first = RunFolder(tmp_path / "run" / "subtask-1-of-2").load_checkpoint()
    assert first[1]["step"] == STEPS["m3d"] and len(first[0]["synthetic.latent"]) == 2
    seen = []
    assert m3d.resume(tmp_path / "run", report=seen.append).fingerprint == alone["m3d"]
    assert min(p.step for p in seen) > STEPS["m3d"]


def test_an_overwritten_run_takes_its_subtasks_with_it(file, tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin({})
    folder.subtask(0, 2).save_checkpoint({"x": torch.zeros(1)}, {})
    folder.begin({}, overwrite=True)
    assert not (folder / "subtask-1-of-2").exists()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"method": "cafe"}, "compares classes with each other"),
        ({"method": "datadam", "net": None}, "batch norm mixes the images"),
        ({"method": "mtt", "net": "convnet2:width=4"}, "cannot be split"),
        ({"method": "ncfm", "sampler": "learned"}, "it learns numbers that all classes share"),
        ({"method": "dsdm"}, "its loss remembers where every class was"),
    ],
)
@pytest.mark.parametrize("how", ["processes", "subtasks"])
def test_what_cannot_be_split_is_refused_before_any_work(tmp_path, monkeypatch, changed, why, how):
    if how == "processes":
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "0")
    given = {"net": SETTINGS["net"], "device": "cpu", "subtasks": 1 if how == "processes" else 2, **changed}
    with pytest.raises(m3d.M3DError, match=why):
        m3d.condense(make_dataset(CLASSES), 1, out=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_dsdm_without_its_past_can_be_split(tmp_path, monkeypatch):
    monkeypatch.setenv("M3D_CACHE", str(tmp_path))
    given = {"steps": 3, "encoders": 1, "encoder_epochs": 1, "batch_real": 4, "history_weight": 0.0, "device": "cpu"}
    data = make_dataset(CLASSES)
    sets = [m3d.condense(data, 1, "dsdm", net=SETTINGS["net"], subtasks=n, **given) for n in (1, 2)]
    torch.testing.assert_close(sets[0].images, sets[1].images, atol=1e-6, rtol=0)


def test_what_learns_for_all_classes_is_bound(tiny):
    from m3d.kernels import Linear
    from m3d.methods import Task, make_method
    from m3d.nets import FlatNet, make_net
    from m3d.objectives import MMD

    matching = make_method("m3d", Task("tiny", tiny.shape, 3, 1), {})[0].matching
    net = FlatNet(make_net(SETTINGS["net"], tiny.shape, 3))
    learner = MMD(Linear())
    learner.scale = torch.nn.Parameter(torch.ones(()))
    assert matching.bond(net) is None
    assert "all classes share" in dataclasses.replace(matching, objective=learner).bond(net)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"subtasks": 0}, "subtasks=0.*1 to 5"),
        ({"subtasks": 6}, "subtasks=6.*1 to 5"),
        ({"classes_at_once": 0}, "classes_at_once=0.*allowed"),
        ({"subtasks": 2, "method": "dc"}, "dc cannot be split by subtasks=2.*synthetic images of all classes"),
    ],
)
def test_wrong_splits_are_refused(tmp_path, changed, match):
    with pytest.raises(m3d.M3DError, match=match):
        m3d.condense(make_dataset(CLASSES), out=tmp_path / "run", **{**SETTINGS, **changed})
    assert not (tmp_path / "run").exists()


def test_a_part_of_the_classes_is_not_evaluated(tmp_path):
    data = make_dataset(CLASSES).hold_out(0.3, 0)
    with pytest.raises(m3d.M3DError, match="eval_every=1 with subtasks=2"):
        m3d.condense(data, out=tmp_path / "run", subtasks=2, eval_every=1)


@pytest.mark.parametrize(
    ("environment", "match"),
    [
        ({"WORLD_SIZE": "6", "RANK": "0"}, "6 processes cannot share 5 class"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'.*not valid"),
        ({"WORLD_SIZE": "2"}, "RANK=None"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2"),
    ],
)
def test_wrong_environments_are_refused(tmp_path, monkeypatch, environment, match):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(m3d.M3DError, match=match):
        m3d.condense(make_dataset(CLASSES), out=tmp_path / "run", **SETTINGS)


def test_commands_that_share_nothing_are_refused_under_torchrun(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as stop:
        main(["list", "methods"])
    assert stop.value.code == 2 and "only 'm3d condense' shares its work" in capsys.readouterr().err


def test_processes_that_torchrun_started_anew_continue_their_run(file, alone, tmp_path, monkeypatch):
    """The same command again continues the run it began, and no other one's."""
    monkeypatch.setattr("m3d.engine._REPORT_SECONDS", 0.0)
    begun = call(file, tmp_path / "run")

    def stop(progress):
        if progress.step == 20:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(m3d.errors.Interrupted):
        m3d.condense(**begun, report=stop)
    monkeypatch.setattr(Ranks, "from_environment", classmethod(lambda cls: cls(restarts=1)))
    with pytest.raises(m3d.M3DError, match="already holds a run"):
        m3d.condense(**{**begun, "seed": 1})
    seen = []
    assert m3d.condense(**begun, report=seen.append).fingerprint == alone["m3d"]
    assert min(p.step for p in seen) > 20
    seen.clear()
    assert m3d.condense(**begun, report=seen.append).fingerprint == alone["m3d"] and not seen  # it had finished
