"""Rollouts that the engines of a run sample: for its steps, its validations, and for `--rollout-only`."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from posttrain.algos import ADVANTAGES
from posttrain.cluster.cluster import Cluster
from posttrain.cluster.synced_samplers import SyncedSamplers
from posttrain.config.writing import flatten_config
from posttrain.core.errors import RunError
from posttrain.core.sizes import SYNC_CHECK_SEQUENCES
from posttrain.core.types import GREEDY
from posttrain.data.loader import BatchOrder
from posttrain.plan.budget import MemoryBudget
from posttrain.rewards.compose import Rewarder
from posttrain.rewards.grade import GraderPool
from posttrain.rewards.judge import Judge
from posttrain.rl.batch import Groups, usable
from posttrain.rl.learner import Learner
from posttrain.rl.loop import RolloutBatch, show
from posttrain.rl.metrics import (
    failures,
    rollout_metrics,
    spread,
    staleness_metrics,
    validation_failure,
    validation_metrics,
)
from posttrain.rollout.agents import with_branches
from posttrain.rollout.batches import TrainingBatches
from posttrain.rollout.files import RolloutFiles, fingerprint, rollouts_folder, write_rollouts
from posttrain.rollout.pool import SamplerPool
from posttrain.rollout.schedule import FILE as SCHEDULE
from posttrain.rollout.schedule import Schedule, ScheduleLog, header
from posttrain.rollout.schedule_replay import Recorded, Replay
from posttrain.rollout.source import TrajectorySource
from posttrain.rollout.writer import RolloutWriter
from posttrain.runs.preflight import sampling_of
from posttrain.runs.resume import play_changes
from posttrain.runs.training_run import TrainingRun
from posttrain.tools.sets import close_tools
from posttrain.tracking.tracker import Tracker
from posttrain.train.checkpoint import Checkpoint, State

if TYPE_CHECKING:
    from posttrain.core.types import Ids, Prompt
    from posttrain.rewards.base import EpisodeScorer
    from posttrain.rollout.context import EpisodeContext


IN_FLIGHT = "in_flight.parquet"
"""File of a checkpoint: what has been played of groups that are not trained on yet."""


@dataclass(frozen=True)
class Task:
    """The prompts of a run, and what plays and grades their episodes: a ``Source`` of the loop."""

    env: EpisodeContext
    prompts: Sequence[Prompt]
    val: Sequence[Prompt]
    graders: GraderPool
    budget_gib: float | None = None
    """Memory that a weight update may take of a GPU; None: not known."""
    recorded: Recorded | None = None
    """The schedule that the run repeats."""

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end a turn, in ascending order."""
        return sorted(self.env.stop_token_ids)

    def order(self, run: TrainingRun) -> BatchOrder:
        """Return the order in which the steps of a run draw the prompts."""
        cfg = run.cfg
        return BatchOrder(len(self.prompts), cfg.data.batch_size, cfg.run.seed, cfg.data.shuffle)

    def schedule(self, run: TrainingRun) -> Schedule:
        """Return what records the order of a run's groups, or repeats a recorded one, where that is asked for."""
        cfg = run.cfg
        if not cfg.rollout.record_schedule:
            return Schedule()
        log = ScheduleLog(run.folder.path / SCHEDULE, header(flatten_config(cfg), self.prompts), cfg.run.seed)
        if self.recorded is None:
            return log
        return Replay(self.recorded, cfg.run.seed, log, cfg.rollout.episode_deadline_s)

    async def begin(self, cluster: Cluster, run: TrainingRun) -> None:
        """Begin to start the engines."""
        await cluster.begin_samplers(run.source, self.stop_token_ids)

    async def start(
        self, cluster: Cluster, run: TrainingRun, learner: Learner, closing: AsyncExitStack
    ) -> tuple[SyncedEngines, SampledRollouts]:
        """Start the engines of a run, its tools and graders; ``closing`` closes them."""
        await open_player(self, closing)
        weights = SyncedSamplers(cluster, learner.actor, learner.models)
        pool = await weights.start(run.source, self.stop_token_ids)
        first = [self.env.prompt_ids(prompt) for prompt in self.prompts[:SYNC_CHECK_SEQUENCES]]
        schedule, memory = self.schedule(run), MemoryBudget(self.budget_gib, run.tracker.note)
        engines = SyncedEngines(weights, first, memory, run.tracker, schedule)
        source = await open_source(cluster, pool, run, self, closing, seed=schedule.seed)
        n, sampling = run.cfg.rollout.n, sampling_of(run.cfg.rollout)
        batches = TrainingBatches(source, self.prompts, self.order(run), n=n, sampling=sampling, schedule=schedule)
        closing.push_async_callback(batches.close)
        writer = await closing.enter_async_context(open_writer(run, self.env))
        return engines, SampledRollouts(run, self, source, batches, writer)


@dataclass
class SyncedEngines:
    """The engines of a run, kept at the weights of its actor."""

    weights: SyncedSamplers
    prompts: Sequence[Ids]
    """Token ids for the check of the first update, before anything is sampled"""
    memory: MemoryBudget
    tracker: Tracker
    schedule: Schedule

    @property
    def version(self) -> int:
        return self.weights.version

    async def start(self, version: int, check: Sequence[Ids]) -> dict[str, float]:
        # Some engines have read the model by themselves, others have no weights yet: all get the trainer's.
        with self.tracker.phase("first_sync"):
            metrics = await self.weights.publish(version, check or self.prompts)
        self.schedule.updated(version)
        return metrics

    async def to_trainers(self) -> None:
        await self.weights.to_trainers()

    async def publish(self, version: int, check: Sequence[Ids]) -> dict[str, float]:
        await self.schedule.before_update(version)
        with self.tracker.phase("sync"):
            metrics = self.memory.check(await self.weights.publish(version, check))
        self.schedule.updated(version)
        shares = {"wait/trainers": self.tracker.share("gen"), "wait/updates": self.tracker.share("sync")}
        return metrics | shares | {"wait/engines": self.weights.pool.idle_share()}


@dataclass
class SampledRollouts:
    """The rollouts of a run's own policy."""

    run: TrainingRun
    task: Task
    source: TrajectorySource
    batches: TrainingBatches
    writer: RolloutWriter

    def resume(self, step: int, state: Mapping[str, Any] | None) -> None:
        played: Groups | None = None
        if state is not None and (file := Path(state["checkpoint"]) / IN_FLIGHT).is_file():
            if changes := play_changes(Checkpoint(file.parent, step), self.run.cfg):
                count, what = len(state["in_flight"]), "; ".join(changes)
                self.run.tracker.note(f"the groups that were played at the checkpoint, {count}, begin anew: {what}")
            else:
                played = RolloutFiles(str(file), tokenizer=self.writer.tokenizer).read(0)
        self.batches.resume(state, played)
        self.writer.drop_after(step)

    def state(self) -> dict[str, Any]:
        return self.batches.state()

    def files(self) -> dict[str, State]:
        groups, temperature = self.batches.in_flight(), self.run.cfg.rollout.temperature
        if not groups:
            return {}
        write = partial(write_rollouts, groups=groups, kind="train", step=0, temperature=temperature)
        return {IN_FLIGHT: partial(write, tokenizer=self.writer.tokenizer)}

    async def next_batch(self, step: int) -> RolloutBatch | None:
        """Return the rollouts of a step, and begin to write them. Raises ``RunError``."""
        run, tracker = self.run, self.run.tracker
        with tracker.phase("gen"):
            groups = await run.unless_stopped(self.batches.next(run.total_steps - step))
            if groups is None:
                return None
            await self.source.pool.settled()
            metrics = rollout_metrics(groups, self.source)
            if run.cfg.rollout.staleness:
                metrics |= staleness_metrics(groups, self.source.stats, step - 1, run.cfg.rollout.staleness)
            tracker.failed(failures(self.source))
            greedy = ADVANTAGES.get(run.cfg.algo.advantage).greedy
            baselines = await greedy_rewards(self.source, groups) if greedy else None
        await self.writer.write(step, groups, temperature=run.cfg.rollout.temperature)
        return RolloutBatch(groups, metrics, baselines)

    async def trained(self, step: int, groups: Groups) -> None:
        await self.writer.write_advantages(step, groups)

    async def validate(self, step: int) -> dict[str, float]:
        run, tracker, val = self.run, self.run.tracker, self.task.val
        if not val or (step > 0 and not run.due(run.cfg.train.val_every, step)):
            return {}
        if step == 0:
            tracker.rewind(-1)  # an attempt that ended before its first checkpoint may have validated already
        sampling = sampling_of(run.cfg.val)
        # The embedded engine's stream of random numbers begins anew with each version: a run that resumes at this step
        # does not validate, and is to sample its next one as this run does.
        seed = run.cfg.run.seed if run.cfg.rollout.engine == "hf" else None
        with tracker.phase("testing"), tracker.counting("validation", len(val), "prompts") as played:
            groups = await self.source.sample(val, run.cfg.val.n, sampling, played=played, seed=seed)
        metrics = validation_metrics(
            groups, run.cfg.val.n, self.source.stats, resamples=run.cfg.eval.resamples, seed=run.cfg.run.seed
        )
        tracker.failed(validation_failure(self.source.stats))
        shown = [with_branches(group) for group in groups]
        await self.writer.write(step, shown, temperature=sampling.temperature, kind="val")
        return metrics


async def sample_only(run: TrainingRun, task: Task) -> None:
    """Sample the batches of all steps with the weights of `model.path` (`--rollout-only`). The rollout files are the
    result; a run that goes on finds in them how far it had come."""
    cfg, tracker = run.cfg, run.tracker
    sampling, order = sampling_of(cfg.rollout), task.order(run)
    async with AsyncExitStack() as closing:
        with tracker.phase("start"):
            cluster = await closing.enter_async_context(run.ahead or Cluster(cfg, run.folder.logs))
            await open_player(task, closing)
            writer = await closing.enter_async_context(open_writer(run, task.env))
            run.step = writer.last_step()
            # An engine that began its stream of random numbers as one before it would sample of the same prompts what
            # that one has sampled. Requests of the embedded one have seeds instead, which would slow the others down.
            cluster.steps_before, seed = run.step, cfg.run.seed if cfg.rollout.engine == "hf" else None
            engines = await cluster.samplers(run.source, task.stop_token_ids)
            restart = partial(cluster.sampler, run.source, task.stop_token_ids)
            pool = SamplerPool(engines, restart, cfg.cluster.sampler_restarts)
            source = await open_source(cluster, pool, run, task, closing)
        order.position = run.step * cfg.data.batch_size
        tracker.rewind(run.step)
        for step in run.steps():
            with tracker.phase("gen"):
                drawn = order.position
                prompts = [task.prompts[i] for i in order.next()]
                cluster.steps_before = step  # of one that is replaced
                played = await source.sample(prompts, cfg.rollout.n, sampling, seed=seed, drawn=drawn)
                groups = [with_branches(group) for group in played]
            await writer.write(step, groups, temperature=sampling.temperature)
            show(run, groups)
            kept = usable(groups)
            metrics = {"perf/total_num_tokens": float(sum(len(t.tokens) for t in kept))}
            metrics |= spread("critic/score", torch.tensor([t.reward for t in kept]))
            tracker.failed(failures(source))
            tracker.log(step, metrics | rollout_metrics(groups, source))
    run.raise_if_interrupted()


async def open_player(task: Task, closing: AsyncExitStack) -> None:
    """Open what plays the episodes of an agent, if there is one. Its processes start while the engines do."""
    if task.env.agents is not None:
        await closing.enter_async_context(task.env.agents.player)


async def open_source(
    cluster: Cluster,
    pool: SamplerPool,
    run: TrainingRun,
    task: Task,
    closing: AsyncExitStack,
    *,
    seed: int | None = None,
) -> TrajectorySource:
    """Return what plays and grades episodes with the engines of ``pool``, with seeds of their own where ``seed`` is
    given. ``closing`` closes what it opens."""
    closing.push_async_callback(close_tools, task.env.tools, run.tracker.note)
    closing.push_async_callback(pool.close)
    scorers = await open_scorers(cluster, run)
    for scorer in scorers:
        closing.push_async_callback(scorer.close)
    has_user, limit = task.env.interaction is not None, run.cfg.rollout.max_response_tokens
    rewarder = Rewarder(run.cfg.reward, task.graders, limit, scorers, has_user=has_user)
    source = TrajectorySource(pool, task.env, rewarder, seed=seed)
    gc.freeze()  # else Python looks through all that was loaded so far, for a second, amid sampling
    run.tracker.watch(source.in_flight)
    return source


async def open_scorers(cluster: Cluster, run: TrainingRun) -> list[EpisodeScorer]:
    """Start the reward model of `reward.model` and the judge of `reward.judge`, where they are set."""
    reward = run.cfg.reward
    scorers: list[EpisodeScorer] = []
    if reward.model.path:
        scorers.append(await cluster.reward_model(reward.model))
    if reward.judge.url:
        scorers.append(Judge(reward.judge, run.folder.path / "judge.sqlite"))
    return scorers


def open_writer(run: TrainingRun, env: EpisodeContext) -> RolloutWriter:
    """Return what writes the rollout files of a run, where `run.rollouts` asks for them."""
    cfg = run.cfg
    every = cfg.run.rollouts_every if cfg.run.rollouts else 0
    folder = rollouts_folder(run.folder.path)
    return RolloutWriter(folder, every, fingerprint(env.tokenizer), cfg.cluster.step_deadline_s)


async def greedy_rewards(source: TrajectorySource, groups: Groups) -> dict[int, float]:
    """Sample a greedy episode of each group's prompt.

    Returns:
        Row of the prompt -> reward; rows whose episode failed are missing.

    Raises:
        RunError: all of them failed.
    """
    greedy = await source.sample([group[0].prompt for group in groups], 1, GREEDY)
    found = {t.prompt.index: t.reward for (t,) in greedy if t.error is None}
    if not found:
        errors = {t.error for (t,) in greedy if t.error}
        raise RunError(f"every greedy episode of this step failed: {'; '.join(sorted(errors)[:3])}")
    return found
