"""A trainer with one real worker in the process of the test."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch.distributed as dist

from posttrain.cluster.actors import ActorHandle
from posttrain.cluster.trainers import TrainerGroup
from posttrain.train.spec import WorkerSpec
from posttrain.train.worker import TrainWorker


class LocalGroup(TrainerGroup):
    """A real worker in this process, in the place of one in a Ray actor."""

    worker: TrainWorker

    async def call(self, method: str, per_worker: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        return [getattr(self.worker, method)(*(per_worker or [()])[0])]

    async def saved(self) -> dict[str, Any] | None:
        return self.worker.saved()


class NoCluster:
    """A cluster without processes, for a loop whose trainer is in the process of the test."""

    def __init__(self, *_: object) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...


@contextmanager
def local_trainer(spec: WorkerSpec, tokens_per_microbatch: int = 16384) -> Iterator[LocalGroup]:
    """Start the worker, in a process group of one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    worker = TrainWorker(spec, 0, 1)
    made = LocalGroup("actor", [ActorHandle("actor worker 0", actor=object())], 60.0, tokens_per_microbatch)
    made.worker, made.metadata = worker, worker.setup("127.0.0.1", port, 60.0)
    try:
        yield made
    finally:
        dist.destroy_process_group()
