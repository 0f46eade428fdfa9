"""Every method side by side on CIFAR-10: under the rules its own paper was evaluated by, and under one protocol."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from m3d.grid.cells import Cell, Source, Value
from m3d.reproduce.cells import FULL_COLOURS, Column, Plan, Row, Table

Options = tuple[tuple[str, Value], ...]


@dataclass(frozen=True)
class Rival:
    """A method, the protocol its own paper reports it under, and its settings where they are not its defaults."""

    label: str
    method: str
    protocol: str
    options: dict[int, Options] = field(default_factory=dict)  # by IPC: where a run is cut short
    net: str = "convnet3"
    zca: bool = False
    always: Options = ()  # settings at every size
    variant: str = ""  # what its cells' names add to the method's, where it stands here twice
    ipcs: tuple[int, ...] = (1, 10)

    @property
    def name(self) -> str:
        return f"{self.method}-{self.variant}" if self.variant else self.method


_QUARTERS = 4  # parts of a run that is cut short after which its set is kept
_CUT_MTT: Options = (("bounded", False), ("experts", 20), ("steps", 2_000))
# In the order in which they are run: cheap ones first.
_RIVALS = (
    Rival("Random", "random", "dc"),
    Rival("M3D", "m3d", "paper"),
    Rival("DM", "dm", "dsa"),
    Rival("DataDAM", "datadam", "datadam", net="convnet3:norm=batch", zca=True, variant="zca"),
    Rival("DataDAM, not whitened", "datadam", "datadam", net="convnet3:norm=batch", always=(("bounded", True),)),
    Rival("Herding", "herding", "dc"),
    Rival("K-Center", "k-center", "dc"),
    Rival("IDM", "idm", "idm", {1: (("steps", 2_000),), 10: (("steps", 5_000),)}),
    Rival("IDM, all steps", "idm", "idm", variant="whole", ipcs=(10,)),
    Rival("DSA", "dsa", "dsa"),
    Rival("DC", "dc", "dc"),
    Rival("CAFE", "cafe", "cafe", {1: (("steps", 5_000),), 10: (("steps", 2_500),)}),
    Rival("CAFE, all steps", "cafe", "cafe", variant="whole", ipcs=(1,)),
    Rival("CAFE+DSA", "cafe-dsa", "dsa", {1: (("steps", 2_500),), 10: (("steps", 2_500),)}),
    Rival("IDC", "idc", "paper", {1: (("steps", 5_000),), 10: (("steps", 5_000),)}),
    Rival("M3D+", "m3d+", "paper"),
    Rival("M3D+, full colours", "m3d+", "paper", always=FULL_COLOURS, variant="full"),
    Rival("DANCE", "dance", "paper"),
    Rival("DSDM", "dsdm", "paper"),
    Rival("NCFM", "ncfm", "paper"),
    Rival("NCFM, plain steps", "ncfm", "paper", always=(("turns", 1),), variant="plain"),
    Rival("MTT", "mtt", "mtt", {1: _CUT_MTT, 10: _CUT_MTT}, zca=True),
)


def methods() -> Plan:
    each = [(rival, ipc) for rival in _RIVALS for ipc in rival.ipcs]
    own = [_cell(rival, ipc, "own", rival.protocol, rival.net) for rival, ipc in each]
    same = [_cell(rival, ipc, "paper", "paper", "convnet3") for rival, ipc in each]
    columns = tuple(Column(f"IPC {ipc}, {which}", f"{ipc}, {which}") for which in ("own", "paper") for ipc in (1, 10))
    note = (
        "CIFAR-10, 10 networks. Own: the evaluation protocol of the method's own paper, beside its published accuracy. "
        "Paper: one protocol for all, ConvNet-3 with instance norm; it is IDC's and M3D's own, and M3D+, DANCE, "
        "DSDM and NCFM are measured by it in both (their authors train for 1,500 epochs or more). Cut short: "
        + "; ".join(f"{r.label} at IPC {ipc}: {_told(o)}" for r in _RIVALS for ipc, o in r.options.items())
        + " (CAFE's rate then falls after the same shares of fewer steps). MTT and DataDAM, but for the row that says "
        "otherwise, see ZCA-whitened images in both columns. Plain steps: AdamW moves all classes once; the authors' "
        "classes share it by turns."
    )
    rows = tuple(Row(rival.label, (rival.label,)) for rival in _RIVALS)
    table = Table("Every method under its own protocol and under one", ("method",), rows, columns, note)
    way, over_steps = _on_the_way()
    cells = (*own, *same, *way)
    return Plan("methods", (), "every method on CIFAR-10, IPC 1, 10", cells, (table, over_steps), "methods")


def _on_the_way() -> tuple[list[Cell], Table]:
    """Where a run is cut short, its accuracy after each quarter of its steps: whether more of them would help."""
    cells, rows = [], []
    for rival, ipc in [(each, ipc) for each in _RIVALS for ipc in each.options]:
        end = _cell(rival, ipc, "own", rival.protocol, rival.net)
        steps = end.sources[0].steps
        row = f"{rival.label}/{ipc}"
        rows.append(Row(row, (rival.label, str(ipc), f"{steps:,}", f"{replace(end.sources[0], options=()).steps:,}")))
        for quarter in range(1, _QUARTERS):
            at = quarter * end.sources[0].keep_every
            key = f"cifar10/{ipc}/{rival.name}@{at}/seed0"
            cells.append(replace(end, key=key, row=row, column=str(quarter), at=at, repeats=3))
        cells.append(replace(end, key=f"cifar10/{ipc}/{rival.name}@{steps}/seed0", row=row, column=str(_QUARTERS)))
    columns = tuple(Column(label, str(quarter)) for quarter, label in enumerate(("¼", "½", "¾", "all"), 1))
    note = "Each under its own protocol; 3 networks on the way, 10 at the end."
    heads = ("method", "IPC", "steps", "published")
    return cells, Table("Accuracy over the steps of the runs that were cut short", heads, tuple(rows), columns, note)


def _cell(rival: Rival, ipc: int, which: str, protocol: str, net: str) -> Cell:
    cut = rival.options.get(ipc, ())
    source = Source("cifar10", ipc, rival.method, tuple(sorted((*rival.always, *cut))), rival.net, zca=rival.zca)
    if cut:
        source = replace(source, keep_every=source.steps // _QUARTERS)
    key = f"cifar10/{ipc}/{rival.name}@{which}/seed0"
    return Cell(key, rival.label, f"{ipc}, {which}", (source,), net=net, protocol=protocol)


def _told(options: Options) -> str:
    cut = [(name, value) for name, value in options if not isinstance(value, bool)]
    return ", ".join(f"{value:,} {name}" if isinstance(value, int) else f"{name} {value}" for name, value in cut)
