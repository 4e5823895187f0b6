"""The batch of a training step: over-sampling, partial rollouts, dynamic sampling, and their state."""

import asyncio
import json
import random
import zlib
from collections import Counter
from itertools import chain

import pytest

from posttrain.config import RewardConfig
from posttrain.core.errors import DataError, RunError
from posttrain.core.types import Sample
from posttrain.data.loader import BatchOrder
from posttrain.rewards.compose import Rewarder
from posttrain.rewards.grade import GraderPool
from posttrain.rl.metrics import rollout_metrics
from posttrain.rollout.batches import TrainingBatches, has_signal
from posttrain.rollout.pool import SamplerPool
from posttrain.rollout.source import TrajectorySource
from tests.helpers.scripted import EOS, TOKENIZER, call, environment, gsm8k_prompt, tokens
from tests.helpers.virtual_time import Rewards, VirtualTime
from tests.unit.rollout.test_episode import Probe

ROWS = 24


class Paced:
    """Answers by row: `answers(row, request number)` gives (seconds, text). Prompts are told apart by their number."""

    def __init__(self, answers):
        self.answers = answers
        self.asked = Counter()
        self.seen = []
        self.version = 0

    async def generate(self, prompt_ids, params, images=()):
        text = TOKENIZER.decode(prompt_ids)
        row = int(text.split("row ")[1].split("?")[0])
        number, self.asked[row] = self.asked[row], self.asked[row] + 1
        seconds, answer = self.answers(row, number)
        self.seen.append((row, list(prompt_ids)))
        await asyncio.sleep(seconds)
        ids = [*tokens(answer), EOS]
        return Sample(ids, [-1.0] * len(ids), "stop", self.version)

    async def score(self, sequences):
        raise NotImplementedError

    async def close(self):
        pass


def batches(sampler, *tools, size=4, n=2, shuffle=False, weights=None, truth="8", **cfg):
    env = environment(*tools, **cfg)
    reward = RewardConfig(weights=weights or {"score": 1.0})
    source = TrajectorySource(SamplerPool([sampler]), env, Rewarder(reward, GraderPool(reward), 400))
    prompts = [gsm8k_prompt(f"row {i}?", truth=truth, index=i) for i in range(ROWS)]
    order = BatchOrder(ROWS, size, seed=0, shuffle=shuffle)
    return TrainingBatches(source, prompts, order, n=n), source


def rows(groups):
    return [group[0].prompt.index for group in groups]


def quick(row, number):
    return 0.0, f"#### {8 if number % 2 else row}"


async def test_without_over_sampling_a_batch_is_the_next_rows():
    made, source = batches(Paced(quick))
    assert rows(await made.next()) == [0, 1, 2, 3]
    assert rows(await made.next()) == [4, 5, 6, 7]
    assert (source.stats.started, source.stats.cancelled_groups) == (8, 0)
    assert made.state()["left"] == []


class Function:
    """Samples what the tokens so far say, and how often it was asked to go on from them, whenever that is."""

    def __init__(self):
        self.asked = Counter()

    async def generate(self, prompt_ids, params, images=()):
        await asyncio.sleep(0)
        so_far = bytes(str(list(prompt_ids)), "ascii")
        self.asked[so_far] += 1
        chosen = zlib.crc32(so_far + bytes([self.asked[so_far] % 256]))
        ids = [*tokens(call(chosen % 3 + 7, "probe") if chosen % 2 else f"#### {chosen % 4 + 6}"), EOS]
        return Sample(ids, [-float(chosen % 7)] * len(ids), "stop", 0)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("dynamic", [False, True])
async def test_without_staleness_batches_are_those_of_a_plain_loop_to_the_bit(seed, dynamic):
    """Multi-turn with a tool, over 20 steps; dynamic sampling takes the next groups that have a signal."""
    cfg = {"filter_groups": True, "filter_metric": "length"} if dynamic else {}
    weights = {"score": 1.0, "length": 0.5}
    made, _ = batches(Function(), Probe(), weights=weights, n=3, **cfg)
    made._order = BatchOrder(ROWS, 4, seed)
    _, plain = batches(Function(), Probe(), weights=weights, n=3)
    order = BatchOrder(ROWS, 4, seed)
    for _ in range(20):
        expected = []
        while len(expected) < 4:
            (group,) = await plain.sample([made._prompts[i] for i in order.take(1)], 3)
            if not dynamic or has_signal(group, "length"):
                expected.append(group)
        assert_same_groups(await made.next(), expected)


class Steady:
    """Gives a turn the same answer whenever it is asked, after the same time. A row has `row % 3 + 1` turns."""

    def __init__(self, seconds):
        self.seconds = seconds

    async def generate(self, prompt_ids, params, images=()):
        text = TOKENIZER.decode(prompt_ids)
        turn, row = text.count("<|im_start|>assistant"), int(text.split("row ")[1].split("?")[0])
        await asyncio.sleep(self.seconds(row))
        ids = [*tokens(call(row, "probe") if turn <= row % 3 else f"#### {row}"), EOS]
        return Sample(ids, [-1.0 - row] * len(ids), "stop", 0)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("carry", [False, True])
def test_with_over_sampling_batches_are_those_of_a_plain_loop_to_the_bit(seed, carry):
    """Multi-turn with a tool, over 20 steps: those that the last step left, and of six in all those that end first."""

    def seconds(row):
        return 1.0 + random.Random(1000 * seed + row).random()

    def batches(cfg):
        source = TrajectorySource(SamplerPool([Steady(seconds)]), environment(Probe(), **cfg), Rewards())
        prompts = [gsm8k_prompt(f"row {i}?", truth="8", index=i) for i in range(ROWS)]
        return TrainingBatches(source, prompts, BatchOrder(ROWS, 4, seed), n=3)

    async def main():
        deadlines = {"tool_deadline_s": 1e6, "episode_deadline_s": 1e6}
        made = batches(deadlines | {"over_sample_rate": 0.5, "partial_rollouts": carry})
        plain, order, left = batches(deadlines), BatchOrder(ROWS, 4, seed), []
        for _ in range(20):
            position = order.position
            drawn = left + list(enumerate(order.take(6 - len(left)), position))
            new = sorted(drawn[len(left) :], key=lambda draw: (draw[1] % 3 + 1) * seconds(draw[1]))
            chosen = left + new[: 4 - len(left)]
            left = [draw for draw in drawn if draw not in chosen]
            prompts = [plain._prompts[row] for number, row in drawn if (number, row) in chosen]
            assert_same_groups(await made.next(), await plain._source.sample(prompts, 3))
        await made.close()

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        runner.run(main())


def test_groups_that_were_ready_and_not_chosen_are_graded_and_counted_once():
    graded = Counter()

    class Counted(Rewards):
        async def reward(self, episodes):
            graded.update(t.prompt.index for t in episodes)
            return await super().reward(episodes)

    def batches():
        env = environment(over_sample_rate=0.5, partial_rollouts=True)
        source = TrajectorySource(SamplerPool([Steady(lambda row: 1.0)]), env, Counted())
        prompts = [gsm8k_prompt(f"row {i * 3}?", truth="8", index=i) for i in range(ROWS)]
        return TrainingBatches(source, prompts, BatchOrder(ROWS, 4, 0, shuffle=False), n=2)

    async def main():
        made, trained, counted = batches(), Counter(), []
        for _ in range(3):  # all groups take as long: six are ready, and four are chosen
            trained.update(rows(await made.next()))
            stats = made._source.stats
            counted.append((stats.started, len(stats.lengths), stats.cancelled_groups, stats.cancelled_lengths))
            resumed = batches()
            resumed.restore(made.state(), made.in_flight())
            made = resumed
        left = Counter(row for _, row, _ in made.state()["left"])
        assert trained + left == Counter(range(14))
        assert counted == [(12, 12, 0, []), (8, 8, 0, []), (8, 8, 0, [])]
        assert graded == dict.fromkeys(range(14), 2)
        await made.close()

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        runner.run(main())


def assert_same_groups(found, expected):
    columns = ("tokens", "loss_mask", "logprobs", "weight_version")
    assert rows(found) == rows(expected)
    for one, other in zip(chain(*found), chain(*expected), strict=True):
        assert all((getattr(one, name) == getattr(other, name)).all() for name in columns)
        assert (one.messages, one.reward, one.turns) == (other.messages, other.reward, other.turns)


def one_slow(slow, seconds=0.3):
    return lambda row, number: (seconds if row == slow else 0.0, "#### 8" + " and so on" * (row == slow))


@pytest.mark.parametrize("carry", [False, True])
async def test_the_slowest_group_is_left_for_the_next_step_which_waits_for_it(carry):
    made, source = batches(Paced(one_slow(1)), over_sample_rate=0.25, partial_rollouts=carry)
    first = await made.next()
    assert rows(first) == [0, 2, 3, 4]
    assert source.stats.cancelled_groups == 1
    assert source.stats.cancelled_lengths == [0, 0]  # of a turn that is under way nothing is kept
    assert made.state()["left"] == [[1, 1, 1]]
    second = await made.next()
    assert rows(second)[0] == 1
    assert len(second) == 4
    assert all(t.error is None and t.response_length > 5 for t in second[0])
    # Groups that were ready while the step waited are not lost either.
    third = await made.next()
    left = [row for _, row, _ in made.state()["left"]]
    assert sorted(rows(first) + rows(second) + rows(third) + left) == list(range(made.state()["position"]))
    await made.close()


@pytest.mark.parametrize("carry", [False, True])
async def test_every_prompt_is_trained_on_once_however_slow_it_is(carry):
    """Long groups are cancelled more often; what they would teach is not lost."""

    def answers(row, number):
        return zlib.crc32(f"{row}".encode()) % 7 / 200, "#### 8"

    made, source = batches(Paced(answers), over_sample_rate=0.5, partial_rollouts=carry, shuffle=True)
    trained, cancelled = Counter(), 0
    for _ in range(12):
        groups = await made.next()
        assert len(groups) == 4
        trained.update(rows(groups))
        cancelled += source.stats.cancelled_groups
    assert cancelled > 0
    drawn = made.state()["position"]
    left = Counter(row for _, row, _ in made.state()["left"])
    # Of each row, what was drawn is what was trained on and what is left.
    order = BatchOrder(ROWS, drawn, seed=0)
    assert trained + left == Counter(order.next())
    await made.close()


async def test_what_is_cancelled_is_counted_by_length():
    """Episodes of slow groups that have written more are cancelled with more; the metrics show it."""

    def answers(row, number):
        if row != 1:
            return 0.0, "#### 8"
        return (0.0, call(8, "probe")) if number < 2 else (60.0, "late")

    made, source = batches(Paced(answers), Probe(), over_sample_rate=0.25, partial_rollouts=True)
    groups = await made.next()
    assert rows(groups) == [0, 2, 3, 4]
    lengths = source.stats.cancelled_lengths
    assert len(lengths) == 2
    assert min(lengths) > len(tokens(call(8, "probe")))
    metrics = rollout_metrics(groups, source)
    assert metrics["rollout/cancelled_groups"] == 1
    assert metrics["rollout/cancelled_episodes"] == 2
    assert metrics["rollout/cancelled_length/mean"] == sum(lengths) / 2
    assert metrics["rollout/cancelled_length/max"] == max(lengths)
    assert metrics["rollout/cancelled_length/mean"] > metrics["response_length/mean"]
    await made.close()


async def test_a_partial_episode_goes_on_from_its_tokens_with_the_versions_that_sampled_them():
    tool = Probe()

    def answers(row, number):
        if row != 1:
            return 0.0, "#### 8"
        return (0.0, call(8, "probe")) if number == 0 else (0.3, "#### 8")

    sampler = Paced(answers)
    made, _ = batches(sampler, tool, n=1, over_sample_rate=0.25, partial_rollouts=True)
    assert rows(await made.next()) == [0, 2, 3, 4]
    assert tool.log.count("release") == 4  # those that ended
    sampler.version = 5
    second = await made.next()
    (episode,) = second[0]
    assert episode.prompt.index == 1
    assert (episode.turns, episode.tool_calls, episode.error, episode.reward) == (2, 1, None, 1.0)
    versions = episode.weight_version[episode.loss_mask].tolist()
    first_turn = len(tokens(call(8, "probe"))) + 1
    assert versions == [0] * first_turn + [5] * (len(versions) - first_turn)
    assert tool.log.count("create") == tool.log.count("release")
    # The third request of row 1 went on where the second had been cut off.
    again = [ids for row, ids in sampler.seen if row == 1]
    assert again[1] == again[2]


async def test_an_episode_that_is_cancelled_amid_a_tool_call_begins_anew():
    slow = Probe("slow", call="pong")
    entered = []

    async def hang(state, arguments):
        entered.append(1)
        await asyncio.sleep(0.2 if len(entered) == 1 else 0.0)
        return await Probe.call(slow, state, arguments)

    slow.call = hang

    def answers(row, number):
        return 0.0, call(8, "slow") if row == 1 and number % 2 == 0 else "#### 8"

    made, _ = batches(Paced(answers), slow, n=1, over_sample_rate=0.25, partial_rollouts=True)
    assert rows(await made.next()) == [0, 2, 3, 4]
    assert slow.log.count("release") == slow.log.count("create") == 5

    second = await made.next()
    (episode,) = second[0]
    # It was started anew: its second request was answered without a call.
    assert (episode.prompt.index, episode.turns, episode.tool_calls) == (1, 1, 0)
    assert slow.log.count("release") == slow.log.count("create")


async def test_groups_without_signal_are_replaced_in_draw_order():
    def answers(row, number):
        return 0.0, "#### 8" if row % 3 else quick(row, number)[1]

    made, source = batches(Paced(answers), size=3, filter_groups=True)
    assert rows(await made.next()) == [0, 3, 6]
    assert source.stats.filtered_groups == 4
    assert rows(await made.next())[:2] == [9, 12]
    assert all(has_signal(g, "correct") for g in await made.next())


@pytest.mark.parametrize(("metric", "trained"), [("correct", [3, 6]), ("reward", [0, 1]), ("length", [0, 1])])
async def test_groups_are_compared_by_the_part_that_is_asked_for(metric, trained):
    """Only rows that divide by 3 have right and wrong answers, from row 3 on, and all answers differ in length."""

    def answers(row, number):
        right = row % 3 or row == 0 or number % 2
        return 0.0, "so " * (1 + number) + f"#### {8 if right else 9}"

    made, _ = batches(
        Paced(answers), size=2, weights={"score": 1.0, "length": 0.1}, filter_groups=True, filter_metric=metric
    )
    assert rows(await made.next()) == trained


async def test_a_part_that_no_episode_has_cannot_be_compared():
    made, _ = batches(Paced(quick), filter_groups=True, filter_metric="corect")
    with pytest.raises(RunError, match=r"rollout\.filter_metric = 'corect' is no part of the reward") as caught:
        await made.next()
    assert "correct, format, length, score" in caught.value.hint


async def test_filtering_is_bounded():
    def answers(row, number):
        return 0.0, quick(row, number)[1] if row == 5 else "#### 8"

    made, source = batches(Paced(answers), size=3, filter_groups=True, filter_max_batches=2)
    groups = await made.next()
    assert rows(groups) == [5]
    assert (source.stats.filtered_groups, source.stats.missing_groups) == (5, 2)
    assert rollout_metrics(groups, source)["rollout/missing_groups"] == 2
    with pytest.raises(RunError, match="6 groups were drawn for one step, and in none do episodes differ in 'correct'"):
        await made.next()


async def test_groups_without_a_signal_are_explained_by_their_failures():
    def fails(row, number):
        raise RunError("engine fell over")

    made, _ = batches(Paced(fails), size=2, filter_groups=True, filter_max_batches=1)
    with pytest.raises(
        RunError, match=r"filter_metric\); 4 of 4 episodes failed, the first with: RunError: engine fell over"
    ):
        await made.next()


async def test_a_restored_order_starts_with_what_was_left():
    made, _ = batches(Paced(one_slow(1, 60.0)), over_sample_rate=0.25)
    await made.next()
    state = made.state()
    await made.close()
    again, _ = batches(Paced(one_slow(-1)), over_sample_rate=0.25)
    again.restore(state)
    assert rows(await again.next())[0] == 1


async def test_other_prompts_than_those_of_the_checkpoint_are_refused():
    state = json.loads(json.dumps(batches(Paced(one_slow(-1)))[0].state()))
    changed, _ = batches(Paced(one_slow(-1)), truth="9")
    with pytest.raises(DataError, match="other prompts of the same number") as error:
        changed.restore(state)
    assert "--overwrite" in error.value.hint
    same, _ = batches(Paced(one_slow(-1)))
    same.restore(state)
    del state["prompts"]  # a checkpoint of before
    changed.restore(state)


async def test_an_error_ends_all_episodes_and_releases_their_tools():
    tool = Probe()

    def answers(row, number):
        if row == 2:
            raise ZeroDivisionError("a bug in a sampler")
        return 60.0, "late"

    made, _ = batches(Paced(answers), tool)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(made.next(), 5)
    assert tool.log.count("release") == tool.log.count("create") > 0


async def test_a_cancelled_step_ends_all_episodes_and_releases_their_tools():
    tool = Probe()
    made, _ = batches(Paced(lambda row, number: (60.0, "late")), tool)
    task = asyncio.create_task(made.next())
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    assert tool.log.count("release") == tool.log.count("create") == 8
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others
