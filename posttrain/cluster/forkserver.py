"""A process that has imported what workers need, and is forked for each of them.

A worker of Ray is a new Python, which imports torch, transformers and Ray for seconds of CPU time. A run has several,
and a Ray that serves several runs starts them for each. Forked ones start in a tenth of the time, and share the memory
of what is imported. ``fork_worker.py`` is the other end.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from select import POLLIN, poll
from typing import Any

import numpy as np

from posttrain.cluster import fork_worker
from posttrain.cluster.handover import (
    ListeningProcess,
    accept_request,
    become,
    close_streams,
    ray_is_tried,
    read_request,
)
from posttrain.core.cycles import rare_cycle_search
from posttrain.core.machines import nvidia_devices
from posttrain.core.quiet import quiet_libraries

PROGRAM = Path(fork_worker.__file__)
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from posttrain.cluster.forkserver import main; main()"
)
FIXED = ("RAY_JOB_ID", "RAY_RAYLET_PID")
"""Variables that Ray reads when it is imported, and which differ between the workers of a driver and others."""


def can_fork() -> bool:
    """Return whether workers of this machine may be forked: it has no GPU, and Ray is a release that has been tried. A
    process that has asked a GPU's driver for anything cannot be forked, and libraries ask on import."""
    return ray_is_tried() and not Path("/dev/kfd").exists() and not nvidia_devices()


def not_forked(options: dict[str, Any]) -> dict[str, Any]:
    """Return Ray's ``options`` of an actor with which its process is a new Python; the same where none is forked."""
    if not can_fork():
        return options
    environment = options.get("runtime_env", {})
    variables = environment.get("env_vars", {}) | {fork_worker.SOCKET: ""}
    return options | {"runtime_env": environment | {"env_vars": variables}}


class ForkServer(ListeningProcess):
    """The driver's handle on the process. Workers go on without it, and end with their raylet."""

    def __init__(self) -> None:
        super().__init__("posttrain-fork-", 128)

    def start(self, environment: dict[str, str], log: Path) -> None:
        """Start the process.

        Args:
            environment: variables of its own.
            log: where it says why it ended early. Ray starts workers without it then.
        """
        with log.open("wb") as errors:
            # A process with threads cannot be forked, and OpenBLAS would start some.
            self.begin(_START, (), environment | {"OPENBLAS_NUM_THREADS": "1"}, errors)


def main() -> None:
    """Import what workers need, and fork one for each request until the driver ends."""
    listening, lifeline = socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])
    _import()
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("a library has started a thread: its state would be lost in forked processes")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries workers at once
    gc.collect()
    gc.freeze()  # a search for garbage would write to all of the memory that is shared
    waiting = poll()
    waiting.register(listening, POLLIN)
    waiting.register(lifeline, POLLIN)
    while lifeline not in (ready := {descriptor for descriptor, _ in waiting.poll()}):
        if listening.fileno() not in ready:
            continue
        connection, _ = listening.accept()
        with connection:
            if (request := read_request(connection)) is None:
                continue
            own = all(request.environment.get(name) == os.environ.get(name) for name in FIXED)
            if own and os.fork() == 0:
                accept_request(connection, request)
                break
            close_streams(request.streams)  # and of another job or raylet Ray starts the worker
    else:
        shutil.rmtree(os.path.dirname(listening.getsockname()), ignore_errors=True)  # the driver may have been killed
        return
    listening.close()
    os.close(lifeline)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    np.random.seed()  # Python's own generator is seeded again by the fork
    become(request)


@rare_cycle_search()
def _import() -> None:
    quiet_libraries()
    import ray._private.node
    import ray.actor  # noqa: F401

    import posttrain.cluster.samplers
    import posttrain.cluster.trainers
    import posttrain.engines.hf
    import posttrain.train.worker  # noqa: F401
