"""From a name or a path to a ``Dataset``: named datasets, image folders, .npz files and Hugging Face datasets."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from m3d.data import folder, hub, imagenet, official, readers
from m3d.data.classes import ClassData, Dataset
from m3d.data.ingest import Handling
from m3d.data.keep_back import KeepBack
from m3d.data.official import Record
from m3d.data.readers import Arrays
from m3d.errors import M3DError, unknown
from m3d.normalise import Zca
from m3d.wording import resuming


class NotThere(M3DError):
    """There is no file or folder at that path."""


def load_data(
    source: str | Path,
    *,
    data_root: str | Path | None = None,
    size: int | None = None,
    test_fraction: float = 0.0,
    val_fraction: float = 0.0,
    split_seed: int = 0,
    zca: bool = False,
    download: bool = True,
    on_bad_image: str = "error",
    resident: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> Dataset:
    """The dataset of that name, or the one in that image folder or .npz file, or ``hf:NAME`` of Hugging Face.

    A name wins over a file of that name (write ``./cifar10`` for the file); a ``Path`` is always a path. The files of a
    named dataset are looked for below ``data_root`` (or ``$M3D_DATA``, or ``~/.cache/m3d``) and, if they are not
    there, downloaded to it (not those of ImageNet, which must be there). ``size`` brings images to ``size``×``size``.
    Data without a test split of their own (``photos/CLASS/*.jpg``) get one by ``test_fraction``: that part of every
    class is kept back. Mean and deviation are those of the whole training split, whether or not a part of it is then
    held out for validation. With ``zca`` networks see images whitened by that split's covariance
    (:class:`m3d.normalise.Zca`); pixels stay as they are.

    Encoded images that cannot be read are an error, or left out and named in a report (``on_bad_image="skip"``). Those
    that would fill the memory are decoded into a file once and stay on the disk (``resident``: auto, yes or no);
    ``progress(done, all)`` is called meanwhile.
    """
    handling = Handling(on_bad_image, resident, progress)
    if size is not None and size < 1:
        raise M3DError(f"size={size} is not valid; allowed: 1 or more")
    record = official.find(source) if isinstance(source, str) else None
    subset = imagenet.find(source) if isinstance(source, str) else None
    name = record.name if record else subset
    from_hub = isinstance(source, str) and source.startswith(hub.PREFIX)
    recipe: dict[str, Any] = {"source": name or (str(source) if from_hub else str(_existing(source)))}
    if name and data_root is not None:
        recipe["data_root"] = str(Path(data_root).expanduser().resolve())
    if size is not None:
        recipe["size"] = size
    recipe |= {k: v for k, v in (("test_fraction", test_fraction), ("val_fraction", val_fraction)) if v}
    if test_fraction or val_fraction:
        recipe["split_seed"] = split_seed
    keep_back = KeepBack(test_fraction, split_seed) if test_fraction else None
    if keep_back is not None and name:
        raise keep_back.refuse(name)
    recipe |= {k: v for k, v, usual in _choices(handling) if v != usual}
    root = Path(data_root or os.environ.get("M3D_DATA") or "~/.cache/m3d").expanduser()
    if subset:
        dataset = _from_imagenet(subset, root, size, recipe, handling)
    elif record:
        arrays = official.read(record, root, download=download)
        dataset = _from_arrays(arrays, record, record.name, size, recipe)
    elif from_hub:
        dataset = _from_hub(recipe["source"], size, recipe, handling, keep_back)
    else:
        dataset = _from_path(Path(recipe["source"]), size, recipe, handling, keep_back)
    dataset = replace(dataset, resident=resident)
    if zca:
        whitening = Zca(dataset.train.images, dataset.mean, dataset.std)
        dataset = replace(dataset, zca=whitening, recipe={**recipe, "zca": True})
    return dataset.hold_out(val_fraction, split_seed)


def _choices(handling: Handling) -> list[tuple[str, str, str]]:
    """(name, value, default) of the choices that load the same data again."""
    return [("on_bad_image", handling.on_bad_image, "error"), ("resident", handling.resident, "auto")]


def dataset_names() -> list[str]:
    """The names that ``load_data`` knows."""
    return sorted([*official.RECORDS, *imagenet.subsets()])


def _existing(source: str | Path) -> Path:
    """An absolute path that exists, or an error that suggests the nearest dataset name."""
    path = Path(source).expanduser()
    if str(source).strip() and path.exists():
        return path.resolve()
    looks_like_path = isinstance(source, Path) or source.endswith(".npz") or {"/", os.sep} & set(source)
    if not looks_like_path:
        raise M3DError(
            f"{unknown('dataset', str(source), dataset_names())} A path must exist, and {str(source)!r} does not."
        )
    raise NotThere(f"{path}: no such file or folder; a dataset name is one of {', '.join(dataset_names())}")


def _from_imagenet(name: str, root: Path, size: int | None, recipe: dict[str, Any], handling: Handling) -> Dataset:
    """A subset of ImageNet, with ImageNet's own statistics."""
    where = imagenet.root_of(name, root)
    train, test, names = folder.read_folder(where, size or imagenet.SIDE, imagenet.subsets()[name], handling)
    return Dataset(name, train, test, names, imagenet.MEAN, imagenet.STD, recipe=recipe)


def _from_hub(
    source: str, size: int | None, recipe: dict[str, Any], handling: Handling, keep_back: KeepBack | None
) -> Dataset:
    """A Hugging Face dataset, from the hub or from a folder that ``save_to_disk`` wrote."""
    train, test, names = hub.read_hub(source, size, handling, keep_back)
    mean, std = train.statistics()
    return Dataset(Path(source.removeprefix(hub.PREFIX)).name, train, test, names, mean, std, recipe=recipe)


def _from_path(
    path: Path, size: int | None, recipe: dict[str, Any], handling: Handling, keep_back: KeepBack | None
) -> Dataset:
    """The dataset in an image folder or an .npz file."""
    if hub.is_saved(path):
        return _from_hub(str(path), size, recipe, handling, keep_back)
    if (path / "run.json").is_file():
        raise M3DError(f"{path}: is the folder of a run, not of images; {resuming(path)} continues it")
    if path.is_dir():
        train, test, names = folder.read_folder(path, size, handling=handling, keep_back=keep_back)
        mean, std = train.statistics()
        return Dataset(path.name, train, test, names, mean, std, recipe=recipe)
    if path.suffix.lower() != ".npz":
        raise M3DError(f"{path}: is neither a folder of images nor an .npz file")
    arrays, record = readers.read_npz(path, test=keep_back is None), official.find(path.stem)
    if keep_back is not None:
        arrays = keep_back.of_arrays(arrays, _names(arrays, record, str(path)), str(path))
    return _from_arrays(arrays, record, record.name if record else path.stem, size, recipe, where=str(path))


def _from_arrays(
    arrays: Arrays, record: Record | None, name: str, size: int | None, recipe: dict[str, Any], *, where: str = ""
) -> Dataset:
    """A dataset of arrays, with the class names and statistics of its record where it has one."""
    where = where or name
    names = _names(arrays, record, where)
    channels = arrays.x_train.shape[3]
    if record and (len(names), channels) != (len(record.class_names), record.channels):
        raise M3DError(
            f"{where}: holds {len(names)} classes of {channels}-channel images, but {record.name} has "
            f"{len(record.class_names)} classes and {record.channels} channels; rename it if it is another dataset"
        )
    train = _sorted(arrays.x_train, arrays.y_train, names, size, f"{where}: train")
    test = _sorted(arrays.x_test, arrays.y_test, names, size, f"{where}: test")
    mean, std = (record.mean, record.std) if record and record.mean else train.statistics()
    mirror, cutmix = (record.mirror, record.cutmix) if record else (True, True)
    return Dataset(name, train, test, names, mean, std, mirror=mirror, recipe=recipe, cutmix=cutmix)


def _sorted(x: np.ndarray, y: np.ndarray, names: tuple[str, ...], size: int | None, split: str) -> ClassData:
    """Images [N, h, w, ch] and labels [N] as class data, resized if asked."""
    return ClassData.from_labels(x if size is None else folder.resize(x, size), y, names, split)


def _names(arrays: Arrays, record: Record | None, where: str) -> tuple[str, ...]:
    """The classes' names: the file's, else the record's, else numbers."""
    return arrays.class_names or (record.class_names if record else _numbered(arrays.y_train, f"{where}: train"))


def _numbered(labels: np.ndarray, split: str) -> tuple[str, ...]:
    """Class names for a file that has none: 0, 1, 2, ..."""
    if not len(labels):
        return ()
    missing = np.flatnonzero(np.bincount(labels) == 0)
    if len(missing):
        shown = ", ".join(map(str, missing[:10])) + (" ..." if len(missing) > 10 else "")
        raise M3DError(f"{split}: no image has the labels {shown}; allowed: 0 to {labels.max()} without gaps")
    return tuple(map(str, range(int(labels.max()) + 1)))
