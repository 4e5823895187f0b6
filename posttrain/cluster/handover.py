"""How a process that has imported already becomes a worker of Ray: it is asked over a socket, by ``fork_worker.py``,
and gets the command, environment, folder and open files that the worker would have had. Imports nothing of Ray, which
reads some of the environment on import."""

from __future__ import annotations

import contextlib
import ctypes
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
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from select import POLLHUP, poll
from typing import IO, NamedTuple, NoReturn

import psutil
from packaging.specifiers import SpecifierSet

from posttrain.core.cycles import USUAL
from posttrain.core.errors import RunError
from posttrain.core.signals import TERMINATING, handle

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


class ListeningProcess:
    """The driver's handle on a process that others ask at ``address``. It ends with ``close``, and with the driver.

    Args:
        prefix: of the name of the folder of its socket, which this user alone may enter.
        backlog: most requests that wait. They can come before it starts.

    Raises:
        RunError: the temporary folder is too deep for a socket.
    """

    def __init__(self, prefix: str, backlog: int) -> None:
        self._folder = tempfile.mkdtemp(prefix=prefix)
        self.address = f"{self._folder}/socket"
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._process: subprocess.Popen[bytes] | psutil.Process | None = None
        try:
            self._listening.bind(self.address)
            self._listening.listen(backlog)
        except OSError as error:
            self.close()
            raise RunError(f"no socket in the temporary folder: {error}: {self.address}", hint=SHORTER) from error

    def begin(
        self, code: str, arguments: Sequence[str], environment: Mapping[str, str], errors: IO[bytes] | int
    ) -> subprocess.Popen[bytes]:
        """Start the process. It runs ``code`` with the import path, the socket, a file that is closed when the driver
        has ended, and ``arguments`` as its arguments, and ignores Ctrl-C and the end of the terminal, as Ray's own do.

        Args:
            environment: variables of its own.
            errors: where its stderr goes.
        """
        with self._own_files() as own:
            path = json.dumps([os.path.abspath(folder) for folder in sys.path])
            self._process = process = subprocess.Popen(
                [sys.executable, "-c", code, path, *map(str, own), *arguments],
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=own,
            )
        return process

    def fork(self, function: Callable[[int, int], None]) -> None:
        """Fork the process of this one, which must have one thread. It runs ``function`` with the socket and the file
        that is closed when the driver has ended, in the surroundings that it would have as a new Python, and ends as
        one does."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or what they hold is written twice
        with self._own_files() as own:
            if (process := os.fork()) == 0:
                self._listening.detach()  # the function's to close
                _run_and_end(function, own)
            self._process = psutil.Process(process)

    @contextlib.contextmanager
    def _own_files(self) -> Iterator[tuple[int, int]]:
        """Give the descriptors of the process that begins within the body, and ignores Ctrl-C and the like."""
        reads, self._lifeline = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
        try:
            yield self._listening.fileno(), reads
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(reads)
        self._listening.close()

    def close(self) -> None:
        """End the process."""
        self._listening.close()
        if self._process is not None:
            os.close(self._lifeline)
            with contextlib.suppress(psutil.NoSuchProcess):
                self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


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


def _be_new_python(own: Sequence[int]) -> None:
    """Undo in a forked process what it has of the command that it was forked of, but what is imported."""
    handle(TERMINATING, signal.SIG_DFL)
    handle((signal.SIGINT,), signal.default_int_handler)
    sys.unraisablehook = sys.__unraisablehook__
    gc.set_threshold(*USUAL)
    sys.path[:] = [os.path.abspath(folder) for folder in sys.path]
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    for name in os.listdir("/proc/self/fd"):
        if (number := int(name)) > 2 and number not in own:
            with contextlib.suppress(OSError):  # that of the folder itself
                os.close(number)


def _run_and_end(function: Callable[[int, int], None], own: tuple[int, int]) -> NoReturn:
    """Call a function and end as Python does after a program, though this is amid a command's."""
    code = 0
    try:
        _be_new_python(own)
        function(*own)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError  # for type checkers: it does not return


def _hung_up(connection: socket.socket) -> bool:
    state = poll()
    state.register(connection, 0)
    return any(events & POLLHUP for _, events in state.poll(0))
