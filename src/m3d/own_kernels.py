"""Whether the kernels of this package can be built here."""

from __future__ import annotations

import importlib.util

import torch

# Triton comes with PyTorch for CUDA; AMD devices know no products of float32 factors split in three. A constant,
# not a cached function, because the compiler meets it within a step and warns of functions that cache.
HAS_KERNELS: bool = importlib.util.find_spec("triton") is not None and torch.version.hip is None
