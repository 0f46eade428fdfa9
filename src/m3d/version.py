"""The version, and whether an optional package is there; importing this imports nothing else."""

import importlib.util

__version__ = "0.1.0"
HAS_TRITON = importlib.util.find_spec("triton") is not None  # of the fused kernels; it comes with PyTorch for CUDA
