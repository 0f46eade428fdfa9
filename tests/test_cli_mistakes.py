"""Mistakes on the command line: exit code 2, one line that names the value and what is allowed."""

import numpy as np
import pytest
from shell import fails, run

from m3d.arguments import assignments
from m3d.errors import M3DError
from m3d.run_folder import RunFolder


def test_every_option_of_everything_has_a_meaning():
    from m3d.listing import _REGISTRIES, MEANINGS, describe

    seen = set()
    for what, registry in _REGISTRIES.items():
        for entry in registry:
            assert describe(what, entry.name)
            seen |= set(entry.options())
    assert seen == set(MEANINGS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["condens"], "condense"),
        (["condense"], "which dataset"),
        (["condense", "cifr10"], "Did you mean 'cifar10'"),
        (["condense", "./missing"], "missing"),
        (["condense", "digits", "--ipc", "0"], "ipc=0"),
        (["condense", "digits", "--ipc", "ten"], "ten"),
        (["condense", "digits", "--ipc", "500"], "has 1"),
        (["condense", "digits", "--method", "m3"], "Did you mean 'm3d'"),
        (["condense", "digits", "--kernel", "gauss"], "Did you mean 'gaussian'"),
        (["condense", "digits", "--net", "convnet9"], "unknown network"),
        (["condense", "digits", "--set", "lrr=1"], "Did you mean 'lr'"),
        (["condense", "digits", "--set", "lr"], "expected name=value"),
        (["condense", "digits", "--set", "lr=fast"], "lr='fast'"),
        (["condense", "digits", "--set", "lr=1,momentum=0"], "give --set again for every option"),
        (["condense", "digits", "--expert-epochs", "3"], "of the method: --set expert_epochs=VALUE"),
        (["condense", "digits", "--init", "herding"], "of the method: --set init=VALUE"),  # though --net is like it
        (["sweep", "digits", "--encoders", "2"], "of the method: --set encoders=VALUE"),
        (["condense", "digits", "--set", "lr=nan"], "lr='nan'"),
        (["condense", "digits", "--lr", "-1"], "lr=-1.0"),
        (["condense", "digits", "--steps", "0"], "steps=0"),
        (["condense", "digits", "--stepps", "3"], "--stepps"),
        (["condense", "digits", "--method", "random", "--steps", "3"], "unknown option of random 'steps'"),
        (["condense", "digits", "--val-fraction", "1.5"], "val_fraction=1.5"),
        (["condense", "digits", "--eval-every", "5"], "needs held-out data"),
        (["condense", "digits", "--keep-every", "-1"], "keep_every=-1"),
        (["condense", "digits", "--keep-every", "9", "--steps", "5"], "keep_every=9 is more than the 5 steps"),
        (["condense", "digits", "--keep-every", "9", "--subtasks", "2"], "keep_every=9 with subtasks=2"),
        (["condense", "digits", "--eval-every", "-2", "--val-fraction", ".2"], "eval_every=-2"),
        (["condense", "digits", "--eval-every", "9", "--steps", "5", "--val-fraction", ".2"], "more than the 5 steps"),
        (["condense", "digits", "--checkpoint-seconds", "nan"], "checkpoint_seconds=nan"),
        (["condense", "digits", "--factor", "7"], "cells without a pixel"),
        (["condense", "digits", "--steps", "3", "--set", "steps=7"], "steps is given twice"),
        (["evaluate", "--full", "digits", "--data", "mnist"], "--full has none"),
        (["evaluate", "x", "--out", "y"], "its own folder"),
        (["evaluate", "x", "--size", "8"], "keep the size"),
        (["condense", "digits", "--device", "tpu"], "unknown device 'tpu'"),
        (["condense", "digits", "--precision", "fp8"], "unknown precision 'fp8'"),
        (["evaluate"], "one of them"),
        (["evaluate", "missing"], "does not exist"),
        (["show", "missing"], "does not exist"),
        (["export", "missing", "--to", "npz"], "does not exist"),
        (["list", "things"], "unknown list 'things'"),
        (["list", "methods", "nothing"], "unknown method 'nothing'"),
        (["--plugin", "missing.py", "list", "methods"], "is not a file"),
    ],
)
def test_mistakes_get_one_line(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in fails(capsys, *arguments)
    assert list(tmp_path.iterdir()) == []  # nothing was begun


def test_mistakes_about_a_finished_run(capsys, finished, tmp_path):
    assert "unknown protocol" in fails(capsys, "evaluate", finished, "--protocol", "papers")
    assert "repeats=0" in fails(capsys, "evaluate", finished, "--repeats", 0)
    assert "split 'val': no part of digits was held out" in fails(capsys, "evaluate", finished, "--split", "val")
    assert "give one of them" in fails(capsys, "evaluate", finished, "--net", "convnet2", "--nets", "convnet3")
    assert "allowed endings" in fails(capsys, "show", finished, "--out", tmp_path / "x.gif")
    assert "unknown export format" in fails(capsys, "export", finished, "--to", "jpg")
    assert "allowed are 1" in fails(capsys, "show", finished, "--most", 0)


def _one_class(tmp_path):
    x = np.zeros((4, 8, 8, 3), np.uint8)
    np.savez(
        tmp_path / "one.npz",
        x_train=x,
        y_train=np.zeros(4, int),
        x_test=x,
        y_test=np.zeros(4, int),
        class_names=["only"],
    )
    return tmp_path / "one.npz"


def test_evaluation_refuses_changed_data_and_unwritable_folders(capsys, tmp_path, tiny_file):
    folder = tmp_path / "run"
    assert run(capsys, "condense", tiny_file, "--method", "random", "--out", folder)[0] == 0
    (folder / RunFolder.RESULTS).mkdir()
    fast = ["--net", "convnet2:width=8", "--epochs", 1, "--repeats", 1]
    code, out, err = run(capsys, "evaluate", folder, *fast)
    assert code == 2 and "last epoch" in out and "Traceback" not in err  # the number is printed all the same
    (folder / RunFolder.RESULTS).rmdir()
    arrays = dict(np.load(tiny_file))
    arrays["x_train"] = 255 - arrays["x_train"]
    np.savez(tiny_file, **arrays)
    assert "has changed since the set was made" in fails(capsys, "evaluate", folder, *fast)
    assert run(capsys, "evaluate", folder, *fast, "--data", tiny_file)[0] == 0
    assert "one class" in fails(capsys, "condense", _one_class(tmp_path), "--out", tmp_path / "one")


def test_an_option_set_twice_is_refused(capsys, tmp_path):
    twice = ["--set", "kernel=linear", "--set", "kernel=gaussian"]
    assert "kernel is given twice" in fails(capsys, "condense", "digits", *twice, "--out", tmp_path / "run")
    assert "kernel is given twice" in fails(capsys, "sweep", "digits", *twice, "--dry-run")


def test_a_value_may_hold_an_equals_sign():
    assert assignments(["out=runs/lr=3/x", "kernel=polynomial:degree=2,c=1"]) == {
        "out": "runs/lr=3/x",
        "kernel": "polynomial:degree=2,c=1",
    }
    for two in ("lr=1,momentum=0", "lr=1 momentum=0", "lr=1, batch-real=3"):
        with pytest.raises(M3DError, match="one name=value each"):
            assignments([two])


def test_a_folder_that_is_being_relabelled_is_held(capsys, finished, tmp_path):
    with RunFolder(tmp_path / "soft").claimed("m3d relabel"):
        assert "is in use by m3d relabel" in fails(capsys, "relabel", finished, "--out", tmp_path / "soft")
