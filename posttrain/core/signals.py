"""Signals that ask a process to end: SIGTERM from a scheduler, SIGHUP from a terminal that goes away."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from types import CodeType, FrameType
from typing import Any, TypeVar

T = TypeVar("T")
Handler = Callable[[int, FrameType | None], Any] | signal.Handlers

TERMINATING = (signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """One of ``TERMINATING`` came, and nothing waits for a better moment. What is half done is cleaned up, as after
    Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number
        self.exit_code = 128 + number
        """As a shell has it for a process that the signal ends."""


def handle(numbers: tuple[signal.Signals, ...], handler: Handler) -> dict[int, Any]:
    """Install a handler of signals and return those before it, by signal. One that is ignored stays so: that is what
    ``nohup`` asks for. Python allows handlers in the main thread only: for a thread of ``call_in_thread`` the main
    thread calls the handler, and in any other thread nothing is installed."""
    if threading.current_thread() is not threading.main_thread():
        relay = _relay.get()
        return {} if relay is None else relay.handle(numbers, handler)
    return {n: signal.signal(n, handler) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}


def restore(handlers: dict[int, Any]) -> None:
    """Install the handlers that ``handle`` has returned."""
    relay = _relay.get()
    for number, handler in handlers.items():
        if relay is None:
            signal.signal(number, handler)
        else:
            relay.handlers[number] = handler


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


@contextmanager
def ignored_again() -> Iterator[None]:
    """Send Ctrl-C or a signal of ``TERMINATING`` again where Python has ignored its exception, because that came up in
    a finalizer (``__del__``): while libraries are imported, many run. At its end none is on its way."""
    main, before = threading.main_thread().ident, sys.unraisablehook
    senders: list[threading.Thread] = []
    waiting: set[int] = set()

    def send(number: int) -> None:
        assert main is not None
        while _is_running(main, hook.__code__):  # an exception in the hook would be ignored, too
            time.sleep(0.01)
        waiting.discard(number)
        signal.pthread_kill(main, number)

    def hook(ignored: sys.UnraisableHookArgs) -> None:
        if not issubclass(ignored.exc_type, KeyboardInterrupt) or threading.get_ident() != main:
            before(ignored)
            return
        number = ignored.exc_value.number if isinstance(ignored.exc_value, Terminated) else signal.SIGINT
        if number not in waiting:
            waiting.add(number)
            senders.append(threading.Thread(target=send, args=(number,), daemon=True))
            senders[-1].start()

    sys.unraisablehook = hook
    try:
        try:
            yield
        finally:
            for sender in senders:
                sender.join()
    finally:
        sys.unraisablehook = before


def _is_running(thread: int, code: CodeType) -> bool:
    """Return whether a thread is in a call of a function with this code."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


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


# ---------------------------------------------------------------------- calls in another thread


class _Relay:
    """Hands signals that the main thread receives to the handlers that a call in another thread has installed."""

    SIGNALS = (signal.SIGINT, signal.SIGALRM, *TERMINATING)

    def __init__(self) -> None:
        self.handlers: dict[int, Any] = {}
        """What the call has installed, by signal; without an entry the main thread's own handler counts."""
        self.thread: int | None = None
        """Identifier of the thread that the call runs in, once it runs."""
        self._own: dict[int, Any] = {}

    def handle(self, numbers: tuple[signal.Signals, ...], handler: Handler) -> dict[int, Any]:
        """``signals.handle`` for the call. Signals that the main thread ignores are not relayed."""
        before: dict[int, Any] = {
            number: self.handlers.get(number, self._own[number]) for number in numbers if number in self._own
        }
        self.handlers |= dict.fromkeys(before, handler)
        return before

    def __enter__(self) -> _Relay:
        self._own = handle(self.SIGNALS, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        restore(self._own)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        handler = self.handlers.get(number, self._own[number])
        if not callable(handler):  # the system's default: what would have happened without the relay
            signal.signal(number, handler)
            os.kill(os.getpid(), number)
            return
        try:
            handler(number, frame)
        except KeyboardInterrupt:
            if self.thread is None:
                raise
            # It takes effect when the thread next runs Python code: an event loop wakes every few seconds at most.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread), ctypes.py_object(KeyboardInterrupt))


_LOOK_S = 0.2
"""Longest time for which the main thread waits without running Python code. The system may hand a signal to another
thread, and Python calls its handler when the main thread runs next."""

_relay: ContextVar[_Relay | None] = ContextVar("relay", default=None)


def call_in_thread(function: Callable[[], T]) -> T:
    """Call a function in a thread of its own, where no event loop runs, and return what it returns.

    Called in the main thread, Ctrl-C and the signals of ``TERMINATING`` reach the function as if it ran there: through
    the handlers that it installs with ``handle``, or as ``KeyboardInterrupt``.

    Raises:
        BaseException: what the function raises.
    """
    result: Future[T] = Future()

    def work() -> None:
        relay.thread = threading.get_ident()
        try:
            value = function()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(value)

    with _Relay() as relay:
        context = copy_context()
        context.run(_relay.set, relay)
        threading.Thread(target=context.run, args=(work,), name="posttrain", daemon=True).start()
        while not result.done():
            wait([result], _LOOK_S)
        return result.result()
