"""The paper's own numbers, from one data file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Published:
    """A number as the paper prints it, with its ± where it has one."""

    mean: float
    sd: float | None
    source: str  # the table it stands in
    again: bool = False  # marked there as run again by the paper's authors


@cache
def sections() -> dict[str, Any]:
    """Everything the data file holds."""
    return tomllib.loads(files("m3d.reproduce").joinpath("published.toml").read_text(encoding="utf-8"))


def published(plan: str, row: str, column: str) -> Published | None:
    """The published value at a place of a table; None where the paper has none, or a dash."""
    section = sections().get(plan)
    value = None if section is None else section["values"].get(row, {}).get(column)
    if section is None or value is None or value == "-":
        return None
    mean, sd = value if isinstance(value, list) else (value, None)
    again = f"{row}/{column}" in section.get("reproduced", ())
    return Published(float(mean), None if sd is None else float(sd), section["source"], again)
