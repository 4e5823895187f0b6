"""The transfers of weights from trainers to engines: on the GPUs that they share, through host memory, or by
broadcast."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from posttrain.config import ClusterConfig
from posttrain.core.errors import PROCESS_FAILURES
from posttrain.core.sizes import DEVICE_BUCKET_BYTES, HOST_BUCKET_BYTES, SENT_BUCKET_BYTES
from posttrain.weight_sync.broadcast import BroadcastRendezvous, RankLost
from posttrain.weight_sync.buckets import Bucket
from posttrain.weight_sync.endpoints import Receivers, WeightReceiver, WeightSource
from posttrain.weight_sync.sender import SharedGpu, Transport


class WeightTransfer(ABC):
    """A way from trainers to some engines."""

    bucket_bytes: int
    """Most bytes of a bucket: large, as each bucket costs every process a message and an answer."""

    def __init__(self, source: WeightSource, receivers: Sequence[WeightReceiver]) -> None:
        self.source = source
        self.receivers = list(receivers)
        self.broken: str | None = None
        """Why the update of all engines has stopped: one was lost, or did not get what was sent."""

    @abstractmethod
    def transports(self) -> list[Transport | None]:
        """Return the transport of each trainer rank's buckets."""

    @abstractmethod
    async def deliver(self, slot: int, buckets: Sequence[Bucket], receivers: Receivers[Any]) -> None:
        """Have all receivers load the buckets in buffer ``slot``, one bucket of each rank with the same weights."""


class DeviceTransfer(WeightTransfer):
    """Engines read the buckets of the trainers whose GPUs they share (CUDA IPC)."""

    bucket_bytes = DEVICE_BUCKET_BYTES

    def __init__(self, source: WeightSource, receivers: Sequence[WeightReceiver]) -> None:
        super().__init__(source, receivers)
        self._readers = Counter[int]()
        """By rank of the trainer: engines that read its buckets."""
        self._own: dict[WeightReceiver, list[tuple[int, int]]] = {}
        """For each rank of an engine: the trainer's rank, and which of the handles of its buckets."""
        for receiver in receivers:
            self._own[receiver] = [(rank, self._readers[rank]) for rank in receiver.trainers]
            self._readers.update(receiver.trainers)

    def transports(self) -> list[Transport | None]:
        counts = [self._readers[rank] for rank in range(self.source.world_size)]
        return [SharedGpu(readers) if readers else None for readers in counts]

    async def deliver(self, slot: int, buckets: Sequence[Bucket], receivers: Receivers[Any]) -> None:
        async def load(receiver: WeightReceiver) -> None:
            own = self._own[receiver]
            handles = tuple(buckets[rank].handles[reader] for rank, reader in own)
            await receiver.load_bucket(replace(buckets[own[0][0]], handles=handles))

        await receivers.each(load)


class HostTransfer(WeightTransfer):
    """All engines read rank 0's buckets in the memory of its node; those on other nodes get a copy through Ray."""

    bucket_bytes = HOST_BUCKET_BYTES

    def transports(self) -> list[Transport | None]:
        return ["host", *[None] * (self.source.world_size - 1)]

    async def deliver(self, slot: int, buckets: Sequence[Bucket], receivers: Receivers[Any]) -> None:
        elsewhere = {receiver for receiver in self.receivers if receiver.node != self.source.node}
        data = await self.source.put_bucket(buckets[0]) if elsewhere else None

        async def load(receiver: WeightReceiver) -> None:
            await receiver.load_bucket(buckets[0], data if receiver in elsewhere else None)

        await receivers.each(load)


class BroadcastTransfer(WeightTransfer):
    """Rank 0 broadcasts its buckets to all processes of all engines.

    Args:
        host: address of this process, at which the ranks of the group meet.
        deadline_s: longest wait for one bucket.
    """

    bucket_bytes = SENT_BUCKET_BYTES  # every receiver holds one more

    def __init__(self, source: WeightSource, receivers: Sequence[WeightReceiver], host: str, deadline_s: float) -> None:
        super().__init__(source, receivers)
        self._first: dict[WeightReceiver, int] = {}
        size = 1
        for receiver in receivers:
            self._first[receiver] = size
            size += receiver.ranks
        self._rendezvous = BroadcastRendezvous(host, size, deadline_s)

    def transports(self) -> list[Transport | None]:
        return [self._rendezvous.group, *[None] * (self.source.world_size - 1)]

    async def deliver(self, slot: int, buckets: Sequence[Bucket], receivers: Receivers[Any]) -> None:
        async def load(receiver: WeightReceiver) -> None:
            try:
                await receiver.load_bucket(replace(buckets[0], first_rank=self._first[receiver]))
            except RankLost as error:  # another rank was lost, or this engine cannot receive
                self._stop(receiver.name, f"{receiver.name}: {error.message}")
            except PROCESS_FAILURES as error:
                self._stop(receiver.name, error.message)
                raise

        sending = asyncio.create_task(self.source.send_bucket(slot))  # it waits for those who load
        try:
            await receivers.each(load)
            await sending
        except BaseException:  # an engine refuses the weights, or the run is stopped: nobody is to wait for the rest
            self._stop("the update", "it was given up")
            sending.cancel()
            raise

    def _stop(self, who: str, why: str) -> None:
        """End the broadcast for all ranks."""
        self.broken = self.broken or why
        self._rendezvous.announce_loss(who)


class TransferChooser:
    """Chooses the transfer of an update, and keeps the process group of broadcasts from one update to the next.

    Args:
        device: of trainers and engines, cpu or cuda.
        host: address of this process for the ranks of a broadcast.
    """

    def __init__(self, cfg: ClusterConfig, device: str, host: str) -> None:
        self._cfg, self._device, self._host = cfg, device, host
        self._last: BroadcastTransfer | None = None

    def choose(self, source: WeightSource, receivers: Sequence[WeightReceiver]) -> WeightTransfer:
        """Return the transfer from ``source`` to ``receivers`` that the config and their devices ask for."""
        if self._cfg.weight_transfer == "host":
            return HostTransfer(source, receivers)
        if self._cfg.weight_transfer == "auto":
            if receivers and all(receiver.trainers for receiver in receivers):
                return DeviceTransfer(source, receivers)
            if self._device == "cpu":
                return HostTransfer(source, receivers)
        last = self._last
        if last is None or last.broken or last.source is not source or last.receivers != list(receivers):
            last = self._last = BroadcastTransfer(source, receivers, self._host, self._cfg.silence_deadline_s)
        return last
