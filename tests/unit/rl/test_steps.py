"""Which models a step trains, on which episodes, and in which order engines take its weights."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.cluster.actors import ActorHandle
from posttrain.cluster.trainers import TrainerGroup
from posttrain.config.presets import resolve
from posttrain.data.pack import PackedBatch
from posttrain.models.load import ModelSource
from posttrain.rl.learner import Learner, kl_in_reward
from posttrain.rl.sampling import SyncedEngines
from posttrain.runs.run import RunDir, StopSignal
from posttrain.runs.training_run import TrainingRun
from posttrain.tracking import Tracker
from posttrain.train.spec import LossSpec
from tests.helpers.recorded import trajectory


class Model(TrainerGroup):
    """A model whose log-probabilities, or values, are all the same number. It keeps the batches that train it."""

    def __init__(self, says: float) -> None:
        super().__init__("model", [ActorHandle("model worker 0")], 60.0, 16384)
        self.says = says
        self.trained: list[PackedBatch] = []

    async def logprobs(self, batch: PackedBatch, **_: object) -> Tensor:
        return torch.where(batch.loss_mask, self.says, 0.0)

    async def update(self, batch: PackedBatch, loss: LossSpec) -> dict[str, float]:
        self.trained.append(batch)
        return {"pg_loss": 0.0, "skipped": 0.0, "seconds": 1.0, "memory_gib": 1.0, "tokens_run": 100.0}


def learner(
    folder: Path,
    algo: str,
    *sets: str,
    critic: Model | None = None,
    ref: Model | None = None,
    teacher: Model | None = None,
) -> tuple[Learner, Model]:
    """Return the learner of a run of four steps, and its actor."""
    cfg = resolve("rl", "tiny-arith", list(sets), {"algo.name": algo, "run.name": "unused"}).config
    tracker = Tracker(None, "test", 4, [])
    run = TrainingRun(cfg, RunDir(folder, resumed=False), ModelSource("builtin:tiny"), tracker, StopSignal(), 4)
    actor = Model(-1.0)
    return Learner(run, actor, critic, ref, teacher, kl_in_reward(cfg.algo)), actor


@pytest.mark.parametrize("alone", [0, 2])
async def test_the_critic_alone_is_trained_in_as_many_steps_as_its_warm_up_has(tmp_path: Path, alone: int) -> None:
    critic = Model(0.5)
    made, actor = learner(tmp_path, "ppo", f"critic.warmup_steps={alone}", critic=critic)
    trained = []
    for step in made.run.steps():
        await made.learn([[trajectory(0, 1.0), trajectory(0, 0.0)]], version=step - 1)
        trained.append((len(actor.trained), len(critic.trained)))
    assert trained == [(max(0, step - alone), step) for step in range(1, 5)]


async def test_episodes_of_a_prompt_without_a_baseline_are_left_out(tmp_path: Path) -> None:
    made, _ = learner(tmp_path, "remax")
    groups = [[trajectory(row, reward=1.0, length=4 + row)] for row in range(3)]
    kept, metrics = await made.learn(groups, version=0, baselines={0: 0.25, 2: 0.75})
    assert [t.prompt.index for t in kept] == [0, 2]
    assert metrics["rollout/missing_baselines"] == 1.0
    assert [float(t.advantages.max()) for t in kept if t.advantages is not None] == [0.75, 0.25]


async def test_a_token_that_the_teacher_finds_likelier_has_a_positive_advantage(tmp_path: Path) -> None:
    made, _ = learner(tmp_path, "opd", "algo.teacher='builtin:tiny'", teacher=Model(-0.25))
    [episode], _ = await made.learn([[trajectory(0, 0.0)]], version=0)
    assert episode.advantages is not None
    assert episode.advantages.tolist() == [0, 0, 0, 0.75, 0.75, 0.75]


async def test_a_kl_in_the_reward_takes_from_what_the_reference_finds_unlikely(tmp_path: Path) -> None:
    sets = ("algo.kl_in=reward", "algo.kl_coef=0.1", "algo.kl_estimator=k1")
    made, _ = learner(tmp_path, "reinforce++", *sets, ref=Model(-3.0))
    _, metrics = await made.learn([[trajectory(0, 1.0), trajectory(1, 1.0)]], version=0)
    assert metrics["actor/reward_kl_penalty"] == 2.0
    assert metrics["critic/rewards/mean"] == pytest.approx(1.0 - 0.1 * 2.0 * 3)
    assert metrics["critic/score/mean"] == 1.0


async def test_engines_take_weights_when_the_schedule_allows_it_and_it_hears_of_them() -> None:
    done: list[Any] = []

    class Weights:
        pool = SimpleNamespace(idle_share=lambda: 0.25)

        async def publish(self, version: int, check: Any) -> dict[str, float]:
            done.append(("publish", version, check))
            return {"sync/check_gap": 0.5}

    class Order:
        async def before_update(self, version: int) -> None:
            done.append(("before", version))

        def updated(self, version: int) -> None:
            done.append(("updated", version))

    tracker = SimpleNamespace(phase=lambda name: nullcontext(), share={"gen": 0.5, "sync": 0.125}.__getitem__)
    of_run: tuple[Any, ...] = (Weights(), [[1]], SimpleNamespace(check=dict), tracker, Order())
    engines = SyncedEngines(*of_run)
    await engines.start(3, [])  # a run that begins checks on prompts
    await engines.start(3, [[2]])
    assert done == [("publish", 3, [[1]]), ("updated", 3), ("publish", 3, [[2]]), ("updated", 3)]
    done.clear()
    metrics = await engines.publish(4, [[5]])
    assert done == [("before", 4), ("publish", 4, [[5]]), ("updated", 4)]
    waits = {"wait/trainers": 0.5, "wait/updates": 0.125, "wait/engines": 0.25}
    assert metrics == {"sync/check_gap": 0.5} | waits
