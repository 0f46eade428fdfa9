"""What a terminal shows: one bar at a time, which is gone when its work is done."""

import io
import logging
import re
import sys

from rich.console import Console

from m3d.terminal import _Bar, clear_bars, epoch_bar, progress_bar, status_line, training_bar
from m3d.watch import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch) -> Terminal:
    """In place of the one that is captured, from within a test."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    return made


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_bar_comes_with_the_first_news_and_goes_with_the_last():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    bar = _Bar(console, "epochs")
    assert bar._bar is None
    bar.show(1, 3)
    assert bar._bar is not None
    bar.show(3, 3)
    assert bar._bar is None
    bar.show(1, 2)  # the next network's training
    bar.close()
    bar.close()
    text = plain(console.file.getvalue())
    assert "3/3 epochs" in text and "1/2 epochs" in text


def test_condensing_and_training_after_each_other(monkeypatch):
    shown = terminal(monkeypatch)
    with progress_bar(quiet=False) as steps, epoch_bar(quiet=False) as epochs, status_line(quiet=False):
        for _ in range(2):
            steps(Progress(4, 4, 0.5, 1.0, 2.0, None))
            epochs(7, 7)
    text = plain(shown.getvalue())
    assert "4/4 loss 0.5 2.0 steps/s" in text and "7/7 epochs" in text


def test_work_that_failed_leaves_no_bar_beside_the_next(monkeypatch):
    shown = terminal(monkeypatch)
    with progress_bar(quiet=False) as steps, epoch_bar(quiet=False) as epochs:
        steps(Progress(2, 4, 0.5, 1.0, 2.0, None))  # and then nothing more
        first = _Bar._shown
        epochs(1, 7)
        assert first is not None and first._bar is None and _Bar._shown is not first
        clear_bars()
        assert _Bar._shown is None
    assert "2/4" in plain(shown.getvalue()) and "1/7" in plain(shown.getvalue())


def test_workers_are_told_of_when_there_are_some(monkeypatch):
    shown = terminal(monkeypatch)
    with status_line(quiet=False) as show:
        assert not shown.getvalue()
        show({"cifar10/1/m3d": "epoch 3 of 9"})
    assert "cifar10/1/m3d: epoch 3 of 9" in plain(shown.getvalue())


def test_nobody_watches(monkeypatch, capsys):
    for bar in (progress_bar, epoch_bar):
        with bar(quiet=True) as report:
            assert report is None
    with progress_bar(quiet=False) as steps, epoch_bar(quiet=False) as epochs:  # no terminal here, and soon done
        steps(Progress(2, 4, 0.5, 1.0, 2.0, None))
        epochs(3, 7)
    with status_line(quiet=False) as show:
        show({"a": "b"})
    assert capsys.readouterr().err == ""


def test_where_there_is_no_terminal_long_work_says_a_line_now_and_then(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("m3d.terminal.time.monotonic", lambda: now[0])
    with progress_bar(quiet=False) as steps, epoch_bar(quiet=False) as epochs:
        for second in range(0, 100, 10):
            now[0] = float(second)
            steps(Progress(100 + second, 1000, 0.25, 1.0, 2.0, None))  # went on at step 100
            epochs(second + 1, 1001)
            logging.getLogger("m3d").info("epoch", extra={"done": (second, 200)})
        logging.getLogger("m3d").info("said on a terminal only")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "130 of 1,000 steps, loss 0.25, about 14 min left"
    assert lines[1] == "31 of 1,001 epochs, about 16 min left"
    assert lines[2] == "30 of 200 epochs, about 3 min left" and len(lines) == 9


def test_warnings_are_printed_once_while_networks_are_trained(monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with training_bar(quiet=False):
        logging.getLogger("m3d").warning("memory is short")
        logging.getLogger("m3d").info("not this")
    assert capsys.readouterr().err == "memory is short\n"
