"""Processes of engines that begin with the command, before Ray is up, import meanwhile, and become the workers that Ray
asks for.

Importing SGLang takes longer than all else that a run does before its first request, and a command imports torch and
starts Ray for a good part of that time. Imports neither, so that it comes before both.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from select import POLLIN, poll
from typing import Any

from posttrain.cluster.fork_worker import WAITING
from posttrain.cluster.handover import (
    ListeningProcess,
    accept_request,
    become,
    close_streams,
    ray_is_tried,
    read_request,
)
from posttrain.config import Config, EngineName
from posttrain.core.machines import only_gpu
from posttrain.core.quiet import quiet_libraries
from posttrain.core.spawn_ahead import AheadProcess, differing, spawn_ahead
from posttrain.engines.ahead import imports_ray, processes_ahead
from posttrain.engines.choice import choose_engine

GPU_VARIABLES = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Variables of every process on a GPU."""
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from posttrain.cluster.waiting_worker import main; main()"
)


@contextlib.contextmanager
def begin_engines(cfg: Config) -> Iterator[None]:
    """Begin the processes of the engines of a command, where they take long to import; those that nobody has taken by
    the end of the body end with it, and the others have ended with their Ray.

    Only where this process may use one GPU: of several Ray decides which one an engine gets, and libraries look for it
    when they are imported.
    """
    try:
        _begin(cfg)
        yield
    finally:
        while _waiting:
            _waiting.pop().close()


def _begin(cfg: Config) -> None:
    gpu = only_gpu()
    remote = bool(cfg.generate.endpoint.url) or cfg.cluster.address is not None
    if gpu is None or not cfg.samples or remote or cfg.cluster.device == "cpu" or not ray_is_tried():
        return
    engine = choose_engine(cfg.rollout.engine, gpu=True).name
    ahead = processes_ahead(engine, cfg.rollout)
    if not ahead or imports_ray(engine):
        return
    variables = GPU_VARIABLES | {
        "CUDA_VISIBLE_DEVICES": gpu,
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # as Ray sets it where it is not
    }
    for _ in range(cfg.rollout.replicas):
        _waiting.append(_Waiting(engine, ahead, variables))


def any_waiting() -> bool:
    """Return whether a process waits for Ray to ask for it."""
    return any(not waiting.taken for waiting in _waiting)


def taking(options: dict[str, Any], engine: EngineName, ahead: Sequence[AheadProcess]) -> dict[str, Any]:
    """Return Ray's ``options`` of an actor with which a process that waits becomes its worker; the same where none
    does, or only those of another engine."""
    for waiting in _waiting:
        if not waiting.taken and waiting.engine == engine and tuple(ahead) == waiting.ahead:
            waiting.taken = True
            variables = options["runtime_env"]["env_vars"] | waiting.variables | {WAITING: waiting.address}
            return options | {"runtime_env": options["runtime_env"] | {"env_vars": variables}}
    return options


class _Waiting(ListeningProcess):
    """The driver's handle on a process that waits."""

    def __init__(self, engine: EngineName, ahead: Sequence[AheadProcess], variables: dict[str, str]) -> None:
        super().__init__("posttrain-wait-", 1)
        self.engine = engine
        self.ahead = tuple(ahead)
        self.variables = variables
        self.taken = False
        described = json.dumps([engine, [asdict(process) for process in ahead]])
        # What an import says on stderr it says again where the process begins anew.
        process = self.begin(_START, (described,), variables, subprocess.DEVNULL)
        # One that has ended must not look as if it were still there, though this process has begun it.
        threading.Thread(target=process.wait, name="wait-for-worker", daemon=True).start()


_waiting: list[_Waiting] = []


def main() -> None:
    """Be a process that waits: import an engine, and become the worker that is asked for. Ends when the driver does,
    and when it cannot be that worker; Ray then starts another."""
    listening, lifeline = socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])
    engine, described = json.loads(sys.argv[4])
    ahead = [AheadProcess(**process) for process in described]
    before = dict(os.environ)
    quiet_libraries()
    spawn_ahead(ahead)
    from posttrain.engines.start import import_engine  # with torch, which takes seconds: the others have begun

    import_engine(engine)
    waiting = poll()
    waiting.register(listening, POLLIN)
    waiting.register(lifeline, POLLIN)
    if lifeline in {descriptor for descriptor, _ in waiting.poll()}:
        shutil.rmtree(os.path.dirname(listening.getsockname()), ignore_errors=True)  # the driver may have been killed
        return
    connection, _ = listening.accept()
    with connection:
        if (request := read_request(connection)) is None:
            return
        fixed = tuple(name for process in ahead for name in process.fixed)
        others = differing(before, request.environment, fixed)
        if others or "ray" in sys.modules:
            why = f"others would have set {', '.join(others)}" if others else "Ray is imported already"
            connection.sendall(why.encode()[:4096])
            close_streams(request.streams)
            return
        accept_request(connection, request)
    listening.close()
    os.close(lifeline)
    imported = {name: value for name, value in os.environ.items() if before.get(name) != value}
    become(request._replace(environment=request.environment | imported))
