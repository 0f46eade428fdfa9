"""DD-Ranking's scores: what a set is worth apart from its labels and from augmentation (Li et al., 2025).

Accuracies are means over networks after the last epoch, as fractions of 1, all of the same network:

- hard-label recovery       HLR = Acc(real, hard labels) − Acc(set, hard labels)
- improvement over random   IOR = Acc(set) − Acc(random), both under the set's own evaluation and kind of labels
- label-robust score        LRS = 100 · (e^α − e^−1) / (e − e^−1),  α = w·IOR − (1 − w)·HLR
- augmentation-robust score ARS, the same map of β = γ·(Acc(set) − Acc(random)) + (1 − γ)·(the same difference without
  any augmentation, CutMix included)

"Random" is as many real images per class as the set stores, labelled by the same teachers where the set's labels are
soft; the networks are spread over several selections. We depart from the public code where it departs from the paper:
it maps percentages and not fractions, takes the best accuracy on test data, and chooses the learning rate of the random
images on test data. Here all are trained by one protocol, and nothing is chosen.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from m3d.augment import Augment
from m3d.condensed import CondensedSet
from m3d.data.classes import Dataset
from m3d.errors import M3DError
from m3d.evaluation import Protocol, Result, evaluate, evaluate_whole, make_protocol, with_learned
from m3d.files import read_json, sha256, write_json
from m3d.run_folder import RunFolder
from m3d.runtime import Runtime
from m3d.select import RandomReal
from m3d.teachers import Teachers, relabel

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arm:
    """One of the accuracies that the scores are made of: networks trained in one way, on one set or on several."""

    results: tuple[Result, ...]

    @property
    def last(self) -> list[float]:
        """Accuracies in percent, one per network."""
        return [value for result in self.results for value in result.last]

    @property
    def fraction(self) -> float:
        return statistics.fmean(self.last) / 100

    @property
    def variance(self) -> float:
        """Of ``fraction``; 0 for a single network."""
        return statistics.variance(self.last) / len(self.last) / 1e4 if len(self.last) > 1 else 0.0

    def as_record(self) -> dict[str, Any]:
        records = [result.as_record() for result in self.results]
        return {
            "accuracy": round(100 * self.fraction, 3),
            "sd": round(statistics.stdev(self.last) if len(self.last) > 1 else 0.0, 3),
            "n": len(self.last),
            "last": [round(value, 3) for value in self.last],
            "seconds": round(sum(result.seconds for result in self.results), 2),
            "labels": records[0]["labels"],
            "protocol": records[0]["protocol"],
            "sets": [{k: r.get(k) for k in ("method", "ipc", "set", "soft_set", "seed", "repeats")} for r in records],
        }


@dataclass(frozen=True)
class Ranking:
    """A set's scores in percent, their standard errors over networks, and every accuracy they follow from."""

    arms: Mapping[str, Arm]  # real_hard, set_hard, set, random, set_plain, random_plain
    weight: float  # w
    gamma: float

    @property
    def lrs(self) -> tuple[float, float]:
        """(label-robust score, its standard error)."""
        w = self.weight
        return self._score({"set": w, "random": -w, "real_hard": w - 1, "set_hard": 1 - w})

    @property
    def ars(self) -> tuple[float, float]:
        """(augmentation-robust score, its standard error)."""
        g = self.gamma
        return self._score({"set": g, "random": -g, "set_plain": 1 - g, "random_plain": g - 1})

    def _score(self, weights: Mapping[str, float]) -> tuple[float, float]:
        """The map of a weighted sum of accuracies; arms that are one and the same (hard labels) err together."""
        value, shares = 0.0, dict[int, float]()
        for name, weight in weights.items():
            value += weight * self.arms[name].fraction
            shares[id(self.arms[name])] = shares.get(id(self.arms[name]), 0.0) + weight
        known = {id(arm): arm.variance for arm in self.arms.values()}
        error = math.sqrt(sum(share**2 * known[key] for key, share in shares.items()))
        return score(value), 100 * math.exp(value) / (math.e - 1 / math.e) * error

    @property
    def result(self) -> Result:
        """The set's own evaluation."""
        return self.arms["set"].results[0]

    def as_record(self) -> dict[str, Any]:
        """The record of the set's evaluation, and under ``ranking`` the scores with all that they follow from."""
        accuracy = {name: arm.fraction for name, arm in self.arms.items()}
        (lrs, lrs_error), (ars, ars_error) = self.lrs, self.ars
        told = {
            "lrs": round(lrs, 3),
            "lrs_error": round(lrs_error, 3),
            "ars": round(ars, 3),
            "ars_error": round(ars_error, 3),
            "hlr": round(100 * (accuracy["real_hard"] - accuracy["set_hard"]), 3),
            "ior": round(100 * (accuracy["set"] - accuracy["random"]), 3),
            "ior_plain": round(100 * (accuracy["set_plain"] - accuracy["random_plain"]), 3),
            "weight": self.weight,
            "gamma": self.gamma,
            "accuracies": {name: arm.as_record() for name, arm in self.arms.items()},
        }
        return {**self.result.as_record(), "ranking": told}

    def __str__(self) -> str:
        scores = (
            f"{name} {value:.2f} ± {error:.2f}" for name, (value, error) in (("LRS", self.lrs), ("ARS", self.ars))
        )
        return f"{self.result}, {', '.join(scores)}"


def score(value: float) -> float:
    """100 · (e^v − e^−1) / (e − e^−1): from [−1, 1] to [0, 100]."""
    return 100 * (math.exp(value) - math.exp(-1)) / (math.e - math.exp(-1))


def rank(
    condensed: CondensedSet,
    data: Dataset,
    *,
    net: str = "convnet3",
    protocol: Protocol | str = "paper",
    full_protocol: Protocol | str = "whole",
    full: Result | None = None,
    repeats: int = 10,
    selections: int = 5,
    weight: float = 0.5,
    gamma: float = 0.5,
    seed: int = 0,
    split: str = "test",
    runtime: Runtime | None = None,
    report: Callable[[int, int], None] | None = None,
    folder: RunFolder | None = None,
    checkpoint_seconds: float = 60.0,
) -> Ranking:
    """Both scores of ``condensed`` under ``protocol``, the whole data being trained under ``full_protocol``.

    ``full``, the whole data's result of before (:func:`recorded_whole`), saves that training.
    With ``folder`` every part is checkpointed there, and what is finished is not made again after a stop.
    """
    _check(condensed, data, repeats, selections, weight, gamma)
    protocol = make_protocol(protocol) if isinstance(protocol, str) else protocol
    full_protocol = make_protocol(full_protocol) if isinstance(full_protocol, str) else full_protocol
    protocol = with_learned(protocol, condensed.manifest.get("learned", {}))  # random images: at the same rate
    runtime = runtime or Runtime.choose()
    common = {"net": net, "seed": seed, "split": split, "runtime": runtime, "report": report}
    part = _Parts(data, {**common, "folder": folder, "checkpoint_seconds": checkpoint_seconds}, folder)
    # the dearest comes last: what is wrong with the rest shows before it
    arms = {"set": part.of(condensed, protocol, repeats)}
    arms["set_hard"] = arms["set"] if condensed.soft is None else part.of(condensed.hard(), protocol, repeats)
    chosen = _random_sets(condensed, data, [seed + k for k in range(selections)], runtime)
    arms["random"] = part.of_all(chosen, protocol, repeats)
    plain = without_augmentation(protocol)
    arms["set_plain"] = arms["set"] if plain == protocol else part.of(condensed, plain, repeats)
    arms["random_plain"] = arms["random"] if plain == protocol else part.of_all(chosen, plain, repeats)
    arms["real_hard"] = part.of(None, full_protocol, repeats) if full is None else Arm((full,))
    part.finish()
    return Ranking(arms, weight, gamma)


def recorded_whole(folder: RunFolder, data: Dataset, net: str, split: str = "test") -> Result:
    """The latest result that ``m3d evaluate --full`` left in ``folder`` for these data and this network."""
    asked = {"name": data.name, "fingerprint": data.train.fingerprint, "split": split, **data.transform}
    for record in reversed(folder.results()):
        if record.get("method") == "whole" and record.get("net") == net and record.get("data") == asked:
            return Result(record["last"], record["last"], {}, record["seconds"], {"labels": "hard", **record})
    raise M3DError(
        f"{str(folder.path)!r} has no result of {net} trained on these {data.name} ({split}); make one with: "
        f"m3d evaluate --full {data.name} --net {net} --out {folder.path}"
    )


def without_augmentation(protocol: Protocol) -> Protocol:
    """The same protocol on the images as they are: no augmentation and no CutMix."""
    bare = replace(protocol.recipe, augment=Augment(), cutmix=0.0, photo=None)
    return protocol if bare == protocol.recipe else replace(protocol, name=f"{protocol.name}-plain", recipe=bare)


def _check(condensed: CondensedSet, data: Dataset, repeats: int, selections: int, weight: float, gamma: float) -> None:
    """All that can be wrong is said before any training."""
    if not 1 <= selections <= repeats:
        raise M3DError(f"selections={selections} is not valid; allowed: 1 to {repeats}, the number of networks")
    for name, value in (("weight", weight), ("gamma", gamma)):
        if not 0 <= value <= 1:
            raise M3DError(f"{name}={value} is not valid; allowed: 0 to 1")
    condensed.require(data.class_names, data.shape, data.name)
    RandomReal().require(data, int(condensed.manifest["ipc"]))
    if condensed.soft is not None:
        Teachers.of(condensed)


def _random_sets(condensed: CondensedSet, data: Dataset, seeds: list[int], runtime: Runtime) -> list[CondensedSet]:
    """A random selection per seed, of as many images as ``condensed`` stores, labelled in the same way."""
    ipc = int(condensed.manifest["ipc"])
    made = []
    for seed in seeds:
        manifest = {
            "method": "random",
            "options": {"factor": 1},
            "ipc": ipc,
            "factor": 1,
            "mean": list(data.mean),
            "std": list(data.std),
            "class_names": list(data.class_names),
            "data": {"name": data.name, "fingerprint": data.train.fingerprint, **data.transform},
            "seed": seed,
            "steps": 0,
        }
        pixels = RandomReal()(data, ipc, seed, runtime).flatten(0, 1).cpu()
        chosen = CondensedSet(pixels, torch.arange(data.classes).repeat_interleave(ipc), manifest)
        if condensed.soft is not None:
            chosen = relabel(chosen, data, Teachers.of(condensed), runtime)
        made.append(chosen)
    return made


class _Parts:
    """Makes the evaluations one by one, and keeps each finished one in the run's folder until all are there."""

    def __init__(self, data: Dataset, settings: dict[str, Any], folder: RunFolder | None):
        self._data, self._settings, self._folder = data, settings, folder
        self._kept: list[Path] = []

    def of(self, condensed: CondensedSet | None, protocol: Protocol, repeats: int) -> Arm:
        """Networks trained on one set, or on the whole data (None)."""
        return Arm((self._result(condensed, protocol, repeats, self._settings["seed"]),))

    def of_all(self, sets: list[CondensedSet], protocol: Protocol, repeats: int) -> Arm:
        """``repeats`` networks spread over ``sets`` as evenly as can be, each set with networks of its own."""
        shares = [len(range(k, repeats, len(sets))) for k in range(len(sets))]
        first = self._settings["seed"]
        parts = zip(sets, shares, range(first, first + len(sets)), strict=True)
        return Arm(tuple(self._result(chosen, protocol, share, seed) for chosen, share, seed in parts))

    def _result(self, condensed: CondensedSet | None, protocol: Protocol, repeats: int, seed: int) -> Result:
        settings = {**self._settings, "protocol": protocol, "repeats": repeats, "seed": seed}
        path = None
        if self._folder is not None:
            path = self._folder / f"evaluation-part-{self._digest(condensed, settings)}.json"
            self._kept.append(path)
            if path.exists():
                return _read(path)
        log.info("ranking: %s networks on %s", repeats, "the whole data" if condensed is None else _name(condensed))
        made = (
            evaluate_whole(self._data, **settings) if condensed is None else evaluate(condensed, self._data, **settings)
        )
        if path is not None:
            write_json(path, asdict(made))
        return made

    def _digest(self, condensed: CondensedSet | None, settings: Mapping[str, Any]) -> str:
        """Of everything that decides the outcome, so that another ranking never takes it."""
        data = self._data
        asked = {
            "set": None if condensed is None else condensed.fingerprint,
            "soft": None if condensed is None or condensed.soft is None else sha256(condensed.soft),
            "data": [data.name, data.train.fingerprint, data.transform],
            "protocol": asdict(settings["protocol"]),
            "precision": settings["runtime"].precision,
            **{name: settings[name] for name in ("net", "repeats", "seed", "split")},
        }
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]

    def finish(self) -> None:
        """Forget the parts: the ranking's record holds them all."""
        for path in self._kept:
            path.unlink(missing_ok=True)


def _read(path: Path) -> Result:
    kept = read_json(path)
    try:
        return Result(**{**kept, "checks": {int(epoch): value for epoch, value in kept["checks"].items()}})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise M3DError(f"{str(path)!r} is no finished evaluation; delete it to make this part again") from error


def _name(condensed: CondensedSet) -> str:
    return f"{condensed.manifest['method']} with {condensed.label_kind} labels"
