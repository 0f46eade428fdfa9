"""Grids of cells, for ``m3d reproduce`` and ``m3d sweep`` alike: each cell a condensed set and what is measured on it.

``cells`` says what a cell is and what identifies it, ``journal`` keeps what came out, ``work`` makes one cell,
``runner`` makes the missing ones of many, in this process or by the workers of a Ray cluster (``where``, ``cluster``).
"""
