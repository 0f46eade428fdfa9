"""The fast version of the harness; the whole one is ``python -m tests.faults`` (200 kills, ten minutes)."""

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
    assert len(lines) == 2 and lines[0].startswith("condensation: 12 kills over ")
    for tally, kills in zip(json.loads(figures), (12, 4), strict=True):
        assert tally["kills"] == kills and tally["runs"] == tally["identical"] >= 1
        assert tally["checkpoints"] > kills
