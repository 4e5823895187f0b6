"""What an engine owes to an update of its weights, whichever engine it is."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

from posttrain.errors import RunError, WeightSyncError
from posttrain.models.broadcast import MemberLost

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
    async def loading(self, number: int, shapes: Mapping[str, tuple[int, ...]]) -> AsyncIterator[None]:
        """Around the load of bucket ``number`` of an update, with parameters of these shapes. The first one sends all
        requests back; new ones wait until ``finish``.

        Buckets are loaded one at a time, in their order, whatever order they come in. Neither Ray nor the engines keep
        it, and the bytes of a broadcast go to whoever receives next.

        Raises:
            WeightSyncError: the engine does not have such a parameter, or requests did not come back.
        """
        with self._failures():
            for name, shape in shapes.items():
                if self._shapes.get(name) != shape:
                    raise WeightSyncError(f"the trainer sent {name} {shape}; the engine has {self._shapes.get(name)}")
            await self._turn(number)
            await self.close()
            yield
            self._loaded |= shapes.keys()
            self._next = number + 1
            turn = self._turns.pop(self._next, None)
            if turn is not None and not turn.done():
                turn.set_result(None)

    async def _turn(self, number: int) -> None:
        """Wait for the bucket before, as long as the driver waits for this one. Raises what that one did."""
        if number == 0:
            self._failure = None
        elif self._failure is not None:
            raise self._failure
        elif number != self._next:
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
        with self._failures():
            missing = self._shapes.keys() - self._loaded
            if missing:
                raise WeightSyncError(
                    f"{len(missing)} parameters of the engine were not sent, among them {min(missing)}"
                )
            yield
            self._loaded.clear()
            self._next = 0
            self.version, self._broken = version, None
            self._open.set()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Buckets and requests that wait for the end of an update hear of its failure."""
        try:
            yield
        except Exception as error:
            self._failure, self._next = error, 0
            self._loaded.clear()
            turns, self._turns = self._turns, {}
            for turn in turns.values():
                if not turn.done():
                    turn.set_exception(error)
            if not isinstance(error, MemberLost):  # then it begins again, without the one that was lost
                self._broken = error
                self._open.set()
            raise
