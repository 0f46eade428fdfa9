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


def test_a_run_that_needs_a_plugin_says_so_when_it_goes_on_without(tmp_path):
    """The way on names the plugin, and who leaves it out is told how the run was begun."""
    plugin = tmp_path / "energy.py"
    stop = "Prepared.go = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
    plugin.write_text(f"{example()}\nimport os, signal\nfrom m3d.prepare import Prepared\n{stop}")

    def run(*arguments):
        command = [sys.executable, "-m", "m3d", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    for asked in (["--method", "energy"], ["--kernel", "energy", "--lr", "0.01"]):
        folder = f"run-{asked[1]}-{len(asked)}"
        begun = run("--plugin", "energy.py", "condense", "digits", *asked, "--out", folder, "--net", "convnet2:width=8")
        assert begun.returncode == 130
        assert begun.stderr.endswith(f"continue with: m3d --plugin energy.py condense --resume {folder}\n")
        without = run("condense", "--resume", folder)
        assert without.returncode == 2 and "'energy'" in without.stderr
        assert "The run was begun by: " in without.stderr and "--plugin energy.py" in without.stderr
    missing = run("condense", "digits", "--method", "energy")
    assert missing.returncode == 2 and "known after m3d --plugin FILE.py" in missing.stderr


def test_a_broken_plugin_is_one_line(tmp_path):
    for text, told in (
        ("import m3d\nimport nowhere_at_all\n", "in line 2: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("def broken(:\n", "SyntaxError: "),
    ):
        (tmp_path / "broken.py").write_text(text)
        command = [sys.executable, "-m", "m3d", "--plugin", "broken.py", "list", "methods"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.startswith("m3d: plugin 'broken.py' cannot be loaded")
        assert told in done.stderr and done.stderr.count("\n") == 1
