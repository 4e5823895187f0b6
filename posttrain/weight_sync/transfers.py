"""The ways from trainers' weights to engines: on the GPUs that they share, through host memory, or by broadcast."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import ray

from posttrain.cluster.samplers import RemoteSampler
from posttrain.cluster.trainers import TrainerGroup
from posttrain.config import ClusterConfig
from posttrain.core.sizes import DEVICE_BUCKET_BYTES, HOST_BUCKET_BYTES, SENT_BUCKET_BYTES
from posttrain.rollout.pool import DEAD
from posttrain.weight_sync.broadcast import Meeting, MemberLost
from posttrain.weight_sync.buckets import Bucket, Where


class Loader(Protocol):
    """Loads a bucket into one sampler."""

    async def __call__(self, sampler: RemoteSampler) -> None: ...


class Readers(Protocol):
    """Those that read a bucket."""

    async def each(self, call: Loader) -> None:
        """Call all that live, at the same time; one that turns out to be dead does not live any more."""
        ...


class Route(ABC):
    """A way from a trainer to some samplers."""

    bucket_bytes: int
    """Most bytes of a bucket: large, as each costs every process a message and an answer."""

    def __init__(self, actor: TrainerGroup, samplers: Sequence[RemoteSampler]) -> None:
        self.actor = actor
        self.samplers = list(samplers)
        self.broken: str | None = None
        """Why the update of all has stopped: one was lost, or did not get what was sent."""

    @abstractmethod
    def where(self) -> list[Where | None]:
        """The buckets of each rank are read."""

    @abstractmethod
    async def read(self, slot: int, buckets: Sequence[Bucket], readers: Readers) -> None:
        """All load the buckets in place ``slot``, one of each rank with the same weights."""


class OnTheGPU(Route):
    """Engines read the buckets of the trainers whose GPUs they share (CUDA IPC)."""

    bucket_bytes = DEVICE_BUCKET_BYTES

    def where(self) -> list[Where | None]:
        used = {rank for sampler in self.samplers for rank in sampler.trainers}
        return ["device" if rank in used else None for rank in range(len(self.actor.actors))]

    async def read(self, slot: int, buckets: Sequence[Bucket], readers: Readers) -> None:
        async def load(sampler: RemoteSampler) -> None:
            mine = [buckets[rank] for rank in sampler.trainers]
            await sampler.load_bucket(replace(mine[0], handles=tuple(bucket.handles[0] for bucket in mine)))

        await readers.each(load)


class ThroughTheHost(Route):
    """All read rank 0's buckets in the memory of its node; those on other nodes get a copy through Ray."""

    bucket_bytes = HOST_BUCKET_BYTES

    def where(self) -> list[Where | None]:
        return ["host", *[None] * (len(self.actor.actors) - 1)]

    async def read(self, slot: int, buckets: Sequence[Bucket], readers: Readers) -> None:
        elsewhere = {sampler for sampler in self.samplers if sampler.process.node != self.actor.node}
        data = await self.actor.put_bucket(buckets[0]) if elsewhere else None

        async def load(sampler: RemoteSampler) -> None:
            await sampler.load_bucket(buckets[0], data if sampler in elsewhere else None)

        await readers.each(load)


class ByBroadcast(Route):
    """Rank 0 sends its buckets to all processes of all engines."""

    bucket_bytes = SENT_BUCKET_BYTES  # there is room for one more at each receiver

    def __init__(self, actor: TrainerGroup, samplers: Sequence[RemoteSampler], deadline_s: float) -> None:
        super().__init__(actor, samplers)
        self._first: dict[RemoteSampler, int] = {}
        size = 1
        for sampler in samplers:
            self._first[sampler] = size
            size += sampler.ranks
        self._meeting = Meeting(ray.util.get_node_ip_address(), size, deadline_s)

    def where(self) -> list[Where | None]:
        return [self._meeting.group, *[None] * (len(self.actor.actors) - 1)]

    async def read(self, slot: int, buckets: Sequence[Bucket], readers: Readers) -> None:
        async def load(sampler: RemoteSampler) -> None:
            try:
                await sampler.load_bucket(replace(buckets[0], first_rank=self._first[sampler]))
            except MemberLost as error:  # somebody else, or it cannot receive
                self._stop(sampler.name, f"{sampler.name}: {error.message}")
            except DEAD as error:
                self._stop(sampler.name, error.message)
                raise

        sending = asyncio.create_task(self.actor.send_bucket(slot))  # it waits for those who load
        try:
            await readers.each(load)
            await sending
        except BaseException:  # an engine refuses the weights, or the run is stopped: nobody is to wait for the rest
            self._stop("the update", "it was given up")
            sending.cancel()
            raise

    def _stop(self, who: str, why: str) -> None:
        """Nobody waits for the rest of the broadcast."""
        self.broken = self.broken or why
        self._meeting.announce_loss(who)


class Router:
    """Chooses the route of an update."""

    def __init__(self, cfg: ClusterConfig, device: str) -> None:
        self._cfg, self._device = cfg, device
        self._last: ByBroadcast | None = None

    def route(self, actor: TrainerGroup, samplers: Sequence[RemoteSampler]) -> Route:
        """From ``actor`` to ``samplers``. A group for broadcasts is used as long as it has the right members."""
        if self._cfg.weight_transfer == "host":
            return ThroughTheHost(actor, samplers)
        if self._cfg.weight_transfer == "auto":
            if samplers and all(sampler.trainers for sampler in samplers):
                return OnTheGPU(actor, samplers)
            if self._device == "cpu":
                return ThroughTheHost(actor, samplers)
        last = self._last
        if last is None or last.broken or last.actor is not actor or last.samplers != list(samplers):
            last = self._last = ByBroadcast(actor, samplers, self._cfg.silence_deadline_s)
        return last
