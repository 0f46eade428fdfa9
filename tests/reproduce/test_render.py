"""Tables and figures from records alone: every plan, the same bytes each time, the numbers where they belong."""

from __future__ import annotations

import csv
import hashlib
import io
import random
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from m3d.condensed import CondensedSet
from m3d.data.imagenet import subsets
from m3d.errors import M3DError
from m3d.grid.cells import Cell, Overrides, cell_digest
from m3d.grid.journal import Journal
from m3d.reproduce import figures
from m3d.reproduce.cells import FACTS, Plan
from m3d.reproduce.command import Request, headline, origin
from m3d.reproduce.figures import WIDTH
from m3d.reproduce.measures import picture
from m3d.reproduce.plans import PLANS
from m3d.reproduce.records import Place, Records, read
from m3d.reproduce.render import render
from m3d.reproduce.tables import _escape, _number, _signed
from m3d.reproduce.toy import compare

FIGURES = {"methods": ["-ipc1", "-ipc10"], "steps": [""], "ipm": [""], "kernel": [""], "motivation": [""]}
FIGURES["images"] = ["-cifar10", "-svhn", "-fashion-mnist", "-mnist", "-cifar100", "-imagenet10"]


def invented(cell: Cell) -> dict[str, object]:
    """A record such as the runner would write, with numbers out of the air."""
    if cell.pair:
        return compare(cell.pair)
    source, n = cell.sources[0], cell.repeats
    chance = random.Random(cell.key)
    progress = min(1.0, 0.3 + source.steps / 9000)
    bonus = {"m3d": 20, "dm": 8}.get(source.method, 0) - 4 * (dict(source.options).get("factor") == 1)
    accuracy = round(30 + bonus * progress + chance.uniform(0, 4), 3)
    machine = {"device": "a test", "torch": "2", "precision": "fp32", "commit": "0123456789abcdef-dirty"}
    part = {"seconds": 20.0 + 100 / max(1, int(dict(source.options).get("ipm", 5))), "steps": source.steps}
    record: dict[str, object] = {
        "set": hashlib.sha256(cell.key.encode()).hexdigest(),
        **machine,
        "condensation": [part],
    }
    if "accuracy" in cell.measures:
        record |= {"accuracy": accuracy, "sd": 0.4, "n": n}
    if "moments" in cell.measures:
        record["moments"] = {"raw": [3.0, 2.0, 1.0], "normalised": [0.3, 0.25, 0.125]}
    if "picture" in cell.measures:
        record["picture"] = picture(invented_set(cell))
    return record


def invented_set(cell: Cell) -> CondensedSet:
    source = cell.sources[0]
    facts = FACTS[source.data]
    ch, h, w = facts.shape
    n = facts.classes * source.ipc
    x, y = torch.linspace(0, 1, w), torch.linspace(0, 1, h)[:, None]
    hue = torch.linspace(0, 1, n)[:, None, None, None]
    images = ((x + y) / 2).expand(n, ch, h, w) * hue + 0.1 * torch.rand(n, ch, h, w)
    names = [
        ["airplane", "automobile", "Ankle boot", "T-shirt/top", "aquarium_fish"][k % 5] for k in range(facts.classes)
    ]
    labels = torch.arange(facts.classes).repeat_interleave(source.ipc)
    return CondensedSet(images.clamp(0, 1), labels, {"class_names": names, "factor": 1})


def filled(plan: Plan, out: Path, overrides: Overrides | None = None) -> Records:
    records = Records(out, plan, overrides or Overrides())
    for cell in plan.cells:
        if records.of(cell) is None:
            records.journal.add(cell, invented(cell))
    return records


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> Path:
    """All plans rendered from invented records."""
    out = tmp_path_factory.mktemp("all")
    for plan in PLANS.values():
        render(filled(plan, out))
    return out


@pytest.mark.parametrize("name", sorted(PLANS))
def test_all_files_are_made_and_made_the_same_again(everything, name):
    plan = PLANS[name]
    figures = [f"{name}{suffix}.{kind}" for suffix in FIGURES.get(name, []) for kind in ("png", "svg")]
    expected = {f"{name}.md", f"{name}.tex", f"{name}.csv", *figures}
    before = {file: (everything / file).read_bytes() for file in expected}
    again = render(Records(everything, plan, Overrides()))  # read from the file, not from memory
    assert {p.name for p in again} == expected
    assert {file: (everything / file).read_bytes() for file in expected} == before


def test_another_process_makes_the_same_bytes(everything):
    """No order of a set, no clock, no random identifier gets into a file."""
    names = ["motivation.png", "motivation.svg", "steps.svg", "lowres.md"]
    before = [(everything / name).read_bytes() for name in names]
    for plan in ("motivation", "steps", "lowres"):
        words = [sys.executable, "-m", "m3d", "reproduce", plan, "--render", "--out", str(everything)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    assert [(everything / name).read_bytes() for name in names] == before


@pytest.mark.parametrize("file", [f"{n}{s}" for n, suffixes in FIGURES.items() for s in suffixes])
def test_figures_have_the_width_of_a_column(everything, file):
    with Image.open(everything / f"{file}.png") as image:
        assert image.width == round(WIDTH * 300) and image.height < 1800
        assert len(set(image.convert("L").resize((60, 60)).tobytes())) > 20  # there is something on it
    root = ElementTree.parse(everything / f"{file}.svg").getroot()
    assert root.tag.endswith("svg") and root.attrib["width"].startswith(f"{WIDTH * 72:g}"[:5])


def test_places_hold_ours_published_and_difference(everything):
    records = Records(everything, PLANS["lowres"], Overrides())
    seeds = [records.of(c)["accuracy"] for c in PLANS["lowres"].cells if c.key.startswith("cifar10/10/m3d/")]
    mean = sum(seeds) / 3
    text = (everything / "lowres.md").read_text()
    (row,) = [line for line in text.splitlines() if line.startswith("| CIFAR-10 | 10 | 0.2 |") and "63.5 ± 0.2" in line]
    assert f"{mean:.1f} ± " in row and f"(n 3 × 10), 63.5 ± 0.2, {mean - 63.5:+.1f}".replace("-", "−") in row
    assert "30.3 ± 0.1†" in text  # SVHN at IPC 1, DM: run again by the authors
    assert "310 of 310 cells are finished; made on a test, torch 2, fp32; commit 0123456789-dirty." in text
    lines = list(csv.DictReader(io.StringIO((everything / "lowres.csv").read_text())))
    (line,) = [r for r in lines if (r["row"], r["column"]) == ("cifar10/10", "M3D")]
    assert float(line["ours"]) == pytest.approx(mean, abs=1e-4) and line["n"] == "30" and line["seeds"] == "3"
    assert float(line["difference"]) == pytest.approx(mean - 63.5, abs=1e-4) and line["source"] == "Table 2"
    assert len([r for r in lines if r["published"]]) == (11 * 15 - 10) + (9 * 15 - 10)


def test_of_two_records_of_a_cell_the_one_timed_alone_counts(tmp_path):
    """Cells of other tables are taken from their files; runs that shared a device tell no time to rely on."""
    plan, other = PLANS["methods"], PLANS["cross-arch"]
    digest = {cell_digest(cell, Overrides()): cell for cell in plan.cells}
    cell = next(c for c in other.cells if cell_digest(c, Overrides()) in digest)
    mine = digest[cell_digest(cell, Overrides())]
    alone, shared = invented(cell) | {"accuracy": 1.0}, invented(cell) | {"accuracy": 2.0}
    shared["condensation"] = [{**shared["condensation"][0], "device_share": 0.25}]
    for name, record in (("another", alone), (other.name, shared)):  # in the order of their names
        Journal(tmp_path / f"{name}.jsonl", name, Overrides()).add(cell, record)
    assert Records(tmp_path, plan, Overrides()).of(mine)["accuracy"] == 1.0
    Journal(tmp_path / "methods.jsonl", "methods", Overrides()).add(mine, shared | {"accuracy": 3.0})
    assert Records(tmp_path, plan, Overrides()).of(mine)["accuracy"] == 3.0  # a table's own records count most


def test_latex_is_balanced_and_escaped(everything):
    for name in PLANS:
        text = (everything / f"{name}.tex").read_text()
        assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == len(PLANS[name].tables)
        body = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
        assert body.isascii() and "L_M3D" not in body and text.startswith(r"% needs \usepackage{booktabs}")
        for table in PLANS[name].tables:
            assert _escape(table.note) in body
        widths = {line.replace(r"\&", "").count("&") for line in body.splitlines() if line.rstrip().endswith(r"\\")}
        assert len(widths) <= len(PLANS[name].tables), name


def test_what_is_not_run_shows_the_published_value_alone(tmp_path):
    plan = PLANS["compat"]
    records = Records(tmp_path, plan, Overrides())
    records.journal.add(plan.cells[0], invented(plan.cells[0]))
    render(records)
    text = (tmp_path / "compat.md").read_text()
    assert "| –, 54.7 |" in text and "1 of 16 cells are finished" in text


def test_quick_looks_are_marked_and_kept_apart(tmp_path):
    plan, quick = PLANS["ipm"], Overrides(repeats=3)
    render(filled(plan, tmp_path, quick))
    assert not (tmp_path / "ipm.md").exists()
    text = (tmp_path / "with-repeats3" / "ipm.md").read_text()
    assert "Not the paper's settings: repeats 3" in text
    typeset = (tmp_path / "with-repeats3" / "ipm.tex").read_text().splitlines()
    assert any("Not the paper's settings: repeats 3" in line for line in typeset if not line.startswith("%"))
    with pytest.raises(M3DError, match="holds no record of ipm"):
        render(Records(tmp_path, plan, Overrides()))
    # Even in the same file a quick record is never taken for a full one.
    (tmp_path / "ipm.jsonl").write_bytes((tmp_path / "with-repeats3" / "ipm.jsonl").read_bytes())
    assert all(Records(tmp_path, plan, Overrides()).of(cell) is None for cell in plan.cells)


def test_figures_with_some_cells_missing(tmp_path):
    for name, keep in (("steps", 9), ("ipm", 2), ("kernel", 4), ("images", 3), ("motivation", 2)):
        plan = PLANS[name]
        records = Records(tmp_path, plan, Overrides())
        for cell in plan.cells[:keep]:
            records.journal.add(cell, invented(cell))
        assert all(file.stat().st_size > 100 for file in render(records))


def test_steps_span_all_that_is_planned(tmp_path):
    plan = PLANS["steps"]
    first = replace(plan, cells=plan.cells[:1])  # only the start is made
    (figure,) = figures.steps(filled(first, tmp_path)).values()
    low, high = figure.axes[0].get_xlim()
    assert low < 0 and high > 10_000


def test_pictures_are_whole():
    """The sheet in a record holds the images themselves."""
    cell = next(c for c in PLANS["images"].cells if c.row == "cifar10")
    made = invented_set(cell)
    sheet = picture(made)
    import base64

    pixels = Image.open(io.BytesIO(base64.b64decode(str(sheet["png"]))))
    assert pixels.size == (10 * 32, 2 * 32) and (sheet["rows"], sheet["columns"], len(sheet["names"])) == (2, 10, 10)
    image = made.images[10 * 3 + 1]  # the second of the fourth class
    corner = torch.tensor(list(pixels.crop((96, 32, 128, 64)).tobytes())).view(32, 32, 3).permute(2, 0, 1)
    assert (corner - image * 255).abs().max() <= 0.51
    single = next(c for c in PLANS["images"].cells if c.row == "cifar100")
    sheet = picture(invented_set(single))
    assert (sheet["rows"], sheet["columns"], sheet["names"]) == (2, 10, [])
    large = next(c for c in PLANS["images"].cells if c.row == "imagenet10")
    with Image.open(io.BytesIO(base64.b64decode(str(picture(invented_set(large))["png"])))) as image:
        assert image.size == (10 * 120, 2 * 120)
    named = replace(invented_set(large), manifest={**made.manifest, "class_names": list(subsets()["imagenet10"])})
    assert picture(named)["names"][:2] == ["bonnet", "green snake"]


def test_a_plan_must_not_have_the_same_cell_twice():
    plan = PLANS["ipm"]
    with pytest.raises(M3DError, match="the same key"):
        replace(plan, cells=(plan.cells[0], plan.cells[0]))


def test_a_number_that_stands_in_several_tables_is_measured_once(tmp_path):
    """M3D's cells of ``lowres`` are those of ``beyond``; making them again drops them everywhere."""
    first, second = (Records(tmp_path, PLANS["lowres"], Overrides()) for _ in range(2))
    shared = [cell for cell in PLANS["beyond"].cells if cell.column == "M3D"]
    mine = [cell for cell in PLANS["lowres"].cells if cell.column == "M3D"]
    assert len(shared) == len(mine) == 19
    for cell in mine:
        first.journal.add(cell, invented(cell))
    other = Records(tmp_path, PLANS["beyond"], Overrides())
    assert all(other.of(cell) is not None for cell in shared)
    assert other.of(PLANS["beyond"].cells[0]) is None
    place = other.place("cifar10/10", "M3D", "accuracy")
    assert place is not None and place.seeds == 3 and place == first.place("cifar10/10", "M3D", "accuracy")
    other.journal.forget(shared[:1])
    assert other.of(shared[0]) is None and second.of(mine[0]) is None
    left = Records(tmp_path, PLANS["lowres"], Overrides())
    assert sum(left.of(cell) is None for cell in mine) == 1 and len(left.file.read_text().splitlines()) == 18


def test_cells_that_are_compared_closely_are_measured_together(tmp_path):
    """Another table's number is of a set that may have been made again, on another machine."""
    cell = next(c for c in PLANS["lowres"].cells if c.key == "cifar10/10/m3d/seed0")
    Records(tmp_path, PLANS["lowres"], Overrides()).journal.add(cell, invented(cell))
    for name, key in (("ipm", "cifar10/10/ipm5/seed0"), ("cross-arch", "cifar10/10/m3d/convnet3/seed0")):
        plan = PLANS[name]
        mine = next(c for c in plan.cells if c.key == key)
        assert cell_digest(mine, Overrides()) == cell_digest(cell, Overrides())
        assert plan.alone and Records(tmp_path, plan, Overrides()).of(mine) is None
    assert PLANS["steps"].alone and not PLANS["beyond"].alone


def test_records_of_a_set_that_is_made_again_are_named(tmp_path):
    records = Records(tmp_path, PLANS["lowres"], Overrides())
    cells = PLANS["lowres"].cells[:3]
    for cell, fingerprint in zip(cells, ("a", "a", "b"), strict=True):
        records.journal.add(cell, {**invented(cell), "set": fingerprint})
    (left,) = records.journal.forget(cells[:1])
    assert left["cell"] == cells[1].key and records.journal.forget(cells[2:]) == []


def test_all_renders_what_other_tables_have_measured(tmp_path):
    """``beyond`` has no record of its own here, but M3D's cells of ``lowres``."""
    cell = next(c for c in PLANS["lowres"].cells if c.key == "mnist/1/m3d/seed0")
    Records(tmp_path, PLANS["lowres"], Overrides()).journal.add(cell, invented(cell))
    Request("all", (), tmp_path, Overrides(), as_json=True).render()
    assert (tmp_path / "beyond.md").exists() and not (tmp_path / "compat.md").exists()


def test_a_few_finished_cells_say_their_numbers(tmp_path):
    """Ours, the published one, and how it was made; a row that stands for several is found too."""
    plan = PLANS["lowres"]
    cell = next(c for c in plan.cells if c.key == "cifar10/10/m3d/seed0")
    record = {**invented(cell), "accuracy": 63.46, "when": "2026-11-16T17:00:00+00:00"}
    assert headline(plan, cell, record) == (
        "63.46 ± 0.40 % (last epoch, n=10); published 63.5 ± 0.2 (Table 2), difference -0.04"
    )
    assert origin(record) == " [condensed in 40 s, a test, commit 0123456789, 2026-11-16]"
    whole = next(c for c in plan.cells if c.key == "cifar10/whole/seed0")
    assert "published 84.8 ± 0.1 (Table 2)" in headline(plan, whole, {**record, "condensation": []})
    assert [_signed(x) for x in (-0.04, 0.04, -0.26, 1.0)] == ["±0.0", "±0.0", "−0.3", "+1.0"]


def test_memory_and_time_have_columns_of_their_own(everything):
    text = (everything / "beyond.md").read_text()
    assert "| M3D+, s |" in text.replace("IPC | M3D+, s", "| M3D+, s") and "## Time" in text
    row = next(line for line in text.partition("## Time")[2].splitlines() if line.startswith("| CIFAR-10 | 10 |"))
    assert "40.0" in row and "63.5" not in row  # invented seconds, no published accuracy beside them


def test_seconds_to_start_are_told_where_they_are_known(tmp_path):
    plan = PLANS["ipm"]
    records = Records(tmp_path, plan, Overrides())
    for cell in plan.cells:
        records.journal.add(cell, invented(cell))
    assert records.place("5", "M3D", "starting") is None  # older records do not say
    assert len(figures.ipm(records)[""].axes[0].get_legend().get_texts()) == 2
    told = Records(tmp_path / "told", plan, Overrides())
    for cell in plan.cells:
        record = invented(cell)
        record["condensation"][0]["starting"] = 6.5
        told.journal.add(cell, record)
    assert told.place("5", "M3D", "starting") == Place(6.5)
    figure = figures.ipm(told)[""]
    heights = [bar.get_height() for bar in figure.axes[1].patches]
    assert heights[7:] == [6.5] * 7 and min(heights[:7]) > 6.5
    render(told)
    assert "| 40.0 | 6.5 |" in (tmp_path / "told" / "ipm.md").read_text()


def test_times_on_a_shared_device_are_said_to_be_at_most(tmp_path):
    plan = PLANS["methods"]
    cell = next(c for c in plan.cells if c.key == "cifar10/10/m3d@paper/seed0")
    record = invented(cell)
    assert not read(record, "seconds").at_most
    record["condensation"][0]["device_share"] = 0.25
    place = read(record, "seconds")
    assert place == Place(40.0, at_most=True) and _number(place, 1) == "≤ 40.0"
    records = Records(tmp_path, plan, Overrides())
    records.journal.add(cell, record)
    (axes,) = figures.methods(records)["-ipc10"].axes
    assert axes.lines[0].get_markerfacecolor() == "white" and "shared GPU" in axes.get_xlabel()
