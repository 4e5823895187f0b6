"""Weights side by side in memory, for other processes: a file in memory or a GPU's memory that those of this machine
can read, or bytes that are sent.

A trainer fills a bucket while engines read the one before (``Outlet``), so two of them are all the memory it takes.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from posttrain.weight_sync.broadcast import BroadcastGroup, Member, MemberLost

_ALIGNMENT = 64
CPU = torch.device("cpu")

Entry = tuple[str, str, tuple[int, ...], int]
"""(name, type as in ``torch.NAME``, shape, offset in bytes)"""
Handle = tuple[Any, tuple[Any, ...]]
"""Of memory of a GPU, as torch.multiprocessing passes it on: a function, and its arguments."""


@dataclass(frozen=True)
class Bucket:
    """What lies where. It can be sent to another process, which reads it until it says that it is done."""

    entries: tuple[Entry, ...]
    update: str = ""
    """The one it belongs to, which no other is called like."""
    number: int = 0
    """In its update."""
    path: str | None = None
    """A file in memory, while the process that fills it keeps it open."""
    handles: tuple[Handle, ...] = ()
    """The same bytes on several GPUs, in the order of an engine's ranks."""
    group: BroadcastGroup | None = None
    """The bytes are sent to this group; so they are there once."""
    first_rank: int = 0
    """In that group, of an engine's ranks."""
    size: int = 0
    """Bytes that are sent."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, _, shape, _ in self.entries}

    def open(self, rank: int, device: torch.device) -> Tensor:
        """[bytes] for rank ``rank`` of an engine. Waits for those that are sent.

        Raises:
            MemberLost: they do not come.
        """
        if self.path is not None:
            return mapped(self.path)
        if self.group is not None:
            return Member.of(self.group, self.first_rank + rank, device).receive(self.size)
        rebuild, arguments = device_handle(self.handles[rank], device.index or 0)
        flat: Tensor = rebuild(*arguments)
        return flat

    def tensors(self, rank: int = 0, device: torch.device = CPU) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors: views into what ``open`` gives, to be copied."""
        return views(self.open(rank, device), self.entries)


_DEVICE_ARGUMENT = 6
"""Of torch.multiprocessing.reductions.rebuild_cuda_tensor: ``storage_device``."""


def device_handle(handle: Handle, device: int) -> Handle:
    """For a process that calls the GPU ``device``, whatever the trainer calls it."""
    rebuild, arguments = handle
    return rebuild, tuple(device if i == _DEVICE_ARGUMENT else a for i, a in enumerate(arguments))


def mapped(path: str) -> Tensor:
    """[bytes] of a file."""
    size = os.path.getsize(path)
    return torch.from_file(path, shared=False, size=size, dtype=torch.uint8) if size else torch.empty(0)


def views(flat: Tensor, entries: Iterable[Entry]) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors that lie in ``flat`` [bytes]."""
    for name, kind, shape, offset in entries:
        dtype: torch.dtype = getattr(torch, kind)
        part = flat[offset : offset + math.prod(shape) * dtype.itemsize]
        yield name, part.view(dtype).view(shape)


class Place(ABC):
    """Memory that is filled with tensors again and again."""

    def __init__(self) -> None:
        self.flat = torch.empty(0, dtype=torch.uint8)
        self.entries: list[Entry] = []
        self.end = 0

    def begin(self, size: int) -> None:
        """Make room for so many bytes. What it held is not read any more."""
        self.entries.clear()
        self.end = 0
        if size > self.flat.numel():
            self.flat = self.memory(size)

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        """Copy a tensor behind those before."""
        start = -(-self.end // _ALIGNMENT) * _ALIGNMENT
        self.end = start + tensor.numel() * dtype.itemsize
        entry = (name, str(dtype).removeprefix("torch."), tuple(tensor.shape), start)
        self.entries.append(entry)
        for _, view in views(self.flat, [entry]):
            view.copy_(tensor)

    @abstractmethod
    def memory(self, size: int) -> Tensor:
        """[size] bytes, instead of those before."""

    @abstractmethod
    def bucket(self) -> Bucket:
        """What it holds, for others to read."""

    def close(self) -> None:
        """Give the memory back."""
        self.flat = torch.empty(0, dtype=torch.uint8)


class HostFile(Place):
    """A file in memory without a name, which other processes of the same user open through this process's descriptor.
    It ends with the last process that holds it, however that ends."""

    def __init__(self) -> None:
        super().__init__()
        self._descriptor = os.memfd_create("posttrain-weights")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def memory(self, size: int) -> Tensor:
        os.ftruncate(self._descriptor, size)
        return torch.from_file(self.path, shared=True, size=size, dtype=torch.uint8)

    def bucket(self) -> Bucket:
        return Bucket(tuple(self.entries), path=self.path)

    def close(self) -> None:
        super().close()
        os.close(self._descriptor)


class DeviceBuffer(Place):
    """Memory of a GPU, which other processes on the same GPU open."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def bucket(self) -> Bucket:
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.synchronize(self.device)  # other processes do not wait for our streams
        return Bucket(tuple(self.entries), handles=(reduce_tensor(self.flat),))


class SentBuffer(Place):
    """Memory that is sent to all of a group. A group that breaks ends it without an error: the other ranks of the
    trainer must not wait for this one, and whoever reads tells."""

    def __init__(self, group: BroadcastGroup, device: torch.device) -> None:
        super().__init__()
        self.group, self.device = group, device
        self.sending: tuple[Member, Any] | None = None

    def memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def begin(self, size: int) -> None:
        self._sent()
        super().begin(size)

    def bucket(self) -> Bucket:
        return Bucket(tuple(self.entries), group=self.group, first_rank=1, size=self.end)

    def send(self) -> None:
        """Begin to send what it holds. The first time, wait for the group."""
        with contextlib.suppress(MemberLost):
            member = Member.of(self.group, 0, self.device)
            self.sending = member, member.start(self.flat[: self.end])

    def _sent(self) -> None:
        if self.sending is not None:
            member, work = self.sending
            self.sending = None
            with contextlib.suppress(MemberLost):
                member.wait(work)

    def close(self) -> None:
        self._sent()
        super().close()


Where = Literal["device", "host"] | BroadcastGroup
"""Where others read a bucket: on the GPU that fills it, in host memory, or wherever they are."""


def new_place(where: Where, device: torch.device) -> Place:
    """For a process whose GPU is ``device``."""
    if isinstance(where, BroadcastGroup):
        return SentBuffer(where, device)
    return DeviceBuffer(device) if where == "device" else HostFile()


class Outlet:
    """Hands out weights bucket by bucket, from two places in turn.

    Args:
        weights: names and whole weights. Drawing one is a collective where the model is sharded.
        dtype: what they are handed out as.
        where: they are read; None: nobody reads this process's buckets, and weights are drawn for the sake of the
            others.
        device: of this process.
        bucket_bytes: most bytes of a bucket of several weights.
    """

    def __init__(
        self,
        weights: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype,
        where: Where | None,
        device: torch.device = CPU,
        *,
        bucket_bytes: int = 512 << 20,
    ) -> None:
        self._weights = iter(weights)
        self._dtype, self._bytes = dtype, bucket_bytes
        self._places: list[Place] = [] if where is None else [new_place(where, device) for _ in range(2)]
        self._update, self._numbers = uuid.uuid4().hex, itertools.count()
        self._held: tuple[str, Tensor] | None = None
        """Drawn, and too large for the bucket before."""

    def next(self, slot: int) -> Bucket | None:
        """The next bucket, in place ``slot``, which nobody reads any more; None: there is none. Where nobody reads, one
        without entries."""
        place = self._places[slot] if self._places else None
        drawn = size = 0
        while (found := self._held or next(self._weights, None)) is not None:
            self._held = None
            name, tensor = found
            nbytes = -(-tensor.numel() * self._dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
            if drawn and size + nbytes > self._bytes:
                self._held = found
                break
            if place is not None:
                if not drawn:
                    place.begin(max(nbytes, self._bytes))
                place.add(name, tensor, self._dtype)
            drawn += 1
            size += nbytes
        if not drawn:
            return None
        bucket = Bucket(()) if place is None else place.bucket()
        return replace(bucket, update=self._update, number=next(self._numbers))

    def send(self, slot: int) -> None:
        """Begin to send the bucket in place ``slot``, of an outlet whose buckets are sent, and return."""
        place = self._places[slot]
        assert isinstance(place, SentBuffer)
        place.send()

    def close(self) -> None:
        """Give the memory back. Nobody reads any more."""
        for place in self._places:
            place.close()
        self._places.clear()
