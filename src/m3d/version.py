"""The version; importing this imports nothing else."""

__version__ = "0.1.0"
