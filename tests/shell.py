"""The command line, called within the process."""

import pytest

from m3d.cli import main

FAST = ["--net", "convnet2:width=8", "--steps", "3", "--batch-real", "4"]


def run(capsys, *arguments) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    captured = capsys.readouterr()
    code = stop.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err


def fails(capsys, *arguments) -> str:
    """A user's mistake: exit code 2, one line on stderr, nothing on stdout."""
    code, out, err = run(capsys, *arguments)
    assert code == 2 and out == "" and err.startswith("m3d: ") and err.count("\n") == 1 and "Traceback" not in err
    return err
