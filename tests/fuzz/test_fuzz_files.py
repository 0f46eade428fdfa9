"""Files from strangers: whatever is in them, they are read or refused in one line, soon, and nothing is unpickled."""

import contextlib
import io
import json
import shutil
import zipfile

import numpy as np
import pytest

pytest.importorskip("hypothesis", reason="fuzzing needs the package hypothesis (extra dev)")

from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save as serialise
from strange import as_json, cases, changed, damaged, numbers, tame, texts, values

import m3d
from m3d.condensed import CondensedDataset, CondensedSet
from m3d.data import load_data
from m3d.errors import Interrupted
from m3d.export import export
from m3d.files import read_checked, sha256, write_checked
from m3d.origin import load_source
from m3d.report import rows_of
from m3d.run_folder import RunFolder

OPTIONS = {"net": "convnet1:width=4", "steps": 2, "batch_real": 2}


class Reached(BaseException):
    """Everything was checked and the long work would begin."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run on a file of data, and the same run stopped after its first step."""
    place = tmp_path_factory.mktemp("fuzz")
    generator = np.random.default_rng(0)
    arrays = {
        f"{kind}_{split}": generator.integers(0, 255, (12, 4, 4, 3), np.uint8) if kind == "x" else np.arange(12) % 3
        for kind in "xy"
        for split in ("train", "test")
    }
    np.savez(place / "data.npz", **arrays)
    m3d.condense(place / "data.npz", 1, out=place / "finished", **OPTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("m3d.engine._Run._save_due", lambda self: self.step == 1)
        patch.setattr("m3d.run_folder.RunFolder.write_history", lambda self, losses: stop())
        with pytest.raises(Interrupted):
            m3d.condense(place / "data.npz", 1, out=place / "stopped", **OPTIONS)
    assert (place / "stopped" / RunFolder.CHECKPOINT).exists()
    return place


def stop():
    raise Interrupted(1)


def taken_apart(path):
    """(header, data) of a safetensors file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def use(path, place) -> None:
    """All that is done with a stranger's set, short of training on it."""
    made = tame(lambda: CondensedSet.load(path))
    if made is not None:
        tame(lambda: made.decoded(True))
        tame(lambda: CondensedDataset(made, normalise=False)[0])
        tame(lambda: load_source(made))
        tame(lambda: rows_of([path]))
        shutil.rmtree(place / "pictures", ignore_errors=True)
        tame(lambda: export(made, "imagefolder", place / "pictures"))


@pytest.mark.parametrize("how", ["bytes", "header", "length"])
def test_safetensors(run, tmp_path, count, how):
    whole = (run / "finished" / RunFolder.CONDENSED).read_bytes()
    header, data = taken_apart(run / "finished" / RunFolder.CONDENSED)
    path = tmp_path / "set.safetensors"

    @cases(0.1)
    @given(st.data())
    def check(draw):
        count("safetensors")
        if how == "bytes":
            content = draw.draw(damaged(whole))
        else:
            text = as_json(draw.draw(changed(header))).encode()
            length = len(text) if how == "header" else draw.draw(st.integers(0, 2**64 - 1))
            content = length.to_bytes(8, "little") + text + data
        path.write_bytes(content)
        use(path, tmp_path)

    check()


def test_manifests(run, tmp_path, count, monkeypatch):
    monkeypatch.setattr("m3d.data.official._download", lambda *a: pytest.fail("the network was asked"))
    made = CondensedSet.load(run / "finished")
    tensors = {"images": made.images, "labels": made.labels}
    path = tmp_path / "set.safetensors"

    @cases(0.2)
    @given(changed(dict(made.manifest)))
    def check(manifest):
        count("manifests")
        path.write_bytes(serialise(tensors, {"m3d": as_json(manifest)}))
        use(path, tmp_path)

    check()


def test_run_json(run, tmp_path, count, monkeypatch):
    """A run's request is checked before the work begins; here the work is not begun."""
    request = json.loads((run / "stopped" / RunFolder.RUN).read_text())
    folder = tmp_path / "run"
    folder.mkdir()

    def reached(*arguments):
        raise Reached

    monkeypatch.setattr("m3d.prepare.Prepared.go", reached)

    @cases(0.1)
    @given(st.one_of(changed(request).map(as_json), st.binary(max_size=40), damaged(as_json(request).encode())))
    def check(content):
        count("run.json")
        (folder / RunFolder.RUN).write_bytes(content.encode() if isinstance(content, str) else content)
        with contextlib.suppress(Reached):
            tame(lambda: m3d.resume(folder))
        assert [p.name for p in folder.iterdir()] == [RunFolder.RUN]

    check()


def test_checkpoints(run, tmp_path, count):
    """Whatever a checkpoint holds, with right checksums or wrong ones, the run goes on or says why not."""
    folder = shutil.copytree(run / "stopped", tmp_path / "run")
    checkpoint = folder / RunFolder.CHECKPOINT
    whole = checkpoint.read_bytes()
    tensors, state = read_checked(checkpoint)

    @cases(0.05)
    @given(st.data())
    def check(draw):
        count("checkpoints")
        for name in (RunFolder.CONDENSED, RunFolder.HISTORY):
            (folder / name).unlink(missing_ok=True)
        if draw.draw(st.booleans()):
            checkpoint.write_bytes(draw.draw(damaged(whole)))
        else:
            kept = draw.draw(st.dictionaries(st.sampled_from(sorted(tensors)), st.integers(0, 2)))
            odd = {k: v for k, v in tensors.items() if kept.get(k) != 0} | {
                k: tensors[k].flatten()[:1] for k, n in kept.items() if n == 1
            }
            write_checked(checkpoint, odd, draw.draw(st.one_of(st.just(state), changed(state))))
        tame(lambda: m3d.resume(folder))

    check()


def test_results(run, tmp_path, count):
    folder = shutil.copytree(run / "finished", tmp_path / "run")
    record = {
        "method": "m3d", "data": {"name": "x", "split": "test"}, "ipc": 1, "protocol": {"name": "dsa", "epochs": 3},
        "net": "convnet3", "accuracy": 1.0, "sd": 0.0, "best_of_checks": 1.0, "best_sd": 0.0, "n": 1,
    }  # fmt: skip

    @cases(0.05)
    @given(st.one_of(changed(record), values))
    def check(line):
        count("results")
        (folder / RunFolder.RESULTS).write_text(as_json(line) + "\n")
        tame(lambda: rows_of([folder]))

    check()


def npy(draw: st.DataObject, array: np.ndarray) -> bytes:
    """An array as .npy whose header may lie."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    content = buffer.getvalue()
    if draw.draw(st.integers(0, 2)):
        return content
    shape = draw.draw(st.lists(st.one_of(st.integers(-2, 9), numbers), max_size=5).map(tuple))
    kind = draw.draw(st.sampled_from(["|u1", "<f8", "|O", "<U5", "|V0", "<U0", "<M8[s]", "|S400000000", "<f16", "x"]))
    header = f"{{'descr': {kind!r}, 'fortran_order': {draw.draw(st.booleans())}, 'shape': {shape!r}, }}"
    return content[:8] + len(header).to_bytes(2, "little") + header.encode() + content[128:]


@pytest.mark.parametrize("how", ["bytes", "arrays"])
def test_npz(run, tmp_path, count, how):
    whole = (run / "data.npz").read_bytes()
    path = tmp_path / "odd.npz"
    kinds = st.sampled_from(["u1", "i8", "u8", "f4", "f8", "b1", "c8", "U3", "S2", "M8[s]", "f2"])
    shapes = st.lists(st.integers(0, 4), max_size=5).map(tuple)

    @cases(0.1)
    @given(st.data())
    def check(draw):
        count("npz")
        if how == "bytes":
            path.write_bytes(draw.draw(damaged(whole)))
        else:
            with zipfile.ZipFile(path, "w", draw.draw(st.sampled_from([0, 8, 12, 14]))) as archive:
                for name in ("x_train", "y_train", "x_test", "y_test", "class_names"):
                    if draw.draw(st.integers(0, 9)):
                        array = np.zeros(draw.draw(shapes), draw.draw(kinds))
                        archive.writestr(f"{name}.npy", npy(draw, array))
        tame(lambda: load_data(path, size=draw.draw(st.sampled_from([None, 2]))))

    check()


def test_names_never_leave_the_folder(run, tmp_path, count):
    """Class names that are paths, equal, or equal but for their case: folders of an export are all inside it."""
    made = CondensedSet.load(run / "finished")
    out = tmp_path / "inside" / "pictures"

    @cases(0.05)
    @given(st.lists(texts, min_size=3, max_size=3))
    def check(names):
        count("class names")
        shutil.rmtree(out, ignore_errors=True)
        manifest = {**made.manifest, "class_names": names}
        tame(lambda: export(CondensedSet(made.images, made.labels, manifest), "imagefolder", out))
        assert {p.name for p in tmp_path.iterdir()} <= {"inside"}
        if out.exists():
            assert len([p for p in out.iterdir() if p.is_dir()]) == 3
            assert len({p.name.casefold() for p in out.iterdir()}) == 4

    check()


def test_small_files_do_not_take_much_memory(tmp_path):
    """A zip that unpacks to gigabytes, and a header that asks for terabytes."""
    bomb = tmp_path / "bomb.npz"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array_header_1_0(
                    member, {"descr": "|u1", "fortran_order": False, "shape": (72 * 2**20, 1, 1, 1)}
                )
                for _ in range(72):
                    member.write(bytes(2**20))
    with pytest.raises(m3d.M3DError, match="bytes that unpack to"):
        load_data(bomb)
    lie = tmp_path / "lie.npz"
    with zipfile.ZipFile(lie, "w") as archive:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array_header_1_0(
                    member, {"descr": "|u1", "fortran_order": False, "shape": (2**40, 8, 8, 3)}
                )
    with pytest.raises(m3d.M3DError, match=r"x_train\.npy is uint8"):
        load_data(lie)


def test_a_small_set_does_not_decode_to_much_memory(run, tmp_path):
    made = CondensedSet.load(run / "finished")
    CondensedSet(made.images, made.labels, {**made.manifest, "factor": 10**9}).save(tmp_path / "set.safetensors")
    with pytest.raises(m3d.M3DError, match="factor=1000000000 is not valid"):
        CondensedSet.load(tmp_path / "set.safetensors")
    assert sha256(made.images) == made.fingerprint
