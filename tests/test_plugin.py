"""A newcomer adds a kernel and a method in one new file: CONTRIBUTING's own example, run as a user would."""

import json
import re
import subprocess
import sys
from pathlib import Path

CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"


def example() -> str:
    """The file that CONTRIBUTING shows under 'A kernel and a method in one file'."""
    return re.search(r"```python\n(\"\"\"Energy distance.*?)```", CONTRIBUTING.read_text(), re.S).group(1)


def test_the_example_of_contributing_works(tmp_path):
    plugin = tmp_path / "energy.py"
    plugin.write_text(example())
    command = [sys.executable, "-m", "m3d", "--plugin", str(plugin)]

    def run(*arguments):
        return subprocess.run([*command, *arguments], capture_output=True, text=True, check=True, cwd=tmp_path).stdout

    assert "energy" in run("list", "methods") and "energy" in run("list", "kernels")
    fast = ["--steps", "3", "--batch-real", "4", "--net", "convnet2:width=8", "--json"]
    by_method = json.loads(run("condense", "digits", "--method", "energy", *fast, "--out", "a"))
    by_kernel = json.loads(
        run(
            "condense",
            "digits",
            "--kernel",
            "energy",
            *fast,
            "--lr",
            str(by_method["options"]["lr"] or 0.005),
            "--out",
            "b",
        )
    )
    assert by_method["method"] == "energy" and by_kernel["options"]["kernel"] == "energy"
    assert by_method["loss"] > 0
    twice = subprocess.run(
        [*command, "--plugin", str(plugin), "list", "methods"], capture_output=True, text=True, cwd=tmp_path
    )
    assert twice.returncode == 2 and "registered twice" in twice.stderr
