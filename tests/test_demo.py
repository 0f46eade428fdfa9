"""The demonstration's promise: one image per class of digits, M3D at least 75 % and 12 points above random."""

import json

import pytest

from m3d.cli import main


def test_the_demo_keeps_its_promise(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--out", str(tmp_path / "demo"), "--json"])
    summary = json.loads(capsys.readouterr().out)
    random, condensed = (row["accuracy"] for row in summary["rows"])
    assert stop.value.code in (0, None) and condensed >= 75 and condensed - random >= 12
    assert summary["picture"] == str(tmp_path / "demo" / "digits.png")
    assert (tmp_path / "demo" / "digits.png").stat().st_size > 2000


def test_the_demo_prints_a_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("m3d.demo.OPTIONS", {"steps": 2, "batch_real": 4})
    with pytest.raises(SystemExit):
        main(["demo", "--out", str(tmp_path / "demo"), "--repeats", "1"])
    out = capsys.readouterr().out
    assert "test accuracy" in out and "random selection" in out
    assert "accuracy of 1 network, last epoch" in out and "±" not in out
