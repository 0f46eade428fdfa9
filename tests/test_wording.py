"""Numbers and options as a person says them."""

from pathlib import Path

import pytest

import m3d
from m3d.cli import main
from m3d.errors import Interrupted, M3DError
from m3d.wording import counted, option, resuming, typed, with_sd


@pytest.mark.parametrize(
    ("number", "things", "said"),
    [
        (0, "steps", "0 steps"),
        (1, "steps", "1 step"),
        (2, "steps", "2 steps"),
        (1, "epochs of training the networks it needs", "1 epoch of training the networks it needs"),
    ],
)
def test_one_is_not_many(number, things, said):
    assert counted(number, things) == said
    assert str(Interrupted(number, things)) == f"stopped after {said}"


def test_a_single_network_has_no_deviation():
    assert with_sd(12.345, 0.5, 2) == "12.35 ± 0.50" and with_sd(12.345, 0.0, 1) == "12.35"


def test_options_are_named_as_they_were_given():
    """In Python as arguments; as flags only while a command runs."""
    options = [("batch_real", 32, False), ("lr", None, False), ("overwrite", True, False), ("chroma", "half", True)]
    called = [option(*given) for given in options]
    assert called == ["batch_real=32", "lr", "overwrite=True", "chroma='half'"]
    assert resuming(Path("runs/a")) == "m3d.resume('runs/a')"
    with typed():
        commanded = [option(*given) for given in options]
        assert commanded == ["--batch-real 32", "--lr", "--overwrite", "--set chroma=half"]
        assert resuming(Path("runs/a")) == "m3d condense --resume runs/a"
    assert [option(*given) for given in options] == called


def test_the_same_slip_in_python_and_as_a_command(capsys, tmp_path):
    folder = tmp_path / "run"
    given = {"net": "convnet1:width=4", "steps": 1, "batch_real": 4}
    m3d.condense("digits", 1, out=folder, **given)
    with pytest.raises(M3DError, match=r"already holds a run, .*, choose another out, or pass overwrite=True$"):
        m3d.condense("digits", 1, out=folder, **given)
    with pytest.raises(SystemExit):
        main(["condense", "digits", "--ipc", "1", "--out", str(folder)])
    assert "choose another --out, or pass --overwrite" in capsys.readouterr().err
    with pytest.raises(M3DError, match="overwrite=True"):  # after a command as before it
        m3d.condense("digits", 1, out=folder, **given)
