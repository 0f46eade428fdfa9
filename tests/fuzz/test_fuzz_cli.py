"""What can be typed: every option with any value ends in work or in one line and exit code 2, never in a traceback."""

import itertools

import numpy as np
import pytest

pytest.importorskip("hypothesis", reason="fuzzing needs the package hypothesis (extra dev)")

from hypothesis import given
from hypothesis import strategies as st
from strange import cases

import m3d
from m3d.cli import main

FAST = ["--net", "convnet1:width=4", "--steps", "1", "--batch-real", "2"]


class Reached(BaseException):
    """Everything was checked and the long work would begin."""


def reached(*arguments, **options):
    raise Reached


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with data and a finished run, from which nothing typed leads out; the network is never asked."""
    generator = np.random.default_rng(0)
    images, labels = generator.integers(0, 255, (12, 8, 8, 1), np.uint8), np.arange(12) % 3
    np.savez(tmp_path / "data.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("M3D_COMMIT", "none")  # or every run asks git
    monkeypatch.setattr("m3d.data.official._download", lambda *a: pytest.fail("the network was asked"))
    m3d.condense("./data.npz", 1, net="convnet1:width=4", steps=1, batch_real=2, out="run")
    return tmp_path


# Any text but a path that leads out of the folder.
text = st.text(max_size=12).filter(lambda t: "/" not in t and ".." not in t)
number = st.one_of(
    st.integers(-3, 40).map(str),
    st.floats().map(str),
    st.sampled_from(["", "nan", "-inf", "1e400", "0x10", "1_0", str(2**31), str(2**64), str(-(2**70)), "9" * 5000]),
)
word = st.one_of(
    text, number, st.sampled_from(["auto", "cpu", "cuda", "cuda:x", "fp32", "bf16", "val", "m3d", "dm", "convnet2"])
)
name = st.one_of(
    text,
    st.sampled_from(
        ["m3d", "dm", "random", "herding", "datadam", "gaussian", "linear", "polynomial:degree=x", "m-3_D"]
    ),
    st.builds("{}:{}={}".format, st.sampled_from(["convnet3", "timm", "resnet18", "polynomial", "x"]), text, number),
)
setting = st.builds(
    "{}={}".format,
    st.sampled_from(["momentum", "factor", "augment", "init", "batch_syn_max", "lr", "ipm", "x", ""]),
    word,
)
OPTIONS = {
    "condense": {
        "--ipc": number, "--method": name, "--lr": number, "--factor": number, "--kernel": name, "--objective": name,
        "--ipm": number, "--batch-real": number, "--set": setting, "--net": name, "--seed": number, "--out": text,
        "--overwrite": None, "--resume": text, "--val-fraction": number, "--eval-every": number, "--device": word,
        "--keep-every": number, "--precision": word, "--deterministic": None, "--step-mode": word,
        "--checkpoint-seconds": number, "--steps": number, "--zca": None, "--json": None,
    },
    "evaluate": {
        "--full": text, "--data": text, "--net": name, "--nets": name, "--protocol": name, "--epochs": number,
        "--batch": number, "--repeats": number, "--split": word, "--out": text, "--seed": number, "--zca": None,
        "--no-zca": None, "--device": word, "--precision": word, "--deterministic": None, "--json": None,
    },
    "show": {"--out": text, "--decoded": None, "--history": None, "--most": number, "--classes": number},
    "export": {"--to": st.one_of(text, st.sampled_from(["npz", "pt", "imagefolder"])), "--out": text},
    "compare": {"--form": word, "--chart": text, "--json": None},
    "list": {"--json": None},
    "reproduce": {
        "--cell": text, "--dry-run": None, "--render": None, "--out": text, "--steps": number, "--epochs": number,
        "--repeats": number, "--precision": word, "--time-limit": number, "--again": None, "--json": None,
    },
}  # fmt: skip
SUBJECTS = {
    "condense": ["./data.npz"],
    "evaluate": ["run"],
    "show": ["run"],
    "export": ["run"],
    "compare": ["run"],
    "list": ["methods", "nets", "kernels", "protocols"],
    "reproduce": ["lowres", "fig1", "table1"],
}
_numbers = itertools.count()


@st.composite
def commands(draw: st.DrawFn) -> list[str]:
    command = draw(st.sampled_from(sorted(OPTIONS)))
    words = [command, draw(st.one_of(st.sampled_from(SUBJECTS[command]), text))]
    if command == "list":
        words += draw(st.lists(name, max_size=1))
    options = OPTIONS[command]
    for option in draw(st.lists(st.sampled_from(sorted(options)), max_size=3)):
        words += [option] if options[option] is None else [option, draw(options[option])]
    return words


def call(capsys, words: list[str]) -> int | None:
    """The exit code; None where the long work would have begun."""
    try:
        main(words)
    except Reached:
        capsys.readouterr()
        return None
    except SystemExit as stop:
        code, err = stop.code, capsys.readouterr().err
        if code == 130 and "--time-limit" in words:  # it passed before the work began
            return None
        assert code in (0, 2), (words, code, err)
        assert "Traceback" not in err
        if code == 2:
            assert err.splitlines()[-1].startswith("m3d: "), (words, err)
        return code
    raise AssertionError("main always exits")


def test_everything_that_can_be_typed(place, count, capsys, monkeypatch):
    """Everything up to the long work itself."""
    monkeypatch.setattr("m3d.prepare.Prepared.go", reached)
    monkeypatch.setattr("m3d.evaluation.Trainer", reached)
    monkeypatch.setattr("m3d.grid.work.Workshop.make", reached)
    seen = set()

    @cases(0.15)
    @given(commands())
    def check(words):
        count("command line")
        seen.add(call(capsys, words))

    check()
    assert seen == {None, 0, 2}


def test_whole_runs(place, count, capsys):
    """One step for real, with one option of any value."""
    cheap = {"--seed", "--lr", "--set", "--val-fraction", "--checkpoint-seconds", "--factor", "--ipm", "--precision"}
    options = {k: v for k, v in OPTIONS["condense"].items() if k in cheap}
    seen = set()

    @cases(0.05)
    @given(st.sampled_from(sorted(options)).flatmap(lambda o: st.tuples(st.just(o), options[o])))
    def check(option):
        count("whole runs")
        seen.add(call(capsys, ["condense", "./data.npz", *FAST, "--out", f"whole-{next(_numbers)}", *option]))

    check()
    assert seen == {0, 2}
