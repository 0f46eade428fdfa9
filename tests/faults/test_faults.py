"""The fast version of the harness; the whole one is ``python -m tests.faults`` (200 kills, three to six minutes)."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_killed_runs_end_as_if_never_disturbed():
    command = [sys.executable, "-m", "tests.faults", "--methods", "m3d", "--kills", "12", "--evaluation-kills", "4"]
    done = subprocess.run([*command, "--json"], cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *lines, figures = done.stdout.splitlines()
    assert len(lines) == 7 and lines[5].startswith("condensation: 12 kills over ")
    *moments, condensation, evaluation = json.loads(figures)
    assert [moment["unfinished_end"] for moment in moments[:2]] == [4, 4]  # three checkpoint files and the lock
    assert moments[2]["unfinished_end"] > 4  # and the parts' folders
    assert all(moment["moments"] == moment["identical"] >= 10 for moment in moments)
    for tally, kills in ((condensation, 12), (evaluation, 4)):
        assert tally["kills"] == kills and tally["runs"] == tally["identical"] >= 1
        assert tally["checkpoints"] > kills
