"""Several samplers as one: the least loaded is chosen, an episode stays where it is, a dead one is replaced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from posttrain.core.errors import PROCESS_FAILURES, DeadlineError, PosttrainError, RunError, WorkerError
from posttrain.core.types import Ids, Sample, SamplingParams

if TYPE_CHECKING:
    from posttrain.data.images import PlacedImage
    from posttrain.engines.base import Sampler

Restart = Callable[[int], Awaitable["Sampler"]]
"""Starts sampler ``index`` anew, with the current weights."""

_TRIES = 2
"""Samplers that one request may lose. A request that kills engines must not kill them all."""


class SamplerPool:
    """The replicas of an engine.

    Args:
        samplers: one a replica.
        restart: how to replace one; None: a dead one stays dead.
        restarts: how often, over the life of the pool.
    """

    def __init__(self, samplers: Sequence[Sampler], restart: Restart | None = None, restarts: int = 0) -> None:
        self._replicas = [_Replica(sampler) for sampler in samplers]
        self._restart = restart
        self._restarts_left = restarts if restart else 0
        self.deaths = 0
        """Samplers that were lost so far."""
        self.moved = 0
        """Requests that were sent again because their sampler was lost."""
        self._admitting, self._returned = asyncio.Event(), asyncio.Event()
        self._admitting.set()
        self._counted_at = time.monotonic()

    @asynccontextmanager
    async def drained(self, deadline_s: float) -> AsyncIterator[None]:
        """Wait until the requests that run have returned, and hold back new ones until the end of the context.

        Raises:
            DeadlineError: they did not return within ``deadline_s`` seconds.
        """
        self._admitting.clear()
        try:
            await self._drain(deadline_s)
            yield
        finally:
            self._admitting.set()

    async def _drain(self, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                while any(replica.requests for replica in self._replicas):
                    self._returned.clear()
                    await self._returned.wait()
        except TimeoutError:
            busy = [str(i) for i, replica in enumerate(self._replicas) if replica.requests]
            raise DeadlineError(
                f"sampler {', '.join(busy)}: turns had not ended {deadline_s:g} s after new weights were ready",
                hint="rollout.in_flight_updates = true updates amid turns",
            ) from None

    def idle_share(self) -> float:
        """Return the share of time since the last call in which a replica had no request, as the mean over them."""
        now = time.monotonic()
        elapsed, self._counted_at = now - self._counted_at, now
        busy = sum(replica.take_busy(now) for replica in self._replicas)
        return max(0.0, 1.0 - busy / max(elapsed * len(self._replicas), 1e-9))

    @property
    def samplers(self) -> list[Sampler]:
        """Return the samplers that live, in the order of the replicas."""
        return [replica.sampler for replica in self._replicas if replica.sampler is not None]

    @property
    def failure(self) -> PosttrainError | None:
        """Return why a sampler was lost, or could not be replaced; None while none was."""
        return next((replica.failure for replica in reversed(self._replicas) if replica.failure is not None), None)

    @property
    def loads(self) -> list[int]:
        """Return the number of open sessions of each replica."""
        return [replica.load for replica in self._replicas]

    async def admitted(self) -> None:
        """Wait until requests are admitted."""
        while not self._admitting.is_set():
            await self._admitting.wait()

    def returned(self) -> None:
        """Take the end of a request."""
        self._returned.set()

    def session(self) -> StickySession:
        """Return a sticky session for one episode."""
        return StickySession(self)

    async def settled(self) -> None:
        """Wait until no replica is being replaced. A replacement that failed is no error as long as others live.

        Raises:
            WorkerError, DeadlineError: no sampler is left.
        """
        for replica in self._replicas:
            if replica.starting is not None:
                await asyncio.wait([replica.starting])
        if not self.samplers:
            raise self._last_failure()

    async def replace(self, sampler: Sampler, error: PosttrainError) -> Sampler:
        """Return a new sampler for one that has died.

        Raises:
            WorkerError, DeadlineError: ``error``, if no more may be started, or why it could not be.
        """
        replica = next(r for r in self._replicas if r.sampler is sampler)
        self.lost(replica, sampler, error)
        if replica.starting is None:
            raise error
        await asyncio.wait([replica.starting])
        if replica.sampler is None:
            raise replica.failure or error
        return replica.sampler

    def lost(self, replica: _Replica, sampler: Sampler, error: PosttrainError) -> None:
        """Take a sampler out of the pool, and have it replaced if that is allowed. Once for each sampler."""
        if replica.sampler is not sampler:
            return
        self.deaths += 1
        replica.sampler, replica.failure = None, error
        if self._restarts_left > 0:
            self._restarts_left -= 1
            replica.starting = asyncio.create_task(self._start(replica))

    async def _start(self, replica: _Replica) -> None:
        assert self._restart is not None
        try:
            replica.sampler = await self._restart(self._replicas.index(replica))
        except PosttrainError as error:
            replica.failure = error
        except Exception as error:  # nobody waits for this task: what it raises is told by those who need the replica
            replica.failure = WorkerError(f"a sampler could not be started again: {type(error).__name__}: {error}")
        finally:
            replica.starting = None

    async def close(self) -> None:
        """Stop replacing. The samplers belong to whoever started them."""
        self._restarts_left = 0
        starting = [replica.starting for replica in self._replicas if replica.starting is not None]
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)

    async def place(self) -> _Replica:
        """Return the living replica with the least to do; where there is none, the first that comes back.

        Raises:
            WorkerError, DeadlineError: none lives, and none is being started.
        """
        while True:
            living = [replica for replica in self._replicas if replica.sampler is not None]
            if living:
                return min(living, key=lambda replica: replica.load)
            starting = [replica.starting for replica in self._replicas if replica.starting is not None]
            if not starting:
                raise self._last_failure()
            await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)

    def _last_failure(self) -> PosttrainError:
        return self.failure or WorkerError("there is no sampler")


class _Replica:
    def __init__(self, sampler: Sampler) -> None:
        self.sampler: Sampler | None = sampler
        self.load = 0
        self.starting: asyncio.Task[None] | None = None
        self.failure: PosttrainError | None = None
        """Why it was lost, or could not be started."""
        self.requests = 0
        """Requests that run."""
        self._busy_s = 0.0
        self._busy_since = 0.0

    def begin(self) -> None:
        """Count a request."""
        if not self.requests:
            self._busy_since = time.monotonic()
        self.requests += 1

    def end(self) -> None:
        """Count the end of a request."""
        self.requests -= 1
        if not self.requests:
            self._busy_s += time.monotonic() - self._busy_since

    def take_busy(self, now: float) -> float:
        """Return the seconds with a request since the last call."""
        if self.requests:
            self._busy_s += now - self._busy_since
            self._busy_since = now
        busy, self._busy_s = self._busy_s, 0.0
        return busy


class StickySession:
    """Sends all turns of an episode to one replica, the one with the least to do, for its prefix cache.

    Use as ``with pool.session() as sampler``. If the replica dies, another samples the turn, from the same tokens.
    """

    def __init__(self, pool: SamplerPool) -> None:
        self._pool = pool
        self._replica: _Replica | None = None

    async def generate(self, prompt_ids: Ids, params: SamplingParams, images: Sequence[PlacedImage] = ()) -> Sample:
        """Sample a continuation, as ``Sampler.generate`` does.

        Raises:
            WorkerError, DeadlineError: no sampler is left.
            RunError: this request has lost several samplers, one after the other.
        """
        lost = 0
        while True:
            await self._pool.admitted()
            replica = await self._placed()
            sampler = replica.sampler
            if sampler is None:  # it was lost while the event loop was elsewhere
                continue
            replica.begin()
            try:
                return await sampler.generate(prompt_ids, params, images)
            except PROCESS_FAILURES as error:
                self._pool.lost(replica, sampler, error)
                lost += 1
                if lost == _TRIES:
                    raise RunError(
                        f"{lost} samplers were lost over one request, the last with: {error.message}"
                    ) from error
                self._pool.moved += 1
            finally:
                replica.end()
                self._pool.returned()

    async def _placed(self) -> _Replica:
        """Return the episode's replica, or where it has none that lives, a new one."""
        if self._replica is None or self._replica.sampler is None:
            self._leave()
            found = await self._pool.place()
            if self._replica is None or self._replica.sampler is None:  # else another request of the episode has one
                self._leave()
                self._replica = found
                found.load += 1
        return self._replica

    def _leave(self) -> None:
        if self._replica is not None:
            self._replica.load -= 1
            self._replica = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._leave()
