"""`posttrain rl`: reinforcement learning on multi-turn episodes with tools.

The loop in ``_train`` is the algorithm; everything else on this page prepares it or names its numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from posttrain.algos.advantages import grpo
from posttrain.algos.reduce import token_weights
from posttrain.cluster.cluster import Cluster
from posttrain.cluster.sync import WeightSync
from posttrain.data.loader import BatchOrder, total_steps
from posttrain.data.pack import PackedBatch
from posttrain.data.parquet import read_prompts
from posttrain.data.shards import one_file
from posttrain.errors import RunError
from posttrain.presets import Resolved
from posttrain.registry import load_plugins
from posttrain.rewards.compose import Rewarder
from posttrain.rewards.grade import GraderPool
from posttrain.rewards.judge import Judge
from posttrain.rollout.batches import TrainingBatches
from posttrain.rollout.pool import SamplerPool
from posttrain.rollout.source import RolloutStats, TrajectorySource
from posttrain.runs import RunDir, StopSignal
from posttrain.startup import build_environment, check_machine, check_prompts, check_reward, check_supported, open_model
from posttrain.tools.sets import close_tools
from posttrain.track.examine import examine
from posttrain.track.tracker import Tracker
from posttrain.train.worker import LossSpec
from posttrain.training import TrainingRun, recorded

if TYPE_CHECKING:
    from posttrain.config import AlgoConfig
    from posttrain.rewards.base import EpisodeScorer
    from posttrain.rollout.episode import Environment
    from posttrain.types import Prompt, Trajectory

_CANARIES = 4
"""Trajectories of the step that every sampler scores after a weight update."""


def run(resolved: Resolved) -> Path:
    """Train as the config says; returns the run's folder.

    Raises:
        UserError: bad config, data or model, before anything is written.
        RunError: a worker failed or weights did not arrive; the run can be resumed.
    """
    cfg = resolved.config
    load_plugins(cfg.plugins)
    source, tokenizer = open_model(cfg)
    check_supported(cfg)
    check_machine(cfg)
    env = build_environment(cfg, source, tokenizer)
    train_file, val_file = one_file(cfg.data.train), one_file(cfg.data.val) if cfg.data.val else ""
    prompts = read_prompts(train_file)
    check_prompts(prompts, env, train_file)
    val = read_prompts(val_file, limit=cfg.val.limit) if val_file else []
    check_prompts(val, env, val_file)
    check_reward([*prompts, *val], cfg, env)
    steps = total_steps(len(prompts), cfg.data.batch_size, cfg.train.epochs, cfg.train.steps)

    folder = RunDir.open(resolved)
    title = f"rl {cfg.run.name}"
    with recorded(folder), StopSignal() as stop, Tracker(folder.path, title, steps, cfg.run.logger) as tracker:
        tracker.note(
            f"{len(prompts):,} prompts, {cfg.data.batch_size} a step x {cfg.rollout.n} episodes, {steps} steps"
        )
        training = TrainingRun(cfg, folder, source, tracker, stop, steps)
        with GraderPool(cfg.reward, cfg.sandbox, cfg.plugins) as graders:
            asyncio.run(_train(training, prompts, val, env, graders))
    return folder.path


async def _train(
    run: TrainingRun, prompts: Sequence[Prompt], val: Sequence[Prompt], env: Environment, graders: GraderPool
) -> None:
    cfg, algo, tracker = run.cfg, run.cfg.algo, run.tracker
    loss = LossSpec(algo)
    async with Cluster(cfg) as cluster, AsyncExitStack() as closing:
        closing.push_async_callback(close_tools, env.tools, tracker.note)
        with tracker.phase("start"):
            temperature = cfg.rollout.temperature
            updates = run.total_steps * algo.updates_per_step
            actor = await cluster.trainer("actor", run.source, temperature=temperature, total_steps=updates)
            ref = None
            if algo.kl_coef > 0:
                ref = await cluster.trainer("reference", run.source, temperature=temperature, trainable=False)
            trainers = [trainer for trainer in (actor, ref) if trainer is not None]
            weights = WeightSync(cluster, actor, trainers, temperature=temperature)
            pool = await weights.start(run.source, sorted(env.stop_token_ids))
            closing.push_async_callback(pool.close)
            scorers = await open_scorers(cluster, run)
            for scorer in scorers:
                closing.push_async_callback(scorer.close)
            rewarder = Rewarder(cfg.reward, graders, cfg.rollout.max_response_tokens, scorers)
            source = TrajectorySource(pool, env, rewarder)
            order = BatchOrder(len(prompts), cfg.data.batch_size, cfg.run.seed, cfg.data.shuffle)
            batches = TrainingBatches(source, prompts, order, n=cfg.rollout.n, temperature=temperature)
            closing.push_async_callback(batches.close)
        tracker.note(
            f"{actor.facts['parameters']:,} parameters on {cluster.device}, attention: {actor.facts['attention']}"
        )

        if (state := await run.resume(actor)) is not None:
            batches.restore(state)
        # Engines load the starting weights by themselves: prove that they are the trainer's, or bring a resumed run's.
        await weights.publish(run.step, [env.prompt_ids(p) for p in prompts[:_CANARIES]])
        await weights.hold_gpu(False)
        for step in run.steps():
            with tracker.phase("gen"):
                groups = await batches.next()
                await pool.settled()
            for line in examine(groups, cfg.reward.examine):
                tracker.note(line)
            batch, kept, metrics = make_batch(groups, algo)
            metrics |= rollout_metrics(groups, source.stats) | pool_metrics(pool)
            stale = stale_tokens(kept, weights.version)
            await weights.hold_gpu(True)
            if algo.updates_per_step > 1 or stale.any():
                with tracker.phase("old_log_prob"):
                    batch.old_logprobs = await actor.logprobs(batch)
                    # The policy has moved since older weights sampled: then the engine's are the old ones.
                    batch.old_logprobs[stale] = torch.cat([torch.from_numpy(t.logprobs) for t in kept])[stale]
            if ref is not None:
                with tracker.phase("ref"):
                    batch.ref_logprobs = await ref.logprobs(batch)
            with tracker.phase("update_actor"):
                results = [await actor.update(part, loss) for part in minibatches(batch, kept, algo)]
                metrics |= update_metrics(results, batch)
            with tracker.phase("sync"):
                metrics |= await weights.publish(step, [t.tokens for t in kept[:_CANARIES]])
            if val and run.due(cfg.train.val_every, step):
                await weights.hold_gpu(False)
                with tracker.phase("testing"):
                    metrics |= await validate(source, val, cfg.val.n, cfg.val.temperature)
            if run.due(cfg.train.save_every, step):
                await weights.hold_gpu(True)
                await run.save(step, actor, batches.state())
            await weights.hold_gpu(False)
            tracker.log(step, metrics)
        if run.step > run.saved_step:  # stopped by the user
            await weights.hold_gpu(True)
            await run.save(run.step, actor, batches.state())
    run.raise_if_interrupted()


async def open_scorers(cluster: Cluster, run: TrainingRun) -> list[EpisodeScorer]:
    """The reward model and the judge of `reward.model` and `reward.judge`, where they are set."""
    reward = run.cfg.reward
    scorers: list[EpisodeScorer] = []
    if reward.model.path:
        scorers.append(await cluster.reward_model(reward.model))
    if reward.judge.url:
        scorers.append(Judge(reward.judge, run.folder.path / "judge.sqlite"))
    return scorers


def make_batch(
    groups: Sequence[Sequence[Trajectory]], algo: AlgoConfig
) -> tuple[PackedBatch, list[Trajectory], dict[str, float]]:
    """Pack the episodes that can be trained on, with their advantages and loss weights.

    Raises:
        RunError: every episode of the step failed.
    """
    kept = [t for group in groups for t in group if t.error is None and t.loss_mask.any()]
    if not kept:
        errors = {t.error for group in groups for t in group if t.error}
        raise RunError(f"no episode of this step can be trained on: {'; '.join(sorted(errors)[:3]) or 'all are empty'}")
    batch = PackedBatch.from_sequences([t.tokens for t in kept], [t.loss_mask for t in kept])
    batch.rollout_logprobs = torch.cat([torch.from_numpy(t.logprobs) for t in kept])
    rewards = torch.tensor([t.reward for t in kept])
    group_of = {id(t): g for g, group in enumerate(groups) for t in group}
    advantages = grpo(rewards, torch.tensor([group_of[id(t)] for t in kept]), normalize_by_std=algo.normalize_by_std)
    batch.advantages = advantages.repeat_interleave(batch.cu_seqlens.diff().long())
    batch.loss_weights = token_weights(batch.loss_mask, batch.cu_seqlens, algo.loss_agg)
    metrics = {
        "critic/score/mean": float(rewards.mean()),
        "critic/score/max": float(rewards.max()),
        "critic/score/min": float(rewards.min()),
        "critic/advantages/mean": float(advantages.mean()),
        "critic/advantages/max": float(advantages.max()),
        "critic/advantages/min": float(advantages.min()),
    }
    return batch, kept, metrics


def stale_tokens(kept: Sequence[Trajectory], version: int) -> Tensor:
    """[T] true where other weights than those of ``version`` sampled the token (`rollout.carry_cancelled`)."""
    versions = torch.from_numpy(np.concatenate([t.weight_version for t in kept]))
    return (versions >= 0) & (versions != version)


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


def rollout_metrics(groups: Sequence[Sequence[Trajectory]], stats: RolloutStats) -> dict[str, float]:
    """What the episodes of a step looked like."""
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
        "tools/calls_per_episode": float(np.mean([t.tool_calls for t in played] or [0])),
        "rollout/accuracy": _share(played, lambda t: t.correct),
        "rollout/failed": float(stats.failed),
        "rollout/grader_failed": float(stats.grader_failed),
        "rollout/groups_without_signal": len(flat) / len(groups),
        "rollout/filtered_groups": float(stats.filtered_groups),
        "rollout/missing_groups": float(stats.missing_groups),
        "rollout/cancelled_groups": float(stats.cancelled_groups),
        "rollout/cancelled_episodes": float(len(stats.cancelled_lengths)),
        "rollout/cancelled_length/mean": float(np.mean(stats.cancelled_lengths or [0])),
        "rollout/cancelled_length/max": float(max(stats.cancelled_lengths, default=0)),
        "num_turns/user": float(np.mean([t.user_turns for t in played] or [0])),
        "tools/seconds_per_episode": float(np.mean([t.tool_seconds for t in played] or [0])),
        **{f"reward/{name}/mean": float(np.mean(values)) for name, values in parts.items()},
    }


def pool_metrics(pool: SamplerPool) -> dict[str, float]:
    """Samplers that died, and requests that went elsewhere for it, since the run began."""
    return {"rollout/samplers_lost": float(pool.deaths), "rollout/requests_moved": float(pool.moved)}


def _share(episodes: Sequence[Trajectory], test: Callable[[Trajectory], bool]) -> float:
    return sum(map(test, episodes)) / max(1, len(episodes))


def update_metrics(results: Sequence[dict[str, float]], batch: PackedBatch) -> dict[str, float]:
    """Names of the field for what the updates of a step returned, as the mean over them."""
    total = {key: sum(r.get(key, 0.0) for r in results) for key in results[0]}
    gap_tokens = max(1.0, total.get("gap/tokens", 0.0))
    names = ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "kl_loss", "entropy", "grad_norm", "lr")
    return {
        **{f"actor/{name}": total[name] / len(results) for name in names if name in total},
        "rollout_gap/mean_abs": total.get("gap/abs", 0.0) / gap_tokens,
        "rollout_gap/k3": total.get("gap/k3", 0.0) / gap_tokens,
        "rollout_gap/outside": total.get("gap/outside", 0.0) / gap_tokens,
        "perf/total_num_tokens": float(batch.num_tokens),
        "perf/throughput": batch.num_tokens / total["seconds"],
        "perf/memory_gib": max(r["memory_gib"] for r in results),
    }


async def validate(source: TrajectorySource, prompts: Sequence[Prompt], n: int, temperature: float) -> dict[str, float]:
    """Accuracy on held-out prompts by data source: ``val-core/<source>/acc/mean@N``."""
    groups = await source.sample(prompts, n, temperature=temperature)
    by_source: dict[str, list[float]] = {}
    for group in groups:
        by_source.setdefault(group[0].prompt.data_source, []).extend(float(t.correct) for t in group if t.error is None)
    return {f"val-core/{name}/acc/mean@{n}": float(np.mean(v)) for name, v in by_source.items() if v}
