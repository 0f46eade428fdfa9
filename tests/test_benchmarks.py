"""The benchmark scripts still fit the library they measure; their numbers are not tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from toys import make_dataset

import m3d

FOLDER = Path(__file__).parents[1] / "benchmarks"


def script(*words: str | Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, *words], cwd=FOLDER, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_script_can_be_loaded():
    made_once = {"make_digits"}  # the file it makes is in the package; it needs scikit-learn
    names = sorted({path.stem for path in FOLDER.glob("*.py")} - made_once)
    assert len(names) >= 10
    script("-c", f"import importlib; [importlib.import_module(name) for name in {names}]")


@pytest.mark.parametrize("name", ["pieces", "scaling", "demo"])
def test_a_small_run(name, tmp_path):
    pytest.importorskip("triton")
    where = {"scaling": [tmp_path], "demo": [tmp_path / "out.json"]}.get(name, [])
    words = ["--small", *([] if name == "demo" else ["--device", "cpu"]), *(["--out", *where] if where else [])]
    assert script(f"{name}.py", *words).count("\n") >= 2
    for file in tmp_path.glob("*.json"):
        assert json.loads(file.read_text())["device"].startswith("cpu")


def test_what_upsamplers_leave_out(tmp_path):
    """The principal components leave least, and nothing is left where nothing is enlarged."""
    words = ["digits", "--factors", "1", "2", "--images", "300", "--out", tmp_path / "out.json"]
    assert script("upsamplers.py", *words).count("%") == 8
    left = json.loads((tmp_path / "out.json").read_text())["left"]
    assert max(left["1"].values()) < 1e-9 and min(left["2"], key=left["2"].get) == "components" and len(left["2"]) == 4


def test_scripts_that_measure_a_set(tmp_path):
    m3d.condense(
        "digits",
        1,
        "datadam",
        net="convnet2:norm=batch,width=8",
        steps=2,
        batch_real=4,
        out=tmp_path / "run",
        device="cpu",
    )
    small = ["--device", "cpu", "--epochs", "2", "--repeats", "2", "--out", tmp_path / "out.json"]
    for name in ("strength", "stacked"):
        assert script(f"{name}.py", tmp_path / "run", *small).count("%") == 2
        report = json.loads((tmp_path / "out.json").read_text())
        assert report["device"].startswith("cpu") and report["set"]


@pytest.mark.parametrize("augmented", [False, True])
def test_the_public_loop_of_cafe_beside_ours(tmp_path, augmented):
    data = make_dataset(3, 20, (3, 32, 32))
    splits = {}
    for split, part in (("train", data.train), ("test", data.test)):
        splits |= {f"x_{split}": part.images.permute(0, 2, 3, 1).numpy(), f"y_{split}": part.labels().numpy()}
    np.savez(tmp_path / "tiny.npz", **splits)
    words = ["--steps", "4", "--width", "4", "--batch-real", "4", "--queries", "4", "--repeats", "1", "--epochs", "2"]
    words += ["--device", "cpu", "--out", tmp_path / "out.json", *(["--dsa"] if augmented else [])]
    said = script("public_cafe.py", tmp_path / "tiny.npz", *words)
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["settings"]["dsa"] is augmented and said.count("%") == 8
    for side in ("public", "m3d"):
        assert sorted(report["sides"][side]["accuracies"]) == ["1", "2", "3", "4"]
    # Between two decisions a network is trained for ten epochs at least, and a network serves ten steps at least.
    assert report["sides"]["public"]["networks"] == 1 and report["sides"]["public"]["epochs_after_a_step"] >= 10
