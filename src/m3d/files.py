"""Files written whole or not at all, and read with suspicion: safetensors with checksums, JSON, never a pickle."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from m3d.errors import M3DError
from m3d.limits import MOST_JSON, check_safetensors, parse_json, plain_file

log = logging.getLogger(__name__)


def write_bytes(path: Path, content: bytes, keep: Path | None = None) -> None:
    """Replace ``path`` by ``content``: a reader sees the old file or the new one, never a part, even after a crash.

    With ``keep`` the old file stays under that name. It moves only when the new one is whole on the disk, so that at
    every moment, power cut or not, one of the two names holds a whole file.
    """
    try:
        _make_folder(path.parent)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(0o644)
            if keep is not None and path.exists():
                path.replace(keep)
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise M3DError(
            f"cannot write {str(path)!r}: {error.strerror or error}; what was there before is unchanged"
        ) from error


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


def append_line(path: Path, value: Any) -> None:
    """Add one JSON record to a file of lines; processes that do so at the same time wait for each other."""
    try:
        _make_folder(path.parent)
        with _alone_in(path.parent):
            sweep(path)
            before = path.read_bytes() if path.exists() else b""
            write_bytes(path, before + (json.dumps(value) + "\n").encode())
    except OSError as error:
        raise M3DError(f"cannot read {str(path)!r}: {error.strerror or error}") from error


def sweep(path: Path) -> None:
    """Remove what killed processes left of unfinished writes of ``path``; only for who alone writes it."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.????????"):
        with contextlib.suppress(OSError):
            leftover.unlink()


def read_json(path: Path) -> dict[str, Any]:
    plain_file(path, MOST_JSON)
    try:
        return parse_json(path.read_bytes(), repr(str(path)))
    except OSError as error:
        raise M3DError(f"cannot read {str(path)!r}: {error.strerror or error}") from error


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of a safetensors file, or an error that names it."""
    if not file.is_file():
        raise M3DError(f"{str(file)!r} does not exist; expected a condensed set or a run folder that holds one")
    check_safetensors(file)
    try:
        with safe_open(file, framework="pt") as handle:
            return {k: handle.get_tensor(k) for k in handle.keys()}, handle.metadata() or {}  # noqa: SIM118 (no iteration)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise M3DError(f"{str(file)!r} is not a whole safetensors file: {error}") from error


def read_row(file: Path, name: str, row: int) -> Tensor:
    """Row ``row`` of the tensor ``name`` in a safetensors file; nothing else of it is read."""
    try:
        with safe_open(file, framework="pt") as handle:
            part: Tensor = handle.get_slice(name)[row]
            return part
    except (SafetensorError, OSError, ValueError, IndexError) as error:
        raise M3DError(f"{str(file)!r}: row {row} of {name!r} cannot be read: {error}") from error


def write_checked(
    file: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any], keep: Path | None = None
) -> None:
    """Tensors and a JSON state in one file, both with checksums; ``keep`` as in :func:`write_bytes`."""
    plain = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
    sums = {"state_sha256": _digest(state), "sha256": {k: sha256(v) for k, v in plain.items()}}
    write_bytes(file, to_safetensors(plain, {"m3d": json.dumps({**state, **sums})}), keep)


def read_checked(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, state) of a file that :func:`write_checked` wrote, or an error that names it."""
    tensors, metadata = read_tensors(file)
    state = json_object(metadata, file)
    sums, state_sum = state.pop("sha256", None), state.pop("state_sha256", None)
    if state_sum not in (None, _digest(state)):  # None: files written before there was one
        raise M3DError(f"{str(file)!r}: its state does not match its checksum; the file was changed or torn")
    if sums != {k: sha256(v) for k, v in tensors.items()}:
        raise M3DError(f"{str(file)!r}: its tensors do not match their checksums; the file was changed or torn")
    return tensors, state


def read_newest(file: Path, previous: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """What :func:`read_checked` reads of ``file``, or of the one before if it is damaged; None if neither exists.

    A damaged newest file is set aside: left in its place, the next write would put it in the place of the whole one.
    """
    if not file.exists():
        return read_checked(previous) if previous.exists() else None
    try:
        return read_checked(file)
    except M3DError as error:
        if not previous.exists():
            raise
        found = read_checked(previous)
        log.warning("%s; going on from %r, the one before", error, previous.name)
    try:
        file.replace(set_aside(file))
    except OSError as error:
        raise M3DError(f"cannot rename {str(file)!r}: {error.strerror or error}") from error
    return found


def set_aside(file: Path) -> Path:
    """Where a damaged file is kept until its work is finished."""
    return file.with_name(file.name + ".damaged")


def json_object(metadata: Mapping[str, str], file: Path) -> dict[str, Any]:
    if "m3d" not in metadata:
        raise M3DError(f"{str(file)!r} carries no m3d manifest")
    return parse_json(metadata["m3d"], f"the manifest of {str(file)!r}")


def sha256(tensor: Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # NumPy has no bfloat16
    return hashlib.sha256(content.numpy().tobytes()).hexdigest()


def _digest(state: Mapping[str, Any]) -> str:
    """Of the JSON text, which reading and writing again does not change."""
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def _make_folder(folder: Path) -> None:
    """Make a folder with its parents; each is durable before anything is written below it."""
    missing = [f for f in (folder, *folder.parents) if not f.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)


def sync_tree(folder: Path) -> None:
    """Make all files below ``folder`` durable, so that renaming it shows all of it or nothing after a power cut."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process holds ``folder`` so; where the system has no such locks, at once."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Make the rename itself durable (not possible on every system, and then not needed)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
