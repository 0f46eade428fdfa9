"""Files written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

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
    before = path.read_bytes() if path.exists() else b""
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


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable (not possible on every system, and then not needed)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
