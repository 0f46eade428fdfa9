"""What a table or a figure is made of: cells, each a set to make and what to measure on it. Nothing is run here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from m3d.errors import M3DError, unknown

Value = str | int | float
LOW = ("mnist", "fashion-mnist", "svhn", "cifar10", "cifar100")
NO_FACTOR: tuple[tuple[str, Value], ...] = (("factor", 1),)
RUNS = "runs"  # the folder of condensed sets below the output folder
WHOLE = "whole"  # the method of a source that is the training data itself


@dataclass(frozen=True)
class Facts:
    """A dataset as tables name it, and its size, which ratios and estimates need before anything is loaded."""

    title: str
    classes: int
    train: int
    test: int
    shape: tuple[int, int, int]  # ch, h, w


_IMAGENET_SIDE = 224
# Of a class of ILSVRC there are at most 1,300 training and 50 test images.
FACTS = {
    "mnist": Facts("MNIST", 10, 60_000, 10_000, (1, 28, 28)),
    "fashion-mnist": Facts("F-MNIST", 10, 60_000, 10_000, (1, 28, 28)),
    "svhn": Facts("SVHN", 10, 73_257, 26_032, (3, 32, 32)),
    "cifar10": Facts("CIFAR-10", 10, 50_000, 10_000, (3, 32, 32)),
    "cifar100": Facts("CIFAR-100", 100, 50_000, 10_000, (3, 32, 32)),
    "imagenet10": Facts("ImageNet-10", 10, 13_000, 500, (3, _IMAGENET_SIDE, _IMAGENET_SIDE)),
    "imagenet100": Facts("ImageNet-100", 100, 130_000, 5_000, (3, _IMAGENET_SIDE, _IMAGENET_SIDE)),
    **{
        f"imagenet100-{k}": Facts(f"ImageNet-100, part {k}", 20, 26_000, 1_000, (3, _IMAGENET_SIDE, _IMAGENET_SIDE))
        for k in range(1, 6)
    },
}

# The steps a method takes unless told otherwise; a test holds them to the methods themselves.
STEPS = {
    "random": 0,
    "herding": 0,
    "k-center": 0,
    "m3d": 10_000,
    "dm": 20_000,
    "dc": 1_000,
    "dsa": 1_000,
    "idc": 200_000,
    "idc-i": 200_000,
    "idm": 20_000,
    "cafe": 20_000,
    "cafe-dsa": 20_000,
    "datadam": 8_000,
    "mtt": 5_000,
    WHOLE: 0,
}
_PER_IMAGE = ("dc", "dsa")  # theirs are steps per image of a class


@dataclass(frozen=True)
class Source:
    """A condensed set: everything that decides it."""

    data: str
    ipc: int
    method: str = "m3d"
    options: tuple[tuple[str, Value], ...] = ()
    net: str = "convnet3"
    seed: int = 0
    zca: bool = False  # whether networks see whitened images

    @property
    def steps(self) -> int:
        """The steps it takes: its own, else its method's."""
        given = dict(self.options).get("steps")
        if given is not None:
            return int(given)
        return STEPS[self.method] * (self.ipc if self.method in _PER_IMAGE else 1)


@dataclass(frozen=True)
class Cell:
    """One number, or one picture, of a table or figure: the sets it takes and how they are measured."""

    key: str  # what --cell selects: data/ipc/method/seedN
    row: str  # where it stands; a pattern where it stands in several rows
    column: str
    sources: tuple[Source, ...] = ()  # several: sub-tasks whose sets are put together; none: nothing is condensed
    measures: tuple[str, ...] = ("accuracy",)  # accuracy, moments, picture
    data: str = ""  # what is tested on; empty: the source's data
    net: str = "convnet3"
    protocol: str = "paper"
    epochs: int | None = None  # None: the protocol's own
    repeats: int = 10
    pair: str = ""  # of two distributions to compare instead (``m3d.reproduce.toy``)

    @property
    def tested_on(self) -> str:
        return self.data or (self.sources[0].data if self.sources else "")

    @property
    def zca(self) -> bool:
        return bool(self.sources) and self.sources[0].zca


def one_set(
    data: str,
    ipc: int,
    label: str,
    method: str,
    *,
    row: str,
    column: str,
    options: tuple[tuple[str, Value], ...] = (),
    seed: int = 0,
    measures: tuple[str, ...] = ("accuracy",),
    net: str = "convnet3",
    protocol: str = "paper",
    epochs: int | None = None,
) -> Cell:
    """A cell of one set, condensed with ConvNet-3."""
    source = Source(data, ipc, method, tuple(sorted(options)), seed=seed)
    key = f"{data}/{ipc}/{label}/seed{seed}"
    return Cell(key, row, column, (source,), measures, net=net, protocol=protocol, epochs=epochs)


@dataclass(frozen=True)
class Overrides:
    """What a user asks for instead of the plan's own settings: recorded with every result, and kept apart by it."""

    steps: int | None = None  # at most so many
    epochs: int | None = None  # at most so many
    repeats: int | None = None  # at most so many
    precision: str = "auto"
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "epochs", "repeats"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise M3DError(f"--{name} {value} is not valid; allowed: 1 and more")

    def given(self) -> dict[str, Any]:
        """Only what differs from the plan."""
        plain = asdict(Overrides())
        return {name: value for name, value in asdict(self).items() if value != plain[name]}

    @property
    def folder(self) -> str:
        """The sub-folder for results under these overrides; empty where there are none."""
        parts = [name if value is True else f"{name}{value}" for name, value in self.given().items()]
        return "with-" + "-".join(parts) if parts else ""

    def source(self, source: Source) -> Source:
        if self.steps is None or source.steps <= self.steps:
            return source
        return replace(source, options=tuple(sorted({**dict(source.options), "steps": self.steps}.items())))

    def repeats_of(self, cell: Cell) -> int:
        return cell.repeats if self.repeats is None else min(cell.repeats, self.repeats)


def set_digest(source: Source, overrides: Overrides) -> str:
    """The identity of a condensed set."""
    kept = {k: v for k, v in overrides.given().items() if k in ("precision", "deterministic")}
    return _digest({"set": asdict(overrides.source(source)), **kept})


def set_name(source: Source, overrides: Overrides) -> str:
    """The name of a set's folder: what a person looks for, then its identity."""
    return f"{source.data}-{source.method}-ipc{source.ipc}-seed{source.seed}-{set_digest(source, overrides)}"


def cell_digest(cell: Cell, overrides: Overrides) -> str:
    """The identity of a cell's outcome: all that decides it, whatever the cell is called and wherever it stands."""
    content = {k: v for k, v in asdict(cell).items() if k not in ("key", "row", "column")}
    return _digest({"cell": content, "overrides": overrides.given()})


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def select(cells: Sequence[Cell], pattern: str | None) -> list[Cell]:
    """The cells whose key is ``pattern``, or begins with it and a slash; * and ? stand for anything."""
    if pattern is None:
        return list(cells)
    found = [c for c in cells if fnmatchcase(c.key, pattern) or fnmatchcase(c.key, pattern.rstrip("/") + "/*")]
    if not found:
        raise unknown("cell", pattern, {c.key.rpartition("/seed")[0] or c.key for c in cells})
    return found


@dataclass(frozen=True)
class Row:
    """A row of a table: what it is called in the records, and what its first columns say."""

    key: str
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Column:
    """A column of a table: which cells it shows, and what of their records."""

    label: str
    cells: str
    measure: str = "accuracy"


@dataclass(frozen=True)
class Table:
    """Rows and columns; where they meet stand our number and the published one."""

    title: str
    heads: tuple[str, ...]  # of the rows' labels
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """One table or figure of the paper: its cells, and how they are laid out."""

    name: str
    aliases: tuple[str, ...]
    about: str
    cells: tuple[Cell, ...]
    tables: tuple[Table, ...]
    figure: str = ""  # which drawing of ``m3d.reproduce.figures`` shows it; empty: a table only

    def __post_init__(self) -> None:
        keys = [cell.key for cell in self.cells]
        if len(set(keys)) != len(keys):
            raise M3DError(f"plan {self.name}: two cells have the same key")


def imagenet_epochs(images: int, classes: int) -> int:
    """Epochs of the ``imagenet`` protocol for ``images`` decoded images per class, as IDC counts them.

    1: 3,000; up to 10: 2,000; 50: 1,500; 200: 1,000; 500: 500; more: 300. For 100 classes two thirds of it, in whole
    hundreds.
    """
    steps = ((1, 3000), (10, 2000), (50, 1500), (200, 1000), (500, 500))
    epochs = next((e for most, e in steps if images <= most), 300)
    return epochs if classes < 100 else epochs * 2 // 3 // 100 * 100
