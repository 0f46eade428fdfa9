"""Who works in a folder: the second is refused by name, and the dead keep nothing."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from m3d.errors import M3DError
from m3d.lock import NAME, Owner, claim


def holder(folder) -> subprocess.Popen:
    """Another process that holds ``folder`` until it is killed."""
    code = f"""
        import sys, time
        from pathlib import Path
        from m3d.lock import claim
        with claim(Path({str(folder)!r}), "m3d condense"):
            print("held", flush=True)
            time.sleep(60)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_is_told_who_the_first_is_and_a_killed_one_is_succeeded(tmp_path, caplog):
    process = holder(tmp_path)
    try:
        with pytest.raises(M3DError, match=rf"in use by m3d condense \(process {process.pid} on .*since 20"):
            claim(tmp_path, "m3d evaluate").__enter__()
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / NAME).exists()
    with claim(tmp_path, "m3d evaluate"):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    assert f"process {process.pid} on" in caplog.text and "taken over" in caplog.text
    assert not list(tmp_path.iterdir())


def test_one_process_takes_a_lock_once(tmp_path):
    with claim(tmp_path, "a"):
        with pytest.raises(M3DError, match=rf"in use by a \(process {os.getpid()} "), claim(tmp_path, "b"):
            pass
        with claim(tmp_path, "c", ".other"):
            pass
    with claim(tmp_path, "b"):
        pass


def test_a_later_process_of_the_same_number_is_another(tmp_path, caplog):
    with claim(tmp_path, "a"):
        kept = json.loads((tmp_path / NAME).read_text())
    (tmp_path / NAME).write_text(json.dumps({**kept, "began": "an earlier system 12"}))
    with claim(tmp_path, "b"):
        assert json.loads((tmp_path / NAME).read_text())["work"] == "b"
    assert "taken over" in caplog.text


def test_without_the_systems_locks_the_content_counts(tmp_path, monkeypatch):
    monkeypatch.setattr("m3d.lock._flock", lambda handle: True)
    with claim(tmp_path, "a"), pytest.raises(M3DError, match="in use by a"), claim(tmp_path, "b"):
        pass


def test_another_machine_is_never_succeeded_by_itself(tmp_path):
    owner = Owner(1, "elsewhere", "x", "2026-01-01", "m3d condense")
    (tmp_path / NAME).write_text(json.dumps(vars(owner)))
    with pytest.raises(M3DError, match=r"process 1 on elsewhere.*if that process is gone, delete '.*\.lock'"):
        claim(tmp_path, "b").__enter__()
    (tmp_path / NAME).unlink()
    with claim(tmp_path, "b"):
        pass


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x"}', "[" * 3000, '{"pid": 1, "host": 2}'])
def test_a_lock_that_names_nobody_is_taken(tmp_path, content):
    (tmp_path / NAME).write_text(content)
    with claim(tmp_path, "a"):
        assert json.loads((tmp_path / NAME).read_text())["work"] == "a"


def test_a_folder_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(M3DError, match=r"cannot write '.*\.lock': Read-only file system"), claim(tmp_path, "a"):
        pass
