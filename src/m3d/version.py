"""The version, and whether an optional package is there; importing this imports nothing else."""

import importlib.util
from functools import cache

__version__ = "0.1.0"


@cache
def has_kernels() -> bool:
    """Whether our own kernels can be built: Triton is there, which comes with PyTorch for CUDA, and it is for NVIDIA's
    devices (AMD's know no products of float32 factors split in three)."""
    import torch  # not before: a command's help does without

    return importlib.util.find_spec("triton") is not None and torch.version.hip is None
