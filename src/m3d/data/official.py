"""The datasets known by name, as records, and the search for their files: on this machine first, then by download."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path

from m3d.data import readers
from m3d.data.readers import Arrays
from m3d.errors import M3DError
from m3d.registry import canonical
from m3d.wording import option

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class File:
    """One official file and its md5s."""

    name: str
    md5: str = ""  # of the file as it is downloaded
    content: str = ""  # of what a .gz holds: right also for a file that was unpacked, or packed again by a distribution


@dataclass(frozen=True)
class Layout:
    """One form in which people keep a dataset: these files, together in one of these folders."""

    files: tuple[File, ...]
    folders: tuple[str, ...]  # below the data root, "" being the root itself; an absolute one is taken as it is
    read: Callable[[Sequence[Path]], Arrays]


@dataclass(frozen=True)
class Record:
    """All that is known of a named dataset."""

    name: str
    class_names: tuple[str, ...]
    channels: int
    mirror: bool  # whether a mirrored image still shows its class
    mean: tuple[float, ...] = ()  # empty: computed from the training images
    std: tuple[float, ...] = ()
    counts: tuple[int, int] | None = None  # images for training and for testing in the official files
    url: str = ""  # the folder on the web
    layouts: tuple[Layout, ...] = ()  # in the order they are looked for; the last one is what is downloaded
    bundled: str = ""  # a file of this package that holds the whole dataset
    cutmix: bool = True  # whether training may paste parts of its images into others


# ------------------------------------------------------------------------------------------------------------ records


def _words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


_DIGIT_NAMES = _words("0 1 2 3 4 5 6 7 8 9")
_FASHION_NAMES = (*_words("T-shirt/top Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag"), "Ankle boot")
_CIFAR10_NAMES = _words("airplane automobile bird cat deer dog frog horse ship truck")
_CIFAR100_NAMES = _words(
    """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man
    maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree
    plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail
    snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout
    tulip turtle wardrobe whale willow_tree wolf woman worm
    """
)
_CIFAR10_BATCHES = _words("data_batch_1 data_batch_2 data_batch_3 data_batch_4 data_batch_5 test_batch")
_CIFAR_URL = "https://www.cs.toronto.edu/~kriz/"
# As in the paper's own code: CIFAR-10's numbers for both, to be comparable (others use CIFAR-100's own).
# (The deviations are averages of each image's own; that of all pixels is about 0.247.)
_CIFAR_MEAN, _CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


def _idx_layouts(name: str, md5s: Sequence[tuple[str, str]], *folders: str) -> tuple[Layout, ...]:
    """The four idx files of an MNIST-like dataset, plain and as .gz; ``md5s``: of each .gz and of its content."""
    stems = [f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    plain = tuple(File(stem, content=inner) for stem, (_, inner) in zip(stems, md5s, strict=True))
    packed = tuple(File(f"{stem}.gz", outer, inner) for stem, (outer, inner) in zip(stems, md5s, strict=True))
    places = (name, *folders, "")  # last, as other datasets have files of these very names
    return Layout(plain, places, readers.read_idx_files), Layout(packed, places, readers.read_idx_files)


def _cifar_layouts(
    name: str, folder: str, archive: File, batches: Sequence[str], decode: readers.Decode
) -> tuple[Layout, ...]:
    """CIFAR's ``batches``, the last of which is the test set: unpacked in ``folder``, and in their ``archive``."""
    loose = partial(readers.read_cifar, decode=decode)
    packed = partial(readers.read_cifar, decode=decode, members=batches)
    return (
        Layout(tuple(File(batch) for batch in batches), (folder, f"{name}/{folder}"), loose),
        Layout((archive,), ("", name), packed),
    )


_ALL = (
    Record("digits", _DIGIT_NAMES, channels=1, mirror=False, bundled="digits.npz"),
    Record(
        "mnist",
        _DIGIT_NAMES,
        channels=1,
        mirror=False,
        cutmix=False,  # as in the code of IDC and M3D; with it, networks get worse the longer they train (LAB.md)
        mean=(0.1307,),
        std=(0.3081,),
        counts=(60_000, 10_000),
        url="https://ossci-datasets.s3.amazonaws.com/mnist/",
        layouts=_idx_layouts(
            "mnist",
            [
                ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
                ("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
                ("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
                ("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
            ],
            "MNIST/raw",
            "MNIST",
        ),
    ),
    Record(
        "fashion-mnist",
        _FASHION_NAMES,
        channels=1,
        mirror=True,
        mean=(0.2861,),
        std=(0.3530,),
        counts=(60_000, 10_000),
        url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        layouts=_idx_layouts(
            "fashion-mnist",
            [
                ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
                ("25c81989df183df01b3e8a0aad5dffbe", "9018921c3c673c538a1fc5bad174d6f9"),
                ("bef4ecab320f06d8554ea6380940ec79", "8181f5470baa50b63fa0f6fddb340f0a"),
                ("bb300cfdad3c16e7a12a480ee83cd310", "15d484375f8d13e6eb1aabb0c3f46965"),
            ],
            "FashionMNIST/raw",
            "FashionMNIST",
            "fashion_mnist",
            "/usr/share/datasets/fashion-mnist",  # Debian's package dataset-fashion-mnist, which packs the files again
        ),
    ),
    Record(
        "cifar10",
        _CIFAR10_NAMES,
        channels=3,
        mirror=True,
        mean=_CIFAR_MEAN,
        std=_CIFAR_STD,
        counts=(50_000, 10_000),
        url=_CIFAR_URL,
        layouts=(
            *_cifar_layouts(
                "cifar10",
                "cifar-10-batches-py",
                File("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),
                _CIFAR10_BATCHES,
                partial(readers.cifar_pickle, label_key="labels"),
            ),
            *_cifar_layouts(
                "cifar10",
                "cifar-10-batches-bin",
                File("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
                [f"{batch}.bin" for batch in _CIFAR10_BATCHES],
                partial(readers.cifar_records, label_bytes=1),
            ),
        ),
    ),
    Record(
        "cifar100",
        _CIFAR100_NAMES,
        channels=3,
        mirror=True,
        mean=_CIFAR_MEAN,
        std=_CIFAR_STD,
        counts=(50_000, 10_000),
        url=_CIFAR_URL,
        layouts=(
            *_cifar_layouts(
                "cifar100",
                "cifar-100-python",
                File("cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),
                ("train", "test"),
                partial(readers.cifar_pickle, label_key="fine_labels"),
            ),
            *_cifar_layouts(
                "cifar100",
                "cifar-100-binary",
                File("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),
                ("train.bin", "test.bin"),
                partial(readers.cifar_records, label_bytes=2),  # the coarse label, then the fine one
            ),
        ),
    ),
    Record(
        "svhn",
        _DIGIT_NAMES,
        channels=3,
        mirror=False,
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
        counts=(73_257, 26_032),
        url="http://ufldl.stanford.edu/housenumbers/",
        layouts=(
            Layout(
                (
                    File("train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
                    File("test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
                ),
                ("", "svhn", "SVHN"),
                readers.read_svhn,
            ),
        ),
    ),
)
RECORDS = {record.name: record for record in _ALL}


def find(name: str) -> Record | None:
    """The record of a name written with hyphens, underscores or neither; None if there is none."""
    letters = canonical(name).replace("-", "")
    return next((record for record in _ALL if record.name.replace("-", "") == letters), None)


# ------------------------------------------------------------------------------------------------------------- search


def read(record: Record, root: Path, *, download: bool = True) -> Arrays:
    """A named dataset from this package, from files below ``root``, or from the web, in this order."""
    if record.bundled:
        with resources.as_file(resources.files("m3d.data") / record.bundled) as path:
            return readers.read_npz(path)
    npz = _find_npz(record, root)
    if npz is not None:
        return readers.read_npz(npz)
    refused: list[Path] = []
    for layout in record.layouts:
        for folder in layout.folders:
            paths = [root / folder / file.name for file in layout.files]
            if not all(path.is_file() for path in paths):
                continue
            wrong = [path for path, file in zip(paths, layout.files, strict=True) if not _genuine(path, file)]
            if not wrong:
                return _complete(record, layout.read(paths), paths)
            refused += wrong
    if not download:
        raise _missing(record, root, refused, "and downloading is switched off")
    return _complete(record, *_download(record, root, refused))


def _find_npz(record: Record, root: Path) -> Path | None:
    """The .npz below ``root`` that is called like the dataset, in any spelling; the canonical one is preferred."""
    found = [path for path in root.glob("*.npz") if (known := find(path.stem)) and known.name == record.name]
    return min(found, key=lambda path: (path.stem != record.name, path.name), default=None)


def _genuine(path: Path, file: File) -> bool:
    """Whether a file has the official content, as far as that is known."""
    try:
        if file.content:
            return hashlib.md5(readers.content(path), usedforsecurity=False).hexdigest() == file.content
    except M3DError:
        return False
    if not file.md5:
        return True  # a batch of an unpacked archive: the number of images is checked when it has been read
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, partial(hashlib.md5, usedforsecurity=False)).hexdigest() == file.md5


def _complete(record: Record, arrays: Arrays, paths: Sequence[Path]) -> Arrays:
    """The same arrays, if there are as many images as there should be."""
    counts = len(arrays.x_train), len(arrays.x_test)
    if record.counts is not None and counts != record.counts:
        raise M3DError(
            f"{record.name}: {counts[0]} + {counts[1]} images in {', '.join(map(str, paths))}; "
            f"the dataset has {record.counts[0]} + {record.counts[1]}"
        )
    return arrays


def _download(record: Record, root: Path, refused: Sequence[Path]) -> tuple[Arrays, list[Path]]:
    """The official files, fetched into the dataset's own folder below ``root``, read."""
    try:
        import pooch  # only a download needs it, and the web libraries it brings take long to import
    except ImportError as error:
        raise M3DError(
            f"{record.name} is not below {str(root)!r}, and downloading it needs the package pooch, which is not "
            f"installed; install it, or point {option('data_root')} or M3D_DATA at the data"
        ) from error

    pooch.get_logger().setLevel(logging.WARNING)  # it writes to the terminal by itself; we log instead
    layout, folder = record.layouts[-1], root / record.name
    paths = []
    for file in layout.files:
        url = f"{record.url.rstrip('/')}/{file.name}"
        log.info("downloading %s to %s", url, folder)
        try:
            # Written to a temporary file, checked, and only then renamed: no half or wrong file is ever left.
            path = pooch.retrieve(url, known_hash=f"md5:{file.md5}", fname=file.name, path=folder)
        except (OSError, ValueError) as error:  # unreachable, not there or not writable; or the wrong checksum
            raise _missing(record, root, refused, f"and {url} could not be downloaded: {error}") from error
        paths.append(Path(path))
    return layout.read(paths), paths


def _missing(record: Record, root: Path, refused: Sequence[Path], why: str) -> M3DError:
    """The error for a dataset that is nowhere: what was looked for, where, and how to provide it."""
    forms = " or ".join(_describe(layout) for layout in reversed(record.layouts))
    other = f" Not the official files (md5 differs): {', '.join(map(str, refused))}." if refused else ""
    return M3DError(
        f"dataset {record.name!r} is not in {root} {why}.{other} Put {record.name}.npz or {forms} there, "
        f"or name the folder that has them with {option('data_root')} or the environment variable M3D_DATA."
    )


def _describe(layout: Layout) -> str:
    """The files of a layout, in their folder where they must be in one."""
    files = " + ".join(file.name for file in layout.files)
    return files if "" in layout.folders else f"{layout.folders[0]} (with {files})"
