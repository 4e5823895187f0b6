"""Groups that are sampled while others are trained: the staleness of every token, the prompts that are trained, resume.

Engines, trainer and faults take turns of the event loop that hypothesis chooses, so that no test depends on a clock.
"""

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.errors import WorkerError
from posttrain.core.types import Sample
from posttrain.data.loader import BatchOrder
from posttrain.rl.metrics import staleness_metrics
from posttrain.rollout.batches import TrainingBatches
from posttrain.rollout.files import RolloutFiles, write_rollouts
from posttrain.rollout.interaction import Interaction, UserTurn
from posttrain.rollout.pool import SamplerPool
from posttrain.rollout.schedule import Schedule
from posttrain.rollout.source import TrajectorySource
from tests.helpers.scripted import EOS, TOKENIZER, environment, gsm8k_prompt

ROWS, SIZE, N, STEPS = 8, 4, 2, 6
AS_CHECKPOINT = {"kind": "train", "step": 0, "temperature": 1.0, "tokenizer": "t"}
DELAYS = st.lists(st.integers(0, 40), min_size=40, max_size=40)


async def turns(count):
    for _ in range(count):
        await asyncio.sleep(0)


class Engine:
    """Samples token by token. An update cuts its requests off; death fails them."""

    def __init__(self, world):
        self.world, self.version, self.dead = world, world.version, False
        self.update = 0
        """Updates that have begun."""
        self.open = asyncio.Event()
        self.open.set()

    async def generate(self, prompt_ids, params, images=()):
        await self.open.wait()
        version, update, ids = self.version, self.update, []
        length = 1 + self.world.delay() % 5
        for left in range(length, 0, -1):
            await turns(self.world.delay())
            if self.dead:
                raise WorkerError("an engine died")
            if self.update != update:
                return Sample(ids, [-1.0] * len(ids), "abort", version)
            ids.append(EOS if left == 1 else 40 + left)
        return Sample(ids, [-1.0] * len(ids), "stop", version)

    async def load(self, version):
        self.update += 1
        self.open.clear()
        await turns(self.world.delay())
        self.version = version
        self.open.set()


class Rewards:
    """Grades late. In every third row all episodes are alike."""

    def __init__(self, world):
        self.world = world

    async def reward(self, episodes):
        await turns(self.world.delay())
        for number, episode in enumerate(episodes):
            episode.reward = float(number) if episode.prompt.index % 3 else 1.0
        return []


class Asks(Interaction):
    """A second turn for every other row."""

    async def create(self, prompt):
        return [prompt.index]

    async def respond(self, state, messages):
        return UserTurn("Go on." if state.pop() % 2 else None) if state else UserTurn(None)


@dataclass
class World:
    """A run without its models: engines, a trainer that takes time, checkpoints after every step."""

    delays: list[int]
    cfg: dict
    shuffle: bool = True
    version: int = 0
    asked: int = 0
    trained: list = field(default_factory=list)
    """Row of each group, by step."""
    ages: list = field(default_factory=list)
    """Steps between the weights that sampled a token and those that trained it."""
    overtaking: dict = field(default_factory=dict)
    engine: type[Engine] = Engine
    schedule: Schedule | None = None

    def delay(self):
        self.asked += 1
        return self.delays[self.asked % len(self.delays)]

    def open(self):
        env = replace(environment(**self.cfg), interaction=Asks() if self.cfg.get("max_user_turns") else None)

        async def restart(index):
            await turns(self.delay())
            return self.engine(self)

        self.pool = SamplerPool([self.engine(self), self.engine(self)], restart, restarts=1000)
        self.source = TrajectorySource(self.pool, env, Rewards(self))
        prompts = [gsm8k_prompt(f"row {i}?", index=i) for i in range(ROWS)]
        order = BatchOrder(ROWS, SIZE, 0, self.shuffle)
        return TrainingBatches(self.source, prompts, order, n=N, schedule=self.schedule)

    async def publish(self, version):
        self.version = version  # of an engine that starts from now on
        await self.pool.settled()
        for engine in self.pool.samplers:
            await engine.load(version)

    async def step(self, batches, step, deaths=()):
        groups = await batches.next(STEPS - step)
        del self.trained[step - 1 :]
        self.trained.append([group[0].prompt.index for group in groups])
        for episode in (t for group in groups for t in group):
            assert episode.error is None or "samplers were lost over one request" in episode.error
            self.ages += (step - 1 - episode.weight_version[episode.loss_mask]).tolist()
        await turns(self.delay())
        if step in deaths:
            self.pool.samplers[0].dead = True
        await turns(self.delay())
        return groups


def staleness(k, **more):
    return {"staleness": k, "max_turns": 3, "max_response_tokens": 60} | more


async def run(world, deaths=()):
    batches = world.open()
    for step in range(1, STEPS + 1):
        await world.step(batches, step, deaths)
        await world.publish(step)
    assert batches.state()["left"] == []  # nothing was sampled for steps that the run does not have
    await batches.close()
    await world.pool.close()


@settings(max_examples=25, deadline=None)
@given(delays=DELAYS, k=st.sampled_from([1, 2, 4]), deaths=st.sets(st.integers(1, STEPS)), multi=st.booleans())
def test_no_token_is_older_than_the_bound_and_every_prompt_of_an_epoch_is_trained_once(delays, k, deaths, multi):
    world = World(delays, staleness(k, max_user_turns=2) if multi else staleness(k))
    asyncio.run(run(world, deaths))
    assert min(world.ages) >= 0
    assert max(world.ages) <= k
    order = BatchOrder(ROWS, SIZE, 0).take(SIZE * STEPS)
    trained = [row for rows in world.trained for row in rows]
    assert Counter(trained) == Counter(order)
    window = SIZE // 4
    for place, row in enumerate(trained):  # at most so many were trained before one that was drawn earlier
        world.overtaking[row] = world.overtaking.get(row, -1) + 1
        drawn = [i for i, other in enumerate(order) if other == row][world.overtaking[row]]
        assert place <= drawn + window


@settings(max_examples=15, deadline=None)
@given(delays=DELAYS, k=st.sampled_from([1, 2]))
def test_groups_without_a_signal_are_replaced_within_the_bound(delays, k):
    world = World(delays, staleness(k, filter_groups=True, filter_metric="reward"))
    asyncio.run(run(world))
    assert max(world.ages) <= k
    assert all(row % 3 for rows in world.trained for row in rows)
    assert [len(rows) for rows in world.trained] == [SIZE] * STEPS


@pytest.mark.parametrize(("repeats", "pacing"), [(False, True), (True, True), (False, False)])
def test_no_more_is_sampled_ahead_than_trainers_need_not_to_wait(repeats, pacing):
    """At k = 4. What is sampled in a step is ready for the next one; then engines are slow, and quick again. A run that
    repeats another one samples ahead all that the bound allows: the other one has decided. So does one without
    `rollout.pacing`."""

    class Late(Engine):
        async def generate(self, prompt_ids, params, images=()):
            await turns(late)
            return await super().generate(prompt_ids, params, images)

    async def step(batches, world, number):
        ages = [number - 1 - t.weight_version[t.loss_mask].min() for group in await batches.next() for t in group]
        left = len(batches.state()["left"])
        await turns(500)
        await world.publish(number)
        return left, max(ages)

    async def play():
        nonlocal late
        schedule = Schedule()
        schedule.repeats = repeats
        world = World([0], staleness(4, pacing=pacing), engine=Late, schedule=schedule)
        batches, found = world.open(), []
        for number in range(1, 17):
            late = 3000 if 4 < number <= 8 else 0
            found.append(await step(batches, world, number))
        await batches.close()
        return found

    late = 0
    left, oldest = zip(*asyncio.run(play()), strict=True)
    if repeats or not pacing:
        assert set(left) == {4 * SIZE - SIZE // 4}
        assert max(oldest) == 4
        return
    assert set(left[:4]) == {SIZE}
    assert oldest[:4] == (0, 1, 1, 1)
    assert max(left[4:10]) > SIZE
    assert left[-1] == SIZE
    assert oldest[-1] == 1


@pytest.mark.parametrize("window", [0.0, 0.5])
def test_the_window_says_how_many_may_overtake_a_slow_group(window):
    """Row 1 is played for as long as others are; the batch that it is due in waits for it, or the next one."""

    class Slow(Engine):
        async def generate(self, prompt_ids, params, images=()):
            if gate.is_set() or slow != list(prompt_ids[: len(slow)]):
                return await super().generate(prompt_ids, params, images)
            await gate.wait()
            return await super().generate(prompt_ids, params, images)

    async def play():
        nonlocal slow
        gate.clear()
        world = World([0] * 4, staleness(1, window=window), shuffle=False)
        batches = world.open()
        slow = world.source.env.prompt_ids(gsm8k_prompt("row 2?", index=2))
        world.pool = world.source.pool = SamplerPool([Slow(world)])
        task = asyncio.create_task(world.step(batches, 1))
        await turns(2000)
        if window:
            assert [t[0].prompt.index for t in await task] == [0, 1, 3, 4]
            await world.publish(1)
            task = asyncio.create_task(world.step(batches, 2))
            await turns(2000)
        assert not task.done()
        gate.set()
        await task
        await batches.close()
        return world.trained

    gate, slow = asyncio.Event(), []
    trained = asyncio.run(play())
    assert trained == ([[0, 1, 3, 4], [2, 5, 6, 7]] if window else [[0, 1, 2, 3]])


def test_a_group_that_a_whole_window_has_overtaken_is_waited_for():
    """With a window of a batch a slow group lets one batch pass, and not the next."""

    class Slow(Engine):
        async def generate(self, prompt_ids, params, images=()):
            if slow == list(prompt_ids[: len(slow)]):
                await gate.wait()
            return await super().generate(prompt_ids, params, images)

    async def play():
        nonlocal slow
        world = World([0] * 4, staleness(2, window=1.0), shuffle=False)
        batches = world.open()
        slow = world.source.env.prompt_ids(gsm8k_prompt("row 0?", index=0))
        world.pool = world.source.pool = SamplerPool([Slow(world)])
        assert [t[0].prompt.index for t in await world.step(batches, 1)] == [1, 2, 3, 4]
        await world.publish(1)
        task = asyncio.create_task(world.step(batches, 2))
        await turns(2000)
        assert not task.done()
        gate.set()
        assert [t[0].prompt.index for t in await task] == [0, 5, 6, 7]
        await batches.close()

    gate, slow = asyncio.Event(), []
    asyncio.run(asyncio.wait_for(play(), 60))


@settings(max_examples=20, deadline=None)
@given(
    delays=DELAYS,
    k=st.sampled_from([1, 2, 4]),
    kills=st.lists(st.integers(0, 3000), min_size=1, max_size=4),
    every=st.sampled_from([1, 2]),
    multi=st.booleans(),
)
def test_a_run_that_is_killed_anywhere_loses_and_repeats_no_prompt_and_keeps_the_bound(
    tmp_path_factory, delays, k, kills, every, multi
):
    folder = tmp_path_factory.mktemp("killed")
    cfg = staleness(k, max_user_turns=2) if multi else staleness(k)
    world = World(delays, cfg)
    saved = {"step": 0, "state": None}

    async def attempt():
        batches = world.open()
        world.version = saved["step"]
        for engine in world.pool.samplers:
            engine.version = saved["step"]
        if saved["state"] is not None:
            state = json.loads(saved["state"])
            played = RolloutFiles(saved["file"], tokenizer="t").read(0) if saved["file"] else []
            batches.restore(state, played)
        for step in range(saved["step"] + 1, STEPS + 1):
            await world.step(batches, step)
            if step % every == 0:
                groups, file = batches.in_flight(), ""
                if groups:
                    file = folder / f"{step}.parquet"
                    write_rollouts(file, groups, **AS_CHECKPOINT)
                saved.update(step=step, state=json.dumps(batches.state()), file=str(file))
            await world.publish(step)
        await batches.close()

    async def killed(after):
        task = asyncio.create_task(attempt())
        await turns(after)
        if not task.done():
            for other in asyncio.all_tasks() - {asyncio.current_task()}:
                other.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for after in kills:
        asyncio.run(killed(after))
    asyncio.run(attempt())
    assert max(world.ages) <= k
    trained = [row for rows in world.trained for row in rows]
    assert Counter(trained) == Counter(BatchOrder(ROWS, SIZE, 0).take(SIZE * STEPS))


def test_a_resumed_group_keeps_what_was_played_of_it(tmp_path):
    """Its ended episode is not sampled again, and its partial one goes on from its tokens with their versions."""

    class Once(Engine):
        """Cuts the first request off after two tokens and holds what is asked for then, of version 7; or ends all."""

        async def generate(self, prompt_ids, params, images=()):
            asked.append(list(prompt_ids))
            if begun:
                return Sample([70, EOS], [-1.0, -1.0], "stop", 8)
            if len(asked) == 1:
                return Sample([50, 51], [-0.5, -0.25], "abort", 7)
            if len(asked) > 3 or prompt_ids[-1] == 51:
                await asyncio.Event().wait()
            return Sample([60, EOS], [-1.0, -1.0], "stop", 7)

    asked, begun = [], []

    async def begin():
        world = World([0] * 4, staleness(1))
        batches = world.open()
        world.source.pool = SamplerPool([Once(world)])
        task = asyncio.create_task(batches.next())
        await turns(50)
        file = tmp_path / "f.parquet"
        state, groups = batches.state(), batches.in_flight()
        write_rollouts(file, groups, **AS_CHECKPOINT)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return state, RolloutFiles(str(file), tokenizer="t").read(0)

    async def resume(state, played):
        world = World([0] * 4, staleness(1))
        batches = world.open()
        world.source.pool = SamplerPool([Once(world)])
        # Files of rollouts have no images: they are those of the prompts again.
        batches._prompts = [replace(prompt, images=[{"path": "p.png"}]) for prompt in batches._prompts]
        batches.restore(json.loads(json.dumps(state)), played)
        groups = await batches.next(0)
        await batches.close()
        return groups

    state, played = asyncio.run(begin())
    assert state["in_flight"] == [[0, ["played", "ended"], [0, 1]]]
    before = len(asked)
    begun.append(True)
    groups = asyncio.run(resume(state, played))
    assert len(asked) - before == len(state["left"]) * N - 1  # not the episode that had ended
    before = len(asked)
    assert [t.prompt.index for (t, _) in asyncio.run(resume(state, None))] == [t.prompt.index for (t, _) in groups]
    assert len(asked) - before == len(state["left"]) * N  # all episodes anew
    (first, second), prompt = groups[0], groups[0][0].prompt_length
    assert first.prompt.images == second.prompt.images == [{"path": "p.png"}]
    assert first.tokens[prompt:].tolist() == [50, 51, 70, EOS]
    assert first.weight_version[prompt:].tolist() == [7, 7, 8, 8]
    assert first.logprobs[prompt:].tolist() == [-0.5, -0.25, -1.0, -1.0]
    assert first.messages[-1]["content"].count(TOKENIZER.decode([50, 51])) == 1
    assert second.tokens[prompt:].tolist() == [60, EOS]


def test_the_metrics_say_how_old_the_trained_tokens_are():
    async def play():
        world = World([3] * 8, staleness(2))
        batches = world.open()
        groups = await world.step(batches, 1)
        await batches.close()
        return groups, world.source.stats

    groups, stats = asyncio.run(play())
    episodes = [t for group in groups for t in group]
    for episode in episodes:
        episode.weight_version[episode.loss_mask] = 3
    episodes[0].weight_version[episodes[0].loss_mask] = 5
    tokens = [int(t.loss_mask.sum()) for t in episodes]
    found = staleness_metrics(groups, stats, 5, 2)
    old = sum(tokens[1:]) / sum(tokens)
    assert found["staleness/mean"] == pytest.approx(2 * old)
    assert (found["staleness/max"], found["staleness/share@1"]) == (2.0, 0.0)
    assert found["staleness/share@2"] == pytest.approx(old)
    assert found["rollout/ended_reward/mean"] == pytest.approx(sum(stats.rewards) / len(stats.rewards))
