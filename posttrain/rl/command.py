"""`posttrain rl`: reinforcement learning on multi-turn episodes with tools.

This module checks a run and starts it. ``rl.loop`` is the algorithm.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain import launch
from posttrain.config.presets import Resolved
from posttrain.config.writing import flatten_config
from posttrain.data.loader import check_batch, total_steps
from posttrain.launch import TrainingJob
from posttrain.plan.budget import check_budget
from posttrain.plan.inputs import Known
from posttrain.rewards.grade import GraderPool
from posttrain.rl import replay, sampling
from posttrain.rl.loop import train
from posttrain.rollout.schedule import header
from posttrain.rollout.schedule_replay import Recorded
from posttrain.runs.episodes import episode_context, opened_again
from posttrain.runs.preflight import check_algo, check_machine, check_supported, engine_note, open_model
from posttrain.runs.prompts import (
    check_ground_truths,
    check_reward,
    fitting_prompts,
    read_tasks,
    reading_validation,
    select_prompts,
    validation_note,
)
from posttrain.runs.quantization import check_quantization
from posttrain.runs.resume import REPEATS
from posttrain.runs.training_run import Loop, TrainingRun
from posttrain.tools.base import telling, telling_warning
from posttrain.tracking.tracker import Tracker

if TYPE_CHECKING:
    from posttrain.core.types import Prompt
    from posttrain.rollout.context import EpisodeContext


def run(resolved: Resolved) -> Path:
    """Train as the config says; returns the run's folder. Raises as ``launch.run`` does."""
    return launch.run(resolved, prepare)


def dry_run(resolved: Resolved) -> str:
    """Return the plan of the run after all its checks; see ``launch.dry_run``."""
    return launch.dry_run(resolved, prepare)


def prepare(resolved: Resolved) -> TrainingJob:
    """Check all that can be checked before something is written. Raises ``UserError``."""
    return replay.prepare(resolved) if resolved.config.rollout.replay else prepare_sampling(resolved)


def prepare_sampling(resolved: Resolved) -> RlJob:
    """Check a run that samples its rollouts. Raises ``UserError``."""
    cfg = resolved.config
    source, tokenizer = open_model(cfg)
    check_supported(cfg)
    check_machine(cfg)
    in_fp8 = check_quantization(cfg, source)
    check_algo(cfg, tokenizer)
    budget = None if cfg.rollout.only else check_budget(cfg)
    env = episode_context(cfg, source, tokenizer)
    rows, train_file = read_tasks(cfg, env, "train")
    chosen, selected = select_prompts(rows, cfg.data.keep, train_file)
    prompts, left_out, mean_tokens = fitting_prompts(chosen, env, train_file, cfg.data.truncation)
    with reading_validation():
        val_rows, val_file = read_tasks(cfg, env, "val", limit=cfg.val.limit)
    val, val_left_out, _ = fitting_prompts(val_rows, env, val_file, cfg.data.truncation)
    failing = check_reward([*prompts, *val], cfg, env, train_file)
    check_ground_truths(prompts, cfg, env, train_file)
    with reading_validation():
        check_ground_truths(val, cfg, env, val_file)
    recorded = recorded_schedule(resolved, prompts) if cfg.rollout.replay_schedule else None
    steps = total_steps(len(prompts), cfg.data.batch_size, cfg.train.epochs, cfg.train.steps)
    crowded = check_batch(len(prompts), cfg.data.batch_size)
    found = (*in_fp8, selected, left_out, val_left_out, failing and f"warning: {failing}", crowded)
    notes = [note for note in found if note]
    return RlJob(resolved, source, steps, env, prompts, mean_tokens, val, notes, budget, recorded)


def recorded_schedule(resolved: Resolved, prompts: Sequence[Prompt]) -> Recorded:
    """Return the schedule of the run that this one is to repeat. Raises ``UserError`` where it cannot."""
    cfg = resolved.config
    named = Path(cfg.rollout.replay_schedule)
    own = Path(cfg.run.dir) / named
    recorded = Recorded.read(own if own.is_dir() else named)
    recorded.check(header(flatten_config(cfg), prompts), REPEATS)
    return recorded


@dataclass(frozen=True)
class RlJob(TrainingJob):
    """A run that samples its rollouts."""

    env: EpisodeContext
    prompts: Sequence[Prompt]
    mean_tokens: float
    """Mean length of the prompts"""
    val: Sequence[Prompt]
    data_notes: Sequence[str]
    """What the user should know about the data, the reward function and engines in FP8"""
    budget_gib: float | None
    """Memory that a weight update may take of a GPU; None: not known"""
    recorded: Recorded | None
    """The schedule that is repeated"""

    def notes(self) -> Iterator[str]:
        cfg = self.resolved.config
        count, batch = len(self.prompts), cfg.data.batch_size
        yield f"{count:,} prompts, {batch} a step x {cfg.rollout.n} episodes, {self.steps} steps"
        yield engine_note(self.resolved)
        if self.recorded is not None:
            yield f"repeats the schedule of {self.recorded.name}, which has {self.recorded.steps} steps"
        if not cfg.rollout.only:
            yield validation_note(self.resolved, len(self.val), "prompts")
            if self.val and (names := telling(self.env.tools.values())):
                yield telling_warning(names)
        elif cfg.data.val:
            yield "data.val is not used: rollout.only trains nothing that would be validated"
        yield from self.data_notes

    def known(self) -> Known:
        return Known(prompt=self.mean_tokens, steps=self.steps)

    @contextmanager
    def opened(self, tracker: Tracker) -> Iterator[Loop]:
        """Open the graders, which all attempts share."""
        cfg, env = self.resolved.config, self.env
        used = False

        def attempt(run: TrainingRun) -> Coroutine[Any, Any, None]:
            nonlocal env, used
            if used:  # each attempt has its own event loop, in which it closes its tools
                env = opened_again(env, cfg)
            used = True
            task = sampling.Task(env, self.prompts, self.val, graders, self.budget_gib, self.recorded)
            return sampling.sample_only(run, task) if cfg.rollout.only else train(run, task)

        with GraderPool(cfg.reward, cfg.sandbox, cfg.plugins) as graders:
            yield attempt
