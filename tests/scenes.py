"""What each process of tests/test_sharing.py does: ``python scenes.py FOLDER SCENE ...``, started by torchrun or alone.

Every process has a cache of its own, FOLDER/cache-RANK, as processes on several machines may have. What it found out
goes to FOLDER/SCENE-RANK.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from toys import make_dataset

import m3d
from m3d.augment import Augment
from m3d.errors import Interrupted, M3DError
from m3d.nets import FlatNet, make_net
from m3d.pools.experts import train_experts
from m3d.pools.pretrained import encoder_recipe
from m3d.runtime import Runtime
from m3d.shards import Ranks
from m3d.train import Recipe, Trainer
from m3d.trained import Trained, trained_networks

CLASSES, EPOCHS = 5, 3
NET = "convnet2:width=4"
CPU = Runtime.choose("cpu")
EXPERTS = Recipe(50, 16, 0.05, momentum=0.0, weight_decay=0.0, augment=Augment.parse("color|crop|flip"))
PLAIN = {"ipc": 1, "net": NET, "device": "cpu", "classes_at_once": 1}
MATCHED = {**PLAIN, "steps": 6, "batch_real": 4}
CALLS = {
    "m3d+": {**MATCHED, "encoders": 3, "encoder_epochs": 2, "encoder_batch": 16, "factor": 1},
    "idm": {**MATCHED, "train_steps": 2, "push_every": 3, "recount": 4},
    "herding": {**PLAIN, "epochs": 2, "network": NET},
}

done: list[int] = []  # for every epoch of training: how many networks went through it here
_run = Trainer.run


def _counted(trainer: Trainer, until: int) -> None:
    done.append(trainer.repeats)
    _run(trainer, until)


def encoders(networks: int, ranks: Ranks, epochs: int = EPOCHS) -> Trained:
    return trained_networks(make_dataset(CLASSES), NET, encoder_recipe(epochs, batch=16), networks, 0, CPU, ranks)


def encode(folder: Path, ranks: Ranks) -> dict[str, object]:
    """Five networks, then two; then the five again, from the cache."""
    done.clear()
    made, few = encoders(5, ranks), encoders(2, ranks)
    trained, again = list(done), encoders(5, ranks)
    assert torch.equal(again.final, made.final) and torch.equal(again.initial, made.initial)
    save_file({"five": made.final, "two": few.final}, folder / f"encoders-{ranks.rank}.safetensors")
    return {
        "trained": trained,
        "later": done[len(trained) :],
        "earlier": again.earlier,
        "grouped": dist.is_initialized(),
    }


def experts(folder: Path, ranks: Ranks) -> dict[str, object]:
    """Twelve experts, two groups, two epochs; then one epoch more; then the same again, from the cache."""
    data = make_dataset(CLASSES)
    net = FlatNet(make_net(NET, data.shape, CLASSES))
    done.clear()
    for epochs in (2, 3, 3):
        made = train_experts(net, data, EXPERTS, 12, epochs, 0, CPU, ranks)
    return {"trained": list(done), "folder": made.folder.name}


def stop(folder: Path, ranks: Ranks) -> dict[str, object]:
    """The last process is asked to stop within the second epoch."""

    def stopping(trainer: Trainer, until: int) -> None:
        _counted(trainer, until)
        if until == 2 and ranks.rank == ranks.world - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    done.clear()
    return _error(stopping, lambda: encoders(3, ranks, 4)) | {"trained": list(done)}


def fail(folder: Path, ranks: Ranks) -> dict[str, object]:
    """The last process cannot go on in its second epoch."""

    def failing(trainer: Trainer, until: int) -> None:
        if until == 2 and ranks.rank == ranks.world - 1:
            raise RuntimeError("the device fell off the bus — " + "x" * 2000)
        _counted(trainer, until)

    return _error(failing, lambda: encoders(3, ranks, 5))


def die(folder: Path, ranks: Ranks) -> dict[str, object]:
    """The last process is gone within its second epoch."""
    # torchrun, when it sees one process gone, ends the others; on a busy machine that would come before they notice.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def dying(trainer: Trainer, until: int) -> None:
        if until == 2 and ranks.rank == ranks.world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        _counted(trainer, until)

    return _error(dying, lambda: encoders(3, ranks, 6))


def _error(run, work) -> dict[str, object]:
    """How ``work`` ends when training is ``run`` instead."""
    Trainer.run = run
    try:
        work()
    except (M3DError, Interrupted, RuntimeError) as error:
        return {"kind": type(error).__name__, "error": str(error)}
    finally:
        Trainer.run = _counted
    return {"error": None}


def condense(folder: Path) -> dict[str, object]:
    """Whole runs, which bring the processes together by themselves."""
    sets, trained = {}, []
    for name, call in CALLS.items():
        done.clear()
        sets[name] = m3d.condense(make_dataset(CLASSES), method=name, out=folder / name, **call).fingerprint
        trained.append(sum(done))
    return {"sets": sets, "trained": trained, "threads": len(list(Path("/proc/self/task").glob("*")))}


def here(folder: Path, ranks: Ranks) -> dict[str, object]:
    """On each process's own GPU, where there is one."""
    runtime = ranks.place(Runtime.choose("auto", "fp32", deterministic=True))
    with ranks.together(runtime, "here"):
        own = torch.full((1, 3), float(ranks.rank), device=runtime.device)
        backend = dist.distributed_c10d._get_default_group()._get_backend(own.device)
        told = {
            "device": str(own.device),
            "backend": type(backend).__name__,
            "rank": dist.get_rank(),
            "joined": ranks.joined(own, [1] * ranks.world).tolist(),
            "given": ranks.given(own).tolist(),
        }
    return {**told, "set": condensed_here()}


def condensed_here() -> str:
    call = {**CALLS["m3d+"], "device": "auto", "precision": "fp32", "deterministic": True}
    return m3d.condense(make_dataset(CLASSES), method="m3d+", **call).fingerprint


def play(folder: Path, scene: str) -> None:
    ranks = Ranks.from_environment()
    os.environ["M3D_CACHE"] = str(folder / f"cache-{ranks.rank}")
    if scene == "condense":
        told = condense(folder)
    elif scene == "here":
        told = here(folder, ranks)
    else:
        with ranks.together(CPU, scene):
            told = globals()[scene](folder, ranks)
    (folder / f"{scene}-{ranks.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    Trainer.run = _counted
    for scene in sys.argv[2:]:
        play(Path(sys.argv[1]), scene)
