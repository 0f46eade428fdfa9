"""What a run was asked for, read back from a file: it may come from another version, another machine, or a stranger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from m3d.data import Dataset, load_data
from m3d.errors import M3DError
from m3d.run_folder import RunFolder

# What run.json must hold.
_REQUEST: dict[str, tuple[type, ...]] = {
    "ipc": (int,),
    "method": (str,),
    "options": (dict,),
    "net": (str, type(None)),
    "seed": (int,),
    "device": (str,),
    "precision": (str,),
    "deterministic": (bool,),
    "step_mode": (str,),
    "checkpoint_seconds": (int, float),
    "eval_every": (int,),
    "eval_options": (dict,),
    "data": (dict,),
    "fingerprint": (str,),
}
_RECIPE: dict[str, tuple[type, ...]] = {
    "source": (str,),
    "data_root": (str,),
    "size": (int,),
    "test_fraction": (int, float),
    "val_fraction": (int, float),
    "split_seed": (int,),
    "zca": (bool,),
    "resident": (str,),
    "on_bad_image": (str,),
}
_MAY_BE_ABSENT: dict[str, tuple[type, ...]] = {
    "subtasks": (int,),
    "classes_at_once": (int, type(None)),
    "keep_every": (int,),
}


def checked_request(folder: RunFolder) -> dict[str, Any]:
    """What was asked of the run, every part of the right type."""
    request, where = folder.request(), repr(str(folder / RunFolder.RUN))
    for key, kinds in {**_REQUEST, **_MAY_BE_ABSENT}.items():
        if key not in request and key in _REQUEST:
            raise M3DError(f"{where} is incomplete: it has no {key!r}")
        if key in request and type(request[key]) not in kinds:
            raise M3DError(f"{where}: {key}={request[key]!r} is of the wrong type")
    return request


def checked_part(recipe: Mapping[str, Any], key: str, where: str) -> Any:
    """One part of a dataset's recipe, of the right type; None where it has none."""
    value = recipe.get(key)
    if value is not None and type(value) not in _RECIPE[key]:
        raise M3DError(f"{where}: the data's {key}={value!r} is not valid")
    return value


def load_recipe(recipe: Mapping[str, Any], where: str, **instead: Any) -> Dataset:
    """The dataset of a recipe that stands in the file ``where``; ``instead`` is the caller's own wish.

    A stranger's file must not choose where downloads are put, so files below a folder that it names must be there.
    """
    if "source" not in recipe:
        raise M3DError(f"{where} does not say where its data came from")
    for key, value in recipe.items():
        if key not in _RECIPE or type(value) not in _RECIPE[key]:
            raise M3DError(f"{where}: the data's {key}={value!r} is not valid; allowed: {', '.join(_RECIPE)}")
    return load_data(**{"download": "data_root" not in recipe, **recipe, **instead})
