"""Image folders: formats, colours, transparency, rotation and sizes, and one error for each kind of bad folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from m3d.data import load_data
from m3d.data.folder import read_folder, resize
from m3d.errors import M3DError
from m3d.limits import IMAGE_SUFFIXES

RANDOM = np.random.default_rng(0)


def picture(
    colour: int | tuple[int, ...] = (200, 100, 50), size: tuple[int, int] = (6, 6), mode: str = "RGB"
) -> Image.Image:
    return Image.new(mode, size, colour)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder ``pets`` of two classes, with one 6×6 colour image each in train and test."""
    folder = tmp_path / "pets"
    for split in ("train", "test"):
        for name in ("dog", "cat"):
            (folder / split / name).mkdir(parents=True)
            picture().save(folder / split / name / "first.png")
    return folder


def replace_all(root: Path, image: Image.Image) -> None:
    for path in root.rglob("*.png"):
        image.save(path)


def test_folder_as_a_dataset(root: Path) -> None:
    pixels = RANDOM.integers(0, 256, (6, 6, 3), np.uint8)
    Image.fromarray(pixels).save(root / "train" / "dog" / "a_second.png")
    data = load_data(root)
    assert data.name == "pets"
    assert data.class_names == ("cat", "dog")
    assert data.train.count.tolist() == [1, 2]
    assert data.test.count.tolist() == [1, 1]
    assert data.shape == (3, 6, 6)
    assert np.array_equal(data.train.images[1].permute(1, 2, 0).numpy(), pixels)  # a_second comes before first
    assert data.mean[0] == pytest.approx((pixels[..., 0].mean() + 400) / 3 / 255, abs=1e-6)
    assert data.mirror
    assert dict(data.recipe) == {"source": str(root.resolve())}
    assert load_data(**data.recipe).train.fingerprint == data.train.fingerprint


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_other_names_of_the_test_split(root: Path, name: str) -> None:
    (root / "test").rename(root / name)
    assert len(read_folder(root, None)[1]) == 2


def test_test_is_preferred_to_val(root: Path) -> None:
    (root / "val" / "cat").mkdir(parents=True)
    assert len(read_folder(root, None)[1]) == 2


@pytest.mark.parametrize("suffix", [*IMAGE_SUFFIXES, ".JPEG"])
def test_formats(root: Path, suffix: str) -> None:
    image = picture(90, mode="L") if suffix == ".pgm" else picture((90, 90, 90))
    image.save(root / "train" / "cat" / f"second{suffix}")
    train, _, _ = read_folder(root, None)
    assert train.count.tolist() == [2, 1]
    assert (train.images[1].int() - 90).abs().max() <= 2


def test_hidden_and_other_files_are_ignored_and_nested_ones_are_not(root: Path) -> None:
    cat = root / "train" / "cat"
    (cat / "notes.txt").write_text("no image")
    (cat / ".hidden.png").write_text("no image")
    (cat / ".thumbnails").mkdir()
    (cat / ".thumbnails" / "small.png").write_text("no image")
    (root / "train" / ".cache").mkdir()
    (root / "train" / "readme.png").write_text("no image")
    (cat / "images").mkdir()
    picture().save(cat / "images" / "deep.png")
    train, _, names = read_folder(root, None)
    assert names == ("cat", "dog")
    assert train.count.tolist() == [2, 1]


# ------------------------------------------------------------------------------------------------------------- colour


@pytest.mark.parametrize(
    ("image", "value"),
    [
        (picture(77, mode="L"), 77),
        (picture(1, mode="1"), 255),
        (picture((77, 255), mode="LA"), 77),
        (Image.fromarray(np.full((6, 6), 77 * 257, np.uint16)), 77),
        (Image.fromarray(np.full((6, 6), 65535, np.uint16)), 255),
    ],
    ids=["8 bits", "1 bit", "with alpha", "16 bits", "16 bits white"],
)
def test_grey_images_have_one_channel(root: Path, image: Image.Image, value: int) -> None:
    replace_all(root, image)
    train, test, _ = read_folder(root, None)
    assert train.shape == test.shape == (1, 6, 6)
    assert train.images.unique().tolist() == [value]


def test_one_coloured_image_makes_all_coloured(root: Path) -> None:
    replace_all(root, picture(77, mode="L"))
    picture((1, 2, 3)).save(root / "train" / "dog" / "second.png")
    train, test, _ = read_folder(root, None)
    assert train.shape == test.shape == (3, 6, 6)
    assert train.images[0].unique().tolist() == [77]
    assert train.images[2, :, 0, 0].tolist() == [1, 2, 3]


def test_training_images_decide_for_the_test_images(root: Path) -> None:
    for path in (root / "train").rglob("*.png"):
        picture(77, mode="L").save(path)
    assert read_folder(root, None)[1].shape == (1, 6, 6)


def test_transparent_pixels_are_white(root: Path) -> None:
    clear = picture((10, 20, 30, 255), mode="RGBA")
    clear.putpixel((0, 0), (10, 20, 30, 0))
    clear.putpixel((1, 0), (10, 20, 30, 128))
    clear.save(root / "train" / "cat" / "first.png")
    pixels = read_folder(root, None)[0].images[0]
    assert pixels[:, 0, 0].tolist() == [255, 255, 255]
    assert pixels[:, 0, 1].tolist() == pytest.approx([132, 137, 142], abs=1)
    assert pixels[:, 1, 1].tolist() == [10, 20, 30]


def test_palette_with_a_transparent_entry(root: Path) -> None:
    image = picture(0, mode="P")
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((0, 0), 1)
    image.save(root / "train" / "cat" / "first.png", transparency=1)
    pixels = read_folder(root, None)[0].images[0]
    assert pixels[:, 0, 0].tolist() == [255, 255, 255]
    assert pixels[:, 0, 1].tolist() == [10, 20, 30]


def test_exif_rotation_is_applied(root: Path) -> None:
    pixels = RANDOM.integers(0, 256, (6, 6, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # must be turned clockwise to be seen upright
    Image.fromarray(pixels).save(root / "train" / "cat" / "first.png", exif=exif)
    assert np.array_equal(read_folder(root, None)[0].images[0].permute(1, 2, 0).numpy(), np.rot90(pixels, -1))


# --------------------------------------------------------------------------------------------------------------- size


def test_size_resizes_the_shorter_side_and_crops_the_centre(root: Path) -> None:
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 10:20] = 255
    Image.fromarray(wide).save(root / "train" / "cat" / "first.png")
    tall = np.ascontiguousarray(wide.transpose(1, 0, 2))
    Image.fromarray(tall).save(root / "train" / "dog" / "first.png")
    train = read_folder(root, 5)[0]
    assert train.shape == (3, 5, 5)
    assert train.images[:, :, 1:4, 1:4].min() == 255, "the white middle third is the crop"
    assert load_data(root, size=5).recipe["size"] == 5


def test_resizing_is_antialiased() -> None:
    stripes = np.zeros((1, 64, 64, 1), np.uint8)
    stripes[:, :, ::2] = 255
    small = resize(stripes, 8)
    assert small.shape == (1, 8, 8, 1)
    assert np.abs(small[:, 2:6, 2:6].astype(int) - 128).max() <= 3


def test_resize_to_the_same_size_changes_nothing() -> None:
    images = RANDOM.integers(0, 256, (3, 8, 8, 3), np.uint8)
    assert resize(images, 8) is images
    assert resize(images, 4).shape == (3, 4, 4, 3)


def test_different_sizes_name_two_files(root: Path) -> None:
    picture(size=(6, 7)).save(root / "test" / "dog" / "second.png")
    with pytest.raises(M3DError, match=r"train/cat/first.png is 6×6, .*test/dog/second.png is 6×7; .*with size$"):
        read_folder(root, None)
    assert read_folder(root, 6)[0].shape == (3, 6, 6)


@pytest.mark.parametrize("size", [0, -3])
def test_size_must_be_positive(root: Path, size: int) -> None:
    with pytest.raises(M3DError, match=f"size={size}"):
        load_data(root, size=size)


# --------------------------------------------------------------------------------------------------------- bad folders


@pytest.mark.parametrize(("gone", "message"), [("train", "has no train folder"), ("test", "has no test folder")])
def test_missing_split_says_the_layout(root: Path, gone: str, message: str) -> None:
    (root / gone).rename(root / "elsewhere")
    with pytest.raises(M3DError, match=f"pets: {message}; expected: train/CLASS"):
        read_folder(root, None)


def test_empty_folder_says_the_layout(tmp_path: Path) -> None:
    with pytest.raises(M3DError, match=r"has no train or test folder; expected: train/CLASS"):
        read_folder(tmp_path, None)


def test_split_without_classes(root: Path) -> None:
    (root / "test").rename(root / "old")
    (root / "test").mkdir()
    with pytest.raises(M3DError, match=r"test: has no class folders"):
        read_folder(root, None)


@pytest.mark.parametrize("split", ["train", "test"])
def test_empty_class_is_named(root: Path, split: str) -> None:
    (root / split / "dog" / "first.png").rename(root / "first.png")
    with pytest.raises(M3DError, match=f"{split}/dog: class 'dog' has no image"):
        read_folder(root, None)


def test_classes_of_test_must_be_those_of_train(root: Path) -> None:
    (root / "test" / "dog").rename(root / "test" / "wolf")
    with pytest.raises(M3DError, match=r"missing: dog; not in train: wolf"):
        read_folder(root, None)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("kind", ["text", "empty", "truncated"])
def test_unreadable_image_is_named(root: Path, split: str, kind: str) -> None:
    bad = root / split / "dog" / "first.png"
    Image.fromarray(RANDOM.integers(0, 256, (6, 6, 3), np.uint8)).save(bad)
    bad.write_bytes({"text": b"hello", "empty": b"", "truncated": bad.read_bytes()[:70]}[kind])
    with pytest.raises(M3DError, match=f"{split}/dog/first.png: cannot be read as an image"):
        read_folder(root, None)


def test_float_pixels_are_refused(root: Path) -> None:
    Image.fromarray(np.zeros((6, 6), np.float32)).save(root / "train" / "dog" / "second.tif")
    with pytest.raises(M3DError, match=r"second.tif: .*32-bit floats"):
        read_folder(root, None)
