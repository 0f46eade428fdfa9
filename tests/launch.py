"""Programs started by torchrun on this machine."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

SCENES = Path(__file__).with_name("scenes.py")


def port() -> str:
    """A free one, below those that the system hands out: none of them is taken before the program listens on it."""
    while True:
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 30_000)))
            return str(free.getsockname()[1])


def start(ranks, *program, nodes=1, node=0, at=None):
    """``ranks`` processes of ``program``, as machine ``node`` of ``nodes`` that meet at port ``at``."""
    where = ["--nnodes", nodes, "--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", at or port()]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks, *where, *program]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [str(word) for word in command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def together(ranks, folder, *scenes):
    """What every process told of every scene of :mod:`scenes`."""
    process = start(ranks, SCENES, folder, *scenes)
    _, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    return [[json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(ranks)] for name in scenes]
