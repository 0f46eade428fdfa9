"""How long a cell takes and how much memory, before it is run: a rule of three from a few measured figures.

Measured on one H200 at CIFAR-10, IPC 10 (LAB.md): a step of M3D, 1.35 ms and 0.76 GiB, sends 128 real images of each of
10 classes forward and 40 synthetic ones forward and back; the evaluation trains 10 networks for 1,000 epochs on 400
images in 9 s. Everything is taken to grow with classes × images × pixels, where an image that is also sent back counts
three times. Memory is that of all classes at once; where it is short, a step takes fewer at a time. What has not been
measured (other networks, methods that train networks between steps) is a guess, and marked so below; the time left that
a run shows corrects itself by what its own cells took.
"""

from __future__ import annotations

from typing import NamedTuple

from m3d.grid.cells import WHOLE, Cell, Overrides, Source, set_name
from m3d.reproduce.cells import FACTS, Facts

MEASURED_ON = "one H200"
STEP_SECONDS = 1.35e-3
STEP_BYTES = 0.76 * 2**30
EVALUATION_SECONDS = 9.0
START_SECONDS = 8.0  # data, libraries' choices and recording, with a warm cache
_STEP_WORK = 10 * (128 + 3 * 40) * 32 * 32  # classes × images × pixels of the measured step
_EVALUATION_WORK = 10 * 1000 * 400 * 32 * 32  # networks × epochs × images × pixels of the measured evaluation
_LEAST = 0.2  # of a measured step or epoch: what small work takes however small it is

# A network's arithmetic and memory per pixel in units of ConvNet-3's: guesses from their layers.
_NETS = {"resnet10": 4.0, "densenet121": 12.0, "resnetap10": 0.7}
# Its time where ConvNet-3 has kernels of its own, which is not where gradients are matched. Measured (LAB.md).
_SLOWER = {"resnetap10": 3.8}
_GRADIENTS = ("dc", "dsa", "idc", "idc-i", "mtt")
# A step's cost in units of M3D's for as many images. Those of DM, M3D+, CAFE, DC, DSA, IDC and MTT are of measured runs
# (results/reproduce/methods.jsonl, LAB.md): DM and M3D+ draw a new encoder every step, and M3D+ shows the synthetic
# images to a second one; gradient matching differentiates twice and trains networks in between, MTT unrolls fifty steps
# of training. Those of IDM, DSDM and NCFM are guesses.
_METHODS = {
    "dm": 1.5,
    "dc": 28.0,
    "dsa": 28.0,
    "idc": 60.0,
    "idc-i": 60.0,
    "idm": 6.0,
    "cafe": 17.0,
    "cafe-dsa": 17.0,
    "mtt": 58.0,
    "m3d+": 1.4,
    "dsdm": 2.0,
    "ncfm": 2.5,
}
_REAL = {
    "m3d": 128,
    "m3d+": 128,
    "dance": 128,
    "ncfm": 128,
    "idc": 64,
    "idc-i": 64,
}  # real images per class and step; others 256
_EPOCHS = {
    "paper": 1000,
    "dsa": 1000,
    "idm": 1000,
    "mtt": 1000,
    "datadam": 1800,
    "dc": 300,
    "dc-mnist": 1000,
    "cafe": 600,
    "whole": 100,
    "imagenet": 1000,
    "imagenet100": 600,
}
_SELECTION_SECONDS = 30.0  # training the network whose representation herding and k-center choose by; a guess


class Estimate(NamedTuple):
    seconds: float
    memory: float  # bytes on the device

    def __add__(self, other: object) -> Estimate:  # one after the other
        if not isinstance(other, Estimate):
            return NotImplemented
        return Estimate(self.seconds + other.seconds, max(self.memory, other.memory))


def estimate(cell: Cell, overrides: Overrides, made: set[str] | None = None) -> Estimate:
    """What a cell takes on one H200. Sets in ``made`` (by :func:`set_name`) cost nothing; its own are added there."""
    made = set() if made is None else made
    total = Estimate(1.0, 0.0)
    for source in cell.sources:
        if (name := set_name(source, overrides)) not in made:
            total += condensing(overrides.source(source))
            made.add(name)
    if "accuracy" in cell.measures:
        total += evaluating(cell, overrides)
    if "moments" in cell.measures:  # every training image once through each of ten encoders
        facts = FACTS[cell.tested_on]
        total += Estimate(10 * facts.train * _pixels(facts) * STEP_SECONDS / _STEP_WORK, STEP_BYTES)
    return total


def condensing(source: Source) -> Estimate:
    """What making a set takes."""
    facts = FACTS[source.data]
    held = facts.train * _pixels(facts) * facts.shape[0]
    if source.method == WHOLE:
        return Estimate(START_SECONDS, held)
    if source.steps == 0:
        return Estimate(5.0 if source.method == "random" else _SELECTION_SECONDS, held)
    real = _REAL.get(source.method, 256)
    synthetic = min(200, decoded(source))
    work = facts.classes * (real + 3 * synthetic) * _pixels(facts) / _STEP_WORK
    of_net = _net(source.net) if source.method in _GRADIENTS else _slower(source.net)
    multiple = _METHODS.get(source.method, 1.0)
    seconds = START_SECONDS + source.steps * STEP_SECONDS * max(work * of_net, _LEAST) * multiple
    return Estimate(seconds, held + STEP_BYTES * work * _net(source.net))


def evaluating(cell: Cell, overrides: Overrides) -> Estimate:
    """What training and testing the cell's networks takes."""
    facts = FACTS[cell.tested_on]
    source = cell.sources[0]
    epochs = cell.epochs or _EPOCHS[cell.protocol]
    epochs = epochs if overrides.epochs is None else min(epochs, overrides.epochs)
    images = facts.train if source.method == WHOLE else facts.classes * decoded(source)
    work = overrides.repeats_of(cell) * epochs * images * _pixels(facts) * _slower(cell.net) / _EVALUATION_WORK
    held = facts.test * _pixels(facts) * facts.shape[0]
    return Estimate(5.0 + EVALUATION_SECONDS * work, held + STEP_BYTES * _net(cell.net) * _pixels(facts) / 1024)


def decoded(source: Source) -> int:
    """Images of a class that networks are trained on."""
    channels, side, _ = FACTS[source.data].shape
    l = factor(source)
    own = "half" if source.method == "m3d+" and channels == 3 and l > 1 and side % (2 * l) == 0 else "full"
    halved = dict(source.options).get("chroma", own) == "half"
    return source.ipc * l**2 * (2 if halved else 1)


def factor(source: Source) -> int:
    """The factor a set is stored with: its own, else its method's."""
    given = dict(source.options).get("factor")
    if given is not None:
        return int(given)
    if source.method not in ("m3d", "m3d+", "dance", "ncfm", "dsdm", "idc", "idm"):
        return 1
    if FACTS[source.data].shape[1] >= 128:
        return 3
    if source.method in ("m3d", "m3d+") and source.data == "fashion-mnist":
        return 1 if source.ipc >= 10 else 2
    coloured = FACTS[source.data].shape[0] > 1
    return 4 if (source.method, source.ipc) == ("m3d+", 1) and coloured else 2


def _pixels(facts: Facts) -> int:
    return facts.shape[1] * facts.shape[2]


def _net(spec: str | None) -> float:
    return _NETS.get((spec or "").partition(":")[0], 1.0)


def _slower(spec: str | None) -> float:
    return _SLOWER.get((spec or "").partition(":")[0], _net(spec))
