"""``python -m m3d`` is the command line."""

from m3d.cli import main

main()
