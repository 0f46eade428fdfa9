"""The runner on a small plan: real runs, killed ones, finished ones, limited ones, failing ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import NET, know_small_plans

import m3d
from m3d.cli import main
from m3d.condensed import CondensedSet
from m3d.errors import Interrupted, M3DError
from m3d.grid.cells import Cell, Overrides, Source, _content, cell_digest
from m3d.grid.journal import lock
from m3d.grid.runner import Listener, Pace
from m3d.grid.work import Place, Watch, Workshop, together
from m3d.report import rows_of
from m3d.reproduce.cells import FACTS
from m3d.reproduce.plans import PLANS
from m3d.reproduce.records import Records
from m3d.reproduce.runner import run
from m3d.run_folder import RunFolder

SCRIPT = Path(__file__).parent / "small.py"
FIELDS = {
    "accuracy", "sd", "n", "best_of_checks", "best_sd", "last", "checks", "set", "data", "net", "protocol", "seed",
    "command", "commit", "torch", "python", "m3d", "device", "precision", "when", "plan", "cell", "digest",
    "overrides", "condensation", "condensation_seed",
}  # fmt: skip


def call(capsys, *arguments) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file() and p.name != ".lock"}


@pytest.fixture
def small_known():
    """The small plan, known for as long as a test runs."""
    before = dict(FACTS), dict(PLANS)
    know_small_plans()
    yield PLANS["small"]
    for table, kept in zip((FACTS, PLANS), before, strict=True):
        table.clear()
        table.update(kept)


@pytest.fixture
def fast(small_known):
    """The small plan with a tenth of its work."""
    overrides = Overrides(steps=4, epochs=2)
    return small_known, overrides, ["--steps", 4, "--epochs", 2]


def test_a_plan_from_nothing_to_tables_and_again(capsys, fast, tmp_path):
    plan, _, options = fast
    code, out, err = call(capsys, "reproduce", "small", "--out", tmp_path, *options)
    first, *_, last = [line for line in err.splitlines() if line.startswith("[")]
    assert code == 0 and first.startswith("[1 of 4]") and first.endswith(" left, on one H200")
    assert last.startswith("[4 of 4] digits/whole/seed0: about ") and last.endswith(" left")
    home = tmp_path / "with-steps4-epochs2"
    records = lines(home / "small.jsonl")
    assert [r["cell"] for r in records] == [c.key for c in plan.cells]
    assert set(records[0]) >= FIELDS and records[0]["overrides"] == {"steps": 4, "epochs": 2}
    made = records[0]["condensation"][0]
    assert made["steps"] == 4 and made["options"]["batch_real"] == 8 and made["data"]["fingerprint"]
    assert records[0]["protocol"]["epochs"] == 2 and records[0]["n"] == 2 and len(records[0]["last"]) == 2
    assert len(records[0]["moments"]["raw"]) == 3 and records[3]["method"] == "whole"
    assert records[0]["set"] == made["set"] != records[1]["set"]
    before = contents(home)
    assert {"small.md", "small.tex", "small.csv", "small.jsonl"} == set(before)
    assert (
        b"Not the paper's settings: steps 4, epochs 2" in before["small.md"] and b"n 2 \xc3\x97 2" in before["small.md"]
    )
    # Nothing is made again, and the records alone give the same tables.
    code, out, err = call(capsys, "reproduce", "small", "--out", tmp_path, *options)
    assert code == 0 and "4 of 4 cells were finished before" in out and err == ""
    told = out.splitlines()[0]  # what it gave and how it was made
    number = f"{records[0]['cell']}: {records[0]['accuracy']:.2f} ± {records[0]['sd']:.2f} % (last epoch, n=2)"
    assert told.startswith(number) and "[condensed in " in told and "cpu" in told
    assert contents(home) == before
    for name in before:
        if name != "small.jsonl":
            (home / name).unlink()
    for folder in tmp_path.glob("runs/*"):
        (folder / "condensed.safetensors").unlink(missing_ok=True)
    code, _, _ = call(capsys, "reproduce", "small", "--render", "--out", tmp_path, *options)
    assert code == 0 and contents(home) == before
    code, out, _ = call(capsys, "reproduce", "small", "--dry-run", "--json", "--out", tmp_path, *options)
    assert all(row["finished"] for row in json.loads(out))
    # Other settings are another result: nothing of the above counts.
    code, out, _ = call(capsys, "reproduce", "small", "--dry-run", "--json", "--out", tmp_path, "--steps", 4)
    assert not any(row["finished"] for row in json.loads(out))
    assert not (tmp_path / "small.jsonl").exists()


def test_one_cell_and_what_it_shares(fast, tmp_path):
    """A set and an evaluation made for one plan serve another; a measure more does not cost an evaluation."""
    plan, overrides, _ = fast
    place = Place(tmp_path, device="cpu")
    run(plan, plan.cells[:1], place, overrides)
    folders = list((tmp_path / "runs").iterdir())
    stamps = {f: (f / RunFolder.CONDENSED).stat().st_mtime_ns for f in folders}
    other = replace(plan, name="other", cells=(replace(plan.cells[0], key="x", measures=("accuracy",)),))
    heard = []
    summary = run(
        other, other.cells, place, overrides, watch=Watch(epochs=lambda e, n: heard.append(e))
    )  # epochs are heard only if something is trained
    assert summary.made == 1 and not heard and list((tmp_path / "runs").iterdir()) == folders
    assert {f: (f / RunFolder.CONDENSED).stat().st_mtime_ns for f in folders} == stamps
    first, second = (lines(tmp_path / overrides.folder / f"{n}.jsonl")[0] for n in ("small", "other"))
    assert first["last"] == second["last"] and first["digest"] != second["digest"] and "moments" not in second


def test_again_makes_a_cell_anew_and_leaves_the_others(fast, tmp_path):
    """What a changed default needs: neither the record nor the set of before is taken."""
    plan, overrides, _ = fast
    place, random_one = Place(tmp_path, device="cpu"), plan.cells[2]
    run(plan, [plan.cells[0], random_one], place, overrides)
    file = tmp_path / overrides.folder / "small.jsonl"
    (folder,) = (tmp_path / "runs").glob("digits-random-*")
    before = lines(file)
    (folder / "mark").touch()
    file.write_text(file.read_text() + json.dumps({**before[1], "digest": "other", "cell": "x"}) + "\n")
    orphans = []
    summary = run(plan, [random_one], place, overrides, again=True, listener=Listener(orphaned=orphans.append))
    assert [record["cell"] for record in orphans] == ["x"]  # of the set that was removed
    after = [record for record in lines(file) if record["cell"] != "x"]
    assert summary.made == 1 and not (folder / "mark").exists() and len(after) == 2
    assert after[0] == before[0] and after[1]["last"] == before[1]["last"]


def start(out: Path, epochs: int) -> subprocess.Popen:
    words = ["reproduce", "small", "--cell", "digits/1/m3d/seed0", "--out", str(out), "--checkpoint-seconds", "0.05"]
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(epochs), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def kill_when(process: subprocess.Popen, out: Path, pattern: str) -> None:
    """SIGKILL as soon as a checkpoint is there."""
    for _ in range(1200):
        if list(out.glob(pattern)):
            break
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    else:
        pytest.fail(f"no {pattern} was written")
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_killed_while_condensing_and_while_evaluating_it_goes_on(tmp_path):
    epochs = 150
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    kill_when(start(killed, epochs), killed, "runs/*/checkpoint.safetensors")
    assert not list(killed.glob("runs/*/condensed.safetensors")) and not list(killed.glob("*.jsonl"))
    kill_when(start(killed, epochs), killed, "runs/*/evaluation-*.safetensors")
    assert list(killed.glob("runs/*/condensed.safetensors")) and not list(killed.glob("*.jsonl"))
    for out in (killed, whole):
        process = start(out, epochs)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    resumed, straight = (lines(out / "small.jsonl")[0] for out in (killed, whole))
    for name in ("set", "last", "checks", "best_of_checks", "moments", "picture", "digest"):
        assert resumed[name] == straight[name], name
    assert (killed / "small.md").exists() and not list(killed.glob("runs/*/evaluation-*"))


def test_soft_labels_are_measured_beside_hard_ones_on_the_same_set(fast, tmp_path):
    plan, overrides = fast[0], Overrides(steps=20)
    hard = replace(plan.cells[0], measures=("accuracy",))
    soft = replace(hard, key="digits/1/m3d-soft/seed0", column="M3D, soft", labels="soft")
    workshop = Workshop(Place(tmp_path), overrides, Watch())
    records = [workshop.make(cell) for cell in (hard, soft, hard)]
    assert [r["labels"] for r in records] == ["hard", "soft", "hard"] and len({r["set"] for r in records}) == 1
    assert records[0]["last"] == records[2]["last"] != records[1]["last"]
    assert records[1]["soft_labels"]["teacher"] == NET and records[1]["storage"]["labels"] == 10 * 10 * 4 + 10 * 8
    assert workshop.make(soft)["when"] == records[1]["when"]  # kept, not measured again
    assert cell_digest(soft, overrides) != cell_digest(hard, overrides)
    assert "labels" not in _content(hard) and _content(soft)["labels"] == "soft"  # older records keep their identity


def test_a_time_limit_stops_inside_a_cell_and_the_same_command_goes_on(capsys, small_known, tmp_path):
    options = ["--out", tmp_path, "--cell", "digits/1/m3d/seed0"]
    code, _, err = call(capsys, "reproduce", "small", *options, "--time-limit", 0.3)
    assert code == 130 and "stopped after" in err and "the same command goes on" in err
    assert list(tmp_path.glob("runs/*/checkpoint.safetensors")) and not list(tmp_path.glob("*.jsonl"))
    code, out, _ = call(capsys, "reproduce", "small", *options)
    assert code == 0 and "digits/1/m3d/seed0" in out
    whole = m3d.condense("digits", 1, net="convnet2:width=8", augment="none", batch_real=8, steps=300)
    assert lines(tmp_path / "small.jsonl")[0]["set"] == whole.fingerprint
    assert "--time-limit -1" in call(capsys, "reproduce", "small", *options, "--time-limit", -1)[2]


def test_a_time_limit_between_cells(fast, tmp_path):
    plan, overrides, _ = fast
    with pytest.raises(Interrupted, match="stopped after 0 cells"):
        run(plan, plan.cells, Place(tmp_path), overrides, seconds=0.0)
    listener = Listener(done=lambda cell, record: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Interrupted, match="stopped after 1 cell"):
        run(plan, plan.cells, Place(tmp_path), overrides, listener=listener)
    assert run(plan, plan.cells, Place(tmp_path), overrides).skipped == 1


def test_time_left_counts_a_shared_set_once():
    """Two cells measure the first set: when it is made, the second of them takes its evaluation alone."""

    def cost(cell: Cell, made: set[str]) -> float:
        name = cell.sources[0].method
        fresh = 100.0 if name not in made else 0.0
        made.add(name)
        return 10.0 + fresh

    cells = [Cell(str(k), "", "", (Source("digits", 1, name),)) for k, name in enumerate(("dm", "dm", "m3d", "there"))]
    pace = Pace(cost, 1, {"there"})
    assert pace.left(cells) == (110 + 10 + 110 + 10, False)
    pace.took(cells[0], 55.0)  # twice as fast as thought
    assert pace.left(cells[1:]) == ((10 + 110 + 10) / 2, True)
    pace.took(cells[1], 5.0)
    assert pace.left(cells[2:]) == ((110 + 10) / 2, True)


def test_a_failing_cell_does_not_stop_the_others(capsys, fast, tmp_path):
    plan, overrides, options = fast
    unknown = Cell("digits/1/later/seed0", "digits/1", "Later", (Source("digits", 1, "later", (("steps", 9),)),))
    PLANS["small"] = replace(plan, cells=(unknown, plan.cells[2]))
    code, _, err = call(capsys, "reproduce", "small", "--out", tmp_path, *options)
    assert code == 2 and "unknown method 'later'" in err and "1 cell failed" in err and "Traceback" not in err
    assert [r["cell"] for r in lines(tmp_path / overrides.folder / "small.jsonl")] == [plan.cells[2].key]


def test_two_processes_do_not_share_a_folder(fast, tmp_path):
    plan, overrides, _ = fast
    with lock(tmp_path), pytest.raises(M3DError, match=r"is in use by m3d .*\(process \d+ on"):
        run(plan, plan.cells, Place(tmp_path), overrides)


def test_a_run_is_continued_with_its_own_data_only(fast, tmp_path, digits, tiny):
    from m3d import api

    request = {"net": "convnet2:width=8", "steps": 2, "batch_real": 4}
    done = api.condense(digits, 1, out=tmp_path / "run", **request)
    (tmp_path / "run" / RunFolder.CONDENSED).unlink()
    assert api.resume(tmp_path / "run", data=digits).fingerprint == done.fingerprint
    (tmp_path / "run" / RunFolder.CONDENSED).unlink()
    with pytest.raises(M3DError, match="have changed since the run began"):
        api.resume(tmp_path / "run", data=tiny)


def test_what_would_be_ignored_is_refused(capsys):
    for options, message in (
        (["--render", "--cell", "toy/mean"], "--cell toy/mean"),
        (["--dry-run", "--time-limit", 5], "--time-limit 5"),
        (["--dry-run", "--again"], "give one of them"),
    ):
        code, out, err = call(capsys, "reproduce", "motivation", *options)
        assert code == 2 and out == "" and message in err


def test_damaged_records_are_named(fast, tmp_path):
    plan, _, _ = fast
    (tmp_path / "small.jsonl").write_text('{"no": "digest"}\n')
    with pytest.raises(M3DError, match="no record of a cell"):
        Records(tmp_path, plan, Overrides())
    (tmp_path / "small.jsonl").write_text("{torn")
    with pytest.raises(M3DError, match="is damaged"):
        Records(tmp_path, plan, Overrides())


def test_sub_tasks_are_put_together(tiny):
    """Two halves of the classes, condensed apart, are one set of all classes."""
    sets = [m3d.condense(tiny, 2, "random", seed=s) for s in (0, 1)]
    whole = together(sets, "both")
    assert whole.images.shape[0] == 12 and whole.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert torch.equal(whole.images[6:], sets[1].images) and len(whole.class_names) == 6
    assert whole.manifest["data"]["name"] == "both" and len(whole.manifest["data"]["parts"]) == 2
    mosaics = m3d.condense(tiny, 2, "random", factor=2)
    with pytest.raises(M3DError, match="'both' are stored in different ways"):
        together([sets[0], mosaics], "both")


def test_initial_images_are_where_the_methods_start(tmp_path):
    """What the figure shows as initial is what M3D and DM move away from: a step of no length leaves it."""
    workshop = Workshop(Place(tmp_path, device="cpu"), Overrides(), Watch())
    for factor in (1, 2):
        start = workshop.condensed(Source("digits", 2, "random", (("factor", factor),), "convnet2:width=8"))
        for method in ("m3d", "dm"):
            options = (("batch_real", 4), ("factor", factor), ("lr", 1e-12), ("steps", 1))
            moved = workshop.condensed(Source("digits", 2, method, options, "convnet2:width=8"))
            torch.testing.assert_close(moved.images, start.images, atol=1e-5, rtol=0)


def test_a_kept_set_sheds_what_a_kill_after_it_left(tmp_path):
    workshop = Workshop(Place(tmp_path, device="cpu"), Overrides(), Watch())
    source = Source("digits", 1, "random", (), "convnet2:width=8")
    made = workshop.condensed(source)
    (file,) = tmp_path.rglob(RunFolder.CONDENSED)
    file.with_name(RunFolder.PREVIOUS).write_text("left behind")
    assert workshop.condensed(source).fingerprint == made.fingerprint
    assert not list(tmp_path.rglob("*checkpoint*"))


def test_imagenet_in_five_sub_tasks(capsys, tmp_path, monkeypatch):
    """The whole of the imagenet plan's largest cell, on a generated folder at a small size."""
    from m3d.data import imagenet

    make_folder(tmp_path / "ILSVRC2012", imagenet.subsets()["imagenet100"])
    monkeypatch.setattr(imagenet, "SIDE", 24)
    plan = PLANS["imagenet"]
    (cell,) = [c for c in plan.cells if c.key == "imagenet100/10/m3d/seed0"]
    assert len(cell.sources) == 5 and cell.epochs == 600 and cell.protocol == "imagenet100" and cell.repeats == 3
    options = (("batch_real", 2), ("factor", 1), ("steps", 1))
    sources = tuple(replace(s, ipc=1, net="resnetap10:width=4", options=options) for s in cell.sources)
    small = replace(cell, sources=sources, net="resnetap10:width=4", epochs=1, repeats=1)
    listener = Listener(done=lambda c, record: None)
    place = Place(tmp_path / "out", tmp_path, "cpu")
    summary = run(replace(plan, cells=(small,)), [small], place, Overrides(), listener=listener)
    assert summary.made == 1 and not summary.failed
    (record,) = lines(tmp_path / "out" / "imagenet.jsonl")
    assert record["data"]["name"] == "imagenet100" and len(record["condensation"]) == 5
    assert [p["data"]["name"] for p in record["condensation"]] == [f"imagenet100-{k}" for k in range(1, 6)]
    assert record["protocol"]["lr"] == 0.1 and record["protocol"]["photo"] and record["n"] == 1
    hours = Records(tmp_path / "out", replace(plan, cells=(small,)), Overrides()).place(
        "M3D", "imagenet100/10", "hours"
    )
    assert hours is not None and hours.mean == pytest.approx(sum(p["seconds"] for p in record["condensation"]) / 3600)


def make_folder(root: Path, wnids: tuple[str, ...]) -> None:
    from PIL import Image

    for k, wnid in enumerate(wnids):
        for split, n in (("train", 2), ("val", 1)):
            (root / split / wnid).mkdir(parents=True)
            for i in range(n):
                Image.new("RGB", (26, 30), (k, 200 - k, 40 * i)).save(root / split / wnid / f"{i}.JPEG")


def test_condensed_sets_can_be_looked_at_by_the_other_commands(capsys, fast, tmp_path):
    _, _, options = fast
    call(capsys, "reproduce", "small", "--cell", "digits/1/random", "--out", tmp_path, *options)
    (folder,) = (tmp_path / "runs").iterdir()
    assert CondensedSet.load(folder).manifest["method"] == "random"
    code, out, _ = call(capsys, "compare", folder)
    assert code == 0 and "quick/2" in out


def test_json_prints_a_record_per_cell_whenever_it_was_made(capsys, tmp_path):
    words = ["reproduce", "fig1", "--json", "--out", tmp_path]
    printed = [call(capsys, *words, *more)[1] for more in ([], [], ["--render"])]
    keys = [sorted(json.loads(line)["cell"] for line in out.splitlines()) for out in printed]
    assert len(keys[0]) == 4 and keys == [keys[0]] * 3


def test_a_set_is_measured_as_it_was_on_the_way(tmp_path, small_known):
    source = replace(small_known.cells[0].sources[0], options=(("augment", "none"), ("batch_real", 8), ("steps", 8)))
    cell = replace(small_known.cells[0], measures=("accuracy",), epochs=2, repeats=1)
    end = replace(cell, key="end", sources=(replace(source, keep_every=2),))
    cells = (end, *(replace(end, key=f"at {at}", at=at) for at in (2, 6)))
    plan = replace(small_known, cells=cells)
    for overrides, folder in ((Overrides(), "run"), (Overrides(steps=4), "short")):
        run(plan, plan.cells, Place(tmp_path / folder), overrides)
        records = Records(tmp_path / folder, plan, overrides)
        steps = [records.of(c)["condensation"][0]["steps"] for c in cells]
        assert steps == ([8, 2, 6] if folder == "run" else [4, 1, 3])  # at the same parts of a shorter way
        assert len({records.of(c)["set"] for c in cells}) == 3
        assert len(list((tmp_path / folder / "runs").iterdir())) == 1  # one run serves all
    rows = rows_of(
        [next((tmp_path / "run" / "runs").iterdir())]
    )  # each with its own steps; the way has no cost of its own
    assert sorted((row["steps"], row["seconds"] is None) for row in rows) == [(2, True), (6, True), (8, False)]
    few = Overrides(steps=1)
    run(plan, plan.cells, Place(tmp_path / "few"), few)  # too few to be divided: all are the finished set
    assert len({Records(tmp_path / "few", plan, few).of(c)["set"] for c in cells}) == 1
    assert Records(tmp_path / "run", plan, Overrides()).of(replace(cell, sources=(source,))) is not None  # the same end
