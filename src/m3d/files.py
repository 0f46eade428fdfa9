"""Files written whole or not at all, and read with suspicion: safetensors with checksums, JSON, never a pickle."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from m3d.errors import M3DError


def write_bytes(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content``: a reader sees the old file or the new one, never a part, even after a crash."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(0o644)
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise M3DError(
            f"cannot write {str(path)!r}: {error.strerror or error}; what was there before is unchanged"
        ) from error


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


def append_line(path: Path, value: Any) -> None:
    """Add one JSON record to a file of lines."""
    try:
        before = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise M3DError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    write_bytes(path, before + (json.dumps(value) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise M3DError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    except ValueError as error:
        raise M3DError(f"{str(path)!r} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise M3DError(f"{str(path)!r} must hold a JSON object, got {type(value).__name__}")
    return value


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of a safetensors file, or an error that names it."""
    if not file.is_file():
        raise M3DError(f"{str(file)!r} does not exist; expected a condensed set or a run folder that holds one")
    try:
        with safe_open(file, framework="pt") as handle:
            return {k: handle.get_tensor(k) for k in handle.keys()}, handle.metadata() or {}  # noqa: SIM118 (no iteration)
    except (SafetensorError, OSError, ValueError) as error:
        raise M3DError(f"{str(file)!r} is not a whole safetensors file: {error}") from error


def read_row(file: Path, name: str, row: int) -> Tensor:
    """Row ``row`` of the tensor ``name`` in a safetensors file; nothing else of it is read."""
    try:
        with safe_open(file, framework="pt") as handle:
            part: Tensor = handle.get_slice(name)[row]
            return part
    except (SafetensorError, OSError, ValueError, IndexError) as error:
        raise M3DError(f"{str(file)!r}: row {row} of {name!r} cannot be read: {error}") from error


def write_checked(file: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Tensors and a JSON state in one file, with checksums."""
    plain = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
    sums = {k: sha256(v) for k, v in plain.items()}
    write_bytes(file, to_safetensors(plain, {"m3d": json.dumps({**state, "sha256": sums})}))


def read_checked(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, state) of a file that :func:`write_checked` wrote, or an error that names it."""
    tensors, metadata = read_tensors(file)
    state = json_object(metadata, file)
    sums = state.pop("sha256", None)
    if sums != {k: sha256(v) for k, v in tensors.items()}:
        raise M3DError(f"{str(file)!r}: its tensors do not match their checksums; the file was changed or torn")
    return tensors, state


def json_object(metadata: Mapping[str, str], file: Path) -> dict[str, Any]:
    try:
        value = json.loads(metadata["m3d"])
    except (KeyError, ValueError) as error:
        raise M3DError(f"{str(file)!r} carries no m3d manifest: {error}") from error
    if not isinstance(value, dict):
        raise M3DError(f"{str(file)!r}: the manifest must be a JSON object")
    return value


def sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable (not possible on every system, and then not needed)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
