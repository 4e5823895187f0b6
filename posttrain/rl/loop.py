"""`posttrain rl`: reinforcement learning on multi-turn episodes with tools.

The loop in ``_train`` is the algorithm; everything else on this page prepares it. ``rl_learner`` has what a step does
with its trajectories, and ``rl_replay`` the loop that takes them from files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from posttrain.algos.catalog import ADVANTAGES
from posttrain.cluster.cluster import Cluster
from posttrain.cluster.synced_samplers import SyncedSamplers
from posttrain.config import Config
from posttrain.config.presets import Resolved
from posttrain.core.errors import RunError
from posttrain.core.registry import load_plugins
from posttrain.core.types import GREEDY
from posttrain.data.loader import BatchOrder, check_batch, total_steps
from posttrain.data.parquet import read_prompts
from posttrain.data.shards import one_file
from posttrain.plan import command as plan
from posttrain.plan.command import MemoryBudget
from posttrain.rewards.compose import Rewarder
from posttrain.rewards.grade import GraderPool
from posttrain.rewards.judge import Judge
from posttrain.rl import replay as rl_replay
from posttrain.rl.batch import usable
from posttrain.rl.learner import Learner
from posttrain.rl.metrics import failures, rollout_metrics, spread, validation_failure, validation_metrics
from posttrain.rollout.batches import TrainingBatches
from posttrain.rollout.files import fingerprint
from posttrain.rollout.pool import SamplerPool
from posttrain.rollout.source import TrajectorySource
from posttrain.rollout.writer import TraceWriter
from posttrain.runs.preflight import (
    build_environment,
    check_algo,
    check_machine,
    check_reward,
    check_supported,
    fitting_prompts,
    open_model,
    sampling_of,
)
from posttrain.runs.run import RunPlace, StopSignal
from posttrain.runs.training import (
    TrainingRun,
    check_profile,
    open_tracker,
    reading_validation,
    recorded,
    train,
    validation_note,
)
from posttrain.tools.sets import close_tools
from posttrain.tracking.examine import examine

if TYPE_CHECKING:
    from posttrain.core.types import Prompt, Sampling, Trajectory
    from posttrain.models.load import ModelSource
    from posttrain.rewards.base import EpisodeScorer
    from posttrain.rollout.episode import Environment


def run(resolved: Resolved) -> Path:
    """Train as the config says; returns the run's folder.

    Raises:
        UserError: bad config, data or model, before anything is written.
        RunError: a worker failed or weights did not arrive; the run can be resumed.
    """
    cfg = resolved.config
    load_plugins(cfg.plugins)
    if cfg.rollout.replay:
        return rl_replay.run(resolved)
    place = RunPlace.find(resolved)
    source, env, prompts, val, notes, steps, budget = prepare(cfg)
    place.check_steps(steps)
    folder = place.open()
    with recorded(cfg, folder) as reporter, StopSignal() as stop, open_tracker(cfg, folder, steps) as tracker:
        tracker.note(
            f"{len(prompts):,} prompts, {cfg.data.batch_size} a step x {cfg.rollout.n} episodes, {steps} steps"
        )
        if not cfg.rollout.only:
            tracker.note(validation_note(resolved, len(val), "prompts"))
        elif cfg.data.val:
            tracker.note("data.val is not used: rollout.only trains nothing that would be validated")
        for note in notes:
            tracker.note(note)
        training = TrainingRun(cfg, folder, source, tracker, stop, steps, reporter)
        with GraderPool(cfg.reward, cfg.sandbox, cfg.plugins) as graders:
            if cfg.rollout.only:
                asyncio.run(_sample_only(training, prompts, env, graders))
            else:
                train(training, lambda attempt: _train(attempt, prompts, val, env, graders, budget))
        if (line := plan.closing_line(cfg, folder.path)) is not None:
            tracker.note(line)
    return folder.path


def dry_run(resolved: Resolved) -> str:
    """Everything up to the start of the workers, and then the plan, with the lengths of the prompts. Raises
    ``UserError`` as ``run`` does."""
    cfg = resolved.config
    load_plugins(cfg.plugins)
    if cfg.rollout.replay:
        return rl_replay.dry_run(resolved)
    _, env, prompts, _, _, steps, _ = prepare(cfg)
    mean = sum(len(env.prompt_ids(prompt)) for prompt in prompts) / len(prompts)
    return plan.show(cfg, known=plan.Known(prompt=mean, steps=steps))


class Prepared(NamedTuple):
    """What a run begins with."""

    source: ModelSource
    env: Environment
    prompts: Sequence[Prompt]
    val: Sequence[Prompt]
    notes: Sequence[str]
    """what the user shall know of the data and the reward function"""
    steps: int
    budget: float | None
    """GiB that a weight update may take of a GPU"""


def prepare(cfg: Config) -> Prepared:
    """Check all that can be checked before something is written. Raises ``UserError``."""
    source, tokenizer = open_model(cfg)
    check_supported(cfg)
    check_machine(cfg)
    check_algo(cfg, tokenizer)
    budget = None if cfg.rollout.only else plan.check_budget(cfg)
    env = build_environment(cfg, source, tokenizer)
    train_file, val_file = one_file(cfg.data.train), one_file(cfg.data.val) if cfg.data.val else ""
    rows = read_prompts(train_file)
    prompts, left_out = fitting_prompts(rows, env, train_file, cfg.data.truncation)
    with reading_validation():
        val_rows = read_prompts(val_file, limit=cfg.val.limit) if val_file else []
    val, val_left_out = fitting_prompts(val_rows, env, val_file, cfg.data.truncation)
    failing = check_reward([*prompts, *val], cfg, env, train_file)
    steps = total_steps(len(prompts), cfg.data.batch_size, cfg.train.epochs, cfg.train.steps)
    check_profile(cfg, steps)
    crowded = check_batch(len(prompts), cfg.data.batch_size)
    notes = [note for note in (left_out, val_left_out, failing and f"warning: {failing}", crowded) if note]
    return Prepared(source, env, prompts, val, notes, steps, budget)


async def _train(
    run: TrainingRun,
    prompts: Sequence[Prompt],
    val: Sequence[Prompt],
    env: Environment,
    graders: GraderPool,
    budget: float | None,
) -> None:
    cfg, tracker = run.cfg, run.tracker
    watch = MemoryBudget(budget, tracker.note)
    sampling, val_sampling = sampling_of(cfg.rollout), sampling_of(cfg.val)
    greedy = ADVANTAGES[cfg.algo.advantage].greedy
    async with Cluster(cfg, run.folder.logs) as cluster, run, AsyncExitStack() as closing:
        with tracker.phase("start"):
            learner = await Learner.open(cluster, run)
            weights = SyncedSamplers(cluster, learner.actor, learner.models)
            pool = await weights.start(run.source, sorted(env.stop_token_ids))
            source = await open_source(cluster, pool, run, env, graders, closing)
            order = BatchOrder(len(prompts), cfg.data.batch_size, cfg.run.seed, cfg.data.shuffle)
            batches = TrainingBatches(source, prompts, order, n=cfg.rollout.n, sampling=sampling)
            closing.push_async_callback(batches.close)
            traces = await closing.enter_async_context(open_traces(run, env))

        if (state := await run.resume(learner.trained)) is not None:
            batches.restore(state)
            learner.restore(state["learner"])
        traces.drop_after(run.step)

        def position() -> dict[str, Any]:
            return {**batches.state(), "learner": learner.state()}

        reached = position()

        # Engines load the starting weights by themselves: check that they are the trainer's, or send a resumed run's.
        await weights.publish(run.step, [env.prompt_ids(p) for p in prompts])

        async def validated(step: int) -> dict[str, float]:
            with tracker.phase("testing"), tracker.counting("validation", len(val), "prompts") as played:
                groups, accuracy = await validate(source, val, cfg.val.n, val_sampling, played)
            tracker.failed(validation_failure(source.stats))
            await traces.write(step, groups, temperature=val_sampling.temperature, kind="val")
            return accuracy

        if val and cfg.val.before_train and run.step == 0:
            tracker.rewind(-1)  # an attempt that ended before its first checkpoint may have done this
            tracker.log(0, await validated(0))
        for step in run.steps():
            with tracker.phase("gen"):
                groups = await run.unless_stopped(batches.next())
                if groups is None:
                    break
                await pool.settled()
                metrics = rollout_metrics(groups, source)
                tracker.failed(failures(source))
                baselines = await greedy_rewards(source, groups) if greedy else None
            await traces.write(step, groups, temperature=sampling.temperature)
            tracker.sampled(groups)
            for line in examine(groups, cfg.reward.examine):
                tracker.note(line)
            await weights.to_trainers()
            kept, of_updates = await learner.learn(groups, version=weights.version, baselines=baselines)
            await traces.write_advantages(step, groups)
            metrics |= of_updates
            reached = position()
            if run.due(cfg.train.save_every, step):
                await run.save(step, learner.trained, reached)
            with tracker.phase("sync"):
                metrics |= watch.check(await weights.publish(step, [t.tokens for t in kept]))
            if val and run.due(cfg.train.val_every, step):
                metrics |= await validated(step)
            run.finished(step, metrics)
        if run.step > run.saves.step:  # asked to stop
            await weights.to_trainers()
            await run.save(run.step, learner.trained, reached)
    run.raise_if_interrupted()


async def _sample_only(run: TrainingRun, prompts: Sequence[Prompt], env: Environment, graders: GraderPool) -> None:
    """`--rollout-only`: the same batches, all sampled with the weights of `model.path`. The traces are the result, and
    tell a run that goes on how far it had come."""
    cfg, tracker = run.cfg, run.tracker
    sampling = sampling_of(cfg.rollout)
    order = BatchOrder(len(prompts), cfg.data.batch_size, cfg.run.seed, cfg.data.shuffle)
    async with Cluster(cfg, run.folder.logs) as cluster, AsyncExitStack() as closing:
        with tracker.phase("start"):
            stops = sorted(env.stop_token_ids)
            samplers = await cluster.samplers(run.source, stops)
            pool = SamplerPool(samplers, partial(cluster.sampler, run.source, stops), cfg.cluster.sampler_restarts)
            source = await open_source(cluster, pool, run, env, graders, closing)
            traces = await closing.enter_async_context(open_traces(run, env))
        run.step = traces.last_step()
        order.position = run.step * cfg.data.batch_size
        tracker.rewind(run.step)
        for step in run.steps():
            with tracker.phase("gen"):
                groups = await source.sample([prompts[i] for i in order.next()], cfg.rollout.n, sampling)
            await traces.write(step, groups, temperature=sampling.temperature)
            tracker.sampled(groups)
            for line in examine(groups, cfg.reward.examine):
                tracker.note(line)
            kept = usable(groups)
            metrics = {"perf/total_num_tokens": float(sum(len(t.tokens) for t in kept))}
            metrics |= spread("critic/score", torch.tensor([t.reward for t in kept]))
            tracker.failed(failures(source))
            tracker.log(step, metrics | rollout_metrics(groups, source))
    run.raise_if_interrupted()


async def open_source(
    cluster: Cluster,
    pool: SamplerPool,
    run: TrainingRun,
    env: Environment,
    graders: GraderPool,
    closing: AsyncExitStack,
) -> TrajectorySource:
    """What plays and grades episodes with the pool's samplers. ``closing`` closes what is open."""
    closing.push_async_callback(close_tools, env.tools, run.tracker.note)
    closing.push_async_callback(pool.close)
    scorers = await open_scorers(cluster, run)
    for scorer in scorers:
        closing.push_async_callback(scorer.close)
    rewarder = Rewarder(run.cfg.reward, graders, run.cfg.rollout.max_response_tokens, scorers)
    source = TrajectorySource(pool, env, rewarder)
    run.tracker.watch(source.in_flight)
    return source


async def open_scorers(cluster: Cluster, run: TrainingRun) -> list[EpisodeScorer]:
    """The reward model and the judge of `reward.model` and `reward.judge`, where they are set."""
    reward = run.cfg.reward
    scorers: list[EpisodeScorer] = []
    if reward.model.path:
        scorers.append(await cluster.reward_model(reward.model))
    if reward.judge.url:
        scorers.append(Judge(reward.judge, run.folder.path / "judge.sqlite"))
    return scorers


def open_traces(run: TrainingRun, env: Environment) -> TraceWriter:
    """What writes the trajectories of the run, where `run.traces` asks for it."""
    cfg = run.cfg
    every = cfg.run.trace_every if cfg.run.traces else 0
    return TraceWriter(run.folder.path / "traces", every, fingerprint(env.tokenizer), cfg.cluster.step_deadline_s)


async def greedy_rewards(source: TrajectorySource, groups: Sequence[Sequence[Trajectory]]) -> dict[int, float]:
    """Row of each group's prompt -> reward of a greedy episode of it; rows whose episode failed are missing. Raises
    ``RunError`` where all failed."""
    greedy = await source.sample([group[0].prompt for group in groups], 1, GREEDY)
    found = {t.prompt.index: t.reward for (t,) in greedy if t.error is None}
    if not found:
        errors = {t.error for (t,) in greedy if t.error}
        raise RunError(f"every greedy episode of this step failed: {'; '.join(sorted(errors)[:3])}")
    return found


async def validate(
    source: TrajectorySource,
    prompts: Sequence[Prompt],
    n: int,
    sampling: Sampling,
    played: Callable[[int], None] | None = None,
) -> tuple[list[list[Trajectory]], dict[str, float]]:
    """Return episodes of held-out prompts, and metrics of them. ``played`` is called with 1 for each prompt that is
    done."""
    groups = await source.sample(prompts, n, sampling, played=played)
    return groups, validation_metrics(groups, n, source.stats)
