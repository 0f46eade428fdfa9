"""Comparisons: every format carries every number."""

import csv
import io
import json
import shutil

import pytest
from PIL import Image

from m3d.cli import main
from m3d.errors import M3DError
from m3d.report import COLUMNS, RANKING_COLUMNS, SHARED_COLUMNS, SOFT_COLUMNS, bar_chart, over_seeds, rows_of, table
from m3d.run_folder import RunFolder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    import m3d
    from m3d.evaluation import make_protocol

    folder = tmp_path_factory.mktemp("runs")
    paths = []
    for method, options in (("m3d", {"steps": 2, "batch_real": 4}), ("random", {})):
        path = folder / f"digits_{method}"
        condensed = m3d.condense("digits", 1, method, net="convnet2:width=8", out=path, **options)
        result = m3d.evaluate(condensed, net="convnet2:width=8", protocol=make_protocol("quick", epochs=2), repeats=2)
        RunFolder(path).add_result(result.as_record())
        paths.append(path)
    return paths


def test_rows_hold_results_and_costs(runs):
    rows = rows_of(runs)
    assert [r["method"] for r in rows] == ["m3d", "random"] and set(rows[0]) == {
        *COLUMNS,
        *SOFT_COLUMNS,
        *RANKING_COLUMNS,
        *SHARED_COLUMNS,
        "seed",
        "kept",
        "options",
        "matched",
    }
    assert rows[0]["steps"] == 2 and rows[0]["seconds"] > 0 and rows[0]["n"] == 2 and rows[0]["memory"] is None


def test_a_run_that_shared_its_device_says_so(runs, tmp_path, monkeypatch):
    import m3d
    from m3d.evaluation import make_protocol

    assert "device" not in table(rows_of(runs))
    monkeypatch.setenv("M3D_DEVICE_SHARE", "0.5")
    condensed = m3d.condense("digits", 1, "random", net="convnet2:width=8", out=tmp_path / "shared")
    result = m3d.evaluate(condensed, net="convnet2:width=8", protocol=make_protocol("quick", epochs=1), repeats=1)
    RunFolder(tmp_path / "shared").add_result(result.as_record())
    (row,) = rows_of([tmp_path / "shared"])
    assert row["device_share"] == 0.5 and "device share" in table([*rows_of(runs), row])


@pytest.mark.parametrize("form", ["text", "csv", "markdown", "latex"])
def test_every_format(runs, form):
    rows = rows_of(runs)
    text = table(rows, form)
    mean, sd = rows[0]["last"]
    if form == "csv":
        parsed = list(csv.DictReader(io.StringIO(text)))
        assert (
            float(parsed[0]["last"]) == mean and float(parsed[0]["last_sd"]) == sd and parsed[1]["method"] == "random"
        )
    else:
        assert f"{mean:.2f}" in text and f"{sd:.2f}" in text and all(c in text for c in COLUMNS)
    if form == "markdown":
        assert len({line.count("|") for line in text.splitlines()}) == 1
    if form == "latex":
        assert r"digits\_m3d" in text and text.count(r"\\") == 3


def _row(**changed):
    plain = dict.fromkeys((*COLUMNS, *SOFT_COLUMNS, *RANKING_COLUMNS, *SHARED_COLUMNS))
    plain |= {"run": "a", "method": "m3d", "data": "digits", "ipc": 1, "protocol": "quick/2", "net": "convnet3", "n": 2}
    plain |= {"last": (50.0, 1.0), "best": (51.0, 1.0), "seed": 0, "kept": "", "options": {"lr": 1.0}, "steps": 5}
    plain |= {"matched": {"net": "convnet3", "fingerprint": "f"}}
    return plain | changed


def test_settings_over_their_seeds():
    """The mean and spread of the seeds' means; other settings, and a setting with one seed, stand apart."""
    rows = [
        _row(seconds=4.0, memory=1.0),
        _row(run="b", seed=1, last=(52.0, 3.0), best=(53.0, 0.1), seconds=6.0, memory=2.0, device_share=0.5),
        _row(run="c", seed=1, options={"lr": 2.0}),
        _row(run="d", method="dm"),
        _row(run="e", seed=2, last=None, best=None, soft_last=(60.0, 1.0), soft_best=(60.0, 1.0)),
    ]
    first, *others = over_seeds(rows)
    assert (first["run"], first["seed"], first["n"]) == ("2 seeds", "0, 1", "2 × 2")
    assert first["last"] == (51.0, pytest.approx(2**0.5)) and first["best"] == (52.0, pytest.approx(2**0.5))
    assert (first["seconds"], first["memory"], first["device_share"]) == (5.0, 2.0, 0.5)
    assert [row["run"] for row in others] == ["c", "d", "e"]
    elsewhere = _row(run="f", seed=1, matched={"net": "convnet1", "fingerprint": "f"})
    assert len(over_seeds([rows[0], elsewhere])) == 2  # condensed through another network
    assert over_seeds([_row(lrs=(70.0, 1.0)), _row(seed=1)])[0]["lrs"] is None  # of one seed only
    # Two measurements of one seed's set count once; both networks are counted.
    again = over_seeds([rows[0], _row(run="a", last=(54.0, 1.0)), rows[1]])[0]
    assert again["last"] == (52.0, 0.0) and again["n"] == "3 × 2"
    assert over_seeds([rows[0], _row(last=(54.0, 1.0))]) == [rows[0], _row(last=(54.0, 1.0))]
    # A set made before there was an option says as much as one that names the value from before.
    early, late = _row(), _row(seed=1, options={"lr": 1.0, "chroma": "full"})
    assert len(over_seeds([early, late, _row(seed=2, options={"lr": 1.0, "chroma": "half"})])) == 2
    assert "seed" in table(rows) and "seed" not in table(rows[:1])
    written = table(over_seeds(rows), "csv")
    assert "51.00 ± 1.41" in table(over_seeds(rows)) and "2 × 2" in written
    assert ",51.0,1.4142," in written  # not all the digits of √2


def test_bars_say_what_tells_them_apart_and_the_title_what_they_share():
    def captions(*rows):
        axes = bar_chart(rows).axes[0]
        return [axes.get_title("left"), *(text.get_text() for text in axes.get_yticklabels())]

    assert captions(_row(), _row(method="dm")) == ["digits, IPC 1, convnet3, quick/2", "m3d", "dm"]
    assert captions(_row(), _row(seed=1, run="b"))[1:] == ["m3d, seed 0", "m3d, seed 1"]
    assert captions(_row(), _row(data="mnist")) == ["IPC 1, convnet3, quick/2", "m3d, digits", "m3d, mnist"]
    assert captions(_row(ipc=10, net="vgg11"), _row())[1:] == ["m3d, IPC 10, vgg11", "m3d, IPC 1, convnet3"]
    assert captions(_row(), _row(run="b"))[1:] == ["m3d (a)", "m3d (b)"]
    assert captions(_row(), _row(last=None, soft_last=(1.0, None)))[1:] == ["m3d", "m3d, soft labels"]
    means = [_row(seed="1, 2", run="2 seeds"), _row(seed="1, 2", method="dm", run="2 seeds")]
    assert captions(*means) == ["digits, IPC 1, convnet3, quick/2, seeds 1, 2", "m3d", "dm"]
    assert captions(means[0], _row(method="dm"))[1:] == ["m3d, seeds 1, 2", "dm, seed 0"]
    assert "\n" in captions(_row(net="resnet10:width=64,norm=instance", protocol="paper/1000, batch 256 on val"))[0]
    # Training on the whole data has neither images per class nor a seed of a condensation.
    assert captions(_row(), _row(method="whole", ipc=None, seed=None))[1:] == ["m3d, IPC 1, seed 0", "whole"]


def test_variants_of_a_method_are_told_apart_by_their_options():
    plain, other = {"lr": 1.0, "objective": "dm"}, {"lr": 1.0, "objective": "m3d", "chroma": "full"}
    rows = [_row(method="dm", options=o, run=f"r{i}") for i, o in enumerate((plain, other, other))]
    text = table(rows, "markdown")
    assert "| dm objective=dm |" in text and text.count("| dm objective=m3d |") == 2 and "lr=" not in text
    assert [label.get_text() for label in bar_chart(rows[:2]).axes[0].get_yticklabels()] == [
        "dm objective=dm",
        "dm objective=m3d",
    ]
    assert "| dm |" in table(rows[:1], "markdown") and "| dm |" in table([rows[0], _row(ipc=10)], "markdown")
    assert [line["method"] for line in csv.DictReader(io.StringIO(table(rows, "csv")))] == ["dm"] * 3


def test_compare_over_seeds_from_the_command_line(runs, capsys):
    import m3d
    from m3d.evaluation import make_protocol

    other = runs[0].with_name("digits_m3d_1")
    options = {"steps": 2, "batch_real": 4, "seed": 1, "net": "convnet2:width=8", "out": other}
    result = m3d.evaluate(
        m3d.condense("digits", 1, **options),
        net="convnet2:width=8",
        protocol=make_protocol("quick", epochs=2),
        repeats=2,
    )
    RunFolder(other).add_result(result.as_record())
    with pytest.raises(SystemExit) as stop:
        main(["compare", *map(str, runs), str(other), "--over-seeds"])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and "2 seeds" in out and "2 × 2" in out and len(out.splitlines()) == 4


def test_chart(runs, tmp_path):
    from m3d.pictures import save_figure

    save_figure(bar_chart(rows_of(runs)), tmp_path / "chart.png")
    with Image.open(tmp_path / "chart.png") as picture:
        assert picture.width > 500


def test_the_command(runs, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        main(["compare", *map(str, runs), "--form", "markdown", "--chart", str(tmp_path / "c.svg")])
    out = capsys.readouterr().out
    assert stop.value.code in (0, None) and out.startswith("| run |") and (tmp_path / "c.svg").exists()
    with pytest.raises(SystemExit):
        main(["compare", str(runs[0]), "--json"])
    assert json.loads(capsys.readouterr().out)[0]["method"] == "m3d"


def test_mistakes(runs, tmp_path):
    with pytest.raises(M3DError, match="unknown table format 'html'"):
        table(rows_of(runs), "html")
    with pytest.raises(M3DError, match="does not exist"):
        rows_of([tmp_path])
    import m3d

    m3d.condense("digits", 1, "random", out=tmp_path / "fresh")
    with pytest.raises(M3DError, match="no result yet"):
        rows_of([tmp_path / "fresh"])
    with pytest.raises(M3DError, match="no result yet"):
        rows_of([tmp_path / "fresh", tmp_path])


def test_folders_without_a_result_are_left_out_and_said(runs, tmp_path, caplog):
    """``m3d compare runs/*`` after the demo: runs/demo is a folder of runs."""
    assert rows_of([tmp_path, *runs]) == rows_of(runs)
    assert [record.getMessage() for record in caplog.records] == [f"{str(tmp_path)!r} is left out: it holds no result"]
    with pytest.raises(M3DError, match="'nowhere' does not exist"):
        rows_of(["nowhere", *runs])


def test_a_repeated_evaluation_stands_there_once_and_one_network_has_no_deviation(runs, tmp_path):
    import shutil

    from m3d.run_folder import RunFolder

    folder = RunFolder(shutil.copytree(runs[0], tmp_path / "run"))
    record = folder.results()[0]
    folder.add_result({**record, "seconds": 1e6})  # the same again on a slower day
    folder.add_result({**record, "n": 1, "sd": 0.0, "best_sd": 0.0})
    rows = rows_of([folder.path])
    assert [row["n"] for row in rows] == [2, 1] and rows[1]["last"] == (record["accuracy"], None)
    assert " ± " in table(rows[:1]) and " ± " not in table(rows[1:])
    assert list(csv.DictReader(io.StringIO(table(rows, "csv"))))[1]["last_sd"] == ""
    bar_chart(rows)


def test_the_whole_data_stand_beside_their_condensed_sets(runs, tmp_path, capsys):
    """The upper bound: it has no set, so nothing was condensed and nothing is stored."""
    whole = tmp_path / "whole"
    few = ["--net", "convnet1:width=2", "--epochs", "1", "--repeats", "2", "--out", str(whole)]
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", "--full", "digits", *few])
    assert stop.value.code == 0
    rows = rows_of([*runs, whole])
    assert [row["method"] for row in rows] == ["m3d", "random", "whole"]
    assert rows[2]["ipc"] is None and rows[2]["steps"] is None and rows[2]["pixel_bytes"] is None
    assert rows[2]["last"][0] > 0 and len(table(rows).splitlines()) == 4
    bar_chart(rows)


def test_an_unfinished_run_whose_kept_set_was_measured_has_its_row(runs, tmp_path):
    unfinished = copied(runs[0], tmp_path / "unfinished", without="condensed.safetensors")
    (record,) = RunFolder(unfinished).results()
    (unfinished / RunFolder.RESULTS).unlink()
    RunFolder(unfinished).add_result({**record, "kept_as": "step-1", "steps": 1})
    (row,) = rows_of([unfinished])
    assert row["run"] == "unfinished/step-1" and row["steps"] == 1 and row["seconds"] is None
    assert len(rows_of([*runs, unfinished])) == 3


def test_what_makes_results_incomparable_is_named(runs, tmp_path):
    folder = RunFolder(copied(runs[0], tmp_path / "run"))
    (record,) = folder.results()
    for change in ({"batch": 7}, {"epochs": 3}, {"name": "another"}):
        folder.add_result({**record, "protocol": {**record["protocol"], **change}})
    folder.add_result({**record, "data": {**record["data"], "split": "val"}})
    assert [row["protocol"] for row in rows_of([folder.path])] == [
        "quick/2",
        "quick/2, batch 7",
        "quick/3",
        "another/2",
        "quick/2 on val",
    ]


def copied(run, target, without=""):
    shutil.copytree(run, target)
    if without:
        (target / without).unlink()
    return target
