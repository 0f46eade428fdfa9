"""What a table or a figure of the paper is made of: cells, and where they stand. Nothing is run here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from m3d.errors import M3DError, unknown
from m3d.grid.cells import Cell, Source, Value

LOW = ("mnist", "fashion-mnist", "svhn", "cifar10", "cifar100")
# Rows of which M3D is condensed from three seeds. At the second they differ by up to a point (LAB.md).
SEVERAL_SEEDS = ("cifar10/10", "fashion-mnist/1")
FULL_COLOURS: tuple[tuple[str, Value], ...] = (("chroma", "full"),)
NO_FACTOR: tuple[tuple[str, Value], ...] = (("factor", 1),)


@dataclass(frozen=True)
class Facts:
    """A dataset as tables name it, and its size, which ratios and estimates need before anything is loaded."""

    title: str
    classes: int
    train: int
    test: int
    shape: tuple[int, int, int]  # ch, h, w
    smallest: int | None = None  # training images of the smallest class, where it is known


_IMAGENET_SIDE = 224
# Of a class of ILSVRC there are at most 1,300 training and 50 test images.
FACTS = {
    "mnist": Facts("MNIST", 10, 60_000, 10_000, (1, 28, 28), 5_421),
    "fashion-mnist": Facts("F-MNIST", 10, 60_000, 10_000, (1, 28, 28), 6_000),
    "svhn": Facts("SVHN", 10, 73_257, 26_032, (3, 32, 32), 4_659),
    "cifar10": Facts("CIFAR-10", 10, 50_000, 10_000, (3, 32, 32), 5_000),
    "cifar100": Facts("CIFAR-100", 100, 50_000, 10_000, (3, 32, 32), 500),
    "imagenet10": Facts("ImageNet-10", 10, 13_000, 500, (3, _IMAGENET_SIDE, _IMAGENET_SIDE)),
    "imagenet100": Facts("ImageNet-100", 100, 130_000, 5_000, (3, _IMAGENET_SIDE, _IMAGENET_SIDE)),
    **{
        f"imagenet100-{k}": Facts(f"ImageNet-100, part {k}", 20, 26_000, 1_000, (3, _IMAGENET_SIDE, _IMAGENET_SIDE))
        for k in range(1, 6)
    },
}


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
    labels: str = "hard",
) -> Cell:
    """A cell of one set, condensed with ConvNet-3."""
    source = Source(data, ipc, method, tuple(sorted(options)), seed=seed)
    key = f"{data}/{ipc}/{label}/seed{seed}"
    return Cell(key, row, column, (source,), measures, net=net, protocol=protocol, epochs=epochs, labels=labels)


def select(cells: Sequence[Cell], pattern: str | None) -> list[Cell]:
    """The cells whose key is ``pattern``, or begins with it and a slash; * and ? stand for anything."""
    if pattern is None:
        return list(cells)
    found = matching(cells, pattern)
    if not found:
        raise unknown("cell", pattern, {c.key.rpartition("/seed")[0] or c.key for c in cells})
    return found


def matching(cells: Sequence[Cell], pattern: str) -> list[Cell]:
    """As :func:`select`, but none is allowed."""
    return [c for c in cells if fnmatchcase(c.key, pattern) or fnmatchcase(c.key, pattern.rstrip("/") + "/*")]


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
    alone: bool = False  # whether its cells are compared so closely that numbers measured for other tables do not do

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
