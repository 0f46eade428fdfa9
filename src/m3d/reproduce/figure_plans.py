"""The paper's figures as plans. Settings a cell does not name are its method's defaults."""

from __future__ import annotations

from m3d.grid.cells import Cell, Source, Value
from m3d.reproduce.cells import FACTS, LOW, NO_FACTOR, Column, Plan, Row, Table, one_set
from m3d.reproduce.cost import factor as own_factor


def motivation() -> Plan:
    pairs = (
        ("mean", "other mean"),
        ("variance", "same mean, other variance"),
        ("skewness", "same mean and variance, other skewness"),
        ("aligned", "same distribution"),
    )
    cells = tuple(Cell(f"toy/{key}", key, "all", measures=(), repeats=1, pair=key) for key, _ in pairs)
    columns = tuple(Column(name, "all", f"seen by {name}") for name in ("linear", "polynomial", "gaussian"))
    note = (
        "MMD² of two samples of 1,000 points each, in units of what equal distributions give in 95 of 100 "
        "random divisions of the same points: above 1 the kernel tells them apart. Nothing is trained."
    )
    table = Table("What each kernel sees", ("",), tuple(Row(k, (t,)) for k, t in pairs), columns, note)
    return Plan("motivation", ("fig1",), "equal means are not equal distributions", cells, (table,), "motivation")


def steps() -> Plan:
    points, last = (0, 500, 1000, 2000, 4000, 6000, 8000, 10_000), 10_000
    as_they_are: tuple[tuple[str, Value], ...] = (("average_from", 1.0),)
    series: tuple[tuple[str, str, str, tuple[tuple[str, Value], ...]], ...] = (
        ("M3D", "m3d", "m3d", as_they_are),
        ("M3D, no factor", "m3d-no-factor", "m3d", (*as_they_are, *NO_FACTOR)),
        ("DM", "dm", "dm", (("steps", last),)),
    )
    cells = []
    for column, label, method, options in series:
        # where it starts: the same real images, none moved
        start = Source("cifar10", 10, "random", (("factor", 2 if label == "m3d" else 1),))
        run = Source("cifar10", 10, method, options, keep_every=500)
        for step in points:
            at = step if 0 < step < last else None
            key = f"cifar10/10/{label}/{step}/seed0"
            cells.append(Cell(key, str(step), column, (run if step else start,), at=at))
    table = Table(
        "Accuracy over condensing steps, CIFAR-10, IPC 10",
        ("steps",),
        tuple(Row(str(p), (f"{p:,}",)) for p in points),
        tuple(Column(s[0], s[0]) for s in series),
        "Every column is one run of seed 0, whose set was kept at these steps: the images as they are then. (M3D's in "
        "other tables are the mean over the last 2,000 steps.) The paper prints no numbers here.",
    )
    about = "accuracy over condensing steps, CIFAR-10"
    return Plan("steps", ("fig3",), about, tuple(cells), (table,), "steps", alone=True)


def ipm() -> Plan:
    values = (1, 2, 5, 10, 20, 50, 100)
    cells = tuple(
        one_set("cifar10", 10, f"ipm{v}", "m3d", row=str(v), column="M3D", options=() if v == 5 else (("ipm", v),))
        for v in values
    )
    times = (Column("condensing, s", "M3D", "seconds"), Column("of which to start, s", "M3D", "starting"))
    columns = (Column("accuracy", "M3D"), *times)
    rows = tuple(Row(str(v), (str(v),)) for v in values)
    note = (
        "One condensation seed; ± is over networks, and seeds differ by about half a point besides. Seconds: the whole "
        "condensation on the device named in the records, and its part before the end of the first step, where the "
        "records say it: the run that comes first on a machine also builds the kernels. The paper prints no numbers "
        "here."
    )
    table = Table("Iterations per model (IPM), CIFAR-10, IPC 10", ("IPM",), rows, columns, note)
    about = "accuracy and time against iterations per model"
    return Plan("ipm", ("fig6a",), about, cells, (table,), "ipm", alone=True)


def kernel() -> Plan:
    series: tuple[tuple[str, tuple[tuple[str, Value], ...]], ...] = (
        ("gaussian", ()),
        ("polynomial", (("kernel", "polynomial"),)),
        ("linear", (("kernel", "linear"),)),
    )
    cells = tuple(
        one_set(data, 10, name, "m3d", row=data, column=name, options=options)
        for data in ("cifar10", "svhn", "fashion-mnist", "cifar100", "mnist")
        for name, options in series
    )
    rows = tuple(Row(d, (FACTS[d].title,)) for d in LOW)
    note = (
        "Each kernel at its own learning rate, found on held-out data of CIFAR-10. One condensation seed (of the "
        "Gaussian on CIFAR-10 the first of three); ± is over networks, and seeds differ by about half a point besides. "
        "The paper prints no numbers here."
    )
    table = Table("Kernels, IPC 10", ("dataset",), rows, tuple(Column(n, n) for n, _ in series), note)
    return Plan("kernel", ("fig6b",), "accuracy of the three kernels", cells, (table,), "kernel")


def images() -> Plan:
    places = (("cifar10", 10), ("svhn", 10), ("fashion-mnist", 10), ("mnist", 10), ("cifar100", 1), ("imagenet10", 10))
    cells = []
    for data, ipc in places:
        large = data == "imagenet10"
        for factor in (1, 3 if large else 2):
            for label, method in (("initial", "random"), ("DM", "dm"), ("M3D", "m3d")):
                plain: dict[str, Value] = {"factor": factor}
                if factor == own_factor(Source(data, ipc, method)):
                    plain = {}  # the set is shared with the other tables
                if large and method != "random":
                    plain |= {"steps": 1000}
                options = tuple(sorted(plain.items()))
                source = Source(data, ipc, method, options, "resnetap10" if large else "convnet3")
                key = f"{data}/{ipc}/{label.lower()}-factor{factor}/seed0"
                cells.append(Cell(key, data, f"{label}, {_factor(factor)}", (source,), ("picture",), repeats=1))
    rows = tuple(Row(data, (FACTS[data].title, str(ipc))) for data, ipc in places)
    columns = tuple(
        Column(f"{label}, {part}", f"{label}, {part}", "fingerprint")
        for part in ("no factor", "factor")
        for label in ("initial", "DM", "M3D")
    )
    note = "The first twelve digits of each set's sha256. All sets of a dataset and factor start from the same images."
    table = Table("The sets that are shown", ("dataset", "IPC"), rows, columns, note)
    about = "images before and after: DM beside M3D, with and without factor"
    return Plan("images", (), about, tuple(cells), (table,), "images")


def _factor(factor: int) -> str:
    return "no factor" if factor == 1 else "factor"
