"""``python -m tests.faults [--kills 200] [--evaluation-kills 40] [--seed 0]``: the whole harness, and its figures.

First short runs are killed at every moment there is, then long ones at random moments.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before PyTorch is imported: a fork takes no other thread with it
os.environ["M3D_COMMIT"] = "none"  # or every life would ask git

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from tests.faults.harness import condensing, evaluating, make_data, summary, torment
from tests.faults.lives import import_beforehand
from tests.faults.moments import Moments, each_moment, torn_checkpoint

METHODS = {"m3d": (200, {"batch_real": 4, "lr": 0.05}), "idm": (24, {"batch_real": 4})}
_ALWAYS = 1e-9  # seconds between checkpoints: one after every step


def moments(data: Path, condensed: Path, place: Path) -> list[Moments]:
    """Short runs that meet every kind of file a run makes, killed at each of their moments."""
    whole = condensing(data, "m3d", 3, {"batch_real": 4}, _ALWAYS)
    parts = condensing(data, "m3d", 2, {"batch_real": 4, "subtasks": 2}, _ALWAYS)
    evaluation = evaluating(data, condensed, 3, _ALWAYS)
    return [
        each_moment(whole, place, "condensation"),
        each_moment(whole, place, "condensation after a torn checkpoint", torn_checkpoint(whole)),
        each_moment(parts, place, "condensation in two parts"),
        each_moment(evaluation, place, "evaluation"),
        each_moment(evaluation, place, "evaluation after a torn checkpoint", torn_checkpoint(evaluation)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="kills of condensations")
    parser.add_argument("--evaluation-kills", type=int, default=40, help="kills of evaluations")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--methods", default="m3d,idm", help="what condenses")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="m3d-faults-") as name:
        place = Path(name)
        os.environ["M3D_CACHE"] = str(place / "networks")
        data = make_data(place)
        methods = given.methods.split(",")
        for method in dict.fromkeys(["m3d", *methods]):
            import_beforehand(condensing(data, method, 4, METHODS[method][1]).work, place / method)
        import_beforehand(evaluating(data, place / "m3d", 2).work, place / "evaluated")
        jobs = [condensing(data, m, METHODS[m][0], METHODS[m][1]) for m in methods]
        each = moments(data, place / "m3d", place)
        tallies = [torment(jobs, given.kills, place, given.seed, "condensation")]
        if given.evaluation_kills:
            evaluation = evaluating(data, place / "m3d", 80)
            tallies.append(torment([evaluation], given.evaluation_kills, place, given.seed, "evaluation"))
    for tally in (*each, *tallies):
        sys.stdout.write(f"{tally}\n")
    if given.json:
        sys.stdout.write(summary((*each, *tallies)) + "\n")
    return int(any(m.identical != m.moments for m in each) or any(t.identical != t.runs for t in tallies))


if __name__ == "__main__":
    sys.exit(main())
