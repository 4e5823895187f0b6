"""New weights to every sampler, and the proof that they arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch

from posttrain.cluster.cluster import Cluster
from posttrain.cluster.samplers import RemoteSampler
from posttrain.cluster.trainers import TrainerGroup, canary_batch
from posttrain.errors import PosttrainError, WeightSyncError
from posttrain.models.load import ModelSource
from posttrain.rollout.pool import DEAD, SamplerPool
from posttrain.types import Ids

Replace = Callable[[RemoteSampler, PosttrainError], Awaitable[Any]]


class WeightSync:
    """The samplers of a run, kept at the trainer's weights, also when one dies and is started again.

    Args:
        trainers: all that take turns with the samplers on the same GPUs, ``actor`` among them.
        canary: token ids that prove an update before the first step.
        temperature: that the trainer's log-probabilities are of.
    """

    def __init__(
        self, cluster: Cluster, actor: TrainerGroup, trainers: Sequence[TrainerGroup], *, temperature: float
    ) -> None:
        self.version = 0
        """Of the weights that samplers have now, or will have when the update that runs is done."""
        self._cluster, self._actor, self._trainers = cluster, actor, list(trainers)
        self._temperature = temperature
        self._canary: Sequence[Ids] = []
        self._on_gpu = True
        self._restarting = asyncio.Lock()

    async def start(self, source: ModelSource, stop_token_ids: list[int]) -> SamplerPool:
        """Start the samplers, with the model's own weights."""
        self._source, self._stop_token_ids = source, stop_token_ids
        samplers = await self._cluster.samplers(source, stop_token_ids)
        self.pool = SamplerPool(samplers, self._restart, self._cluster.cfg.cluster.sampler_restarts)
        return self.pool

    async def publish(self, version: int, canary: Sequence[Ids]) -> dict[str, float]:
        """Bring the trainer's weights to all samplers as ``version``. Metrics and errors as ``publish``'s."""
        await self.pool.settled()
        self.version, self._canary = version, canary
        # An engine that starts again on the same GPU sizes its KV cache by what is free.
        await asyncio.gather(*(trainer.free_cache() for trainer in self._trainers))
        return await self._publish(self.pool.samplers, self.pool.replace)

    async def hold_gpu(self, hold: bool) -> None:
        """With `train.offload`, trainers are on the GPU only between sampling and the next sampling."""
        if self._cluster.cfg.train.offload and hold != self._on_gpu:
            self._on_gpu = hold
            for trainer in self._trainers:
                await (trainer.onload() if hold else trainer.offload())

    async def _restart(self, index: int) -> RemoteSampler:
        """A new sampler ``index`` with the current weights. While others sample, trainers have nothing else to do."""
        async with self._restarting:
            sampler = await self._cluster.sampler(self._source, self._stop_token_ids, index)
            held = self._on_gpu
            await self.hold_gpu(True)
            try:
                await self._publish([sampler])
            finally:
                await self.hold_gpu(held)
            return sampler

    async def _publish(self, samplers: Sequence[Any], replace: Replace | None = None) -> dict[str, float]:
        return await publish(
            self._actor,
            samplers,
            version=self.version,
            canary=self._canary,
            temperature=self._temperature,
            tolerance=self._cluster.sync_tolerance,
            replace=replace,
        )


async def publish(
    actor: TrainerGroup,
    samplers: Sequence[RemoteSampler],
    *,
    version: int,
    canary: Sequence[Ids],
    temperature: float,
    tolerance: float,
    replace: Replace | None = None,
) -> dict[str, float]:
    """Send the trainer's weights to every sampler as ``version``, and check them.

    The proof: each sampler scores the canary sequences, and its log-probabilities must match the trainer's.

    Args:
        replace: gives a dead sampler's place to a new one that has these weights; None: its death is raised.

    Returns:
        ``sync/canary_gap``, the largest mean absolute difference of any sampler.

    Raises:
        WeightSyncError: a sampler's mean difference is above ``tolerance``; the message names it.
    """
    buckets = await actor.put_weights()
    expected: torch.Tensor | None = None
    worst = 0.0
    for sampler in samplers:
        try:
            await sampler.update_weights(version, buckets)
            if expected is None:
                expected = await actor.logprobs(canary_batch(canary))
            scored = await sampler.score(canary, temperature)
        except DEAD as error:
            if replace is None:
                raise
            await replace(sampler, error)
            continue
        gap = float((torch.tensor([x for s in scored for x in s]) - expected).abs().mean())
        if not gap <= tolerance:
            raise WeightSyncError(
                f"{sampler.name} does not hold weight version {version}: its log-probabilities of the canary "
                f"differ from the trainer's by {gap:.4g} on average (tolerance {tolerance:g})",
                hint="if the engines' numerics really differ this much, raise cluster.sync_tolerance",
            )
        worst = max(worst, gap)
    return {"sync/canary_gap": worst}
