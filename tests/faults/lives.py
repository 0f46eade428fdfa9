"""Processes that live for a while and are killed: forked from one that has imported everything and computed nothing.

A child writes slowly, so that a kill often falls into a write, and notes in memory it shares with its parent where it
is. All of this is done to the child from outside; the package has no hook for it.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import mmap
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

_PIECES = 4  # a file is written in so many parts


class Notes:
    """Counters that outlive the child that writes them."""

    NAMES = ("writing", "between", "checkpoints", "fell_back", "locks", "first")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * len(self.NAMES))

    def __getitem__(self, name: str) -> int:
        return struct.unpack_from("q", self._memory, 8 * self.NAMES.index(name))[0]

    def __setitem__(self, name: str, value: int) -> None:
        struct.pack_into("q", self._memory, 8 * self.NAMES.index(name), value)


class _SlowFile:
    """A file whose content arrives in pieces."""

    def __init__(self, file, pause: float):
        self._file, self._pause = file, pause

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self._file.close()

    def write(self, content: bytes) -> None:
        size = max(1, -(-len(content) // _PIECES))
        for start in range(0, len(content), size):
            self._file.write(content[start : start + size])
            self._file.flush()
            time.sleep(self._pause)

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()


def slow_down(notes: Notes, pause: float) -> None:
    """Make this process write slowly and note what it does. Never undone: the process is a throw-away."""
    import m3d.files

    write, read = m3d.files.write_bytes, m3d.files.read_checked
    replace, open_file, sync = os.replace, os.fdopen, os.fsync

    def watched(path, content, keep=None):
        notes["writing"] = int(keep is not None)  # only checkpoints keep the file before
        if notes["writing"] and not notes["first"]:
            notes["first"] = time.monotonic_ns()
        write(path, content, keep)
        notes["checkpoints"] += notes["writing"]
        notes["writing"] = 0

    def watched_reading(file):
        found = read(file)
        notes["fell_back"] += ".previous." in file.name
        return found

    def slow_replace(source, target):
        replace(source, target)
        notes["between"] = int(".previous." in Path(target).name)
        time.sleep(pause)

    def slow_sync(handle):
        sync(handle)
        time.sleep(pause)

    m3d.files.write_bytes, m3d.files.read_checked = watched, watched_reading
    os.replace, os.fsync = slow_replace, slow_sync
    os.fdopen = lambda handle, mode: _SlowFile(open_file(handle, mode), pause)
    logging.getLogger("m3d").addHandler(_Listener(notes))
    logging.getLogger("m3d").propagate = False


class _Listener(logging.Handler):
    def __init__(self, notes: Notes):
        super().__init__(logging.WARNING)
        self.notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        self.notes["locks"] += "its lock is taken over" in record.getMessage()


def import_beforehand(work: Callable[[Path], None], folder: Path) -> None:
    """Import here what ``work`` imports, so that lives are spent on work: a child does it in ``folder`` and tells."""
    names = folder / "modules"

    def tell() -> None:
        work(folder)
        names.write_text("\n".join(sys.modules))

    live(tell, Notes(), 0.0, None)
    for name in names.read_text().splitlines():
        with contextlib.suppress(Exception):  # some modules are made by others, and are not to be imported
            importlib.import_module(name)


def live(job: Callable[[], None], notes: Notes, pause: float, seconds: float | None) -> bool:
    """Run ``job`` in a child for at most ``seconds``; True if it finished, False if it was killed."""
    notes["writing"] = notes["between"] = notes["first"] = 0
    child = os.fork()
    if child == 0:
        try:
            slow_down(notes, pause)
            job()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if end is not None and time.monotonic() >= end:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            break
        time.sleep(0.001)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return False
    if status != 0:
        raise SystemExit("a process failed instead of going on; its error is above")
    return True
