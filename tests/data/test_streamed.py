"""Data larger than memory: the cache on the disk, killed and resumed; streamed runs equal resident ones bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import m3d
from m3d.cli import main
from m3d.data import ClassData, Dataset, cache, ingest, load_data, streamed
from m3d.data.streamed import HostImages, StreamedData, placed
from m3d.errors import M3DError

CLASSES, TRAIN, TEST = 3, 40, 5
NET = "convnet2:width=8"


def write_folder(root: Path, train: int = TRAIN) -> Path:
    random = np.random.default_rng(0)
    for split, many in (("train", train), ("test", TEST)):
        for c in range(CLASSES):
            (root / split / f"class {c}").mkdir(parents=True)
            for i in range(many):
                pixels = random.integers(80 * c, 80 * c + 90, (8, 8, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / f"class {c}" / f"{i:03d}.png")
    return root


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("M3D_CACHE", str(tmp_path / "cache"))
    return write_folder(tmp_path / "pets")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that several tests read; its cache is that of the session."""
    return write_folder(tmp_path_factory.mktemp("shared") / "pets")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_CHUNK_BYTES", 8 * 8 * 3 * 16)  # sixteen images


def stream(data: ClassData) -> StreamedData:
    return StreamedData(HostImages(data.images.numpy()), data.count)


# ----------------------------------------------------------------------------------------------------------- the cache


def test_the_cache_holds_what_memory_would(root: Path, small_chunks: None) -> None:
    calls: list[tuple[int, int]] = []
    in_memory: list[tuple[int, int]] = []
    there = load_data(root, resident="yes", progress=lambda done, total: in_memory.append((done, total)))
    assert in_memory == [(100, 135), (135, 135)]
    data = load_data(root, resident="no", progress=lambda done, total: calls.append((done, total)))
    assert isinstance(data.train, StreamedData) and isinstance(data.test, StreamedData)
    assert not isinstance(there.train, StreamedData)
    for split in ("train", "test"):
        one, other = getattr(there, split), getattr(data, split)
        assert torch.equal(one.images, other.images) and torch.equal(one.count, other.count)
        assert one.fingerprint == other.fingerprint
        assert one.statistics() == other.statistics()
    assert (data.mean, data.std) == (there.mean, there.std)
    assert calls[0] == (0, 135) and calls[-1] == (135, 135) and [c[0] for c in calls] == sorted(c[0] for c in calls)
    assert data.recipe["resident"] == "no" and "resident" not in load_data(root).recipe


def test_a_whole_cache_is_opened_without_decoding(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_data(root, resident="no")
    monkeypatch.setattr(cache, "build", lambda *_: pytest.fail("decoded again"))
    monkeypatch.setattr(StreamedData, "chunks", lambda _: pytest.fail("all pixels read again"))
    again = load_data(root, resident="no")
    assert again.train.fingerprint == first.train.fingerprint and again.mean == first.mean


@pytest.mark.parametrize("change", ["content", "name", "more", "size"])
def test_what_changes_makes_another_cache(root: Path, change: str) -> None:
    load_data(root, resident="no")
    path = root / "train" / "class 0" / "000.png"
    if change == "content":
        status = path.stat()
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    elif change == "name":
        path.rename(path.with_name("999.png"))
    elif change == "more":
        path.with_name("999.png").write_bytes(path.read_bytes())
    load_data(root, resident="no", size=4 if change == "size" else None)
    assert len([p for p in (root.parent / "cache" / "images").iterdir() if p.is_dir()]) == 2


def test_auto_goes_by_the_memory_that_is_free(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need = CLASSES * (TRAIN + TEST) * 8 * 8 * 3
    monkeypatch.setattr(ingest, "available_memory", lambda: 4 * need)
    assert not isinstance(load_data(root).train, StreamedData)
    monkeypatch.setattr(ingest, "available_memory", lambda: 4 * need - 1)
    assert isinstance(load_data(root).train, StreamedData)


def test_available_memory_is_that_of_this_machine() -> None:
    assert 2**26 < streamed.available_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_KILLED = """
import sys
from m3d.data import cache, load_data
cache._CHUNK_BYTES = 8 * 8 * 3 * 16
load_data(sys.argv[1], resident="no", progress=lambda done, total: print(done, flush=True))
"""


def test_a_killed_build_goes_on_where_it_was(root: Path, small_chunks: None) -> None:
    process = subprocess.Popen([sys.executable, "-c", _KILLED, str(root)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while int(process.stdout.readline()) < 32:
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    (building,) = (root.parent / "cache" / "images").glob("*.building")
    marks = (building / "train.pixels.done").read_bytes()
    assert marks.count(1) >= 2
    done: list[int] = []
    data = load_data(root, resident="no", progress=lambda n, _: done.append(n))
    if marks.count(1) < len(marks):  # else it was killed in the test split
        assert done[0] >= 32 - 16, "nothing that was done is done again"
    assert torch.equal(data.train.images, load_data(root, resident="yes").train.images)
    assert data.train.fingerprint == load_data(root, resident="yes").train.fingerprint
    assert not building.exists() and {p.name for p in cache._home(next_key(root)).iterdir()} == {
        "train.pixels",
        "test.pixels",
        "manifest.json",
    }


def next_key(root: Path) -> str:
    (home,) = (p for p in (root.parent / "cache" / "images").iterdir() if p.is_dir())
    return home.name


def test_a_torn_note_of_bad_images_is_made_again(root: Path, small_chunks: None) -> None:
    (root / "train" / "class 1" / "003.png").write_bytes(b"")
    with pytest.raises(M3DError, match=r"003.png: cannot be read"):
        load_data(root, resident="no")
    home = cache._home(next_key(root))
    home.rename(home.with_name(f"{home.name}.building"))
    building = home.with_name(f"{home.name}.building")
    (building / "manifest.json").unlink()
    marks = bytearray(b"\1" * 8)
    marks[2] = 0  # of the chunk that holds number 43
    (building / "train.pixels.done").write_bytes(bytes(marks))
    (building / "train.pixels.bad").write_bytes(b'[[43, "cannot ident')
    data = load_data(root, resident="no", on_bad_image="skip")
    assert data.train.count.tolist() == [TRAIN, TRAIN - 1, TRAIN]


def test_only_one_process_builds(root: Path) -> None:
    command = [sys.executable, "-c", _KILLED, str(root)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert isinstance(load_data(root, resident="no").train, StreamedData)


@pytest.mark.parametrize("damage", ["shorter", "manifest"])
def test_a_damaged_cache_is_named(root: Path, damage: str) -> None:
    load_data(root, resident="no")
    home = cache._home(next_key(root))
    if damage == "shorter":
        with (home / "train.pixels").open("r+b") as file:
            file.truncate(100)
    else:
        (home / "manifest.json").write_text(json.dumps({"shape": "square"}))
    with pytest.raises(M3DError, match=r"the cache is damaged .* delete this folder"):
        load_data(root, resident="no")


def test_a_disk_that_is_too_small_is_said_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(M3DError, match=r"need 0.0 GB more, .*M3D_CACHE"):
        load_data(root, resident="no")


def test_a_cache_that_cannot_be_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root.parent / "file").write_text("")
    monkeypatch.setenv("M3D_CACHE", str(root.parent / "file"))
    with pytest.raises(M3DError, match=r"cannot write the cache .*resident='yes'"):
        load_data(root, resident="no")


def test_a_decoding_process_that_dies_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.sys, "executable", "/bin/false")
    with pytest.raises(M3DError, match=r"a decoding process ended with code 1 .*class 0/000.png"):
        load_data(root, resident="no")


# ------------------------------------------------------------------------------------------------------------ streaming


@pytest.mark.parametrize("steps_at_once", [1, 3, 64])
def test_the_reader_reads_what_the_deck_says(
    tiny: Dataset, monkeypatch: pytest.MonkeyPatch, steps_at_once: int
) -> None:
    monkeypatch.setattr(streamed, "_STAGED", steps_at_once * 3 * 5 * 3 * 8 * 8)
    resident, data = tiny.train, stream(tiny.train)
    reader, plain = data.reader(7, 5), resident.reader(7, 5)
    assert getattr(reader, "steps") == steps_at_once  # noqa: B009 (no part of the protocol)
    classes = torch.tensor([2, 0])
    for step in (0, 1, 2, 3, 4, 70, 71, 5, 0):  # in order, as a run goes; then as a resumed one jumps
        deck = resident.deck(7, torch.tensor([step]), 5)[0]
        reader.bring(step)
        plain.bring(step)
        assert torch.equal(reader.take(deck[classes], classes), plain.take(deck[classes], classes)), step


def test_streamed_data_take_split_and_fingerprint_as_resident_ones(tiny: Dataset) -> None:
    data = stream(tiny.train)
    index = torch.tensor([[3, 1], [0, 0], [11, 5]])
    assert torch.equal(data.take(index), tiny.train.take(index))
    assert torch.equal(data.take(index[:1], torch.tensor([2])), tiny.train.take(index[:1], torch.tensor([2])))
    for one, other in zip(data.split(0.25, 3), tiny.train.split(0.25, 3), strict=True):
        assert isinstance(one, StreamedData) and torch.equal(one.images, other.images)
        assert one.fingerprint == other.fingerprint and one.statistics() == other.statistics()
        for half, whole in zip(one.split(0.5, 1), other.split(0.5, 1), strict=True):
            assert torch.equal(half.images, whole.images)
    with pytest.raises(M3DError, match="sum to 30"):
        StreamedData(data.host, [10, 10, 10])


def test_placement_on_a_device(tiny: Dataset) -> None:
    assert placed(tiny.train, "cpu", "auto").images.data_ptr() == tiny.train.images.data_ptr()
    there = placed(stream(tiny.train), "cpu", "yes")
    assert type(there) is ClassData and torch.equal(there.images, tiny.train.images)
    assert isinstance(placed(stream(tiny.train), "cpu", "auto"), StreamedData)


def test_all_images_at_once_must_fit(tiny: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    part = stream(tiny.train).split(0.25, 0)[0]
    monkeypatch.setattr(streamed, "available_memory", lambda: 1000)
    with pytest.raises(M3DError, match=r"needs all 27 images at once, .*lower size"):
        _ = part.images


@pytest.mark.parametrize(
    ("method", "val"),
    [("m3d", 0.0), ("m3d", 0.2), ("datadam", 0.0), ("dc", 0.0), ("idm", 0.2), ("cafe", 0.0), ("herding", 0.2)],
)
def test_a_streamed_run_is_bit_identical(
    shared: Path, method: str, val: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed, "_STAGED", 2 * CLASSES * 4 * 3 * 8 * 8)  # two steps
    options = {} if method == "herding" else {"steps": 5, "batch_real": 4}
    sets = [
        m3d.condense(
            load_data(shared, resident=resident, val_fraction=val), 1, method, net=NET, device="cpu", seed=3, **options
        )
        for resident in ("yes", "no")
    ]
    assert torch.equal(sets[0].images, sets[1].images)
    assert sets[0].manifest["data"]["fingerprint"] == sets[1].manifest["data"]["fingerprint"]
    assert sets[0].manifest.get("loss") == sets[1].manifest.get("loss")


def test_the_command_line_streams_and_evaluates(root: Path, tmp_path: Path, capsys) -> None:
    (root / "train" / "class 1" / "003.png").write_bytes(b"")
    common = ["--net", NET, "--steps", "3", "--batch-real", "4", "--on-bad-image", "skip"]
    found = []
    for resident in ("yes", "no"):
        run = tmp_path / resident
        with pytest.raises(SystemExit) as stop:
            main(["condense", str(root), *common, "--resident", resident, "--out", str(run)])
        assert stop.value.code == 0, capsys.readouterr().err
        with pytest.raises(SystemExit) as stop:
            main(["evaluate", str(run), "--net", NET, "--epochs", "2", "--repeats", "1", "--json"])
        assert stop.value.code == 0
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert found[0]["set"] == found[1]["set"] and found[0]["last"] == found[1]["last"]


_MEASURED = """
import sys
from m3d.data import load_data, streamed
streamed._STAGED = 2**20
data = load_data(sys.argv[1], resident="no")
reader = data.train.reader(0, 4)
for step in range(100):
    reader.bring(step)
lines = open("/proc/self/status").read().splitlines()
print(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_does_not_grow_with_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """30 MB and 290 MB of pixels, all of them looked at: peaks within 130 MB, which the allocator varies by itself."""
    monkeypatch.setenv("M3D_CACHE", str(tmp_path / "cache"))
    peaks = []
    for many in (150, 1500):
        root = tmp_path / str(many)
        for name in ("a", "b"):
            for split, images in (("train", many), ("test", 1)):
                (root / split / name).mkdir(parents=True)
                Image.new("RGB", (180, 180), (9, 0, 0)).save(root / split / name / "0.png")
                for i in range(1, images):
                    os.link(root / split / name / "0.png", root / split / name / f"{i}.png")
        result = subprocess.run(
            [sys.executable, "-c", _MEASURED, str(root)], capture_output=True, text=True, check=True
        )
        peaks.append(int(result.stdout) * 1024)
    assert peaks[1] - peaks[0] < 130 * 2**20, peaks
