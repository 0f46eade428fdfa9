"""Everything that is shown, made from the records alone: the same records give the same bytes."""

from __future__ import annotations

from pathlib import Path

from m3d.errors import M3DError
from m3d.reproduce.figures import FIGURES
from m3d.reproduce.records import Records
from m3d.reproduce.tables import comma_separated, latex, markdown

_TABLES = {"md": markdown, "tex": latex, "csv": comma_separated}


def render(records: Records) -> list[Path]:
    """Write a plan's tables and figures beside its records; returns the files."""
    from m3d.files import write_bytes
    from m3d.pictures import save_figure

    plan = records.plan
    if not any(records.of(cell) for cell in plan.cells):
        raise M3DError(f"{str(records.file)!r} holds no record of {plan.name}; run 'm3d reproduce {plan.name}' first")
    written = []
    for ending, make in _TABLES.items():
        written.append(records.folder / f"{plan.name}.{ending}")
        write_bytes(written[-1], make(plan, records).encode())
    for suffix, figure in FIGURES[plan.figure](records).items() if plan.figure else ():
        for ending in ("png", "svg"):
            written.append(records.folder / f"{plan.name}{suffix}.{ending}")
            save_figure(figure, written[-1], dpi=300, tight=False)
    return written
