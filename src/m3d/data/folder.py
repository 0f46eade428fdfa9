"""Image folders: ``root/{train,test}/class/*.png``, or any other format, as images of one size and one colour mode."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from m3d.data.classes import ClassData
from m3d.errors import M3DError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_TEST_FOLDERS = ("test", "val", "valid", "validation")  # the first that exists is the test split
_LAYOUT = "expected: train/CLASS/*.png and test/CLASS/*.png (or val, valid, validation; any image format)"
# What Pillow raises for a damaged image depends on the format.
_UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)


def read_folder(
    root: Path, size: int | None, classes: Sequence[str] | None = None
) -> tuple[ClassData, ClassData, tuple[str, ...]]:
    """(train, test, class names) of an image folder; class names are the sorted names of the folders in ``train``.

    With ``classes`` only those folders are read, in that order; the others are not even listed.
    Images have one channel if all training images are greyscale, else three. Transparent pixels are shown on white;
    EXIF rotation is applied. With ``size``, the shorter side is resized to it (bicubic, antialiased) and the centre
    is cropped.
    """
    first = classes[0] if classes else ""  # a folder without it, as ILSVRC's unlabelled test, is not the test split
    test_root = next((root / name for name in _TEST_FOLDERS if (root / name / first).is_dir()), None)
    if not (root / "train").is_dir() or test_root is None:
        missing = "train" if test_root is not None else "test" if (root / "train").is_dir() else "train or test"
        raise M3DError(f"{root}: has no {missing} folder; {_LAYOUT}")
    train, test = _list_classes(root / "train", classes), _list_classes(test_root, classes)
    if train.keys() != test.keys():
        missing = ", ".join(sorted(train.keys() - test.keys())) or "none"
        extra = ", ".join(sorted(test.keys() - train.keys())) or "none"
        raise M3DError(f"{test_root}: must have the classes of train; missing: {missing}; not in train: {extra}")
    files = [path for paths in train.values() for path in paths]
    grey = all(_is_grey(path) for path in files)
    model = files[0]  # every image must have the size of this one
    return _load(train, model, grey, size), _load(test, model, grey, size), tuple(train)


def resize(images: np.ndarray, size: int) -> np.ndarray:
    """Images [N, h, w, ch] uint8, brought to [N, size, size, ch] in the same way as those of a folder."""
    if images.shape[1:3] == (size, size):
        return images
    grey = images.shape[3] == 1
    result = np.empty((len(images), size, size, images.shape[3]), np.uint8)
    for index, pixels in enumerate(images):
        fitted = np.asarray(_fit(Image.fromarray(np.ascontiguousarray(pixels[..., 0] if grey else pixels)), size))
        result[index] = fitted[..., None] if grey else fitted
    return result


def _list_classes(split: Path, wanted: Sequence[str] | None) -> dict[str, list[Path]]:
    """The image files of every class of a split, both in sorted order; hidden files and other kinds are ignored."""
    if wanted is None:
        folders = sorted(path for path in split.iterdir() if path.is_dir() and not path.name.startswith("."))
    else:
        folders = [path for name in wanted if (path := split / name).is_dir()]
    if not folders:
        raise M3DError(f"{split}: has no class folders; {_LAYOUT}")
    classes = {folder.name: sorted(path for path in folder.rglob("*") if _is_image(path, folder)) for folder in folders}
    for name, paths in classes.items():
        if not paths:
            kinds = ", ".join(suffix[1:] for suffix in SUFFIXES)
            raise M3DError(f"{split / name}: class {name!r} has no image; every class needs at least one ({kinds})")
    return classes


def _is_image(path: Path, folder: Path) -> bool:
    """Whether a path below a class folder is an image file, neither hidden nor in a hidden folder."""
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return not hidden and path.suffix.lower() in SUFFIXES and path.is_file()


def _load(classes: dict[str, list[Path]], model: Path, grey: bool, size: int | None) -> ClassData:
    """All images of a split, decoded by several threads straight into the array that is kept."""
    files = [path for paths in classes.values() for path in paths]
    shape = _decode(model, grey, size).shape
    images = np.empty((len(files), *shape), np.uint8)  # [N, ch, h, w]

    def place(index: int) -> None:
        """Decode one image into its place."""
        pixels = _decode(files[index], grey, size)
        if pixels.shape != shape:
            raise M3DError(
                f"images differ in size: {model} is {shape[2]}×{shape[1]}, {files[index]} is "
                f"{pixels.shape[2]}×{pixels.shape[1]}; bring them to one size with --size N"
            )
        images[index] = pixels

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # Pillow decodes outside Python's lock
        for _ in pool.map(place, range(len(files))):
            pass  # in order, so that of several bad images the first is named
    return ClassData(torch.from_numpy(images), torch.tensor([len(paths) for paths in classes.values()]))


def _is_grey(path: Path) -> bool:
    """Whether an image has no colours, from its header alone; one with a palette counts as coloured."""
    try:
        with Image.open(path) as image:
            return image.mode in ("1", "L", "LA", "La") or image.mode.startswith("I")
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error


def _decode(path: Path, grey: bool, size: int | None) -> np.ndarray:
    """An image file as [ch, h, w] uint8."""
    try:
        with Image.open(path) as file:
            image = _flatten(ImageOps.exif_transpose(file), "L" if grey else "RGB")
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error
    pixels = np.asarray(image if size is None else _fit(image, size))
    return pixels[None] if grey else pixels.transpose(2, 0, 1)


def _flatten(image: Image.Image, mode: str) -> Image.Image:
    """Any image as 8-bit ``mode``, without transparency: it is shown on white, as on a page."""
    if image.mode == "F":
        raise ValueError("pixels are 32-bit floats; allowed: 8 or 16 bits a channel")
    if image.mode.startswith("I"):  # 16 bits, which Pillow may hold in 32
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError(f"pixels run from {values.min()} to {values.max()}; allowed: 8 or 16 bits a channel")
        image = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert(mode)


def _fit(image: Image.Image, size: int) -> Image.Image:
    """The centre ``size``×``size`` of an image whose shorter side is first resized to ``size``."""
    short = min(image.size)
    width, height = (max(size, side * size // short) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))


def _unreadable(path: Path, error: BaseException) -> M3DError:
    """The error for a file that is no image, or a damaged one."""
    return M3DError(f"{path}: cannot be read as an image ({error})")
