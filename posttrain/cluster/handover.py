"""How a process that has imported already becomes a worker of Ray: it is asked over a socket, by ``fork_worker.py``,
and gets the command, environment, folder and open files that the worker would have had. Imports nothing of Ray, which
reads some of the environment on import."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from select import POLLHUP, poll
from typing import NamedTuple

from packaging.specifiers import SpecifierSet

from posttrain.core.errors import RunError

_TRIED = SpecifierSet("==2.60.*")
"""Releases of Ray that have been tried: some of what this takes is not in its public interface."""
SHORTER = "set TMPDIR, and RAY_TMPDIR for Ray's, to a folder with a short path: a socket's has at most 107 bytes"

_REQUEST_S = 10.0
"""Longest wait for the rest of a request."""
_OOM_SCORE = "1000"
"""What raylets give their workers, so that the kernel ends these first when memory runs out."""


def ray_is_tried() -> bool:
    """Return whether workers of the installed release of Ray can be begun so."""
    return sys.platform == "linux" and _TRIED.contains(metadata.version("ray"))


def listen(prefix: str, backlog: int) -> tuple[socket.socket, str]:
    """Return a socket that listens in a new folder of this user alone, and its path. Raises ``RunError``."""
    folder = tempfile.mkdtemp(prefix=prefix)
    listening, path = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), f"{folder}/socket"
    try:
        listening.bind(path)
        listening.listen(backlog)
    except OSError as error:
        listening.close()
        shutil.rmtree(folder)
        raise RunError(f"no socket in the temporary folder: {error}: {path}", hint=SHORTER) from error
    return listening, path


class Request(NamedTuple):
    """The worker that is asked for."""

    command: list[str]
    environment: dict[str, str]
    folder: str
    mask: list[int]
    group: int
    streams: list[int]
    """Descriptors that become the standard ones"""


def read_request(connection: socket.socket) -> Request | None:
    """Return what is asked over a connection; None: whoever asked has given up."""
    connection.settimeout(_REQUEST_S)
    streams: list[int] = []
    try:
        text, streams, _, _ = socket.recv_fds(connection, 1, 3)
        while part := connection.recv(65536):
            text += part
        request = Request(**json.loads(text), streams=streams)
        if _hung_up(connection):
            raise ConnectionError
        return request
    except (OSError, ValueError):
        close_streams(streams)
        return None


def close_streams(streams: list[int]) -> None:
    """Close the descriptors of a request that becomes no worker here."""
    for stream in streams:
        os.close(stream)


def accept_request(connection: socket.socket, request: Request) -> None:
    """Tell whoever asked that this process is the worker. Call it before ``become``, which cannot fail."""
    os.setpgid(0, request.group)  # raylets end what is left of a worker's group when it has ended
    with contextlib.suppress(OSError):
        connection.sendall(b"\n")


def become(request: Request) -> None:
    """Be the worker that a request asks for, as if a new Python ran its command."""
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    with contextlib.suppress(OSError):  # a container may forbid it
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.mask)
    program = request.command[0]
    sys.argv[:] = request.command
    sys.path.insert(0, os.path.dirname(program))
    runpy.run_path(program, run_name="__main__")


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Start a process that ignores Ctrl-C and the end of the terminal, as Ray's own do."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hung_up(connection: socket.socket) -> bool:
    state = poll()
    state.register(connection, 0)
    return any(events & POLLHUP for _, events in state.poll(0))
