"""``m3d sweep``: every combination of options, measured on a held-out part of the training data, and ranked."""

from __future__ import annotations

import json
import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from m3d.errors import Interrupted, M3DError
from m3d.grid.cells import Cell, Overrides, Source, Value, short_name
from m3d.grid.drift import Change
from m3d.grid.journal import Journal, Record
from m3d.grid.telling import Telling, check_time_limit
from m3d.grid.where import Where
from m3d.wording import counted

if TYPE_CHECKING:
    from m3d.data import Dataset
    from m3d.grid.work import Place, Shelf


class Setting(NamedTuple):
    """What is compared: a method at a number of images, with the options that were given."""

    method: str
    ipc: int
    options: tuple[tuple[str, Value], ...]

    @property
    def variant(self) -> str:
        """The method and its options, as a table shows them."""
        given = ",".join(f"{name}={'auto' if value is None else value}" for name, value in self.options)
        return f"{self.method}:{given}" if given else self.method


@dataclass(frozen=True)
class Measured:
    """How sets are tested."""

    net: str = "convnet3"
    protocol: str = "paper"
    epochs: int | None = None  # None: the protocol's own
    repeats: int = 10

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise M3DError(f"--repeats {self.repeats} is not valid; allowed: 1 and more")


@dataclass(frozen=True)
class Sweep:
    """One call: the values of every axis, and how a set is made and measured."""

    data: str
    methods: Sequence[str]
    ipcs: Sequence[int]
    options: Sequence[tuple[str, Sequence[str]]]  # of each option its values, as they were typed; all are combined
    vary: Sequence[tuple[str, Sequence[str]]] = ()  # the same, but tried one at a time around all the rest
    seeds: Sequence[int] = (0,)
    net: str | None = None  # that images are matched through; None: the method's own
    measured: Measured = field(default_factory=Measured)
    load: tuple[tuple[str, Value], ...] = ()  # how the data are loaded
    zca: bool = False
    final: bool = False  # on the test data, with all training data
    overrides: Overrides = field(default_factory=Overrides)  # precision and determinism

    def __post_init__(self) -> None:
        for name in {name for name, _ in self.options} & {name for name, _ in self.vary}:
            raise M3DError(f"--vary {name}: --set gives it too; give its values to one of them")

    @property
    def split(self) -> str:
        return "test" if self.final else "val"

    def cells(self, shelf: Shelf, device: str, precision: str) -> dict[Setting, list[Cell]]:
        """The cells of every setting, one per seed; whatever is wrong with any of them is said here."""
        from m3d import api
        from m3d.evaluation import make_protocol
        from m3d.nets import make_net
        from m3d.registry import canonical

        data = shelf.get(self.data, Source(self.data, 1, zca=self.zca, load=self.load).loading)
        make_protocol(self.measured.protocol, epochs=self.measured.epochs)
        make_net(self.measured.net, data.shape, data.classes)
        common: dict[str, Any] = {"net": self.net, "device": device, "precision": precision}
        settings: dict[Setting, None] = {}  # a value that was given twice is one setting
        for method, ipc in product(self.methods, self.ipcs):
            for combined, alone in product(product(*self._axes(method, self.options)), self._alone(method)):
                given = (*combined, *alone)
                known: dict[str, Any] = api.check(data, ipc, method, **common, **dict(given))
                chosen = tuple(sorted((name, known[name]) for name, _ in given))
                settings[Setting(canonical(method), ipc, chosen)] = None
        if self.final and len(settings) > 1:
            raise M3DError(f"--final measures one setting that was chosen before, and these are {len(settings)}")
        return {s: [self._cell(s, seed, data) for seed in dict.fromkeys(self.seeds)] for s in settings}

    def _alone(self, method: str) -> list[tuple[tuple[str, str], ...]]:
        """Nothing, and then every (option, value) that is tried by itself."""
        return [(), *((pair,) for axis in self._axes(method, self.vary) for pair in axis)]

    def _axes(self, method: str, options: Sequence[tuple[str, Sequence[str]]]) -> list[list[tuple[str, str]]]:
        """The (option, value)s of each option: of several methods each takes those it has, so that a selection without
        a learning rate can stand beside methods that have one. What none has is left in, and refused later."""
        from m3d.prepare import option_names

        own, all_known = option_names(method), {name for other in self.methods for name in option_names(other)}
        return [[(name, value) for value in values] for name, values in options if name in own or name not in all_known]

    def _cell(self, setting: Setting, seed: int, data: Dataset) -> Cell:
        name = data.recipe.get("source", self.data)  # a path in full, so that workers find it
        source = Source(name, setting.ipc, setting.method, setting.options, self.net, seed, self.zca, self.load,
                        data.train.fingerprint)  # fmt: skip
        key = f"{short_name(name)}/{setting.ipc}/{setting.variant}/seed{seed}"
        how = self.measured
        return Cell(key, str(setting.ipc), setting.variant, (source,), net=how.net, protocol=how.protocol,
                    epochs=how.epochs, repeats=how.repeats, split=self.split)  # fmt: skip


def load_options(
    val_fraction: float | None,
    final: bool,
    size: int | None,
    on_bad_image: str | None = None,
    test_fraction: float = 0.0,
) -> tuple[tuple[str, Value], ...]:
    """How the data of a sweep are loaded: a part held out, except for a final measurement."""
    if final and val_fraction is not None:
        raise M3DError(f"--val-fraction {val_fraction}: --final condenses all training data, tests on the test data")
    fraction = 0.1 if val_fraction is None else val_fraction
    if not 0 < fraction < 1:
        raise M3DError(f"--val-fraction {fraction} is not valid; allowed: between 0 and 1, to measure settings on")
    chosen = {"val_fraction": None if final else fraction, "size": size, "on_bad_image": on_bad_image}
    chosen["test_fraction"] = test_fraction or None
    return tuple((name, value) for name, value in chosen.items() if value is not None)


def rank(cells: dict[Setting, list[Cell]], journal: Journal, stale: Container[str] = ()) -> list[dict[str, Any]]:
    """One row per setting that has a record, the best of an IPC first: the mean over seeds and their sd.

    Cells whose keys are in ``stale`` do not count: they were made under other defaults than the rest.
    """
    rows = []
    for setting, of_it in cells.items():
        known = [cell for cell in of_it if cell.key not in stale]
        found: list[Record] = [r for cell in known if (r := journal.of(cell)) is not None]
        if not found:
            continue
        means = [float(r["accuracy"]) for r in found]
        rows.append({
            "ipc": setting.ipc,
            "variant": setting.variant,
            "method": setting.method,
            "options": dict(setting.options),
            "accuracy": round(statistics.fmean(means), 3),
            "sd": round(statistics.stdev(means), 3) if len(means) > 1 else None,
            "seeds": [r["condensation_seed"] for r in found],
            "of_seeds": len(of_it),
            "means": means,
            "seconds": round(statistics.fmean(_seconds(found)), 2),
            "shared": any("device_share" in part for r in found for part in r["condensation"]),
        })  # fmt: skip
    return sorted(rows, key=lambda row: (row["ipc"], -row["accuracy"], row["variant"]))


def compare(rows: Sequence[dict[str, Any]], varied: Container[str]) -> None:
    """Add to each row its ``difference`` to the row without the ``varied`` options, where that has a record."""

    def rest(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return row["ipc"], row["method"], tuple((k, v) for k, v in row["options"].items() if k not in varied)

    plain = {rest(row): row["accuracy"] for row in rows if not any(name in varied for name in row["options"])}
    for row in rows:
        usual = plain.get(rest(row))
        row["difference"] = None if usual is None else round(row["accuracy"] - usual, 3)


def _seconds(records: Iterable[Record]) -> list[float]:
    return [sum(part.get("seconds", 0.0) for part in r["condensation"]) for r in records]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The ranking as text."""
    width = max(len(row["variant"]) for row in rows)
    compared = any(row.get("difference") is not None for row in rows)
    against = f"  {'difference':>10}" if compared else ""
    lines = [f"{'ipc':>4} {'rank':>4}  {'setting':<{width}}  {'accuracy':>14}{against}  {'condensing':>10}  seeds"]
    for row in rows:
        ipc, rivals = row["ipc"], [other["accuracy"] for other in rows if other["ipc"] == row["ipc"]]
        place = 1 + sum(accuracy > row["accuracy"] for accuracy in rivals)
        spread = "" if row["sd"] is None else f" ± {row['sd']:.2f}"
        short = "" if len(row["means"]) == row["of_seeds"] else f"  ({len(row['means'])} of {row['of_seeds']})"
        each = " ".join(f"{mean:.2f}" for mean in row["means"])
        number = f"{row['accuracy']:.2f}{spread} %"
        seconds = f"{'≤ ' if row['shared'] else ''}{row['seconds']:.1f} s"  # on a shared device it took longer
        more = row.get("difference")
        against = f"  {'–' if more is None else f'{more:+.2f}':>10}" if compared else ""
        setting = f"{row['variant']:<{width}}"
        lines.append(f"{ipc:>4} {place:>4}  {setting}  {number:>14}{against}  {seconds:>10}  {each}{short}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Call:
    """What the command does with a sweep."""

    sweep: Sweep
    place: Place
    where: Where
    as_json: bool = False

    def run(self, seconds: float | None, dry: bool, again: bool = False) -> None:
        """Check everything, make the missing cells, and print the ranking."""
        check_time_limit(seconds)
        from m3d.grid.work import Shelf

        shelf = Shelf(self.place.data_root)
        cells = self.sweep.cells(shelf, *self._arithmetic())
        name = "final" if self.sweep.final else "sweep"
        journal = Journal(self.place.out / f"{name}.jsonl", name, self.sweep.overrides)
        if dry:
            self._plan(cells, journal)
            return
        with self.where.hands(self.place.device, shelf) as hands:
            self._make(cells, journal, shelf, seconds=seconds, hands=hands, again=again)

    def _arithmetic(self) -> tuple[str, str]:
        """(device, precision) to check settings for: the driver of a cluster need not have its workers' device."""
        from m3d.errors import unknown
        from m3d.runtime import DEVICES, PRECISIONS

        device, precision = self.place.device, self.sweep.overrides.precision
        for kind, name, allowed in (("device", device, DEVICES), ("precision", precision, PRECISIONS)):
            if name not in allowed:
                raise unknown(kind, name, allowed)
        return (device, precision) if self.where.local else ("auto", "auto")

    def _plan(self, cells: dict[Setting, list[Cell]], journal: Journal) -> None:
        rows = [{"cell": c.key, "finished": journal.of(c) is not None} for of_it in cells.values() for c in of_it]
        if self.as_json:
            typer.echo(json.dumps(rows))
            return
        for row in rows:
            typer.echo(f"{row['cell']}{'  finished' if row['finished'] else ''}")
        typer.echo(f"{sum(not row['finished'] for row in rows)} of {len(rows)} cells to run; measured on {self._on()}")

    def _make(self, cells: dict[Setting, list[Cell]], journal: Journal, shelf: Shelf, **settings: Any) -> None:
        from m3d import api
        from m3d.grid.runner import Job, run

        def todays(source: Source) -> dict[str, object]:
            data, options = shelf.get(source.data, source.loading), dict[str, Any](source.options)
            return api.check(data, source.ipc, source.method, net=source.net, **options)

        job = Job(_seed_by_seed(cells), journal, self.place, settings=todays)
        telling = Telling(_headline, self.as_json, records=False)
        stale: set[str] = set()
        try:
            with telling.watched() as (listener, watch):

                def outdated(cell: Cell, changes: Sequence[Change]) -> None:
                    stale.add(cell.key)
                    listener.outdated(cell, changes)

                summary = run(job, listener=replace(listener, outdated=outdated), watch=watch, **settings)
        except Interrupted as stop:
            self._show(cells, journal, stale)
            typer.echo(f"m3d: {stop}; the same command goes on from here", err=True)
            raise SystemExit(130) from None
        if summary.skipped and not self.as_json:
            typer.echo(f"{summary.skipped} of {len(job.cells)} cells were finished before")
        self._show(cells, journal, stale)
        if summary.failed:
            cell, error = summary.failed[0]
            raise M3DError(f"{counted(len(summary.failed), 'cells')} failed; {cell.key}: {error}")

    def _show(self, cells: dict[Setting, list[Cell]], journal: Journal, stale: set[str]) -> None:
        rows = rank(cells, journal, stale)
        if self.sweep.vary:
            compare(rows, {name for name, _ in self.sweep.vary})
        if stale:
            typer.echo(f"m3d: not ranked, as made under other defaults: {counted(len(stale), 'cells')}", err=True)
        if self.as_json:
            how = {"data": self.sweep.data, "split": self.sweep.split, **dict(self.sweep.load)}
            typer.echo(json.dumps({**how, "records": str(journal.file), "ranking": rows}))
        elif rows:
            n = f"{counted(self.sweep.measured.repeats, 'networks')} per seed, last epoch"
            typer.echo(f"\n{table(rows)}\nmean over seeds ± sd of seeds on {self._on()}; {n}. Records: {journal.file}")

    def _on(self) -> str:
        if self.sweep.final:
            return "the test data"
        return f"{float(dict(self.sweep.load)['val_fraction'] or 0):.0%} of the training data, held out"


def _seed_by_seed(cells: dict[Setting, list[Cell]]) -> list[Cell]:
    """All settings once before any a second time: a sweep that is stopped early has compared them all."""
    return [cell for one_seed in zip(*cells.values(), strict=True) for cell in one_seed]


def _headline(cell: Cell, record: Record) -> str:
    spread = f" ± {record['sd']:.2f}" if record["n"] > 1 else ""
    return f"{record['accuracy']:.2f}{spread} % (last epoch, n={record['n']})"
