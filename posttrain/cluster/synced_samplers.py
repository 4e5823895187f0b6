"""The samplers of a training run: they hold the trainer's weights, and share GPUs with trainers in turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
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

    Trainers have the GPUs from ``to_trainers`` to ``publish``, samplers from then on. With `rollout.sleep` samplers
    free their memory while trainers work, and with `train.offload` trainers move to host memory while samplers work.

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
        self.transfers = cluster.transfers()

    async def start(self, source: ModelSource, stop_token_ids: list[int]) -> SamplerPool:
        """Start the samplers with the model's own weights."""
        self._source, self._stop_token_ids = source, stop_token_ids
        samplers = await self._cluster.samplers(source, stop_token_ids)
        self.pool = SamplerPool(samplers, self._restart, self._cluster.cfg.cluster.sampler_restarts)
        return self.pool

    async def to_trainers(self) -> None:
        """Give the GPUs to the trainers. Where samplers sleep, nobody samples until ``publish``."""
        await self.pool.settled()
        await self._to_trainers(self._living)

    async def publish(self, version: int, check: Sequence[Ids]) -> dict[str, float]:
        """Bring the trainer's weights to all samplers as ``version``, and check them on the starts of a few of the
        ``check`` sequences. Metrics and errors are those of ``weight_sync.publish.publish``."""
        await self.pool.settled()
        self.version, self._check = version, check_sequences(check)
        await self._onload()  # where trainers did not work since the last update
        # An engine that restarts on the same GPU sizes its KV cache by the free memory.
        await asyncio.gather(*(trainer.free_cache() for trainer in self._trainers))
        return await self._publish(self._living, replace=True)

    @property
    def _living(self) -> list[RemoteSampler]:
        return cast(list[RemoteSampler], self.pool.samplers)

    async def _restart(self, index: int) -> RemoteSampler:
        """Start a new sampler ``index`` with the current weights. Trainers are idle while others sample. Where trainers
        need the memory of the other samplers, these pause, and then go on with the same weights."""
        async with self._restarting:
            sampler = await self._cluster.sampler(self._source, self._stop_token_ids, index)
            samplers = [sampler, *self._living] if self._sleep else [sampler]
            await self._to_trainers(samplers)
            await self._publish(samplers, replace=False)
            return sampler

    async def _to_trainers(self, samplers: Sequence[RemoteSampler]) -> None:
        if self._sleep:
            await asyncio.gather(*(_if_alive(sampler.sleep()) for sampler in samplers))
        await self._onload()

    async def _onload(self) -> None:
        if self._offloaded:
            self._offloaded = False
            for trainer in self._trainers:
                await trainer.onload()

    async def _offload_trainers(self) -> None:
        if self._offload and not self._offloaded:
            self._offloaded = True
            for trainer in self._trainers:
                await trainer.offload()

    async def _publish(self, samplers: Sequence[RemoteSampler], *, replace: bool) -> dict[str, float]:
        return await publish(
            self._actor,
            samplers,
            self.transfers,
            version=self.version,
            check=self._check,
            tolerance=self._cluster.sync_tolerance,
            offload=self._offload_trainers,
            replace=self._replace if replace else None,
        )

    async def _replace(self, sampler: RemoteSampler, error: PosttrainError) -> None:
        await self.pool.replace(sampler, error)


async def _if_alive(call: Awaitable[None]) -> None:
    """Await a call to a sampler. One that turns out to be dead is replaced when it is needed again."""
    with contextlib.suppress(*PROCESS_FAILURES):
        await call
