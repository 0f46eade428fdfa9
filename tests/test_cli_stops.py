"""What ends a command early: Ctrl-C at any moment, a time limit, divergence. Nothing is lost and the way on is said."""

import os
import signal
import subprocess
import sys
import time

import pytest
from shell import FAST, fails, run

from m3d.run_folder import RunFolder


def test_a_diverging_run_is_stopped(capsys, tmp_path):
    err = fails(
        capsys,
        "condense",
        "digits",
        *FAST[:2],
        "--steps",
        80,
        "--batch-real",
        4,
        "--lr",
        1e6,
        "--out",
        tmp_path / "run",
    )
    assert "the run diverges, try a smaller --lr" in err
    # It left nothing, so it does not stand in the way of a better one.
    assert run(capsys, "condense", "digits", *FAST, "--out", tmp_path / "run")[0] == 0


def test_a_stop_while_judging_loses_nothing(tmp_path):
    """SIGTERM during a validation measurement: the checkpoint is there, and resuming gives the undisturbed result."""
    import m3d

    settings = [
        "--steps",
        "24",
        "--net",
        "convnet2:width=8",
        "--batch-real",
        "4",
        "--val-fraction",
        "0.2",
        "--eval-every",
        "8",
    ]
    code = f"""
import os, signal, m3d.cli, m3d.train
original = m3d.train.Trainer.run
def stop(self, until):
    if not stop.done:
        os.kill(os.getpid(), signal.SIGTERM)  # while the evaluation trains
    stop.done = True
    return original(self, until)
stop.done = False
m3d.train.Trainer.run = stop
m3d.cli.main(["condense", "digits", *{settings!r}, "--out", {str(tmp_path / "run")!r}])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 130 and "stopped after 8 steps" in done.stderr
    resumed = m3d.resume(tmp_path / "run")
    whole = m3d.condense(
        "digits",
        1,
        net="convnet2:width=8",
        steps=24,
        batch_real=4,
        eval_every=8,
        load_options={"val_fraction": 0.2},
        out=tmp_path / "whole",
    )
    assert resumed.fingerprint == whole.fingerprint
    assert resumed.manifest["validation"] == whole.manifest["validation"]
    best = [m3d.CondensedSet.load(tmp_path / name / RunFolder.BEST) for name in ("run", "whole")]
    assert best[0].fingerprint == best[1].fingerprint and best[0].manifest["steps"] == best[1].manifest["steps"] > 0


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    import signal

    folder = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "m3d",
        "condense",
        "digits",
        "--steps",
        "100000",
        "--net",
        "convnet2:width=8",
        "--batch-real",
        "4",
    ]
    process = subprocess.Popen(
        [*command, "--out", str(folder), "--checkpoint-seconds", "0.1"], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (folder / RunFolder.CHECKPOINT).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "--resume" in err and str(folder) in err and "Traceback" not in err
    assert (folder / RunFolder.CHECKPOINT).exists()


@pytest.mark.parametrize("begun", [True, False])
def test_ctrl_c_before_the_first_step_says_what_is_there(capsys, tmp_path, monkeypatch, begun):
    """Once run.json is written the run can be continued; before, nothing is there."""
    where = "m3d.prepare.Prepared.go" if begun else "m3d.prepare.prepare"
    with monkeypatch.context() as patch:
        patch.setattr(where, lambda *_, **__: signal.raise_signal(signal.SIGINT))
        if not begun:
            patch.setattr("m3d.api.prepare", lambda *_, **__: signal.raise_signal(signal.SIGINT))
        code, out, err = run(capsys, "condense", "digits", *FAST, "--out", tmp_path / "run")
    assert code == 130 and out == ""
    hint = f"; continue with: m3d condense --resume {tmp_path / 'run'}" if begun else ""
    assert err == f"m3d: interrupted{hint}\n"
    if begun:
        assert run(capsys, "condense", "--resume", tmp_path / "run")[0] == 0


def test_ctrl_c_during_an_import_within_a_run_says_what_is_there(tmp_path):
    """Libraries are imported late, some only once the run has begun."""
    (tmp_path / "late_import.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    (tmp_path / "plugin.py").write_text(
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nfrom m3d.prepare import Prepared\n"
        "def go(*_):\n    import late_import\nPrepared.go = go\n"
    )
    folder = tmp_path / "run"
    words = [sys.executable, "-m", "m3d", "--plugin", str(tmp_path / "plugin.py"), "condense", "digits", *FAST]
    done = subprocess.run([*words, "--out", str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130 and done.stdout == ""
    again = f"m3d --plugin {tmp_path / 'plugin.py'} condense --resume {folder}"
    assert done.stderr == f"m3d: interrupted; continue with: {again}\n"
    assert (folder / RunFolder.RUN).exists()


def test_ctrl_c_in_any_command_is_said(capsys, monkeypatch):
    monkeypatch.setattr("m3d.listing.overview", lambda *_: signal.raise_signal(signal.SIGINT))
    assert run(capsys, "list", "methods") == (130, "", "m3d: interrupted\n")


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_during_an_import_ends_at_once(tmp_path):
    """An exception raised there may be swallowed by the library, and the command would go on."""
    (tmp_path / "slow.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"
    )
    words = [sys.executable, "-m", "m3d", "--plugin", str(tmp_path / "slow.py"), "list", "methods"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "m3d: interrupted\n")
