"""What can be asked for by name, as plain rows."""

from __future__ import annotations

from typing import Any

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


def overview(what: str) -> list[dict[str, Any]]:
    """One row per name: {name, about, …}."""
    if what == "datasets":
        named = [{"name": r.name, "about": _about_dataset(r)} for r in RECORDS.values()]
        return [*named, {"name": "PATH", "about": "an image folder root/{train,test}/class/*.png …, or an .npz"}]
    return [{"name": entry.name, "about": entry.summary, **entry.about} for entry in _REGISTRIES[what]]


def _about_dataset(record: Record) -> str:
    origin = "shipped with m3d" if record.bundled else "downloaded when first used"
    return f"{len(record.class_names)} classes, {'grey' if record.channels == 1 else 'colour'}, {origin}"


def describe(what: str, name: str) -> list[dict[str, Any]]:
    """One row per option of ``name``: {name, about, default}."""
    if what not in _REGISTRIES:
        raise M3DError(f"{what} have no options; 'm3d list {what}' shows them all")
    options = _REGISTRIES[what].get(name).options()
    rows = [
        {"name": o.name, "about": o.kind, "default": "auto" if o.default is None else o.default}
        for o in options.values()
    ]
    return rows or [{"name": name, "about": "takes no option"}]
