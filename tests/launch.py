"""Programs started by torchrun on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def port() -> str:
    """A free one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def start(ranks, *program, nodes=1, node=0, at=None):
    """``ranks`` processes of ``program``, as machine ``node`` of ``nodes`` that meet at port ``at``."""
    where = ["--nnodes", nodes, "--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", at or port()]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks, *where, *program]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [str(word) for word in command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
