"""Several samplers as one: the least loaded is chosen, an episode stays where it is, a dead one is replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from posttrain.core.errors import PROCESS_FAILURES, PosttrainError, RunError, WorkerError
from posttrain.core.types import Ids, Sample, SamplingParams

if TYPE_CHECKING:
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


class StickySession:
    """Sends all turns of an episode to one replica, the one with the least to do, for its prefix cache.

    Use as ``with pool.session() as sampler``. If the replica dies, another samples the turn, from the same tokens.
    """

    def __init__(self, pool: SamplerPool) -> None:
        self._pool = pool
        self._replica: _Replica | None = None

    async def generate(self, prompt_ids: Ids, params: SamplingParams) -> Sample:
        """Sample a continuation, as ``Sampler.generate`` does.

        Raises:
            WorkerError, DeadlineError: no sampler is left.
            RunError: this request has lost several samplers, one after the other.
        """
        lost = 0
        while True:
            if self._replica is None or self._replica.sampler is None:
                self._leave()
                self._replica = await self._pool.place()
                self._replica.load += 1
            replica, sampler = self._replica, self._replica.sampler
            if sampler is None:  # it was lost while the event loop was elsewhere
                continue
            try:
                return await sampler.generate(prompt_ids, params)
            except PROCESS_FAILURES as error:
                self._pool.lost(replica, sampler, error)
                lost += 1
                if lost == _TRIES:
                    raise RunError(
                        f"{lost} samplers were lost over one request, the last with: {error.message}"
                    ) from error
                self._pool.moved += 1

    def _leave(self) -> None:
        if self._replica is not None:
            self._replica.load -= 1
            self._replica = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._leave()
