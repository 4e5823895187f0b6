"""The process of a session: runs cells one after the other in one namespace. Stdlib only; the zygote imports it.

A cell comes as descriptors of its source, stdout and stderr, and one byte goes back: its exit code. Cells can do to
this process whatever they like, so the zygote believes nothing that it says.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import types
from typing import TextIO

import harness  # type: ignore[import-not-found]  # found by its path
import program  # type: ignore[import-not-found]


def serve(connection: socket.socket, fds: list[int], folder: str) -> None:
    """Run the cell of ``fds``, then those that come over the connection, until it is closed."""
    own = os.getpid()
    null = os.open(os.devnull, os.O_RDWR)
    module = program.new_main(f"{folder}/main.py")
    number, streams = 0, _open_streams()
    while fds:
        number += 1
        source = os.pread(fds[0], os.fstat(fds[0]).st_size, 0).decode("utf-8", "surrogateescape")
        for target, fd in enumerate((null, fds[1], fds[2])):
            os.dup2(fd, target)
        for fd in fds:
            os.close(fd)
        streams = _restore(streams)
        code = _run(source, module, f"<cell {number}>")
        code = _flush() or code
        if os.getpid() != own:
            os._exit(code & 0xFF)  # a process that the cell forked has come to the end of the cell
        os.dup2(null, 1)
        os.dup2(null, 2)
        _flush()  # what did not fit into this cell's output must not become the next one's
        connection.send(bytes([code & 0xFF]))
        fds = list(socket.recv_fds(connection, 4096, 3)[1])


def _run(source: str, module: types.ModuleType, name: str) -> int:
    """The exit code of one cell. Interrupts reach the cell and nothing else."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code: int = program.execute(source, module, name, echo=True)
        return code
    except BaseException:  # an interrupt as the cell began or ended, or an exception that cannot be shown
        return 1
    finally:
        _ignore_interrupts()


def _open_streams() -> list[TextIO]:
    harness.open_streams()
    return [sys.stdin, sys.stdout, sys.stderr]


def _restore(streams: list[TextIO]) -> list[TextIO]:
    """Undo what a cell did to the standard streams. They stay the same objects, which others may hold, if they can."""
    try:
        if any(stream.closed for stream in streams):
            return _open_streams()
    except ValueError:  # detached from what is below
        return _open_streams()
    sys.stdin, sys.stdout, sys.stderr = streams
    return streams


def _ignore_interrupts() -> None:
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return


def _flush() -> int:
    """Empty the buffers; 1 where one cannot be written."""
    code = 0
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            stream.flush()  # type: ignore[union-attr]
        except (OSError, ValueError, AttributeError):
            code = 1
    return code
