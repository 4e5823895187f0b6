"""What a learner keeps in checkpoints, and how many updates each of its models is told of."""

import json
from types import SimpleNamespace

import pytest

from posttrain.config import Config
from posttrain.rl.learner import Learner, kl_in_reward

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


# ---------------------------------------------------------------------- the KL coefficient in checkpoints


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
