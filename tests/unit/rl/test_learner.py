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
