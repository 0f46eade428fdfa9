"""Every plan builds, is told by its name and the paper's number, and is estimated without running anything."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from m3d.cli import main
from m3d.errors import M3DError
from m3d.grid.cells import STEPS, Cell, Overrides, Source, cell_digest, set_digest
from m3d.methods import METHODS, Task
from m3d.reproduce.cells import FACTS, imagenet_epochs, select
from m3d.reproduce.cost import _TEACHERS, condensing, estimate, evaluating
from m3d.reproduce.plans import ALIASES, PLANS, find
from m3d.reproduce.records import Records, read
from m3d.teachers import Teachers

RESULTS = Path(__file__).parents[2] / "results" / "reproduce"
NAMES = {
    "beyond",
    "methods",
    "moments",
    "lowres",
    "imagenet",
    "cross-arch",
    "compat",
    "motivation",
    "steps",
    "ipm",
    "kernel",
    "images",
}
CELLS = {"lowres": 310, "moments": 5, "imagenet": 24, "cross-arch": 24, "compat": 16, "motivation": 4, "steps": 24}
CELLS |= {"methods": 124, "beyond": 109, "ipm": 7, "kernel": 15, "images": 36}


def run(capsys, *arguments) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def test_all_plans_are_there():
    assert set(PLANS) == NAMES and {name: len(plan.cells) for name, plan in PLANS.items()} == CELLS
    for plan in PLANS.values():
        rows = {row.key for table in plan.tables for row in table.rows}
        assert rows and all(table.columns for table in plan.tables)
        for cell in plan.cells:
            assert any(c.cells == cell.column for table in plan.tables for c in table.columns), cell.key
            assert cell.pair or all(source.data in FACTS for source in cell.sources)


def test_methods_options_networks_and_protocols_exist():
    from m3d.evaluation import make_protocol
    from m3d.nets import make_net

    sources = {s for plan in PLANS.values() for cell in plan.cells for s in cell.sources if s.method != "whole"}
    checked = 0
    for source in sources:
        facts = FACTS[source.data]
        make_net(source.net, facts.shape, facts.classes)
        entry = METHODS.get(source.method)
        options = entry.resolve(dict(source.options))
        made = entry.build(Task(source.data, facts.shape, facts.classes, source.ipc), **options)
        assert made.steps == source.steps, source  # the estimates know the methods' own steps
        checked += 1
    assert checked > 150
    for plan in PLANS.values():
        for cell in plan.cells:
            make_protocol(cell.protocol, epochs=cell.epochs)
            if cell.sources:
                make_net(cell.net, FACTS[cell.tested_on].shape, FACTS[cell.tested_on].classes)


def test_stated_factors_are_the_methods_own():
    from m3d.reproduce.cost import decoded, factor

    checked = 0
    for plan in PLANS.values():
        for source in {s for cell in plan.cells for s in cell.sources if s.method in METHODS.names()}:
            facts = FACTS[source.data]
            entry = METHODS.get(source.method)
            task = Task(source.data, facts.shape, facts.classes, source.ipc)
            tiles = entry.build(task, **entry.resolve(dict(source.options))).tiles
            assert (tiles.factor, tiles.count(source.ipc, facts.shape)) == (factor(source), decoded(source)), source
            checked += 1
    assert checked > 150


def test_estimates_know_how_many_cells_there_are():
    from m3d.reproduce.cost import decoded

    for data, ipc, options in (
        ("mnist", 1, {}),
        ("mnist", 9, {}),
        ("fashion-mnist", 9, {}),
        ("mnist", 50, {}),
        ("mnist", 10, {"cell": 10}),
        ("mnist", 10, {"margin": 2}),
        ("fashion-mnist", 10, {}),
        ("fashion-mnist", 10, {"factor": 2}),
        ("cifar10", 10, {"cell": 20}),
        ("cifar10", 1, {"cell": 11}),
        ("cifar10", 50, {"cell": 16, "chroma": "full"}),
    ):
        facts, entry = FACTS[data], METHODS.get("m3d+")
        task = Task(data, facts.shape, facts.classes, ipc)
        tiles = entry.build(task, **entry.resolve(options)).tiles
        source = Source(data, ipc, "m3d+", tuple(sorted(options.items())))
        assert decoded(source) == tiles.count(ipc, facts.shape) > ipc


def test_baselines_of_mnist_are_measured_as_dc_measured_them():
    """DC augments MNIST alone; the selections its paper quotes are measured by its protocol too."""
    cells = {cell.key: cell.protocol for cell in PLANS["lowres"].cells}
    for method in ("random", "herding", "k-center", "dc"):
        assert cells[f"mnist/10/{method}@dc-mnist/seed0"] == "dc-mnist"
        assert cells[f"fashion-mnist/10/{method}@dc/seed0"] == "dc"
    assert cells["mnist/10/dsa@dsa/seed0"] == "dsa"


def test_soft_labels_stand_in_a_table_of_their_own():
    """Nothing measured with them is in a column of hard labels, nor the other way round; the bytes of both are told."""
    plan = PLANS["beyond"]
    kinds = {cell.column: cell.labels for cell in plan.cells}
    assert all(kinds[cell.column] == cell.labels for cell in plan.cells) and list(kinds.values()).count("soft") == 1
    tables = {table.title for table in plan.tables for column in table.columns if kinds[column.cells] == "soft"}
    assert tables == {"With soft labels"}
    record = {"storage": {"pixels": 4096, "labels": 1536}}
    assert [read(record, f"stored {what}").mean for what in ("pixels", "labels")] == [4.0, 1.5]
    assert read({}, "stored labels") is None
    usual = Teachers()  # what the table's note and the estimates say of them
    assert (usual.teacher, usual.teachers, usual.epochs) == (
        "convnet3",
        5,
        20,
    ) and usual.teachers * usual.epochs == _TEACHERS


def test_seeds():
    keys = [c.key for c in select(PLANS["lowres"].cells, "cifar10/10/m3d")]
    assert keys == [f"cifar10/10/m3d/seed{seed}" for seed in (0, 1, 2)]
    assert all("/seed" in cell.key for plan in PLANS.values() for cell in plan.cells if cell.sources)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_plan_runs_dry(capsys, tmp_path, name):
    code, out, err = run(capsys, "reproduce", name, "--dry-run", "--json", "--out", tmp_path)
    rows = json.loads(out)
    assert code == 0 and err == "" and len(rows) == CELLS[name]
    assert all(row["seconds"] > 0 and row["memory"] >= 0 and not row["finished"] for row in rows)
    code, out, _ = run(capsys, "reproduce", name, "--dry-run", "--out", tmp_path)
    assert code == 0 and f"{CELLS[name]} of {CELLS[name]} cells to run" in out and "H200" in out
    assert not list(tmp_path.iterdir())  # nothing is written


def test_a_dry_run_does_not_load_torch(tmp_path):
    code = (
        "import sys; from m3d.grid.cells import Overrides; from m3d.reproduce.command import Request\n"
        f"Request('lowres', (), __import__('pathlib').Path({str(tmp_path)!r}), Overrides()).plan()\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_the_papers_numbers():
    expected = {
        **{f"table{k}": [n] for k, n in enumerate(("moments", "lowres", "imagenet", "cross-arch", "compat"), 1)},
        **{f"fig{k}": ["images"] for k in (4, 5, 7, 8, 9, 10, 11)},
        **{"fig1": ["motivation"], "fig3": ["steps"], "fig6": ["ipm", "kernel"], "fig6a": ["ipm"], "fig6b": ["kernel"]},
        "all": list(PLANS),
    }
    assert {alias: [plan.name for plan, _ in find(alias)] for alias in ALIASES} == expected
    for alias in ALIASES:
        for plan, pattern in find(alias.upper()):
            assert select(plan.cells, pattern)
    assert {c.sources[0].data for plan, p in find("fig4") for c in select(plan.cells, p)} == {"svhn"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lowress", "Did you mean 'lowres'?"),
        ("table7", "Did you mean 'table"),
        ("cross_arch2", "Did you mean 'cross-arch'?"),
        ("fig2", "drawing of the framework"),
    ],
)
def test_wrong_names(capsys, name, message):
    code, out, err = run(capsys, "reproduce", name, "--dry-run")
    assert code == 2 and out == "" and message in err and err.count("\n") == 1


def test_cells_by_pattern(capsys, tmp_path):
    cells = PLANS["lowres"].cells
    assert len(select(cells, "*/m3d")) == 19 and len(select(cells, "cifar10/*/m3d/seed0")) == 3
    assert len(select(cells, "cifar10/10/dm")) == 1 and len(select(cells, "cifar10/10/dm@dsa")) == 1
    assert {c.sources[0].data for c in select(cells, "svhn")} == {"svhn"}
    with pytest.raises(M3DError, match=r"unknown cell 'cifar10/10/m4d'. Did you mean 'cifar10/10/m3d'"):
        select(cells, "cifar10/10/m4d")
    code, out, err = run(capsys, "reproduce", "fig6", "--cell", "cifar10/10/ipm9", "--dry-run", "--out", tmp_path)
    assert code == 2 and "unknown cell 'cifar10/10/ipm9'" in err and "Allowed: " in err
    code, out, err = run(capsys, "reproduce", "lowres", "--cell", "nothing", "--dry-run", "--out", tmp_path)
    assert code == 2 and err.endswith("'m3d reproduce lowres --dry-run' lists them all.\n") and len(err) < 200
    code, out, _ = run(capsys, "reproduce", "fig6", "--cell", "cifar10/10/ipm5", "--dry-run", "--json")
    assert [row["cell"] for row in json.loads(out)] == ["cifar10/10/ipm5/seed0"]


def test_several_cells_are_taken_in_the_order_given_each_once_and_none_may_be_unknown(capsys, tmp_path):
    def rows(name: str, *patterns: str) -> tuple[int, str, str]:
        cells = [word for pattern in patterns for word in ("--cell", pattern)]
        return run(capsys, "reproduce", name, *cells, "--dry-run", "--json", "--out", tmp_path)

    code, out, _ = rows("fig6", "cifar10/10/ipm20", "mnist/10/linear", "cifar10/10/ipm5", "cifar10/10/ipm20/seed0")
    keys = [row["cell"] for row in json.loads(out)]
    assert code == 0 and keys == ["cifar10/10/ipm20/seed0", "cifar10/10/ipm5/seed0", "mnist/10/linear/seed0"]
    code, _, err = rows("fig6", "cifar10/10/ipm5", "cifar10/10/ipm9")
    assert code == 2 and "unknown cell 'cifar10/10/ipm9'" in err


def test_identity_is_what_decides_a_cell():
    cell = PLANS["lowres"].cells[0]
    plain = Overrides()
    base = cell_digest(cell, plain)
    assert cell_digest(replace(cell, key="other", row="other", column="other"), plain) == base
    source = cell.sources[0]
    changes = [
        replace(cell, sources=(replace(source, **{name: value}),))
        for name, value in (("data", "svhn"), ("ipc", 2), ("method", "dm"), ("options", (("lr", 1),)), ("seed", 5))
    ]
    changes += [replace(cell, **{k: v}) for k, v in (("net", "convnet4"), ("protocol", "dsa"), ("epochs", 7))]
    changes += [replace(cell, repeats=3), replace(cell, measures=("picture",)), replace(cell, pair="mean")]
    digests = {base, *(cell_digest(c, plain) for c in changes)}
    overrides = [Overrides(steps=5), Overrides(epochs=5), Overrides(repeats=5), Overrides(precision="fp32")]
    digests |= {cell_digest(cell, o) for o in (*overrides, Overrides(deterministic=True))}
    assert len(digests) == 1 + len(changes) + 5


def test_sets_are_shared_by_what_decides_them():
    source = Source("cifar10", 10)
    assert set_digest(source, Overrides(repeats=3, epochs=9)) == set_digest(source, Overrides())
    assert set_digest(source, Overrides(steps=9)) != set_digest(source, Overrides())
    assert set_digest(source, Overrides(steps=99_999)) == set_digest(source, Overrides())  # at most: changes nothing
    assert set_digest(source, Overrides(precision="fp32")) != set_digest(source, Overrides())
    with_m3d = {name for name, plan in PLANS.items() for c in plan.cells if source in c.sources}
    assert with_m3d == {"lowres", "methods", "beyond", "moments", "kernel", "ipm", "images", "cross-arch"}


def test_overrides_are_at_most_and_named():
    overrides = Overrides(steps=20, repeats=3)
    assert overrides.folder == "with-steps20-repeats3" and Overrides().folder == ""
    assert overrides.source(Source("cifar10", 10)).steps == 20
    assert overrides.source(Source("cifar10", 10, "random")) == Source("cifar10", 10, "random")
    assert overrides.source(Source("cifar10", 10, options=(("steps", 5),))).steps == 5
    with pytest.raises(M3DError, match="--epochs 0"):
        Overrides(epochs=0)


def test_estimates_are_the_measured_figures_and_grow_with_the_work():
    def cell(data="cifar10", ipc=10, **changes):
        return Cell("k", "r", "c", (Source(data, ipc, **changes),))

    measured = estimate(cell(), Overrides())
    assert measured.seconds == pytest.approx(16.5 + 9.2, rel=0.2)
    assert condensing(cell().sources[0]).memory == pytest.approx(0.48 * 2**30, rel=0.3)
    for more in (cell(ipc=50), cell("cifar100"), cell("imagenet10", net="resnetap10"), cell(method="idc")):
        assert estimate(more, Overrides()).seconds > measured.seconds
    assert estimate(cell(), Overrides(steps=10, epochs=10)).seconds < measured.seconds - 15
    made: set[str] = set()
    first, second = (estimate(cell(), Overrides(), made).seconds for _ in range(2))
    assert first == measured.seconds and second < first - 10  # the set is there already
    assert set(STEPS) == {*METHODS.names(), "whole"}
    for name in METHODS.names():
        entry = METHODS.get(name)
        own = entry.build(Task("cifar10", (3, 32, 32), 10, 1), **entry.resolve({})).steps
        assert Source("cifar10", 1, name).steps == own, name


def test_estimates_agree_with_the_recorded_runs():
    """Within a factor of two wherever a run had the GPU to itself and took seconds worth planning."""
    slower_then = ("1/dc/", "1/dsa/", "1/dc@", "1/dsa@", "datadam-zca")  # versions whose steps took longer (LAB.md)
    compared = dict.fromkeys(("condensing", "evaluating"), 0)
    for plan in PLANS.values():
        records = Records(RESULTS, plan, Overrides())
        for cell in plan.cells:
            record = records.of(cell) or {}
            made = record.get("condensation", ())
            if len(made) != 1 or made[0].get("device_share") or cell.at is not None:
                continue
            pairs = {
                "condensing": (made[0]["seconds"], condensing(cell.sources[0]).seconds),
                "evaluating": (record.get("seconds", 0.0), evaluating(cell, Overrides()).seconds),
            }
            for which, (took, thought) in pairs.items():
                if took > 15 and not any(name in cell.key for name in slower_then):
                    assert 0.5 < thought / took < 2, (plan.name, cell.key, which, took, thought)
                    compared[which] += 1
    assert compared["condensing"] > 30 and compared["evaluating"] > 10, compared


@pytest.mark.parametrize(
    ("images", "classes", "epochs"),
    [
        *((1, 10, 3000), (10, 10, 2000), (20, 10, 1500), (90, 10, 1000), (180, 10, 1000), (201, 10, 500)),
        *((501, 10, 300), (90, 100, 600), (180, 100, 600), (10, 100, 1300)),
    ],
)
def test_epochs_of_the_imagenet_protocol(images, classes, epochs):
    assert imagenet_epochs(images, classes) == epochs


def test_the_pictures_of_a_factor_are_made_with_it():
    """A set that is shared with other tables names no factor: then the method's own must be the one shown."""
    from m3d.reproduce.runner import todays_settings

    compared = 0
    for cell in PLANS["images"].cells:
        shown = int(cell.key.split("/")[2].partition("-factor")[2])
        assert todays_settings(cell.sources[0])["factor"] == shown, cell.key
        compared += 1
    assert compared == 36
