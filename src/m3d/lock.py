"""Who works in a folder: a lock that names its process, and that a dead process cannot keep."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from m3d.errors import M3DError

log = logging.getLogger(__name__)
NAME = ".lock"
_LONGEST = 4096  # bytes of a lock file that are looked at


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock."""

    pid: int
    host: str
    began: str  # when the process began, as its system counts: tells it from a later one of the same number
    since: str  # when it took the lock, for people
    work: str

    @classmethod
    def this(cls, work: str) -> Owner:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(os.getpid(), platform.node(), began(os.getpid()) or "", now, work)

    def __str__(self) -> str:
        return f"{self.work} (process {self.pid} on {self.host}, since {self.since})"

    @property
    def gone(self) -> bool:
        """Whether it ran on this machine and does so no more; False where that cannot be known."""
        return self.host == platform.node() and began(self.pid) != self.began


@contextmanager
def claim(folder: Path, work: str, name: str = NAME) -> Iterator[None]:
    """Hold ``folder`` for ``work``, or raise an error that names the process which does.

    The system's own lock on the file makes taking it free of races and lets go when a process dies; the file's content
    names the owner, and is what counts on file systems that have no such locks.
    """
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = _take(path, Owner.this(work))
    except OSError as error:
        raise M3DError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # removed with its folder, perhaps
            path.unlink()
        os.close(handle)


def _take(path: Path, owner: Owner) -> int:
    """The open lock file, ours."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            free = _flock(handle)
            holder = _read(handle)
            if not free or (holder is not None and not holder.gone):
                raise _busy(path, holder, free)
            if not _is(handle, path):  # its owner removed it between our opening and locking it
                os.close(handle)
                continue
            if holder is not None:
                log.warning("%s ended without leaving %r; its lock is taken over", holder, str(path.parent))
            os.ftruncate(handle, 0)
            os.pwrite(handle, (json.dumps(asdict(owner)) + "\n").encode(), 0)
            os.fsync(handle)
            return handle
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(handle)
            raise


def _flock(handle: int) -> bool:
    """Whether nobody else has the system's lock; True where the system or the file system has none."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _is(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _read(handle: int) -> Owner | None:
    """The owner written in a lock file; None if there is none that can be read."""
    try:
        values = json.loads(os.pread(handle, _LONGEST, 0))
        owner = Owner(**values)
    except (ValueError, TypeError, RecursionError):
        return None
    texts = (owner.host, owner.began, owner.since, owner.work)
    return owner if type(owner.pid) is int and all(isinstance(t, str) for t in texts) else None


def _busy(path: Path, holder: Owner | None, free: bool) -> M3DError:
    where = str(path.parent)
    if holder is not None and free and holder.host != platform.node():
        return M3DError(f"{where!r} is in use by {holder}; if that process is gone, delete {str(path)!r} and try again")
    return M3DError(f"{where!r} is in use by {holder or 'another process'}; wait for it or choose another folder")


def began(pid: int) -> str | None:
    """When a process began, as a text that no other process of its number shares; None if there is none."""
    if pid < 1:
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return _began_elsewhere(pid)
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else f"{boot} {rest[18]}"  # field 22: clock ticks since the system began


def _began_elsewhere(pid: int) -> str | None:
    """The same on systems without /proc; an empty text where nobody tells, which counts as a living process."""
    try:
        told = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return told.stdout.strip() or None
