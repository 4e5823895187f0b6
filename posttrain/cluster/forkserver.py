"""A process that has imported what workers need, and is forked for each of them.

A worker of Ray is a new Python, which imports torch, transformers and Ray for seconds of CPU time. A run has several,
and a Ray that serves several runs starts them for each. Forked ones start in a tenth of the time, and share the memory
of what is imported. ``fork_worker.py`` is the other end.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from select import POLLHUP, POLLIN, poll
from typing import Any, NamedTuple

import numpy as np
import ray
from packaging.specifiers import SpecifierSet

from posttrain.cluster import fork_worker
from posttrain.core.cycles import rare_cycle_search
from posttrain.core.quiet import quiet_libraries

PROGRAM = Path(fork_worker.__file__)
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from posttrain.cluster.forkserver import main; main()"
)
FIXED = ("RAY_JOB_ID", "RAY_RAYLET_PID")
"""Variables that Ray reads when it is imported, and which differ between the workers of a driver and others."""
_TRIED = SpecifierSet("==2.60.*")
"""Releases of Ray that have been tried: some of what forking takes is not in its public interface."""
_REQUEST_S = 10.0
"""Longest wait for the rest of a request."""
_OOM_SCORE = "1000"
"""What raylets give their workers, so that the kernel ends these first when memory runs out."""


def can_fork() -> bool:
    """Return whether workers of this machine may be forked: it has no GPU, and Ray is a release that has been tried. A
    process that has asked a GPU's driver for anything cannot be forked, and libraries ask on import."""
    if ray.__version__ not in _TRIED:
        return False
    return sys.platform == "linux" and not Path("/dev/kfd").exists() and not any(Path("/dev").glob("nvidia[0-9]*"))


def not_forked(options: dict[str, Any]) -> dict[str, Any]:
    """Return Ray's ``options`` of an actor with which its process is a new Python; the same where none is forked."""
    if not can_fork():
        return options
    environment = options.get("runtime_env", {})
    variables = environment.get("env_vars", {}) | {fork_worker.SOCKET: ""}
    return options | {"runtime_env": environment | {"env_vars": variables}}


class ForkServer:
    """The driver's handle on the process. Requests can come before it starts. It ends with ``close``, and with the
    driver."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="posttrain-fork-")
        self.address = f"{self._folder}/socket"
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(self.address)
        self._listening.listen(128)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, environment: dict[str, str], log: Path) -> None:
        """Start the process.

        Args:
            environment: variables of its own.
            log: where it says why it ended early. Ray starts workers without it then.
        """
        reads, self._lifeline = os.pipe()
        own = (self._listening.fileno(), reads)
        path = [os.path.abspath(folder) for folder in sys.path]
        with _blocked(), log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(path), *map(str, own)],
                # A process with threads cannot be forked, and OpenBLAS would start some.
                env=os.environ | environment | {"OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=own,
            )
        self._listening.close()
        os.close(reads)

    def close(self) -> None:
        """End the process. Workers go on without it, and end with their raylet."""
        self._listening.close()
        if self._process is not None:
            os.close(self._lifeline)
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """Start a process that ignores Ctrl-C and the end of the terminal, as Ray's own do."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
            if (request := _read(connection)) is None:
                continue
            if os.fork() == 0:
                os.setpgid(0, request.group)  # raylets end what is left of a worker's group when it has ended
                with contextlib.suppress(OSError):
                    connection.sendall(b"\n")
                break
            for stream in request.streams:
                os.close(stream)
    else:
        shutil.rmtree(os.path.dirname(listening.getsockname()), ignore_errors=True)  # the driver may have been killed
        return
    listening.close()
    os.close(lifeline)
    _become(request)


@rare_cycle_search()
def _import() -> None:
    quiet_libraries()
    import ray._private.node
    import ray.actor  # noqa: F401

    import posttrain.cluster.samplers
    import posttrain.cluster.trainers
    import posttrain.engines.hf
    import posttrain.train.worker  # noqa: F401


class _Request(NamedTuple):
    command: list[str]
    environment: dict[str, str]
    folder: str
    mask: list[int]
    group: int
    streams: list[int]
    """Descriptors that become the standard ones"""


def _read(connection: socket.socket) -> _Request | None:
    """Return a request; None: whoever asked has given up, or asks for a worker of another job or raylet."""
    connection.settimeout(_REQUEST_S)
    streams: list[int] = []
    try:
        text, streams, _, _ = socket.recv_fds(connection, 1, 3)
        while part := connection.recv(65536):
            text += part
        request = _Request(**json.loads(text), streams=streams)
        if _hung_up(connection) or any(request.environment.get(name) != os.environ.get(name) for name in FIXED):
            raise ConnectionError
        return request
    except (OSError, ValueError):
        for stream in streams:
            os.close(stream)
        return None


def _hung_up(connection: socket.socket) -> bool:
    state = poll()
    state.register(connection, 0)
    return any(events & POLLHUP for _, events in state.poll(0))


def _become(request: _Request) -> None:
    """Be the worker that a request asks for, as if a new Python ran its command."""
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    with contextlib.suppress(OSError):  # a container may forbid it
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    np.random.seed()  # Python's own generator is seeded again by the fork
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.mask)
    program = request.command[0]
    sys.argv[:] = request.command
    sys.path.insert(0, os.path.dirname(program))
    runpy.run_path(program, run_name="__main__")
