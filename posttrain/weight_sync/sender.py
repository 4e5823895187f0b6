"""The sending side of a weight update in a trainer's process: transfer buffers, and the sender that fills them.

A sender fills one buffer while engines read the other, so an update takes the memory of two buckets.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from posttrain.core.sizes import HOST_BUCKET_BYTES
from posttrain.models.fp8 import sent_type
from posttrain.weight_sync.broadcast import BroadcastConnection, BroadcastGroup, BroadcastRank, RankLost
from posttrain.weight_sync.buckets import CPU, Bucket, Entry, views

_ALIGNMENT = 64


@dataclass(frozen=True)
class SharedGpu:
    """Engines read buckets in the memory of the GPU that fills them."""

    readers: int
    """Processes that do. Each has a handle of its own, as torch frees memory when every handle was used once."""


Transport = SharedGpu | Literal["host"] | BroadcastGroup
"""How engines read a bucket: in the memory of the GPU that fills it, in host memory, or by broadcast."""


class TransferBuffer(ABC):
    """Memory that is filled with tensors again and again."""

    def __init__(self) -> None:
        self.flat = torch.empty(0, dtype=torch.uint8)
        self.entries: list[Entry] = []
        self.end = 0

    def begin(self, size: int) -> None:
        """Empty the buffer, and provide ``size`` bytes. Nobody reads its last content any more."""
        self.entries.clear()
        self.end = 0
        if size > self.flat.numel():
            self.flat = self.allocate(size)

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        """Append a copy of a tensor, as ``dtype``."""
        start = -(-self.end // _ALIGNMENT) * _ALIGNMENT
        self.end = start + tensor.numel() * dtype.itemsize
        entry = (name, str(dtype).removeprefix("torch."), tuple(tensor.shape), start)
        self.entries.append(entry)
        for _, view in views(self.flat, [entry]):
            view.copy_(tensor)

    @abstractmethod
    def allocate(self, size: int) -> Tensor:
        """Return [size] bytes, which replace those before."""

    @abstractmethod
    def bucket(self) -> Bucket:
        """Return the description of the content, for those who read it."""

    def close(self) -> None:
        """Free the memory."""
        self.flat = torch.empty(0, dtype=torch.uint8)


class HostBuffer(TransferBuffer):
    """A file in memory without a name, which other processes of the same user open through this process's descriptor.
    The kernel frees it when no process holds it any more, however that ends."""

    def __init__(self) -> None:
        super().__init__()
        self._descriptor = os.memfd_create("posttrain-weights")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def allocate(self, size: int) -> Tensor:
        os.ftruncate(self._descriptor, size)
        return torch.from_file(self.path, shared=True, size=size, dtype=torch.uint8)

    def bucket(self) -> Bucket:
        return Bucket(tuple(self.entries), path=self.path)

    def close(self) -> None:
        super().close()
        os.close(self._descriptor)


class DeviceBuffer(TransferBuffer):
    """Memory of a GPU, which so many other processes on the same GPU open."""

    def __init__(self, device: torch.device, readers: int) -> None:
        super().__init__()
        self.device, self.readers = device, readers

    def allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def bucket(self) -> Bucket:
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.synchronize(self.device)  # other processes do not wait for our streams
        return Bucket(tuple(self.entries), handles=tuple(reduce_tensor(self.flat) for _ in range(self.readers)))


class BroadcastBuffer(TransferBuffer):
    """Memory that is broadcast to a group. A group that breaks raises nothing here: the other ranks of the trainer must
    not wait for this one, and the receivers report the loss."""

    def __init__(self, group: BroadcastGroup, device: torch.device, connection: BroadcastConnection) -> None:
        super().__init__()
        self.group, self.device, self.connection = group, device, connection
        self.sending: tuple[BroadcastRank, Any] | None = None

    def allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def begin(self, size: int) -> None:
        self._wait_sent()
        super().begin(size)

    def bucket(self) -> Bucket:
        return Bucket(tuple(self.entries), group=self.group, first_rank=1, size=self.end)

    def send(self) -> None:
        """Start to broadcast the content. The first call for a group waits for all of its ranks."""
        with contextlib.suppress(RankLost):
            rank = self.connection.join(self.group, 0, self.device)
            self.sending = rank, rank.start(self.flat[: self.end])

    def _wait_sent(self) -> None:
        if self.sending is not None:
            rank, work = self.sending
            self.sending = None
            with contextlib.suppress(RankLost):
                rank.wait(work)

    def close(self) -> None:
        self._wait_sent()
        super().close()


class WeightSender:
    """Hands out weights bucket by bucket, from two transfer buffers in turn.

    Args:
        weights: names and whole weights. Drawing one is a collective where the model is sharded.
        dtype: the type in which they are handed out; quantized ones and their scales keep their own.
        transport: None: nobody reads this process's buckets, and it draws weights for the sake of the other ranks.
        device: of this process.
        bucket_bytes: most bytes of a bucket of several weights.
        connection: of this process, for broadcasts; None: one of this sender's own.
    """

    def __init__(
        self,
        weights: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype,
        transport: Transport | None,
        device: torch.device = CPU,
        *,
        bucket_bytes: int = HOST_BUCKET_BYTES,
        connection: BroadcastConnection | None = None,
    ) -> None:
        self._weights = iter(weights)
        self._dtype, self._bytes = dtype, bucket_bytes
        connection = connection or BroadcastConnection()
        self._buffers = [] if transport is None else [_buffer(transport, device, connection) for _ in range(2)]
        self._update, self._numbers = uuid.uuid4().hex, itertools.count()
        self._held: tuple[str, Tensor] | None = None
        """Drawn, and too large for the last bucket."""

    def next(self, slot: int) -> Bucket | None:
        """Fill buffer ``slot``, 0 or 1, which nobody reads any more, and return its bucket; None when no weights are
        left. Without a transport the bucket has no entries."""
        buffer = self._buffers[slot] if self._buffers else None
        drawn = size = 0
        while (found := self._held or next(self._weights, None)) is not None:
            self._held = None
            name, tensor = found
            dtype = sent_type(name, tensor, self._dtype)
            nbytes = -(-tensor.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
            if drawn and size + nbytes > self._bytes:
                self._held = found
                break
            if buffer is not None:
                if not drawn:
                    buffer.begin(max(nbytes, self._bytes))
                buffer.add(name, tensor, dtype)
            drawn += 1
            size += nbytes
        if not drawn:
            return None
        bucket = Bucket(()) if buffer is None else buffer.bucket()
        return replace(bucket, update=self._update, number=next(self._numbers))

    def send(self, slot: int) -> None:
        """Start to broadcast buffer ``slot``."""
        buffer = self._buffers[slot]
        assert isinstance(buffer, BroadcastBuffer)
        buffer.send()

    def close(self) -> None:
        """Free the buffers. Nobody reads them any more."""
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()


def _buffer(transport: Transport, device: torch.device, connection: BroadcastConnection) -> TransferBuffer:
    """Return an empty buffer for a process whose GPU is ``device``."""
    if isinstance(transport, BroadcastGroup):
        return BroadcastBuffer(transport, device, connection)
    return DeviceBuffer(device, transport.readers) if isinstance(transport, SharedGpu) else HostBuffer()
