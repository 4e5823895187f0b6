"""A process that has imported what workers need, and is forked for each of them.

A worker of Ray is a new Python, which imports torch, transformers and Ray for seconds of CPU time. A run has several,
and a Ray that serves several runs starts them for each. Forked ones start in a tenth of the time, and share the memory
of what is imported. ``fork_worker.py`` is the other end.

The driver imports most of that too. So a command forks the process of itself, as soon as it has imported; Ray, which
reads some of the environment on import, is imported after that.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from select import POLLIN, poll
from typing import Any

from posttrain.cluster import fork_worker
from posttrain.cluster.handover import (
    ListeningProcess,
    Request,
    accept_request,
    become,
    close_streams,
    ray_is_tried,
    read_request,
)
from posttrain.core.cycles import rare_cycle_search
from posttrain.core.errors import RunError
from posttrain.core.machines import nvidia_devices
from posttrain.core.quiet import quiet_libraries

_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""A process with threads cannot be forked, and OpenBLAS would start some when numpy is imported."""
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
        """Have the process serve, which begins as a new Python where it was not forked before.

        Args:
            environment: variables of its own.
            log: where it says why it ended early. Ray starts workers without it then.
        """
        with log.open("wb") as errors:
            if self._process is None:
                self.begin(_START, (), _ONE_THREAD, errors)
        with contextlib.suppress(BrokenPipeError):  # it has ended
            message = json.dumps([os.environ | environment, str(log)])
            os.write(self._lifeline, message.encode() + b"\n")


_ahead: ForkServer | None = None


@contextlib.contextmanager
def fork_ahead() -> Iterator[None]:
    """Import what workers need, and this command too, and fork the server of the Ray that is started within the body.
    Nothing is done where workers cannot be forked, or this process has threads, has imported Ray already or lacks a
    standard stream: the server is a new Python then."""
    global _ahead
    streams = None not in (sys.stdin, sys.stdout, sys.stderr)
    if can_fork() and "ray" not in sys.modules and streams and _has_one_thread():
        given = {name: os.environ.get(name) for name in _ONE_THREAD}
        os.environ.update(_ONE_THREAD)
        _import()
        for name, value in given.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        if _has_one_thread():
            # No socket: Ray's are in the same folder, and it says so. No memory for a fork: a new Python may fit.
            with contextlib.suppress(RunError, OSError):
                _ahead = ForkServer()
                _ahead.fork(_serve)
    try:
        yield
    finally:
        if _ahead is not None:
            take_server().close()


def take_server() -> ForkServer:
    """Return the server that was forked ahead, or else one that has not begun."""
    global _ahead
    server, _ahead = _ahead, None
    return server or ForkServer()


def _has_one_thread() -> bool:
    return len(os.listdir("/proc/self/task")) == 1


def main() -> None:
    """Be a server that is a new Python."""
    _import()
    _serve(int(sys.argv[2]), int(sys.argv[3]))


def _serve(listening_number: int, lifeline: int) -> None:
    """Import Ray, and fork a worker for each request until the driver ends."""
    listening = socket.socket(fileno=listening_number)
    request = None
    if asked := _line(lifeline):
        environment, log = json.loads(asked)
        os.environ.clear()
        os.environ.update(environment)  # Ray reads some when it is imported
        with open(log, "ab") as errors:
            os.dup2(errors.fileno(), 2)
        _import_ray()
        if not _has_one_thread():
            sys.exit("a library has started a thread: its state would be lost in forked processes")
        request = _request_of_worker(listening, lifeline)
    if request is None:
        shutil.rmtree(os.path.dirname(listening.getsockname()), ignore_errors=True)  # the driver may have been killed
        return
    listening.close()
    os.close(lifeline)
    import numpy as np

    np.random.seed()  # Python's own generator is seeded again by the fork
    become(request)


def _line(descriptor: int) -> bytes:
    """Read a line, or nothing where the other end is closed before."""
    line = b""
    while not line.endswith(b"\n"):
        if not (part := os.read(descriptor, 65536)):
            return b""
        line += part
    return line


def _request_of_worker(listening: socket.socket, lifeline: int) -> Request | None:
    """Fork for each request, and return it in the process that is to become the worker; None in this one, when the
    driver has ended."""
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
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                accept_request(connection, request)
                return request
            close_streams(request.streams)  # and of another job or raylet Ray starts the worker
    return None


@rare_cycle_search()
def _import() -> None:
    quiet_libraries()
    import posttrain.engines.hf
    import posttrain.train.worker  # noqa: F401


@rare_cycle_search()
def _import_ray() -> None:
    import ray._private.node
    import ray.actor  # noqa: F401

    import posttrain.cluster.samplers
    import posttrain.cluster.trainers  # noqa: F401
