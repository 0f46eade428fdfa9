"""Errors that are the user's to mend: one sentence that names the value, the place and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from m3d.wording import counted


class M3DError(ValueError):
    """A problem the user can mend. The command line prints it in one line and exits with code 2."""


class Interrupted(Exception):
    """Work was asked to stop; its checkpoint is written."""

    def __init__(self, done: int, unit: str = "steps"):
        super().__init__(f"stopped after {counted(done, unit)}")
        self.done = done


def unknown(kind: str, name: str, allowed: Iterable[str], listed_by: str = "") -> M3DError:
    """The error for a name that is not one of ``allowed``: suggests the nearest, then lists them all.

    ``listed_by`` says how to see them where they are too many for a message.
    """
    names = sorted(allowed)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    if listed_by and len(names) > 50:
        return M3DError(f"unknown {kind} {name!r}.{hint} {listed_by} lists them all.")
    return M3DError(f"unknown {kind} {name!r}.{hint} Allowed: {', '.join(names) or 'none at all'}.")
