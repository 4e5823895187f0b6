"""Buckets: many weights side by side in memory that another process reads.

A bucket lies in host memory or in a GPU's memory that other processes of the machine open, or it is broadcast.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.weight_sync.broadcast import BroadcastConnection, BroadcastGroup

CPU = torch.device("cpu")

Entry = tuple[str, str, tuple[int, ...], int]
"""(name, type as in ``torch.NAME``, shape, offset in bytes)"""
Handle = tuple[Any, tuple[Any, ...]]
"""A GPU's memory as torch.multiprocessing passes it on: a function, and its arguments."""


@dataclass(frozen=True)
class Bucket:
    """The description of a bucket, which is sent to the processes that read it."""

    entries: tuple[Entry, ...]
    update: str = ""
    """The unique name of the weight update that it belongs to."""
    number: int = 0
    """Its position in the update."""
    path: str | None = None
    """A file in memory, which exists while the process that fills it keeps it open."""
    handles: tuple[Handle, ...] = ()
    """As a trainer's rank gives it: the bytes on its GPU, once for each process that reads them. As an engine gets it:
    the same bytes on the GPUs of its ranks, in their order."""
    group: BroadcastGroup | None = None
    """The bytes are broadcast to this group, once."""
    first_rank: int = 0
    """The engine's first rank in that group."""
    size: int = 0
    """Bytes that are broadcast."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, _, shape, _ in self.entries}


class BucketReader:
    """Reads buckets in one process of an engine.

    Args:
        rank: of this process among the engine's.
        device: receives what is broadcast, and opens what lies on a GPU.
    """

    def __init__(self, rank: int = 0, device: torch.device = CPU) -> None:
        self.rank, self.device = rank, device
        self._connection = BroadcastConnection()

    def tensors(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        """Return names and tensors, views into the bucket's bytes, to be copied. Waits for bytes that are broadcast.

        Raises:
            RankLost: they do not come.
        """
        return views(self._open(bucket), bucket.entries)

    def _open(self, bucket: Bucket) -> Tensor:
        if bucket.path is not None:
            return mapped(bucket.path)
        if bucket.group is not None:
            rank = self._connection.join(bucket.group, bucket.first_rank + self.rank, self.device)
            return rank.receive(bucket.size)
        rebuild, arguments = device_handle(bucket.handles[self.rank], self.device.index or 0)
        flat: Tensor = rebuild(*arguments)
        return flat


_DEVICE_ARGUMENT = 6
"""The position of ``storage_device`` among the arguments of torch.multiprocessing.reductions.rebuild_cuda_tensor."""


def device_handle(handle: Handle, device: int) -> Handle:
    """Return the handle for a process in which the GPU has the index ``device``, whatever its index in the trainer."""
    rebuild, arguments = handle
    return rebuild, tuple(device if i == _DEVICE_ARGUMENT else a for i, a in enumerate(arguments))


def mapped(path: str) -> Tensor:
    """Return the [bytes] of a file, mapped into memory."""
    size = os.path.getsize(path)
    return torch.from_file(path, shared=False, size=size, dtype=torch.uint8) if size else torch.empty(0)


def views(flat: Tensor, entries: Iterable[Entry]) -> Iterator[tuple[str, Tensor]]:
    """Return names and tensors, views into ``flat`` [bytes]."""
    for name, kind, shape, offset in entries:
        dtype: torch.dtype = getattr(torch, kind)
        part = flat[offset : offset + math.prod(shape) * dtype.itemsize]
        yield name, part.view(dtype).view(shape)
