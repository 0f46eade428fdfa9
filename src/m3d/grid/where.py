"""Where cells are made: in this process, or by the workers of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from m3d.errors import M3DError, unknown

if TYPE_CHECKING:
    from m3d.grid.runner import Hands
    from m3d.grid.work import Shelf


@dataclass(frozen=True)
class Where:
    """What ``--on`` and its companions ask for; None: not said."""

    on: str = "local"  # local, ray, or ray:ADDRESS
    gpus: float | None = None  # of a cell; a part of one is allowed
    cpus: float | None = None  # of a cell
    retries: int | None = None  # of a cell whose worker was lost

    def __post_init__(self) -> None:
        kind, colon, address = self.on.partition(":")
        if kind not in ("local", "ray") or (kind == "local" and colon):
            raise unknown("--on", self.on, ("local", "ray", "ray:ADDRESS"))
        if colon and not address:
            raise M3DError(f"--on {self.on}: an address must follow the colon, e.g. ray:auto or ray:10.0.0.1:6379")
        asked = (("--gpus-per-cell", self.gpus), ("--cpus-per-cell", self.cpus), ("--retries", self.retries))
        for option, value in asked:
            if value is not None and kind == "local":
                raise M3DError(f"{option} {value}: only --on ray has workers to assign or to lose")
        if self.gpus is not None and not (0 <= self.gpus < 1 or self.gpus % 1 == 0):
            raise M3DError(f"--gpus-per-cell {self.gpus} is not valid; allowed: a part of one (0.5), 0, 1 and more")
        if self.cpus is not None and not 0 < self.cpus < float("inf"):
            raise M3DError(f"--cpus-per-cell {self.cpus} is not valid; allowed: more than 0")
        if self.retries is not None and self.retries < 0:
            raise M3DError(f"--retries {self.retries} is not valid; allowed: 0 and more")

    @property
    def local(self) -> bool:
        return self.on == "local"

    @contextmanager
    def hands(self, device: str, shelf: Shelf | None = None) -> Iterator[Hands]:
        """Who makes cells there, for as long as the context lasts."""
        if self.local:
            from m3d.grid.runner import Here

            yield Here(shelf)
            return
        from m3d.grid.cluster import Cluster, connected

        with connected(self.on.partition(":")[2] or None) as ray:
            retries = 1 if self.retries is None else self.retries
            cpus = 1.0 if self.cpus is None else self.cpus
            yield Cluster(ray, cpus=cpus, gpus=self.gpus, retries=retries, device=device)
