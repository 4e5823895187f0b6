"""The metrics of a step of `rl` (docs/metrics.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from posttrain.core.statistics import intervals, majority
from posttrain.rollout.source import RolloutStats, TrajectorySource
from posttrain.tracking.progress import INTERVAL

if TYPE_CHECKING:
    from posttrain.core.types import Failure, Trajectory


def spread(name: str, values: torch.Tensor) -> dict[str, float]:
    """Return the mean, largest and smallest value as metrics."""
    return {f"{name}/{what}": float(getattr(values, what)()) for what in ("mean", "max", "min")}


def rollout_metrics(groups: Sequence[Sequence[Trajectory]], source: TrajectorySource) -> dict[str, float]:
    """Return the metrics of a step's episodes, and counts of those that were filtered, cancelled or failed."""
    stats = source.stats
    counts: dict[str, float] = {
        "groups": len(groups),
        "episodes": stats.started,
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
        "tool_calls": stats.tool_calls,
        "tool_errors": stats.tool_errors,
    }
    if source.env.agents is not None:
        counts |= {"branches": stats.branches, "unmatched_requests": stats.unmatched}
    if source.env.world is not None:  # what it begins with is known in play alone
        too_long = (t.stop_reason == "prompt_too_long" for group in groups for t in group)
        counts |= {"prompts_too_long": sum(too_long)}
    return episode_metrics(groups) | {f"rollout/{name}": float(count) for name, count in counts.items()}


def episode_metrics(groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    """Return the metrics that follow from the trajectories alone."""
    episodes = [t for group in groups for t in group]
    played = [t for t in episodes if t.error is None]
    lengths = np.array([t.response_length for t in played] or [0])
    slowest = [max((t.tool_seconds for t in group), default=0.0) for group in groups] or [0.0]
    flat = [g for g in groups if len({t.reward for t in g if t.trainable}) <= 1]
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
        "tools/seconds_per_group/median": float(np.median(slowest)),
        "tools/seconds_per_group/max": max(slowest),
        "tools/calls_per_episode": float(np.mean([t.tool_calls for t in played] or [0])),
        "rollout/accuracy": _share(played, lambda t: t.correct),
        "rollout/groups_without_signal": len(flat) / len(groups),
        **{f"reward/{name}/mean": float(np.mean(values)) for name, values in parts.items()},
    }


def staleness_metrics(
    groups: Sequence[Sequence[Trajectory]], stats: RolloutStats, version: int, most: int
) -> dict[str, float]:
    """Return how much older than ``version`` the weights are that sampled a step's tokens, and the mean length and
    reward of all episodes that ended since the step before, trained on or not yet.

    Args:
        version: of the weights that train them.
        most: `rollout.staleness`.
    """
    trained = [t for group in groups for t in group if t.trainable]
    ages = version - np.concatenate([t.weight_version[t.loss_mask] for t in trained] or [np.array([version])])
    return {
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        **{f"staleness/share@{age}": float((ages == age).mean()) for age in range(most + 1)},
        "rollout/ended_length/mean": float(np.mean(stats.lengths or [0])),
        "rollout/ended_reward/mean": float(np.mean(stats.rewards or [0])),
    }


def gap_by_age(gap: torch.Tensor, stale: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Return the gap between trainer and engine before the update, apart for tokens of the same weights, where it is of
    the engine's kernels, and for those of older ones.

    Args:
        gap: [T] log-probability of the trainer less that of the engine.
        stale: [T] older weights sampled the token.
        mask: [T] the policy sampled it.
    """
    found = {}
    for name, chosen in {"same_weights": mask & ~stale, "old_weights": mask & stale}.items():
        if chosen.any():
            ratio = gap[chosen].exp()
            found[f"rollout_gap/{name}/mean_abs"] = float(gap[chosen].abs().mean())
            found[f"rollout_gap/{name}/outside"] = float(((ratio < 0.9) | (ratio > 1.1)).double().mean())
    return found


def failures(source: TrajectorySource) -> dict[Failure, str]:
    """Return the first message of each kind of failure among the episodes of a step."""
    lost = source.pool.failure
    return source.stats.errors | ({} if lost is None else {"engine": lost.message})


def validation_failure(stats: RolloutStats) -> dict[Failure, str]:
    """Return why the first of the validation episodes that do not count in the accuracy failed."""
    return {} if stats.first_failure is None else {"validation": stats.first_failure}


def validation_metrics(
    groups: Sequence[Sequence[Trajectory]], n: int, stats: RolloutStats, *, resamples: int, seed: int
) -> dict[str, float]:
    """Return the accuracy on validation episodes, and how many of them do not count in it."""
    return accuracy_metrics(groups, n, resamples=resamples, seed=seed) | {
        "rollout/val_episodes": float(stats.started),
        "rollout/val_failed": float(stats.failed + stats.grader_failed),
    }


def accuracy_metrics(groups: Sequence[Sequence[Trajectory]], n: int, *, resamples: int, seed: int) -> dict[str, float]:
    """Return the accuracy of validation episodes by data source, as means over prompts, like `posttrain eval`.

    The names are ``val-core/<source>/acc/mean@n``, which is pass@1, with the ends of its interval, and for n > 1
    ``best@n``, whether any episode of a prompt is correct, and ``maj@n``, whether the answer that most of its episodes
    give is correct, unless the grader finds right ones and tells no answers.

    Args:
        resamples: of the bootstrap of the interval; 0: no interval.
        seed: of the bootstrap.
    """
    by_source: dict[str, list[list[Trajectory]]] = {}
    for group in groups:
        played = [t for t in group if t.error is None or t.unfinished]
        if played:
            by_source.setdefault(played[0].prompt.data_source, []).append(played)
    metrics = {}
    for name, of_source in by_source.items():
        key = f"val-core/{name}/acc"
        shares = np.array([_share(group, lambda t: t.correct) for group in of_source])
        metrics[f"{key}/mean@{n}"] = float(shares.mean())
        if resamples:
            ends = intervals(shares[:, None], resamples, seed)[:, 0].tolist()
            metrics |= {f"{key}/mean@{n}{end}": value for end, value in zip(INTERVAL, ends, strict=True)}
        if n > 1:
            metrics[f"{key}/best@{n}"] = float(np.mean([any(t.correct for t in group) for group in of_source]))
            told = any(t.extracted is not None for group in of_source for t in group)
            if told or not shares.any():
                votes = [majority([t.extracted for t in group], [t.correct for t in group]) for group in of_source]
                metrics[f"{key}/maj@{n}"] = float(np.mean(votes))
    return metrics


def _share(episodes: Sequence[Trajectory], test: Callable[[Trajectory], bool]) -> float:
    return sum(map(test, episodes)) / max(1, len(episodes))


def critic_metrics(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means over a step's updates of the critic."""
    names = ("vf_loss", "vf_clipfrac", "grad_norm", "lr")
    return {f"critic/{name}": float(np.mean([r.get(name, 0.0) for r in results])) for name in names}


_OF_UPDATES = ("pg_loss", "grad_norm", "lr")
"""Metrics of an update as a whole"""
_OF_TOKENS = ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "kl_loss", "entropy")
"""Weighted sums over the tokens of an update that were computed. So are those of a plugin's loss, `actor/NAME`."""


def update_metrics(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means over a step's updates of the actor, and ``gap_metrics`` where the updates have summed these up.

    Means over tokens are weighted as in the loss, by weights that add up to 1, whatever `algo.loss_agg`, the correction
    and `train.skip_zero_advantages` make of their sum. An update in which that is 0 has none of them.
    """
    total = {key: sum(r.get(key, 0.0) for r in results) for result in results for key in result}
    found = {f"actor/{name}": total[name] / len(results) for name in _OF_UPDATES if name in total}
    computed = [r for r in results if r.get("weight", 0.0) > 0.0]
    for name in total if computed else ():
        if name in _OF_TOKENS or name.startswith("actor/"):
            mean = sum(r.get(name, 0.0) / r["weight"] for r in computed) / len(computed)
            found[name if "/" in name else f"actor/{name}"] = mean
        elif name.startswith("moe/"):  # means already
            found[name] = sum(r.get(name, 0.0) for r in computed) / len(computed)
    return found | gap_metrics(total)


def gap_metrics(total: Mapping[str, float]) -> dict[str, float]:
    """Return the gap between trainer and engine, of sums over tokens (``algos.gap``); none without tokens."""
    if not (gap_tokens := total.get("gap/tokens", 0.0)):
        return {}
    gap, gap_square = (total.get(f"gap/{name}", 0.0) / gap_tokens for name in ("diff", "squares"))
    return {
        "rollout_gap/mean": gap,
        "rollout_gap/sd": math.sqrt(max(0.0, gap_square - gap * gap)),
        "rollout_gap/mean_abs": total.get("gap/abs", 0.0) / gap_tokens,
        "rollout_gap/k3": total.get("gap/k3", 0.0) / gap_tokens,
        "rollout_gap/outside": total.get("gap/outside", 0.0) / gap_tokens,
        **{f"rollout_{name}": total[name] / gap_tokens for name in total if name.startswith("gap/below/")},
    }
