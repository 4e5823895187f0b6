"""`posttrain rl --replay`: train from recorded trajectories, without a sampler.

Step k of the run takes the trajectories of the k-th recorded step, with the rewards that they got. Another policy than
the one that is trained sampled them (at the first step perhaps the same), so ratios are taken to the log-probabilities
that its engine recorded, and the clip acts on how far the two have drifted apart.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from posttrain.cluster.cluster import Cluster
from posttrain.config import Config
from posttrain.config.presets import Resolved
from posttrain.core.errors import ConfigError, DataError
from posttrain.data.loader import total_steps
from posttrain.models.load import load_config
from posttrain.plan import command as plan
from posttrain.rl.batch import usable
from posttrain.rl.learner import Learner
from posttrain.rl.metrics import episode_metrics
from posttrain.rollout.files import RolloutFiles, fingerprint
from posttrain.runs.preflight import check_algo, check_machine, check_supported, open_model
from posttrain.runs.run import RunPlace, StopSignal
from posttrain.runs.training import TrainingRun, check_profile, open_tracker, recorded, train
from posttrain.tracking.examine import examine

if TYPE_CHECKING:
    from posttrain.core.types import Trajectory
    from posttrain.models.load import ModelSource


def run(resolved: Resolved) -> Path:
    """Train as the config says from the traces of `rollout.replay`; returns the run's folder.

    Raises:
        UserError: bad config, traces or model, before anything is written. (Of the traces the index and the first step
            are looked at then; a damaged row further on ends the run when it gets there.)
        RunError: a worker failed; the run can be resumed.
    """
    cfg, place = resolved.config, RunPlace.find(resolved)
    source, traces, steps, _ = prepare(cfg)
    place.check_steps(steps)
    folder = place.open()
    with recorded(cfg, folder) as reporter, StopSignal() as stop, open_tracker(cfg, folder, steps) as tracker:
        tracker.note(f"replay of {traces.name}: {len(traces.steps)} recorded steps, {steps} steps")
        if cfg.data.val:
            tracker.note("data.val is not used: a replay has no sampler to validate with")
        training = TrainingRun(cfg, folder, source, tracker, stop, steps, reporter)
        train(training, lambda attempt: _train(attempt, traces))
    return folder.path


def dry_run(resolved: Resolved) -> str:
    """Everything up to the start of the workers, and then the plan, with the lengths of the first recorded step. Raises
    ``UserError`` as ``run`` does."""
    _, _, steps, first = prepare(resolved.config)
    trajectories = usable(first)
    without_loss = sum(int((~trajectory.loss_mask).sum()) for trajectory in trajectories) / len(trajectories)
    lengths = tuple(len(trajectory.tokens) for trajectory in trajectories)
    return plan.show(resolved.config, known=plan.Known(lengths, without_loss, steps))


class Prepared(NamedTuple):
    """What a replay begins with."""

    source: ModelSource
    traces: RolloutFiles
    steps: int
    first: list[list[Trajectory]]
    """The groups of the first step"""


def prepare(cfg: Config) -> Prepared:
    """Check all that can be checked before something is written. Raises ``UserError``."""
    source, tokenizer = open_model(cfg)
    check_supported(cfg)
    check_machine(cfg)
    check_algo(cfg, tokenizer)
    vocabulary = int(load_config(source).get_text_config().vocab_size)
    traces = RolloutFiles(cfg.rollout.replay, vocabulary=vocabulary, tokenizer=fingerprint(tokenizer))
    check_apart(traces, cfg)
    steps = replayed_steps(traces, cfg)
    check_profile(cfg, steps)
    return Prepared(source, traces, steps, traces.read(traces.steps[0]))


async def _train(run: TrainingRun, traces: RolloutFiles) -> None:
    cfg, tracker = run.cfg, run.tracker
    async with Cluster(cfg, run.folder.logs) as cluster, run:
        with tracker.phase("start"):
            learner = await Learner.open(cluster, run)
        recorded_steps = len(traces.steps)
        if (state := await run.resume(learner.trained)) is not None:
            if state["recorded_steps"] != recorded_steps:
                raise DataError(
                    f"the checkpoint was made with {state['recorded_steps']} recorded steps; now there are "
                    f"{recorded_steps}",
                    hint="put the trace files back, or start again with --overwrite",
                )
            learner.restore(state["learner"])

        async def save(step: int) -> None:
            position = {"recorded_steps": recorded_steps, "learner": learner.state()}
            await run.save(step, learner.trained, position)

        for step in run.steps():
            with tracker.phase("read"):
                groups = traces.read(traces.steps[(step - 1) % len(traces.steps)])
            tracker.sampled(groups)
            for line in examine(groups, cfg.reward.examine):
                tracker.note(line)
            _, metrics = await learner.learn(groups, version=None)
            metrics |= episode_metrics(groups)
            if run.due(cfg.train.save_every, step):
                await save(step)
            run.finished(step, metrics)
        if run.step > run.saves.step:  # stopped by the user
            await save(run.step)
    run.raise_if_interrupted()


def check_apart(traces: RolloutFiles, cfg: Config) -> None:
    """Raise ``ConfigError`` for traces that lie in the run's own folder, where `--overwrite` would delete them."""
    folder = (Path(cfg.run.dir) / cfg.run.name).resolve()
    inside = next((file for file in traces.files if folder in Path(file).resolve().parents), None)
    if inside is not None:
        raise ConfigError(f"{inside} lies in the folder of this run, {folder}", hint="give another name with --name")


def replayed_steps(traces: RolloutFiles, cfg: Config) -> int:
    """How many steps the run has.

    Raises:
        ConfigError: the config asks for more than was recorded, or for another temperature than that of sampling.
    """
    available = len(traces.steps) * cfg.train.epochs
    steps = total_steps(len(traces.steps), 1, cfg.train.epochs, cfg.train.steps)
    if steps > available:
        raise ConfigError(
            f"train.steps = {steps}, and {traces.name} hold {available} steps in {cfg.train.epochs} epochs",
            hint=f"--steps {available}, or a higher train.epochs to go through them again",
        )
    other = sorted(traces.temperatures - {cfg.rollout.temperature})
    if other:
        raise ConfigError(
            f"{traces.name} were sampled at temperature {other[0]:g}, and rollout.temperature = "
            f"{cfg.rollout.temperature:g}: their log-probabilities are of another distribution",
            hint=f"--set rollout.temperature={other[0]:g}",
        )
    return steps
