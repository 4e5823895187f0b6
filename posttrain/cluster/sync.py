"""New weights to every sampler, and the proof that they arrived."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from posttrain.cluster.samplers import RemoteSampler
from posttrain.cluster.trainers import TrainerGroup, canary_batch
from posttrain.errors import WeightSyncError


async def publish(
    actor: TrainerGroup,
    samplers: Sequence[RemoteSampler],
    *,
    version: int,
    canary: Sequence[Sequence[int]],
    temperature: float,
    tolerance: float,
) -> dict[str, float]:
    """Send the trainer's weights to every sampler as ``version``, and check them.

    The proof: each sampler scores the canary sequences, and its log-probabilities must match the trainer's.

    Returns:
        ``sync/canary_gap``, the largest mean absolute difference of any sampler.

    Raises:
        WeightSyncError: a sampler's mean difference is above ``tolerance``; the message names it.
    """
    buckets = await actor.put_weights()
    for sampler in samplers:
        await sampler.update_weights(version, buckets)
    expected = await actor.logprobs(canary_batch(canary))
    worst = 0.0
    for sampler in samplers:
        scored = await sampler.score(canary, temperature)
        gap = float((torch.tensor([x for s in scored for x in s]) - expected).abs().mean())
        if not gap <= tolerance:
            raise WeightSyncError(
                f"{sampler.name} does not hold weight version {version}: its log-probabilities of the canary "
                f"differ from the trainer's by {gap:.4g} on average (tolerance {tolerance:g})",
                hint="if the engines' numerics really differ this much, raise cluster.sync_tolerance",
            )
        worst = max(worst, gap)
    return {"sync/canary_gap": worst}
