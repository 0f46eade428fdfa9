"""m3d: condense a labelled image dataset into a tiny synthetic one by minimising the maximum mean discrepancy.

Names are imported when first used, so that ``import m3d`` (and the command line's help) does not load PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from m3d.errors import M3DError
from m3d.version import __version__

if TYPE_CHECKING:
    from m3d.api import condense, evaluate, rank, relabel, resume
    from m3d.condensed import CondensedDataset, CondensedSet
    from m3d.data import ClassData, Dataset, load_data
    from m3d.evaluation import Protocol, Result
    from m3d.method import Matching, Method
    from m3d.ranking import Ranking

_HOME = {
    "condense": "m3d.api",
    "evaluate": "m3d.api",
    "rank": "m3d.api",
    "relabel": "m3d.api",
    "resume": "m3d.api",
    "ClassData": "m3d.data",
    "Dataset": "m3d.data",
    "load_data": "m3d.data",
    "Matching": "m3d.method",
    "Method": "m3d.method",
    "Protocol": "m3d.evaluation",
    "Ranking": "m3d.ranking",
    "Result": "m3d.evaluation",
    "CondensedDataset": "m3d.condensed",
    "CondensedSet": "m3d.condensed",
}

__all__ = [
    "ClassData",
    "CondensedDataset",
    "CondensedSet",
    "Dataset",
    "M3DError",
    "Matching",
    "Method",
    "Protocol",
    "Ranking",
    "Result",
    "__version__",
    "condense",
    "evaluate",
    "load_data",
    "rank",
    "relabel",
    "resume",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'm3d' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
