"""Sandboxes for coroutines: what blocks runs in threads, a coroutine that is cancelled ends its program."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from posttrain.sandbox import open_sandbox
from posttrain.sandbox.base import RunResult, Sandbox, SandboxError, Session


class SandboxBusy(SandboxError):
    """Every thread was busy for as long as a call may wait."""


class SandboxPool:
    """Runs up to ``size`` programs and cells at once, in sandboxes as ``posttrain.sandbox.configure`` said.

    Sandboxes are opened when they are needed and kept warm. A session keeps one for itself while it is open, so there
    may be more of them than ``size``. Call ``close`` at the end.
    """

    def __init__(self, size: int, wait_s: float) -> None:
        self.wait_s = wait_s
        self._size = size
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="sandbox")
        self._lock = threading.Lock()
        self._open: set[Sandbox] = set()
        self._idle: list[Sandbox] = []
        self._closed = False

    async def run(self, code: str, *, deadline_s: float | None = None) -> RunResult:
        """Run a program of its own, the value of its last expression printed.

        Raises:
            SandboxBusy: no thread was free within ``wait_s``.
            SandboxError: the sandbox failed.
        """

        def work(call: _Call) -> RunResult:
            sandbox = self.take()
            try:
                with call.on(sandbox):
                    return sandbox.run(code, deadline_s=deadline_s, echo=True)
            finally:
                self.give(sandbox)

        return await self.call(work)

    def session(self) -> PooledSession:
        """A session that takes a sandbox with its first cell."""
        return PooledSession(self)

    def close(self) -> None:
        """End everything that runs, and every sandbox. Idempotent."""
        with self._lock:
            self._closed = True
            still_open = list(self._open)
        for sandbox in still_open:
            sandbox.abort()
        self._threads.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            still_open, self._open, self._idle = list(self._open), set(), []
        for sandbox in still_open:
            sandbox.close()

    async def call(self, work: Callable[[_Call], RunResult]) -> RunResult:
        """Run ``work`` in a thread. When this coroutine is cancelled, so is what the thread waits for."""
        call = _Call()
        future = self._threads.submit(work, call)
        waiter = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait({waiter}, timeout=self.wait_s)
            if not done and future.cancel():  # only what has not begun can be cancelled
                raise SandboxBusy(f"no sandbox was free within {self.wait_s:g} s")
            return await waiter
        except asyncio.CancelledError:
            waiter.cancel()
            call.give_up()
            raise

    def take(self) -> Sandbox:
        """A sandbox for the caller alone, until it gives it back."""
        with self._lock:
            if self._closed:
                raise SandboxError("the sandboxes are closed")
            if self._idle:
                return self._idle.pop()
        sandbox = open_sandbox()
        with self._lock:
            self._open.add(sandbox)
        return sandbox

    def give(self, sandbox: Sandbox) -> None:
        """Take a sandbox back. No more than ``size`` are kept while nobody uses them."""
        with self._lock:
            if not self._closed and len(self._idle) < self._size:
                self._idle.append(sandbox)
                return
            self._open.discard(sandbox)
        sandbox.close()


class PooledSession:
    """A session for one episode: its cells run one after the other, in the order in which they were asked for."""

    def __init__(self, pool: SandboxPool) -> None:
        self.state_lost = False
        """True where the variables were lost without a result that says so: a cell was cancelled, or the sandbox
        failed. Told with the result of the cell after it."""
        self._pool = pool
        self._turn = asyncio.Lock()
        self._using = threading.Lock()  # a cancelled cell's thread may need a moment longer than its coroutine
        self._sandbox: Sandbox | None = None
        self._session: Session | None = None
        self._dirty = False

    async def run(self, code: str, *, deadline_s: float | None = None) -> RunResult:
        """Run a cell.

        Raises:
            SandboxBusy: no thread was free within the pool's ``wait_s``. The session is as it was.
            SandboxError: the sandbox failed.
        """

        def work(call: _Call) -> RunResult:
            with self._using:
                if call.given_up:  # perhaps the session has been closed since: it must not take another sandbox
                    raise SandboxError("the call was cancelled before it began")
                if self._session is None:
                    self._sandbox = self._pool.take()
                    self._session = self._sandbox.session()
                assert self._sandbox is not None
                with call.on(self._sandbox):
                    self.state_lost, self._dirty = self._dirty, True
                    result = self._session.run(code, deadline_s=deadline_s)
                self._dirty = call.given_up and result.session_ended
                return result

        async with self._turn:
            return await self._pool.call(work)

    async def close(self) -> None:
        """End the session and give its sandbox back. Idempotent."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._using:
            session, sandbox, self._session, self._sandbox = self._session, self._sandbox, None, None
            if session is not None:
                session.close()
            if sandbox is not None:
                self._pool.give(sandbox)


class _Call:
    """What a thread does for a coroutine, which may give it up."""

    def __init__(self) -> None:
        self.given_up = False
        self._lock = threading.Lock()
        self._sandbox: Sandbox | None = None

    @contextmanager
    def on(self, sandbox: Sandbox) -> Iterator[None]:
        """While the thread waits for this sandbox. The lock keeps ``give_up`` from aborting its next user's program."""
        with self._lock:
            if self.given_up:
                raise SandboxError("the call was cancelled before it began")
            self._sandbox = sandbox
        try:
            yield
        finally:
            with self._lock:
                self._sandbox = None

    def give_up(self) -> None:
        with self._lock:
            self.given_up = True
            if self._sandbox is not None:
                self._sandbox.abort()
