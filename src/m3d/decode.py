"""One encoded image to pixels of one size and one colour mode, and the process that does it for thousands of them.

Nothing heavier than Pillow is imported: a decoding process starts in a fraction of a second and stays small.
"""

from __future__ import annotations

import io
import json
import os
import struct
import sys
import zlib
from dataclasses import dataclass
from typing import IO, TypeAlias

import numpy as np
from PIL import Image, ImageOps

from m3d.errors import M3DError

LARGEST = 2**26  # pixels of an image (8,192 × 8,192): a few kilobytes of file can claim a picture that fills the memory
# What Pillow raises for a damaged image depends on the format.
_UNREADABLE = (
    OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, OverflowError, struct.error,
    zlib.error, Image.DecompressionBombError,
)  # fmt: skip
Encoded: TypeAlias = str | bytes  # the path of an image file, or its contents


class BadImage(M3DError):
    """Why one image cannot be used; who catches it knows which image it was."""


@dataclass(frozen=True)
class Look:
    """What images are brought to: one channel or three, and with ``size`` the centre of so many pixels a side."""

    grey: bool
    size: int | None


def decode(encoded: Encoded, look: Look) -> np.ndarray:
    """An image as [ch, h, w] uint8.

    EXIF rotation is applied, the first frame of several is taken, transparent pixels are shown on white, 16 bits are
    scaled to 8. With a size, the shorter side is resized to it (bicubic, antialiased) and the centre is cropped.
    """
    try:
        with _open(encoded) as file:
            image = _flatten(ImageOps.exif_transpose(file), "L" if look.grey else "RGB")
    except _UNREADABLE as error:
        raise _bad(error) from error
    pixels = np.asarray(image if look.size is None else fit(image, look.size))
    return pixels[None] if look.grey else pixels.transpose(2, 0, 1)


def is_grey(encoded: Encoded) -> bool:
    """Whether an image has no colours, from its header alone; one with a palette counts as coloured."""
    try:
        with _open(encoded) as image:
            return image.mode in ("1", "L", "LA", "La") or image.mode.startswith("I")
    except _UNREADABLE as error:
        raise _bad(error) from error


def fit(image: Image.Image, size: int) -> Image.Image:
    """The centre ``size``×``size`` of an image whose shorter side is first resized to ``size``."""
    short = min(image.size)
    width, height = (max(size, side * size // short) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))


def _open(encoded: Encoded) -> Image.Image:
    """The image, its header read and its claimed size checked; its pixels are still in the file."""
    image = Image.open(io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded)
    width, height = image.size
    if width * height > LARGEST:
        image.close()
        raise ValueError(f"it has {width}×{height} pixels; allowed: at most {LARGEST:,}, as 8192×8192")
    return image


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


def _bad(error: BaseException) -> BadImage:
    """The reason in one line, without the path that Pillow and the system add."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if reason.startswith("cannot identify image file"):
        reason = "cannot identify image file"
    return BadImage(" ".join(reason.split()) or type(error).__name__)


# ------------------------------------------------------------------------------------------------- a decoding process


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Decode chunk after chunk into a file of pixels, until ``requests`` ends.

    The first line says what to make; each later one is a chunk: the number of its first image, and the paths of its
    images or the sizes of their contents, which follow. A reply names the chunk once its pixels are safely on the disk.
    """
    task = json.loads(requests.readline())
    look, shape = Look(task["grey"], task["size"]), tuple(task["shape"])
    with open(task["file"], "r+b") as file:  # noqa: PTH123 (this must start fast)
        for line in requests:
            chunk = json.loads(line)
            if "paths" in chunk:
                images: list[Encoded] = chunk["paths"]
            else:
                images = [requests.read(size) for size in chunk["sizes"]]
            reply = {"first": chunk["first"], **_decode_chunk(images, look, shape, file.fileno(), chunk["first"])}
            replies.write(json.dumps(reply).encode() + b"\n")
            replies.flush()


def _decode_chunk(
    images: list[Encoded], look: Look, shape: tuple[int, ...], file: int, first: int
) -> dict[str, list[tuple[int, str]] | list[tuple[int, int, int]] | str]:
    """Write a chunk; what came back are the bad images, those of another size, or why nothing could be written."""
    pixels = np.zeros((len(images), *shape), np.uint8)
    bad: list[tuple[int, str]] = []
    odd: list[tuple[int, int, int]] = []  # number, width, height
    for index, encoded in enumerate(images):
        try:
            image = decode(encoded, look)
        except BadImage as error:
            bad.append((first + index, str(error)))
            continue
        if image.shape == shape:
            pixels[index] = image
        else:
            odd.append((first + index, image.shape[2], image.shape[1]))
    try:
        _write_whole(file, pixels.data.cast("B"), first * int(np.prod(shape)))
        os.fsync(file)
    except OSError as error:
        return {"error": error.strerror or str(error)}
    return {"bad": bad, "odd": odd}


def _write_whole(file: int, content: memoryview, at: int) -> None:
    """All of ``content``; one call writes at most 2 GB, or less on a full disk."""
    while content:
        written = os.pwrite(file, content, at)
        content, at = content[written:], at + written


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
