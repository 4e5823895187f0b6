"""What a learner keeps in checkpoints, how its KL coefficient adapts, and how many updates its models are told of."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from posttrain.config import Config
from posttrain.config.presets import resolve
from posttrain.models.load import ModelSource
from posttrain.rl.batch import pack
from posttrain.rl.learner import Learner, kl_in_reward
from posttrain.rollout.agents import with_branches
from posttrain.runs.run import RunDir, StopSignal
from posttrain.runs.training_run import TrainingRun
from posttrain.tracking import Tracker
from posttrain.train.spec import WorkerSpec
from tests.helpers import recorded
from tests.helpers.local_trainer import local_trainer

REWARD = {"kl_in": "reward", "kl_coef": 0.05}


def learner(algo):
    cfg = Config.model_validate({"command": "rl", "algo": algo})
    return Learner(SimpleNamespace(cfg=cfg), object(), None, None, None, kl_in_reward(cfg.algo))


def as_stored(made):
    return json.loads(json.dumps(made.state()))


# ---------------------------------------------------------------------- updates


@pytest.mark.parametrize(("steps", "alone", "actor", "critic"), [(10, 0, 20, 20), (10, 4, 12, 20)], ids=str)
async def test_schedules_of_the_learning_rate_end_with_the_last_update(steps, alone, actor, critic, monkeypatch):
    """The critic is trained from the first step, and the actor after the steps in which the critic is alone."""
    cfg = Config.model_validate(
        {"command": "rl", "critic": {"warmup_steps": alone}, "algo": {"advantage": "gae", "updates_per_step": 2}}
    )
    told = {}

    class Cluster:
        async def trainer(self, role, source, *, total_steps, **kwargs):
            told[role] = total_steps

    run = SimpleNamespace(cfg=cfg, source=None, total_steps=steps, describe=lambda group: None)
    monkeypatch.setattr("posttrain.rl.learner.load_vision", lambda source: None)
    await Learner.open(Cluster(), run)
    assert told == {"actor": actor, "critic": critic}


# ---------------------------------------------------------------------- the KL coefficient


def played(group, *sampled, reward):
    """Return an episode of an agent whose branches have so many sampled tokens."""
    generator = np.random.default_rng(sum(sampled))

    def branch(tokens, number):
        return recorded.trajectory(
            group,
            reward=reward,
            branch=number,
            tokens=generator.integers(1000, size=4 + tokens).astype(np.int32),
            loss_mask=np.array([False] * 4 + [True] * tokens),
            logprobs=np.array([0.0] * 4 + [-6.9] * tokens, np.float32),
            weight_version=np.array([-1] * 4 + [0] * tokens, np.int32),
        )

    episode, *others = [branch(tokens, number) for number, tokens in enumerate(sampled)]
    episode.branches = others
    return episode


async def test_the_kl_coefficient_adapts_to_the_mean_of_all_branches_tokens_and_counts_episodes(tmp_path):
    """Three episodes of seven branches that can be trained on, beside one that failed: the horizon is in episodes."""
    sets = [
        "algo.kl_coef=0.1",
        "algo.kl_in=reward",
        "algo.kl_target=1.0",
        "algo.kl_horizon=100",
        "algo.kl_estimator=k1",
    ]
    cfg = resolve("rl", "tiny-arith", [*sets, "train.optim.lr=0.0"], {"run.name": "unused"}).config
    failed = played(1, 5, 9, reward=0.0)
    failed.error = "it fell"
    groups = [
        with_branches([played(0, 30, 2, 1, reward=1.0), played(0, 3, reward=0.0)]),
        with_branches([played(1, 7, 1, 4, reward=1.0), failed]),
    ]
    kept = [trajectory for group in groups for trajectory in group if trajectory.trainable]
    assert len(kept) == 7

    class Reference:
        async def logprobs(self, batch):
            """Return log-probabilities with a KL in the longest branch alone."""
            own = await actor.logprobs(batch)
            return torch.where(torch.arange(len(own)) < 34, own - 1.1 * 48 / 30, own)

    spec = WorkerSpec(ModelSource("builtin:tiny"), "cpu", "float32", 3, 1.0, cfg.train, total_steps=1)
    with local_trainer(spec) as actor, Tracker(None, "test", 1, []) as tracker:
        run = TrainingRun(cfg, RunDir(tmp_path, resumed=False), spec.source, tracker, StopSignal(), 1)
        learner = Learner(run, actor, None, Reference(), None, kl_in_reward(cfg.algo))
        _, metrics = await learner.learn(groups, version=0)
    assert int(pack(kept).loss_mask.sum()) == 48
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(1.1, rel=1e-4)  # over tokens, not over branches
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
    assert learner.kl.value == pytest.approx(0.1 * (1 + 0.1 * 3 / 100), rel=1e-6)


@pytest.mark.parametrize("earlier", [{}, {"kl_in": "reward", "kl_coef": 0.2}, {"kl_coef": 0.2}])
@pytest.mark.parametrize("adapts", [{}, {"kl_target": 0.1}])
def test_a_branch_has_the_kl_coefficient_that_it_is_given(earlier, adapts):
    branch = learner(REWARD | adapts)
    branch.restore(as_stored(learner(earlier)))
    assert branch.kl.value == 0.05


def test_a_kl_coefficient_that_adapts_goes_on_from_its_value():
    algo = REWARD | {"kl_target": 0.1}
    before = learner(algo)
    before.kl.update(10.0, 1000)
    assert before.kl.value > 0.05
    again = learner(algo | {"kl_horizon": 5000})
    again.restore(as_stored(before))
    assert again.kl.value == before.kl.value
    without = as_stored(before)
    del without["kl_settings"]  # a checkpoint of before
    again = learner(algo)
    again.restore(without)
    assert again.kl.value == before.kl.value
    other = learner(algo | {"kl_target": 0.2})
    other.restore(as_stored(before))
    assert other.kl.value == 0.05
