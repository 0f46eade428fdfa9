"""Decoded images kept on the disk, in class order: made once by several processes, mapped into memory ever after.

A cache is a folder ``images/KEY`` below ``$M3D_CACHE`` (else ``~/.cache/m3d``): a file of pixels for each split and a
manifest. It is built as ``KEY.building`` and renamed when it is whole. A chunk of images is done when its pixels, then
its bad images, then its mark have reached the disk, so a build that was killed goes on where it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from m3d.data.classes import ClassData, channel_statistics
from m3d.data.streamed import HostImages, StreamedData
from m3d.errors import M3DError
from m3d.files import read_json, write_json
from m3d.wording import option

if TYPE_CHECKING:
    from m3d.data.ingest import Source, Task

log = logging.getLogger(__name__)
_CHUNK_BYTES = 2**22  # of pixels that a process decodes, writes and makes durable at once
_SPLITS = ("train", "test")


def root() -> Path:
    """Where decoded images and reports of bad ones are kept: ``$M3D_CACHE``, else ``~/.cache/m3d``."""
    given = os.environ.get("M3D_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "m3d"


def exists(key: str) -> bool:
    return (_home(key) / "manifest.json").exists()


def _home(key: str) -> Path:
    return root() / "images" / key


def opened(key: str, sources: tuple[Source, Source]) -> tuple[list[ClassData], list[dict[int, str]]]:
    """The splits of a whole cache, left on the disk; and the bad images of each, by number."""
    home, parts, bads = _home(key), [], []
    manifest = read_json(home / "manifest.json")
    try:
        shape = tuple(int(side) for side in manifest["shape"])
        for split, source in zip(_SPLITS, sources, strict=True):
            entry = manifest["splits"][split]
            bad = {int(index): str(reason) for index, reason in entry["bad"]}
            host = HostImages.mapped(home / f"{split}.pixels", (len(source), *shape))
            rows = np.delete(np.arange(len(source)), sorted(bad)) if bad else None
            known = str(entry["fingerprint"]), (tuple(entry["mean"]), tuple(entry["std"]))
            parts.append(StreamedData(host, good_count(source, bad), rows, known=known))
            bads.append(bad)
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise M3DError(f"{home}: the cache is damaged ({error}); delete this folder, and it is made again") from error
    return [*parts], bads


def good_count(source: Source, bad: dict[int, str]) -> np.ndarray:
    """[C]: how many images of each class are left without the ``bad`` ones."""
    classes = np.searchsorted(np.cumsum(source.count), np.array(sorted(bad), np.int64), side="right")
    left: np.ndarray = source.count - np.bincount(classes, minlength=len(source.count))
    return left


def build(key: str, task: Task) -> None:
    """Decode both splits into the cache, or what an earlier build has left to do."""
    home = _home(key)
    building = home.with_name(f"{key}.building")
    try:
        building.mkdir(parents=True, exist_ok=True)
        with _alone(home.with_name(f"{key}.lock")):
            if exists(key):
                return
            building.mkdir(exist_ok=True)
            _require_space(building, task)
            entries, done, total = {}, 0, len(task.train) + len(task.test)
            for split, source in zip(_SPLITS, (task.train, task.test), strict=True):
                report = _shifted(task.handling.progress, done, total)
                bad = _Split(building / f"{split}.pixels", source, task).decode(report)
                entries[split] = _entry(building / f"{split}.pixels", source, task, bad)
                done += len(source)
            write_json(building / "manifest.json", {"format": 1, "shape": list(task.shape), "splits": entries})
            for mark in building.glob("*.pixels.*"):  # what only a build needs
                mark.unlink()
            building.rename(home)
    except OSError as error:
        raise M3DError(
            f"cannot write the cache {str(building)!r}: {error.strerror or error}; name another place with the "
            f"environment variable M3D_CACHE, or keep all images in memory with {option('resident', 'yes')}"
        ) from error


def _shifted(progress: Callable[[int, int], None] | None, before: int, total: int) -> Callable[[int], None]:
    return lambda done: None if progress is None else progress(before + done, total)


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time builds; the lock vanishes with the process that holds it, however it ends."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("another process is decoding these images; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _require_space(building: Path, task: Task) -> None:
    """Say before the first image that the disk is too small, not after the last that fits."""
    need = (len(task.train) + len(task.test)) * int(np.prod(task.shape))
    need -= sum(file.stat().st_blocks * 512 for file in building.glob("*.pixels"))
    free = shutil.disk_usage(building).free
    if need > free:
        raise M3DError(
            f"the decoded images need {need / 1e9:.1f} GB more, and {building.parent} has {free / 1e9:.1f} GB free; "
            f"lower {option('size')}, or name another place with the environment variable M3D_CACHE"
        )


def _entry(file: Path, source: Source, task: Task, bad: dict[int, str]) -> dict[str, Any]:
    """What the manifest says of a split."""
    host = HostImages.mapped(file, (len(source), *task.shape))
    rows = np.delete(np.arange(len(source)), sorted(bad)) if bad else None
    data = StreamedData(host, good_count(source, bad), rows)
    mean, std = channel_statistics(data.chunks())
    return {"bad": sorted(bad.items()), "fingerprint": data.fingerprint, "mean": mean, "std": std}


class _Split:
    """The decoding of one split: chunks that are not yet done go to processes, one thread here beside each."""

    def __init__(self, file: Path, source: Source, task: Task):
        self.file, self.source, self.task = file, source, task
        self.chunk = max(1, _CHUNK_BYTES // int(np.prod(task.shape)))
        self.chunks = -(-len(source) // self.chunk)
        self.marks = file.with_name(f"{file.name}.done")  # a byte for each chunk
        self.notes = file.with_name(f"{file.name}.bad")  # a line of JSON for each chunk that has bad images
        self._reading = threading.Lock()  # a source need not be safe for several threads

    def decode(self, report: Callable[[int], None]) -> dict[int, str]:
        """Decode what is not done; the bad images of the whole split."""
        with self.file.open("ab") as file:
            file.truncate(len(self.source) * int(np.prod(self.task.shape)))
        with self.marks.open("ab") as file:
            file.truncate(self.chunks)
        marks = np.frombuffer(self.marks.read_bytes(), np.uint8)
        todo = np.flatnonzero(marks == 0).tolist()
        done = len(self.source) - sum(self._size(k) for k in todo)
        report(done)
        workers = _Workers(min(len(todo), os.cpu_count() or 1), self._task())
        try:
            with ThreadPoolExecutor(max(1, len(workers))) as pool:
                futures = {pool.submit(self._one, workers, k): k for k in todo}
                try:
                    for future in as_completed(futures):
                        k = futures.pop(future)
                        self._keep(k, future.result())
                        report(done := done + self._size(k))
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
        finally:
            workers.close()
        report(len(self.source))
        return self._bad()

    def _size(self, k: int) -> int:
        return min(self.chunk, len(self.source) - k * self.chunk)

    def _task(self) -> dict[str, Any]:
        look = self.task.look
        return {"file": str(self.file), "shape": self.task.shape, "grey": look.grey, "size": look.size}

    def _one(self, workers: _Workers, k: int) -> dict[str, Any]:
        """Have one chunk decoded by whichever process is free."""
        first = k * self.chunk
        with self._reading:
            images = self.source.encoded(first, first + self._size(k))
        return workers.ask(first, images, self.source.name)

    def _keep(self, k: int, reply: dict[str, Any]) -> None:
        """Write down that a chunk is done, its bad images first."""
        if "error" in reply:
            raise OSError(0, reply["error"])
        if reply["odd"]:
            number, width, height = reply["odd"][0]
            raise self.task.odd(self.source.name(number), width, height)
        if reply["bad"]:
            with self.notes.open("ab") as notes:
                notes.write(b"\n" + json.dumps(reply["bad"]).encode() + b"\n")  # a torn line before it stays alone
                notes.flush()
                os.fsync(notes.fileno())
        with self.marks.open("r+b") as marks:
            marks.seek(k)
            marks.write(b"\1")
            marks.flush()
            os.fsync(marks.fileno())

    def _bad(self) -> dict[int, str]:
        bad: dict[int, str] = {}
        for line in self.notes.read_bytes().splitlines() if self.notes.exists() else []:
            with contextlib.suppress(ValueError):  # torn by a crash: its chunk had no mark and was decoded again
                bad |= {int(index): str(reason) for index, reason in json.loads(line)}
        return bad


class _Workers:
    """Decoding processes. They are told what to do through pipes, so nothing of the caller's program runs in them."""

    def __init__(self, many: int, task: dict[str, Any]):
        home = str(Path(__file__).parents[2])  # where this package lies
        path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._all: list[subprocess.Popen[bytes]] = []
        self._free: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        for _ in range(many):
            worker = subprocess.Popen(
                [sys.executable, "-m", "m3d.decode"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
            )
            self._all.append(worker)
            self._free.put(worker)
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(task).encode() + b"\n")

    def __len__(self) -> int:
        return len(self._all)

    def ask(self, first: int, images: Any, name: Callable[[int], str]) -> dict[str, Any]:
        """The reply of a free process to one chunk."""
        worker = self._free.get()
        assert worker.stdin is not None and worker.stdout is not None
        contents = b"".join(image for image in images if isinstance(image, bytes))
        by_path = isinstance(images[0], str)
        chunk = {"first": first, **({"paths": images} if by_path else {"sizes": [len(image) for image in images]})}
        try:
            worker.stdin.write(json.dumps(chunk).encode() + b"\n" + contents)
            worker.stdin.flush()
            reply: dict[str, Any] = json.loads(worker.stdout.readline())
        except (OSError, ValueError) as error:
            raise M3DError(
                f"a decoding process ended with code {worker.wait()} on one of the {len(images)} images from "
                f"{name(first)} on; run the same command to go on"
            ) from error
        finally:
            self._free.put(worker)  # a dead one too: whoever asks it next fails at once, and waits for nothing
        return reply

    def close(self) -> None:
        """End the processes: they stop when their input does."""
        for worker in self._all:
            assert worker.stdin is not None and worker.stdout is not None
            with contextlib.suppress(OSError):
                worker.stdin.close()
            worker.stdout.close()
            worker.wait()
