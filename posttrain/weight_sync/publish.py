"""New weights to every sampler, and the proof that they arrived."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.cluster.cluster import Cluster
from posttrain.cluster.samplers import RemoteSampler
from posttrain.cluster.trainers import TrainerGroup, canary_batch, not_finite
from posttrain.core.errors import PosttrainError, WeightSyncError
from posttrain.core.types import Ids
from posttrain.models.load import ModelSource
from posttrain.rollout.pool import DEAD, SamplerPool
from posttrain.weight_sync.transfers import Route, Router

Replace = Callable[[RemoteSampler, PosttrainError], Awaitable[Any]]


class WeightSync:
    """The samplers of a run, kept at the trainer's weights, also when one dies and is started again; and the GPUs that
    they share with trainers.

    Who is on the GPUs: trainers from ``to_trainers`` to ``publish``, samplers from then on. With `rollout.sleep`
    samplers leave while trainers are there, with `train.offload` trainers leave while samplers are.

    Args:
        trainers: all that take turns with the samplers on the same GPUs, ``actor`` among them.
        canary: token ids that prove an update before the first step.
    """

    def __init__(self, cluster: Cluster, actor: TrainerGroup, trainers: Sequence[TrainerGroup]) -> None:
        self.version = 0
        """Of the weights that samplers have now, or will have when the update that runs is done."""
        self._cluster, self._actor, self._trainers = cluster, actor, list(trainers)
        self._canary: Sequence[Ids] = []
        self._sleep, self._offload = cluster.cfg.rollout.sleep, cluster.cfg.train.offload
        self._away = False
        """Whether trainers are in host memory."""
        self._restarting = asyncio.Lock()
        self.router = Router(cluster.cfg.cluster, cluster.device)

    async def start(self, source: ModelSource, stop_token_ids: list[int]) -> SamplerPool:
        """Start the samplers, with the model's own weights."""
        self._source, self._stop_token_ids = source, stop_token_ids
        samplers = await self._cluster.samplers(source, stop_token_ids)
        self.pool = SamplerPool(samplers, self._restart, self._cluster.cfg.cluster.sampler_restarts)
        return self.pool

    async def to_trainers(self) -> None:
        """Trainers work next. Nobody samples until ``publish``, where samplers sleep."""
        await self.pool.settled()
        await self._to_trainers(self.pool.samplers)

    async def publish(self, version: int, canary: Sequence[Ids]) -> dict[str, float]:
        """Bring the trainer's weights to all samplers as ``version``. Metrics and errors as ``publish``'s."""
        await self.pool.settled()
        self.version, self._canary = version, canary
        await self._back()  # a second update without work of the trainers in between
        # An engine that starts again on the same GPU sizes its KV cache by what is free.
        await asyncio.gather(*(trainer.free_cache() for trainer in self._trainers))
        return await self._publish(self.pool.samplers, self.pool.replace)

    async def _restart(self, index: int) -> RemoteSampler:
        """A new sampler ``index`` with the current weights. While others sample, trainers have nothing else to do.
        Where they need the room of the others, these wait, and sample on with the same weights."""
        async with self._restarting:
            sampler = await self._cluster.sampler(self._source, self._stop_token_ids, index)
            samplers = [sampler, *self.pool.samplers] if self._sleep else [sampler]
            await self._to_trainers(samplers)
            await self._publish(samplers)
            return sampler

    async def _to_trainers(self, samplers: Sequence[Any]) -> None:
        if self._sleep:
            await asyncio.gather(*(_if_alive(sampler.sleep()) for sampler in samplers))
        await self._back()

    async def _back(self) -> None:
        if self._away:
            self._away = False
            for trainer in self._trainers:
                await trainer.onload()

    async def _leave(self) -> None:
        if self._offload and not self._away:
            self._away = True
            for trainer in self._trainers:
                await trainer.offload()

    async def _publish(self, samplers: Sequence[Any], replace: Replace | None = None) -> dict[str, float]:
        return await publish(
            self._actor,
            samplers,
            self.router,
            version=self.version,
            canary=self._canary,
            tolerance=self._cluster.sync_tolerance,
            leave=self._leave,
            replace=replace,
        )


async def _if_alive(call: Awaitable[None]) -> None:
    """A sampler that turns out to be dead is replaced when it is needed again."""
    with contextlib.suppress(*DEAD):
        await call


async def publish(
    actor: TrainerGroup,
    samplers: Sequence[RemoteSampler],
    router: Router,
    *,
    version: int,
    canary: Sequence[Ids],
    tolerance: float,
    leave: Callable[[], Awaitable[None]] | None = None,
    replace: Replace | None = None,
) -> dict[str, float]:
    """Send the trainer's weights to every sampler as ``version``, and check them.

    The proof: each sampler scores the canary sequences, and its log-probabilities must match the trainer's.

    Args:
        router: chooses how they are sent.
        leave: takes trainers off the GPU, which samplers may then fill.
        replace: gives a dead sampler's place to a new one that has these weights; None: its death is raised.

    Returns:
        ``sync/canary_gap``, the largest mean absolute difference of any sampler; on GPUs ``sync/gpu_used_gib``, what
        the fullest one had in use amid the update, by all of its processes.

    Raises:
        RunError: the trainer's weights, or its log-probabilities of the canary, are not finite.
        WeightSyncError: a sampler's mean difference is above ``tolerance``; the message names it.
    """
    await actor.check_finite(f"weight version {version} is not sent to the samplers")
    targets = _Targets(samplers)
    scored: dict[str, list[list[float]]] = {}

    async def score() -> Tensor:
        return await actor.logprobs(canary_batch(canary), temperature=1.0)

    async def finish(sampler: RemoteSampler) -> None:
        scored[sampler.name] = await sampler.finish_update(version, canary)

    if any(sampler.trainers for sampler in samplers):  # the engines' KV caches take the room that the trainers need
        expected, _ = await asyncio.gather(score(), targets.each(lambda sampler: sampler.wake()))
        used = await _send(actor, targets, router)
        if leave is not None:
            await leave()
        await targets.each(finish)
    else:  # they have GPUs of their own, and score at the same time
        await targets.each(lambda sampler: sampler.wake())
        used = await _send(actor, targets, router)
        expected, _ = await asyncio.gather(score(), targets.each(finish))
        if leave is not None:
            await leave()
    if not expected.isfinite().all():
        raise not_finite(
            f"the {actor.role} gives log-probabilities that are not finite", f"weight version {version} is of no use"
        )
    gaps: dict[str, float] = {}
    for name, scores in scored.items():
        gaps[name] = gap = float((torch.tensor([x for s in scores for x in s]) - expected).abs().mean())
        if not gap <= tolerance:
            raise WeightSyncError(
                f"{name} does not hold weight version {version}: its log-probabilities of the canary "
                f"differ from the trainer's by {gap:.4g} on average (tolerance {tolerance:g})",
                hint="if the engines' numerics really differ this much, raise cluster.sync_tolerance",
            )
    for sampler, error in targets.lost:
        if replace is None:
            raise error
        await replace(sampler, error)
    metrics = {"sync/canary_gap": max(gaps.values(), default=0.0)}
    return metrics | ({"sync/gpu_used_gib": used} if used else {})


class _Targets:
    """The samplers of an update, and those of them that turned out to be dead."""

    def __init__(self, samplers: Sequence[RemoteSampler]) -> None:
        self.living = list(samplers)
        self.lost: list[tuple[RemoteSampler, PosttrainError]] = []

    async def each(self, call: Callable[[RemoteSampler], Awaitable[None]]) -> None:
        """Call all that live, at the same time."""

        async def one(sampler: RemoteSampler) -> None:
            try:
                await call(sampler)
            except DEAD as error:
                if sampler in self.living:  # else the bucket before has told
                    self.lost.append((sampler, error))
                    self.living.remove(sampler)

        await asyncio.gather(*(one(sampler) for sampler in list(self.living)))


async def _send(actor: TrainerGroup, targets: _Targets, router: Router) -> float:
    """The actor's weights to all samplers that live. GiB that the trainers' fullest GPU had in use at the end."""
    # A broadcast that lost a member begins again without it. Who is not known to be lost may be so all the same.
    why: str | None = None
    for _ in range(1 + len(targets.living)):
        if not targets.living:
            return 0.0
        route = router.route(actor, targets.living)
        used = await _stream(route, targets)
        if (why := route.broken) is None:
            return used
    raise WeightSyncError(f"samplers failed in every try to send them new weights, the last time: {why}")


async def _stream(route: Route, targets: _Targets) -> float:
    """All weights, bucket by bucket: the next one is gathered while the last is read. Returns as ``_send``."""
    actor = route.actor
    readers: list[asyncio.Task[None] | None] = [None, None]
    await actor.open_outlet(route.where(), route.bucket_bytes)
    try:
        for slot in itertools.cycle((0, 1)):
            if (reader := readers[slot]) is not None:
                await reader
            buckets = None if route.broken else await actor.next_bucket(slot)
            if buckets is None:
                break
            readers[slot] = asyncio.create_task(route.read(slot, buckets, targets))
        await asyncio.gather(*(reader for reader in readers if reader is not None))
    except BaseException:
        for reader in readers:
            if reader is not None:
                reader.cancel()
        with contextlib.suppress(PosttrainError):  # the first failure is the one to hear of
            await actor.close_outlet()
        raise
    return await actor.close_outlet()
