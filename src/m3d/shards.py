"""Which classes this process condenses, and how several processes act as one.

Classes that share nothing but the encoder may be spread over processes: a draw is a function of (seed, step, class), so
each process moves its own classes as one process would move them all. A process alone is the shard of everything.
Networks that are trained on the real data are spread likewise: each process trains its share, and is given the others'.
Processes talk through PyTorch's collectives: numbers on the CPU by gloo, tensors on GPUs by NCCL.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from itertools import count, pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from m3d.errors import M3DError
from m3d.runtime import Runtime

# A process that dies closes its connections and is noticed at once; this is for one that falls silent. It must outlast
# what the first process may do alone: judging the set, writing a checkpoint.
_PATIENCE = timedelta(minutes=30)
_REASON = 1000  # bytes of an error that the other processes are told


@dataclass(frozen=True)
class Ranks:
    """The processes of a run, started by ``torchrun``; one that was started alone is one of one."""

    rank: int = 0
    world: int = 1
    local: int = 0  # number on this machine
    restarts: int = 0  # how often torchrun has started them anew
    launched: bool = False  # whether by torchrun: then one process talks to itself just as several do to each other

    @classmethod
    def from_environment(cls) -> Ranks:
        """What ``torchrun`` says in the environment."""
        names = {"rank": "RANK", "world": "WORLD_SIZE", "local": "LOCAL_RANK", "restarts": "TORCHELASTIC_RESTART_COUNT"}
        found = {}
        for field_name, name in names.items():
            text = os.environ.get(name)
            if text is not None:
                if not text.isdigit():
                    raise M3DError(f"{name}={text!r} in the environment is not valid; torchrun sets it to a number")
                found[field_name] = int(text)
        launched = "TORCHELASTIC_RUN_ID" in os.environ
        if found.get("world", 1) <= 1:
            return cls(restarts=found.get("restarts", 0), launched=launched)
        if "rank" not in found or found["rank"] >= found["world"]:
            raise M3DError(
                f"WORLD_SIZE={found['world']} but RANK={found.get('rank')} in the environment; start m3d by torchrun"
            )
        return cls(**found, launched=launched)

    @property
    def alone(self) -> bool:
        """Whether there is nobody to talk to."""
        return self.world == 1 and not self.launched

    @property
    def leads(self) -> bool:
        """Whether this process writes files and reports."""
        return self.rank == 0

    def place(self, runtime: Runtime) -> Runtime:
        """The same runtime on this process's own GPU; on CPUs, and for one process, nothing changes."""
        if self.world == 1 or runtime.device.type != "cuda":
            return runtime
        have = torch.cuda.device_count()
        if self.local >= have:
            raise M3DError(f"process {self.local} of this machine has no GPU: it has {have}; lower --nproc-per-node")
        torch.cuda.set_device(self.local)  # streams and graphs belong to the current device
        return replace(runtime, device=torch.device("cuda", self.local))

    @contextmanager
    def together(self, runtime: Runtime, run: str) -> Iterator[None]:
        """In company of the other processes, which must have been asked for the same ``run``."""
        if self.alone:
            yield
            return
        ours = not dist.is_initialized()  # a program that brought its processes together keeps them so
        if ours:
            # Imported while a group exists (by the first switch of determinism), this module would keep it for ever in
            # its functions' default arguments, and gloo's threads would abort the process now and then as it ends.
            import torch.distributed.nn.functional  # noqa: F401

            backend = "cpu:gloo,cuda:nccl" if runtime.device.type == "cuda" else "gloo"
            with self._company():
                store = PrefixStore(f"m3d-{next(_runs)}", _store())
                dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world, timeout=_PATIENCE)
        try:
            number = int(hashlib.sha256(run.encode()).hexdigest()[:12], 16)  # 48 bits, exact in a float64
            highest, lowest = self.most(number, -number)
            if highest != -lowest:
                raise M3DError("the processes were started with different options or data; give all the same command")
            yield
        finally:
            if ours:  # here, not at exit: gloo's threads abort a process that ends with them
                dist.destroy_process_group()

    def most(self, *values: float) -> list[float]:
        """The largest of each value over all processes."""
        if self.alone:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)
        with self._company():
            dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return [float(number) for number in numbers]

    def any(self, flag: bool) -> bool:
        """Whether any process says so."""
        return bool(self.most(float(flag))[0])

    def meet(self) -> None:
        """Wait until all are here."""
        self.most(0.0)

    def told(self, value: float) -> float:
        """The first process's value."""
        if self.alone:
            return value
        number = torch.tensor(value, dtype=torch.float64)
        with self._company():
            dist.broadcast(number, 0)
        return float(number)

    def joined(self, part: Tensor, sizes: list[int]) -> Tensor:
        """The parts [sizes[rank], ...] of all processes one after the other, on every process."""
        if self.alone:
            return part
        longest = part.new_zeros(max(sizes), *part.shape[1:])  # collectives take equal shapes
        longest[: len(part)] = part
        parts = [torch.empty_like(longest) for _ in sizes]
        with self._company():
            dist.all_gather(parts, longest)
        return torch.cat([p[:size] for p, size in zip(parts, sizes, strict=True)])

    def given(self, tensor: Tensor) -> Tensor:
        """The first process's tensor; the others bring one of the same shape, kind and device to be filled."""
        if self.alone:
            return tensor
        content = tensor.contiguous()
        with self._company():
            dist.broadcast(content, 0)
        return content

    def share(self, count: int) -> range:
        """Which of ``count`` things are this process's; none, where there are more processes than things."""
        return split(range(count), self.world)[self.rank]

    def workers(self, count: int) -> int:
        """How many processes have a share of ``count`` things."""
        return min(count, self.world)

    def gathered(self, part: Tensor, count: int) -> Tensor:
        """[count, ...] of the processes' own shares ``part`` [share, ...]; every process must ask."""
        return self.joined(part, [len(share) for share in split(range(count), self.world)])

    @contextmanager
    def alike(self) -> Iterator[None]:
        """What fails in one process ends in all: there with its own error, elsewhere with one that repeats it."""
        if self.alone:
            yield
            return
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        failed = int(self.most(-1 if failure is None else self.rank)[0])
        if failed < 0:
            return
        reason = self._reason(failure, failed)
        raise failure or M3DError(f"process {failed} of {self.world} failed, and with it the run: {reason}")

    def _reason(self, failure: Exception | None, failed: int) -> str:
        """The first words of process ``failed``'s error, on every process."""
        name = "" if isinstance(failure, M3DError) else f"{type(failure).__name__}: "
        text = f"{name}{failure}".encode()[:_REASON]
        told = torch.tensor(list(text.ljust(_REASON)), dtype=torch.uint8)
        with self._company():
            dist.broadcast(told, failed)
        return bytes(told.tolist()).decode(errors="ignore").strip()

    @contextmanager
    def _company(self) -> Iterator[None]:
        """An error of a collective means that another process is gone: say so, and what to do."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # Its first sentence, without the place in gloo's source that it begins with.
            reason = re.sub(r"^\[[^]]*\] *", "", str(error).strip()).splitlines()[0].split(". ")[0]
            raise M3DError(
                f"process {self.rank} of {self.world}: another process of this run has stopped or cannot be reached "
                f"({reason}); a run with a checkpoint goes on by --resume, with any number of processes"
            ) from error


_runs = count()  # runs of one process one after the other, the same number in all


@cache
def _store() -> Store:
    """Where processes first find each other: the address that torchrun gave them."""
    store: Store = next(iter(rendezvous("env://", timeout=_PATIENCE)))[0]
    return store


def split(classes: range, parts: int) -> list[range]:
    """``classes`` in ``parts`` consecutive stretches whose lengths differ by one at most."""
    edges = [classes.start + len(classes) * k // parts for k in range(parts + 1)]
    return [range(first, last) for first, last in pairwise(edges)]


@dataclass(frozen=True)
class Shard:
    """The classes of a run, and which of them are this process's."""

    run: range  # all classes condensed at the same time: those of the dataset, or of a sub-task
    ranks: Ranks = field(default_factory=Ranks)
    at_once: int | None = None  # classes that go through a network together, at most; None: as many as suit the device

    def __post_init__(self) -> None:
        if len(self.run) < self.ranks.world:
            raise M3DError(
                f"{self.ranks.world} processes cannot share {len(self.run)} class(es), each needs one; "
                f"lower --nproc-per-node or --subtasks"
            )

    @property
    def mine(self) -> range:
        return split(self.run, self.ranks.world)[self.ranks.rank]

    @property
    def rows(self) -> slice:
        """Where this process's classes lie in a tensor of the run's."""
        return slice(self.mine.start - self.run.start, self.mine.stop - self.run.start)

    def whole(self, part: Tensor) -> Tensor:
        """[run classes, ...] of the processes' own ``part`` [own classes, ...]; every process must ask."""
        return self.ranks.gathered(part, len(self.run))
