"""Power cuts, torn files, two processes at once: what is on disk is whole, and work goes on from it."""

import json
import os
import platform
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import m3d
from m3d.condensed import CondensedSet
from m3d.errors import Interrupted, M3DError
from m3d.evaluation import evaluate, make_protocol
from m3d.files import append_line, read_checked, read_json, read_newest, sweep, write_bytes, write_checked
from m3d.run_folder import RunFolder
from m3d.runtime import Runtime
from m3d.trained import cache_folder, default_recipe, trained_networks

CPU = Runtime.choose("cpu")
NET = "convnet1:width=4"


def test_the_order_of_writes_survives_a_power_cut(tmp_path, monkeypatch):
    """Content reaches the disk before its name does, new folders before what is in them, names last."""
    done = []
    sync, replace = os.fsync, os.replace

    def what(handle: int) -> str:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        return "folder " + path.name if path.is_dir() else "content"

    monkeypatch.setattr("os.fsync", lambda handle: (done.append(what(handle)), sync(handle)))
    monkeypatch.setattr("os.replace", lambda a, b: (done.append(f"rename to {Path(b).name}"), replace(a, b)))
    write_bytes(tmp_path / "a" / "b" / "new", b"1", keep=tmp_path / "a" / "b" / "old")
    assert done == ["folder a", f"folder {tmp_path.name}", "content", "rename to new", "folder b"]
    done.clear()
    write_bytes(tmp_path / "a" / "b" / "new", b"2", keep=tmp_path / "a" / "b" / "old")
    assert done == ["content", "rename to old", "rename to new", "folder b"]
    assert (tmp_path / "a" / "b" / "old").read_bytes() == b"1" and (tmp_path / "a" / "b" / "new").read_bytes() == b"2"


def test_a_failed_checkpoint_leaves_both_before_it(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        folder.save_checkpoint({"x": torch.full((3,), float(step))}, {"step": step})

    def full(handle):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(M3DError, match="No space left"):
            folder.save_checkpoint({"x": torch.zeros(3)}, {"step": 3})
    assert read_checked(folder / RunFolder.CHECKPOINT)[1] == {"step": 2}
    assert read_checked(folder / RunFolder.PREVIOUS)[1] == {"step": 1}


def test_a_damaged_checkpoint_never_takes_the_place_of_a_whole_one(tmp_path, caplog):
    """Fall back, write again, be killed between the renames: the one that was whole is still there."""
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        folder.save_checkpoint({"x": torch.full((3,), float(step))}, {"step": step})
    newest = folder / RunFolder.CHECKPOINT
    newest.write_bytes(newest.read_bytes()[:-3])
    assert folder.load_checkpoint()[1] == {"step": 1}
    assert "not a whole safetensors file" in caplog.text and "going on from 'checkpoint.previous" in caplog.text
    folder.save_checkpoint({"x": torch.zeros(3)}, {"step": 3})
    assert read_checked(folder / RunFolder.PREVIOUS)[1] == {"step": 1}
    assert folder.load_checkpoint()[1] == {"step": 3}
    newest.unlink()
    assert folder.load_checkpoint()[1] == {"step": 1}
    (folder / RunFolder.PREVIOUS).write_bytes(b"torn")
    with pytest.raises(M3DError, match="no whole checkpoint is left"):
        folder.load_checkpoint()
    folder.drop_checkpoints()
    assert not list(tmp_path.iterdir()) and folder.load_checkpoint() is None


def test_a_changed_state_is_seen(tmp_path):
    file = tmp_path / "a.safetensors"
    write_checked(file, {"x": torch.arange(3.0).bfloat16()}, {"step": 5, "pairs": [(1, 0.1)], "by": {3: None}})
    assert read_checked(file)[1] == {"step": 5, "pairs": [[1, 0.1]], "by": {"3": None}}
    file.write_bytes(file.read_bytes().replace(b'\\"step\\": 5', b'\\"step\\": 7'))
    with pytest.raises(M3DError, match="its state does not match its checksum"):
        read_newest(file, tmp_path / "none")


def test_leftovers_of_killed_writes_are_swept(tmp_path):
    (tmp_path / ".run.json.abcd1234").write_text("half")
    (tmp_path / ".run.json.lock").write_text("not one of them")
    (tmp_path / ".other.json.abcd1234").write_text("another's")
    sweep(tmp_path / "run.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".other.json.abcd1234", ".run.json.lock"]


def test_two_processes_append_without_losing_a_line(tmp_path):
    file = tmp_path / "results.jsonl"
    code = """
        import sys
        from pathlib import Path
        from m3d.files import append_line
        for k in range(20):
            append_line(Path(sys.argv[1]), {"who": sys.argv[2], "k": k})
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(file)]
    for process in [subprocess.Popen([*command, who]) for who in "ab"]:
        assert process.wait(timeout=120) == 0
    append_line(file, {"who": "c", "k": 0})
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [sum(line["who"] == who for line in lines) for who in "abc"] == [20, 20, 1]
    assert [p.name for p in tmp_path.iterdir()] == ["results.jsonl"]


def test_a_run_in_use_is_not_touched(tiny, tmp_path):
    options = {"net": NET, "steps": 2, "batch_real": 2, "out": tmp_path / "run"}
    with RunFolder(tmp_path / "run").claimed("m3d condense"), pytest.raises(M3DError, match="in use by m3d condense"):
        m3d.condense(tiny, 1, **options)
    m3d.condense(tiny, 1, **options)
    (tmp_path / "run" / RunFolder.CONDENSED).unlink()
    with RunFolder(tmp_path / "run").claimed("x"), pytest.raises(M3DError, match="in use by x"):
        m3d.resume(tmp_path / "run", data=tiny)
    with RunFolder(tmp_path / "run").claimed("x"), pytest.raises(M3DError, match="in use by x"):
        m3d.condense(tiny, 1, overwrite=True, **options)
    m3d.resume(tmp_path / "run", data=tiny)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["condensed.safetensors", "history.csv", "run.json"]


def test_a_torn_evaluation_falls_back_to_the_checkpoint_before(tiny, tmp_path, caplog):
    made = m3d.condense(tiny, 1, net=NET, steps=1, batch_real=2)
    settings = {"net": NET, "protocol": make_protocol("paper", epochs=8), "repeats": 2, "runtime": CPU}
    whole = evaluate(made, tiny, **settings)

    def stop(epoch, epochs):
        if epoch == 6:
            raise Interrupted(epoch)  # as if it were killed

    with pytest.raises(Interrupted):
        evaluate(made, tiny, folder=RunFolder(tmp_path), checkpoint_seconds=0.0, report=stop, **settings)
    newest, previous = sorted(tmp_path.glob("evaluation-*"), key=lambda p: ".previous." in p.name)
    newest.write_bytes(newest.read_bytes()[:-5])
    seen = []
    again = evaluate(made, tiny, folder=RunFolder(tmp_path), report=lambda e, n: seen.append(e), **settings)
    assert seen == [5, 6, 7, 8] and "going on from" in caplog.text and ".previous." in previous.name
    assert (again.last, again.best, again.checks) == (whole.last, whole.best, whole.checks)
    assert not list(tmp_path.iterdir())


def test_a_damaged_cache_file_is_made_again_and_said(tiny, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("M3D_CACHE", str(tmp_path))
    first = trained_networks(tiny, NET, default_recipe(1), 1, 0, CPU)
    (file,) = cache_folder().iterdir()
    content = file.read_bytes()
    for damage in (content[:-4], b"", content.replace(b'"final"', b'"fin_l"')):
        caplog.clear()
        file.write_bytes(damage)
        again = trained_networks(tiny, NET, default_recipe(1), 1, 0, CPU)
        assert torch.equal(again.final, first.final) and "trained again" in caplog.text
        assert torch.equal(read_checked(file)[0]["final"], first.final)


def test_json_of_any_size_depth_or_kind_is_refused_soon(tmp_path):
    file = tmp_path / "run.json"
    for content, message in (
        ('{"a":' * 100_000, "not valid JSON"),
        ('{"a":' * 100 + "1" + "}" * 100, "more than 64 levels deep"),
        (" " * (2**24 + 1), "allowed: at most 16777216"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        ("\udcff", "not valid JSON"),
    ):
        file.write_text(content, errors="surrogateescape")
        with pytest.raises(M3DError, match=message):
            read_json(file)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(M3DError, match="not a plain file"):
        read_json(file)


def test_a_strangers_recipe_is_checked_and_downloads_nothing_to_its_folder(tiny_file, tmp_path, monkeypatch):
    monkeypatch.setattr("m3d.data.official._download", lambda *a: pytest.fail("the network was asked"))
    made = m3d.condense(tiny_file, 1, net=NET, steps=1, batch_real=2)
    for recipe, message in (
        ({"source": "cifar10", "data_root": str(tmp_path)}, "downloading is switched off"),
        ({"source": "digits", "download": True}, "download=True is not valid"),
        ({"source": 3}, "source=3 is not valid"),
        ({"source": "digits", "size": True}, "size=True is not valid"),
    ):
        odd = CondensedSet(made.images, made.labels, {**made.manifest, "data": {"name": "x", "recipe": recipe}})
        with pytest.raises(M3DError, match=message):
            m3d.evaluate(odd)


NEWEST, PREVIOUS, DAMAGED = RunFolder.CHECKPOINT, RunFolder.PREVIOUS, RunFolder.CHECKPOINT + ".damaged"
OF_A_DEAD_PROCESS = json.dumps(
    {"pid": 1, "host": platform.node(), "began": "another day", "since": "then", "work": "m3d condense"}
)


@pytest.mark.parametrize(
    "left",
    [
        (NEWEST, PREVIOUS, DAMAGED, ".lock"),  # killed when the set was just there
        (PREVIOUS, ".lock"),  # killed between one removal and the next, or between a checkpoint's two renames before
        (DAMAGED, ".lock"),  # the same, after a fall-back
        ("subtask-2-of-2/checkpoint.safetensors", ".lock"),  # the parts go last
        (".lock",),  # killed when all was done but to let go
        (PREVIOUS,),  # as an earlier version of the clean-up left it, or one who deleted the lock by hand
    ],
    ids="+".join,
)
def test_a_finished_run_sheds_whatever_a_kill_left(tmp_path, tiny, left):
    run = tmp_path / "run"
    whole = m3d.condense(tiny, 1, net=NET, steps=1, batch_real=2, out=run)
    names = sorted(p.name for p in run.iterdir())
    for name in left:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(OF_A_DEAD_PROCESS if name == ".lock" else "left behind")
    assert m3d.resume(run).fingerprint == whole.fingerprint
    assert sorted(p.name for p in run.iterdir()) == names


def test_a_finished_run_that_another_holds_is_read_and_left_alone(tmp_path, tiny, caplog):
    run = tmp_path / "run"
    whole = m3d.condense(tiny, 1, net=NET, steps=1, batch_real=2, out=run)
    (run / PREVIOUS).write_text("left behind")
    (run / ".results.jsonl.abcd1234").write_text("an evaluation's record, half written")
    with RunFolder(run).claimed("m3d condense"):
        assert m3d.resume(run).fingerprint == whole.fingerprint
    assert "in use by m3d condense" in caplog.text and (run / PREVIOUS).exists()
    m3d.resume(run)
    assert not (run / PREVIOUS).exists() and (run / ".results.jsonl.abcd1234").exists()
    RunFolder(run).add_result({"accuracy": 1.0})  # whoever adds the next one removes it
    assert not (run / ".results.jsonl.abcd1234").exists()


def test_a_run_begun_anew_before_its_folder_is_held_keeps_its_checkpoints(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.save_checkpoint({"x": torch.zeros(3)}, {"step": 1})
    (folder / RunFolder.CONDENSED).write_text("the set of the run before")
    monkeypatch.setattr("m3d.run_folder.sweep", lambda path: (folder / RunFolder.CONDENSED).unlink(missing_ok=True))
    folder.shed("m3d condense --resume")
    assert folder.load_checkpoint()[1] == {"step": 1}
