"""Images as they are found: what is odd is read as it should be, what is broken is named, or left out and listed."""

from __future__ import annotations

import logging
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import m3d
from m3d.data import Dataset, load_data
from m3d.data.folder import read_folder
from m3d.decode import LARGEST
from m3d.errors import M3DError

RANDOM = np.random.default_rng(0)
MODES = ["yes", "no"]  # in memory, and in the cache on the disk


def noise(size: tuple[int, int] = (8, 8)) -> Image.Image:
    return Image.fromarray(RANDOM.integers(0, 256, (size[1], size[0], 3), np.uint8))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two classes with three 8×8 colour images each in train and one in test; a cache of its own."""
    monkeypatch.setenv("M3D_CACHE", str(tmp_path / "cache"))
    for split, many in (("train", 3), ("test", 1)):
        for name in ("cat", "dog"):
            (tmp_path / "pets" / split / name).mkdir(parents=True)
            for i in range(many):
                noise().save(tmp_path / "pets" / split / name / f"{i}.png")
    return tmp_path / "pets"


def first_image(data: Dataset) -> np.ndarray:
    """[h, w, ch] of the first training image."""
    return data.train.images[0].permute(1, 2, 0).numpy()


def write_png(path: Path, pixels: np.ndarray) -> None:
    """A 16-bit colour PNG, which Pillow reads but does not write."""
    height, width, _ = pixels.shape
    raw = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    chunks = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


def huge_png(path: Path, side: int) -> None:
    """A small file that claims side × side pixels."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    body = zlib.compress(b"\0" * 1000)
    parts = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    chunks = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


# ------------------------------------------------------------------------------------------------ odd, but read rightly


@pytest.mark.parametrize("resident", MODES)
def test_cmyk_jpeg_has_its_colours(root: Path, resident: str) -> None:
    Image.new("RGB", (8, 8), (200, 40, 90)).convert("CMYK").save(root / "train" / "cat" / "0.jpg", quality=95)
    pixels = first_image(load_data(root, resident=resident)).astype(int)
    assert np.abs(pixels - (200, 40, 90)).max() <= 6


@pytest.mark.parametrize("resident", MODES)
def test_sixteen_bits_of_colour_are_scaled(root: Path, resident: str) -> None:
    values = RANDOM.integers(0, 65536, (8, 8, 3))
    write_png(root / "train" / "cat" / "0.png", values)
    assert np.abs(first_image(load_data(root, resident=resident)) - values / 257).max() <= 1


@pytest.mark.parametrize("resident", MODES)
def test_sixteen_bits_of_grey_are_scaled(root: Path, resident: str) -> None:
    values = RANDOM.integers(0, 65536, (8, 8)).astype(np.uint16)
    Image.fromarray(values).save(root / "train" / "cat" / "0.png")
    assert np.abs(first_image(load_data(root, resident=resident)) - values[..., None] / 257).max() <= 0.5


@pytest.mark.parametrize("resident", MODES)
def test_the_first_frame_of_an_animation_counts(root: Path, resident: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue")]
    frames[0].save(root / "train" / "cat" / "0.gif", save_all=True, append_images=frames[1:])
    assert first_image(load_data(root, resident=resident))[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("resident", MODES)
def test_rotation_of_a_photograph_is_applied(root: Path, resident: str) -> None:
    upright = np.zeros((8, 8, 3), np.uint8)
    upright[:, 4:] = 250
    exif = Image.Exif()
    exif[0x0112] = 6  # must be turned clockwise to be seen upright
    Image.fromarray(upright).save(root / "train" / "cat" / "0.jpg", exif=exif, quality=95)
    found = first_image(load_data(root, resident=resident)).astype(int)
    assert found[:4].max() < 40 and found[4:].min() > 210  # right became bottom


@pytest.mark.parametrize("resident", MODES)
def test_unicode_names(root: Path, resident: str) -> None:
    for split in ("train", "test"):
        (root / split / "dog").rename(root / split / "собака 犬")
    (root / "train" / "собака 犬" / "0.png").rename(root / "train" / "собака 犬" / "Übergröße 🐶.png")
    bad = root / "train" / "собака 犬" / "плохо.png"
    bad.write_bytes(b"x")
    data = load_data(root, resident=resident, on_bad_image="skip")
    assert data.class_names == ("cat", "собака 犬") and data.train.count.tolist() == [3, 3]
    with pytest.raises(M3DError, match=r"плохо.png: cannot be read"):
        load_data(root, resident=resident)


@pytest.mark.parametrize("resident", MODES)
def test_names_that_are_no_text(root: Path, resident: str) -> None:
    """A name of bytes that no alphabet has, as old disks hold them."""
    (root / "train" / "cat" / "0.png").rename(root / "train" / "cat" / "caf\udce9.png")
    (root / "train" / "cat" / "n\udcff.png").write_bytes(b"")
    assert load_data(root, resident=resident, on_bad_image="skip").train.count.tolist() == [3, 3]
    reports = list((root.parent / "cache" / "bad-images").iterdir())
    assert b"n\xff.png\t" in reports[0].read_bytes()


@pytest.mark.parametrize("resident", MODES)
def test_one_image_per_class_can_be_condensed(root: Path, resident: str) -> None:
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            for i in (1, 2):
                (root / split / name / f"{i}.png").unlink(missing_ok=True)
    data = load_data(root, resident=resident)
    assert data.train.count.tolist() == [1, 1]
    condensed = m3d.condense(data, 1, "dm", net="convnet2:width=8", steps=2, batch_real=4)
    assert condensed.images.shape == (2, 3, 8, 8)


# -------------------------------------------------------------------------------------------------------------- broken


def spoil(path: Path, kind: str) -> None:
    """Make ``path`` a broken image."""
    if kind == "truncated jpeg":
        noise((64, 64)).save(path.with_suffix(".jpg"))
        content = path.with_suffix(".jpg").read_bytes()
        path.with_suffix(".jpg").unlink()
        path.write_bytes(content[: len(content) // 2])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "no image":
        path.write_text("<html>404 Not Found</html>")
    elif kind == "bomb":
        huge_png(path, 10_000)
    elif kind == "larger bomb":  # Pillow itself refuses this one
        huge_png(path, 30_000)
    else:
        path.unlink(missing_ok=True)
        path.symlink_to(path.name if kind == "link to itself" else "nowhere.png")


KINDS = {
    "truncated jpeg": "truncated",
    "empty": "cannot identify image file",
    "no image": "cannot identify image file",
    "bomb": f"10000×10000 pixels; allowed: at most {LARGEST:,}",
    "larger bomb": "decompression bomb",
    "link to itself": "Too many levels of symbolic links",
    "link to nothing": "No such file",
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("resident", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_image_is_refused_or_left_out(
    root: Path, kind: str, resident: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = root / "train" / "dog" / "1.png"
    spoil(bad, kind)
    with pytest.raises(M3DError, match=r"dog/1.png: cannot be read as an image \(.*\); on_bad_image='skip'") as error:
        load_data(root, resident=resident)
    assert KINDS[kind] in str(error.value)
    with caplog.at_level(logging.WARNING):
        data = load_data(root, resident=resident, on_bad_image="skip")
    assert data.train.count.tolist() == [3, 2]
    assert np.array_equal(data.train.images[4].permute(1, 2, 0), Image.open(root / "train" / "dog" / "2.png"))
    (report,) = (root.parent / "cache" / "bad-images").iterdir()
    assert caplog.messages == [f"1 of 8 images cannot be read and are left out: {report}"]
    (line,) = report.read_text().splitlines()
    assert line.split("\t")[0] == str(bad) and KINDS[kind] in line.split("\t")[1]
    assert data.recipe["on_bad_image"] == "skip"
    assert load_data(**data.recipe).train.fingerprint == data.train.fingerprint


@pytest.mark.parametrize("resident", MODES)
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_class_left_empty_is_an_error(root: Path, resident: str, split: str) -> None:
    for path in (root / split / "dog").iterdir():
        path.write_bytes(b"")
    with pytest.raises(M3DError, match=rf"{split}/dog: class 'dog' has no image that can be read; see .*bad-images"):
        load_data(root, resident=resident, on_bad_image="skip")


@pytest.mark.parametrize("resident", MODES)
def test_nothing_but_broken_images(root: Path, resident: str) -> None:
    for path in (root / "train").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(M3DError, match="none of the 6 images can be read"):
        load_data(root, resident=resident, on_bad_image="skip")


@pytest.mark.parametrize("resident", MODES)
def test_another_size_is_an_error_even_where_bad_images_are_left_out(root: Path, resident: str) -> None:
    noise((9, 8)).save(root / "test" / "cat" / "0.png")
    with pytest.raises(M3DError, match=r"images differ in size: .*train/cat/0.png is 8×8, .*test/cat/0.png is 9×8"):
        load_data(root, resident=resident, on_bad_image="skip")


@pytest.mark.parametrize("option", ["on_bad_image", "resident"])
def test_unknown_choices_are_named(root: Path, option: str) -> None:
    with pytest.raises(M3DError, match="sometimes"):
        load_data(root, **{option: "sometimes"})


# ------------------------------------------------------------------------------------------------------------- folders


def test_class_folders_that_differ_in_case(root: Path) -> None:
    (root / "train" / "Cat").mkdir()
    noise().save(root / "train" / "Cat" / "0.png")
    with pytest.raises(M3DError, match=r"train: the class folders 'Cat' and 'cat' differ only in case; merge them"):
        read_folder(root, None)


def test_class_folders_that_differ_in_how_an_accent_is_written(root: Path) -> None:
    for name in ("\u00e9", "e\u0301"):
        (root / "train" / name).mkdir()
    with pytest.raises(M3DError, match="differ only in case"):
        read_folder(root, None)


def test_links_between_folders_make_no_loop(root: Path) -> None:
    (root / "train" / "cat" / "again").symlink_to(root / "train" / "cat")
    (root / "train" / "cat" / "up").symlink_to("..")
    assert read_folder(root, None)[0].count.tolist() == [3, 3]


def test_a_class_folder_may_be_a_link(root: Path) -> None:
    (root / "train" / "dog").rename(root.parent / "dogs")
    (root / "train" / "dog").symlink_to(root.parent / "dogs")
    assert read_folder(root, None)[0].count.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("target", "message"),
    [(".", "leads back to a folder that holds it"), ("loop", "leads nowhere"), ("gone", "leads nowhere")],
)
def test_a_class_folder_that_is_a_bad_link(root: Path, target: str, message: str) -> None:
    (root / "train" / "loop").symlink_to(target)
    with pytest.raises(M3DError, match=f"train/loop: .*{message}"):
        read_folder(root, None)


def test_labels_with_gaps(tmp_path: Path) -> None:
    x, y = np.zeros((6, 4, 4), np.uint8), np.array([0, 0, 3, 3, 5, 5])
    np.savez(tmp_path / "gaps.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.raises(M3DError, match=r"gaps.npz: train: no image has the labels 1, 2, 4; .*0 to 5 without gaps"):
        load_data(tmp_path / "gaps.npz")
