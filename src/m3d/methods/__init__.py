"""Methods by name, one file each. A file dropped into this package is found, listed and tested without another edit."""

from __future__ import annotations

from dataclasses import dataclass

from m3d.method import Method
from m3d.registry import Registry

METHODS: Registry[Method] = Registry("method", package="m3d.methods")


@dataclass(frozen=True)
class Task:
    """What is condensed: all that a method's defaults may depend on."""

    data: str  # the dataset's name
    shape: tuple[int, int, int]  # ch, h, w
    classes: int
    ipc: int
    mirror: bool = True  # whether a mirrored image still shows its class
    smallest: int | None = None  # training images of the smallest class, where it is known
    cutmix: bool = True  # whether training may paste parts of images into others


def make_method(name: str, task: Task, options: dict[str, object]) -> tuple[Method, dict[str, object]]:
    """(record, every option with its value) of the method called ``name``."""
    entry = METHODS.get(name)
    resolved = entry.resolve(options)
    method = entry.build(task, **resolved)
    return method, {key: method.settled.get(key) if value is None else value for key, value in resolved.items()}
