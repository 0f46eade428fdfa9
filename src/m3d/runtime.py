"""On which device and with which arithmetic a run computes, and how its step is executed."""

from __future__ import annotations

import gc
import os
import platform
import shlex
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m3d.errors import M3DError, unknown
from m3d.version import __version__
from m3d.wording import counted

DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("auto", "fp16", "bf16", "tf32", "fp32")
STEP_MODES = ("auto", "eager", "compile")
_FP16_SCALE = 2.0**10
# Steps on CUDA from which compiling pays (LAB.md): for a step of library operations, and for one that our own kernels
# do most of, where 6 to 13 s more to begin with gain 0.07 to 0.12 ms of each.
COMPILE_FROM = 6_000
COMPILE_OWN_FROM = 100_000
_counting: ContextVar[bool] = ContextVar("counting", default=False)  # of memory


@dataclass(frozen=True)
class Runtime:
    """Device, precision and determinism. Norms, kernels and losses are float32 whatever the precision."""

    device: torch.device
    precision: str  # fp16, bf16, tf32 or fp32: what convolutions and matrix products of networks use
    deterministic: bool = False
    step_mode: str = "auto"

    @classmethod
    def choose(
        cls, device: str = "auto", precision: str = "auto", deterministic: bool = False, step_mode: str = "auto"
    ) -> Runtime:
        """Check the names and settle ``auto``: the GPU where there is one, bf16 there and fp32 on the CPU."""
        for kind, name, allowed in (("precision", precision, PRECISIONS), ("step mode", step_mode, STEP_MODES)):
            if name not in allowed:
                raise unknown(kind, name, allowed)
        chosen = _device(device)
        if precision == "auto":
            precision = "bf16" if chosen.type == "cuda" else "fp32"
        if precision in ("fp16", "tf32") and chosen.type == "cpu":
            raise M3DError(f"precision {precision!r} is for CUDA only; allowed on the CPU: bf16, fp32")
        device_share()  # refused before any work
        return cls(chosen, precision, deterministic, step_mode)

    @property
    def dtype(self) -> torch.dtype:
        return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.precision, torch.float32)

    @property
    def loss_scale(self) -> float:
        """What a loss is multiplied by, and its gradient divided by, so that small gradients survive in fp16.

        A power of two: it changes no bit of a gradient that needs no help.
        """
        return _FP16_SCALE if self.precision == "fp16" else 1.0

    def compiles(self, steps: int, least: float = COMPILE_FROM) -> bool:
        """Whether a step repeated ``steps`` times is worth compiling, one that pays from ``least`` of them."""
        if self.step_mode == "auto":
            return self.device.type == "cuda" and steps >= least
        return self.step_mode == "compile"

    @contextmanager
    def active(self) -> Iterator[None]:
        """Set PyTorch's global switches for this runtime, and put them back afterwards."""
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        before = (cudnn.allow_tf32, matmul.allow_tf32, cudnn.deterministic, cudnn.benchmark)
        strict = torch.are_deterministic_algorithms_enabled()
        if self.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        try:
            cudnn.allow_tf32 = self.precision != "fp32"
            matmul.allow_tf32 = False  # the Gram matrix loses too much to TF32
            cudnn.deterministic, cudnn.benchmark = self.deterministic, not self.deterministic
            torch.use_deterministic_algorithms(self.deterministic)
            with self._current(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # left off on purpose
                yield
        finally:
            cudnn.allow_tf32, matmul.allow_tf32, cudnn.deterministic, cudnn.benchmark = before
            torch.use_deterministic_algorithms(strict)

    def _current(self) -> AbstractContextManager[Any]:
        """Streams, recordings and our own kernels belong to the current device, so this one must be it."""
        return torch.cuda.device(self.device) if self.device.index is not None else nullcontext()

    @contextmanager
    def counting_memory(self) -> Iterator[None]:
        """Let :meth:`peak_memory` count from here on; work inside work that is counted is part of it."""
        if _counting.get():
            yield
            return
        began = _counting.set(True)
        try:
            if self.device.type == "cuda":
                gc.collect()  # earlier steps and trainers hold their memory in cycles
                torch.cuda.reset_peak_memory_stats(self.device)
            yield
        finally:
            _counting.reset(began)

    def wait(self) -> None:
        """Until the device has done what it was asked to."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_memory(self) -> int:
        """Bytes of device memory in use at most since counting began; 0 on the CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    def describe(self) -> dict[str, Any]:
        """What a result record says of the machine."""
        gpu, share = self.device.type == "cuda", device_share()
        return {
            "device": torch.cuda.get_device_name(self.device)
            if gpu
            else f"cpu, {counted(torch.get_num_threads(), 'threads')}",
            "precision": self.precision,
            "deterministic": self.deterministic,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "m3d": __version__,
            "commit": commit(),
            "command": shlex.join([Path(sys.argv[0]).stem.replace("__main__", "m3d"), *sys.argv[1:]]),
            **({"device_share": share} if share < 1 else {}),
        }


def _device(name: str) -> torch.device:
    """The device called ``name``: auto, cpu, cuda, or one of several GPUs (cuda:1)."""
    kind, colon, number = name.partition(":")
    if kind not in DEVICES or (colon and (kind != "cuda" or not number.isdecimal())):
        raise unknown("device", name, DEVICES)
    gpu = torch.cuda.is_available()
    if kind == "cuda" and not gpu:
        raise M3DError(f"device {name!r}: PyTorch sees no CUDA device here; allowed: auto, cpu")
    if colon and int(number) >= (many := torch.cuda.device_count()):
        raise M3DError(f"device {name!r}: PyTorch sees {counted(many, 'CUDA devices')} here, the first is cuda:0")
    if colon:
        return torch.device("cuda", int(number))
    return torch.device(("cuda" if gpu else "cpu") if kind == "auto" else kind)


def device_share() -> float:
    """The part of its device that this process has, where others compute on it too: ``M3D_DEVICE_SHARE``, else 1.

    Records keep it, for what was timed on a shared device took longer than it would alone.
    """
    given = os.environ.get("M3D_DEVICE_SHARE", "1")
    try:
        share = float(given)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise M3DError(f"M3D_DEVICE_SHARE={given!r} in the environment is not valid; allowed: above 0, at most 1")
    return share


def commit() -> str | None:
    """The source's git commit: ``M3D_COMMIT`` if set, else asked of git, with ``-dirty`` for a changed tree."""
    if given := os.environ.get("M3D_COMMIT"):
        return given
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) / "src" / "m3d" != here:
            return None  # installed into some other project's tree
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--", str(here)) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


class Repeated:
    """A function without arguments or result, called many times: on CUDA recorded once as a graph and then replayed.

    The first calls run as they are (libraries choose their algorithms, compilers compile); they are real calls, not
    rehearsals. The function must read and write tensors at fixed addresses and never wait for the host.
    """

    def __init__(self, function: Callable[[], None], runtime: Runtime, warmup: int = 3):
        self._function = function
        self._left = warmup
        self._captures = runtime.device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        elif not self._captures:
            self._function()
        elif self._left > 0:
            self._left -= 1
            self._on_side_stream()
        else:
            self._graph = self._recorded()  # only now: a recording that failed must not be replayed
            self._graph.replay()

    def _recorded(self) -> torch.cuda.CUDAGraph:
        # A recording takes memory of its own, and earlier trainers and steps hold theirs in cycles. PyTorch's capture
        # no longer collects garbage by itself, and should not be interrupted by it.
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=_side_stream(torch.cuda.current_device())):
                self._function()
        except RuntimeError as error:  # ending a failed recording fails too, and would hide why
            if isinstance(error.__context__, torch.OutOfMemoryError):
                raise error.__context__ from None
            raise
        return graph

    def _on_side_stream(self) -> None:
        """Capturing needs a warmed-up side stream: what a library sets up on first use may not be recorded."""
        stream = _side_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._function()
        torch.cuda.current_stream().wait_stream(stream)


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One stream for every warm-up and every recording: libraries keep state by stream, and refuse a mixture."""
    return torch.cuda.Stream(device)


def out_of_memory(error: RuntimeError) -> bool:
    """Whether ``error`` says that memory ran out; on the CPU only its message does."""
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)


def pick(buffer: Tensor, slot: Tensor) -> Tensor:
    """``buffer[slot]`` for a one-element index tensor: which row is read may change without the host knowing."""
    return buffer.index_select(0, slot)[0]


_deadline: ContextVar[float | None] = ContextVar("deadline", default=None)  # of time.monotonic()


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """What stops politely stops so many seconds from now, as if it had been asked to; None: no limit."""
    token = _deadline.set(None if seconds is None else time.monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


_asker: ContextVar[threading.Event | None] = ContextVar("asker", default=None)


@contextmanager
def stop_when(asked: threading.Event) -> Iterator[None]:
    """What stops politely stops when ``asked`` is set: for work that another process may ask to stop."""
    token = _asker.set(asked)
    try:
        yield
    finally:
        _asker.reset(token)


@contextmanager
def stop_politely() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C or SIGTERM into a request to stop after the current step; a second one is immediate.

    The end of a :func:`time_limit` is such a request too, and so is the event of :func:`stop_when`.
    """
    asked = _asker.get() or threading.Event()
    deadline = _deadline.get()
    if deadline is None:
        with _signals_ask(asked):
            yield asked
        return
    left = deadline - time.monotonic()
    if left <= 0:
        asked.set()  # at once, not when a timer's thread gets its turn
    timer = threading.Timer(min(max(0.0, left), threading.TIMEOUT_MAX / 2), asked.set)
    timer.daemon = True
    timer.start()
    try:
        with _signals_ask(asked):
            yield asked
    finally:
        timer.cancel()


@contextmanager
def _signals_ask(asked: threading.Event) -> Iterator[None]:
    """The first signal sets ``asked``; outside the main thread, which alone gets signals, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    signalled = threading.Event()

    def ask(number: int, frame: Any) -> None:
        if signalled.is_set():
            raise KeyboardInterrupt
        signalled.set()
        asked.set()

    try:
        for s in before:
            signal.signal(s, ask)
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
