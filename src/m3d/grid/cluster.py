"""Cells made across a Ray cluster. Run folders lie on storage that driver and workers see; records come back by Ray.

A worker is a process of its own with its share of CPUs and GPUs; it makes one cell after the other and keeps the data
loaded. Only the driver writes records. A worker that is lost is replaced and its cell tried again: what it had made
lies in the run folder, and is continued.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from platform import node
from typing import Any

from m3d.errors import Interrupted, M3DError
from m3d.grid.cells import Cell, Overrides, cell_digest, folders
from m3d.grid.runner import Attempt, Order
from m3d.grid.work import Measure, Place, Watch, Workshop
from m3d.registry import load_plugin, loaded_plugins
from m3d.runtime import stop_when
from m3d.watch import Progress
from m3d.wording import typed

_CONNECT_SECONDS = 5.0
_LOOK_SECONDS = 0.5
_STOP_SECONDS = 120.0  # what workers are given to write their checkpoints when the work is to stop
_TOKEN = ".shared"  # a file of the output folder by which a worker knows that it sees the driver's
_PASSED = ("M3D_DATA", "M3D_CACHE", "M3D_COMMIT")  # the environment that decides where data lie and what is recorded


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """The module ``ray``, connected: as the program is already, to ``address``, to $RAY_ADDRESS, or to this machine."""
    try:
        import ray
    except ImportError:
        raise M3DError("--on ray needs the package ray: pip install 'm3d[ray]'; or leave --on at local") from None
    output: Any = _Aside(sys.stdout)
    with redirect_stdout(output):
        if ray.is_initialized():
            yield ray
            return
        with _session(ray, address):
            yield ray


@contextmanager
def _session(ray: Any, address: str | None) -> Iterator[None]:
    """A connection of our own, closed at the end."""
    if address is not None:
        _require_listening(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody unless the user wants it
    own = {} if address or os.environ.get("RAY_ADDRESS") else {"include_dashboard": False}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **own)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise M3DError(f"--on ray: no connection to {address or 'a cluster on this machine'}: {error}; one that asks "
                       f"for a token needs RAY_AUTH_MODE and RAY_AUTH_TOKEN in the environment") from error  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()


def _require_listening(address: str) -> None:
    """Raise at once where nobody listens: Ray itself keeps trying for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return  # auto, or a name that Ray resolves itself
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise M3DError(f"--on ray: nobody listens at {address}: {error}") from error


class _Aside:
    """Standard output without what Ray's own threads say of lost workers: that goes to standard error."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> Any:
        aside = threading.current_thread().name.startswith("ray_")
        return (sys.stderr if aside else self._stream).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@dataclass(frozen=True)
class _Setup:
    """All that a worker is told once."""

    place: Place
    overrides: Overrides
    measures: Mapping[str, Measure]
    token: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    plugins: tuple[Path, ...]


class CellWorker:
    """Makes cells in a process of the cluster; asked beside that how far it is, and to stop."""

    def __init__(self, setup: _Setup):
        self._setup, self._asked, self._state = setup, threading.Event(), "starts"
        sys.argv = list(setup.command)  # what records say they were made by
        os.environ.update(setup.environment)
        for plugin in setup.plugins:
            load_plugin(plugin)
        self._workshop: Workshop | None = None

    def make(self, cell: Cell) -> tuple[str, Any]:
        """("made", record), ("refused", why) or ("stopped", where)."""
        self._state = "loads data"
        try:
            with stop_when(self._asked), typed():  # a command began it, somewhere else
                return "made", self._open().make(cell)
        except Interrupted as stop:
            return "stopped", str(stop)
        except M3DError as error:
            return "refused", str(error)

    def look(self) -> str:
        return self._state

    def stop(self) -> None:
        self._asked.set()

    def _open(self) -> Workshop:
        setup = self._setup
        file = setup.place.out / _TOKEN
        if not file.is_file() or file.read_text() != setup.token:
            raise M3DError(f"{node()} does not see {str(setup.place.out)!r} of the driver; --out must be on storage "
                           f"that all workers share, at the same path")  # fmt: skip
        if self._workshop is None:
            watch = Watch(self._steps, self._epochs, self._asked.is_set)
            self._workshop = Workshop(setup.place, setup.overrides, watch, setup.measures)
        return self._workshop

    def _steps(self, progress: Progress) -> None:
        self._state = f"step {progress.step} of {progress.steps}"

    def _epochs(self, epoch: int, epochs: int) -> None:
        self._state = f"epoch {epoch} of {epochs}"


class Cluster:
    """The workers of a Ray cluster: as many as its nodes have room for when the work begins."""

    def __init__(self, ray: Any, *, cpus: float, gpus: float | None, retries: int, device: str):
        self.ray, self.retries = ray, retries
        nodes = [n["Resources"] for n in ray.nodes() if n["Alive"]]
        usable = device != "cpu" and any(n.get("GPU", 0) for n in nodes)
        gpus = float(usable) if gpus is None else gpus
        self.share = {"num_cpus": cpus, "num_gpus": gpus}
        self.environment = {"M3D_DEVICE_SHARE": str(gpus)} if 0 < gpus <= 0.5 else {}  # for the records
        self.width = sum(_room(n, cpus, gpus) for n in nodes)
        if not self.width:
            raise M3DError(f"no node of the cluster has the {cpus:g} CPUs and {gpus:g} GPUs that a cell asks for "
                           f"(--cpus-per-cell, --gpus-per-cell)")  # fmt: skip

    def make(self, order: Order) -> Iterator[Attempt]:
        crew = _Crew(self, order)
        try:
            yield from crew.work()
        finally:
            crew.dismiss()


def _room(resources: Mapping[str, float], cpus: float, gpus: float) -> int:
    """How many cells a node takes at a time."""
    asked = ((resources.get("CPU", 0.0), cpus), (resources.get("GPU", 0.0), gpus))
    return min(math.floor(there / wanted + 1e-9) for there, wanted in asked if wanted)


@dataclass
class _Flight:
    """A cell at work."""

    cell: Cell
    worker: Any
    began: float
    looking: Any = None  # the answer to how far it is, on its way
    state: str = ""


class _Crew:
    """The workers of one call, and who does what."""

    def __init__(self, cluster: Cluster, order: Order):
        self._ray, self._cluster, self._order = cluster.ray, cluster, order
        self._waiting = list(order.todo)
        self._tries: dict[str, int] = {}  # by key: how often a cell was begun
        self._starting: dict[Any, Any] = {}  # the worker's first answer -> the worker
        self._idle: list[Any] = []
        self._flights: dict[Any, _Flight] = {}
        self._lost_starting = 0
        self._setup = self._told()
        self._remote = self._ray.remote(CellWorker).options(max_concurrency=2, **cluster.share)

    def work(self) -> Iterator[Attempt]:
        while (self._waiting or self._flights) and not self._order.stopping.is_set():
            self._hire()
            yield from self._hand_out()
            awaited = [*self._flights, *self._starting]
            ready = self._ray.wait(awaited, timeout=_LOOK_SECONDS)[0] if awaited else []
            for reference in ready:
                if reference in self._starting:
                    self._welcome(reference)
                else:
                    yield from self._take(reference)
            self._look()
        if self._flights:
            yield from self._stop()

    def dismiss(self) -> None:
        """Let go of the workers and what they hold."""
        workers = [*self._idle, *self._starting.values(), *(f.worker for f in self._flights.values())]
        for worker in workers:
            self._ray.kill(worker)
        (self._setup.place.out / _TOKEN).unlink(missing_ok=True)

    def _told(self) -> _Setup:
        job = self._order.job
        out, root = job.place.out.resolve(), job.place.data_root
        place = replace(job.place, out=out, data_root=None if root is None else root.expanduser().resolve())
        token = f"{node()} {os.getpid()} {time.time_ns()}"
        (out / _TOKEN).write_text(token)
        environment = {name: os.environ[name] for name in _PASSED if name in os.environ}
        environment |= self._cluster.environment
        plugins = tuple(dict.fromkeys(path.resolve() for path in loaded_plugins()))
        return _Setup(place, job.journal.overrides, job.measures, token, tuple(sys.argv), environment, plugins)

    def _hire(self) -> None:
        """Start as many workers as there is room for and work to do."""
        here = len(self._idle) + len(self._starting) + len(self._flights)
        for _ in range(min(self._cluster.width, len(self._waiting) + len(self._flights)) - here):
            worker = self._remote.remote(self._setup)
            self._starting[worker.look.remote()] = worker

    def _welcome(self, reference: Any) -> None:
        """A worker has started, or could not."""
        worker = self._starting.pop(reference)
        try:
            self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            self._lost_starting += 1
            if self._lost_starting > self._cluster.retries:
                raise M3DError(f"a worker could not start: {_reason(error)}") from error
            return
        self._idle.append(worker)

    def _hand_out(self) -> Iterator[Attempt]:
        """Give every idle worker a cell; those that would write to a folder in use wait."""
        overrides, known = self._order.job.journal.overrides, self._order.job.journal.of
        busy = {name for f in self._flights.values() for name in _claims(f.cell, overrides)}
        for cell in list(self._waiting):
            claims = _claims(cell, overrides)
            if not self._idle or busy & claims:
                continue
            self._waiting.remove(cell)
            busy |= claims
            if cell.key not in self._tries:
                self._order.begin(cell)
            if (record := known(cell)) is not None:  # another cell of the same content has just been made
                yield Attempt(cell, record, 0.0)
                continue
            worker = self._idle.pop()
            self._tries[cell.key] = self._tries.get(cell.key, 0) + 1
            self._flights[worker.make.remote(cell)] = _Flight(cell, worker, time.monotonic())

    def _take(self, reference: Any) -> Iterator[Attempt]:
        """What came back, if anything did."""
        flight = self._flights.pop(reference)
        seconds = time.monotonic() - flight.began
        try:
            kind, value = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:  # the worker was lost, or failed in a way that is not foreseen
            self._ray.kill(flight.worker)  # a device that failed once is not used again by the same process
            yield from self._lost(flight, _reason(error), seconds)
            return
        self._idle.append(flight.worker)
        if kind == "made":
            yield Attempt(flight.cell, value, seconds)
        elif kind == "refused":  # the user's to mend: it would be the same again
            yield Attempt(flight.cell, M3DError(value), seconds)

    def _lost(self, flight: _Flight, reason: str, seconds: float) -> Iterator[Attempt]:
        tries = self._tries[flight.cell.key]
        if tries <= self._cluster.retries:
            self._order.listener.again(flight.cell, reason)
            self._waiting.insert(0, flight.cell)
            return
        yield Attempt(flight.cell, M3DError(f"{reason} (tried {tries} times; see --retries)"), seconds)

    def _look(self) -> None:
        """Ask how far the cells are, without waiting for an answer."""
        for flight in self._flights.values():
            if flight.looking is not None and self._ray.wait([flight.looking], timeout=0)[0]:
                try:
                    flight.state, flight.looking = self._ray.get(flight.looking), None
                except self._ray.exceptions.RayError:  # lost: its cell will say so
                    continue
            if flight.looking is None:
                flight.looking = flight.worker.look.remote()
        self._order.listener.running({f.cell.key: f.state for f in self._flights.values()})

    def _stop(self) -> Iterator[Attempt]:
        """Let the cells at work write their checkpoints; those that finish meanwhile count."""
        for flight in self._flights.values():
            flight.worker.stop.remote()
        until = time.monotonic() + _STOP_SECONDS
        while self._flights and time.monotonic() < until:
            for reference in self._ray.wait(list(self._flights), timeout=_LOOK_SECONDS)[0]:
                yield from (a for a in self._take(reference) if not isinstance(a.outcome, M3DError))


def _claims(cell: Cell, overrides: Overrides) -> set[str]:
    """What only one worker at a time may make: the cell's outcome, and the folders it writes to."""
    return {cell_digest(cell, overrides), *folders(cell, overrides)}


def _reason(error: Exception) -> str:
    """The last line of what Ray says, which names what happened; the traceback above it is in Ray's own log."""
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {said[-1] if said else 'nothing is known of it'}"
