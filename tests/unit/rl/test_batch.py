"""Columns and metrics of a step's batch, worked by hand."""

from __future__ import annotations

import pytest
import torch

from posttrain.config import Config
from posttrain.core.errors import RunError
from posttrain.rl.batch import explained_variance, fill_advantages, for_critic, keep_advantages, pack, usable
from tests.helpers.recorded import trajectory


@pytest.mark.parametrize(
    ("values", "explained"),
    [
        ([1.0, 2.0, 3.0, 6.0], 1.0),
        ([11.0, 12.0, 13.0, 16.0], 1.0),  # a constant error explains as much
        ([3.0, 3.0, 3.0, 3.0], 0.0),
        ([0.5, 1.0, 1.5, 3.0], 0.75),
        ([-1.0, -2.0, -3.0, -6.0], -3.0),
    ],
)
def test_the_explained_variance_of_a_critic(values: list[float], explained: float) -> None:
    returns = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert explained_variance(torch.tensor(values), returns) == pytest.approx(explained)
    assert explained_variance(torch.tensor(values), torch.ones(4)) == 0.0


def test_a_critic_learns_from_all_sampled_tokens_alike() -> None:
    batch = pack([trajectory(0, length=5), trajectory(1, length=9)])
    batch.loss_weights = torch.rand(14)
    weights = for_critic(batch).loss_weights
    assert weights is not None
    assert weights.tolist() == pytest.approx([0, 0, 0, 1 / 8, 1 / 8, 0, 0, 0, *[1 / 8] * 6])


def test_metrics_of_a_critic_are_over_sampled_tokens() -> None:
    cfg = Config.model_validate({"command": "rl", "algo": {"advantage": "gae"}})
    kept = [trajectory(0, 1.0, length=5), trajectory(0, 3.0, length=5)]
    batch = pack(kept)
    batch.values = torch.tensor([9.0, 9.0, 9.0, 0.0, 2.0, -9.0, -9.0, -9.0, 0.0, 1.0])
    metrics = fill_advantages(batch, kept, [kept], cfg)
    # With gamma and lam 1 the return of each sampled token is its episode's reward.
    assert batch.returns is not None
    assert batch.returns.tolist() == pytest.approx([0, 0, 0, 1, 1, 0, 0, 0, 3, 3])
    assert [metrics[f"critic/values/{what}"] for what in ("mean", "max", "min")] == [0.75, 2.0, 0.0]
    assert [metrics[f"critic/returns/{what}"] for what in ("mean", "max", "min")] == pytest.approx([2.0, 3.0, 1.0])
    assert metrics["critic/vf_explained_var"] == pytest.approx(1.0 - 2.1875)


def test_each_episode_keeps_the_advantages_of_its_own_tokens() -> None:
    kept = [trajectory(0, length=4), trajectory(0, length=6)]
    batch = pack(kept)
    batch.advantages = torch.arange(10, dtype=torch.float64)
    keep_advantages(batch, kept)
    assert [t.advantages.tolist() for t in kept if t.advantages is not None] == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]


def test_a_weight_of_a_part_that_an_episode_lacks_is_an_error() -> None:
    sections = {"algo": {"advantage": "gdpo"}, "reward": {"weights": {"score": 1.0, "style": 1.0}}}
    cfg = Config.model_validate({"command": "rl", **sections})
    kept = [trajectory(0, 1.0), trajectory(0, 0.0)]
    kept[0].reward_parts["style"] = 1.0
    with pytest.raises(RunError, match=r"reward\.weights names style, and not every episode has it"):
        fill_advantages(pack(kept), kept, [kept], cfg)


def test_why_nothing_can_be_trained_on_is_said_with_a_hint() -> None:
    """An environment may begin with more than the model may read, which no check before the run can see."""
    long, failed = trajectory(0, length=4), trajectory(0, length=4)
    long.loss_mask[:] = False
    long.stop_reason = "prompt_too_long"
    with pytest.raises(RunError, match=r"longer than rollout\.max_prompt_tokens") as error:
        usable([[long]])
    assert error.value.hint is not None
    assert "raise rollout.max_prompt_tokens" in error.value.hint
    failed.error = "CodeError: broken"
    with pytest.raises(RunError, match="can be trained on: CodeError: broken") as error:
        usable([[long, failed]])
    assert error.value.hint is not None
    assert "column error" in error.value.hint
