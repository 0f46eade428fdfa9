"""The demonstration's promise: one image per class of digits, M3D at least 75 % and 12 points above random."""

from m3d.demo import run_demo


def test_the_demo_keeps_its_promise(tmp_path):
    summary = run_demo(tmp_path / "demo", repeats=5, report=None)
    random, condensed = (row["accuracy"] for row in summary["rows"])
    assert condensed >= 75 and condensed - random >= 12
    assert (tmp_path / "demo" / "digits.png").stat().st_size > 2000
