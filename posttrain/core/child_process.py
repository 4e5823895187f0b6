"""A process of the driver's own that answers over a pipe, for work that may hang, die or take a core of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, Literal

import psutil

_DYING_S = 5.0
"""Longest wait for a killed process. One that the kernel does not let die is left behind."""
_spawning = threading.Lock()


class ChildProcess:
    """Starts ``body(pipe, *arguments)`` in another process. Ctrl-C is left to the driver, and what the process prints
    goes to stderr.

    Args:
        body: a function of a module.
        name: of the process; None: a number.
        method: ``fork`` starts at once with all that this process has imported; ``spawn`` is safe beside threads.
        daemon: it may start no processes through ``multiprocessing``.
    """

    def __init__(
        self,
        body: Callable[..., None],
        *arguments: Any,
        name: str | None = None,
        method: Literal["fork", "spawn"] = "spawn",
        daemon: bool = True,
    ) -> None:
        context: Any = multiprocessing.get_context(method)
        self.pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=_begin, args=(body, theirs, *arguments), name=name, daemon=daemon
        )
        # Until the process ignores Ctrl-C by itself, it inherits a mask that holds it back.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with _no_main() if method == "spawn" else contextlib.nullcontext():
                self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def receive(self, deadline_s: float | None = None) -> Any:
        """Return the next message of the process.

        Args:
            deadline_s: longest wait; None: until there is one, or the process ends.

        Raises:
            TimeoutError: there was none in time.
            EOFError, OSError: the process has ended.
        """
        if not self.pipe.poll(None if deadline_s is None else max(0.0, deadline_s)):
            raise TimeoutError(f"process {self.pid} sent nothing within {deadline_s:g} s")
        return self.pipe.recv()

    def exit_code(self) -> int | None:
        """Return the exit code of a process that has closed its pipe; None where it lingers."""
        self._process.join(timeout=1.0)
        return self._process.exitcode

    def kill(self, *, family: bool = False) -> None:
        """Kill the process, with ``family`` also what it started. The pipe stays open: a thread that reads it gets the
        end of the file."""
        if family and self.pid is not None:
            kill_descendants(self.pid)
        self._process.kill()
        self._process.join(_DYING_S)


def kill_descendants(pid: int) -> None:
    """Kill what a living process has started, and what that has, in sessions of their own too. What was started by one
    that has ended since is not found, and what may not be killed is left."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """Hide the program's main module while a process is spawned, which would import it: a script that calls
    ``posttrain`` without ``if __name__ == "__main__"`` would run once more in each process, runs and all."""
    with _spawning:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _begin(body: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    sys.stdout = sys.stderr  # stdout is for the command's data
    body(pipe, *arguments)
