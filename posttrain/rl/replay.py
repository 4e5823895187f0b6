"""Rollouts that were recorded before, for `posttrain rl --replay`: training without an engine.

Step k of the run takes the rollouts of the k-th recorded step, with the rewards that they got. Another policy than the
one that is trained sampled them (at the first step perhaps the same), so ratios are taken to the log-probabilities that
its engine recorded, and the clip acts on how far the two have drifted apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.algos.catalog import ADVANTAGES
from posttrain.cluster.cluster import Cluster
from posttrain.config import Config
from posttrain.config.presets import Resolved
from posttrain.core.errors import ConfigError, DataError
from posttrain.core.files import first_within
from posttrain.data.loader import total_steps
from posttrain.launch import TrainingJob
from posttrain.models.load import load_config
from posttrain.plan.inputs import Known
from posttrain.rl.batch import Groups, usable
from posttrain.rl.learner import Learner
from posttrain.rl.loop import RolloutBatch, train
from posttrain.rl.metrics import episode_metrics
from posttrain.rollout.files import RolloutFiles, fingerprint
from posttrain.runs.preflight import check_algo, check_machine, check_supported, open_model
from posttrain.runs.training_run import Loop, TrainingRun
from posttrain.tracking.tracker import Tracker
from posttrain.train.checkpoint import State

if TYPE_CHECKING:
    from posttrain.core.types import Ids

_OF_SAMPLING = ("rollout.", "reward.", "val.", "tools")
_READ = ("rollout.replay", "rollout.temperature", "rollout.max_response_tokens", "rollout.router_replay")


def prepare(resolved: Resolved) -> ReplayJob:
    """Check config, model and rollout files. Of these the index and the first step are read; a damaged row further on
    ends the run when it gets there. Raises ``UserError``."""
    cfg = resolved.config
    source, tokenizer = open_model(cfg)
    check_supported(cfg)
    check_machine(cfg)
    check_algo(cfg, tokenizer)
    vocabulary = int(load_config(source).get_text_config().vocab_size)
    files = RolloutFiles(cfg.rollout.replay, vocabulary=vocabulary, tokenizer=fingerprint(tokenizer))
    check_apart(files, cfg)
    return ReplayJob(resolved, source, replayed_steps(files, cfg), files, files.read(files.steps[0]))


def unread(resolved: Resolved) -> list[str]:
    """Return the keys of sampling and rewards on the command line that a replay does not read. Presets have some as
    well: they are of runs that sample."""
    read = (*_READ, "reward.weights") if ADVANTAGES.get(resolved.config.algo.advantage).parts else _READ
    given = (key for key, origin in resolved.provenance.items() if origin.startswith(("--", "flag --")))
    return [key for key in given if key.startswith(_OF_SAMPLING) and not key.startswith(read)]


@dataclass(frozen=True)
class ReplayJob(TrainingJob):
    """A run that trains on recorded rollouts."""

    files: RolloutFiles
    first: Groups
    """The rollouts of the first recorded step."""

    def notes(self) -> Iterator[str]:
        yield f"replay of {self.files.name}: {len(self.files.steps)} recorded steps, {self.steps} steps"
        if self.resolved.config.data.val:
            yield "data.val is not used: a replay has no sampler to validate with"
        if self.resolved.config.data.keep:
            yield "data.keep is not used: a replay trains on all prompts that were sampled"
        if keys := unread(self.resolved):
            yield f"not used: {', '.join(keys)}: rollout files hold what was sampled, with its rewards"

    def known(self) -> Known:
        """Return the lengths of the first recorded step."""
        trajectories = usable(self.first)
        without_loss = sum(int((~trajectory.loss_mask).sum()) for trajectory in trajectories) / len(trajectories)
        return Known(tuple(len(trajectory.tokens) for trajectory in trajectories), without_loss, self.steps)

    @contextmanager
    def opened(self, tracker: Tracker) -> Iterator[Loop]:
        yield partial(train, source=self)

    async def begin(self, cluster: Cluster, run: TrainingRun) -> None:
        """Files need nothing."""

    async def start(
        self, cluster: Cluster, run: TrainingRun, learner: Learner, closing: AsyncExitStack
    ) -> tuple[NoEngines, RecordedRollouts]:
        return NoEngines(), RecordedRollouts(run, self.files)


class NoEngines:
    """The engines of a replay: none samples, and none needs new weights."""

    version = None

    async def start(self, version: int, check: Sequence[Ids]) -> dict[str, float]:
        return {}

    async def to_trainers(self) -> None:
        """The trainers have the GPUs for themselves."""

    async def publish(self, version: int, check: Sequence[Ids]) -> dict[str, float]:
        return {}


@dataclass
class RecordedRollouts:
    """The recorded steps of rollout files, in their order, again from the first after the last."""

    run: TrainingRun
    recorded: RolloutFiles

    def resume(self, step: int, state: Mapping[str, Any] | None) -> None:
        count = len(self.recorded.steps)
        if state is not None and state["recorded_steps"] != count:
            raise DataError(
                f"the checkpoint was made with {state['recorded_steps']} recorded steps; now there are {count}",
                hint="put the rollout files back, or start again with --overwrite",
            )

    def state(self) -> dict[str, Any]:
        return {"recorded_steps": len(self.recorded.steps)}

    def files(self) -> dict[str, State]:
        return {}

    async def next_batch(self, step: int) -> RolloutBatch:
        with self.run.tracker.phase("read"):
            groups = self.recorded.read(self.recorded.steps[(step - 1) % len(self.recorded.steps)])
        return RolloutBatch(groups, episode_metrics(groups))

    async def trained(self, step: int, groups: Groups) -> None:
        """The files keep what their own run was trained with."""

    async def validate(self, step: int) -> dict[str, float]:
        return {}


def check_apart(files: RolloutFiles, cfg: Config) -> None:
    """Raise ``ConfigError`` for rollout files in the run's own folder, where `--overwrite` would delete them."""
    folder = (Path(cfg.run.dir) / cfg.run.name).resolve()
    if (inside := first_within(folder, files.files)) is not None:
        raise ConfigError(f"{inside} lies in the folder of this run, {folder}", hint="give another name with --name")


def replayed_steps(files: RolloutFiles, cfg: Config) -> int:
    """Return the number of steps of the run.

    Raises:
        ConfigError: the config asks for more than was recorded, or for another temperature than that of sampling.
    """
    available = len(files.steps) * cfg.train.epochs
    steps = total_steps(len(files.steps), 1, cfg.train.epochs, cfg.train.steps)
    if steps > available:
        raise ConfigError(
            f"train.steps = {steps}, and {files.name} hold {available} steps in {cfg.train.epochs} epochs",
            hint=f"--steps {available}, or a higher train.epochs to go through them again",
        )
    other = sorted(files.temperatures - {cfg.rollout.temperature})
    if other:
        raise ConfigError(
            f"{files.name} were sampled at temperature {other[0]:g}, and rollout.temperature = "
            f"{cfg.rollout.temperature:g}: their log-probabilities are of another distribution",
            hint=f"--set rollout.temperature={other[0]:g}",
        )
    return steps
