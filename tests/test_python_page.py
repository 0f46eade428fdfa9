"""The examples of docs/python.md, run as they stand."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "python.md"


def test_the_examples_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    space: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), space)
    out = capsys.readouterr().out
    assert len(blocks) == 6 and "2 seeds" in out and "| random |" in out and "stopped after" in out
    assert space["finished"].manifest["steps"] == 400
