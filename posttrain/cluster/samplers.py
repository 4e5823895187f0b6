"""An engine in a Ray actor, and the driver's handle on it, which is a ``Sampler`` itself.

Many requests travel in one message and many answers in one reply: a turn costs the driver microseconds, not a round
trip of its own.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.cluster.actors import Home, Peer, Process, Supervised
from posttrain.cluster.calls import gather, meet
from posttrain.core.errors import PosttrainError, RunError
from posttrain.core.types import Ids, Sample, SamplingParams
from posttrain.engines.base import EngineSpec
from posttrain.engines.start import open_engine
from posttrain.weight_sync.buckets import Bucket, HostFile

_HEARTBEAT_S = 5.0
"""An engine without an answer to give says so this often, so that silence means trouble."""

Request = tuple[int, npt.NDArray[np.int32], SamplingParams]
Answer = tuple[int, Sample | PosttrainError]


class SamplerActor(Supervised):
    """Owns one engine. ``Cluster`` makes it a Ray actor, an async one: calls interleave on its event loop."""

    def __init__(self, spec: EngineSpec, home: Home) -> None:
        super().__init__(home)
        self.spec = spec
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.answers: list[Answer] = []
        """Those that the driver may not have yet."""
        self.delivered = 0
        """Answers before these, which it has."""
        self.answered = asyncio.Event()

    async def start(self) -> None:
        """Load the engine."""
        self.loop = asyncio.get_running_loop()  # for whoever runs code here by __ray_call__, in another thread
        self.engine = await open_engine(self.spec)

    async def submit(self, requests: Sequence[Request]) -> None:
        for request_id, ids, params in requests:
            task = self.tasks[request_id] = asyncio.create_task(self._run(request_id, ids, params))
            # Not in `_run` itself: a task that is aborted before its first step never runs.
            task.add_done_callback(partial(self._forget, request_id))

    def _forget(self, request_id: int, task: asyncio.Task[None]) -> None:
        self.tasks.pop(request_id, None)

    async def _run(self, request_id: int, ids: Ids, params: SamplingParams) -> None:
        try:
            answer: Sample | PosttrainError = await self.engine.generate(ids, params)
        except PosttrainError as error:
            answer = error
        except Exception as error:  # the request must be answered whatever the engine does
            answer = RunError(f"{type(error).__name__}: {error}")
        self.answers.append((request_id, answer))
        self.answered.set()

    async def collect(self, received: int) -> list[Answer]:
        """All answers but the first ``received``, which the driver has; waits for one, at most a heartbeat. A call that
        nobody waits for any more thus takes no answer away."""
        self.answers = self.answers[received - self.delivered :]
        self.delivered = received
        if not self.answers:
            self.answered.clear()
        try:
            await asyncio.wait_for(self.answered.wait(), _HEARTBEAT_S)
        except TimeoutError:
            return []
        await asyncio.sleep(0)  # requests that finished in the same engine step travel together
        return self.answers if received == self.delivered else []

    async def abort(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            if (task := self.tasks.get(request_id)) is not None:
                task.cancel()

    async def sleep(self) -> None:
        await self.engine.sleep()

    async def wake(self) -> None:
        await self.engine.wake()

    async def load_bucket(self, bucket: Bucket, data: npt.NDArray[np.uint8] | None = None) -> None:
        """Weights that lie on this node, or whose bytes come from another."""
        if data is None:
            await self.engine.load_bucket(bucket)
            return
        file = HostFile()
        try:
            file.memory(data.size).numpy()[:] = data
            await self.engine.load_bucket(replace(bucket, path=file.path))
        finally:
            file.close()

    async def finish_update(self, version: int, canary: Sequence[Ids]) -> list[list[float]]:
        return await self.engine.finish_update(version, canary)

    async def score(self, sequences: Sequence[Ids]) -> list[list[float]]:
        return await self.engine.score(sequences)

    async def close(self) -> None:
        await self.engine.close()


class RemoteSampler:
    """The driver's handle on one ``SamplerActor``.

    Args:
        ranks: processes of the engine that hold weights.
        trainers: of colocated engines, the trainer ranks on their GPUs, in the order of the engine's ranks.
    """

    def __init__(
        self,
        peer: Peer,
        *,
        deadline_s: float,
        ranks: int = 1,
        trainers: Sequence[int] = (),
    ) -> None:
        self.peer = peer
        self.actor = peer.actor
        self.name = peer.name
        self.deadline_s = deadline_s
        self.ids = itertools.count()
        self.waiting: dict[int, asyncio.Future[Sample]] = {}
        self.outbox: list[Request] = []
        self.collector: asyncio.Task[None] | None = None
        self.received = 0
        """Answers so far."""
        self.ranks, self.trainers = ranks, trainers

    async def start(self, deadline_s: float) -> None:
        """Load the engine. Raises ``ModelError``, ``ConfigError``, ``WorkerError`` or ``DeadlineError``."""
        await meet([self.peer], deadline_s)
        await self._call("start", deadline_s)

    @property
    def process(self) -> Process:
        """Where it runs. It has been started."""
        assert self.peer.process is not None
        return self.peer.process

    async def generate(self, prompt_ids: Ids, params: SamplingParams) -> Sample:
        loop = asyncio.get_running_loop()
        request_id = next(self.ids)
        future: asyncio.Future[Sample] = loop.create_future()
        self.waiting[request_id] = future
        if not self.outbox:
            loop.call_soon(self._flush)
        self.outbox.append((request_id, np.asarray(prompt_ids, np.int32), params))
        try:
            return await future
        except asyncio.CancelledError:
            if self.waiting.pop(request_id, None) is not None:
                self.actor.abort.remote([request_id])
            raise

    def _flush(self) -> None:
        requests, self.outbox = self.outbox, []
        # One that was cancelled meanwhile may still be in `waiting`: its task has not woken up yet.
        wanted = [r for r in requests if (future := self.waiting.get(r[0])) is not None and not future.done()]
        if not wanted:
            return
        self.actor.submit.remote(wanted)  # a failure to submit shows as silence or death in collect
        if self.collector is None or self.collector.done():
            self.collector = asyncio.get_running_loop().create_task(self._collect())

    async def _collect(self) -> None:
        """Hand answers to those who wait, until nobody does."""
        try:
            while self.waiting:
                ref = self.actor.collect.remote(self.received)
                (answers,) = await gather([ref], [self.peer], "generation", self.peer.silence_s)
                self.received += len(answers)
                for request_id, answer in answers:
                    future = self.waiting.pop(request_id, None)
                    if future is None or future.done():
                        continue
                    if isinstance(answer, Sample):
                        future.set_result(answer)
                    else:
                        future.set_exception(answer)
        except PosttrainError as error:
            waiting, self.waiting = self.waiting, {}
            for future in waiting.values():
                if not future.done():
                    future.set_exception(error)

    async def sleep(self) -> None:
        """Leave the GPU. Requests that run come back with ``abort``, new ones wait for the next update."""
        await self._call("sleep", self.deadline_s)

    async def wake(self) -> None:
        """Make room for the weights of an update that follows, if it sleeps."""
        await self._call("wake", self.deadline_s)

    async def load_bucket(self, bucket: Bucket, data: Any = None) -> None:
        """Load weights out of a trainer's bucket. ``data`` refers to its bytes, if that is on another node."""
        await self._call("load_bucket", self.deadline_s, bucket, data)

    async def finish_update(self, version: int, canary: Sequence[Ids] = ()) -> list[list[float]]:
        """All buckets were loaded: they count as ``version`` from now on. Scores of the canary, before any request."""
        result: list[list[float]] = await self._call("finish_update", self.deadline_s, version, _int32(canary))
        return result

    async def score(self, sequences: Sequence[Ids]) -> list[list[float]]:
        result: list[list[float]] = await self._call("score", self.deadline_s, _int32(sequences))
        return result

    async def close(self) -> None:
        await self._call("close", 20.0)

    async def _call(self, method: str, deadline_s: float, *args: Any) -> Any:
        return (await gather([getattr(self.actor, method).remote(*args)], [self.peer], method, deadline_s))[0]


def _int32(sequences: Sequence[Ids]) -> list[npt.NDArray[np.int32]]:
    return [np.asarray(s, np.int32) for s in sequences]
