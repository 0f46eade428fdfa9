"""What earlier versions did without saying so: the values of options that came later."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_BEFORE: Mapping[str, Any] = {"chroma": "full"}


def completed(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Recorded ``options`` and, for those of ``known`` that they do not name, the value before the option came."""
    return {**{name: value for name, value in _BEFORE.items() if name in known}, **options}
