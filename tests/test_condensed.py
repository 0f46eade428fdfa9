"""The condensed set on disk: round trip, every kind of damage named, files whole or not at all."""

import json
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from safetensors.torch import load as parse
from safetensors.torch import save as serialise

import m3d
from m3d.condensed import CondensedDataset, CondensedSet
from m3d.errors import M3DError
from m3d.files import append_line, read_json, write_bytes
from m3d.run_folder import RunFolder
from m3d.tiles import Tiles


@pytest.fixture
def condensed() -> CondensedSet:
    manifest = {
        "method": "m3d",
        "options": {"steps": 3},
        "ipc": 2,
        "factor": 2,
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.2, 0.1],
        "class_names": ["cat", "dog", "über"],
        "data": {"name": "tiny", "fingerprint": "x", "recipe": {}},
    }
    images = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return CondensedSet(images, torch.arange(3).repeat_interleave(2), manifest)


def rewrite(path, change_tensors=None, change_manifest=None):
    """Change a saved file as a stranger might."""
    content = path.read_bytes()
    tensors = parse(content)
    length = int.from_bytes(content[:8], "little")
    manifest = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["m3d"])
    if change_tensors:
        change_tensors(tensors)
    if change_manifest:
        change_manifest(manifest)
    path.write_bytes(serialise(tensors, {"m3d": json.dumps(manifest)}))


def test_round_trip(condensed, tmp_path):
    path = tmp_path / "set.safetensors"
    condensed.save(path)
    again = CondensedSet.load(path)
    assert torch.equal(again.images, condensed.images) and torch.equal(again.labels, condensed.labels)
    assert {k: again.manifest[k] for k in condensed.manifest} == dict(condensed.manifest)
    assert set(again.manifest["sha256"]) == {"images", "labels"}
    assert again.fingerprint == condensed.fingerprint == again.manifest["sha256"]["images"]
    assert [p.name for p in tmp_path.iterdir()] == ["set.safetensors"]  # no temporary file is left


def test_dataset_decodes_and_normalises(condensed):
    plain, normalised = CondensedDataset(condensed, normalise=False), CondensedDataset(condensed)
    assert len(plain) == 24 and plain.classes == ["cat", "dog", "über"]
    picture, label = plain[5]
    assert torch.equal(picture, Tiles(2).decode(condensed.images)[5]) and label == 0
    mean, std = (torch.tensor(condensed.manifest[k])[:, None, None] for k in ("mean", "std"))
    torch.testing.assert_close(normalised[5][0], (picture - mean) / std)
    assert [plain[i][1] for i in (0, 7, 8, 15, 16, 23)] == [0, 0, 1, 1, 2, 2]
    batch = next(iter(torch.utils.data.DataLoader(normalised, batch_size=10)))
    assert batch[0].shape == (10, 3, 8, 8) and batch[1].dtype == torch.int64


def test_ten_lines_train_a_model(condensed):
    data = CondensedDataset(condensed)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        for images, labels in torch.utils.data.DataLoader(data, batch_size=24):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_truncated_files_are_named(condensed, tmp_path):
    path = tmp_path / "set.safetensors"
    condensed.save(path)
    content = path.read_bytes()
    for keep in (0, 5, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:keep])
        with pytest.raises(M3DError, match=r"set\.safetensors.*not a whole safetensors file"):
            CondensedSet.load(path)


@pytest.mark.parametrize(
    ("tensors", "manifest", "message"),
    [
        (lambda t: t["images"].view(-1)[0].add_(0.01), None, "does not match its checksum"),
        (lambda t: t.pop("labels"), None, "no tensor 'labels'"),
        (None, lambda m: m.pop("mean"), "'mean' is missing"),
        (None, lambda m: m.update(ipc="two"), "'ipc' is missing or of the wrong type"),
        (None, lambda m: m.update(ipc=True), "'ipc' is missing or of the wrong type"),
        (None, lambda m: m.update(format=9), "has format 9"),
        (None, lambda m: m.update(mean=["a", 1, 2]), "list of numbers"),
        (None, lambda m: m.update(mean=[0.5]), "must have 3 values"),
        (None, lambda m: m.update(ipc=3), r"expected float32 \[9"),
    ],
)
def test_tampered_files_are_refused(condensed, tmp_path, tensors, manifest, message):
    path = tmp_path / "set.safetensors"
    condensed.save(path)
    rewrite(path, tensors, manifest)
    with pytest.raises(M3DError, match=message):
        CondensedSet.load(path)


def test_values_out_of_range_are_refused(condensed, tmp_path):
    path = tmp_path / "set.safetensors"
    for images, message in (
        (condensed.images * 2, "pixels must lie"),
        (condensed.images * float("nan"), "must be finite"),
    ):
        CondensedSet(images, condensed.labels, condensed.manifest).save(path)
        with pytest.raises(M3DError, match=message):
            CondensedSet.load(path)
        free = CondensedSet(images, condensed.labels, {**condensed.manifest, "bounded": False})
        free.save(path)
        if message == "pixels must lie":  # a set that says so may leave the range, but not the numbers
            assert torch.equal(CondensedSet.load(path).images, images)
        else:
            with pytest.raises(M3DError, match=message):
                CondensedSet.load(path)
    CondensedSet(condensed.images, condensed.labels + 1, condensed.manifest).save(path)
    with pytest.raises(M3DError, match="between 0 and 2"):
        CondensedSet.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factor": 99}, "factor=99"),
        ({"factor": 7}, "factor=7 leaves cells"),
        ({"upsample": "cubic"}, "unknown upsample"),
    ],
)
def test_a_decoder_that_cannot_be_is_refused_by_the_file_s_name(condensed, tmp_path, change, message):
    path = tmp_path / "set.safetensors"
    condensed.save(path)
    rewrite(path, change_manifest=lambda manifest: manifest.update(change))
    with pytest.raises(M3DError, match=rf"set\.safetensors.*{message}"):
        CondensedSet.load(path)


def test_files_without_a_manifest_are_refused(tmp_path):
    path = tmp_path / "other.safetensors"
    path.write_bytes(serialise({"images": torch.zeros(1)}))
    with pytest.raises(M3DError, match="no m3d manifest"):
        CondensedSet.load(path)
    path.write_bytes(serialise({"images": torch.zeros(1)}, {"m3d": "[1]"}))
    with pytest.raises(M3DError, match="JSON object"):
        CondensedSet.load(path)
    with pytest.raises(M3DError, match="does not exist"):
        CondensedSet.load(tmp_path / "missing")


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "file.json"
    write_bytes(path, b"old")
    code = f"""
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        from pathlib import Path
        from m3d.errors import M3DError
        from m3d.files import write_bytes
        try:
            write_bytes(Path({str(path)!r}), b"x" * 100_000)
        except M3DError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert "cannot write" in done.stdout and "file.json" in done.stdout and "unchanged" in done.stdout
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["file.json"]


def test_a_full_disk_is_said_and_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    write_bytes(path, b"old")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(M3DError, match="No space left on device"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["file.json"]


def test_json_files(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("{")
    with pytest.raises(M3DError, match="not valid JSON"):
        read_json(path)
    path.write_text("[]")
    with pytest.raises(M3DError, match="JSON object"):
        read_json(path)
    lines = tmp_path / "lines.jsonl"
    for k in range(3):
        append_line(lines, {"k": k})
    assert [json.loads(line)["k"] for line in lines.read_text().splitlines()] == [0, 1, 2]


def test_a_run_folder_is_not_overwritten_by_accident(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin({"a": 1})
    (folder / RunFolder.HISTORY).write_text("old")
    with pytest.raises(M3DError, match=r"already holds a run.*m3d\.resume"):
        folder.begin({"a": 2})
    assert folder.request() == {"a": 1}
    folder.begin({"a": 2}, overwrite=True)
    assert folder.request() == {"a": 2} and not (folder / RunFolder.HISTORY).exists()
    with pytest.raises(M3DError, match="not a run folder"):
        RunFolder(tmp_path).request()
    (tmp_path / "file").write_text("x")
    with pytest.raises(M3DError, match="is a file"):
        RunFolder(tmp_path / "file").begin({})


def test_resume_refuses_changed_data(tiny_file, tmp_path):
    out = tmp_path / "run"
    m3d.condense(tiny_file, 1, net="convnet2:width=8", steps=2, batch_real=4, out=out)
    (out / RunFolder.CONDENSED).unlink()
    arrays = dict(np.load(tiny_file))
    arrays["x_train"] = 255 - arrays["x_train"]
    np.savez(tiny_file, **arrays)
    with pytest.raises(M3DError, match="have changed since the run began"):
        m3d.resume(out)
    (out / RunFolder.RUN).write_text("{}")
    with pytest.raises(M3DError, match="incomplete"):
        m3d.resume(out)


def test_a_set_describes_itself_in_a_line(condensed):
    assert repr(condensed) == "CondensedSet(tiny by m3d: 3 classes × 2 images [3, 8, 8], factor 2, hard labels)"


def test_data_of_other_classes_are_told_apart(condensed):
    condensed.require(["cat", "dog", "über"], (3, 8, 8), "tiny")
    with pytest.raises(M3DError, match=r"3 classes \(cat, dog, über\) of \[3, 8, 8\] images, pets has 4 classes"):
        condensed.require(["cat", "dog", "über", "eel"], (3, 8, 8), "pets")
    with pytest.raises(M3DError, match=r"pets has 3 classes \(a, b, c\) of \[3, 8, 8\] images; they must be the same"):
        condensed.require(["a", "b", "c"], (3, 8, 8), "pets")


def test_a_new_run_removes_what_was_made_of_the_old_one(tmp_path):
    folder = RunFolder(tmp_path)
    folder.begin({})
    made = ["images.png", "images-best.png", "images-step-20.png", "condensed-step-20.npz", "condensed-best.pt"]
    mine = ["evaluation-notes", "images-mine.png", "notes.txt"]
    (tmp_path / "evaluation-notes").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "imagefolder").symlink_to(tmp_path / "elsewhere")
    for name in (*made, *mine[1:]):
        (tmp_path / name).touch()
    for name in ("imagefolder-best", "imagefolder-step-20"):
        (tmp_path / name / "cat").mkdir(parents=True)
    folder.begin({}, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", *mine, RunFolder.RUN]


def test_a_folder_of_runs_names_some_of_them(tmp_path):
    for name in ("b", "a"):
        m3d.condense("digits", 1, "random", out=tmp_path / name)
    with pytest.raises(m3d.M3DError, match="holds no set but runs that do: a, b; name one of them"):
        m3d.CondensedSet.load(tmp_path)
    with pytest.raises(m3d.M3DError, match=r"is the folder of a run, not of images; m3d\.resume.* continues it"):
        m3d.load_data(tmp_path / "a")
    with pytest.raises(m3d.M3DError, match="'nowhere' does not exist"):
        m3d.resume("nowhere")
    with pytest.raises(m3d.M3DError, match=r"already holds a run, which is finished; look at it with m3d show"):
        m3d.condense("digits", 1, "random", out=tmp_path / "a")


@pytest.mark.parametrize("inside", ["cat/1.jpg", "train/cat/1.PNG"])
def test_a_run_does_not_begin_among_somebody_s_images(tmp_path, inside):
    (tmp_path / inside).parent.mkdir(parents=True)
    (tmp_path / inside).write_bytes(b"")
    for overwrite in (False, True):
        with pytest.raises(M3DError, match=f"holds images that are not a run's .{inside}.; choose another out"):
            m3d.condense("digits", 1, "random", out=tmp_path, overwrite=overwrite)
    assert len(list(tmp_path.iterdir())) == 1
    # Beside images, and where a run's own exports lie, it may.
    m3d.condense("digits", 1, "random", out=tmp_path / "run")
    (tmp_path / "run" / "imagefolder" / "zero").mkdir(parents=True)
    (tmp_path / "run" / "imagefolder" / "zero" / "0000.png").write_bytes(b"")
    m3d.condense("digits", 1, "random", out=tmp_path / "run", overwrite=True)


@pytest.mark.parametrize("left", [True, False])
def test_a_run_that_failed_is_forgotten_only_if_it_left_nothing(tmp_path, monkeypatch, left):
    monkeypatch.setattr("m3d.engine._REPORT_SECONDS", 0.0)

    def fail(progress):
        if progress.step == 3:
            raise M3DError("no more")

    options = {"steps": 4, "batch_real": 4, "net": "convnet2:width=8", "keep_every": 2 if left else 0}
    with pytest.raises(M3DError, match="no more"):
        m3d.condense("digits", 1, out=tmp_path / "run", report=fail, **options)
    assert (tmp_path / "run" / RunFolder.RUN).exists() is left
    if left:  # the set of step 2 can be measured, and the run goes on
        assert m3d.resume(tmp_path / "run").manifest["steps"] == 4
