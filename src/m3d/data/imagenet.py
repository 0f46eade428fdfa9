"""The paper's subsets of ImageNet (after IDC), read from a user's own copy of ILSVRC 2012.

``imagenet100`` is a list of a hundred WordNet ids, ``imagenet10`` the first ten of them, and ``imagenet100-1`` to
``imagenet100-5`` consecutive groups of twenty: the paper's sub-tasks. Class indices follow the list.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from m3d.errors import M3DError
from m3d.wording import option

SIDE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_PARTS = 5
# Below the data root: as it is, or as people and the official archives name it.
_FOLDERS = ("", "imagenet", "ImageNet", "ILSVRC2012", "ILSVRC", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC")


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(files("m3d.data").joinpath("imagenet.toml").read_text(encoding="utf-8"))


def spoken(name: str) -> str:
    """What a class shows, where ``name`` is a WordNet id we know; else ``name``."""
    return str(_file()["names"].get(name, name))


@cache
def subsets() -> dict[str, tuple[str, ...]]:
    """The WordNet ids of every subset, in the order of their class indices."""
    every = tuple(_file()["imagenet100"])
    size = len(every) // _PARTS
    parts = {f"imagenet100-{k + 1}": every[k * size : (k + 1) * size] for k in range(_PARTS)}
    return {"imagenet10": every[:10], "imagenet100": every, **parts}


def find(name: str) -> str | None:
    """The subset that ``name`` means, in any spelling, or None."""
    wanted = name.strip().lower().replace("_", "-").replace("imagenet-", "imagenet")
    return wanted if wanted in subsets() else None


def root_of(name: str, data_root: Path) -> Path:
    """The folder below ``data_root`` that holds ``train`` and ``val`` with the classes of subset ``name``."""
    wanted = subsets()[name]
    for folder in _FOLDERS:
        place = data_root / folder
        if (place / "train").is_dir() and (place / "val").is_dir():
            for split in ("train", "val"):
                missing = [wnid for wnid in wanted if not (place / split / wnid).is_dir()]
                if missing:
                    raise M3DError(
                        f"{place / split}: {name} needs a folder for each of its {len(wanted)} classes, and "
                        f"{len(missing)} are not there: {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}"
                    )
            return place
    raise M3DError(
        f"dataset {name!r} is not in {data_root}: name the folder of your ILSVRC 2012, which holds "
        f"train/nXXXXXXXX/*.JPEG and val/nXXXXXXXX/*.JPEG, with {option('data_root')} or the environment variable "
        f"M3D_DATA"
    )
