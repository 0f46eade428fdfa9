"""Cells on a Ray cluster: a real one on this machine, with workers that are lost, refused and stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from m3d.cli import main
from m3d.errors import Interrupted, M3DError
from m3d.grid.cells import Cell, Overrides, Source
from m3d.grid.cluster import _TOKEN, CellWorker, Cluster, _room, _session, _Setup, connected
from m3d.grid.journal import Journal
from m3d.grid.runner import Job, Listener, run
from m3d.grid.work import Place

NET = "convnet2:width=8"
QUICK = ["--eval-net", NET, "--protocol", "quick", "--epochs", "2", "--repeats", "2", "--device", "cpu"]
# Kills the worker that loads it as soon as a checkpoint is written; only one worker does so, and never the driver.
FRAGILE = """
import os, signal, threading, time
from pathlib import Path

def stamps():
    return [path.stat().st_mtime_ns for path in Path({out!r}).glob("runs/*/checkpoint.safetensors")]

def lie_in_wait(before):
    while True:
        try:
            if stamps() not in ([], before):
                break
        except FileNotFoundError:  # it is just being replaced
            pass
        time.sleep(0.002)
    try:
        Path({mark!r}).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)

if os.getpid() != {driver}:
    threading.Thread(target=lie_in_wait, args=(stamps(),), daemon=True).start()
"""


@pytest.fixture(scope="module")
def cluster():
    """A cluster on this machine, started as --on ray starts one."""
    pytest.importorskip("ray", reason="needs the extra ray")
    with connected(None) as ray:
        yield ray


def call(capsys, *arguments) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_sweep_on_ray_gives_what_it_gives_here(capsys, cluster, tiny_file, tmp_path):
    grid = ["--set", "lr=1,2", "--set", "steps=3", "--set", "batch_real=4", "--seeds", "0,1", "--net", NET, *QUICK]
    code, _, err = call(capsys, "sweep", tiny_file, *grid, "--out", tmp_path / "ray", "--on", "ray", "--retries", "0")
    assert code == 0 and "[4 of 4]" in err
    code, _, _ = call(capsys, "sweep", tiny_file, *grid, "--out", tmp_path / "local")
    there, here = ({r["digest"]: r for r in lines(tmp_path / p / "sweep.jsonl")} for p in ("ray", "local"))
    assert code == 0 and len(there) == 4 and there.keys() == here.keys() and torch.get_num_threads() == 1
    for digest, record in there.items():
        for name in ("set", "last", "checks", "net", "protocol", "command", "commit", "device"):
            assert record[name] == here[digest][name], name
    assert not (tmp_path / "ray" / _TOKEN).exists()
    code, out, err = call(capsys, "sweep", tiny_file, *grid, "--out", tmp_path / "ray", "--on", "ray")
    assert code == 0 and "4 of 4 cells were finished before" in out and err == ""


def test_a_killed_worker_s_cell_is_tried_again_and_finishes(capsys, cluster, tiny_file, tmp_path):
    """SIGKILL at a checkpoint: without retries an error, after which the same command goes on; with one, no error."""
    grid = ["--set", "steps=400", "--set", "batch_real=4", "--net", NET, *QUICK, "--checkpoint-seconds", "0.05"]
    out = tmp_path / "out"
    plugin = tmp_path / "fragile.py"

    def attempt(number: int, *options) -> tuple[int, str, str]:
        mark = tmp_path / f"killed{number}"
        plugin.write_text(FRAGILE.format(out=str(out), mark=str(mark), driver=os.getpid()))
        result = call(capsys, "--plugin", plugin, "sweep", tiny_file, *grid, "--out", out, "--on", "ray", *options)
        assert mark.exists()
        return result

    code, _, err = attempt(1, "--retries", "0")
    assert code == 2 and "tried 1 times" in err and "Traceback" not in err and not (out / "sweep.jsonl").exists()
    assert list(out.glob("runs/*/checkpoint.safetensors"))
    code, out_text, err = attempt(2, "--json")
    assert (
        code == 0 and json.loads(out_text)["ranking"][0]["seeds"] == [0] and "tried again" in err and "ActorDied" in err
    )
    call(capsys, "sweep", tiny_file, *grid, "--out", tmp_path / "local")
    (killed,), (whole,) = lines(out / "sweep.jsonl"), lines(tmp_path / "local" / "sweep.jsonl")
    assert killed["set"] == whole["set"] and killed["last"] == whole["last"]


def job(out: Path, cells: list[Cell]) -> Job:
    out.mkdir(exist_ok=True)
    return Job(cells, Journal(out / "x.jsonl", "x", Overrides()), Place(out, None, "cpu"))


def cell(name: str, source: Source, epochs: int = 2) -> Cell:
    return Cell(name, "", "", (source,), net=NET, protocol="quick", epochs=epochs, repeats=1)


def test_a_shared_set_is_made_once_and_what_is_refused_is_not_tried_again(cluster, tmp_path):
    """Three cells of one set do not meet in its folder; an unknown method is an error, and the others go on."""
    source = Source("digits", 1, "m3d", (("batch_real", 4), ("steps", 3)), NET)
    cells = [cell(f"same{epochs}", source, epochs) for epochs in (1, 2)]
    cells += [cell("twin", source, 2), cell("bad", Source("digits", 1, "later", (), NET))]
    heard: dict[str, list] = {"again": [], "running": [], "done": []}
    listener = Listener(
        done=lambda c, record: heard["done"].append(c.key),
        again=lambda c, reason: heard["again"].append(c.key),
        running=lambda states: heard["running"].append(dict(states)),
    )
    hands = Cluster(cluster, cpus=0.5, gpus=None, retries=3, device="cpu")
    summary = run(job(tmp_path, cells), hands=hands, listener=listener)
    assert summary.made == 3 and sorted(heard["done"]) == ["same1", "same2", "twin"] and heard["again"] == []
    ((failed, error),) = summary.failed
    assert failed.key == "bad" and "unknown method 'later'" in str(error)
    assert not any(len({"same1", "same2", "twin"} & set(states)) > 1 for states in heard["running"])
    records = lines(tmp_path / "x.jsonl")
    assert len(records) == 2 and records[0]["set"] == records[1]["set"]  # the twin is the same result
    assert len({r["condensation"][0]["created"] for r in records}) == 1


def test_a_stopped_grid_leaves_checkpoints_that_go_on_anywhere(cluster, tmp_path):
    """Asked to stop in the middle of a cell, the worker writes its checkpoint; this process finishes it."""
    source = Source("digits", 1, "m3d", (("batch_real", 4), ("steps", 1500)), NET)
    work = job(tmp_path, [cell("long", source)])
    states: list[str] = []

    def running(now) -> None:
        states.append(now.get("long", ""))
        if states[-1].startswith("step"):
            signal.raise_signal(signal.SIGTERM)

    hands = Cluster(cluster, cpus=1.0, gpus=0.0, retries=1, device="cpu")
    with pytest.raises(Interrupted, match="stopped after 0 cells"):
        run(work, hands=hands, listener=Listener(running=running))
    assert states[-1].startswith("step ") and states[-1].endswith(" of 1500")
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "checkpoint.safetensors").exists() and not (tmp_path / "x.jsonl").exists()
    (folder / "mark").touch()
    assert run(work).made == 1 and (folder / "mark").exists()


def test_a_cell_that_no_node_has_room_for_is_refused(capsys, cluster, tiny_file, tmp_path):
    options = ["--on", "ray", "--cpus-per-cell", "4096", "--out", tmp_path / "out"]
    code, _, err = call(capsys, "sweep", tiny_file, *options)
    assert code == 2 and "no node of the cluster has the 4096 CPUs and 0 GPUs" in err
    code, _, err = call(capsys, "reproduce", "motivation", *options)
    assert code == 2 and "no node of the cluster" in err


def test_reproduce_on_ray(capsys, cluster, tmp_path):
    """A plan of the paper whose cells need no data, by workers: the same records as here."""
    for on in ("ray", "local"):
        assert call(capsys, "reproduce", "motivation", "--out", tmp_path / on, "--on", on)[0] == 0
    there, here = ({r["cell"]: r for r in lines(tmp_path / on / "motivation.jsonl")} for on in ("ray", "local"))
    assert there.keys() == here.keys() and len(there) >= 4 and (tmp_path / "ray" / "motivation.md").exists()
    assert all(there[key]["mmd2"] == here[key]["mmd2"] for key in here)


# What follows needs no cluster.


def test_an_address_where_nobody_listens_is_refused_at_once():
    ray = pytest.importorskip("ray", reason="needs the extra ray")
    with socket.socket() as held:  # bound and not listening: nobody else gets the port meanwhile
        held.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{held.getsockname()[1]}"
        connecting = _session(ray, where)
        with pytest.raises(M3DError, match=f"nobody listens at {where}"):
            connecting.__enter__()


def nodes(*resources: dict) -> SimpleNamespace:
    return SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": r} for r in resources])


def test_cells_get_the_gpus_there_are():
    two = nodes({"CPU": 8.0, "GPU": 2.0}, {"CPU": 3.0, "GPU": 4.0}, {"CPU": 64.0})

    def given(**asked) -> tuple[int, dict]:
        made = Cluster(two, **{"cpus": 1.0, "gpus": None, "retries": 1, "device": "auto", **asked})
        return made.width, made.share

    assert given() == (5, {"num_cpus": 1.0, "num_gpus": 1.0})  # 2 + 3, which its CPUs limit; none without a GPU
    assert given(gpus=0.5) == (7, {"num_cpus": 1.0, "num_gpus": 0.5})
    assert given(gpus=0.1, cpus=0.1)[0] == 20 + 30
    given_to = [Cluster(two, cpus=1.0, gpus=n, retries=1, device="auto").environment for n in (0.5, 0.6, 1.0)]
    assert given_to == [{"M3D_DEVICE_SHARE": "0.5"}, {}, {}]  # with more than a half nobody else fits
    assert given(device="cpu") == (75, {"num_cpus": 1.0, "num_gpus": 0.0})
    with pytest.raises(M3DError, match="8 GPUs"):
        given(gpus=8.0)
    assert Cluster(nodes({"CPU": 2.0}), cpus=1.0, gpus=None, retries=1, device="auto").share["num_gpus"] == 0
    assert _room({"GPU": 1.0}, 1.0, 1.0) == 0 and _room({"CPU": 4.0}, 0.5, 0.0) == 8


def test_a_worker_that_does_not_see_the_folder_says_so(tmp_path):
    setup = _Setup(Place(tmp_path, None, "cpu"), Overrides(), {}, "token", ("m3d",), {}, ())
    worker = CellWorker(setup)
    kind, why = worker.make(cell("x", Source("digits", 1, "random", (), NET)))
    assert kind == "refused" and "does not see" in why and str(tmp_path) in why
    (tmp_path / _TOKEN).write_text("token")
    assert worker.make(cell("x", Source("digits", 1, "random", (), NET)))[0] == "made"
    assert worker.look() == "epoch 2 of 2"
    kind, why = worker.make(cell("x", Source("digits", 500, "random", (), NET)))
    assert kind == "refused" and "take --ipc" in why  # said as on the command line that began it
    worker.stop()
    assert worker.make(cell("x", Source("digits", 1, "random", (), NET), 3))[0] == "stopped"


def test_workers_check_that_they_have_the_driver_s_data(tmp_path):
    (tmp_path / _TOKEN).write_text("token")
    setup = _Setup(Place(tmp_path, None, "cpu"), Overrides(), {}, "token", ("m3d",), {}, ())
    kind, why = CellWorker(setup).make(cell("x", Source("digits", 1, "random", (), NET, fingerprint="other")))
    assert kind == "refused" and "not those that the grid was planned with" in why
