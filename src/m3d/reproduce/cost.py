"""How long a cell takes and how much memory, before it is run: a rule of three from measured runs.

Measured on one H200, CIFAR-10, ConvNet-3 (results/reproduce, benchmarks/results, LAB.md): what a step of each method
takes with one and with ten images per class, what training a network on the real data takes, and what evaluating takes.
A step is taken to grow with classes × images × pixels, where an image that is also sent back counts three times; the
rest with networks × epochs × images × pixels. Memory is that of all classes at once; where it is short, a step takes
fewer at a time. Other networks are guesses from their layers, but for what is marked; the time left that a run shows
corrects itself by what its own cells took. A test holds the estimates against the recorded runs.
"""

from __future__ import annotations

from typing import NamedTuple

from m3d.grid.cells import WHOLE, Cell, Overrides, Source, set_name
from m3d.reproduce.cells import FACTS, Facts

MEASURED_ON = "one H200"
START_SECONDS = 4.0  # data, libraries' choices and recording, with a warm cache
_AT = FACTS["cifar10"]
_PIXELS = _AT.shape[1] * _AT.shape[2]
_LEAST = 0.2  # of a measured step or epoch: what small work takes however small it is

# Milliseconds of a step with one and with ten images per class.
_STEP = {
    "m3d": (0.9, 1.3),
    "m3d+": (1.6, 2.5),
    "dm": (1.4, 1.5),
    "dance": (1.2, 1.9),
    "ncfm": (3.3, 4.7),
    "dsdm": (3.0, 4.0),  # a guess
    "datadam": (1.2, 1.6),
    "idm": (36.0, 12.0),
    "cafe": (27.0, 42.0),
    "cafe-dsa": (56.0, 42.0),
    "dc": (4.8, 27.7),
    "dsa": (5.9, 29.0),
    "idc": (9.7, 31.8),
    "idc-i": (9.7, 31.8),  # taken to be IDC's
    "mtt": (91.0, 183.0),
}
_REAL = {"m3d": 128, "m3d+": 128, "dance": 128, "ncfm": 128, "idc": 64, "idc-i": 64, "datadam": 64, "mtt": 0}
_REAL_OTHERS, _REAL_IDM_ONE = 256, 5000
_SYNTHETIC = {"idc": 128, "idc-i": 128, "dsdm": 256}  # decoded ones per class and step, at most
_SYNTHETIC_OTHERS = 200
# Networks and their epochs on the real data before the first step, and the options that change them.
_BEFORE = {
    "m3d+": (5, 20, "encoders", "encoder_epochs"),
    "dance": (5, 60, "encoders", "encoder_epochs"),
    "ncfm": (5, 60, "encoders", "encoder_epochs"),
    "dsdm": (10, 20, "encoders", "encoder_epochs"),
    "mtt": (100, 50, "experts", "expert_epochs"),
    "herding": (1, 20, "", "epochs"),
    "k-center": (1, 20, "", "epochs"),
}
_TEACHERS = 5 * 20  # of soft labels: networks times epochs
_TRAINED_SECONDS = {"mtt": 6.0e-6}  # of an image in such an epoch: one augmentation after the other, in TF32
_TRAINED_OTHERS = 1.6e-6
_TRAINED_BYTES = 2.7 * 2**30  # of five networks that see 512 images each

_PLUS_CELLS = {"mnist": (10, 12), "fashion-mnist": (0, 20)}  # of M3D+, with fewer than ten images per class and more

_REAL_BYTES, _SYNTHETIC_BYTES = 0.12 * 2**20, 0.43 * 2**20  # of an image in a step
# Of other steps in units of M3D's for as many images: what is differentiated twice or asked beside keeps its maps too.
_MEMORY = {
    "idc": 10.0,
    "idc-i": 10.0,
    "dc": 4.0,
    "dsa": 4.0,
    "cafe": 15.0,
    "cafe-dsa": 15.0,
    "mtt": 320.0,
    "datadam": 5.0,
}

_EVALUATION_START, _EVALUATION_SECONDS = 2.0, 2.0e-6  # of a network, and of an image in one of its epochs
_BATCH_NORM = 8.0  # ConvNet-3 with it, in units of instance norm's, which has kernels of its own; measured
_EVALUATION_BYTES = 0.7 * 2**30
_MOMENTS_SECONDS = 4e-7  # of an image through one encoder; a guess

# A network's arithmetic and memory per pixel in units of ConvNet-3's: guesses from their layers.
_NETS = {"resnet10": 4.0, "densenet121": 12.0, "resnetap10": 1.0}
# Its time where ConvNet-3 has kernels of its own, which is not where gradients are matched. Measured (LAB.md); the
# DenseNet beside other processes, so between 30 and 60.
_SLOWER = {"resnetap10": 3.8, "densenet121": 40.0}
_GRADIENTS = ("dc", "dsa", "idc", "idc-i", "mtt")
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
        if cell.labels == "soft":
            facts = FACTS[cell.tested_on]
            total += Estimate(_TEACHERS * facts.train * _size(facts) * _TRAINED_OTHERS, _TRAINED_BYTES * _size(facts))
    if "moments" in cell.measures:  # every training image once through each of ten encoders
        facts = FACTS[cell.tested_on]
        total += Estimate(10 * facts.train * _size(facts) * _MOMENTS_SECONDS, _EVALUATION_BYTES)
    return total


def condensing(source: Source) -> Estimate:
    """What making a set takes, with the training of networks that it rests on."""
    facts = FACTS[source.data]
    held = facts.train * facts.shape[0] * facts.shape[1] * facts.shape[2]
    if source.method == WHOLE:
        return Estimate(START_SECONDS, held)
    seconds, memory = _before(source, facts)
    if source.steps == 0:
        return Estimate(1.0 + seconds, held + memory)
    real, synthetic = _real(source, facts), min(_SYNTHETIC.get(source.method, _SYNTHETIC_OTHERS), decoded(source))
    of_net = _net(source.net) if source.method in _GRADIENTS else _slower(source.net)
    seconds += START_SECONDS + source.steps * 1e-3 * _step(source, facts, real, synthetic) * of_net
    images = facts.classes * (real * _REAL_BYTES + synthetic * _SYNTHETIC_BYTES) * _size(facts)
    return Estimate(seconds, held + max(memory, images * _net(source.net) * _MEMORY.get(source.method, 1.0)))


def _step(source: Source, facts: Facts, real: int, synthetic: int) -> float:
    """Milliseconds of a step: the measured ones with as many images per class or the next fewer, by the work.

    A method that has not been measured is taken to be like M3D.
    """
    few = source.ipc < 10
    like = Source("cifar10", 1 if few else 10, source.method)
    measured_work = _AT.classes * (_real(like, _AT) + 3 * decoded(like))
    work = facts.classes * (real + 3 * synthetic) * _size(facts)
    return _STEP.get(source.method, _STEP["m3d"])[0 if few else 1] * max(work / measured_work, _LEAST)


def _real(source: Source, facts: Facts) -> int:
    """Real images of a class in a step."""
    if source.method == "idm" and source.ipc < 10:
        return min(_REAL_IDM_ONE, facts.train // facts.classes)
    return _REAL.get(source.method, _REAL_OTHERS)


def _before(source: Source, facts: Facts) -> Estimate:
    """What training networks on the real data takes before the first step."""
    if source.method not in _BEFORE:
        return Estimate(0.0, 0.0)
    networks, epochs, how_many, how_long = _BEFORE[source.method]
    given = dict(source.options)
    passes = int(given.get(how_many) or networks) * int(given.get(how_long) or epochs) * facts.train * _size(facts)
    seconds = passes * _TRAINED_SECONDS.get(source.method, _TRAINED_OTHERS) * _slower(source.net)
    return Estimate(seconds, _TRAINED_BYTES * min(1.0, networks / 5) * _net(source.net) * _size(facts))


def evaluating(cell: Cell, overrides: Overrides) -> Estimate:
    """What training and testing the cell's networks takes."""
    facts = FACTS[cell.tested_on]
    source = cell.sources[0]
    epochs = cell.epochs or _EPOCHS[cell.protocol]
    epochs = epochs if overrides.epochs is None else min(epochs, overrides.epochs)
    images = facts.train if source.method == WHOLE else facts.classes * decoded(source)
    slower = _BATCH_NORM if cell.net == "convnet3:norm=batch" else _slower(cell.net)
    seconds = overrides.repeats_of(cell) * epochs * images * _size(facts) * _EVALUATION_SECONDS * slower
    held = facts.test * facts.shape[0] * facts.shape[1] * facts.shape[2]
    return Estimate(_EVALUATION_START + seconds, held + _EVALUATION_BYTES * _net(cell.net) * _size(facts))


def decoded(source: Source) -> int:
    """Images of a class that networks are trained on."""
    channels, side, _ = FACTS[source.data].shape
    l, cell = factor(source), _cell(source)
    fits = cell % 2 == 0 if cell else l > 1 and side % (2 * l) == 0
    own = "half" if source.method == "m3d+" and channels == 3 and fits else "full"
    halved = dict(source.options).get("chroma", own) == "half"
    return (source.ipc * side**2 // cell**2 if cell else source.ipc * l**2) * (2 if halved else 1)


def factor(source: Source) -> int:
    """The factor a set is stored with: its own, else its method's."""
    given = dict(source.options).get("factor")
    if given is not None:
        return int(given)
    if _cell(source):
        return 1
    if source.method not in ("m3d", "m3d+", "dance", "ncfm", "dsdm", "idc", "idm"):
        return 1
    if FACTS[source.data].shape[1] >= 128:
        return 3
    if source.method in ("m3d", "m3d+") and source.data == "fashion-mnist":
        return 1 if source.ipc >= 10 else 2
    coloured = FACTS[source.data].shape[0] > 1
    return 4 if (source.method, source.ipc) == ("m3d+", 1) and coloured else 2


def _cell(source: Source) -> int:
    """The height of cells that have a size of their own: the set's, else its method's; 0: it has a factor."""
    given = dict(source.options)
    if source.method != "m3d+" or not given.keys().isdisjoint(("cell", "factor", "margin")):
        return int(given.get("cell") or 0)
    few, more = _PLUS_CELLS.get(source.data, (0, 0))
    return few if source.ipc < 10 else more


def _size(facts: Facts) -> float:
    """Pixels of an image in units of CIFAR-10's."""
    return facts.shape[1] * facts.shape[2] / _PIXELS


def _net(spec: str | None) -> float:
    return _NETS.get((spec or "").partition(":")[0], 1.0)


def _slower(spec: str | None) -> float:
    return _SLOWER.get((spec or "").partition(":")[0], _net(spec))
