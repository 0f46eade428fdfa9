"""The condensed set: safetensors with a JSON manifest, checked when read, never unpickled."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from m3d.errors import M3DError
from m3d.files import json_object, read_tensors, sha256, write_bytes
from m3d.normalise import Normalise
from m3d.run_folder import RunFolder
from m3d.tiles import Tiles

# A set with soft labels has a format of its own, one of halved colours too, and one of cells of their own size or
# framed ones, whatever else it has: older versions refuse it instead of reading it wrongly.
FORMAT, SOFT_FORMAT, CHROMA_FORMAT, CELLS_FORMAT = FORMATS = 1, 2, 3, 4
_NEEDED: dict[str, type | tuple[type, ...]] = {
    "format": int,
    "method": str,
    "options": dict,
    "ipc": int,
    "factor": int,
    "mean": list,
    "std": list,
    "class_names": list,
    "data": dict,
    "sha256": dict,
}


@dataclass(frozen=True)
class CondensedSet:
    """A condensed dataset: stored pixels, their labels, and a manifest that says how they were made."""

    images: Tensor  # [C·ipc, ch, h, w] float32, 0 black and 1 white, as stored (not decoded)
    labels: Tensor  # [C·ipc] int64
    manifest: Mapping[str, Any]
    soft: Tensor | None = None  # [N, K] float32: each decoded image's class probabilities, if it has any

    def __repr__(self) -> str:
        made = f"{self.manifest.get('data', {}).get('name')} by {self.manifest.get('method')}"
        images = f"{len(self.class_names)} classes × {self.manifest.get('ipc')} images {list(self.images.shape[1:])}"
        cut = f"factor {self.manifest.get('factor')}"
        if self.manifest.get("cell"):
            cut = f"cells {self.manifest['cell']} pixels high"
        if self.manifest.get("margin"):
            cut += f" in frames of {self.manifest['margin']}"
        halved = ", halved colours" if self.manifest.get("chroma") == "half" else ""
        return f"CondensedSet({made}: {images}, {cut}{halved}, {self.label_kind} labels)"

    @property
    def label_kind(self) -> str:
        """``hard`` or ``soft``: what networks are taught with the images."""
        return "hard" if self.soft is None else "soft"

    @property
    def bounded(self) -> bool:
        """Whether all pixels lie in [0, 1]: a few methods let them go where they like, and pictures cut that off."""
        return self.manifest.get("bounded") is not False

    @property
    def storage(self) -> dict[str, int]:
        """Bytes of pixels and of labels, as stored."""
        soft = 0 if self.soft is None else self.soft.nbytes
        return {"pixels": self.images.nbytes, "labels": self.labels.nbytes + soft}

    def require(self, class_names: Iterable[str], shape: tuple[int, int, int], name: str) -> None:
        """Raise unless this is a set of the classes and image size of the data called ``name``."""
        names = list(class_names)
        if self.images.shape[1:] != shape or self.class_names != names:
            raise M3DError(
                f"the set holds {_described(self.class_names, self.images.shape[1:])}, "
                f"{name} has {_described(names, shape)}; they must be the same"
            )

    def hard(self) -> CondensedSet:
        """The same images with their classes alone."""
        kept = {k: v for k, v in self.manifest.items() if k != "soft_labels"}
        return self if self.soft is None else replace(self, manifest=kept, soft=None)

    @property
    def tiles(self) -> Tiles:
        manifest = self.manifest
        upsample, chroma = str(manifest.get("upsample", "bilinear")), str(manifest.get("chroma", "full"))
        cell, margin = manifest.get("cell", 0), manifest.get("margin", 0)
        return Tiles(int(manifest["factor"]), upsample=upsample, chroma=chroma, cell=cell, margin=margin)

    @property
    def per_class(self) -> int:
        """Decoded images of a class."""
        channels, height, width = self.images.shape[1:]
        return self.tiles.count(len(self.images) // len(self.class_names), (channels, height, width))

    @property
    def class_names(self) -> list[str]:
        return list(self.manifest["class_names"])

    @property
    def fingerprint(self) -> str:
        """sha256 of the stored pixels."""
        return str(sha256(self.images))

    def decoded(self, normalise: bool | Normalise = False) -> tuple[Tensor, Tensor]:
        """Full-size images [N, ch, h, w] and labels: what a network trains on.

        Labels are [N] classes, or [N, K] probabilities where the set has soft labels (``hard()`` leaves them out).
        A set of whitened data does not carry the whitening, which is larger than the images and which its user needs
        for real images too: give the data's (``load_data(..., zca=True).normalise()``).
        """
        images = self.tiles.decode(self._by_class(self.images)).flatten(0, 1)
        if normalise is True:
            if "transform" in self.manifest["data"]:
                raise M3DError(
                    f"the set is of data transformed by {self.manifest['data']['transform']}, which comes from the "
                    f"data: pass normalise=load_data(..., zca=True).normalise(), or False for plain pixels"
                )
            normalise = Normalise(self.manifest["mean"], self.manifest["std"])
        if normalise is not False:
            images = normalise(images)
        if self.soft is not None:
            return images, self.soft
        labels, shown = self._by_class(self.labels), self.per_class
        begins_in = torch.arange(shown) * labels.shape[1] // shown  # which stored image of its class each begins in
        return images, labels[:, begins_in].flatten()

    def pictures(self) -> Tensor:
        """[C, n, ch, h, w]: what is stored of each class, as pictures."""
        return self.tiles.pictures(self._by_class(self.images))

    def _by_class(self, stored: Tensor) -> Tensor:
        grouped: Tensor = stored.unflatten(0, (len(self.class_names), -1))
        return grouped

    def save(self, path: str | Path) -> None:
        tensors = {"images": self.images.contiguous(), "labels": self.labels.contiguous()}
        if self.soft is not None:
            tensors["soft"] = self.soft.contiguous()
        version = FORMAT if self.soft is None else SOFT_FORMAT
        version = CHROMA_FORMAT if self.manifest.get("chroma") == "half" else version
        version = CELLS_FORMAT if self.manifest.get("cell") or self.manifest.get("margin") else version
        manifest = {**self.manifest, "format": version, "sha256": {k: sha256(v) for k, v in tensors.items()}}
        write_bytes(Path(path), to_safetensors(tensors, {"m3d": json.dumps(manifest)}))

    @classmethod
    def load(cls, path: str | Path) -> CondensedSet:
        """Read a set from its file or its run folder, and check that it is whole and untampered."""
        file = Path(path)
        if file.is_dir():
            RunFolder(file).require_finished()
            _require_set(file)
            file = file / RunFolder.CONDENSED
        tensors, metadata = read_tensors(file)
        manifest = _manifest(metadata, file)
        named = manifest["format"] == SOFT_FORMAT or "soft" in manifest["sha256"]
        soft = ("soft",) if named or "soft" in tensors else ()
        for name in ("images", "labels", *soft):
            if name not in tensors:
                raise M3DError(f"{str(file)!r} has no tensor {name!r}; found: {', '.join(sorted(tensors)) or 'none'}")
            if sha256(tensors[name]) != manifest["sha256"].get(name):
                raise M3DError(f"{str(file)!r}: the tensor {name!r} does not match its checksum; the file was changed")
        condensed = cls(tensors["images"], tensors["labels"], manifest, tensors.get("soft"))
        condensed._check(file)
        return condensed

    def _check(self, file: Path) -> None:
        classes, n = len(self.class_names), len(self.class_names) * int(self.manifest["ipc"])
        if self.images.dtype != torch.float32 or self.images.ndim != 4 or len(self.images) != n:
            raise M3DError(
                f"{str(file)!r}: images are {self.images.dtype} {list(self.images.shape)}; "
                f"expected float32 [{n}, channels, height, width]"
            )
        if not self.images.numel():
            raise M3DError(f"{str(file)!r}: images are {list(self.images.shape)}; a set holds one image at least")
        channels, height, width = self.images.shape[1:]
        try:
            self.tiles.require((channels, height, width))
        except M3DError as error:
            raise M3DError(f"{str(file)!r}: {error}") from error
        if {len(self.manifest["mean"]), len(self.manifest["std"])} != {channels}:
            raise M3DError(f"{str(file)!r}: mean and std must have {channels} values, one per channel")
        if not torch.isfinite(self.images).all():
            raise M3DError(f"{str(file)!r}: pixels must be finite numbers")
        if self.bounded and not (self.images.min() >= 0 and self.images.max() <= 1):
            raise M3DError(f"{str(file)!r}: pixels must lie in [0, 1]; its manifest does not say bounded: false")
        if self.labels.shape != (n,) or self.labels.dtype != torch.int64:
            raise M3DError(
                f"{str(file)!r}: labels are {self.labels.dtype} {list(self.labels.shape)}; expected int64 [{n}]"
            )
        if not (0 <= int(self.labels.min()) <= int(self.labels.max()) < classes):
            raise M3DError(f"{str(file)!r}: labels must lie between 0 and {classes - 1}")
        if self.tiles.cell and (self._by_class(self.labels) != self.labels[:: n // classes, None]).any():
            raise M3DError(f"{str(file)!r}: images of different classes share cells; a class's images must be together")
        self._check_soft(file, classes * self.per_class, classes)

    def _check_soft(self, file: Path, count: int, classes: int) -> None:
        soft = self.soft
        if soft is None:
            return
        if soft.shape != (count, classes) or soft.dtype != torch.float32:
            raise M3DError(
                f"{str(file)!r}: soft labels are {soft.dtype} {list(soft.shape)}; expected float32 [{count}, {classes}]"
            )
        if not (torch.isfinite(soft).all() and soft.min() >= 0 and (soft.sum(1) - 1).abs().max() < 1e-3):
            raise M3DError(f"{str(file)!r}: soft labels must be probabilities: not negative, each row's sum 1")


class CondensedDataset(TorchDataset[tuple[Tensor, int | Tensor]]):
    """A torch ``Dataset`` of decoded images (normalised unless asked otherwise) and their labels.

    A label is an integer, or probabilities [K] where the set has soft labels; torch's cross-entropy takes both.
    """

    def __init__(self, path: str | Path | CondensedSet, normalise: bool | Normalise = True):
        condensed = path if isinstance(path, CondensedSet) else CondensedSet.load(path)
        self.images, self.labels = condensed.decoded(normalise)
        self.classes = condensed.class_names

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int | Tensor]:
        label = self.labels[index]
        return self.images[index], int(label) if label.ndim == 0 else label


def _described(names: Sequence[str], shape: Sequence[int]) -> str:
    """How many classes, which, and of what images."""
    some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{len(names)} classes ({some}) of {list(shape)} images"


def _require_set(folder: Path) -> None:
    """Refuse a folder of runs, and name some of them."""
    runs = sorted(file.parent.name for file in folder.glob(f"*/{RunFolder.CONDENSED}"))
    if runs and not (folder / RunFolder.CONDENSED).exists():
        shown = ", ".join(runs[:5]) + (", …" if len(runs) > 5 else "")
        raise M3DError(f"{str(folder)!r} holds no set but runs that do: {shown}; name one of them")


def _manifest(metadata: Mapping[str, str], file: Path) -> dict[str, Any]:
    manifest = json_object(metadata, file)
    for key, kind in _NEEDED.items():
        if not isinstance(manifest.get(key), kind) or isinstance(manifest.get(key), bool):
            raise M3DError(f"{str(file)!r}: the manifest's {key!r} is missing or of the wrong type")
    if manifest["format"] not in FORMATS:
        raise M3DError(f"{str(file)!r} has format {manifest['format']}; this version reads formats 1 to {FORMATS[-1]}")
    for key in ("cell", "margin"):
        if type(manifest.get(key, 0)) is not int:
            raise M3DError(f"{str(file)!r}: the manifest's {key!r} must be a number of pixels")
    for key in ("mean", "std"):
        if not all(type(v) in (int, float) and math.isfinite(v) and (key == "mean" or v > 0) for v in manifest[key]):
            raise M3DError(f"{str(file)!r}: the manifest's {key!r} must be a list of numbers, those of std positive")
    if not all(isinstance(name, str) for name in manifest["class_names"]):
        raise M3DError(f"{str(file)!r}: the manifest's 'class_names' must be texts")
    return manifest
