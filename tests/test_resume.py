"""Runs that are stopped, killed or judged on the way: they go on bit for bit, and keep what they said they would."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from short import NET, run
from toys import make_dataset

import m3d
from m3d.errors import Interrupted, M3DError
from m3d.run_folder import RunFolder
from m3d.step import BLOCK
from m3d.watch import Watch


def test_a_checkpoint_of_another_run_is_named(tiny, tmp_path):
    folder = RunFolder(tmp_path)
    run(tiny, ipc=1, steps=3, watch=Watch(folder=folder, checkpoint_seconds=-1.0))
    with pytest.raises(M3DError, match="the checkpoint is of another run"):
        run(tiny, ipc=2, steps=3, watch=Watch(folder=folder))


@pytest.mark.parametrize("stop_at", [1, 7, BLOCK, BLOCK + 9])
def test_resumed_equals_uninterrupted(tiny, tmp_path, stop_at, monkeypatch):
    monkeypatch.setattr("m3d.engine._REPORT_SECONDS", 0.0)  # a report after every step
    steps = BLOCK + 12
    whole = run(tiny, steps=steps)
    folder = RunFolder(tmp_path / "run")

    asked = []

    def stop(progress):
        if progress.step >= stop_at and not asked:
            asked.append(progress.step)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted) as stopped:
        run(tiny, steps=steps, watch=Watch(report=stop, folder=folder))
    assert stopped.value.done == stop_at
    resumed = run(tiny, steps=steps, watch=Watch(folder=folder))
    assert torch.equal(resumed.pixels, whole.pixels)
    assert resumed.losses == whole.losses


def test_seconds_to_start_count_every_session(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("m3d.engine._REPORT_SECONDS", 0.0)
    clock = iter(range(10_000))
    monkeypatch.setattr("m3d.engine.time.perf_counter", lambda: float(next(clock)))
    folder, asked = RunFolder(tmp_path / "run"), []

    def stop(progress):
        if progress.step >= 5 and not asked:
            asked.append(progress.step)
            signal.raise_signal(signal.SIGINT)

    whole = run(tiny, steps=9)
    with pytest.raises(Interrupted):
        run(tiny, steps=9, watch=Watch(report=stop, folder=folder))
    resumed = run(tiny, steps=9, watch=Watch(folder=folder))
    assert 0 < whole.starting < whole.seconds
    assert resumed.starting == 2 * whole.starting < resumed.seconds  # the clock ticks alike in both sessions


def test_a_torn_checkpoint_falls_back_to_the_one_before(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("m3d.engine._REPORT_SECONDS", 0.0)
    steps = 40
    whole = run(tiny, steps=steps)
    folder = RunFolder(tmp_path / "run")
    calls = []

    def stop(progress):
        calls.append(progress.step)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted):
        run(tiny, steps=steps, watch=Watch(report=stop, folder=folder, checkpoint_seconds=0.0))
    newest = folder / RunFolder.CHECKPOINT
    newest.write_bytes(newest.read_bytes()[:-7])
    assert torch.equal(run(tiny, steps=steps, watch=Watch(folder=folder)).pixels, whole.pixels)
    assert not newest.exists()  # set aside
    (folder / RunFolder.PREVIOUS).replace(newest)
    newest.write_bytes(newest.read_bytes()[:-7])
    with pytest.raises(M3DError, match=r"checkpoint\.safetensors"):
        run(tiny, steps=steps, watch=Watch(folder=folder))


def test_killed_run_resumes_bit_identically(tiny_file, tmp_path):
    """kill -9 at an arbitrary moment of a real process, then resume: the same bits as never stopped."""
    options = ["--ipc", "1", "--steps", "600", "--batch-real", "4", "--lr", "0.05", "--net", NET]
    command = [sys.executable, "-m", "m3d", "condense", tiny_file, *options, "--checkpoint-seconds", "0.2"]
    folder = tmp_path / "killed"
    process = subprocess.Popen([*command, "--out", str(folder)], env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 60
    while not (folder / RunFolder.CHECKPOINT).exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert (folder / RunFolder.CHECKPOINT).exists() and not (folder / RunFolder.CONDENSED).exists()
    torch.manual_seed(123)
    resumed = m3d.resume(folder)
    whole = m3d.condense(tiny_file, 1, net=NET, steps=600, batch_real=4, lr=0.05)
    assert torch.equal(resumed.images, whole.images)
    assert resumed.fingerprint == m3d.CondensedSet.load(folder).fingerprint
    assert not (folder / RunFolder.CHECKPOINT).exists()
    assert len((folder / RunFolder.HISTORY).read_text().splitlines()) == 601
    assert m3d.resume(folder).fingerprint == resumed.fingerprint  # resuming a finished run just returns it


def test_validation_keeps_the_best_set_beside_the_last(tmp_path):
    data = make_dataset(per_class=20).hold_out(0.25, 0)
    options = {"steps": 20, "batch_real": 4, "lr": 0.05, "eval_options": {"repeats": 1}}
    condensed = m3d.condense(data, 1, net=NET, out=tmp_path / "run", eval_every=8, **options)
    judged = condensed.manifest["validation"]
    assert [step for step, _ in judged] == [8, 16]
    best = m3d.CondensedSet.load(tmp_path / "run" / RunFolder.BEST)
    assert best.manifest["steps"] == max(judged, key=lambda j: j[1])[0]
    assert condensed.manifest["steps"] == 20
    assert best.fingerprint != condensed.fingerprint


def test_sets_are_kept_on_the_way(tmp_path):
    data, folder = make_dataset(per_class=20), RunFolder(tmp_path / "run")
    settings = {"net": NET, "batch_real": 4, "lr": 0.05, "average_from": 1.0}
    whole = m3d.condense(data, 1, out=folder.path, steps=20, keep_every=8, **settings)
    assert sorted(p.name for p in folder.path.glob("step-*")) == ["step-16.safetensors", "step-8.safetensors"]
    for step in (8, 16):
        kept, short = m3d.CondensedSet.load(folder.kept(step)), m3d.condense(data, 1, steps=step, **settings)
        assert kept.fingerprint == short.fingerprint != whole.fingerprint
        assert kept.manifest["steps"] == step and 0 < kept.manifest["seconds"] < whole.manifest["seconds"]
    m3d.condense(data, 1, out=folder.path, steps=4, keep_every=2, overwrite=True, **settings)
    assert [p.name for p in folder.path.glob("step-*")] == ["step-2.safetensors"]  # the last step is the set itself


def test_sets_cannot_be_kept_nowhere(tiny):
    with pytest.raises(M3DError, match="keep_every=8 needs a folder"):
        m3d.condense(tiny, 1, net=NET, steps=20, keep_every=8)


def test_a_set_half_kept_by_a_killed_run_is_swept(tmp_path):
    (tmp_path / ".step-8.safetensors.abcdefgh").write_bytes(b"half")
    m3d.condense(make_dataset(), 1, net=NET, out=tmp_path, steps=1, batch_real=4, lr=0.05)
    assert not list(tmp_path.glob(".step-*"))


def test_a_step_is_judged_once_whether_or_not_the_run_stops_there(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("m3d.engine._REPORT_SECONDS", 0.0)
    folder, asked, judged = RunFolder(tmp_path), [], []

    def judge(now):
        judged.append(now.step)
        return float(-now.step)

    def stop(progress):
        if progress.step == 4 and not asked:
            asked.append(1)
            signal.raise_signal(signal.SIGINT)  # step 4 is judged before the run stops

    with pytest.raises(Interrupted):
        run(tiny, steps=12, watch=Watch(report=stop, folder=folder, judge=judge, judge_every=4))
    assert judged == [4]
    outcome = run(tiny, steps=12, watch=Watch(folder=folder, judge=judge, judge_every=4))
    assert judged == [4, 8, 12] and outcome.judged == [(4, -4.0), (8, -8.0), (12, -12.0)]
    assert outcome.best is not None and outcome.best[1:] == (4, -4.0)  # kept through the checkpoint


def test_a_run_keeps_the_settings_it_began_with(tmp_path, monkeypatch):
    """A later version may have other defaults, and other rules for what is left to a method."""
    data, folder = make_dataset(), RunFolder(tmp_path / "run")
    made = m3d.condense(data, 4, out=folder.path, steps=2, batch_real=4, net=NET)
    written = folder.request()["options"]
    assert written == made.manifest["options"]
    assert written["average_from"] == 0.8 and written["lr"] == 4 * (8 / 32) ** 3 and written["factor"] == 1
    (folder / RunFolder.CONDENSED).unlink()  # as if it had been killed at once
    monkeypatch.setattr("m3d.methods.m3d.size_rate", lambda shape: 7.0)
    assert m3d.resume(folder.path, data=data).fingerprint == made.fingerprint


def test_a_run_that_once_shared_its_device_says_so_at_the_end(tmp_path, monkeypatch):
    """Its seconds are those of all sessions."""
    monkeypatch.setattr("m3d.engine._REPORT_SECONDS", 0.0)
    options = {"net": NET, "steps": BLOCK + 4, "batch_real": 4, "device": "cpu"}
    for begun, gone_on, told in (("0.25", "1", 0.25), ("1", "0.5", 0.5), ("0.5", "0.25", 0.25), ("1", "1", None)):
        folder = tmp_path / f"{begun}-{gone_on}"
        monkeypatch.setenv("M3D_DEVICE_SHARE", begun)
        with pytest.raises(Interrupted):
            m3d.condense("digits", 1, out=folder, report=lambda _: signal.raise_signal(signal.SIGINT), **options)
        monkeypatch.setenv("M3D_DEVICE_SHARE", gone_on)
        assert m3d.resume(folder).manifest.get("device_share") == told


def test_a_strange_record_of_the_machine_does_not_keep_a_run_from_going_on(tmp_path):
    data, folder = make_dataset(), RunFolder(tmp_path / "run")
    made = m3d.condense(data, 1, out=folder.path, steps=2, batch_real=4, net=NET)
    for machine in ("a string", {"device_share": "a half"}, {"device_share": [1]}):
        (folder / RunFolder.CONDENSED).unlink()
        request = json.loads((folder / RunFolder.RUN).read_text())
        (folder / RunFolder.RUN).write_text(json.dumps({**request, "machine": machine}))
        again = m3d.resume(folder.path, data=data)
        assert again.fingerprint == made.fingerprint and "device_share" not in again.manifest
