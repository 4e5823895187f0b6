"""Training workers in Ray actors, and the driver's handle on a group of them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal

import ray
from torch import Tensor

from posttrain.cluster.actors import HEARTBEAT, ActorContext, ActorHandle, Supervised
from posttrain.cluster.calls import answer, gather, wait_until_up
from posttrain.core.cycles import rare_cycle_search
from posttrain.core.errors import diverged
from posttrain.core.registry import some
from posttrain.core.types import Ids
from posttrain.data.pack import PackedBatch, Placement, costs, place, place_by_prompt
from posttrain.data.prompts import Prompts
from posttrain.train.spec import LossSpec, WorkerSpec, over_ranks
from posttrain.weight_sync.buckets import Bucket, mapped
from posttrain.weight_sync.sender import Transport

WorkerMethod = Literal[
    "setup",
    "logprobs",
    "evaluate",
    "update",
    "warm_up",
    "nonfinite_gradients",
    "nonfinite_weights",
    "start_profile",
    "stop_profile",
    "sender.open",
    "sender.next",
    "sender.send",
    "sender.close",
    "prepare_save",
    "save",
    "load",
    "offload",
    "onload",
    "free_cache",
]
"""Methods of ``TrainWorker``, or of one of its parts, that the driver calls. The driver does not import the class, and
with it what trains."""


class TrainActor(Supervised):
    """A process with one ``TrainWorker``. ``Cluster`` makes it a Ray actor. The driver imports this class, and
    therefore it imports what trains only when it starts."""

    def __init__(self, spec: WorkerSpec, rank: int, world_size: int, context: ActorContext) -> None:
        super().__init__(context)
        with rare_cycle_search():
            from posttrain.train.worker import TrainWorker

        self.worker = TrainWorker(spec, rank, world_size)

    def call(self, method: WorkerMethod, *args: Any) -> Any:
        """Return the result of a method of the worker, or of one of its parts."""
        return attrgetter(method)(self.worker)(*args)

    def address(self) -> tuple[str, int]:
        """Return this node's address in its cluster and a free port, for the rendezvous at rank 0."""
        ip = ray.util.get_node_ip_address()
        with socket.socket() as unused:
            unused.bind((ip, 0))
            return ip, unused.getsockname()[1]

    @ray.method(concurrency_group=HEARTBEAT)
    def saved(self) -> dict[str, Any] | None:
        """Return as ``TrainWorker.saved``, also while the worker computes."""
        found: dict[str, Any] | None = self.worker.saved()
        return found

    def put_bucket(self, bucket: Bucket) -> ray.ObjectRef[Any]:
        """Put the bytes of a bucket in host memory into Ray's object store, for other nodes."""
        assert bucket.path is not None
        return ray.put(mapped(bucket.path).numpy())


@dataclass
class TrainerGroup:
    """The driver's handle on one model's workers (actor, critic, reference, teacher)."""

    role: str
    handles: list[ActorHandle]
    deadline_s: float
    tokens_per_microbatch: int
    sequences_per_microbatch: int | None = None
    patches_per_microbatch: int | None = None
    sequence_parallel: int = 1
    """Neighbouring workers that get the same batches and share their sequences."""
    share_prompts: bool = False
    """A prompt that sequences share is computed once in each micro-batch, where that pays."""
    before_update: Tensor | None = None
    """[T] log-probabilities before the last update, of its batch, where its loss has a ``correction``"""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The model as rank 0 describes it: ``parameters``, how many of them are ``trained``, ``checkpoint_bytes`` on disk,
    ``device``, ``dtype`` of its computations, ``attention``, ``dropout`` that the model's config asks for and does not
    get, ``peak_flops`` of the device (None: not known), ``sharing_cost``: the share of a batch's tokens that shared
    prompts must save."""

    @property
    def actors(self) -> list[Any]:
        """Ray's handles of the workers, by rank."""
        return [handle.actor for handle in self.handles]

    @property
    def world_size(self) -> int:
        return len(self.handles)

    @property
    def node(self) -> str:
        """The node of rank 0."""
        first = self.handles[0].process
        assert first is not None
        return first.node

    def describe(self) -> str:
        """Return one line about the model and what computes it."""
        total, trained = self.metadata["parameters"], self.metadata["trained"]
        share = f", {trained:,} of them trained," if trained < total else ""
        return f"{total:,} parameters{share} on {self.metadata['device']}, attention: {self.metadata['attention']}"

    async def start(self, deadline_s: float) -> None:
        await wait_until_up(self.handles, deadline_s)
        address, port = await answer(self.actors[0].address.remote(), self.handles[0], "start", deadline_s)
        refs = [a.call.remote("setup", address, port, self.deadline_s) for a in self.actors]
        self.metadata = (await gather(refs, self.handles, "start (load and shard the model)", deadline_s))[0]

    async def call(self, method: WorkerMethod, per_worker: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Call a method on every worker, each with its own arguments."""
        arguments = per_worker or [()] * len(self.handles)
        refs = [a.call.remote(method, *args) for a, args in zip(self.actors, arguments, strict=True)]
        return await gather(refs, self.handles, method, self.deadline_s)

    async def logprobs(
        self, batch: PackedBatch, *, adapter: bool = True, temperature: float | None = None, compiled: bool = True
    ) -> Tensor:
        """Return [T] log-probabilities under the current weights, or without the ``adapter`` of a LoRA run under its
        base's, at ``temperature``, by default that of the workers; 0 where the batch carries no loss. ``compiled``: see
        ``TrainWorker.logprobs``."""
        placement = self._place(batch)
        columns = await self._on_shards("logprobs", placement.shards(batch), adapter, temperature, compiled)
        return placement.gather(columns[:: self.sequence_parallel], batch)

    async def score(self, sequences: Sequence[Ids]) -> Tensor:
        """Return the log-probabilities at temperature 1 of the sequences' tokens, one after the other [T]; 0 for the
        first token of each. Of a model of values their values. For a few sequences, as a check."""
        batch = PackedBatch.from_sequences(sequences, [[True] * len(ids) for ids in sequences])
        return await self.logprobs(batch, temperature=1.0, compiled=False)

    async def values(self, batch: PackedBatch) -> Tensor:
        """Return [T] values of a critic; 0 where the batch carries no loss."""
        return await self.logprobs(batch)

    async def evaluate(self, batch: PackedBatch) -> float:
        """Return the weighted negative log-likelihood of the batch, without a gradient."""
        shards = self._place(batch).shards(batch)
        return float(sum(m["loss"] for m in await self._on_shards("evaluate", shards)))

    async def update(self, batch: PackedBatch, loss: LossSpec) -> dict[str, float]:
        """Take one optimizer step on the batch, and return its metrics (``UpdateMetrics``) over all workers. Sets
        ``before_update``."""
        placement = self._place(batch)
        per_worker = await self._on_shards("update", placement.shards(batch), loss)
        self.before_update = None
        if loss.correction is not None:
            columns = [metrics.logprobs for metrics in per_worker[:: self.sequence_parallel]]
            self.before_update = placement.gather(columns, batch)
        return over_ranks(per_worker)

    async def warm_up(self, *, scores: bool) -> None:
        """Compile what the first update runs, and with ``scores`` what comes before it; see ``TrainWorker.warm_up``."""
        await self.call("warm_up", [(scores,)] * len(self.handles))

    async def nonfinite_gradients(self) -> list[str]:
        """Return the parameters whose gradient was not finite in the last update that was skipped."""
        return sorted({name for names in await self.call("nonfinite_gradients") for name in names})

    async def check_finite(self, consequence: str) -> None:
        """Check that trained parameters and the optimizer's state are finite on every worker.

        Args:
            consequence: what is not done otherwise, for the message.

        Raises:
            RunError: a value is not finite.
        """
        if names := sorted({name for found in await self.call("nonfinite_weights") for name in found}):
            raise diverged(f"weights of the {self.role} are not finite: {some(names)}", consequence)

    async def start_profile(self) -> None:
        """Start the profiler of every worker."""
        await self.call("start_profile")

    async def stop_profile(self, folder: str, step: int) -> None:
        """Stop the profilers, and write one trace for each rank; see ``TrainWorker.stop_profile``."""
        await self.call("stop_profile", [(folder, step)] * len(self.handles))

    async def open_sender(self, transports: Sequence[Transport | None], bucket_bytes: int, frozen: bool = True) -> None:
        """Begin to hand out the whole weights, from each rank by its transport; see ``ModelSender.open``."""
        await self.call("sender.open", [(transport, bucket_bytes, frozen) for transport in transports])

    async def next_bucket(self, slot: int) -> list[Bucket] | None:
        """Return the next bucket of every rank, in buffer ``slot`` of two, which nobody reads any more; None when no
        weights are left."""
        found: list[Bucket | None] = await self.call("sender.next", [(slot,)] * len(self.handles))
        return None if found[0] is None else [bucket for bucket in found if bucket is not None]

    async def close_sender(self) -> float:
        """Free the buffers. Returns the GiB that all processes used of the fullest GPU until then."""
        return float(max(await self.call("sender.close")))

    async def put_bucket(self, bucket: Bucket) -> Any:
        """Return a reference to the bytes of rank 0's bucket, for other nodes."""
        return await answer(self.actors[0].put_bucket.remote(bucket), self.handles[0], "put_bucket", self.deadline_s)

    async def send_bucket(self, slot: int) -> None:
        """Have rank 0 start to broadcast its buffer ``slot``."""
        ref = self.actors[0].call.remote("sender.send", slot)
        await answer(ref, self.handles[0], "sender.send", self.deadline_s)

    async def prepare_save(self) -> None:
        """Prepare all workers to save in the background."""
        await self.call("prepare_save")

    async def save(self, folder: str, *, background: bool = False) -> None:
        """Write all shards into ``folder``, or start to write them in the ``background``; see ``TrainWorker.save``."""
        await self.call("save", [(folder, background)] * len(self.handles))

    async def saved(self) -> dict[str, Any] | None:
        """Return the digest of each file that workers have written, by its name in the folder; None while one still
        writes."""
        refs = [actor.saved.remote() for actor in self.actors]
        files = await gather(refs, self.handles, "save", self.deadline_s)
        return None if None in files else {name: digest for of_worker in files for name, digest in of_worker.items()}

    async def load(self, folder: str) -> None:
        await self.call("load", [(folder,)] * len(self.handles))

    async def offload(self) -> None:
        await self.call("offload")

    async def onload(self) -> None:
        await self.call("onload")

    async def free_cache(self) -> None:
        await self.call("free_cache")

    async def _on_shards(self, method: WorkerMethod, shards: Sequence[Sequence[PackedBatch]], *more: Any) -> list[Any]:
        """Call a method with each worker's micro-batches."""
        return await self.call(method, [(shard, *more) for shard in shards for _ in range(self.sequence_parallel)])

    def _place(self, batch: PackedBatch) -> Placement:
        """Place the sequences that carry loss. The others have no part in any result."""
        carrying, ranks = batch.carrying, len(self.handles) // self.sequence_parallel
        among = None if len(carrying) == batch.num_sequences else carrying
        if not carrying:  # workers take part in collectives, and in the update, all the same
            return Placement([[[]] for _ in range(ranks)], among=among)
        # Prompts that begin with the same tokens may have other images.
        if self.share_prompts and batch.images is None:
            prompts = Prompts.of(batch if among is None else batch.select(carrying))
            if prompts.saved > self.metadata["sharing_cost"] * sum(prompts.lengths):
                placement = place_by_prompt(prompts, ranks=ranks, token_budget=self.tokens_per_microbatch)
                return replace(placement, among=among)
        of_all = costs(batch, self.tokens_per_microbatch, self.patches_per_microbatch)
        placement = place(
            [of_all[b] for b in carrying],
            ranks=ranks,
            token_budget=self.tokens_per_microbatch,
            sequence_limit=self.sequences_per_microbatch,
        )
        return replace(placement, among=among)


async def reference_logprobs(batch: PackedBatch, actor: TrainerGroup, ref: TrainerGroup | None) -> Tensor:
    """Return [T] log-probabilities under the reference; ``ref`` None: it is the actor without its adapter."""
    return await (ref.logprobs(batch) if ref else actor.logprobs(batch, adapter=False))
