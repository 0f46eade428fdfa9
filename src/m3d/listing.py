"""What can be asked for by name, as plain rows."""

from __future__ import annotations

from typing import Any

from m3d.data import imagenet
from m3d.data.official import RECORDS, Record
from m3d.errors import M3DError
from m3d.evaluation import PROTOCOLS
from m3d.kernels import KERNELS
from m3d.methods import METHODS
from m3d.nets import NETS
from m3d.registry import Registry
from m3d.select import INITS

_REGISTRIES: dict[str, Registry[Any]] = {
    "methods": METHODS,
    "kernels": KERNELS,
    "nets": NETS,
    "inits": INITS,
    "protocols": PROTOCOLS,
}
KINDS = (*_REGISTRIES, "datasets")


# What each option means, wherever it occurs; a test sees to it that none of the package's own is missing.
MEANINGS = {
    "augment": "augmentation shared by real and synthetic images: a+b applies both, a|b draws one (color, crop, "
    "cutout, flip, scale, rotate, none)",
    "batch": "images per training step",
    "batch_real": "real images per class and step",
    "batch_syn_max": "decoded synthetic images per class and step, at most",
    "degree": "highest moment the kernel sees",
    "depth": "number of blocks",
    "epochs": "passes over the training images",
    "factor": "mini-images along each side of a stored image",
    "features": "what images are chosen by: a trained network's representation, or pixels",
    "growth": "channels every layer adds",
    "init": "where the images start ('m3d list inits')",
    "inner": "epochs of training on the synthetic images after each step",
    "ipm": "iterations per random model",
    "kernel": "kernel of the maximum mean discrepancy ('m3d list kernels')",
    "lr": "learning rate of the images; auto: the method's own rule (m3d: IPC × the kernel's rate)",
    "moments": "1 matches means, 2 also variances, 3 also skewnesses",
    "momentum": "of the images' descent",
    "network": "network trained on the whole data for its representation",
    "norm": "normalisation in every block",
    "objective": "loss: the method's own, or L_M3D in its place",
    "offset": "constant added to the inner product",
    "outer": "steps per network",
    "per_network": "steps per network",
    "second": "weight of the variances",
    "steps": "iterations",
    "third": "weight of the skewnesses",
    "train_images": "real images the network is trained on after each step",
    "width": "channels of the first block",
}


def overview(what: str) -> list[dict[str, Any]]:
    """One row per name: {name, about, …}."""
    if what == "datasets":
        named = [{"name": r.name, "about": _about_dataset(r)} for r in RECORDS.values()]
        subsets = [{"name": name, "about": _about_subset(ids)} for name, ids in imagenet.subsets().items()]
        return [
            *named,
            *subsets,
            {"name": "PATH", "about": "an image folder root/{train,test}/class/*.png …, or an .npz"},
        ]
    return [{"name": entry.name, "about": entry.summary, **entry.about} for entry in _REGISTRIES[what]]


def _about_subset(ids: tuple[str, ...]) -> str:
    return f"{len(ids)} classes, colour, {imagenet.SIDE} pixels, from your own ILSVRC folder (--data-root)"


def _about_dataset(record: Record) -> str:
    origin = "shipped with m3d" if record.bundled else "downloaded when first used"
    return f"{len(record.class_names)} classes, {'grey' if record.channels == 1 else 'colour'}, {origin}"


def describe(what: str, name: str) -> list[dict[str, Any]]:
    """One row per option of ``name``: {name, about, default}."""
    if what not in _REGISTRIES:
        raise M3DError(f"{what} have no options; 'm3d list {what}' shows them all")
    options = _REGISTRIES[what].get(name).options()
    rows = [
        {
            "name": o.name,
            "about": MEANINGS.get(o.name, ""),
            "type": o.kind,
            "default": "auto" if o.default is None else o.default,
        }
        for o in options.values()
    ]
    return rows or [{"name": name, "about": "takes no option"}]
