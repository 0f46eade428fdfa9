"""``m3d sweep``: a grid on held-out data, its records and ranking, and what is refused before any work."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import m3d
from m3d.arguments import numbers, values
from m3d.cli import main
from m3d.condensed import CondensedSet
from m3d.errors import M3DError
from m3d.evaluation import evaluate
from m3d.grid.cells import Cell, Overrides, Source, cell_digest, set_name
from m3d.grid.journal import Journal
from m3d.grid.where import Where
from m3d.sweep import Setting, compare, load_options, rank, table

NET = "convnet2:width=8"
GRID = ["--ipc", "1", "--set", "lr=1,2", "--set", "steps=3", "--set", "batch_real=4", "--seeds", "0,1", "--net", NET]
QUICK = ["--eval-net", NET, "--protocol", "quick", "--epochs", "2", "--repeats", "2", "--device", "cpu"]


def call(capsys, *arguments) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_sweep_on_a_shared_device_says_that_it_took_at_most_so_long(capsys, tiny_file, tmp_path, monkeypatch):
    from m3d.reproduce.records import read

    monkeypatch.setenv("M3D_DEVICE_SHARE", "0.25")
    grid = ["--ipc", 1, "--set", "steps=3", "--set", "batch_real=4", "--net", NET]
    code, out, _ = call(capsys, "sweep", tiny_file, *grid, *QUICK, "--out", tmp_path / "sweep")
    (record,) = lines(tmp_path / "sweep" / "sweep.jsonl")
    assert code == 0 and "≤ " in out and record["condensation"][0]["device_share"] == record["device_share"] == 0.25
    assert read(record, "seconds").at_most


def test_a_sweep_of_cells_keeps_its_records_names(capsys, tiny_file, tmp_path):
    """What says how a set is cut and what says which cell of a plan a record is are both called cell."""
    grid = ["--ipc", 1, "--set", "cell=4,5", "--set", "margin=1", *QUICK, "--out", tmp_path / "sweep"]
    assert call(capsys, "sweep", tiny_file, "--method", "random", *grid)[0] == 0
    records = lines(tmp_path / "sweep" / "sweep.jsonl")
    assert [r["cell"] for r in records] == [
        "tiny/1/random:cell=4,margin=1/seed0",
        "tiny/1/random:cell=5,margin=1/seed0",
    ]
    assert [(r["cell_height"], r["margin"]) for r in records] == [(4, 1), (5, 1)]


def test_what_identifies_a_record_is_not_overwritten(tmp_path):
    cell = Cell("key", "row", "column")
    made = Journal(tmp_path / "x.jsonl", "x", Overrides()).add(cell, {"cell": 12, "plan": 3, "accuracy": 1.0})
    assert (made["cell"], made["plan"], made["accuracy"]) == (cell.key, "x", 1.0)
    assert Journal(tmp_path / "x.jsonl", "x", Overrides()).of(cell) == made


def test_a_sweep_from_nothing_to_a_ranking_and_again(capsys, tiny_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loads = []
    monkeypatch.setattr("m3d.grid.work.load_data", lambda *a, **k: loads.append(a) or m3d.load_data(*a, **k))
    arguments = ["sweep", "tiny.npz", *GRID, *QUICK, "--val-fraction", "0.25", "--out", "out"]
    code, out, err = call(capsys, *arguments)
    assert code == 0 and "[4 of 4]" in err and "25% of the training data, held out" in out
    assert len(loads) == 1  # a relative path and the full one are the same data
    records = lines(tmp_path / "out" / "sweep.jsonl")
    assert [(r["condensation"][0]["options"]["lr"], r["condensation_seed"]) for r in records] == [
        (1.0, 0), (2.0, 0), (1.0, 1), (2.0, 1),
    ]  # fmt: skip
    # The numbers are those of condensing and evaluating by hand, and the fields those of m3d evaluate.
    data = m3d.load_data(tiny_file, val_fraction=0.25)
    condensed = m3d.condense(data, 1, net=NET, seed=1, lr=2.0, steps=3, batch_real=4, device="cpu")
    protocol = m3d.evaluation.make_protocol("quick", epochs=2)
    result = evaluate(condensed, data, net=NET, protocol=protocol, repeats=2, split="val")
    assert records[3]["set"] == condensed.fingerprint and records[3]["last"] == result.as_record()["last"]
    assert set(records[3]) >= set(result.as_record()) and records[3]["data"]["split"] == "val"
    assert records[3]["data"]["fingerprint"] == data.train.fingerprint
    # Nothing is made again; the ranking is of means over seeds.
    code, out, err = call(capsys, *arguments, "--json")
    assert code == 0 and err == "" and len(lines(tmp_path / "out" / "sweep.jsonl")) == 4
    told = json.loads(out)
    assert told["split"] == "val" and told["val_fraction"] == 0.25 and len(told["ranking"]) == 2
    for row in told["ranking"]:
        mine = [r["accuracy"] for r in records if r["condensation"][0]["options"]["lr"] == row["options"]["lr"]]
        assert row["means"] == mine and row["accuracy"] == pytest.approx(np.mean(mine), abs=1e-3)
        assert row["sd"] == pytest.approx(np.std(mine, ddof=1), abs=1e-3) and row["seeds"] == [0, 1]


def test_the_test_data_are_touched_by_final_only(capsys, tiny_file, tmp_path, monkeypatch):
    """A test split without a usable image changes nothing until --final."""
    monkeypatch.chdir(tmp_path)
    common = ["--ipc", "1", "--method", "random", *QUICK]
    call(capsys, "sweep", tiny_file, *common, "--out", "a")
    arrays = dict(np.load(tiny_file))
    np.savez(tiny_file, **{**arrays, "x_test": 255 - arrays["x_test"][::-1]})
    call(capsys, "sweep", tiny_file, *common, "--out", "b")
    first, second = (lines(tmp_path / name / "sweep.jsonl")[0] for name in "ab")
    assert first["last"] == second["last"] and first["checks"] == second["checks"]
    code, out, _ = call(capsys, "sweep", tiny_file, *common, "--out", "a", "--final", "--json")
    assert code == 0 and json.loads(out)["split"] == "test"
    (final,) = lines(tmp_path / "a" / "final.jsonl")
    whole = m3d.load_data(tiny_file)
    assert final["data"]["split"] == "test" and final["data"]["fingerprint"] == whole.train.fingerprint
    assert final["data"]["fingerprint"] != first["data"]["fingerprint"] and len(lines(tmp_path / "a/sweep.jsonl")) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "larning=1"], "unknown option of m3d 'larning'"),
        (["--set", "momentun=0,0.5"], "Did you mean 'momentum'?"),
        (["--set", "lr=1,fast"], "lr='fast' is not valid"),
        (["--set", "lr=1,,2"], "empty value"),
        (["--method", "m3d,mdd"], "unknown method 'mdd'"),
        (["--set", "kernel=gausian"], "Did you mean 'gaussian'?"),
        (["--net", "convet3"], "Did you mean 'convnet3'?"),
        (["--eval-net", "convet3"], "Did you mean 'convnet3'?"),
        (["--protocol", "papr"], "Did you mean 'paper'?"),
        (["--ipc", "1,x"], "--ipc 1,x is not valid"),
        (["--ipc", "0"], "--ipc 0 is not valid"),
        (["--seeds", "-1"], "--seeds -1 is not valid"),
        (["--repeats", "0"], "--repeats 0 is not valid"),
        (["--val-fraction", "0"], "--val-fraction 0.0 is not valid"),
        (["--val-fraction", "0.2", "--final"], "--final condenses all training data"),
        (["--set", "lr=1,2", "--final"], "these are 2"),
        (["--time-limit", "0"], "--time-limit 0.0 is not valid"),
        (["--time-limit", "5", "--dry-run"], "nothing is run"),
        (["--precision", "fp23"], "Did you mean 'fp32'?"),
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--checkpoint-seconds", "0"], "--checkpoint-seconds 0.0 is not valid"),
        (["--on", "rey"], "Did you mean 'ray'?"),
        (["--on", "ray:"], "an address must follow"),
        (["--retries", "2"], "only --on ray"),
        (["--gpus-per-cell", "0.5"], "only --on ray"),
        (["--cpus-per-cell", "2"], "only --on ray"),
        (["--on", "ray", "--gpus-per-cell", "1.5"], "--gpus-per-cell 1.5 is not valid"),
        (["--on", "ray", "--cpus-per-cell", "0"], "--cpus-per-cell 0.0 is not valid"),
        (["--on", "ray", "--retries", "-1"], "--retries -1 is not valid"),
    ],
)
def test_what_is_wrong_is_said_before_any_work(capsys, tiny_file, tmp_path, options, message):
    out = tmp_path / "out"
    code, stdout, err = call(capsys, "sweep", tiny_file, "--out", out, *options)
    assert code == 2 and stdout == "" and message in err and err.count("\n") == 1 and not out.exists()


def test_without_ray_the_error_says_what_to_install(capsys, tiny_file, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, err = call(capsys, "sweep", tiny_file, "--on", "ray", "--out", tmp_path / "out")
    assert code == 2 and "pip install 'm3d[ray]'" in err and err.count("\n") == 1


def test_a_dry_run_lists_the_cells_and_runs_none(capsys, tiny_file, tmp_path):
    arguments = ["sweep", tiny_file, "--ipc", "1,2", "--set", "lr=1,1.0,2", "--seeds", "0,1", "--out", tmp_path / "out"]
    code, out, err = call(capsys, *arguments, "--dry-run")
    assert code == 0 and err == "" and not (tmp_path / "out").exists()
    assert out.splitlines()[0] == "tiny/1/m3d:lr=1.0/seed0" and "8 of 8 cells to run" in out  # 1 and 1.0 are the same
    rows = json.loads(call(capsys, *arguments, "--dry-run", "--json")[1])
    assert len(rows) == 8 and rows[-1] == {"cell": "tiny/2/m3d:lr=2.0/seed1", "finished": False}


def test_a_stopped_sweep_goes_on_inside_its_cell(capsys, tiny_file, tmp_path):
    many = ["--ipc", "1", "--set", "steps=600", "--set", "batch_real=4", "--net", NET]
    arguments = ["sweep", tiny_file, *many, *QUICK, "--out", tmp_path]
    code, out, err = call(capsys, *arguments, "--time-limit", "0.6")
    assert code == 130 and "the same command goes on" in err and out == ""
    assert list(tmp_path.glob("runs/*/checkpoint.safetensors"))
    (folder,) = tmp_path.glob("runs/*")
    (folder / "mark").touch()
    code, _, _ = call(capsys, *arguments)
    (record,) = lines(tmp_path / "sweep.jsonl")
    whole = m3d.condense(m3d.load_data(tiny_file, val_fraction=0.1), 1, net=NET, steps=600, batch_real=4, device="cpu")
    assert code == 0 and (folder / "mark").exists() and record["set"] == whole.fingerprint


def test_a_failed_cell_is_told_and_the_others_are_ranked(capsys, tiny_file, tmp_path):
    """A rate that diverges: exit code 2, and the table of what there is."""
    grid = ["--set", "lr=1,1000000", "--set", "steps=30", "--set", "batch_real=4", "--net", NET]
    code, out, err = call(capsys, "sweep", tiny_file, *grid, *QUICK, "--out", tmp_path)
    assert code == 2 and "1 cell failed" in err and "diverges" in err and "Traceback" not in err
    assert "m3d:batch_real=4,lr=1.0,steps=30" in out and [r["n"] for r in lines(tmp_path / "sweep.jsonl")] == [2]


def test_changed_data_are_other_cells(capsys, tiny_file, tmp_path):
    arguments = ["sweep", tiny_file, "--method", "random", *QUICK, "--out", tmp_path]
    call(capsys, *arguments)
    arrays = dict(np.load(tiny_file))
    np.savez(tiny_file, **{**arrays, "x_train": 255 - arrays["x_train"]})
    code, out, _ = call(capsys, *arguments)
    first, second = lines(tmp_path / "sweep.jsonl")
    assert code == 0 and "finished before" not in out and first["digest"] != second["digest"]


def test_size_and_whitening_reach_the_data(capsys, tiny_file, tmp_path):
    arguments = ["sweep", tiny_file, "--method", "random", *QUICK, "--out", tmp_path]
    call(capsys, *arguments, "--size", "12", "--zca")
    call(capsys, *arguments)
    whitened, plain = lines(tmp_path / "sweep.jsonl")
    assert whitened["data"]["transform"] and "transform" not in plain["data"] and whitened["set"] != plain["set"]
    folders = [m3d.CondensedSet.load(f) for f in tmp_path.glob("runs/*")]
    assert sorted(f.images.shape[-1] for f in folders) == [8, 12]


def test_precision_determinism_and_several_methods(capsys, tiny_file, tmp_path):
    grid = ["--method", "random,dm", "--set", "factor=1", "--precision", "bf16", "--deterministic", "--dry-run"]
    code, out, _ = call(capsys, "sweep", tiny_file, *grid, "--out", tmp_path)
    assert code == 0 and "2 of 2 cells to run" in out, out
    call(capsys, "sweep", tiny_file, "--method", "random", *grid[4:7], *QUICK, "--out", tmp_path)
    call(capsys, "sweep", tiny_file, "--method", "random", *QUICK, "--out", tmp_path)
    low, plain = lines(tmp_path / "sweep.jsonl")
    assert low["precision"] == "bf16" and low["deterministic"] and low["digest"] != plain["digest"]
    assert plain["precision"] == "fp32" and not plain["deterministic"]


def test_the_data_root_reaches_the_loader(capsys, tmp_path):
    code, _, err = call(capsys, "sweep", "imagenet10", "--data-root", tmp_path / "nowhere", "--out", tmp_path / "out")
    assert code == 2 and str(tmp_path / "nowhere") in err


def test_values_and_numbers():
    assert values("a, b") == ["a", "b"] and numbers("--ipc", "1,10", 1) == [1, 10]
    assert values("linear,polynomial:degree=2,offset=1,gaussian") == [
        "linear",
        "polynomial:degree=2,offset=1",
        "gaussian",
    ]
    assert load_options(None, False, None) == (("val_fraction", 0.1),)
    assert load_options(None, True, 32) == (("size", 32),)


def test_the_ranking_is_within_an_ipc(tmp_path):
    journal = Journal(tmp_path / "x.jsonl", "x", Overrides())
    cells = {}
    for ipc, lr, accuracies in ((1, 1.0, (40, 42)), (10, 1.0, (60,)), (1, 2.0, (50, 50)), (10, 2.0, (55, 59))):
        setting = Setting("m3d", ipc, (("lr", lr),))
        sources = [Source("digits", ipc, "m3d", setting.options, seed=seed) for seed in (0, 1)]
        cells[setting] = [Cell(f"{ipc}{lr}{s.seed}", "", "", (s,)) for s in sources]
        for cell, accuracy in zip(cells[setting], accuracies, strict=False):
            journal.add(cell, {"accuracy": accuracy, "condensation_seed": cell.sources[0].seed, "condensation": []})
    rows = rank(cells, journal)
    assert [(r["ipc"], r["options"]["lr"], r["accuracy"], r["sd"]) for r in rows] == [
        (1, 2.0, 50.0, 0.0), (1, 1.0, 41.0, 1.414), (10, 1.0, 60.0, None), (10, 2.0, 57.0, 2.828),
    ]  # fmt: skip
    text = table(rows).splitlines()
    assert [line.split()[:2] for line in text[1:]] == [["1", "1"], ["1", "2"], ["10", "1"], ["10", "2"]]
    assert "(1 of 2)" in text[3] and "41.00 ± 1.41 %" in text[2]


def test_identities_of_published_records_stay():
    """Fields that came later are no part of an identity at their defaults, and are one otherwise."""
    source = Source("cifar10", 10, "m3d", (("factor", 1),))
    cell = Cell("k", "r", "c", (source,))
    assert (
        cell_digest(cell, Overrides()) == "8b6b94cb6245"
        and set_name(source, Overrides()) == "cifar10-m3d-ipc10-seed0-5cea44e2b354"
    )
    held = Source("cifar10", 10, "m3d", (("factor", 1),), load=(("val_fraction", 0.1),))
    assert set_name(held, Overrides()) != set_name(source, Overrides())
    assert cell_digest(Cell("k", "r", "c", (source,), split="val"), Overrides()) != cell_digest(cell, Overrides())


def test_where_needs_nothing_by_default():
    assert Where().local and not Where("ray:10.0.0.1:6379").local
    with pytest.raises(M3DError, match="unknown --on 'local:2'"):
        Where("local:2")


def test_of_several_methods_each_takes_the_options_it_has(capsys, tiny_file, tmp_path):
    """A random selection, which has no learning rate, stands beside methods that have one."""
    words = ["sweep", tiny_file, "--method", "m3d,random", "--set", "lr=1,2", "--out", str(tmp_path / "out"), *QUICK]
    code, out, _ = call(capsys, *words, "--dry-run", "--json")
    keys = [row["cell"] for row in json.loads(out)]
    assert code == 0 and [key.split("/")[2] for key in keys] == ["m3d:lr=1.0", "m3d:lr=2.0", "random"]
    code, _, err = call(capsys, *words, "--set", "larning=1", "--dry-run")
    assert code == 2 and "unknown option of m3d 'larning'" in err


def test_values_that_are_varied_are_tried_one_at_a_time(capsys, tiny_file, tmp_path):
    words = ["sweep", tiny_file, "--method", "m3d,random", "--ipc", 1, "--set", "steps=3,4", "--net", NET, *QUICK]
    words += ["--vary", "lr=1,2", "--vary", "momentum=0", "--out", tmp_path / "out", "--dry-run"]
    code, out, _ = call(capsys, *words, "--json")
    tried = [row["cell"].split("/")[2].removeprefix("m3d:") for row in json.loads(out)]
    around = ["", "lr=1.0,", "lr=2.0,", "momentum=0.0,"]
    assert code == 0 and tried == [*(f"{other}steps={n}" for n in (3, 4) for other in around), "random"]
    for extra, message in (
        (["--vary", "steps=5"], "--vary steps: --set gives it too"),
        (["--vary", "lr"], "--vary 'lr': expected name=value"),
        (["--vary", "lr=3"], "--vary lr=3: lr is given twice"),
        (["--vary", "larning=3"], "unknown option of m3d 'larning'"),
        (["--vary", "factor=99"], "factor=99 is not valid"),
    ):
        code, _, err = call(capsys, *words, *extra)
        assert code == 2 and message in err, err


def test_a_setting_measured_under_another_default_is_told_and_made_again_when_asked(capsys, tiny_file, tmp_path):
    grid = ["--ipc", 1, "--set", "steps=3", "--set", "batch_real=4", "--net", NET]
    arguments = ["sweep", tiny_file, *grid, *QUICK, "--out", tmp_path / "out"]
    assert call(capsys, *arguments)[0] == 0
    file = tmp_path / "out" / "sweep.jsonl"
    (record,) = lines(file)
    record["condensation"][0]["options"] |= {"momentum": 0.9, "lr": None, "long_gone": 1}  # and what cannot be compared
    file.write_text(json.dumps(record) + "\n")
    code, out, err = call(capsys, *arguments)
    told = f"m3d: {record['cell']} was made with momentum=0.9 (today 0.5); --again makes it anew\n"
    left_out = "m3d: not ranked, as made under other defaults: 1 cell\n"
    assert code == 0 and err == told + left_out and "1 of 1 cells were finished before" in out and "rank" not in out
    assert lines(file) == [record]  # it stays until someone decides otherwise
    # So is a cell made now of a set that was there before: here one whose record is lost.
    file.unlink()
    (condensed,) = (tmp_path / "out" / "runs").rglob("condensed.safetensors")
    earlier = CondensedSet.load(condensed)
    options = {**earlier.manifest["options"], "momentum": 0.9}
    dataclasses.replace(earlier, manifest={**earlier.manifest, "options": options}).save(condensed)
    (condensed.parent / "results.jsonl").unlink()
    code, out, err = call(capsys, *arguments)
    assert code == 0 and told in err and left_out in err and "finished before" not in out and len(lines(file)) == 1
    code, _, err = call(capsys, *arguments, "--again", "--json")
    assert code == 0 and err == "" and lines(file)[0]["condensation"][0]["options"]["momentum"] == 0.5
    code, _, err = call(capsys, *arguments, "--again", "--dry-run")
    assert code == 2 and "--dry-run and --again: give one of them" in err


def test_a_sweep_through_its_own_network_goes_on(capsys, tmp_path):
    """Finished cells are held against today's settings through the sweep's network: the usual one is too deep here."""
    generator = np.random.default_rng(0)
    pixels, labels = generator.integers(0, 255, (40, 6, 6, 3), dtype=np.uint8), np.arange(40) % 2
    np.savez(tmp_path / "small.npz", x_train=pixels, y_train=labels, x_test=pixels, y_test=labels)
    grid = ["--ipc", 1, "--set", "steps=2", "--set", "batch_real=4", "--set", "lr=1", "--net", NET]
    arguments = ["sweep", tmp_path / "small.npz", *grid, *QUICK, "--out", tmp_path / "out"]
    for _ in range(2):
        code, _, err = call(capsys, *arguments)
        assert code == 0 and "too small" not in err


def test_values_that_were_varied_are_compared_with_the_rest_and_equal_ones_share_a_rank():
    def row(accuracy, **options):
        common = {"ipc": 1, "method": "m3d", "sd": None, "means": [accuracy], "of_seeds": 1, "seconds": 1.0}
        return {**common, "accuracy": accuracy, "variant": str(options), "options": options, "shared": False}

    rows = [
        row(60.0, steps=3),
        row(62.5, steps=3, lr=2.0),
        row(60.0, steps=3, momentum=0.0),
        row(70.0, steps=4, lr=2.0),
    ]
    compare(rows, {"lr", "momentum"})
    assert [r["difference"] for r in rows] == [0.0, 2.5, 0.0, None]  # without the rest of steps=4 there is none
    text = table(sorted(rows, key=lambda r: -r["accuracy"])).splitlines()
    assert "difference" in text[0] and [line.split()[1] for line in text[1:]] == ["1", "2", "3", "3"]
    assert "–" in text[1] and "+2.50" in text[2] and "+0.00" in text[3]
    assert "difference" not in table([row(60.0)])
