"""Every command as a user runs it: what it makes and says."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from shell import FAST, fails, run

from m3d.condensed import CondensedSet
from m3d.pictures import loss_curve
from m3d.run_folder import RunFolder


def test_condense_evaluate_show_export(capsys, finished, tmp_path):
    assert CondensedSet.load(finished).manifest["options"]["steps"] == 3
    assert len((finished / RunFolder.HISTORY).read_text().splitlines()) == 4
    code, out, _ = run(
        capsys, "evaluate", finished, "--net", "convnet2:width=8", "--epochs", 4, "--repeats", 2, "--json"
    )
    record = json.loads(out)
    assert code == 0 and record["n"] == 2 and record["protocol"]["epochs"] == 4 and len(record["last"]) == 2
    assert record["data"]["name"] == "digits" and record["seed"] == 0 and "commit" in record and record["torch"]
    assert list(record["checks"]) == ["1", "2", "3", "4"]
    assert RunFolder(finished).results() == [record]
    code, out, _ = run(
        capsys, "evaluate", finished, "--net", "convnet2:width=8", "--epochs", 2, "--repeats", 1, "--protocol", "dsa"
    )
    assert code == 0 and "last epoch, n=1" in out and "best of epochs" in out and "±" not in out
    assert len(RunFolder(finished).results()) == 2
    for arguments in ([], ["--decoded", "--out", tmp_path / "decoded.svg"], ["--history"]):
        code, out, _ = run(capsys, "show", finished, *arguments)
        assert code == 0 and Path(out.strip()).stat().st_size > 1000
    with Image.open(finished / "images.png") as picture:
        assert picture.width > 200
    for target, name in (("imagefolder", "imagefolder"), ("npz", "condensed.npz"), ("pt", "condensed.pt")):
        code, out, err = run(capsys, "export", finished, "--to", target)
        assert code == 0 and (finished / name).exists() and out.strip() == str(finished / name)
        assert err == "m3d: 2 images per class, as a network is shown them\n"
        assert "pass --overwrite" in fails(capsys, "export", finished, "--to", target)
        if target == "imagefolder":
            (finished / name / "0" / "stale.png").touch()
        assert run(capsys, "export", finished, "--to", target, "--overwrite")[0] == 0
        assert not (finished / name / "0" / "stale.png").exists()
    assert not list(finished.glob(".*"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "manifest.json").write_text("{}")
    (tmp_path / "other").mkdir()  # an export with something beside it
    assert run(capsys, "export", finished, "--to", "imagefolder", "--out", tmp_path / "copy")[0] == 0
    (tmp_path / "copy" / "notes.txt").touch()
    np.savez(tmp_path / "data.npz", x_train=np.zeros(3))
    torch.save({"weight": torch.zeros(3)}, tmp_path / "model.pt")
    foreign = {"imagefolder": ("mine", "other", "copy", "data.npz"), "npz": ("mine", "data.npz", "model.pt")}
    foreign |= {"pt": ("data.npz", "model.pt", finished / RunFolder.CONDENSED)}
    for target, names in foreign.items():
        for name in names:
            told = fails(capsys, "export", finished, "--to", target, "--overwrite", "--out", tmp_path / name)
            assert f"is not an earlier export to {target}" in told
    assert CondensedSet.load(finished) is not None and (tmp_path / "copy" / "notes.txt").exists()


def test_results_of_any_set_of_a_run_are_written_down(capsys, tmp_path):
    folder, few = tmp_path / "run", ["--net", "convnet1:width=2", "--epochs", 1, "--repeats", 1]
    judged = ["--val-fraction", 0.2, "--eval-every", 2, "--keep-every", 1, "--out", folder]
    assert run(capsys, "condense", "digits", *FAST, *judged)[0] == 0
    sets = {"": folder, "condensed": folder / "condensed.safetensors", "best": folder / "best.safetensors"}
    sets["step-1"] = folder / "step-1.safetensors"
    for path in sets.values():
        code, _, err = run(capsys, "evaluate", path, *few)
        assert code == 0 and "not written down" not in err
    records = RunFolder(folder).results()
    assert [r.get("kept_as") for r in records] == [None, None, "best", "step-1"]
    assert [r["set"] for r in records] == [CondensedSet.load(path).fingerprint for path in sets.values()]
    code, out, _ = run(capsys, "compare", folder, "--json")
    assert code == 0 and [row["run"] for row in json.loads(out)] == ["run", "run/best", "run/step-1"]
    best = CondensedSet.load(folder / "best.safetensors").manifest
    losses = (folder / RunFolder.HISTORY).read_text().splitlines()[1:]
    assert best["steps"] == 2 and best["loss"] == pytest.approx(float(losses[1].split(",")[1]), rel=1e-6)
    elsewhere = tmp_path / "elsewhere.safetensors"
    elsewhere.write_bytes((folder / "best.safetensors").read_bytes())
    code, out, err = run(capsys, "evaluate", elsewhere, *few)
    assert (
        code == 0
        and "last epoch" in out
        and "not written down" in err
        and "elsewhere.safetensors' lies in no run folder" in err
    )
    label = ["--teacher", "convnet1:width=2", "--teachers", 1, "--epochs", 1]
    assert run(capsys, "relabel", folder / "best.safetensors", *label)[0] == 0
    assert run(capsys, "relabel", folder, *label)[0] == 0
    assert (tmp_path / "run-best-soft").is_dir() and (tmp_path / "run-soft").is_dir()


def test_a_set_kept_on_the_way_has_pictures_and_exports_of_its_own(capsys, tmp_path):
    folder = tmp_path / "run"
    code, _, _ = run(capsys, "condense", "digits", *FAST, "--keep-every", 2, "--out", folder)
    kept = folder / "step-2.safetensors"
    assert code == 0 and kept.exists()
    for run_or_set, ending in ((folder, ""), (kept, "-step-2")):
        for words, name in (
            (["show"], f"images{ending}.png"),
            (["show", "--decoded"], f"decoded{ending}.png"),
            (["export", "--to", "imagefolder"], f"imagefolder{ending}"),
            (["export", "--to", "npz"], f"condensed{ending}.npz"),
        ):
            code, out, _ = run(capsys, *words, run_or_set)
            assert code == 0 and Path(out.strip()) == folder / name and (folder / name).exists()
    last, early = (np.load(folder / f"condensed{ending}.npz")["images"] for ending in ("", "-step-2"))
    assert not np.array_equal(last, early)


def test_several_networks_in_one_call(capsys, finished):
    fast = ["--epochs", 1, "--repeats", 1, "--nets"]
    wide = "convnet1:width=2,norm=batch"
    code, out, _ = run(capsys, "evaluate", finished, *fast, f"{wide},convnet1", "--json")
    assert code == 0 and [r["net"] for r in json.loads(out)] == [wide, "convnet1"]
    (finished / RunFolder.RESULTS).unlink()
    code, out, _ = run(capsys, "evaluate", finished, *fast, "convnet1, convnet2", "--json")
    assert code == 0 and [r["net"] for r in json.loads(out)] == ["convnet1", "convnet2"]
    assert [r["net"] for r in RunFolder(finished).results()] == ["convnet1", "convnet2"]
    code, out, _ = run(capsys, "evaluate", finished, *fast, "convnet2")
    assert code == 0 and "convnet2" in out
    assert "unknown network 'convnot'" in fails(capsys, "evaluate", finished, *fast, "convnet1,convnot")
    assert len(RunFolder(finished).results()) == 3  # nothing was trained for the wrong name


def test_evaluate_the_whole_dataset(capsys):
    code, out, _ = run(
        capsys, "evaluate", "--full", "digits", "--net", "convnet2:width=8", "--epochs", 1, "--repeats", 1, "--json"
    )
    assert code == 0 and json.loads(out)["method"] == "whole"


def test_every_common_option_reaches_the_method(capsys, tmp_path):
    options = [
        "--lr",
        1e-6,
        "--factor",
        2,
        "--kernel",
        "polynomial:degree=3",
        "--ipm",
        2,
        "--set",
        "momentum=0.25",
        "--set",
        "init=noise",
    ]
    code, out, _ = run(
        capsys,
        "condense",
        "digits",
        *FAST,
        *options,
        "--out",
        tmp_path / "run",
        "--seed",
        3,
        "--precision",
        "bf16",
        "--json",
    )
    made = json.loads(out)
    assert code == 0 and made["seed"] == 3 and made["factor"] == 2 and made["precision"] == "bf16"
    assert {k: made["options"][k] for k in ("lr", "kernel", "ipm", "momentum", "init", "batch_real")} == {
        "lr": 1e-6,
        "kernel": "polynomial:degree=3",
        "ipm": 2,
        "momentum": 0.25,
        "init": "noise",
        "batch_real": 4,
    }
    # the manifest rebuilds the run
    again = tmp_path / "again"
    request = json.loads((tmp_path / "run" / "run.json").read_text())
    import m3d

    set_ = m3d.condense(
        "digits",
        request["ipc"],
        request["method"],
        net=request["net"],
        seed=3,
        precision="bf16",
        out=again,
        **made["options"],
    )
    assert set_.fingerprint == made["set"]


def test_validation_and_eager_compile_modes(capsys, tmp_path):
    code, out, _ = run(
        capsys, "condense", "digits", *FAST, "--out", tmp_path / "run", "--val-fraction", 0.2, "--eval-every", 2,
        "--step-mode", "eager", "--deterministic", "--device", "cpu", "--json",
    )  # fmt: skip
    made = json.loads(out)
    assert (
        code == 0 and [step for step, _ in made["validation"]] == [2] and (tmp_path / "run" / RunFolder.BEST).exists()
    )
    assert made["deterministic"] is True
    code, out, _ = run(
        capsys,
        "evaluate",
        tmp_path / "run",
        "--split",
        "val",
        "--net",
        "convnet2:width=8",
        "--epochs",
        1,
        "--repeats",
        1,
        "--json",
    )
    assert code == 0 and json.loads(out)["data"]["split"] == "val"


def test_the_best_set_on_held_out_data_is_named(capsys, tmp_path):
    judged = ["--val-fraction", 0.2, "--eval-every", 1, "--out", tmp_path / "run"]
    code, out, _ = run(capsys, "condense", "digits", *FAST, *judged)
    scores = CondensedSet.load(tmp_path / "run").manifest["validation"]
    assert code == 0 and f"{max(score for _, score in scores):.2f} %" in out and str(RunFolder.BEST) in out


def test_default_folder_overwrite_and_resume(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "condense", "digits", *FAST)[0] == 0
    folder = tmp_path / "runs" / "digits-m3d-ipc1-seed0"
    assert folder.is_dir()
    assert "already holds a run" in fails(capsys, "condense", "digits", *FAST)
    assert run(capsys, "condense", "digits", *FAST, "--overwrite")[0] == 0
    code, out, _ = run(capsys, "condense", "--resume", folder)
    assert code == 0 and "(had finished before)" in out and "10 classes × 1 image, " in out
    assert "data cannot be given beside it" in fails(capsys, "condense", "digits", "--resume", folder)
    assert "steps cannot be given beside it" in fails(capsys, "condense", "--resume", folder, "--steps", 9)
    assert "is not a run folder" in fails(capsys, "condense", "--resume", tmp_path)


def test_an_image_folder_of_ones_own(capsys, tmp_path):
    generator = np.random.default_rng(0)
    for split, n in (("train", 6), ("test", 2)):
        for c, name in enumerate(("cats", "dogs")):
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            for k in range(n):
                pixels = generator.integers(0, 100, (20 + k, 24, 3), dtype=np.uint8) + 100 * np.uint8(c)
                Image.fromarray(pixels).save(tmp_path / "photos" / split / name / f"{k}.png")
    code, out, _ = run(
        capsys, "condense", tmp_path / "photos", "--size", 16, *FAST, "--out", tmp_path / "run", "--json"
    )
    made = json.loads(out)
    assert code == 0 and made["class_names"] == ["cats", "dogs"]
    code, out, _ = run(
        capsys, "evaluate", tmp_path / "run", "--net", "convnet2:width=8", "--epochs", 20, "--repeats", 1, "--json"
    )
    assert code == 0 and json.loads(out)["accuracy"] >= 75


def test_lists(capsys):
    for what, expected in (
        ("methods", "m3d"),
        ("kernels", "gaussian"),
        ("nets", "convnet3"),
        ("protocols", "paper"),
        ("datasets", "digits"),
    ):
        code, out, _ = run(capsys, "list", what)
        assert code == 0 and expected in out and "`" not in out
        code, out, _ = run(capsys, "list", what, "--json")
        assert code == 0 and expected in [row["name"] for row in json.loads(out)]
    code, out, _ = run(capsys, "list", "methods", "m3d")
    assert code == 0 and all(name in out for name in ("batch_syn_max", "augment", "momentum", "default: 0.5"))
    assert run(capsys, "list", "kernels", "linear")[0] == 0


def test_help_answers_at_once_and_without_torch():
    """In a fresh process: every help has examples, and nothing heavy is imported, so that it answers at once."""
    for command in ("condense", "evaluate", "show", "export", "compare", "list", "demo"):
        code = f"import sys, m3d.cli; m3d.cli.main(['{command}', '--help'])"
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert "Examples:" in done.stdout and f"m3d {command}" in done.stdout
        assert time.perf_counter() - began < 3  # 0.3 s on an idle machine; a test must also pass on a busy one
    loaded = "import sys, m3d.cli\ntry: m3d.cli.main(['--help'])\nexcept SystemExit: pass\n"
    loaded += "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", loaded], check=True, capture_output=True)


def test_tensorboard(capsys, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        err = fails(capsys, "condense", "digits", *FAST, "--out", folder, "--tensorboard")
        assert "m3d[tensorboard]" in err and not folder.exists()
        return
    monkeypatch.setattr("m3d.engine._REPORT_SECONDS", 0.0)
    assert run(capsys, "condense", "digits", *FAST, "--out", folder, "--tensorboard")[0] == 0
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3]


def test_no_command_shows_the_help(capsys):
    code, out, _ = run(capsys)
    assert code == 0 and "Commands:" in out and "condense" in out


def test_version_and_module(capsys):
    code, out, _ = run(capsys, "--version")
    assert code == 0 and out.startswith("m3d 0.")
    done = subprocess.run([sys.executable, "-m", "m3d", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == out


def test_a_recorded_command_can_be_typed_again_and_a_resumed_set_names_the_first(capsys, tmp_path, monkeypatch):
    folder = tmp_path / "a run"
    words = ["m3d", "condense", "digits", *FAST, "--out", str(folder)]
    monkeypatch.setattr(sys, "argv", words)
    assert run(capsys, *words[1:])[0] == 0
    assert shlex.split(CondensedSet.load(folder).manifest["command"]) == words
    assert "begun_by" not in CondensedSet.load(folder).manifest
    (folder / RunFolder.CONDENSED).unlink()
    again = ["m3d", "condense", "--resume", str(folder)]
    monkeypatch.setattr(sys, "argv", again)
    assert run(capsys, *again[1:])[0] == 0
    manifest = CondensedSet.load(folder).manifest
    assert shlex.split(manifest["command"]) == again and shlex.split(manifest["begun_by"]) == words


def test_threads_wait_patiently_unless_told_otherwise(capsys, monkeypatch):
    for given, expected in (({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)):
        with monkeypatch.context() as patch:
            for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
                patch.setenv(name, "")  # put back afterwards
                patch.delenv(name)
            for name, value in given.items():
                patch.setenv(name, value)
            run(capsys, "--version")
            assert os.environ.get("GOMP_SPINCOUNT") == expected


def test_list_alone_names_what_can_be_listed(capsys):
    code, out, _ = run(capsys, "list")
    assert code == 0 and "m3d list methods" in out.splitlines() and len(out.splitlines()) == 6
    for line in out.splitlines():
        assert run(capsys, *line.split()[1:])[0] == 0


def test_unreadable_images_can_be_left_out_by_every_command_that_reads_a_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for split in ("train", "test"):
        for name in ("a", "b"):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for i in range(4):
                Image.fromarray(np.full((8 + i, 8, 3), 9 * i, np.uint8)).save(folder / f"{i}.png")
    photos, fast, net = tmp_path / "photos", ["--epochs", 1, "--repeats", 1], "convnet2:width=8"
    whole = tmp_path / "whole"
    assert run(capsys, "condense", photos, "--size", 8, *FAST, "--out", whole)[0] == 0
    (photos / "train" / "a" / "bad.png").write_text("no image")
    skip = ["--size", 8, "--on-bad-image", "skip"]
    assert "--on-bad-image skip" in fails(capsys, "evaluate", "--full", photos, "--size", 8)
    assert run(capsys, "evaluate", "--full", photos, *skip, *fast, "--net", net)[0] == 0
    assert run(capsys, "evaluate", whole, "--data", photos, *skip, *fast, "--net", net)[0] == 0
    assert run(capsys, "sweep", photos, *skip, "--val-fraction", 0.5, "--dry-run")[0] == 0
    label = ["--teacher", net, "--teachers", 1, "--epochs", 1]
    assert run(capsys, "relabel", whole, "--data", photos, *label, *skip)[0] == 0
    assert "--resume" not in fails(capsys, "relabel", whole, "--data", photos, *label, *skip)  # it is finished
    for option in (["--size", 8], ["--on-bad-image", "skip"]):
        assert "a run's data" in fails(capsys, "relabel", whole, *option, "--out", tmp_path / "other")
        assert "a run's data" in fails(capsys, "evaluate", whole, *option)


def test_help_names_every_plan(capsys):
    from m3d.reproduce.plans import PLANS

    words = " ".join(run(capsys, "reproduce", "--help")[1].replace(",", " ").replace(";", " ").split()).split()
    assert set(PLANS) <= set(words)


def test_a_curve_of_few_steps_is_one_line(tmp_path):
    """A mean of one step would lie on the steps themselves."""
    folder = RunFolder(tmp_path)
    for steps, lines, legend in ((60, 1, False), (150, 2, True)):
        folder.write_history([1.0 / (step + 1) for step in range(steps)])
        (axes,) = loss_curve(folder).axes
        assert len(axes.lines) == lines and (axes.get_legend() is not None) is legend


def test_on_a_cpu_a_shorter_first_look_is_offered(capsys, tmp_path):
    few = ["--steps", 2, "--net", "convnet2:width=8", "--batch-real", 4, "--out", tmp_path / "run"]
    code, out, _ = run(capsys, "condense", "digits", *few)
    assert code == 0 and "on a CPU, for a first look: m3d evaluate … --protocol quick --repeats 2" in out
