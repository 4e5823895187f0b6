"""The update guard of an engine: pauses requests during a weight update, and verifies that the update is complete."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from typing import Any

from posttrain.core.errors import RunError, WeightSyncError
from posttrain.weight_sync.broadcast import RankLost
from posttrain.weight_sync.buckets import Bucket

_ABORT_DEADLINE_S = 60.0
"""Longest wait for requests to return after they were aborted."""
_POLL_S = 0.002
"""Interval between two checks of the requests that run."""


class UpdateGuard:
    """Admits requests while the engine has complete weights, and records which parameters an update has loaded.

    Args:
        name: of the engine, in messages.
        shapes: of all parameters that an update must load.
        pause: makes the engine return all requests with what they have sampled.
        keeps: instead ``pause`` holds up all requests as they are, and they go on when the engine has finished the
            update.
        frozen: parameters that training does not change: an update may leave them out once one has loaded them.
        empty: the engine has no weights yet. Requests wait for the first update.
    """

    def __init__(
        self,
        name: str,
        shapes: Mapping[str, tuple[int, ...]],
        pause: Callable[[], Awaitable[Any]],
        *,
        keeps: bool = False,
        frozen: Collection[str] = (),
        empty: bool = False,
    ) -> None:
        self.version = 0
        """Version of the engine's weights."""
        self.running: set[asyncio.Task[Any]] = set()
        self._name, self._shapes, self._pause, self._keeps = name, shapes, pause, keeps
        self._loaded: set[str] = set()
        self._frozen = frozenset(frozen)
        self._held: frozenset[str] = frozenset()
        """Parameters that the engine still has of an earlier update."""
        self._update: str | None = None
        """The update whose buckets are loaded; None between updates."""
        self._past: deque[str] = deque(maxlen=16)
        """The newest updates: buckets of these may still arrive."""
        self._loading = asyncio.Lock()
        self._next = 0
        """Number of the next bucket to load."""
        self._turns: dict[int, asyncio.Future[None]] = {}
        """Buckets that arrived before their turn."""
        self._failure: Exception | None = None
        """Why a bucket of this update failed."""
        self._broken: Exception | None = None
        self._open = asyncio.Event()
        if not empty:
            self._open.set()
        self._closing = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def request(self) -> AsyncIterator[int]:
        """Wrap a request: wait while weights are loaded, and yield the version that samples its first token.

        Raises:
            RunError: the last update failed, so that the engine has no complete weights.
        """
        while not self._open.is_set():  # it may be closed again before a task that waits for it runs
            await self._open.wait()
        if self._broken is not None:
            raise RunError(f"{self._name} has no complete weights: {self._broken}")
        task = asyncio.current_task()
        assert task is not None
        self.running.add(task)
        try:
            yield self.version
        finally:
            self.running.discard(task)

    @contextlib.asynccontextmanager
    async def loading(self, bucket: Bucket) -> AsyncIterator[None]:
        """Wrap the load of a bucket. The first bucket of an update pauses all requests; new ones wait until ``finish``.

        Buckets are loaded one at a time, ordered by their numbers: neither Ray nor the engines keep the order of
        calls, and a broadcast goes to whichever load receives next. An update may be given up without a message to
        this engine, when another engine dies: the next update then begins in the middle of it.

        Raises:
            RunError: another update has begun.
            WeightSyncError: the engine does not have such a parameter, or requests did not come back.
        """
        self._begin(bucket.update)
        with self._failures(bucket.update):
            for name, shape in bucket.shapes.items():
                if self._shapes.get(name) != shape:
                    raise WeightSyncError(f"the trainer sent {name} {shape}; the engine has {self._shapes.get(name)}")
            await self._turn(bucket.number)
            async with self._loading:  # the last bucket of an update that was given up may still be loading
                self._check(bucket.update)
                await self.close()
                yield
            self._check(bucket.update)
            self._loaded |= bucket.shapes.keys()
            self._next = bucket.number + 1
            turn = self._turns.pop(self._next, None)
            if turn is not None and not turn.done():
                turn.set_result(None)

    def _begin(self, update: str) -> None:
        """Begin ``update`` if it is new, and forget the one before."""
        if update == self._update:
            return
        if update in self._past:
            raise self._over()
        self._forget(self._over())
        self._past.append(update)
        self._update, self._failure = update, None

    def _forget(self, why: Exception) -> None:
        """Forget what the update has loaded, and fail the buckets that wait for their turn."""
        self._loaded.clear()
        self._next = 0
        turns, self._turns = self._turns, {}
        for turn in turns.values():
            if not turn.done():
                turn.set_exception(why)

    def _check(self, update: str) -> None:
        if update != self._update:
            raise self._over()

    def _over(self) -> RunError:
        return RunError(f"{self._name} got a bucket of an update that is over")

    async def _turn(self, number: int) -> None:
        """Wait until the bucket before is loaded; the caller has the deadline. Raises the error of that bucket."""
        if self._failure is not None:
            raise self._failure
        if number != self._next:
            self._turns[number] = turn = asyncio.get_running_loop().create_future()
            await turn

    async def close(self) -> None:
        """Pause the requests that run; unless they are kept, wait until they have returned. New ones wait until
        ``finish``."""
        async with self._closing:  # a second caller returns after the requests have, too
            if not self._open.is_set():
                return
            self._open.clear()
            if self._keeps:
                await self._pause()
                return
            if self.running:
                await self._pause()
            deadline = time.monotonic() + _ABORT_DEADLINE_S
            while self.running:
                if time.monotonic() > deadline:
                    raise WeightSyncError(
                        f"{self._name} still had {len(self.running)} requests {_ABORT_DEADLINE_S:g} s after they "
                        "were aborted"
                    )
                await asyncio.sleep(_POLL_S)

    def lost_weights(self) -> None:
        """Note that the engine has given up the memory of its weights: the next update must load all of them."""
        self._held = frozenset()

    @contextlib.asynccontextmanager
    async def finish(self, version: int) -> AsyncIterator[None]:
        """Wrap the engine's own work after all parameters were loaded. Afterwards requests are admitted, for
        ``version``.

        Raises:
            WeightSyncError: a parameter was not loaded.
        """
        update = self._update
        with self._failures(update):
            missing = self._shapes.keys() - self._loaded - self._held
            if missing:
                raise WeightSyncError(
                    f"{len(missing)} parameters of the engine were not sent, among them {min(missing)}"
                )
            yield
            self._held = self._frozen
            self._forget(self._over())
            self._update = None
            self.version, self._broken = version, None
            self._open.set()

    @contextlib.contextmanager
    def _failures(self, update: str | None) -> Iterator[None]:
        """Pass a failure of ``update`` on to the buckets and requests that wait for its end."""
        try:
            yield
        except Exception as error:
            if update == self._update:
                self._failure = error
                self._forget(error)
                if not isinstance(error, RankLost):  # the update begins again without the lost rank
                    self._broken = error
                    self._open.set()
            raise
