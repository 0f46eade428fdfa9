"""The records of our own runs, as they are kept in the repository."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_their_commands_name_no_folder_of_a_machine():
    """Records travel; no reader has the folders of the machine they were made on."""
    files = [*ROOT.glob("results/**/*.jsonl"), *ROOT.glob("benchmarks/results/*.json*")]
    commands = [c for file in files for c in re.findall(r'"command": "((?:[^"\\]|\\.)*)"', file.read_text())]
    assert len(commands) > 300
    assert [command for command in commands if re.search(r"(^|[\s='])/\w", command)] == []
