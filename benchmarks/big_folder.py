"""A folder of many small images: how fast its cache is built, how much memory that takes, and when the first step ends.

    python benchmarks/big_folder.py make FOLDER --images 100000
    python benchmarks/big_folder.py measure FOLDER

Half of the images are JPEG, half PNG, 64×64, in 100 classes. ``measure`` runs ``m3d condense`` twice in its own process
with the images kept on disk, first with an empty cache, and watches the memory of that process and its children.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 64


def make(folder: Path, images: int, classes: int) -> None:
    """``images`` training images and ten test images per class: a coarse pattern of the class, with noise."""
    random = np.random.default_rng(0)
    for split, per_class in (("train", images // classes), ("test", 10)):
        for c in range(classes):
            home = folder / split / f"class{c:04d}"
            home.mkdir(parents=True, exist_ok=True)
            pattern = random.integers(0, 256, (8, 8, 3))
            for i in range(per_class):
                coarse = np.clip(pattern + random.integers(-60, 60, (8, 8, 3)), 0, 255).astype(np.uint8)
                image = Image.fromarray(coarse).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
                image.save(home / (f"{i:06d}.jpg" if i % 2 else f"{i:06d}.png"))


def measure(folder: Path, arguments: list[str]) -> None:
    """Two runs of one step, with an empty and with a full cache."""
    cache = Path(tempfile.mkdtemp(prefix="m3d-cache-"))
    try:
        for label in ("empty cache", "full cache"):
            seconds, anonymous, file = _run(folder, cache, arguments)
            print(
                f"{label}: {seconds:.1f} s to the end of the first step, at most {anonymous / 2**20:.0f} MiB of own "
                f"memory (all processes) and {file / 2**20:.0f} MiB of mapped files"
            )
    finally:
        shutil.rmtree(cache)


def _run(folder: Path, cache: Path, arguments: list[str]) -> tuple[float, int, int]:
    """(seconds, largest anonymous memory, largest file-backed memory) of one ``m3d condense`` and its children."""
    command = [sys.executable, "-m", "m3d", "condense", str(folder), "--resident", "no", "--steps", "1", "--overwrite"]
    command += ["--batch-real", "8", "--out", str(cache / "run"), *arguments]
    began, most = time.perf_counter(), [0, 0]
    process = subprocess.Popen(command, env={**os.environ, "M3D_CACHE": str(cache)})
    while process.poll() is None:
        now = np.sum([_memory(pid) for pid in [process.pid, *_children(process.pid)]], axis=0)
        most = [max(a, int(b)) for a, b in zip(most, now, strict=True)]
        time.sleep(0.05)
    if process.returncode:
        sys.exit(process.returncode)
    return time.perf_counter() - began, most[0], most[1]


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _memory(pid: int) -> tuple[int, int]:
    """(anonymous, file-backed) resident bytes of a process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss")}
    return found.get("RssAnon", 0), found.get("RssFile", 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("make", "measure"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--classes", type=int, default=100)
    known, rest = parser.parse_known_args()
    if known.what == "make":
        make(known.folder, known.images, known.classes)
    else:
        measure(known.folder, rest)


if __name__ == "__main__":
    main()
