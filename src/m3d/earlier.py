"""What earlier versions did without saying so: the values of options that came later."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_BEFORE: Mapping[str, Any] = {"chroma": "full", "train_batch": 256, "cell": 0, "margin": 0}


def completed(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Recorded ``options`` and, for those of ``known`` that they do not name, the value before the option came."""
    return {**{name: value for name, value in _BEFORE.items() if name in known}, **options}


def comparable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Recorded ``options`` without those that say what a record without them means as well."""
    return {name: value for name, value in options.items() if name not in _BEFORE or value != _BEFORE[name]}
