"""Batches of graded trajectories, and what becomes of episodes and graders that fail."""

import asyncio
import dataclasses
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from posttrain.algos import ADVANTAGES
from posttrain.config import AlgoConfig, Config, RewardConfig
from posttrain.core.errors import CodeError, ConfigError, RunError
from posttrain.core.statistics import bootstrap, majority, wilson
from posttrain.core.types import ON_POLICY, Sampling, Score
from posttrain.rewards import DATA_SOURCES, GRADERS, cheap
from posttrain.rewards.compose import Rewarder, overlong
from posttrain.rewards.grade import GraderPool
from posttrain.rl.batch import fill_advantages, minibatch, pack, usable, weigh
from posttrain.rl.metrics import accuracy_metrics, episode_metrics, rollout_metrics, update_metrics, validation_metrics
from posttrain.rl.sampling import greedy_rewards
from posttrain.rollout.batches import has_signal
from posttrain.rollout.interaction import RetryInteraction
from posttrain.rollout.pool import SamplerPool
from posttrain.rollout.source import TrajectorySource
from tests.helpers import recorded
from tests.helpers.scripted import EOS, Gsm8kTool, ScriptedSampler, call, environment, gsm8k_prompt, tokens


@cheap  # so that it runs here, where it is registered
def moody(response, ground_truth, extra_info):
    """A grader that fails on what it does not like."""
    if "huge" in response:
        raise MemoryError
    if "boom" in response:
        raise ValueError("I do not grade that")
    return Score(score=len(response) / 10, correct="8" in response, parts={"letters": float(len(response))})


@pytest.fixture
def moody_grader(monkeypatch):
    """The grader above, registered the way a plugin does it, for data source ``test/moody``."""
    monkeypatch.setattr(GRADERS, "_entries", dict(GRADERS._entries))
    monkeypatch.setitem(DATA_SOURCES, "test/moody", "moody")
    GRADERS.register("moody")(moody)


def source(*samplers, env=None, scorers=(), **reward):
    cfg, env = RewardConfig(**reward), env or environment()
    limit, has_user = env.cfg.max_response_tokens, env.interaction is not None
    rewarder = Rewarder(cfg, GraderPool(cfg), limit, scorers, has_user=has_user)
    return TrajectorySource(SamplerPool(samplers), env, rewarder)


def prompts(count, name="openai/gsm8k"):
    return [gsm8k_prompt(index=i, source=name) for i in range(count)]


class ByPrompt(ScriptedSampler):
    """Answers each request with the next text, whatever the order; counts how many run at once."""

    def __init__(self, *turns):
        super().__init__(*turns)
        self.running = self.most = 0

    async def generate(self, prompt_ids, params, images=()):
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.01)
        self.running -= 1
        return await super().generate(prompt_ids, params, images)


async def test_groups_come_graded_and_in_prompt_order():
    sampler = ByPrompt("#### 8", "#### 9", "so #### 8", "none", "#### 8.0", "8")
    pool = source(sampler)
    groups = await pool.sample(prompts(3), 2)
    assert [[t.prompt.index for t in g] for g in groups] == [[0, 0], [1, 1], [2, 2]]
    assert [[t.reward for t in g] for g in groups] == [[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]
    assert [[t.correct for t in g] for g in groups] == [[True, False]] * 3
    length = -groups[0][0].response_length / environment().cfg.max_response_tokens
    assert groups[0][0].reward_parts == {"score": 1.0, "correct": 1.0, "format": 1.0, "length": length}
    assert (pool.stats.started, pool.stats.failed, pool.stats.grader_failed) == (6, 0, 0)
    assert sampler.most == 6
    assert {p.temperature for p in sampler.params} == {1.0}


async def test_the_tools_own_rewards_stay_beside_the_score():
    sampler = ScriptedSampler(call(8), "#### 9")
    (group,) = await source(sampler, env=environment(Gsm8kTool())).sample(prompts(1), 1)
    parts = group[0].reward_parts
    assert (parts["tool/calc_gsm8k_reward"], parts["score"], parts["format"]) == (1.0, 0.0, 1.0)
    assert group[0].reward == 0.0


async def test_without_a_rewarder_nothing_is_graded():
    ungraded = TrajectorySource(SamplerPool([ScriptedSampler("#### 8")]), environment())
    (group,) = await ungraded.sample(prompts(1), 1)
    assert (group[0].reward, group[0].correct, group[0].reward_parts) == (0.0, False, {})


async def test_episodes_are_spread_over_the_samplers():
    first, second = ByPrompt(*["#### 8"] * 10), ByPrompt(*["#### 8"] * 10)
    pool = source(first, second)
    await pool.sample(prompts(4), 2)
    assert (len(first.prompts), len(second.prompts)) == (4, 4)
    assert pool.pool.loads == [0, 0]


async def validated(pool, held_out, n, sampling=ON_POLICY):
    """(groups, metrics) of a validation."""
    groups = await pool.sample(held_out, n, sampling)
    return groups, validation_metrics(groups, n, pool.stats, resamples=100, seed=0)


@pytest.mark.parametrize("on_error", ["drop", "zero"])
async def test_validation_counts_answers_that_a_grader_cannot_finish_as_wrong(moody_grader, on_error):
    """Those of a grader that fails otherwise say nothing about the policy, and are dropped where rewards are."""
    pool = source(ScriptedSampler("8", "huge", "8", "8"), on_error=on_error)
    groups, metrics = await validated(pool, prompts(1, "test/moody"), 4)
    assert metrics["val-core/test/moody/acc/mean@4"] == 0.75
    assert [t.unfinished for t in groups[0]].count(True) == 1
    failing = source(ScriptedSampler("8", "boom", "8", "9"), on_error="drop")
    _, metrics = await validated(failing, prompts(1, "test/moody"), 4)
    assert metrics["val-core/test/moody/acc/mean@4"] == pytest.approx(2 / 3)


CONFIG = Config(command="rl")


def prepared(groups):
    """(batch with advantages, the episodes in it, metrics)"""
    kept = usable(groups)
    batch = pack(kept)
    return batch, kept, fill_advantages(batch, kept, groups, CONFIG)


async def test_all_turns_of_an_episode_stay_on_one_sampler():
    first, second = ByPrompt(call(8), "#### 8"), ByPrompt(call(9), "#### 9")
    pool = source(first, second, env=environment(Gsm8kTool()))
    (group,) = await pool.sample(prompts(1), 2)
    assert [t.turns for t in group] == [2, 2]
    for trajectory, sampler in zip(group, (first, second), strict=True):
        assert trajectory.tokens.tolist()[: len(sampler.prompts[1])] == sampler.prompts[1]


async def test_the_load_is_given_back_after_a_failure():
    pool = source(ScriptedSampler(RunError("gone")))
    await pool.sample(prompts(1), 1)
    assert pool.pool.loads == [0]


# ---------------------------------------------------------------------- failures


async def test_a_failed_episode_is_data_and_is_not_trained_on():
    sampler = ScriptedSampler("#### 8", RunError("engine fell over"), "#### 9", "#### 8")
    pool = source(sampler)
    groups = await pool.sample(prompts(2), 2)
    assert (pool.stats.started, pool.stats.failed) == (4, 1)
    assert groups[0][1].error == "RunError: engine fell over"
    batch, kept, metrics = prepared(groups)
    assert [t.reward for t in kept] == [1.0, 0.0, 1.0]
    assert batch.num_sequences == 3
    assert metrics["critic/score/mean"] == pytest.approx(2 / 3)
    # What is left of the first group has no baseline; the second is as if nothing had happened.
    last = batch.cu_seqlens[1:].long() - 1
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    torch.testing.assert_close(batch.advantages[last], torch.tensor([0.0, -half, half]))
    metrics = rollout_metrics(groups, pool)
    assert metrics["rollout/failed"] == 1.0
    assert metrics["rollout/accuracy"] == pytest.approx(2 / 3)
    assert metrics["rollout/groups_without_signal"] == 0.5


async def test_a_failing_grader_drops_the_episode(moody_grader):
    pool = source(ScriptedSampler("8", "boom", "1234567890", "88"))
    groups = await pool.sample(prompts(2, "test/moody"), 2)
    assert (pool.stats.failed, pool.stats.grader_failed) == (0, 1)
    assert "I do not grade that" in groups[0][1].error
    assert groups[0][0].reward_parts.items() >= {"score": 0.1, "letters": 1.0, "format": 0.0}.items()
    _, kept, _ = prepared(groups)
    assert [t.reward for t in kept] == [0.1, 1.0, 0.2]


async def test_a_failing_grader_counts_as_zero_where_asked(moody_grader):
    pool = source(ScriptedSampler("8", "boom"), on_error="zero")
    groups = await pool.sample(prompts(1, "test/moody"), 2)
    assert pool.stats.grader_failed == 1
    assert [(t.reward, t.correct, t.error) for t in groups[0]] == [(0.1, True, None), (0.0, False, None)]
    assert prepared(groups)[0].num_sequences == 2
    assert rollout_metrics(groups, pool)["rollout/grader_failed"] == 1.0


async def test_an_episode_that_is_cut_off_before_its_user_is_asked_has_no_part_of_the_user_and_is_graded():
    """Were it left out, the policy would learn from short answers alone."""
    weights = {"score": 1.0, "user": 0.5}
    env = replace(environment(max_response_tokens=8), interaction=RetryInteraction())
    sampler = ScriptedSampler("#### 8", "one two three four five six seven eight nine ten")
    groups = await source(sampler, env=env, weights=weights).sample(prompts(1), 2)
    assert [(t.stop_reason, t.error, t.reward) for t in groups[0]] == [("stop", None, 1.5), ("length", None, 0.0)]
    groups = await source(ScriptedSampler("#### 8"), weights=weights).sample(prompts(1), 1)
    assert "reward.weights names user" in groups[0][0].error


async def test_parts_that_a_tool_gave_count_as_zero_too(moody_grader):
    pool = source(ScriptedSampler(call("8"), "boom"), env=environment(Gsm8kTool()), on_error="zero")
    groups = await pool.sample(prompts(1, "test/moody"), 1)
    assert groups[0][0].reward_parts == dict.fromkeys(("score", "correct", "format", "tool/calc_gsm8k_reward"), 0.0)
    assert rollout_metrics(groups, pool)["reward/tool/calc_gsm8k_reward/mean"] == 0.0


@pytest.mark.parametrize("advantage", [name for name in ADVANTAGES.names() if not ADVANTAGES.get(name).by_token])
async def test_every_estimator_takes_an_episode_that_counts_as_zero(moody_grader, advantage):
    weights = {"score": 1.0, "letters": 0.5, "tool/calc": 1.0}
    groups = await source(ScriptedSampler("8", "boom"), on_error="zero", weights=weights).sample(
        prompts(1, "test/moody"), 2
    )
    zero = groups[0][1]
    assert [zero.reward_parts[name] for name in (*weights, "correct")] == [0.0] * 4
    kept = usable(groups)
    batch = pack(kept)
    cfg = Config(command="rl", algo=AlgoConfig(advantage=advantage), reward=RewardConfig(weights=weights))
    fill_advantages(batch, kept, groups, cfg, baselines={0: 0.0})
    assert torch.isfinite(batch.advantages).all()
    if ADVANTAGES.get(advantage).parts:
        first, second = (batch.advantages[end - 1] for end in batch.cu_seqlens[1:].tolist())
        assert first > 0 > second


async def test_an_estimator_with_a_critic_and_without_returns_is_refused(monkeypatch):
    """The critic would have nothing to be trained on."""

    def mine(episodes):
        return episodes.token_advantages(torch.zeros(int(episodes.mask.sum())))

    estimator = dataclasses.replace(ADVANTAGES.get("gae"), name="mine", function=mine)
    monkeypatch.setattr("posttrain.rl.batch.ADVANTAGES", SimpleNamespace(get=lambda name: estimator))
    groups = await source(ScriptedSampler("#### 8", "#### 9")).sample(prompts(1), 2)
    with pytest.raises(CodeError, match=r"gives no returns to train it on \(.*test_source.py, line"):
        prepared(groups)


async def test_an_episode_without_policy_tokens_is_left_out_of_its_group():
    """Its reward would be part of the mean that the others are compared with."""
    groups = await source(ScriptedSampler("#### 8", "#### 9", "#### 8")).sample(prompts(1), 3)
    groups[0][2].loss_mask[:] = False
    batch, kept, _ = prepared(groups)
    assert kept == groups[0][:2]
    last = batch.cu_seqlens[1:].long() - 1
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    torch.testing.assert_close(batch.advantages[last], torch.tensor([half, -half]))
    assert has_signal(groups[0], "reward")
    groups[0][1].loss_mask[:] = False
    assert not has_signal(groups[0], "reward")
    assert episode_metrics(groups)["rollout/groups_without_signal"] == 1.0


async def test_a_failing_grader_ends_the_run_where_asked(moody_grader):
    pool = source(ScriptedSampler("8", "boom"), on_error="raise")
    with pytest.raises(RunError, match=r"grader of test/moody failed.*I do not grade that"):
        await pool.sample(prompts(1, "test/moody"), 2)


async def test_an_unknown_data_source_is_an_error_not_a_zero():
    with pytest.raises(ConfigError, match="no grader for data source 'openai/gsm8'"):
        await source(ScriptedSampler("8")).sample(prompts(1, "openai/gsm8"), 1)


async def test_a_step_without_any_usable_episode_is_an_error():
    groups = await source(ScriptedSampler(RunError("a"), RunError("b"))).sample(prompts(1), 2)
    with pytest.raises(RunError, match=r"no episode of this step can be trained on: RunError: a; RunError: b"):
        prepared(groups)


async def test_greedy_episodes_that_failed_are_missing():
    sampler = ScriptedSampler("#### 9", "#### 9", RunError("gone"), "#### 8", RunError("a"), RunError("b"))
    pool = source(sampler)
    groups = await pool.sample(prompts(2), 1)
    assert await greedy_rewards(pool, groups) == {1: 1.0}
    assert [p.temperature for p in sampler.params[2:]] == [0.0, 0.0]
    with pytest.raises(RunError, match="every greedy episode of this step failed: RunError: a; RunError: b"):
        await greedy_rewards(pool, groups)


def test_validation_has_the_interval_that_eval_reports():
    groups = [[recorded.trajectory(i, correct=i % 2 == 0)] for i in range(40)]
    name = "val-core/openai/gsm8k/acc/mean@1"
    found = accuracy_metrics(groups, 1, resamples=200, seed=3)
    ends = bootstrap(np.array([[float(i % 2 == 0)] for i in range(40)]), 200, 3)[:, 0]
    assert found == {name: 0.5, f"{name}/low": ends[0], f"{name}/high": ends[1]}
    assert 0.3 < ends[0] < 0.5 < ends[1] < 0.7
    assert accuracy_metrics(groups, 1, resamples=0, seed=3) == {name: 0.5}


async def test_validation_counts_what_was_graded():
    sampler = ScriptedSampler("#### 8", "#### 9", RunError("gone"), "#### 8")
    groups, metrics = await validated(source(sampler), prompts(2), 2, Sampling(0.5))
    assert [[t.correct for t in g] for g in groups] == [[True, False], [False, True]]
    assert metrics == {
        "val-core/openai/gsm8k/acc/mean@2": pytest.approx((1 / 2 + 1) / 2),  # of prompts, not of episodes
        "val-core/openai/gsm8k/acc/mean@2/low": pytest.approx(wilson(0.75, 2)[0]),  # as `eval` has it for few problems
        "val-core/openai/gsm8k/acc/mean@2/high": pytest.approx(wilson(0.75, 2)[1]),
        "val-core/openai/gsm8k/acc/best@2": 1.0,
        "val-core/openai/gsm8k/acc/maj@2": pytest.approx((0.5 + 1.0) / 2),  # 8 and 9 once each; 8 alone
        "rollout/val_episodes": 4.0,
        "rollout/val_failed": 1.0,
    }
    assert {p.temperature for p in sampler.params} == {0.5}
    for episode in (t for group in groups for t in group):
        episode.extracted = None  # as with a reward function that returns a number
    assert list(accuracy_metrics(groups, 2, resamples=0, seed=0)) == [
        "val-core/openai/gsm8k/acc/mean@2",
        "val-core/openai/gsm8k/acc/best@2",
    ]


# ---------------------------------------------------------------------- the parts of a reward


class Opinion:
    """A scorer that likes long answers, and fails on one of them."""

    name = "model"

    async def score(self, episodes):
        return [
            Score(0.0, False, error="too long") if "boom" in t.response_text else Score(float(t.response_length), False)
            for t in episodes
        ]

    async def close(self):
        pass


async def test_a_reward_is_the_weighted_sum_of_its_parts():
    weights = {"score": 1.0, "format": 0.25, "length": 2.0, "overlong": 3.0, "tool/calc_gsm8k_reward": 0.5}
    pool = source(
        ScriptedSampler(call(8), "#### 9"),
        env=environment(Gsm8kTool()),
        weights=weights,
        overlong={"buffer_tokens": 1000},
    )
    (group,) = await pool.sample(prompts(1), 1)
    episode = group[0]
    most = environment().cfg.max_response_tokens
    share = episode.response_length / most
    late = (episode.response_length - (most - 1000)) / 1000
    assert late > 0
    assert episode.reward_parts["overlong"] == pytest.approx(-late)
    assert episode.reward == pytest.approx(0.0 + 0.25 - 2 * share - 3 * late + 0.5 * 1.0)


async def test_a_tool_that_was_not_called_adds_nothing():
    pool = source(
        ScriptedSampler("#### 8"),
        env=environment(Gsm8kTool()),
        weights={"score": 1.0, "tool/calc_gsm8k_reward": 5.0},
    )
    (group,) = await pool.sample(prompts(1), 1)
    assert group[0].reward == 1.0


async def test_all_or_nothing_is_a_choice_of_weights(moody_grader):
    pool = source(ScriptedSampler("8", "1234"), weights={"correct": 1.0})
    (group,) = await pool.sample(prompts(1, "test/moody"), 2)
    assert [t.reward for t in group] == [1.0, 0.0]
    assert [t.reward_parts["score"] for t in group] == [0.1, 0.4]


async def test_a_weight_whose_part_no_grader_gives_is_an_error_of_the_episode(moody_grader):
    pool = source(ScriptedSampler("8"), weights={"score": 1.0, "leters": 1.0})
    (group,) = await pool.sample(prompts(1, "test/moody"), 1)
    assert "reward.weights names leters, and the episode has correct, format, length, letters" in group[0].error
    assert pool.stats.grader_failed == 1


async def test_scorers_join_the_rules_and_may_fail():
    weights = {"score": 1.0, "model": 0.1}
    pool = source(ScriptedSampler("#### 8", "boom"), scorers=[Opinion()], weights=weights, model={"path": "somewhere"})
    (group,) = await pool.sample(prompts(1), 2)
    assert group[0].reward == pytest.approx(1.0 + 0.1 * group[0].response_length)
    assert group[1].error == "reward: model failed: too long"


async def test_a_reward_that_is_no_finite_number_is_an_error_of_the_episode():
    """It would be the mean of its group, and lose the advantages of all of it."""

    class Dazed(Opinion):
        async def score(self, episodes):
            return [replace(score, score=math.nan) for score in await super().score(episodes)]

    pool = source(
        ScriptedSampler("#### 8"), scorers=[Dazed()], weights={"score": 1.0, "model": 0.1}, model={"path": "x"}
    )
    (group,) = await pool.sample(prompts(1), 1)
    assert group[0].error == "reward: the part model of the reward is nan"
    assert pool.stats.grader_failed == 1


@pytest.mark.parametrize(
    ("length", "punishment"), [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (120, -1.0)]
)
def test_overlong_punishment_by_hand(length, punishment):
    assert overlong(length, 100, 20) == pytest.approx(punishment)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"weights": {}}, "every episode would earn 0"),
        ({"weights": {"judge": 1.0}}, "reward.judge.url is not set"),
        ({"judge": {"url": "http://x/v1"}}, "gives 'judge' no weight"),
        ({"overlong": {"buffer_tokens": 5}}, "gives 'overlong' no weight"),
        ({"weights": {"score": 1.0, "model": 1.0}}, "reward.model.path is not set"),
    ],
)
def test_parts_and_weights_go_together(reward, message):
    with pytest.raises(ValidationError, match=message):
        RewardConfig(**reward)


# ---------------------------------------------------------------------- the batch


async def graded(*texts, n=2):
    return await source(ScriptedSampler(*texts)).sample(prompts(len(texts) // n), n)


async def test_the_batch_holds_what_was_sampled():
    groups = await graded("#### 8", "no")
    batch, kept, _ = prepared(groups)
    [members] = weigh(batch, groups, CONFIG)
    batch = minibatch(batch, members)
    assert batch.input_ids.tolist() == [t for x in kept for t in x.tokens.tolist()]
    own = batch.input_ids[batch.loss_mask].tolist()
    assert own == [*tokens("#### 8"), EOS, *tokens("no"), EOS]
    assert batch.rollout_logprobs[batch.loss_mask].tolist() == [
        -(i + 1) / 8 for text in ("#### 8", "no") for i in range(len(tokens(text)) + 1)
    ]
    assert batch.old_logprobs is None
    assert batch.ref_logprobs is None
    assert float(batch.loss_weights.sum()) == pytest.approx(1.0)
    assert set(batch.loss_weights[~batch.loss_mask].tolist()) == {0.0}
    assert not batch.advantages[~batch.loss_mask].any()
    up, down = batch.advantages[batch.cu_seqlens[1:].long() - 1].tolist()
    assert up == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-6))
    assert down == -up


async def test_minibatches_keep_groups_whole():
    groups = await graded(*["#### 8", "no"] * 4)
    twice = CONFIG.model_copy(update={"algo": AlgoConfig(updates_per_step=2)})
    batch, _, _ = prepared(groups)
    batch.old_logprobs = torch.arange(batch.num_tokens, dtype=torch.float32)
    parts = [minibatch(batch, members) for members in weigh(batch, groups, twice)]
    assert [p.num_sequences for p in parts] == [4, 4]
    assert torch.cat([p.input_ids for p in parts]).tolist() == batch.input_ids.tolist()
    assert torch.cat([p.old_logprobs for p in parts]).tolist() == batch.old_logprobs.tolist()
    # Each is an update of its own, whose loss is a mean over its own tokens.
    assert [float(p.loss_weights.sum()) for p in parts] == [pytest.approx(1.0)] * 2
    assert weigh(batch, groups, CONFIG) == [list(range(8))]


async def test_groups_of_the_same_prompt_are_several():
    groups = await graded(*["#### 8", "no"] * 4)
    twice = [*groups[:2], *groups[:2]]
    batch, _, _ = prepared(twice)
    four = CONFIG.model_copy(update={"algo": AlgoConfig(updates_per_step=4)})
    assert weigh(batch, twice, four) == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("answers", "share"),
    [("8899", 0.5), ("898", 1.0), ("998", 0.0), ("--8", 1.0), ("--", 0.0), ("89", 0.5), ("8", 1.0)],
)
async def test_the_answer_of_the_majority(answers, share):
    """- is an episode without an answer, which has no vote."""
    (group,) = await graded(*("no" if a == "-" else f"#### {a}" for a in answers), n=len(answers))
    assert majority([t.extracted for t in group], [t.correct for t in group]) == share


async def test_metrics_of_several_updates_are_their_means():
    names = ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "entropy", "grad_norm", "lr")
    result = dict.fromkeys(names, 0.0) | {
        "weight": 1.0,
        "gap/tokens": 4.0,
        "gap/abs": 1.0,
        "gap/diff": 1.0,
        "gap/squares": 2.0,
    }
    metrics = update_metrics([result, result | {"pg_loss": 1.0, "gap/abs": 3.0}])
    assert metrics["rollout_gap/mean_abs"] == 0.5
    assert metrics["rollout_gap/mean"] == 0.25
    assert metrics["rollout_gap/sd"] == pytest.approx((0.5 - 0.25**2) ** 0.5)
    assert metrics["actor/pg_loss"] == 0.5
    assert "actor/kl_loss" not in metrics
