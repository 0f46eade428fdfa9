"""Every method side by side on CIFAR-10: under the rules its own paper was evaluated by, and under one protocol."""

from __future__ import annotations

from dataclasses import dataclass, field

from m3d.grid.cells import Cell, Source, Value
from m3d.reproduce.cells import Column, Plan, Row, Table

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


_CUT_MTT: Options = (("experts", 20), ("steps", 2_000))
# In the order in which they are run: cheap ones first.
_RIVALS = (
    Rival("Random", "random", "dc"),
    Rival("M3D", "m3d", "paper"),
    Rival("DM", "dm", "dsa"),
    Rival("DataDAM", "datadam", "datadam", net="convnet3:norm=batch"),
    Rival("Herding", "herding", "dc"),
    Rival("K-Center", "k-center", "dc"),
    Rival("IDM", "idm", "idm", {1: (("steps", 2_000),)}),
    Rival("DSA", "dsa", "dsa"),
    Rival("DC", "dc", "dc"),
    Rival("CAFE", "cafe", "cafe", {1: (("steps", 5_000),), 10: (("steps", 5_000),)}),
    Rival("CAFE+DSA", "cafe-dsa", "dsa", {1: (("steps", 5_000),), 10: (("steps", 5_000),)}),
    Rival("IDC", "idc", "paper", {1: (("steps", 20_000),), 10: (("steps", 20_000),)}),
    Rival("M3D+", "m3d+", "paper"),
    Rival("DANCE", "dance", "paper"),
    Rival("NCFM", "ncfm", "paper"),
    Rival("MTT", "mtt", "mtt", {1: _CUT_MTT, 10: _CUT_MTT}, zca=True),
)


def methods() -> Plan:
    each = [(rival, ipc) for rival in _RIVALS for ipc in (1, 10)]
    own = [_cell(rival, ipc, "own", rival.protocol, rival.net) for rival, ipc in each]
    same = [_cell(rival, ipc, "paper", "paper", "convnet3") for rival, ipc in each]
    columns = tuple(Column(f"IPC {ipc}, {which}", f"{ipc}, {which}") for which in ("own", "paper") for ipc in (1, 10))
    note = (
        "CIFAR-10, 10 networks. Own: the evaluation protocol of the method's own paper, beside its published accuracy. "
        "Paper: one protocol for all, ConvNet-3 with instance norm; it is IDC's and M3D's own, and M3D+, DANCE and "
        "NCFM are measured by it in both (their authors train for 1,500 epochs or more). Cut short: "
        + "; ".join(f"{r.label} at IPC {ipc}: {_told(o)}" for r in _RIVALS for ipc, o in r.options.items())
        + ". MTT sees ZCA-whitened images in both columns."
    )
    rows = tuple(Row(rival.label, (rival.label,)) for rival in _RIVALS)
    table = Table("Every method under its own protocol and under one", ("method",), rows, columns, note)
    return Plan("methods", (), "every method on CIFAR-10, IPC 1, 10", (*own, *same), (table,), "methods")


def _cell(rival: Rival, ipc: int, which: str, protocol: str, net: str) -> Cell:
    source = Source("cifar10", ipc, rival.method, rival.options.get(ipc, ()), rival.net, zca=rival.zca)
    key = f"cifar10/{ipc}/{rival.method}@{which}/seed0"
    return Cell(key, rival.label, f"{ipc}, {which}", (source,), net=net, protocol=protocol)


def _told(options: Options) -> str:
    return ", ".join(f"{value:,} {name}" if isinstance(value, int) else f"{name} {value}" for name, value in options)
