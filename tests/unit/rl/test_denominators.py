"""What ratios are taken to, and how tokens are weighted, where weights of several versions sampled a batch.

Every number is worked by hand: two episodes, one prompt token each, then tokens of which the trainer (version 5) gives
``OWN`` and the engine gave ``ENGINE`` at the version that sampled them.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from posttrain.config import Config
from posttrain.rl.batch import pack
from posttrain.rl.learner import Learner
from posttrain.tracking.tracker import Tracker
from tests.helpers import recorded

VERSIONS = [[-1, 5, 4], [-1, 3, 3]]
ENGINE = [[0.0, -1.0, -2.0], [0.0, -1.5, -3.0]]
OWN = [[0.0, -1.0 + math.log(1.5), -2.0 + math.log(4.0)], [0.0, -1.5 + math.log(0.25), -3.0]]
RATIOS = [[1.5, 4.0], [0.25, 1.0]]
"""Trainer / engine of the sampled tokens."""


def scored(staleness, updates=1, **correction):
    """(the batch with its columns, metrics) of the two episodes"""

    class Actor:
        async def logprobs(self, batch):
            return torch.tensor([x for row in OWN for x in row])

    cfg = Config.model_validate(
        {
            "command": "rl",
            "data": {"batch_size": 2},
            "rollout": {"staleness": staleness},
            "algo": {"updates_per_step": updates, "correction": correction},
        }
    )
    kept = [recorded.trajectory(i, length=3, prompt_length=1) for i in range(2)]
    for trajectory, versions, engine in zip(kept, VERSIONS, ENGINE, strict=True):
        trajectory.weight_version = np.array(versions, np.int32)
        trajectory.loss_mask = trajectory.weight_version >= 0
        trajectory.logprobs = np.array(engine, np.float32)
    run = SimpleNamespace(cfg=cfg, tracker=Tracker(None, "test", 1, []))
    learner = Learner(run, Actor(), None, None, None, None)
    batch = pack(kept)

    async def score(within=False):
        if within:  # the update
            return learner._correct(batch, kept, 5, await learner.actor.logprobs(batch))
        return await learner._score(batch, kept, 5)

    return batch, score


def sampled(column):
    return column.view(2, 3)[:, 1:].flatten().tolist()


async def test_without_a_correction_ratios_are_to_the_weights_that_sampled():
    """The trainer's own log-probability for the token of version 5, the engine's for those of 3 and 4."""
    batch, score = scored(2, weight="none")
    await score()
    assert sampled(batch.old_logprobs) == pytest.approx([OWN[0][1], -2.0, -1.5, -3.0])
    assert batch.correction is None


async def test_with_staleness_every_token_is_weighted_by_the_proximal_policy_over_the_one_that_sampled():
    """With one update a step the policy that is trained is the proximal one: all its ratios are 1."""
    batch, score = scored(2, weight="token", reject="max_token", reject_above=5.0)  # rejects nothing here
    _, metrics = await score()
    assert batch.old_logprobs is None
    assert sampled(batch.correction) == pytest.approx([1.5, 2.0, 0.25, 1.0])  # 4.0 is cut to algo.correction.upper
    assert metrics["correction/truncated"] == 0.25


async def test_a_correction_of_tokens_is_left_to_the_only_update():
    """It asks for no forward pass of its own, and its metrics come of the log-probabilities of the update."""
    batch, score = scored(2)
    own, metrics = await score()
    assert (own, batch.old_logprobs, batch.correction, metrics) == (None, None, None, {})
    _, metrics = await score(within=True)
    assert metrics["correction/truncated"] == 0.25
    assert metrics["correction/weight/mean"] == pytest.approx((1.5 + 2.0 + 0.25 + 1.0) / 4)
    assert metrics["rollout_gap/same_weights/mean_abs"] == pytest.approx(math.log(1.5))


async def test_the_gap_is_told_apart_by_the_weights_that_sampled():
    """The token of version 5 has ratio 1.5; those of older ones 4, 0.25 and 1."""
    _, score = scored(2, updates=2)
    _, metrics = await score()
    assert metrics["rollout_gap/same_weights/mean_abs"] == pytest.approx(math.log(1.5))
    assert metrics["rollout_gap/same_weights/outside"] == 1.0
    assert metrics["rollout_gap/old_weights/mean_abs"] == pytest.approx(2 * math.log(4.0) / 3)
    assert metrics["rollout_gap/old_weights/outside"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("staleness", [0, 2], ids=["partial rollouts", "staleness"])
async def test_the_gap_counts_tokens_whose_ratio_is_taken_to_the_engine(staleness):
    """Of the four only one was sampled by the weights that are trained."""
    batch, score = scored(staleness, weight="none")
    _, metrics = await score()
    assert sampled(batch.old_logprobs)[1:] == [-2.0, -1.5, -3.0]
    gaps = [math.log(ratio) for row in RATIOS for ratio in row]
    assert metrics["rollout_gap/mean"] == pytest.approx(sum(gaps) / 4)
    assert metrics["rollout_gap/mean_abs"] == pytest.approx(sum(map(abs, gaps)) / 4)
    assert metrics["rollout_gap/outside"] == 0.75


async def test_with_several_updates_the_proximal_policy_is_the_one_before_the_first():
    batch, score = scored(2, updates=2)
    await score()
    assert batch.old_logprobs.tolist() == pytest.approx([x for row in OWN for x in row])
    assert sampled(batch.correction) == pytest.approx([1.5, 2.0, 0.25, 1.0])


async def test_icepop_leaves_out_tokens_outside_its_band():
    batch, score = scored(2, updates=2, lower=0.5, upper=3.0)
    _, metrics = await score()
    assert sampled(batch.correction) == pytest.approx([1.5, 0.0, 0.0, 1.0])
    assert metrics["correction/masked"] == 0.5


async def test_a_sequence_is_weighted_by_the_product_over_its_versions():
    batch, score = scored(2, weight="sequence", upper=10.0)
    await score()
    assert sampled(batch.correction) == pytest.approx([6.0, 6.0, 0.25, 0.25])


async def test_sequences_are_left_out_by_the_mean_or_the_largest_ratio_over_their_versions():
    """Geometric means: sqrt(1.5 * 4) = 2.449 and sqrt(0.25) = 0.5; largest: 4 and 1 / 0.25."""
    batch, score = scored(2, weight="none", reject="geometric_mean", reject_above=2.1)
    _, metrics = await score()
    assert sampled(batch.correction) == [0.0, 0.0, 1.0, 1.0]
    assert metrics["correction/rejected"] == 0.5
    batch, score = scored(2, weight="none", reject="max_token", reject_above=3.9)
    await score()
    assert sampled(batch.correction) == [0.0] * 4


async def test_partial_rollouts_of_a_synchronous_run_have_the_correction_in_their_ratio():
    batch, score = scored(0, weight="token")
    await score()
    assert sampled(batch.old_logprobs) == pytest.approx([OWN[0][1], -2.0, -1.5, -3.0])
    assert sampled(batch.correction) == pytest.approx([1.5, 1.0, 1.0, 1.0])


async def test_the_correction_is_off_in_a_synchronous_run_unless_it_is_asked_for():
    batch, score = scored(0)
    await score()
    assert batch.correction is None
