"""What tests of data share."""

from pathlib import Path

import pytest


@pytest.fixture
def no_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test may see this machine's own data, nor reach past it."""
    monkeypatch.delenv("M3D_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
