"""What is made: cells, each a set and what is measured on it, and what identifies them. Nothing is run here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from m3d.errors import M3DError

Value = str | int | float | None
RUNS = "runs"  # the folder of condensed sets below the output folder
WHOLE = "whole"  # the method of a source that is the training data itself
# Fields that came after results were published: at these values they are no part of an identity.
_LATER: Mapping[str, Any] = {
    "load": (),
    "fingerprint": "",
    "split": "test",
    "keep_every": 0,
    "at": None,
    "labels": "hard",
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
    "m3d+": 12_000,
    "dance": 10_000,
    "dsdm": 10_000,
    "ncfm": 20_000,
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
    net: str | None = "convnet3"  # None: the method's own
    seed: int = 0
    zca: bool = False  # whether networks see whitened images
    load: tuple[tuple[str, Value], ...] = ()  # how else the data are loaded: val_fraction, size
    fingerprint: str = ""  # of the training data, where the name does not settle what they are
    keep_every: int = 0  # steps after which the set as it is is kept too

    @property
    def loading(self) -> tuple[tuple[str, Value], ...]:
        """The options its data are loaded with."""
        return (*self.load, ("zca", True)) if self.zca else self.load

    @property
    def steps(self) -> int:
        """The steps it takes: its own, else its method's."""
        given = dict(self.options).get("steps")
        if given is not None:
            return int(given)
        return STEPS[self.method] * (self.ipc if self.method in _PER_IMAGE else 1)


@dataclass(frozen=True)
class Cell:
    """One number, or one picture: the sets it takes and how they are measured."""

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
    split: str = "test"  # or val: the part that ``load`` holds out
    at: int | None = None  # the set as it was kept after so many steps; None: the finished one
    pair: str = ""  # of two distributions to compare instead (``m3d.reproduce.toy``)
    labels: str = "hard"  # or soft: what trained networks, of the kind the set was condensed with, say of its images

    @property
    def tested_on(self) -> str:
        return self.data or (self.sources[0].data if self.sources else "")


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
        options = tuple(sorted({**dict(source.options), "steps": self.steps}.items()))
        kept = source.keep_every * self.steps // source.steps  # at the same parts of the way
        return replace(source, options=options, keep_every=max(1, kept) if source.keep_every else 0)

    def at(self, cell: Cell) -> int | None:
        """After how many steps the set that a cell measures was kept; None: it is the finished one."""
        if cell.at is None:
            return None
        source, shorter = cell.sources[0], self.source(cell.sources[0])
        at = cell.at // source.keep_every * shorter.keep_every
        return at if at < shorter.steps else None  # where steps are too few to be divided

    def repeats_of(self, cell: Cell) -> int:
        return cell.repeats if self.repeats is None else min(cell.repeats, self.repeats)


def set_digest(source: Source, overrides: Overrides) -> str:
    """The identity of a condensed set."""
    kept = {k: v for k, v in overrides.given().items() if k in ("precision", "deterministic")}
    return _digest({"set": _content(overrides.source(source)), **kept})


def set_name(source: Source, overrides: Overrides) -> str:
    """The name of a set's folder: what a person looks for, then its identity."""
    data = short_name(source.data)
    return f"{data}-{source.method}-ipc{source.ipc}-seed{source.seed}-{set_digest(source, overrides)}"


def sets_in(out: Path) -> set[str]:
    """The names of the sets that are finished below an output folder."""
    return {file.parent.name for file in (out / RUNS).glob("*/condensed.safetensors")}


def short_name(data: str) -> str:
    """A dataset's name, or the last part of its path."""
    return PurePath(data).stem if data.endswith(".npz") else PurePath(data).name


def cell_digest(cell: Cell, overrides: Overrides) -> str:
    """The identity of a cell's outcome: all that decides it, whatever the cell is called and wherever it stands."""
    if cell.at is None:  # what was kept on the way does not change the end
        cell = replace(cell, sources=tuple(replace(source, keep_every=0) for source in cell.sources))
    content = {k: v for k, v in _content(cell).items() if k not in ("key", "row", "column")}
    return _digest({"cell": content, "overrides": overrides.given()})


def folders(cell: Cell, overrides: Overrides) -> list[str]:
    """The names of the folders that a cell's work writes to; its evaluation goes to the last of them."""
    names = [set_name(source, overrides) for source in cell.sources]
    if len(names) > 1:
        names.append(f"{cell.tested_on}-{cell.sources[0].method}-together-{cell_digest(cell, overrides)}")
    return names


def _content(value: Source | Cell) -> dict[str, Any]:
    return asdict(value, dict_factory=_known_from_the_first)


def _known_from_the_first(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in pairs if name not in _LATER or value != _LATER[name]}


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
