"""An .npz archive read with suspicion: what each array takes is checked against the file before memory is asked for."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from m3d.errors import M3DError

# Photographs hardly shrink and drawings to a tenth; a file that grows more than this is made to fill memory.
_MOST_GROWTH = 100
_SMALL = 2**28  # bytes that any file may unpack to


def read_arrays(path: Path, wanted: Iterable[str]) -> tuple[list[str], dict[str, np.ndarray]]:
    """(names of all arrays in an .npz, those of ``wanted`` that are there); nothing is unpickled."""
    if not path.is_file():
        raise M3DError(f"{path}: is not a plain file")
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            chosen = [(name, members[name]) for name in wanted if name in members]
            _refuse_bombs(path, [info for _, info in chosen])
            return list(members), {name: _read(archive, info, path) for name, info in chosen}
    except M3DError:
        raise
    except Exception as error:  # a damaged archive or header can raise almost anything
        raise M3DError(f"{path}: cannot be read as an .npz of plain arrays ({error})") from error


def _refuse_bombs(path: Path, members: list[zipfile.ZipInfo]) -> None:
    total = sum(info.file_size for info in members)
    if total > max(_SMALL, _MOST_GROWTH * path.stat().st_size):
        raise M3DError(
            f"{path}: {path.stat().st_size} bytes that unpack to {total}; allowed: {_MOST_GROWTH} times the file's size"
        )


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> np.ndarray:
    """The array of one member, which must hold exactly what its header says."""
    with archive.open(info) as stream:
        version = np.lib.format.read_magic(stream)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in read_header:
            raise M3DError(f"{path}: {info.filename} has format {version}; allowed: 1.0 and 2.0")
        shape, in_columns, kind = read_header[version](stream)
        expected = math.prod(shape) * kind.itemsize
        if kind.hasobject or expected != info.file_size - stream.tell():
            raise M3DError(
                f"{path}: cannot be read as an .npz of plain arrays ({info.filename} is {kind} {list(shape)} in "
                f"{info.file_size - stream.tell()} bytes)"
            )
        content = stream.read(expected)
    return np.frombuffer(content, kind).reshape(shape, order="F" if in_columns else "C")
