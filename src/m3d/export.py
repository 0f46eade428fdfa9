"""A condensed set in the formats other tools read."""

from __future__ import annotations

import io
import logging
import re
import shutil
import tempfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from m3d.condensed import CondensedSet
from m3d.errors import M3DError, unknown
from m3d.files import read_json, sync_folder, sync_tree, write_bytes, write_json
from m3d.wording import option

log = logging.getLogger(__name__)
FORMATS = ("imagefolder", "npz", "pt")
_MANIFEST, _SOFT_LABELS = "manifest.json", "soft_labels.csv"  # in an exported folder


def export(condensed: CondensedSet, target: str, path: str | Path, overwrite: bool = False) -> Path:
    """Write the decoded images (what a network trains on) as ``imagefolder``, ``npz`` or ``pt``; returns the path.

    With ``overwrite`` an earlier export of that kind is replaced.
    """
    if target not in FORMATS:
        raise unknown("export format", target, FORMATS)
    destination = Path(path)
    if destination.exists() and not overwrite:
        raise M3DError(f"{str(destination)!r} exists; choose another place, or pass {option('overwrite', True)}")
    if destination.exists() and not _earlier_export(destination, target):
        replaced = f"an earlier export to {target}, which alone {option('overwrite', True)} replaces"
        raise M3DError(f"{str(destination)!r} is not {replaced}")
    images, labels = condensed.hard().decoded()
    if target == "imagefolder":
        if not condensed.bounded:
            log.warning("pixels outside [0, 1] are cut off, 8 bits hold no others; npz and pt keep them")
        _image_folder(condensed, images, labels, destination)
    elif target == "npz":
        _npz(condensed, images, labels, destination)
    else:
        _pt(condensed, images, labels, destination)
    return destination


def _earlier_export(path: Path, target: str) -> bool:
    """Whether an export of this kind, and nothing else, lies there."""
    try:
        if target == "imagefolder":
            manifest = read_json(path / _MANIFEST)
            ours = {_MANIFEST, _SOFT_LABELS, *_folder_names([str(name) for name in manifest["class_names"]])}
            return (
                {"method", "options", "data"} <= set(manifest)
                and {p.name for p in path.iterdir()} <= ours
                and not path.is_symlink()
            )
        with zipfile.ZipFile(path) as archive:
            if target == "npz":
                return {"images.npy", "labels.npy", "class_names.npy", "transform.npy"} <= set(archive.namelist())
            (listing,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            return all(key in archive.read(listing) for key in (b"images", b"labels", b"class_names", b"transform"))
    except (M3DError, OSError, KeyError, TypeError, ValueError, zipfile.BadZipFile):
        return False


def _image_folder(condensed: CondensedSet, images: Tensor, labels: Tensor, destination: Path) -> None:
    """``class/0000.png``, 8 bits a channel, and the manifest beside them; the folder appears whole or not at all.

    Soft labels, where there are some, become ``soft_labels.csv``: a file's name, and a probability per class.
    """
    names = _folder_names(condensed.class_names)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        workplace = Path(tempfile.mkdtemp(dir=destination.parent, prefix=f".{destination.name}."))
    except OSError as error:
        raise M3DError(f"cannot write {str(destination)!r}: {error.strerror or error}") from error
    try:
        counts, written = dict.fromkeys(names, 0), []
        pixels = (images.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
        for picture, label in zip(pixels, labels.tolist(), strict=True):
            name = names[label]
            (workplace / name).mkdir(exist_ok=True)
            written.append(f"{name}/{counts[name]:04d}.png")
            Image.fromarray(picture[..., 0] if picture.shape[-1] == 1 else picture).save(workplace / written[-1])
            counts[name] += 1
        if condensed.soft is not None:
            write_bytes(workplace / _SOFT_LABELS, _soft_rows(names, written, condensed.soft).encode())
        write_json(
            workplace / _MANIFEST, {**condensed.manifest, "folders": names}
        )  # which may differ from the classes'
        workplace.chmod(0o755)
        sync_tree(workplace)
        _put(workplace, destination)
        sync_folder(destination.parent)
    except OSError as error:
        raise M3DError(f"cannot write {str(destination)!r}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


def _put(folder: Path, destination: Path) -> None:
    """Give a folder its name. What has the name is moved away first, and comes back if that fails."""
    if not destination.exists():
        folder.rename(destination)
        return
    old = folder.with_name(f"{folder.name}.old")
    destination.rename(old)
    try:
        folder.rename(destination)
    except OSError:
        old.rename(destination)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _soft_rows(names: list[str], files: list[str], soft: Tensor) -> str:
    lines = [
        ["file", *names],
        *([file, *(f"{p:.9g}" for p in row)] for file, row in zip(files, soft.tolist(), strict=True)),
    ]
    return "".join(",".join(line) + "\n" for line in lines)


def _folder_names(class_names: list[str]) -> list[str]:
    """Class names as safe folder names, distinct even where case does not count; none leads out of the folder."""
    safe = [_safe(name) for name in class_names]
    often = Counter(name.casefold() for name in safe)
    taken = {name for name, count in often.items() if count == 1}  # these keep their names
    names = []
    for index, name in enumerate(safe):
        if often[name.casefold()] > 1:
            name = f"{name}_{index}"
            while name.casefold() in taken:
                name += "_"
            taken.add(name.casefold())
        names.append(name)
    return names


def _safe(name: str) -> str:
    """Letters, digits, dots, hyphens and spaces of a name; at most 200 bytes, for a file system takes 255."""
    plain = re.sub(r"[^\w.\- ]", "_", name).strip(". ")
    return plain.encode(errors="ignore")[:200].decode(errors="ignore").strip(". ") or "class"


def _npz(condensed: CondensedSet, images: Tensor, labels: Tensor, destination: Path) -> None:
    buffer = io.BytesIO()
    extra: dict[str, Any] = {} if condensed.soft is None else {"soft_labels": condensed.soft.numpy()}  # [N, K]
    np.savez_compressed(
        buffer,
        images=images.numpy(),  # [N, ch, h, w] float32, 0 black and 1 white
        labels=labels.numpy(),
        class_names=np.array(condensed.class_names),
        mean=np.array(condensed.manifest["mean"], np.float32),
        std=np.array(condensed.manifest["std"], np.float32),
        transform=np.array(condensed.manifest["data"].get("transform", "none")),
        **extra,
    )
    write_bytes(destination, buffer.getvalue())


def _pt(condensed: CondensedSet, images: Tensor, labels: Tensor, destination: Path) -> None:
    """Tensors, lists and strings only: ``torch.load(path, weights_only=True)`` reads it."""
    buffer = io.BytesIO()
    torch.save(
        {
            "images": images.clone(),
            "labels": labels.clone(),
            "class_names": condensed.class_names,
            "mean": list(condensed.manifest["mean"]),
            "std": list(condensed.manifest["std"]),
            "transform": condensed.manifest["data"].get("transform", "none"),
            **({} if condensed.soft is None else {"soft_labels": condensed.soft.clone()}),
        },
        buffer,
    )
    write_bytes(destination, buffer.getvalue())
