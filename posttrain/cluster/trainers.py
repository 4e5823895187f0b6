"""A group of training workers, and the driver's handle on it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from torch import Tensor

from posttrain.cluster.actors import PULSE, Home, Peer, Supervised
from posttrain.cluster.calls import gather, meet
from posttrain.core.errors import RunError
from posttrain.core.registry import some
from posttrain.core.types import Ids
from posttrain.data.pack import PackedBatch, Placement, place
from posttrain.train.spec import LossSpec, WorkerSpec
from posttrain.weight_sync.buckets import Bucket, Where, mapped

# Metrics that are not sums over workers.
_SAME = {"grad_norm", "lr", "skipped"}
_LARGEST = {"seconds", "memory_gib"}


class TrainActor(Supervised):
    """A ``TrainWorker`` in a process of its own. ``Cluster`` makes it a Ray actor. The driver, which needs this class
    to do so, is spared the imports of what trains."""

    def __init__(self, spec: WorkerSpec, rank: int, world_size: int, home: Home) -> None:
        super().__init__(home)
        from posttrain.train.worker import TrainWorker

        self.worker = TrainWorker(spec, rank, world_size)

    def call(self, method: str, *args: Any) -> Any:
        """What a method of the worker returns."""
        return getattr(self.worker, method)(*args)

    def address(self) -> tuple[str, int]:
        """The address of this node in its cluster, and a port that is free there, for rank 0."""
        ip = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((ip, 0))
            return ip, probe.getsockname()[1]

    @ray.method(concurrency_group=PULSE)
    def saved(self) -> dict[str, Any] | None:
        """As the worker's; also while that computes."""
        found: dict[str, Any] | None = self.worker.saved()
        return found

    def put_bucket(self, bucket: Bucket) -> ray.ObjectRef[Any]:
        """The bytes of a bucket in host memory, for other nodes."""
        assert bucket.path is not None
        return ray.put(mapped(bucket.path).numpy())


@dataclass
class TrainerGroup:
    """The driver's handle on one model's workers (actor, critic, reference, teacher)."""

    role: str
    peers: list[Peer]
    deadline_s: float
    tokens_per_microbatch: int
    sequences_per_microbatch: int | None = None
    sequence_parallel: int = 1
    """Neighbouring workers that get the same batches and share their sequences."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What rank 0 told: ``parameters``, how many of them are ``trained``, ``checkpoint_bytes`` on disk, ``device``,
    ``dtype`` that it computes in, ``attention``, ``dropout`` that the model's config asks for and does not get,
    ``peak_flops`` of the device (None: not known)."""

    @property
    def actors(self) -> list[Any]:
        """Handles of the workers, by rank."""
        return [peer.actor for peer in self.peers]

    @property
    def node(self) -> str:
        """Of rank 0."""
        first = self.peers[0].process
        assert first is not None
        return first.node

    def describe(self) -> str:
        """One line about the model and what computes it."""
        total, trained = self.facts["parameters"], self.facts["trained"]
        share = f", {trained:,} of them trained," if trained < total else ""
        return f"{total:,} parameters{share} on {self.facts['device']}, attention: {self.facts['attention']}"

    async def start(self, deadline_s: float) -> None:
        await meet(self.peers, deadline_s)
        first = [self.actors[0].address.remote()]
        address, port = (await gather(first, self.peers[:1], "start", deadline_s))[0]
        refs = [a.call.remote("setup", address, port, self.deadline_s) for a in self.actors]
        self.facts = (await gather(refs, self.peers, "start (load and shard the model)", deadline_s))[0]

    async def call(self, method: str, per_worker: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Call a method on every worker, each with its own arguments."""
        arguments = per_worker or [()] * len(self.peers)
        refs = [a.call.remote(method, *args) for a, args in zip(self.actors, arguments, strict=True)]
        return await gather(refs, self.peers, method, self.deadline_s)

    async def logprobs(self, batch: PackedBatch, *, adapter: bool = True, temperature: float | None = None) -> Tensor:
        """[T] log-probabilities under the current weights, or without the ``adapter`` of a LoRA run under its base's,
        at the temperature of the workers if no other is asked for; 0 where the batch carries no loss."""
        placement = self._place(batch)
        columns = await self._on_shards("logprobs", placement.shards(batch), adapter, temperature)
        return placement.gather(columns[:: self.sequence_parallel], batch)

    async def values(self, batch: PackedBatch) -> Tensor:
        """[T] values of a critic; 0 where the batch carries no loss."""
        return await self.logprobs(batch)

    async def evaluate(self, batch: PackedBatch) -> float:
        """The weighted negative log-likelihood of the batch, without a gradient."""
        shards = self._place(batch).shards(batch)
        return float(sum(m["loss"] for m in await self._on_shards("evaluate", shards)))

    async def update(self, batch: PackedBatch, loss: LossSpec) -> dict[str, float]:
        """One optimizer step on the batch; metrics over all workers (``TrainWorker.update``)."""
        per_worker = await self._on_shards("update", self._place(batch).shards(batch), loss)
        merged = dict(per_worker[0])
        for metrics in per_worker[1:]:
            for key, value in metrics.items():
                if key in _LARGEST:
                    merged[key] = max(merged[key], value)
                elif key not in _SAME:
                    merged[key] = merged.get(key, 0.0) + value
        return merged

    async def nonfinite_gradients(self) -> list[str]:
        """Parameters whose gradient was not finite in the last update that was skipped."""
        return sorted({name for names in await self.call("nonfinite_gradients") for name in names})

    async def check_finite(self, consequence: str) -> None:
        """Check that what is trained, and the optimizer's state, is finite on every worker.

        Args:
            consequence: what is not done otherwise, for the message.

        Raises:
            RunError: it is not so.
        """
        if names := sorted({name for found in await self.call("nonfinite_weights") for name in found}):
            raise not_finite(f"weights of the {self.role} are not finite: {some(names)}", consequence)

    async def start_profile(self) -> None:
        """Trace every worker from now on."""
        await self.call("start_profile")

    async def stop_profile(self, folder: str, step: int) -> None:
        """Write the traces, one a rank; see ``TrainWorker.stop_profile``."""
        await self.call("stop_profile", [(folder, step)] * len(self.peers))

    async def open_outlet(self, where: Sequence[Where | None], bucket_bytes: int) -> None:
        """Begin to hand out the full weights; see ``TrainWorker.open_outlet``, and ``sync``.

        Args:
            where: each rank's buckets are read.
        """
        await self.call("open_outlet", [(of_rank, bucket_bytes) for of_rank in where])

    async def next_bucket(self, slot: int) -> list[Bucket] | None:
        """The next bucket of every rank, in place ``slot`` of two, which nobody reads any more; None: that was all."""
        found: list[Bucket | None] = await self.call("next_bucket", [(slot,)] * len(self.peers))
        return None if found[0] is None else [bucket for bucket in found if bucket is not None]

    async def close_outlet(self) -> float:
        """Free the buckets. GiB that the fullest GPU had in use with them, by all processes."""
        return float(max(await self.call("close_outlet")))

    async def put_bucket(self, bucket: Bucket) -> Any:
        """A reference to the bytes of rank 0's bucket, for other nodes."""
        return await self._first("put_bucket", bucket)

    async def send_bucket(self, slot: int) -> None:
        """Rank 0 begins to send its bucket in place ``slot``."""
        await self._first("call", "send_bucket", slot)

    async def _first(self, method: str, *args: Any) -> Any:
        """Call the actor of rank 0."""
        ref = getattr(self.actors[0], method).remote(*args)
        return (await gather([ref], self.peers[:1], method, self.deadline_s))[0]

    async def prepare_save(self) -> None:
        """Tell all workers that they will save in the background."""
        await self.call("prepare_save")

    async def save(self, folder: str, *, background: bool = False) -> None:
        """Write all shards into ``folder``, or in the ``background`` begin to; see ``TrainWorker.save``."""
        await self.call("save", [(folder, background)] * len(self.peers))

    async def saved(self) -> dict[str, Any] | None:
        """Name in the folder -> digest of the files that workers have written; None while one still writes."""
        refs = [actor.saved.remote() for actor in self.actors]
        files = await gather(refs, self.peers, "save", self.deadline_s)
        return None if None in files else {name: digest for of_worker in files for name, digest in of_worker.items()}

    async def load(self, folder: str) -> None:
        await self.call("load", [(folder,)] * len(self.peers))

    async def offload(self) -> None:
        await self.call("offload")

    async def onload(self) -> None:
        await self.call("onload")

    async def free_cache(self) -> None:
        await self.call("free_cache")

    async def _on_shards(self, method: str, shards: Sequence[Sequence[PackedBatch]], *more: Any) -> list[Any]:
        """Call a method with each worker's micro-batches."""
        return await self.call(method, [(shard, *more) for shard in shards for _ in range(self.sequence_parallel)])

    def _place(self, batch: PackedBatch) -> Placement:
        return place(
            batch.lengths,
            ranks=len(self.peers) // self.sequence_parallel,
            token_budget=self.tokens_per_microbatch,
            sequence_limit=self.sequences_per_microbatch,
        )


def not_finite(what: str, consequence: str) -> RunError:
    """What a person is told when training has destroyed the weights."""
    return RunError(
        f"{what}; {consequence}",
        hint="training has diverged: lower train.optim.lr, and begin again from a sound checkpoint with "
        "--resume FOLDER --name NAME",
    )


def canary_batch(sequences: Sequence[Ids]) -> PackedBatch:
    """Sequences in which every token but the first is to be scored."""
    return PackedBatch.from_sequences(sequences, [torch.ones(len(s), dtype=torch.bool).tolist() for s in sequences])
