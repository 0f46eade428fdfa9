"""Image folders: ``root/{train,test}/class/*.png``, or any other format, listed without opening a file."""

from __future__ import annotations

import hashlib
import os
import unicodedata
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from m3d.data.classes import ClassData
from m3d.data.ingest import Handling, read
from m3d.data.keep_back import KeepBack
from m3d.decode import Encoded, fit
from m3d.errors import M3DError
from m3d.limits import IMAGE_SUFFIXES
from m3d.wording import option

_TEST_FOLDERS = ("test", "val", "valid", "validation")  # the first that exists is the test split
_LAYOUT = "expected: train/CLASS/*.png and test/CLASS/*.png (or val, valid, validation; any image format)"


class FolderFiles:
    """The image files of a split, sorted by class and name: a million of them are a few arrays, not a million objects.

    Links to files and class folders are followed; links to folders within a class are not, so there can be no loop.
    """

    def __init__(self, root: Path, classes: Sequence[str]):
        self.root, self.class_names = root, tuple(classes)
        self._names = bytearray()  # relative to root, one after the other
        ends, counts, stamps = array("q", [0]), array("q"), array("q")
        for name in classes:
            before = len(ends)
            for file, size, changed in _image_files(root / name):
                self._names += os.fsencode(f"{name}/{file}")
                ends.append(len(self._names))
                stamps.extend((size, changed))
            counts.append(len(ends) - before)
            if not counts[-1]:
                kinds = ", ".join(suffix[1:] for suffix in IMAGE_SUFFIXES)
                raise M3DError(f"{root / name}: class {name!r} has no image; every class needs at least one ({kinds})")
        self._ends = np.frombuffer(ends, np.int64)  # [N + 1]
        self.count = np.frombuffer(counts, np.int64)  # [C]
        self._stamps = np.frombuffer(stamps, np.int64)  # [2 N]: size and time of change of every file

    def __len__(self) -> int:
        return len(self._ends) - 1

    def name(self, index: int) -> str:
        return str(self.root / os.fsdecode(bytes(self._names[self._ends[index] : self._ends[index + 1]])))

    def encoded(self, first: int, last: int) -> Sequence[Encoded]:
        return [self.name(index) for index in range(first, last)]

    def key(self) -> str:
        """Digest of place, names, sizes and times of change: equal as long as nobody touched the files."""
        head = repr((str(self.root), self.class_names, self.count.tolist()))
        digest = hashlib.sha256(head.encode("utf-8", "surrogateescape"))
        digest.update(self._names)
        for part in (self._ends, self._stamps):
            digest.update(part.data)
        return digest.hexdigest()


def read_folder(
    root: Path,
    size: int | None,
    classes: Sequence[str] | None = None,
    handling: Handling | None = None,
    keep_back: KeepBack | None = None,
) -> tuple[ClassData, ClassData, tuple[str, ...]]:
    """(train, test, class names) of an image folder; class names are the sorted names of the folders in ``train``.

    With ``classes`` only those folders are read, in that order; the others are not even listed.
    ``keep_back`` makes the test split of a folder that has none, of its ``train`` or of the class folders themselves.
    Images have one channel if all training images are greyscale, else three; see :func:`m3d.decode.decode`.
    """
    first = classes[0] if classes else ""  # a folder without it, as ILSVRC's unlabelled test, is not the test split
    test_root = next((root / name for name in _TEST_FOLDERS if (root / name / first).is_dir()), None)
    if keep_back is not None:
        base = _undivided(root, keep_back)
        names = _class_names(base, classes)
        return *read(*keep_back.of(FolderFiles(base, names)), size, handling or Handling()), names
    if not (root / "train").is_dir() or test_root is None:
        missing = "train" if test_root is not None else "test" if (root / "train").is_dir() else "train or test"
        kept_back = f"{option('test_fraction', 0.2)}, which keeps back a part of each class to test on"
        instead = "" if test_root else f", or CLASS/*.png with {kept_back}"
        raise M3DError(f"{root}: has no {missing} folder; {_LAYOUT}{instead}")
    names, test_names = _class_names(root / "train", classes), _class_names(test_root, classes)
    if set(names) != set(test_names):
        missing = ", ".join(sorted(set(names) - set(test_names))) or "none"
        extra = ", ".join(sorted(set(test_names) - set(names))) or "none"
        raise M3DError(f"{test_root}: must have the classes of train; missing: {missing}; not in train: {extra}")
    train, test = read(FolderFiles(root / "train", names), FolderFiles(test_root, names), size, handling or Handling())
    return train, test, names


def _undivided(root: Path, keep_back: KeepBack) -> Path:
    """The folder whose class folders are to be divided: ``train`` where that is a split, else ``root`` itself."""
    folders = [path.name for path in sorted(root.iterdir()) if not path.name.startswith(".") and _is_folder(path)]
    splits = [name for name in folders if name in ("train", *_TEST_FOLDERS) and _holds_folders(root / name)]
    classes = [name for name in folders if name not in splits]
    if splits and classes:
        raise M3DError(
            f"{root}: {splits[0]!r} holds folders, as a split does, but beside it is {classes[0]!r}; "
            f"put all class folders into {root / 'train'}, or directly into {root}"
        )
    if set(splits) - {"train"}:
        raise keep_back.refuse(str(root))
    return root / "train" if splits else root


def _holds_folders(path: Path) -> bool:
    """Whether this holds folders and no images, as a split does; a class of that name holds images."""
    inside = [p for p in path.iterdir() if not p.name.startswith(".")]
    return any(p.is_dir() for p in inside) and not any(p.name.lower().endswith(IMAGE_SUFFIXES) for p in inside)


def resize(images: np.ndarray, size: int) -> np.ndarray:
    """Images [N, h, w, ch] uint8, brought to [N, size, size, ch] in the same way as those of a folder."""
    if images.shape[1:3] == (size, size):
        return images
    grey = images.shape[3] == 1
    result = np.empty((len(images), size, size, images.shape[3]), np.uint8)
    for index, pixels in enumerate(images):
        fitted = np.asarray(fit(Image.fromarray(np.ascontiguousarray(pixels[..., 0] if grey else pixels)), size))
        result[index] = fitted[..., None] if grey else fitted
    return result


def _class_names(split: Path, wanted: Sequence[str] | None) -> tuple[str, ...]:
    """The names of the class folders of a split in sorted order, or those of ``wanted`` that are there."""
    if wanted is None:
        names = sorted(path.name for path in split.iterdir() if not path.name.startswith(".") and _is_folder(path))
    else:
        names = [name for name in wanted if (split / name).is_dir()]
    if not names:
        raise M3DError(f"{split}: has no class folders; {_LAYOUT}")
    seen: dict[str, str] = {}
    for name in names:
        # One class written in two ways; and a file system that ignores case would hold only one of them.
        other = seen.setdefault(unicodedata.normalize("NFC", name).casefold(), name)
        if other != name:
            raise M3DError(f"{split}: the class folders {other!r} and {name!r} differ only in case; merge them")
    for name in names:
        if split.resolve().is_relative_to((split / name).resolve()):
            raise M3DError(f"{split / name}: this link leads back to a folder that holds it; remove it")
    return tuple(names)


def _is_folder(path: Path) -> bool:
    """Whether this is a folder, or a link to one; a link that leads nowhere is an error."""
    if path.is_symlink() and not path.exists():
        raise M3DError(f"{path}: is a link that leads nowhere; repair or remove it")
    return path.is_dir()


def _image_files(folder: Path) -> list[tuple[str, int, int]]:
    """(path relative to ``folder``, size, time of change) of every image file, sorted; hidden ones are ignored."""
    found, inside = [], [""]
    while inside:
        prefix = inside.pop()
        with os.scandir(folder / prefix) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    inside.append(f"{prefix}{entry.name}/")
                elif entry.name.lower().endswith(IMAGE_SUFFIXES) and (stamp := _stamp(entry)) is not None:
                    found.append((f"{prefix}{entry.name}", *stamp))
    found.sort(key=lambda file: file[0].split("/"))
    return found


def _stamp(entry: os.DirEntry[str]) -> tuple[int, int] | None:
    """(size, time of change) of a file; None for what is none. A link that leads nowhere is a bad image."""
    try:
        if not entry.is_file():
            return (-1, 0) if entry.is_symlink() and not Path(entry.path).exists() else None
        status = entry.stat()
    except OSError:  # a link to itself
        return -1, 0
    return status.st_size, status.st_mtime_ns
