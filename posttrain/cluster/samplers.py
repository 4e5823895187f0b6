"""An engine in a Ray actor, and the driver's handle on it, which is a ``Sampler``.

One message carries many requests, and one reply many answers: a turn costs the driver microseconds instead of a round
trip.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from posttrain.cluster.actors import ActorContext, ActorHandle, Supervised
from posttrain.cluster.calls import answer, wait_until_up
from posttrain.config import EngineName
from posttrain.core.errors import PosttrainError, RunError
from posttrain.core.spawn_ahead import AheadProcess, end_unused, spawn_ahead
from posttrain.core.types import Ids, Sample, SamplingParams
from posttrain.data.images import PlacedImage

if TYPE_CHECKING:  # the process of an engine imports torch later than this
    from posttrain.engines.base import EngineSpec
    from posttrain.weight_sync.buckets import Bucket

_COLLECT_S = 5.0
"""An engine without an answer replies after this time, so that a longer silence means a failure."""

_CLOSE_S = 20.0
_MEMORY_S = 120.0
"""Longest wait for an engine to free its memory, or to allocate it again, seconds of work. One that does not answer is
replaced."""
_FULL = 64
"""Requests of a message that is sent at once: the engine begins with the first episodes of a step while others
start."""

Request = tuple[int, bytes, SamplingParams, tuple[PlacedImage, ...]]
"""Its number, and the arguments of ``generate``. Token ids are the bytes of int32, which take a tenth of the time to
serialize that an array does."""
Answer = tuple[int, Sample | PosttrainError]


class SamplerActor(Supervised):
    """A process with one engine. ``Cluster`` makes it an async Ray actor, whose calls interleave on its event loop.

    Args:
        engine: the engine that ``start`` will open; its packages are imported meanwhile.
        ahead: processes that it will start, and which import meanwhile too.
    """

    def __init__(self, context: ActorContext, engine: EngineName, ahead: Sequence[AheadProcess] = ()) -> None:
        super().__init__(context)
        spawn_ahead(ahead)
        from posttrain.engines import start  # with torch, which takes seconds: not before the others have begun

        self.engines = start
        self.importing = threading.Thread(target=start.import_engine, args=(engine,), name="import-engine", daemon=True)
        self.importing.start()
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.answers: list[Answer] = []
        """Answers that the driver may not have yet."""
        self.delivered = 0
        """How many answers the driver has."""
        self.answered = asyncio.Event()

    async def start(self, spec: EngineSpec) -> int:
        """Load the engine; returns the most requests that it runs at once."""
        self.loop = asyncio.get_running_loop()  # for code that __ray_call__ runs here in another thread
        await asyncio.to_thread(self.importing.join)  # two threads amid one import may see half of a module
        try:
            self.engine = await self.engines.open_engine(spec)
        finally:
            end_unused()
        return self.engine.max_concurrent

    async def submit(self, requests: Sequence[Request]) -> None:
        for request_id, ids, params, images in requests:
            task = self.tasks[request_id] = asyncio.create_task(
                self._run(request_id, np.frombuffer(ids, np.int32), params, images)
            )
            # Not in `_run` itself: a task that is aborted before its first step never runs.
            task.add_done_callback(partial(self._forget, request_id))

    def _forget(self, request_id: int, task: asyncio.Task[None]) -> None:
        self.tasks.pop(request_id, None)

    async def _run(self, request_id: int, ids: Ids, params: SamplingParams, images: tuple[PlacedImage, ...]) -> None:
        try:
            answer: Sample | PosttrainError = await self.engine.generate(ids, params, images)
        except PosttrainError as error:
            answer = error
        except Exception as error:  # the request must be answered whatever the engine does
            answer = RunError(f"{type(error).__name__}: {error}")
        self.answers.append((request_id, answer))
        self.answered.set()

    async def collect(self, received: int) -> tuple[Answer, ...]:
        """Return all answers but the first ``received``, which the driver has; wait for one, at most ``_COLLECT_S``.
        The answers stay until the next call confirms them, so that a call which is given up loses none."""
        self.answers = self.answers[received - self.delivered :]
        self.delivered = received
        if not self.answers:
            self.answered.clear()
        try:
            await asyncio.wait_for(self.answered.wait(), _COLLECT_S)
        except TimeoutError:
            return ()
        await asyncio.sleep(0)  # requests that finished in the same engine step travel together
        # A copy: Ray serializes it in another thread, and a list that grows meanwhile cannot be read. And a tuple:
        # of a list Ray serializes each item by itself.
        return tuple(self.answers) if received == self.delivered else ()

    async def abort(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            if (task := self.tasks.get(request_id)) is not None:
                task.cancel()

    async def sleep(self) -> None:
        await self.engine.sleep()

    async def wake(self) -> None:
        await self.engine.wake()

    async def load_bucket(self, bucket: Bucket, data: npt.NDArray[np.uint8] | None = None) -> None:
        """Load a bucket that lies on this node, or whose bytes ``data`` come from another node."""
        if data is None:
            await self.engine.load_bucket(bucket)
            return
        from posttrain.weight_sync.sender import HostBuffer

        buffer = HostBuffer()
        try:
            buffer.allocate(data.size).numpy()[:] = data
            await self.engine.load_bucket(replace(bucket, path=buffer.path))
        finally:
            buffer.close()

    async def finish_update(self, version: int, check: Sequence[Ids]) -> list[list[float]]:
        return await self.engine.finish_update(version, check)

    async def score(self, sequences: Sequence[Ids]) -> list[list[float]]:
        return await self.engine.score(sequences)

    async def close(self) -> None:
        await self.engine.close()


class RemoteSampler:
    """The driver's handle on one ``SamplerActor``.

    Args:
        ranks: processes of the engine that hold weights.
        trainers: ranks of the trainers on a colocated engine's GPUs, in the order of the engine's ranks.
    """

    def __init__(
        self,
        handle: ActorHandle,
        *,
        deadline_s: float,
        ranks: int = 1,
        trainers: Sequence[int] = (),
    ) -> None:
        self.handle = handle
        self.actor = handle.actor
        self.name = handle.name
        self.deadline_s = deadline_s
        self.ids = itertools.count()
        self.waiting: dict[int, asyncio.Future[Sample]] = {}
        self.outbox: list[Request] = []
        self.collector: asyncio.Task[None] | None = None
        self.received = 0
        """Answers so far."""
        self.ranks, self.trainers = ranks, trainers
        self.max_concurrent = 0
        """Most requests that the engine runs at once, when it has started."""

    async def start(self, spec: EngineSpec, deadline_s: float, log: str | None = None) -> None:
        """Load the engine. Raises ``ModelError``, ``ConfigError``, ``WorkerError`` or ``DeadlineError``.

        Args:
            log: gets its output from now on; None: Ray keeps it.
        """
        await wait_until_up([self.handle], deadline_s)
        if log is not None:
            self.handle.process = await answer(self.actor.write_to.remote(log), self.handle, "start", deadline_s)
        self.max_concurrent = await answer(self.actor.start.remote(spec), self.handle, "start", deadline_s)

    @property
    def node(self) -> str:
        """The node of the engine, which has been started."""
        assert self.handle.process is not None
        return self.handle.process.node

    async def generate(self, prompt_ids: Ids, params: SamplingParams, images: Sequence[PlacedImage] = ()) -> Sample:
        loop = asyncio.get_running_loop()
        request_id = next(self.ids)
        future: asyncio.Future[Sample] = loop.create_future()
        self.waiting[request_id] = future
        if not self.outbox:
            loop.call_soon(self._flush)
        self.outbox.append((request_id, np.asarray(prompt_ids, np.int32).tobytes(), params, tuple(images)))
        if len(self.outbox) == _FULL:
            self._flush()
        try:
            return await future
        except asyncio.CancelledError:
            if self.waiting.pop(request_id, None) is not None:
                self.actor.abort.remote([request_id])
            raise

    def _flush(self) -> None:
        requests, self.outbox = self.outbox, []
        # A request that was cancelled meanwhile may still be in `waiting`, until its task runs.
        wanted = [r for r in requests if (future := self.waiting.get(r[0])) is not None and not future.done()]
        if not wanted:
            return
        self.actor.submit.remote(tuple(wanted))  # a failure to submit shows as silence or death in collect
        if self.collector is None or self.collector.done():
            self.collector = asyncio.get_running_loop().create_task(self._collect())

    async def _collect(self) -> None:
        """Pass answers on to the requests that wait, until none does."""
        try:
            while self.waiting:
                ref = self.actor.collect.remote(self.received)
                answers: tuple[Answer, ...] = await answer(ref, self.handle, "generation", self.handle.silence_s)
                self.received += len(answers)
                for request_id, result in answers:
                    future = self.waiting.pop(request_id, None)
                    if future is None or future.done():
                        continue
                    if isinstance(result, Sample):
                        future.set_result(result)
                    else:
                        future.set_exception(result)
        except PosttrainError as error:
            waiting, self.waiting = self.waiting, {}
            for future in waiting.values():
                if not future.done():
                    future.set_exception(error)

    async def sleep(self) -> None:
        """Free the GPU. Requests that run return with ``abort``; new ones wait for the next update."""
        await answer(self.actor.sleep.remote(), self.handle, "sleep", min(_MEMORY_S, self.deadline_s))

    async def wake(self) -> None:
        """Allocate memory for the weights of an update, if the engine sleeps."""
        await answer(self.actor.wake.remote(), self.handle, "wake", min(_MEMORY_S, self.deadline_s))

    async def load_bucket(self, bucket: Bucket, data: Any = None) -> None:
        """Load a trainer's bucket. ``data`` refers to its bytes where the trainer is on another node."""
        await self._answer(self.actor.load_bucket.remote(bucket, data), "load_bucket")

    async def finish_update(self, version: int, check: Sequence[Ids] = ()) -> list[list[float]]:
        """Count as ``version`` once all buckets are loaded, and return the scores of the ``check`` sequences."""
        ref = self.actor.finish_update.remote(version, _int32(check))
        result: list[list[float]] = await self._answer(ref, "finish_update")
        return result

    async def score(self, sequences: Sequence[Ids]) -> list[list[float]]:
        result: list[list[float]] = await self._answer(self.actor.score.remote(_int32(sequences)), "score")
        return result

    async def close(self) -> None:
        await answer(self.actor.close.remote(), self.handle, "close", _CLOSE_S)

    async def _answer(self, ref: Any, what: str) -> Any:
        return await answer(ref, self.handle, what, self.deadline_s)


def _int32(sequences: Sequence[Ids]) -> list[npt.NDArray[np.int32]]:
    return [np.asarray(s, np.int32) for s in sequences]
