"""What an engine owes to an update of its weights, whichever engine it is."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

from posttrain.core.errors import RunError, WeightSyncError
from posttrain.weight_sync.broadcast import MemberLost
from posttrain.weight_sync.buckets import Bucket

_QUIET_S = 60.0
"""Longest wait for requests to come back once they were told to."""
_LOOK_S = 0.002
"""Between two looks whether they are back."""


class WeightGate:
    """Lets requests in while the engine has whole weights, and keeps account of what an update has brought.

    Args:
        name: of the engine, in messages.
        shapes: of all parameters that an update must bring.
        abort: tells the engine to send back all requests as far as they are.
    """

    def __init__(self, name: str, shapes: Mapping[str, tuple[int, ...]], abort: Callable[[], Awaitable[Any]]) -> None:
        self.version = 0
        """Of the weights that the engine has."""
        self.running: set[asyncio.Task[Any]] = set()
        self._name, self._shapes, self._abort = name, shapes, abort
        self._loaded: set[str] = set()
        self._update: str | None = None
        """Whose buckets are loaded; None between updates."""
        self._past: deque[str] = deque(maxlen=16)
        """The newest updates, that one and those before: of these a bucket may still be on its way."""
        self._loading = asyncio.Lock()
        self._next = 0
        """Number of the bucket whose turn it is."""
        self._turns: dict[int, asyncio.Future[None]] = {}
        """Of buckets that came before it was theirs."""
        self._failure: Exception | None = None
        """Of a bucket of this update."""
        self._broken: Exception | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._closing = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def request(self) -> AsyncIterator[int]:
        """Around a request: waits while weights are loaded. The version that samples it, all of it.

        Raises:
            RunError: the last update failed, so that the weights are none.
        """
        await self._open.wait()
        if self._broken is not None:
            raise RunError(f"{self._name} has no whole set of weights: {self._broken}")
        task = asyncio.current_task()
        assert task is not None
        self.running.add(task)
        try:
            yield self.version
        finally:
            self.running.discard(task)

    @contextlib.asynccontextmanager
    async def loading(self, bucket: Bucket) -> AsyncIterator[None]:
        """Around the load of a bucket. The first one of an update sends all requests back; new ones wait until
        ``finish``.

        Buckets are loaded one at a time, in their order, whatever order they come in. Neither Ray nor the engines keep
        it, and the bytes of a broadcast go to whoever receives next. An update may be given up without a word to this
        engine, when another one dies: then the next begins in the middle of it.

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
            async with self._loading:  # the last one of an update that was given up may still be at it
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
        """Begin ``update``, if it is a new one: nothing of the one before counts any more."""
        if update == self._update:
            return
        if update in self._past:
            raise self._over()
        self._forget(self._over())
        self._past.append(update)
        self._update, self._failure = update, None

    def _forget(self, why: Exception) -> None:
        """What the update has brought does not count, and buckets do not wait for their turn."""
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
        """Wait for the bucket before, as long as the driver waits for this one. Raises what that one did."""
        if self._failure is not None:
            raise self._failure
        if number != self._next:
            self._turns[number] = turn = asyncio.get_running_loop().create_future()
            await turn

    async def close(self) -> None:
        """Requests that run come back as far as they are; new ones wait until ``finish``."""
        async with self._closing:  # whoever comes second finds them back, too
            if not self._open.is_set():
                return
            self._open.clear()
            if self.running:
                await self._abort()
            deadline = time.monotonic() + _QUIET_S
            while self.running:
                if time.monotonic() > deadline:
                    raise WeightSyncError(
                        f"{self._name} still had {len(self.running)} requests {_QUIET_S:g} s after they were aborted"
                    )
                await asyncio.sleep(_LOOK_S)

    @contextlib.asynccontextmanager
    async def finish(self, version: int) -> AsyncIterator[None]:
        """Around what an engine does when all parameters are there. Then requests come in again, for ``version``.

        Raises:
            WeightSyncError: some are not.
        """
        update = self._update
        with self._failures(update):
            missing = self._shapes.keys() - self._loaded
            if missing:
                raise WeightSyncError(
                    f"{len(missing)} parameters of the engine were not sent, among them {min(missing)}"
                )
            yield
            self._forget(self._over())
            self._update = None
            self.version, self._broken = version, None
            self._open.set()

    @contextlib.contextmanager
    def _failures(self, update: str | None) -> Iterator[None]:
        """Buckets and requests that wait for the end of ``update`` hear of its failure."""
        try:
            yield
        except Exception as error:
            if update == self._update:
                self._failure = error
                self._forget(error)
                if not isinstance(error, MemberLost):  # then it begins again, without the one that was lost
                    self._broken = error
                    self._open.set()
            raise
