"""What a stranger's file may be: a plain file, not too large, its JSON not too deep, its header true to its size."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

from m3d.errors import M3DError

MOST_JSON = 2**24  # bytes of a JSON file or of a safetensors header: a thousand classes take some hundred kilobytes
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_DEEPEST = 64
_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


def plain_file(path: Path, most: int | None = None) -> int:
    """The size of ``path``, which must be a plain file (a pipe would wait for ever) of at most ``most`` bytes."""
    try:
        about = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise M3DError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(about.st_mode):
        raise M3DError(f"{str(path)!r} is not a plain file")
    if most is not None and about.st_size > most:
        raise M3DError(f"{str(path)!r} has {about.st_size} bytes; allowed: at most {most}")
    return about.st_size


def parse_json(text: str | bytes, where: str) -> dict[str, Any]:
    """The JSON object in ``text``: at most 16 MiB, at most 64 levels deep."""
    if len(text) > MOST_JSON:
        raise M3DError(f"{where}: {len(text)} characters of JSON; allowed: at most {MOST_JSON}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise M3DError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise M3DError(f"{where} must hold a JSON object, got {type(value).__name__}")
    if not _shallow(value):
        raise M3DError(f"{where}: its JSON is nested more than {_DEEPEST} levels deep")
    return value


def _shallow(value: Any) -> bool:
    """Whether nothing lies deeper than allowed; level by level, for a deep value must not exhaust the stack here."""
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        inner = [v for v in level if isinstance(v, dict | list)]
        if not inner:
            return True
        level = [v for part in inner for v in (part.values() if isinstance(part, dict) else part)]
    return False


def check_safetensors(file: Path) -> None:
    """Raise if the header of a safetensors file does not fit the file: checked before anything is read by it."""
    size = plain_file(file)
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(MOST_JSON, size - 8):
                raise M3DError(f"{_not_whole(file)}: {size} bytes with a header said to be {length} bytes long")
            content = stream.read(length)
    except OSError as error:
        raise M3DError(f"cannot read {str(file)!r}: {error.strerror or error}") from error
    header = parse_json(content, f"the header of {str(file)!r}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise M3DError(f"{_not_whole(file)}: its metadata are not texts")
    data = sum(_tensor_bytes(name, entry, file) for name, entry in header.items())
    if data != size - 8 - length:
        raise M3DError(f"{_not_whole(file)}: {size - 8 - length} bytes of data, but {data} in the header")


def _tensor_bytes(name: str, entry: Any, file: Path) -> int:
    """How many bytes a header's entry stands for."""
    entry = entry if isinstance(entry, dict) else {}
    shape, kind, span = entry.get("shape"), entry.get("dtype"), entry.get("data_offsets")
    if not isinstance(kind, str) or kind not in _BYTES:
        raise M3DError(f"{str(file)!r}: the tensor {name!r} is of type {kind!r}; allowed: {', '.join(_BYTES)}")
    for numbers in (shape, span):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 2**48 for n in numbers):
            raise M3DError(f"{_not_whole(file)}: the tensor {name!r} has shape {shape!r} at {span!r}")
    size: int = math.prod(shape) * _BYTES[kind]
    if len(shape) > 8 or len(span) != 2 or span[1] - span[0] != size:
        raise M3DError(f"{_not_whole(file)}: the tensor {name!r} has shape {shape!r} at {span!r}")
    return size


def _not_whole(file: Path) -> str:
    return f"{str(file)!r} is not a whole safetensors file"
