"""Both ends of a weight update as the driver sees them: the trainers that send, and the engines that receive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from posttrain.core.errors import PROCESS_FAILURES, PosttrainError
from posttrain.core.types import Ids
from posttrain.weight_sync.buckets import Bucket
from posttrain.weight_sync.sender import Transport


class WeightSource(Protocol):
    """A group of trainers, whose ranks hold shards of the weights."""

    role: str

    @property
    def world_size(self) -> int: ...

    @property
    def node(self) -> str:
        """The node of rank 0."""
        ...

    async def check_finite(self, consequence: str) -> None:
        """Raise ``RunError``, which tells the ``consequence``, where a weight is not finite."""
        ...

    async def score(self, sequences: Sequence[Ids]) -> Tensor:
        """Return the log-probabilities at temperature 1 of the sequences' tokens, one after the other [T]; 0 for the
        first token of each."""
        ...

    async def open_sender(self, transports: Sequence[Transport | None], bucket_bytes: int, frozen: bool = True) -> None:
        """Begin to hand out the whole weights, from each rank by its transport (see ``WeightSender``); without
        ``frozen`` those alone that training may have changed."""
        ...

    async def next_bucket(self, slot: int) -> list[Bucket] | None:
        """Return the next bucket of every rank, in buffer ``slot`` of two; None when no weights are left."""
        ...

    async def put_bucket(self, bucket: Bucket) -> Any:
        """Return a reference to the bytes of rank 0's bucket, which other nodes can read."""
        ...

    async def send_bucket(self, slot: int) -> None:
        """Have rank 0 start to broadcast its buffer ``slot``."""
        ...

    async def close_sender(self) -> float:
        """Free the buffers. Returns the GiB that all processes used of the fullest GPU until then; 0 on a CPU."""
        ...


class WeightReceiver(Protocol):
    """One engine."""

    name: str
    ranks: int
    """Processes of the engine that hold weights."""
    trainers: Sequence[int]
    """Ranks of the trainers on the engine's GPUs, in the order of the engine's ranks; empty: it has GPUs of its own."""

    @property
    def node(self) -> str: ...

    async def wake(self) -> None:
        """Make memory for weights available, if the engine sleeps."""
        ...

    async def load_bucket(self, bucket: Bucket, data: Any = None) -> None:
        """Load a bucket; ``data`` refers to its bytes where they lie on another node."""
        ...

    async def finish_update(self, version: int, check: Sequence[Ids]) -> list[list[float]]:
        """Count as ``version`` once all buckets are loaded. Returns the scores of the ``check`` sequences."""
        ...


R = TypeVar("R", bound=WeightReceiver)


class Receivers(Generic[R]):
    """The engines of one update, and those of them that were lost on the way."""

    def __init__(self, receivers: Sequence[R]) -> None:
        self.living = list(receivers)
        self.lost: list[tuple[R, PosttrainError]] = []

    async def each(self, call: Callable[[R], Awaitable[None]]) -> None:
        """Call all that live, concurrently. One that turns out to be dead moves to ``lost``."""

        async def one(receiver: R) -> None:
            try:
                await call(receiver)
            except PROCESS_FAILURES as error:
                if receiver in self.living:  # else the bucket before has told
                    self.lost.append((receiver, error))
                    self.living.remove(receiver)

        await asyncio.gather(*(one(receiver) for receiver in list(self.living)))
