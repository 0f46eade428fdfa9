"""The published values: every entry of every table is there."""

import pytest

from m3d.reproduce.cells import FACTS
from m3d.reproduce.plans import PLANS
from m3d.reproduce.published import published, sections

# How many entries each table has, dashes included: rows × columns.
SIZES = {"moments": (4, 4), "lowres": (15, 12), "imagenet": (6, 8), "cross-arch": (6, 3), "compat": (2, 4)}


def test_every_table_is_whole():
    assert set(sections()) == {*SIZES, "methods", "beyond"}
    for name, (rows, columns) in SIZES.items():
        section = sections()[name]
        assert section["source"] == f"Table {list(SIZES).index(name) + 1}" and section["note"]
        assert len(section["values"]) == rows and all(len(row) == columns for row in section["values"].values()), name


def test_every_entry_has_its_place_in_a_plan():
    placed = 0
    for name, section in sections().items():
        tables = PLANS[name].tables
        for row, entries in section["values"].items():
            for column in entries:
                if column == "ratio":
                    continue
                assert any(row in [r.key for r in t.rows] and column in [c.label for c in t.columns] for t in tables)
                placed += 1
    assert placed == 16 + 165 + 48 + 18 + 8 + 34 + 43


def test_every_method_has_its_own_papers_numbers():
    """As the tables of the field quote them; where the paper prints one too, it is the same."""
    values = sections()["methods"]["values"]
    assert len(values) == 18 and {
        *values,
        "M3D+",
        "M3D+, full colours",
        "DataDAM, not whitened",
        "NCFM, plain steps",
    } == {r.key for r in PLANS["methods"].tables[0].rows}
    again = 0
    for name, entries in values.items():
        for ipc in (1, 10):
            printed = published("lowres", f"cifar10/{ipc}", name)
            if printed is not None:
                assert entries[f"IPC {ipc}, own"] == printed.mean, (name, ipc)
                again += 1
    assert again == 20


def test_dashes():
    rows = sections()["lowres"]["values"]
    missing = [f"{row}/{name}" for row, entries in rows.items() for name, value in entries.items() if value == "-"]
    assert len(missing) == 10 and "cifar100/50/DC" in missing and published("lowres", "cifar100/50", "DC") is None


@pytest.mark.parametrize(
    ("place", "mean", "sd"),
    [
        (("lowres", "cifar10/10", "M3D"), 63.5, 0.2),
        (("lowres", "mnist/1", "Random"), 64.9, 3.5),
        (("lowres", "svhn/50", "CAFE+DSA"), 82.3, 0.4),
        (("lowres", "cifar100/1", "Whole"), 56.2, 0.3),
        (("moments", "M3D", "3rd"), 1.64, None),
        (("imagenet", "IDC", "ImageNet-100, IPC 20: hours"), 185.0, None),
        (("cross-arch", "50/DenseNet-121", "M3D"), 66.1, None),
        (("compat", "10", "IDM + L_M3D"), 60.5, None),
    ],
)
def test_some_values_as_printed(place, mean, sd):
    value = published(*place)
    assert value is not None and (value.mean, value.sd) == (mean, sd)


def test_the_goal_row():
    """The paper's M3D row, all fifteen numbers."""
    values = [published("lowres", f"{data}/{ipc}", "M3D") for data in FACTS if data in LOW for ipc in (1, 10, 50)]
    assert [v.mean for v in values if v] == [
        94.4, 97.6, 98.2, 80.7, 85.0, 86.2, 62.8, 83.3, 89.0, 45.3, 63.5, 69.9, 26.2, 42.4, 50.9,
    ]  # fmt: skip


LOW = ("mnist", "fashion-mnist", "svhn", "cifar10", "cifar100")


def test_reproduced_marks_and_ratios():
    assert published("lowres", "svhn/10", "DM").again and not published("lowres", "cifar10/10", "DM").again
    assert published("lowres", "nowhere", "DM") is None and published("steps", "0", "DM") is None
    for row in PLANS["lowres"].tables[0].rows:
        printed = sections()["lowres"]["values"][row.key]["ratio"]
        assert float(row.labels[2]) == pytest.approx(printed, rel=0.06), row.key


def test_what_stands_in_two_tables_is_the_same():
    """M3D and its rivals beyond the paper against the tables of the paper and of the methods."""
    again = 0
    for row, entries in sections()["beyond"]["values"].items():
        for name, value in entries.items():
            printed = published("lowres", row, name)
            data, _, ipc = row.partition("/")
            own = published("methods", name, f"IPC {ipc}, own") if data == "cifar10" else None
            for other in (printed, own):
                if other is not None:
                    assert other.mean == value, (row, name)
                    again += 1
    assert again == 15 + 8
