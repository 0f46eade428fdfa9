"""The paper's tables as plans. Settings a cell does not name are its method's defaults."""

from __future__ import annotations

from typing import NamedTuple

from m3d.grid.cells import WHOLE, Cell, Source, Value
from m3d.reproduce.cells import FACTS, LOW, NO_FACTOR, SEVERAL_SEEDS, Column, Plan, Row, Table, imagenet_epochs, one_set
from m3d.reproduce.cost import factor as own_factor


class Baseline(NamedTuple):
    """A method of the comparison tables, and the protocol its own paper reports it under."""

    label: str
    method: str
    protocol: str

    def protocol_on(self, data: str) -> str:
        return "dc-mnist" if (self.protocol, data) == ("dc", "mnist") else self.protocol


# In the order in which they are run: the paper's method, then the cheap ones.
_BASELINES = (
    Baseline("Random", "random", "dc"),
    Baseline("Herding", "herding", "dc"),
    Baseline("K-Center", "k-center", "dc"),
    Baseline("DM", "dm", "dsa"),
    Baseline("DC", "dc", "dc"),
    Baseline("DSA", "dsa", "dsa"),
    Baseline("CAFE", "cafe", "cafe"),
    Baseline("CAFE+DSA", "cafe-dsa", "dsa"),
    Baseline("IDM", "idm", "idm"),
)
_AS_ON_CIFAR: tuple[tuple[str, Value], ...] = (
    ("augment", "color+crop+cutout"),
    ("factor", 2),
    ("upsample", "bilinear"),
)
_COMPAT_NOTE = (
    "With L_M3D DM's learning rate is 25 · IPC and IDM's weight of it 200, both ours. IDM is cut to 5,000 of its "
    "20,000 steps, with both losses; so cut it is 0.8 below its published accuracy at IPC 10 (methods)."
)
_COMPAT_UNDER = (
    ("dsa", "", "L_M3D in other methods, CIFAR-10, dsa protocol", f"DM's and IDM's own protocol. {_COMPAT_NOTE}"),
    (
        "paper",
        "@paper",
        "The same sets under the paper protocol",
        "The paper does not say under which protocol L_M3D was measured here; its numbers of DM and IDM are theirs, "
        "under their own.",
    ),
)
_CUT_IDM: tuple[tuple[str, Value], ...] = (("steps", 5_000),)
_AS_PRINTED = ("Random", "Herding", "K-Center", "DC", "DSA", "CAFE", "CAFE+DSA", "DM", "IDM")


def moments() -> Plan:
    both = ("accuracy", "moments")
    rows = (
        ("DM", "dm", "dm", ()),
        ("+2nd", "dm-2nd", "dm", (("moments", 2),)),
        ("+2nd & 3rd", "dm-3rd", "dm", (("moments", 3),)),
        ("M3D", "m3d", "m3d", ()),
        ("M3D, no factor", "m3d-no-factor", "m3d", NO_FACTOR),
    )
    cells = tuple(
        one_set("cifar10", 10, label, method, row=row, column="all", options=options, measures=both)
        for row, label, method, options in rows
    )
    columns = (
        *(Column(order, "all", f"distance {k}") for k, order in enumerate(("1st", "2nd", "3rd"), 1)),
        Column("accuracy", "all"),
        *(Column(f"{order}, raw", "all", f"raw distance {k}") for k, order in enumerate(("1st", "2nd", "3rd"), 1)),
    )
    note = (
        "Distance of order q: ‖m_q(real) − m_q(synthetic)‖₂ / ‖m_q(real)‖₂, the mean over classes and 10 random "
        "ConvNet-3 encoders from fixed seeds; m_q is the central moment of every feature of the representation (the "
        "mean for q = 1), over all training images of a class and over all decoded synthetic ones, without "
        "augmentation. Raw: the same without the division. The paper does not define its distance, so only the order "
        "of its rows can be compared, not the numbers. The added moments weigh as much as the mean. Accuracies: paper "
        "protocol for every row; the published ones "
        "of DM are under DM's own."
    )
    table = Table(
        "Distance of moments, CIFAR-10, IPC 10", ("",), tuple(Row(r[0], (r[0],)) for r in rows), columns, note
    )
    return Plan("moments", ("table1",), "distance of moments and accuracy, CIFAR-10", cells, (table,))


def lowres() -> Plan:
    places = [(data, ipc, f"{data}/{ipc}") for data in LOW for ipc in (1, 10, 50)]
    cells = [
        one_set(data, ipc, "m3d", "m3d", row=row, column="M3D", seed=seed)
        for data, ipc, row in places
        for seed in ((0, 1, 2) if row in SEVERAL_SEEDS else (0,))
    ]
    cells += [
        one_set(data, ipc, "m3d-no-factor", "m3d", row=row, column="M3D, no factor", options=NO_FACTOR)
        for data, ipc, row in places
        if own_factor(Source(data, ipc, "m3d")) > 1  # elsewhere M3D itself has none
    ]
    cells += [
        one_set(data, ipc, "m3d-cifar", "m3d", row=row, column="M3D, as on CIFAR-10", options=_AS_ON_CIFAR)
        for data, ipc, row in places
        if data == "fashion-mnist"
    ]
    cells += [
        one_set(d, ipc, b.method, b.method, row=row, column=b.label) for b in _BASELINES for d, ipc, row in places
    ]
    cells += [
        Cell(f"{d}/{WHOLE}/seed0", f"{d}/*", "Whole", (Source(d, 0, WHOLE),), protocol="whole", repeats=5) for d in LOW
    ]
    cells += [
        one_set(d, ipc, f"{b.method}@{own}", b.method, row=row, column=f"{b.label}, own", protocol=own)
        for b in _BASELINES
        for d, ipc, row in places
        for own in (b.protocol_on(d),)
    ]
    rows = tuple(Row(row, (FACTS[d].title, str(ipc), f"{_ratio(d, ipc):.2g}")) for d, ipc, row in places)
    heads = ("dataset", "IPC", "ratio, %")
    same = tuple(Column(name, name) for name in (*_AS_PRINTED, "M3D", "M3D, no factor", "M3D, as on CIFAR-10", "Whole"))
    own = tuple(Column(name, f"{name}, own") for name in _AS_PRINTED)
    tables = (
        Table(
            "Low-resolution datasets, every method under the paper protocol",
            heads,
            rows,
            same,
            "The published baselines are under their own protocols. As on CIFAR-10: with factor 2, bilinear cells and "
            "cutout; M3D's own settings for Fashion-MNIST: no factor from IPC 10 on, bicubic cells below, no cutout.",
        ),
        Table("Low-resolution datasets, every baseline under its own protocol", heads, rows, own),
    )
    return Plan("lowres", ("table2",), "5 low-resolution datasets × IPC 1, 10, 50", tuple(cells), tables)


def _ratio(data: str, ipc: int) -> float:
    """Condensed images in percent of the training images."""
    return 100 * ipc * FACTS[data].classes / FACTS[data].train


def imagenet() -> Plan:
    net = "resnetap10"
    thousand: tuple[tuple[str, Value], ...] = (("steps", 1000),)
    methods: tuple[tuple[str, str, tuple[tuple[str, Value], ...], int], ...] = (
        ("M3D", "m3d", thousand, 3),
        ("DM", "dm", thousand, 1),
        ("Random", "random", (), 1),
        ("Herding", "herding", (("network", net),), 1),
        ("DSA", "dsa", (), 1),
        ("IDC", "idc", (("factor", 3), ("steps", 50_000)), 3),
    )
    cells = []
    for label, method, options, factor in methods:
        for data in ("imagenet10", "imagenet100"):
            parts = (data,) if data == "imagenet10" else tuple(f"{data}-{k}" for k in range(1, 6))
            for ipc in (10, 20):
                column = f"{data}/{ipc}"
                cells.append(
                    Cell(
                        f"{column}/{method}/seed0",
                        label,
                        column,
                        tuple(Source(part, ipc, method, options, net) for part in parts),
                        data=data,
                        net=net,
                        protocol="imagenet" if data == "imagenet10" else "imagenet100",
                        epochs=imagenet_epochs(ipc * factor**2, FACTS[data].classes),
                        repeats=3,
                    )
                )
    columns = tuple(
        Column(f"{FACTS[data].title}, IPC {ipc}: {measure}", f"{data}/{ipc}", measure)
        for data in ("imagenet10", "imagenet100")
        for ipc in (10, 20)
        for measure in ("accuracy", "hours")
    )
    rows = tuple(Row(name, (name,)) for name in ("Random", "Herding", "DSA", "IDC", "DM", "M3D"))
    note = (
        "224 px, ResNetAP-10, 3 networks. ImageNet-100 is condensed in five sub-tasks of 20 classes whose sets are put "
        "together; hours are those of all five. M3D's learning rate is IPC (the paper: 0.1), DM takes 1,000 steps too. "
        "Ours: the whole condensation on the device named in the records; "
        "published: until the best set was found, on one RTX A6000."
    )
    table = Table("ImageNet subsets", ("method",), rows, columns, note)
    return Plan("imagenet", ("table3",), "ImageNet-10 and -100 at 224 px, IPC 10, 20", tuple(cells), (table,))


def cross_arch() -> Plan:
    nets = (
        ("ConvNet-3", "convnet3", "convnet3"),
        ("ResNet-10", "resnet10", "resnet10:width=32,norm=batch"),
        ("DenseNet-121", "densenet121", "densenet121:growth=12,norm=batch"),
    )
    cells = tuple(
        one_set(
            "cifar10",
            ipc,
            f"{method}/{short}",
            method,
            row=f"{ipc}/{title}",
            column=label,
            net=net,
            epochs=400 if (short, ipc) == ("densenet121", 50) and method in ("m3d", "m3d+") else None,
        )
        for label, method in (("M3D", "m3d"), ("M3D+", "m3d+"), ("DM", "dm"), ("DSA", "dsa"))
        for ipc in (10, 50)
        for title, short, net in nets
    )
    rows = tuple(Row(f"{ipc}/{title}", (str(ipc), title)) for ipc in (10, 50) for title, _, _ in nets)
    columns = tuple(Column(name, name) for name in ("DSA", "DM", "M3D", "M3D+"))
    note = (
        "CIFAR-10, condensed with ConvNet-3, paper protocol, where the published numbers of DSA and DM are under their "
        "own; ResNet-10 of width 32 and DenseNet-121 of growth 12, with batch norm. DenseNet-121 is trained for 400 "
        "epochs on the 2,000 decoded images of M3D and the 4,000 of M3D+ at IPC 50."
    )
    table = Table("Other architectures", ("IPC", "network"), rows, columns, note)
    return Plan("cross-arch", ("table4",), "CIFAR-10 sets on other architectures", cells, (table,), alone=True)


def compat() -> Plan:
    series = (
        ("DM", "dm", "dm", ()),
        ("DM + L_M3D", "dm-m3d", "dm", (("objective", "m3d"),)),
        ("IDM", "idm", "idm", _CUT_IDM),
        ("IDM + L_M3D", "idm-m3d", "idm", (("objective", "m3d"), *_CUT_IDM)),
    )
    cells = tuple(
        one_set(
            "cifar10",
            ipc,
            f"{label}{suffix}",
            method,
            row=str(ipc),
            column=f"{column}{suffix}",
            options=options,
            protocol=protocol,
        )
        for protocol, suffix, _, _ in _COMPAT_UNDER
        for column, label, method, options in series
        for ipc in (10, 50)
    )
    rows = tuple(Row(str(ipc), (str(ipc),)) for ipc in (10, 50))
    tables = tuple(
        Table(title, ("IPC",), rows, tuple(Column(name, f"{name}{suffix}") for name, *_ in series), note)
        for _, suffix, title, note in _COMPAT_UNDER
    )
    return Plan("compat", ("table5",), "L_M3D in place of the loss of DM and of IDM", cells, tables)
