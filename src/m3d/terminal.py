"""What a person sees while the work goes on: progress on a terminal, curves in TensorBoard."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from m3d.errors import M3DError
from m3d.wording import with_sd

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

    from m3d.watch import Progress


_LINE_EVERY = 30.0  # seconds


class _Lines:
    """Where there is no terminal but a file or a log: a line now and then, so that long work does not look hung."""

    def __init__(self, unit: str):
        self._unit, self._total = unit, 0
        self._began = self._last = time.monotonic()
        self._first = 0  # what was done when the work began or went on

    def show(self, done: int, total: int, told: str = "") -> None:
        now = time.monotonic()
        if total != self._total or done < self._first:  # other work
            self._total, self._first, self._began = total, done, now
        if now - self._last < _LINE_EVERY or done >= total:
            return
        self._last, new = now, done - self._first
        left = f", about {duration((now - self._began) / new * (total - done))} left" if new else ""
        _say(f"{done:,} of {total:,} {self._unit}{told}{left}")


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Callable[[Progress], None] | None]:
    """A bar with loss, speed and time left on a terminal, a line now and then elsewhere."""
    if quiet:
        yield None
        return
    if not sys.stderr.isatty():
        lines = _Lines("steps")
        with _training_lines():
            yield lambda p: lines.show(p.step, p.steps, f", loss {p.loss:.4g}")
        return
    from rich.console import Console

    console = Console(stderr=True)
    fields = ("loss {task.fields[loss]:.4g}", "{task.fields[rate]:.1f} steps/s")
    with closing(_Bar(console, *fields)) as bar, said(console):
        yield lambda p: bar.show(p.step, p.steps, loss=p.loss, rate=p.rate)


class _Bar:
    """A bar that appears with the first thing it is told and goes when the work is done: one after another, of
    condensing and of training, may stand on a terminal, but not two at a time."""

    _shown: ClassVar[_Bar | None] = None  # the one on the terminal

    def __init__(self, console: Console, *fields: str):
        self._console, self._fields = console, fields
        self._bar: Bar | None = None

    def show(self, done: int, total: int, **told: Any) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as NewBar

        if self._bar is None:
            clear_bars()
            _Bar._shown = self
            columns = (BarColumn(), MofNCompleteColumn(), *map(TextColumn, self._fields), TimeRemainingColumn())
            self._bar = NewBar(*columns, console=self._console, transient=True)
            self._bar.add_task("", total=total, **told)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done, total=total, **told)
        if done >= total:
            self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            _Bar._shown = None


def clear_bars() -> None:
    """Before something else is said: take the bar away that work which did not end has left."""
    if _Bar._shown is not None:
        _Bar._shown.close()


class _Shown(logging.Handler):
    """Hands every record to ``show``."""

    def __init__(self, show: Callable[[logging.LogRecord], None]):
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(record)


@contextmanager
def _listening(show: Callable[[logging.LogRecord], None]) -> Iterator[None]:
    """What the library says of its work goes to ``show``."""
    logger, handler = logging.getLogger("m3d"), _Shown(show)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@contextmanager
def said(console: Console) -> Iterator[None]:
    """What the library says of its work (networks it trains before the first step) is shown too: line by line, and as a
    bar where it says how much of it is done."""
    bar = _Bar(console, "epochs")

    def show(record: logging.LogRecord) -> None:
        done = getattr(record, "done", None)
        if done is None:  # of something else, so what was shown is over
            bar.close()
            console.print(record.getMessage())
        else:
            bar.show(*done)

    with closing(bar), _listening(show):
        yield


@contextmanager
def _training_lines() -> Iterator[None]:
    """A line now and then while networks are trained that the work needs."""
    lines = _Lines("epochs")

    def show(record: logging.LogRecord) -> None:
        if (done := getattr(record, "done", None)) is not None:
            lines.show(*done)
        elif record.levelno >= logging.WARNING and not logging.getLogger().handlers:  # which Python would print itself
            _say(record.getMessage())

    with _listening(show):
        yield


@contextmanager
def training_bar(quiet: bool) -> Iterator[None]:
    """A bar while networks are trained that the work needs, a line now and then where there is no terminal."""
    if quiet:
        yield
        return
    if not sys.stderr.isatty():
        with _training_lines():
            yield
        return
    from rich.console import Console

    with said(Console(stderr=True)):
        yield


@contextmanager
def board(
    folder: Path, wanted: bool, also: Callable[[Progress], None] | None
) -> Iterator[Callable[[Progress], None] | None]:
    """Reports go to TensorBoard too, if wanted."""
    if not wanted:
        yield also
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise M3DError("--tensorboard needs the package tensorboard: pip install 'm3d[tensorboard]'") from None
    writer = SummaryWriter(folder / "tensorboard")

    def report(progress: Progress) -> None:
        writer.add_scalar("loss", progress.loss, progress.step)
        writer.add_scalar("steps per second", progress.rate, progress.step)
        if progress.validation is not None:
            writer.add_scalar("validation accuracy", progress.validation[1], progress.validation[0])
        if also is not None:
            also(progress)

    try:
        yield report
    finally:
        writer.close()


def ranking_lines(ranking: dict[str, Any]) -> list[str]:
    """A line for each accuracy that a ranking's scores follow from, and the differences they are made of."""
    names = {
        "real_hard": "the whole data",
        "set_hard": "the set, hard labels",
        "set": "the set",
        "random": "random selections",
        "set_plain": "the set, no augmentation",
        "random_plain": "random selections, no augmentation",
    }
    arms = ((text, ranking["accuracies"][name]) for name, text in names.items())
    lines = [f"  {text:<39}{with_sd(arm['accuracy'], arm['sd'], arm['n'])} % (n={arm['n']})" for text, arm in arms]
    gaps = f"below the whole data {ranking['hlr']:.2f}, above random {ranking['ior']:.2f}"
    return [*lines, f"  points {gaps}, without augmentation {ranking['ior_plain']:.2f}"]


@contextmanager
def epoch_bar(quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar with the time left while networks are trained, a line now and then where there is no terminal."""
    if quiet:
        yield None
        return
    if not sys.stderr.isatty():
        yield _Lines("epochs").show
        return
    from rich.console import Console

    with closing(_Bar(Console(stderr=True), "epochs")) as bar:
        yield bar.show


def decode_bar(quiet: bool) -> Callable[[int, int], None] | None:
    """A line that says how many images are decoded, over and over in its place; nothing where nobody watches."""
    if quiet or not sys.stderr.isatty():
        return None

    def report(done: int, total: int) -> None:
        end = "\n" if done == total else ""
        sys.stderr.write(f"\rdecoding images: {done:,} of {total:,} ({done / total:.0%}){end}")
        sys.stderr.flush()

    return report


@contextmanager
def status_line(quiet: bool) -> Iterator[Callable[[Mapping[str, str]], None]]:
    """One line on a terminal that says what the cells at work are at; nothing where nobody watches."""
    if quiet or not sys.stderr.isatty():
        yield lambda states: None
        return
    from rich.console import Console
    from rich.markup import escape

    line = Console(stderr=True).status("")

    def show(states: Mapping[str, str]) -> None:
        line.update(escape("; ".join(f"{k}: {v}" for k, v in states.items()) or "workers start"))
        line.start()  # with the first news: where cells are made here, bars tell of them

    try:
        yield show
    finally:
        line.stop()


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
