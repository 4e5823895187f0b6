"""Signals that ask a process to end: SIGTERM from a scheduler, SIGHUP from a terminal that goes away."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

TERMINATING = (signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """One of ``TERMINATING`` came, and nothing waits for a better moment. What is half done is cleaned up, as after
    Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number
        """As a shell has it for a process that the signal ends."""


def handle(numbers: tuple[signal.Signals, ...], handler: Handler) -> dict[int, Any]:
    """Install a handler of signals and return those before it, by signal. One that is ignored stays so: that is what
    ``nohup`` asks for. Outside the main thread nothing is installed, because Python allows handlers there only."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {n: signal.signal(n, handler) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}


def restore(handlers: dict[int, Any]) -> None:
    """Install the handlers that ``handle`` has returned."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


@contextmanager
def termination_raises() -> Iterator[None]:
    """Raise ``Terminated`` in the main thread where SIGTERM or SIGHUP would end the process at once."""

    def end(number: int, frame: FrameType | None) -> None:
        leave_terminal()
        raise Terminated(number)

    before = handle(TERMINATING, end)
    try:
        yield
    finally:
        restore(before)


def leave_terminal() -> None:
    """Send stdout and stderr to nowhere where their terminal has gone away: writing to it would be an error, amid a
    last save."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
