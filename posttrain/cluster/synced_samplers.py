"""The samplers of a training run: they hold the trainer's weights, and share GPUs with trainers in turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import cast

from posttrain.cluster.cluster import Cluster
from posttrain.cluster.samplers import RemoteSampler
from posttrain.cluster.trainers import TrainerGroup
from posttrain.core.errors import PROCESS_FAILURES, PosttrainError
from posttrain.core.types import Ids
from posttrain.models.load import ModelSource
from posttrain.rollout.pool import SamplerPool
from posttrain.weight_sync.publish import check_sequences, publish


class SyncedSamplers:
    """The samplers of a run, at the trainer's weights even when one dies and is restarted.

    Trainers work from ``to_trainers`` to ``publish``. Without `rollout.staleness` nobody samples then: with
    `rollout.sleep` samplers free their memory meanwhile, and with `train.offload` trainers move to host memory while
    samplers work. With it samplers go on, and one that dies meanwhile is replaced at the next ``publish``: trainers
    hand out no weights while they work.

    Args:
        trainers: all that take turns with the samplers on the same GPUs, ``actor`` among them.
    """

    def __init__(self, cluster: Cluster, actor: TrainerGroup, trainers: Sequence[TrainerGroup]) -> None:
        self.version = 0
        """The version of the samplers' weights, from the start of its update on."""
        self._cluster, self._actor, self._trainers = cluster, actor, list(trainers)
        self._check: Sequence[Ids] = []
        self._sleep, self._offload = cluster.cfg.rollout.sleep, cluster.cfg.train.offload
        self._offloaded = False
        """The trainers are in host memory."""
        self._restarting = asyncio.Lock()
        self._trainers_busy = asyncio.Lock()
        """Held while trainers work, or send weights."""
        self._working = False
        """``to_trainers`` holds that lock."""
        self.transfers = cluster.transfers()
        self._complete: list[RemoteSampler] = []
        """Samplers that have got all weights, and have not slept since."""

    async def start(self, source: ModelSource, stop_token_ids: list[int]) -> SamplerPool:
        """Start the samplers, which are to get the trainer's weights by ``publish`` before they sample."""
        self._source, self._stop_token_ids = source, stop_token_ids
        samplers = await self._cluster.samplers(source, stop_token_ids, weights_follow=True)
        self.pool = SamplerPool(samplers, self._restart, self._cluster.cfg.cluster.sampler_restarts)
        return self.pool

    async def to_trainers(self) -> None:
        """Let the trainers work. Where samplers sleep, nobody samples until ``publish``."""
        await self.pool.settled()
        await self._trainers_busy.acquire()
        self._working = True
        await self._to_trainers(self._living)

    async def publish(self, version: int, check: Sequence[Ids]) -> dict[str, float]:
        """Bring the trainer's weights to all samplers as ``version``, and check them on the starts of a few of the
        ``check`` sequences. Metrics and errors are those of ``weight_sync.publish.publish``."""
        self.version, self._check = version, check_sequences(check)
        if self._working:
            self._working = False
            self._trainers_busy.release()
        await self.pool.settled()  # a sampler that waited for its weights has them then
        lost: list[tuple[RemoteSampler, PosttrainError]] = []
        async with self._trainers_busy, self._turns():
            await self._onload()  # where trainers did not work since the last update
            await self._free_caches()
            metrics = await self._publish(self._living, lost)
        for sampler, error in lost:
            if sampler in self.pool.samplers:
                await self.pool.replace(sampler, error)
        await self.pool.settled()  # an episode may have lost it before
        return metrics

    def _turns(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Return what an update waits for: nothing, or the turns in progress."""
        rollout = self._cluster.cfg.rollout
        if rollout.staleness and not rollout.in_flight_updates:
            return self.pool.drained(rollout.episode_deadline_s)
        return contextlib.nullcontext()

    @property
    def _living(self) -> list[RemoteSampler]:
        return cast(list[RemoteSampler], self.pool.samplers)

    async def _restart(self, index: int) -> RemoteSampler:
        """Start a new sampler ``index`` with the current weights. Waits until trainers are idle. Where they need
        the memory of the other samplers, these pause, and then go on with the same weights."""
        async with self._restarting:
            sampler = await self._cluster.sampler(self._source, self._stop_token_ids, index, weights_follow=True)
            samplers = [sampler, *self._living] if self._sleep else [sampler]
            async with self._trainers_busy:
                await self._to_trainers(samplers)
                await self._publish(samplers)
            return sampler

    async def _to_trainers(self, samplers: Sequence[RemoteSampler]) -> None:
        if self._sleep:
            self._complete = []
            await asyncio.gather(*(_put_to_sleep(sampler) for sampler in samplers))
        await self._onload()

    async def _onload(self) -> None:
        if self._offloaded:
            self._offloaded = False
            for trainer in self._trainers:
                await trainer.onload()

    async def _free_gpus(self) -> None:
        """Have trainers leave the engines' GPUs, or give up the memory there that they do not need."""
        if not self._offload:
            await self._free_caches()
        elif not self._offloaded:
            self._offloaded = True
            for trainer in self._trainers:
                await trainer.offload()

    async def _free_caches(self) -> None:
        """Give back what torch keeps for later, where engines share the GPUs: they compute in the memory that is left,
        and one that restarts sizes its KV cache by it."""
        if self._cluster.cfg.cluster.placement == "colocated":
            await asyncio.gather(*(trainer.free_cache() for trainer in self._trainers))

    async def _publish(
        self, samplers: Sequence[RemoteSampler], lost: list[tuple[RemoteSampler, PosttrainError]] | None = None
    ) -> dict[str, float]:
        """Send weights to samplers. Those that die meanwhile are added to ``lost``; None: their death is raised."""

        async def note(sampler: RemoteSampler, error: PosttrainError) -> None:
            if lost is not None:
                lost.append((sampler, error))

        complete = all(sampler in self._complete for sampler in samplers)
        metrics = await publish(
            self._actor,
            samplers,
            self.transfers,
            version=self.version,
            check=self._check,
            tolerance=self._cluster.sync_tolerance,
            free_gpus=self._free_gpus,
            replace=None if lost is None else note,
            frozen=not complete,
        )
        self._complete += [sampler for sampler in samplers if sampler not in self._complete]
        return metrics


async def _put_to_sleep(sampler: RemoteSampler) -> None:
    """Have a sampler free its memory. One that does not is ended, and replaced when it is needed again."""
    try:
        await sampler.sleep()
    except PROCESS_FAILURES:
        await sampler.handle.kill()
