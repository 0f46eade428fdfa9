"""A run of a few steps through a small network."""

from __future__ import annotations

from m3d.data import Dataset
from m3d.engine import condense
from m3d.method import Method
from m3d.methods import Task, make_method
from m3d.nets import FlatNet, make_net
from m3d.runtime import Runtime
from m3d.watch import Outcome, Watch

CPU = Runtime.choose("cpu")
NET = "convnet2:width=8"


def method_of(data: Dataset, ipc: int, name: str = "m3d", **options) -> Method:
    given = {"steps": 6, "batch_real": 4, "lr": 0.05, **({"factor": 2} if name == "m3d" else {}), **options}
    return make_method(name, Task(data.name, data.shape, data.classes, ipc, data.mirror), given)[0]


def run(
    data: Dataset, ipc: int = 2, seed: int = 0, watch: Watch | None = None, runtime: Runtime = CPU, **options
) -> Outcome:
    net = FlatNet(make_net(NET, data.shape, data.classes))
    return condense(method_of(data, ipc, **options), data, net, ipc, seed, runtime, watch)
