"""One step of `rl`, as its loops share it: trainers, the batch, the optimizer updates, and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from posttrain.algos.advantages import grpo
from posttrain.algos.reduce import token_weights
from posttrain.cluster.cluster import Cluster
from posttrain.data.pack import PackedBatch
from posttrain.errors import RunError
from posttrain.rollout.source import TrajectorySource
from posttrain.train.worker import LossSpec
from posttrain.training import TrainingRun, update_speed

if TYPE_CHECKING:
    from posttrain.cluster.trainers import TrainerGroup
    from posttrain.config import AlgoConfig
    from posttrain.types import Trajectory


async def open_trainers(cluster: Cluster, run: TrainingRun) -> tuple[TrainerGroup, TrainerGroup | None]:
    """The actor, and the reference model where the loss has a KL term. With LoRA there is none: the actor without its
    adapter is the reference."""
    cfg = run.cfg
    temperature = cfg.rollout.temperature
    updates = run.total_steps * cfg.algo.updates_per_step
    actor = await cluster.trainer("actor", run.source, temperature=temperature, total_steps=updates)
    ref = None
    if cfg.algo.kl_coef > 0 and cfg.train.lora.rank is None:
        ref = await cluster.trainer("reference", run.source, temperature=temperature, trainable=False)
    run.describe(actor)
    return actor, ref


async def update_policy(
    run: TrainingRun,
    actor: TrainerGroup,
    ref: TrainerGroup | None,
    batch: PackedBatch,
    kept: Sequence[Trajectory],
    *,
    version: int | None,
) -> dict[str, float]:
    """The optimizer updates of a step; their metrics.

    Ratios are taken to the actor's own log-probabilities where it is the policy that sampled, and to the engine's
    recorded ones where another policy was: tokens of another weight version than ``version``; None: all tokens.
    """
    algo, tracker = run.cfg.algo, run.tracker
    if version is not None:
        stale = stale_tokens(kept, version)
        if algo.updates_per_step > 1 or stale.any():
            with tracker.phase("old_log_prob"):
                own = await actor.logprobs(batch)
            assert batch.rollout_logprobs is not None
            batch.old_logprobs = torch.where(stale, batch.rollout_logprobs, own)
    if algo.kl_coef > 0:
        with tracker.phase("ref"):
            batch.ref_logprobs = await (ref.logprobs(batch) if ref else actor.logprobs(batch, adapter=False))
    loss = LossSpec(algo, off_policy=version is None)
    async with run.profiled(actor):
        with tracker.phase("update_actor"):
            results = [await run.update(actor, part, loss) for part in minibatches(batch, kept, algo)]
    return {
        **update_metrics(results),
        **update_speed(results, batch.num_tokens, actor),
        "perf/total_num_tokens": float(batch.num_tokens),
        "actor/skipped_steps": float(run.skipped_steps),
    }


def make_batch(
    groups: Sequence[Sequence[Trajectory]], algo: AlgoConfig
) -> tuple[PackedBatch, list[Trajectory], dict[str, float]]:
    """Pack the episodes that can be trained on, with their advantages and loss weights.

    Raises:
        RunError: every episode of the step failed.
    """
    kept = usable(groups)
    batch = PackedBatch.from_sequences([t.tokens for t in kept], [t.loss_mask for t in kept])
    batch.rollout_logprobs = torch.cat([torch.from_numpy(t.logprobs) for t in kept])
    rewards = torch.tensor([t.reward for t in kept])
    group_of = {id(t): g for g, group in enumerate(groups) for t in group}
    advantages = grpo(rewards, torch.tensor([group_of[id(t)] for t in kept]), normalize_by_std=algo.normalize_by_std)
    batch.advantages = advantages.repeat_interleave(batch.cu_seqlens.diff().long())
    batch.loss_weights = token_weights(batch.loss_mask, batch.cu_seqlens, algo.loss_agg)
    return batch, kept, spread("critic/score", rewards) | spread("critic/advantages", advantages)


def stale_tokens(kept: Sequence[Trajectory], version: int) -> torch.Tensor:
    """[T] true where other weights than those of ``version`` sampled the token (`rollout.carry_cancelled`)."""
    versions = torch.from_numpy(np.concatenate([t.weight_version for t in kept]))
    return (versions >= 0) & (versions != version)


def usable(groups: Sequence[Sequence[Trajectory]]) -> list[Trajectory]:
    """The episodes that can be trained on. Raises ``RunError`` where there is none."""
    kept = [t for group in groups for t in group if t.error is None and t.loss_mask.any()]
    if not kept:
        errors = {t.error for group in groups for t in group if t.error}
        raise RunError(f"no episode of this step can be trained on: {'; '.join(sorted(errors)[:3]) or 'all are empty'}")
    return kept


def spread(name: str, values: torch.Tensor) -> dict[str, float]:
    """Mean, largest and smallest value, as metrics."""
    return {f"{name}/{what}": float(getattr(values, what)()) for what in ("mean", "max", "min")}


def minibatches(batch: PackedBatch, kept: Sequence[Trajectory], algo: AlgoConfig) -> list[PackedBatch]:
    """The batches of a step's optimizer updates. Groups stay whole, and each update has a loss of its own."""
    if algo.updates_per_step == 1:
        return [batch]
    owners = list(dict.fromkeys(t.prompt.index for t in kept))
    parts = []
    for prompts in np.array_split(np.asarray(owners), algo.updates_per_step):
        members = [i for i, t in enumerate(kept) if t.prompt.index in set(prompts.tolist())]
        if members:
            part = batch.select(members)
            part.loss_weights = token_weights(part.loss_mask, part.cu_seqlens, algo.loss_agg)
            parts.append(part)
    return parts


def rollout_metrics(groups: Sequence[Sequence[Trajectory]], source: TrajectorySource) -> dict[str, float]:
    """What the episodes of a step looked like, and what became of them and of others."""
    stats = source.stats
    counts: dict[str, float] = {
        "failed": stats.failed,
        "grader_failed": stats.grader_failed,
        "filtered_groups": stats.filtered_groups,
        "missing_groups": stats.missing_groups,
        "cancelled_groups": stats.cancelled_groups,
        "cancelled_episodes": len(stats.cancelled_lengths),
        "cancelled_length/mean": float(np.mean(stats.cancelled_lengths or [0])),
        "cancelled_length/max": max(stats.cancelled_lengths, default=0),
        "samplers_lost": source.pool.deaths,
        "requests_moved": source.pool.moved,
    }
    return episode_metrics(groups) | {f"rollout/{name}": float(count) for name, count in counts.items()}


def episode_metrics(groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    """What the trajectories alone tell."""
    episodes = [t for group in groups for t in group]
    played = [t for t in episodes if t.error is None]
    lengths = np.array([t.response_length for t in played] or [0])
    flat = [g for g in groups if len({t.reward for t in g if t.error is None}) <= 1]
    parts: dict[str, list[float]] = {}
    for trajectory in played:
        for name, value in trajectory.reward_parts.items():
            parts.setdefault(name, []).append(value)
    return {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/clip_ratio": _share(played, lambda t: t.stop_reason == "length"),
        "prompt_length/mean": float(np.mean([t.prompt_length for t in played] or [0])),
        "num_turns/mean": float(np.mean([t.turns for t in played] or [0])),
        "num_turns/user": float(np.mean([t.user_turns for t in played] or [0])),
        "tools/seconds_per_episode": float(np.mean([t.tool_seconds for t in played] or [0])),
        "tools/calls_per_episode": float(np.mean([t.tool_calls for t in played] or [0])),
        "rollout/accuracy": _share(played, lambda t: t.correct),
        "rollout/groups_without_signal": len(flat) / len(groups),
        **{f"reward/{name}/mean": float(np.mean(values)) for name, values in parts.items()},
    }


def _share(episodes: Sequence[Trajectory], test: Callable[[Trajectory], bool]) -> float:
    return sum(map(test, episodes)) / max(1, len(episodes))


def update_metrics(results: Sequence[dict[str, float]]) -> dict[str, float]:
    """Names of the field for what the updates of a step returned, as the mean over them."""
    total = {key: sum(r.get(key, 0.0) for r in results) for key in results[0]}
    gap_tokens = max(1.0, total.get("gap/tokens", 0.0))
    names = ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "kl_loss", "entropy", "grad_norm", "lr")
    return {
        **{f"actor/{name}": total[name] / len(results) for name in names if name in total},
        "rollout_gap/mean_abs": total.get("gap/abs", 0.0) / gap_tokens,
        "rollout_gap/k3": total.get("gap/k3", 0.0) / gap_tokens,
        "rollout_gap/outside": total.get("gap/outside", 0.0) / gap_tokens,
    }
