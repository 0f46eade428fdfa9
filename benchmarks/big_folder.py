"""A folder of many small images: how fast its cache is built, how much memory that takes, and when the first step ends.

    python benchmarks/big_folder.py make FOLDER --images 100000
    python benchmarks/big_folder.py measure FOLDER

Half of the images are JPEG, half PNG, 64×64, in 100 classes. ``measure`` loads them twice in a process of
its own with the images kept on disk, first with an empty cache, and watches that process's memory and its children's.
"""

from __future__ import annotations

import argparse
import json
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


# What is measured, in a process of its own: listing and decoding (or opening the cache), then a batch, then a step.
_CHILD = """
import json, resource, sys, time
began = time.perf_counter()
import m3d
imported = time.perf_counter()
data = m3d.load_data(sys.argv[1], resident="no")
loaded = time.perf_counter()
spent = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
reader = data.train.reader(0, int(sys.argv[2]))
reader.bring(0)
gathered = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
batch = time.perf_counter()
m3d.condense(data, 1, "dm", net="convnet3:width=32", steps=1, batch_real=int(sys.argv[2]), device="cpu")
first = time.perf_counter()
for step in range(1, 257):
    reader.bring(step)
streamed = 256 * data.classes * int(sys.argv[2]) / (time.perf_counter() - first)
print(json.dumps({"images": len(data.train) + len(data.test), "import": imported - began, "load": loaded - imported,
    "cpu": spent, "batch": batch - loaded, "first step": first - began, "loaded": own, "with a reader": gathered,
    "gathered": streamed}))
"""


def measure(folder: Path, batch: int) -> None:
    """With an empty and with a full cache: load, gather, make one step (dm, convnet3 of width 32, CPU)."""
    cache = Path(tempfile.mkdtemp(prefix="m3d-cache-"))
    try:
        for label in ("empty", "full"):
            found, anonymous, file = _run(folder, cache, batch)
            rate = found["images"] / found["load"]
            print(
                f"{label} cache: {found['images']} images in {found['load']:.1f} s ({rate:.0f} images/s), "
                f"{found['cpu']:.1f} CPU-seconds, first step "
                f"after {found['first step']:.1f} s; {found['gathered']:.0f} images/s gathered afterwards; at most "
                f"{found['loaded'] / 2**20:.0f} MiB in the main process until loaded, "
                f"{found['with a reader'] / 2**20:.0f} MiB with a reader, "
                f"{anonymous / 2**20:.0f} MiB own and {file / 2**20:.0f} MiB of files in all processes together"
            )
    finally:
        shutil.rmtree(cache)


def _run(folder: Path, cache: Path, batch: int) -> tuple[dict[str, float], int, int]:
    """(times, largest anonymous memory, largest file-backed memory) of the child and its own children."""
    most = [0, 0]
    process = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(folder), str(batch)],
        env={**os.environ, "M3D_CACHE": str(cache)},
        stdout=subprocess.PIPE,
    )
    while process.poll() is None:
        now = np.sum([_memory(pid) for pid in [process.pid, *_children(process.pid)]], axis=0)
        most = [max(a, int(b)) for a, b in zip(most, now, strict=True)]
        time.sleep(0.05)
    if process.returncode or process.stdout is None:
        sys.exit(process.returncode)
    return json.loads(process.stdout.read()), most[0], most[1]


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
    parser.add_argument("--batch", type=int, default=8)
    known = parser.parse_args()
    if known.what == "make":
        make(known.folder, known.images, known.classes)
    else:
        measure(known.folder, known.batch)


if __name__ == "__main__":
    main()
