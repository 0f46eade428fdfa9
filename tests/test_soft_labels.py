"""Soft labels: stored, checked, taught, and never mixed with hard ones."""

import csv
import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load as parse
from safetensors.torch import save as serialise
from torch.nn import functional

import m3d
from m3d import rng, trained
from m3d.batches import Images
from m3d.cli import main
from m3d.condensed import CondensedDataset, CondensedSet
from m3d.errors import M3DError
from m3d.evaluation import PROTOCOLS, evaluate, make_protocol
from m3d.export import export
from m3d.nets import make_net
from m3d.nets.flat import FlatNet
from m3d.pictures import grid
from m3d.report import COLUMNS, SOFT_COLUMNS, bar_chart, rows_of, table
from m3d.run_folder import RunFolder
from m3d.runtime import Runtime
from m3d.teachers import Teachers, averaged_softmax, relabel
from m3d.train import Recipe, Trainer, cross_entropy
from m3d.trained import Trained, default_recipe, trained_networks

CPU = Runtime.choose("cpu")
NET = "convnet2:width=8"
TEACHERS = Teachers(NET, teachers=2, epochs=2, temperature=2.0)


@pytest.fixture
def hard(tiny) -> CondensedSet:
    return m3d.condense(tiny, 2, "random", factor=2)


@pytest.fixture
def soft(hard, tiny) -> CondensedSet:
    return relabel(hard, tiny, TEACHERS, CPU)


def one_hot(condensed: CondensedSet) -> CondensedSet:
    classes = condensed.decoded()[1]
    return replace(condensed, soft=functional.one_hot(classes, len(condensed.class_names)).float())


def rewrite(path, change):
    """Change a saved file's tensors or manifest as a stranger might."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    manifest = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["m3d"])
    tensors = parse(content)
    change(tensors, manifest)
    path.write_bytes(serialise(tensors, {"m3d": json.dumps(manifest)}))


def command(capsys, *arguments) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return (stop.value.code if isinstance(stop.value.code, int) else 0), captured.out, captured.err


def test_labels_are_the_teachers_mean_softmax(hard, tiny, soft):
    """Against one network, one image at a time."""
    trained = trained_networks(tiny, NET, default_recipe(2), 2, 0, CPU)
    images = hard.decoded(normalise=True)[0]
    for k in (0, 7, 23):
        each = [trained.net(row[None], images[None, k : k + 1], torch.float32).logits[0, 0] for row in trained.final]
        expected = sum(torch.exp(v / 2) / torch.exp(v / 2).sum() for v in each) / 2
        torch.testing.assert_close(soft.soft[k], expected, rtol=1e-5, atol=1e-6)
    assert soft.soft.shape == (24, 3) and soft.label_kind == "soft" and hard.label_kind == "hard"
    told = soft.manifest["soft_labels"]
    assert told["temperature"] == 2.0 and told["teachers"] == 2 and Teachers.of(soft) == TEACHERS
    assert told["agreement"] == pytest.approx(
        float((soft.soft.argmax(1) == hard.decoded()[1]).float().mean()), abs=1e-6
    )
    cold = relabel(hard, tiny, replace(TEACHERS, temperature=1e-4), CPU).soft
    assert (cold.max(1).values >= 0.5 - 1e-6).all()  # two votes of 0 or 1
    assert relabel(hard, tiny, replace(TEACHERS, temperature=1e6), CPU).soft.std() < 1e-3


def test_batch_norms_take_real_images(tiny, hard):
    """A teacher with batch norm answers for an image alone as for the same image among others."""
    net = FlatNet(make_net("convnet2:width=8,norm=batch", tiny.shape, tiny.classes), "cpu")
    start = net.fresh(0, rng.Purpose.TEACHER, torch.zeros(1, dtype=torch.long), torch.arange(2))
    pixels = hard.decoded()[0]
    together, alone = (averaged_softmax(Trained(net, start, start), pixels, tiny, 1.0, CPU, chunk=n) for n in (24, 1))
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PROTOCOLS.names())
def test_one_hot_labels_train_as_classes_do_under_every_protocol(name, hard, tiny):
    """Bit for bit: the same networks come out. Augmentation and CutMix act on both kinds alike."""
    assert len(PROTOCOLS.names()) >= 10
    recipe = make_protocol(name, epochs=3, batch=10).recipe
    net = FlatNet(make_net(NET, tiny.shape, tiny.classes), "cpu")
    ends = []
    for condensed in (hard, one_hot(hard)):
        pixels, labels = condensed.decoded()
        trainer = Trainer(net, Images(pixels, labels, tiny.normalise()), recipe, 2, 0, CPU, counts=True)
        trainer.run(3)
        ends.append((trainer.flat.detach(), trainer.right))
    assert torch.equal(ends[0][0], ends[1][0]) and torch.equal(ends[0][1], ends[1][1])


@pytest.mark.parametrize("name", PROTOCOLS.names())
def test_evaluation_with_soft_labels_under_every_protocol(name, soft, tiny):
    result = evaluate(soft, tiny, net=NET, protocol=make_protocol(name, epochs=2), repeats=1, runtime=CPU)
    assert result.record["labels"] == "soft" and result.record["soft_labels"]["teacher"] == NET
    assert result.record["storage"] == {"pixels": 6 * 3 * 64 * 4, "labels": 6 * 8 + 24 * 3 * 4} == soft.storage


def test_records_say_the_kind_and_soft_labels_change_the_outcome(hard, soft, tiny):
    settings = {"net": NET, "protocol": make_protocol("quick", epochs=20), "repeats": 2, "runtime": CPU}
    results = {kind: evaluate(s, tiny, **settings).as_record() for kind, s in (("hard", hard), ("soft", soft))}
    assert {kind: r["labels"] for kind, r in results.items()} == {"hard": "hard", "soft": "soft"}
    assert "soft_set" not in results["hard"] and results["hard"]["set"] == results["soft"]["set"]
    again = evaluate(soft.hard(), tiny, **settings).as_record()
    assert again["last"] == results["hard"]["last"] and again["labels"] == "hard"
    pixels = hard.decoded()[0]
    net = FlatNet(make_net(NET, tiny.shape, tiny.classes), "cpu")
    ends = []
    for labels in (hard.decoded()[1], soft.decoded()[1]):
        trainer = Trainer(net, Images(pixels, labels, tiny.normalise()), Recipe(2, 8, 0.05), 1, 0, CPU)
        trainer.run(2)
        ends.append(trainer.flat.detach())
    assert not torch.equal(*ends)


def test_cross_entropy_and_cutmix_mix_probabilities(tiny):
    """−Σ p log q by hand, and a step on mixed images against the share-weighted mean of both labels."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.log_softmax(torch.randn(2, 5, 3, generator=generator), -1)
    target = torch.softmax(torch.randn(2, 5, 3, generator=generator), -1)
    expected = torch.stack([functional.cross_entropy(s, t) for s, t in zip(scores, target, strict=True)])
    torch.testing.assert_close(cross_entropy(scores, target), expected)
    pixels = torch.rand(6, 3, 8, 8, generator=generator)
    images = Images(pixels, torch.softmax(torch.randn(6, 3, generator=generator), 1), tiny.normalise())
    net = FlatNet(make_net(NET, tiny.shape, tiny.classes), "cpu")
    trainer = Trainer(net, images, Recipe(1, 6, 0.1, cutmix=1.0), 2, 0, CPU)
    trainer._begin_epoch()
    shown = trainer.batches.take(6, ahead=False)
    mixed, labels, other, share = shown
    index = trainer.batches.index[0]
    partner = torch.argsort(trainer.batches.partner[0], dim=-1, stable=True)
    assert labels.shape == (2, 6, 3) and (share < 1).all()
    for r in range(2):
        assert torch.equal(labels[r], images.labels[index[r]])
        assert torch.equal(other[r], images.labels[index[r]][partner[r]])
    blended = labels * share[:, None, None] + other * (1 - share[:, None, None])
    flat = trainer.flat.clone().requires_grad_()
    scores = torch.log_softmax(net(flat, mixed, torch.float32).logits, -1)
    (expected,) = torch.autograd.grad(-(scores * blended).sum(-1).mean(1).sum(), flat)
    torch.testing.assert_close(trainer._gradient(trainer.flat, shown)[0], expected)


def test_round_trip_and_old_files(hard, soft, tmp_path):
    soft.save(tmp_path / "soft.safetensors")
    again = CondensedSet.load(tmp_path / "soft.safetensors")
    assert torch.equal(again.soft, soft.soft) and torch.equal(again.labels, soft.labels)
    assert set(again.manifest["sha256"]) == {"images", "labels", "soft"} and again.manifest["format"] == 2
    assert again.fingerprint == hard.fingerprint and again.manifest["soft_labels"] == soft.manifest["soft_labels"]
    plain = again.hard()
    assert plain.soft is None and "soft_labels" not in plain.manifest and plain.decoded()[1].dtype == torch.int64
    hard.save(tmp_path / "hard.safetensors")
    old = CondensedSet.load(tmp_path / "hard.safetensors")
    assert old.manifest["format"] == 1 and old.soft is None and set(old.manifest["sha256"]) == {"images", "labels"}
    assert hard.hard() is hard


def test_tampering_is_seen(soft, tmp_path):
    path = tmp_path / "set.safetensors"

    def swap(tensors, manifest):
        tensors["soft"] = tensors["soft"].roll(1, 1)

    def drop(tensors, manifest):
        del tensors["soft"]

    def forget(tensors, manifest):
        manifest["format"] = 1
        del manifest["sha256"]["soft"]

    for change, message in (
        (swap, "the tensor 'soft' does not match its checksum"),
        (drop, "has no tensor 'soft'"),
        (forget, "the tensor 'soft' does not match its checksum"),
    ):
        soft.save(path)
        rewrite(path, change)
        with pytest.raises(M3DError, match=message):
            CondensedSet.load(path)
    bad = soft.soft.clone()
    bad[3, 0] += 0.5
    for wrong, message in (
        (bad, "each row's sum 1"),
        (-soft.soft, "not negative"),
        (soft.soft[:6].clone(), r"expected float32 \[24, 3\]"),
        (soft.soft.double(), "expected float32"),
    ):
        replace(soft, soft=wrong).save(path)
        with pytest.raises(M3DError, match=message):
            CondensedSet.load(path)


def test_dataset_export_and_picture(hard, soft, tmp_path):
    data = CondensedDataset(soft)
    image, label = data[5]
    assert torch.equal(label, soft.soft[5]) and torch.equal(image, CondensedDataset(hard)[5][0])
    images, labels = next(iter(torch.utils.data.DataLoader(data, batch_size=7)))
    assert labels.shape == (7, 3) and functional.cross_entropy(images.flatten(1)[:, :3], labels).ndim == 0
    with np.load(export(soft, "npz", tmp_path / "set.npz"), allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["soft_labels"], soft.soft.numpy())
        np.testing.assert_array_equal(arrays["labels"], hard.decoded()[1].numpy())
    content = torch.load(export(soft, "pt", tmp_path / "set.pt"), weights_only=True)
    assert torch.equal(content["soft_labels"], soft.soft) and content["labels"].shape == (24,)
    folder = export(soft, "imagefolder", tmp_path / "folder")
    rows = list(csv.DictReader(io.StringIO((folder / "soft_labels.csv").read_text())))
    assert len(rows) == 24 and all((folder / row["file"]).is_file() for row in rows)
    assert [float(rows[9][f"class {c}"]) for c in range(3)] == pytest.approx(soft.soft[9].tolist())
    assert not (export(hard, "imagefolder", tmp_path / "plain") / "soft_labels.csv").exists()
    assert "soft labels" in grid(soft).axes[0].get_title("left").replace("\n", " ")
    assert "soft" not in grid(hard).axes[0].get_title("left")


def test_teachers_from_the_cache_cost_what_their_training_took(tiny, hard, monkeypatch):
    teachers = Teachers(NET, teachers=2, epochs=2, seed=5)
    relabel(hard, tiny, teachers, CPU)
    original = trained._read
    monkeypatch.setattr(trained, "_read", lambda *a: (original(*a)[0], 1000.0, 0))
    assert 1000 < relabel(hard, tiny, teachers, CPU).manifest["soft_labels"]["seconds"] < 1100


def test_soft_results_stand_in_columns_of_their_own(tiny, tmp_path, hard, soft):
    for name, condensed in (("soft", soft), ("hard", hard)):
        condensed.save(tmp_path / name / RunFolder.CONDENSED)
        result = evaluate(condensed, tiny, net=NET, protocol=make_protocol("quick", epochs=2), repeats=2, runtime=CPU)
        record = result.as_record()
        if name == "hard":
            del record["labels"]  # as records were before there were two kinds
        RunFolder(tmp_path / name).add_result(record)
    rows = rows_of([tmp_path / "soft", tmp_path / "hard"])
    assert rows[0]["last"] is None and rows[0]["best"] is None and rows[0]["soft_last"] is not None
    assert rows[1]["soft_last"] is None and rows[1]["soft_best"] is None and rows[1]["last"] is not None
    assert rows[0]["label_bytes"] == 336 and rows[1]["label_bytes"] == 48 and rows[0]["pixel_bytes"] == 4608
    assert rows[0]["seconds"] == pytest.approx(
        soft.manifest["seconds"] + soft.manifest["soft_labels"]["seconds"], abs=1e-9
    )
    parsed = list(csv.DictReader(io.StringIO(table(rows, "csv"))))
    assert parsed[0]["last"] == parsed[0]["last_sd"] == parsed[1]["soft_last"] == parsed[1]["soft_best_sd"] == ""
    assert float(parsed[0]["soft_last"]) == rows[0]["soft_last"][0] and float(parsed[1]["best"]) == rows[1]["best"][0]
    for form in ("text", "markdown", "latex"):
        assert all(c.replace("_", " ") in table(rows, form) for c in (*COLUMNS, *SOFT_COLUMNS))
        assert "soft" not in table(rows[1:], form)  # columns that nothing stands in are not shown
    labels = [text.get_text() for text in bar_chart(rows).axes[0].get_yticklabels()]
    assert [label.endswith("soft labels") for label in labels] == [False, True]


def test_the_command(capsys, tiny_file, tmp_path):
    run = tmp_path / "run"
    assert command(capsys, "condense", tiny_file, "--method", "random", "--ipc", 2, "--net", NET, "--out", run)[0] == 0
    before = (run / RunFolder.CONDENSED).read_bytes()
    options = ["--teacher", NET, "--teachers", 2, "--epochs", 1, "--temperature", 3, "--seed", 4]
    code, out, _ = command(capsys, "relabel", run, *options)
    assert (
        code == 0
        and "6 images labelled by 2 convnet2:width=8" in out
        and f"m3d evaluate {run}-soft --net {NET}\n" in out
    )
    assert "4,608 bytes of pixels + 120 bytes of labels" in out
    made = CondensedSet.load(tmp_path / "run-soft")
    assert Teachers.of(made) == Teachers(NET, 2, 1, 3.0, 4) and (run / RunFolder.CONDENSED).read_bytes() == before
    assert torch.equal(m3d.resume(tmp_path / "run-soft").soft, made.soft)
    code, _, err = command(capsys, "relabel", run, *options)
    assert code == 2 and "already holds a run" in err
    arguments = [
        "--overwrite",
        "--json",
        "--data",
        tiny_file,
        "--device",
        "cpu",
        "--precision",
        "fp32",
        "--deterministic",
    ]
    code, out, _ = command(capsys, "relabel", run / RunFolder.CONDENSED, *options, *arguments, "--data-root", tmp_path)
    told = json.loads(out)
    assert code == 0 and told["storage"] == made.storage and told["soft_labels"]["seed"] == 4
    code, out, _ = command(capsys, "evaluate", f"{run}-soft", "--net", NET, "--epochs", 1, "--repeats", 1)
    assert code == 0 and "soft labels" in out and RunFolder(f"{run}-soft").results()[0]["labels"] == "soft"
    code, out, _ = command(capsys, "relabel", f"{run}-soft", *options[:4], "--epochs", 1, "--out", tmp_path / "other")
    assert code == 0 and Teachers.of(CondensedSet.load(tmp_path / "other")).temperature == 1.0


def test_wrong_requests(capsys, hard, tiny, digits, tmp_path):
    for options, message in (
        ({"temperature": 0.0}, "temperature=0.0 is not valid"),
        ({"temperature": float("inf")}, "temperature=inf is not valid"),
        ({"teachers": 0}, "teachers=0"),
        ({"epochs": 0}, "epochs=0"),
        ({"teacher": "convnot"}, "unknown network 'convnot'"),
    ):
        with pytest.raises(M3DError, match=message):
            m3d.relabel(hard, tiny, **options)
    with pytest.raises(M3DError, match="they must be the same"):
        m3d.relabel(hard, digits)
    with pytest.raises(M3DError, match="does not say who made its soft labels"):
        Teachers.of(one_hot(hard))
    (tmp_path / "file").write_text("")
    with pytest.raises(M3DError, match="is a file"):
        m3d.relabel(hard, tiny, out=tmp_path / "file")


def test_reproduce_uses_classes_alone(soft, tmp_path):
    from m3d.grid.cells import RUNS, Overrides, Source, set_name
    from m3d.grid.work import Place, Watch, Workshop

    source = Source("tiny", 2, "random")
    soft.save(tmp_path / RUNS / set_name(source, Overrides()) / RunFolder.CONDENSED)
    taken = Workshop(Place(tmp_path, device="cpu"), Overrides(), Watch()).condensed(source)
    assert taken.label_kind == "hard" and taken.fingerprint == soft.fingerprint
