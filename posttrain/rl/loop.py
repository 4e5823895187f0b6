"""The training loop of `posttrain rl`: rollouts, updates of the models, new weights for the engines.

``rl.command`` checks a run and starts this loop. ``rl.sampling`` samples its rollouts with engines, ``rl.replay`` reads
them from rollout files; ``rl.learner`` turns the rollouts of a step into updates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple, Protocol

from posttrain.cluster.cluster import Cluster
from posttrain.core.types import Ids
from posttrain.rl.batch import Groups
from posttrain.rl.learner import Learner
from posttrain.runs.training_run import TrainingRun
from posttrain.tracking.examine import examine
from posttrain.train.checkpoint import State
from posttrain.weight_sync.publish import check_sequences


class RolloutBatch(NamedTuple):
    """The rollouts of a step."""

    groups: Groups
    """Rollouts by prompt"""
    metrics: dict[str, float]
    baselines: Mapping[int, float] | None = None
    """Row of a prompt -> reward of its greedy rollout, for an advantage estimator that needs it"""


class Engines(Protocol):
    """The engines that sample for a run, and the GPUs that they share with its trainers."""

    @property
    def version(self) -> int | None:
        """Version of the weights that sample; None: weights of another run did."""

    async def start(self, version: int, check: Sequence[Ids]) -> dict[str, float]:
        """Send the weights that the run goes on with as ``version``, and check them as ``publish`` does, on prompts
        where ``check`` is empty."""

    async def to_trainers(self) -> None:
        """Let the trainers work, until ``publish``."""

    async def publish(self, version: int, check: Sequence[Ids]) -> dict[str, float]:
        """Send the actor's weights to every engine as ``version``, and compare log-probabilities of the sequences
        ``check``; returns metrics. Raises ``WeightSyncError``."""


class Rollouts(Protocol):
    """The source of a run's rollouts."""

    def resume(self, step: int, state: Mapping[str, Any] | None) -> None:
        """Continue after ``step``; ``state``: of its checkpoint, if there is one. Raises ``DataError``."""

    def state(self) -> dict[str, Any]:
        """Return the position in the data, as JSON."""

    def files(self) -> dict[str, State]:
        """Return what a checkpoint keeps of episodes that are not trained on yet."""

    async def next_batch(self, step: int) -> RolloutBatch | None:
        """Return the rollouts of a step, or None if the user asks to stop first."""

    async def trained(self, step: int, groups: Groups) -> None:
        """Record the advantages that the rollouts of a step were trained with."""

    async def validate(self, step: int) -> dict[str, float]:
        """Return metrics of the validation that is due after ``step``; none where none is due."""


class Source(Protocol):
    """Starts the engines of a run and its rollouts, which the stack closes, and begins ahead what needs no trainer."""

    async def begin(self, cluster: Cluster, run: TrainingRun) -> None: ...
    async def start(
        self, cluster: Cluster, run: TrainingRun, learner: Learner, closing: AsyncExitStack
    ) -> tuple[Engines, Rollouts]: ...


async def train(run: TrainingRun, source: Source) -> None:
    """Train from the run's last checkpoint to its last step, or until the user asks to stop.

    Raises:
        RunError: a worker failed, weights did not arrive, or nothing can be trained on. The run can be resumed.
    """
    cfg, tracker = run.cfg, run.tracker
    async with AsyncExitStack() as closing:
        with tracker.phase("start"):
            cluster = await closing.enter_async_context(run.ahead or Cluster(cfg, run.folder.logs))
            await closing.enter_async_context(run)
            await source.begin(cluster, run)
            learner = await Learner.open(cluster, run)  # actor; critic, reference, teacher where the algorithm has them
        with tracker.phase("engines"):
            engines, rollouts = await source.start(cluster, run, learner, closing)
            state = await run.resume(learner.trained)

        if state is not None:
            learner.restore(state["learner"])
        rollouts.resume(run.step, state)
        synced = await engines.start(run.step, [] if state is None else state.get("check", []))
        first = run.step + 1
        warming = asyncio.create_task(learner.warm_up())  # the first update, beside the first rollouts
        closing.callback(warming.cancel)
        position = {**rollouts.state(), "learner": learner.state()}, rollouts.files()

        if cfg.val.before_train and run.step == 0 and (metrics := await rollouts.validate(0)):
            tracker.log(0, metrics)
        if run.unlogged is not None:  # the run ended between the checkpoint of its last step and the step's end
            run.finished(run.step, run.unlogged | synced | await rollouts.validate(run.step))
        for step in run.steps():
            batch = await rollouts.next_batch(step)
            if batch is None:
                break
            show(run, batch.groups)
            await engines.to_trainers()
            if step == first:
                with tracker.phase("warm_up"):  # what is left of it
                    await warming
            kept, updates = await learner.learn(batch.groups, version=engines.version, baselines=batch.baselines)
            await rollouts.trained(step, batch.groups)
            check = [[int(token) for token in ids] for ids in check_sequences([t.tokens for t in kept])]
            position = {**rollouts.state(), "learner": learner.state(), "check": check}, rollouts.files()
            metrics = batch.metrics | updates
            if run.due(cfg.train.save_every, step):  # before `publish`: trainers may leave the GPUs then
                await run.save(step, learner.trained, *position, metrics)
            metrics |= await engines.publish(step, check)
            run.finished(step, metrics | await rollouts.validate(step))
        if run.step > run.checkpoints.step:  # the user asked to stop
            await engines.to_trainers()
            await run.save(run.step, learner.trained, *position)
    run.raise_if_interrupted()


def show(run: TrainingRun, groups: Groups) -> None:
    """Show the rollouts of a step, as many in full as `reward.examine` says."""
    run.tracker.sampled(groups)
    for text in examine(groups, run.cfg.reward.examine):
        run.tracker.note(text)
