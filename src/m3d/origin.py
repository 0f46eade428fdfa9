"""The data that a condensed set was made from, found again; or others to test it on, which it must not have seen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m3d.condensed import CondensedSet
from m3d.data import Dataset, load_data
from m3d.data.keep_back import HasTestSplit
from m3d.data.sources import NotThere
from m3d.errors import M3DError
from m3d.requests import checked_part, load_recipe
from m3d.wording import option


def load_source(
    condensed: CondensedSet,
    data: str | Path | None = None,
    data_root: str | Path | None = None,
    size: int | None = None,
    zca: bool | None = None,
    on_bad_image: str | None = None,
    test_fraction: float = 0.0,
) -> Dataset:
    """The dataset a set was made from (and it must be unchanged), or the one named instead.

    It is whitened if the set's was, unless ``zca`` says otherwise; images of another place are brought to the set's
    size, read and divided as its data were, unless told otherwise.
    """
    source = condensed.manifest["data"]
    zca = "transform" in source if zca is None else zca
    recipe: Mapping[str, Any] = source["recipe"] if isinstance(source.get("recipe"), dict) else {}
    if data is not None:
        on_bad_image = on_bad_image or checked_part(recipe, "on_bad_image", "the set's manifest") or "error"
        reading: dict[str, Any] = {"data_root": data_root, "zca": zca, "on_bad_image": on_bad_image}
        reading["size"] = checked_part(recipe, "size", "the set's manifest") if size is None else size
        return _named_instead(data, recipe, source.get("fingerprint"), test_fraction, reading)
    if "source" not in recipe:
        raise M3DError(f"the set's manifest does not say where its data came from; name the dataset ({option('data')})")
    own = {"data_root": data_root, "download": True} if data_root else {}
    try:
        dataset = load_recipe(recipe, "the set's manifest", zca=zca, **own)
    except NotThere as error:
        raise M3DError(
            f"the data that the set was made from: {error}; name the place they are at now ({option('data')})"
        ) from error
    if dataset.train.fingerprint != source.get("fingerprint"):
        other = f"name the data to use instead ({option('data')})"
        if "test_fraction" in recipe:  # what was kept back then is not what would be now
            other = f"bring it back as it was, or name data with a test split of their own ({option('data')})"
        raise M3DError(f"{dataset.name} has changed since the set was made from it; {other}")
    return dataset


def _named_instead(
    data: str | Path, recipe: Mapping[str, Any], fingerprint: str | None, fraction: float, reading: dict[str, Any]
) -> Dataset:
    """Other data than the set's own; those without a test split are divided as its own were.

    An image that the set was made from must not be tested on: what was divided before is divided in the same way or
    not at all.
    """
    parts = ("test_fraction", "val_fraction", "split_seed")
    before = {k: v for k in parts if (v := checked_part(recipe, k, "the set's manifest")) is not None}
    if "test_fraction" not in before:
        if before.get("val_fraction"):  # the set's own data at another place: what was held out stays so
            dataset = load_data(data, test_fraction=fraction, **before, **reading)
            if dataset.train.fingerprint == fingerprint:
                return dataset
        return load_data(data, test_fraction=fraction, **reading)
    try:
        dataset = load_data(data, **{**before, "test_fraction": fraction or before["test_fraction"]}, **reading)
    except HasTestSplit:
        if fraction:
            raise
        return load_data(data, **reading)
    if dataset.train.fingerprint != fingerprint:
        raise M3DError(
            f"{dataset.name} is not what the set was made from, or was divided otherwise, so images that the set was "
            f"made from might be tested on; name data with a test split of their own ({option('data')})"
        )
    return dataset
