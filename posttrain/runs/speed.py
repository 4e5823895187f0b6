"""The `perf/` metrics of the optimizer updates of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrain.cluster.trainers import TrainerGroup


def update_speed(results: Sequence[Mapping[str, float]], tokens: int, actor: TrainerGroup) -> dict[str, float]:
    """Return the throughput, padding, peak memory and MFU of the optimizer updates of a step, and where prompts may be
    shared, the share of the tokens that were.

    Args:
        results: what ``TrainerGroup.update`` returned, one for each optimizer update.
        tokens: number of tokens that they computed of their batches, those of shared prompts included.
        actor: the workers that made the updates.
    """
    seconds = sum(r["seconds"] for r in results)
    workers = len(actor.actors)
    metrics = {
        "perf/throughput": tokens / seconds,
        "perf/tokens_per_second_per_gpu": tokens / seconds / workers,
        "perf/padding": 1.0 - tokens / sum(r["tokens_run"] for r in results),
        "perf/memory_gib": max(r["memory_gib"] for r in results),
    }
    if actor.share_prompts:
        metrics["perf/shared_tokens"] = sum(r["tokens_shared"] for r in results) / max(1, tokens)
    if (peak := actor.metadata.get("peak_flops")) is not None:
        metrics["perf/mfu"] = sum(r["flops"] for r in results) / (seconds * workers * peak)
    return metrics
