"""Several samplers as one: placing episodes, and what happens when a sampler dies."""

import asyncio
from types import SimpleNamespace

import pytest

from posttrain.core.errors import DeadlineError, RunError, WorkerError
from posttrain.core.types import Sample, SamplingParams
from posttrain.rollout.pool import SamplerPool
from tests.helpers.scripted import Gsm8kTool, ScriptedSampler, call, environment, gsm8k_prompt, run_episode

PARAMS = SamplingParams(4)


class Replica:
    """A sampler that answers with its name's number until it is told to die."""

    def __init__(self, number, version=0):
        self.number, self.version = number, version
        self.failure = None
        self.asked = []
        self.waiting = []

    async def generate(self, prompt_ids, params, images=()):
        self.asked.append(list(prompt_ids))
        if self.failure is None and params.max_new_tokens > 100:
            answer = asyncio.get_running_loop().create_future()
            self.waiting.append(answer)
            await answer
        if self.failure is not None:
            raise self.failure
        return Sample([self.number], [0.0], "stop", self.version)

    def die(self, error=None):
        self.failure = error or WorkerError(f"sampler {self.number} died")
        for answer in self.waiting:
            answer.set_exception(self.failure)


async def ask(pool, times=1, params=PARAMS):
    with pool.session() as sampler:
        return [(await sampler.generate([1, 2], params)).ids[0] for _ in range(times)]


async def test_an_episode_stays_where_it_is_and_the_next_goes_where_there_is_least_to_do():
    pool = SamplerPool([Replica(0), Replica(1), Replica(2)])
    with pool.session() as first, pool.session() as second:
        assert [(await s.generate([1], PARAMS)).ids[0] for s in (first, second, first, second)] == [0, 1, 0, 1]
        assert pool.loads == [1, 1, 0]
        assert await ask(pool, 3) == [2, 2, 2]
    assert pool.loads == [0, 0, 0]


@pytest.mark.parametrize("error", [WorkerError("killed"), DeadlineError("silent for 60 s")])
async def test_a_dead_sampler_is_left_and_its_turn_is_sampled_elsewhere_from_the_same_tokens(error):
    dead, alive = Replica(0), Replica(1)
    pool = SamplerPool([dead, alive])
    waiting = asyncio.create_task(ask(pool, 2, SamplingParams(1000)))
    await asyncio.sleep(0.01)
    dead.die(error)
    await asyncio.sleep(0.01)
    alive.waiting[0].set_result(None)
    await asyncio.sleep(0.01)
    alive.waiting[1].set_result(None)
    assert await waiting == [1, 1]
    assert (dead.asked, alive.asked) == ([[1, 2]], [[1, 2]] * 2)
    assert (pool.samplers, pool.deaths, pool.moved, pool.loads) == ([alive], 1, 1, [0, 0])


async def test_an_error_of_the_request_is_the_requests():
    broken = ScriptedSampler(RunError("does not fit"))
    pool = SamplerPool([broken])
    with pytest.raises(RunError, match="does not fit"):
        await ask(pool)
    assert (pool.samplers, pool.deaths) == ([broken], 0)


async def test_a_dead_sampler_is_started_again_and_used():
    started = []

    async def restart(index):
        await asyncio.sleep(0.02)
        started.append(Replica(10 + index, version=7))
        return started[-1]

    dead = Replica(0)
    dead.die()
    pool = SamplerPool([dead], restart, restarts=1)
    # All that wait are served by the new one; it is started once, however many have noticed.
    assert await asyncio.gather(*(ask(pool) for _ in range(20))) == [[10]] * 20
    assert (len(started), pool.deaths, pool.moved) == (1, 1, 1)
    started[0].die()
    with pytest.raises(WorkerError, match="sampler 10 died"):
        await ask(pool)
    with pytest.raises(WorkerError, match="sampler 10 died"):
        await pool.settled()


async def test_requests_of_one_episode_that_wait_for_a_sampler_count_once():
    ready = asyncio.Event()

    async def restart(index):
        await ready.wait()
        return Replica(10)

    dead = Replica(0)
    pool = SamplerPool([dead], restart, restarts=1)
    with pool.session() as sampler:
        requests = [asyncio.create_task(sampler.generate([1], SamplingParams(1000))) for _ in range(3)]
        while len(dead.waiting) < 3:
            await asyncio.sleep(0)
        dead.die()
        requests.append(asyncio.create_task(sampler.generate([1], SamplingParams(1000))))
        while pool.moved < 3:
            await asyncio.sleep(0)
        ready.set()
        while not pool.samplers or len(pool.samplers[0].waiting) < 4:
            await asyncio.sleep(0)
        assert pool.loads == [1]
        for answer in pool.samplers[0].waiting:
            answer.set_result(None)
        assert {(await request).ids[0] for request in requests} == {10}
    assert pool.loads == [0]


async def test_episodes_go_on_at_the_others_while_one_is_started():
    begun, ready = asyncio.Event(), asyncio.Event()

    async def restart(index):
        begun.set()
        await ready.wait()
        return Replica(2)

    dead = Replica(0)
    dead.die()
    pool = SamplerPool([dead, Replica(1)], restart, restarts=1)
    assert await ask(pool) == [1]
    await begun.wait()
    assert await ask(pool) == [1]
    settled = asyncio.create_task(pool.settled())
    await asyncio.sleep(0.01)
    assert not settled.done()
    ready.set()
    await settled
    assert [s.number for s in pool.samplers] == [2, 1]


@pytest.mark.parametrize("failure", [WorkerError("no GPU is free"), ValueError("a bug")])
async def test_a_restart_that_fails_is_told(failure):
    async def restart(index):
        raise failure

    dead = Replica(0)
    dead.die()
    pool = SamplerPool([dead], restart, restarts=5)
    with pytest.raises(WorkerError, match=str(failure)):
        await ask(pool)


async def test_a_request_that_kills_samplers_does_not_kill_them_all():
    class Fragile(Replica):
        async def generate(self, prompt_ids, params, images=()):
            if 666 in prompt_ids:
                self.die()
            return await super().generate(prompt_ids, params, images)

    pool = SamplerPool([Fragile(i) for i in range(4)])
    with pytest.raises(RunError, match="2 samplers were lost over one request"), pool.session() as sampler:
        await sampler.generate([666], PARAMS)
    assert [s.number for s in pool.samplers] == [2, 3]
    assert await ask(pool) == [2]


async def test_replace_gives_a_new_sampler_or_says_why_not():
    async def restart(index):
        return Replica(5)

    dead = Replica(0)
    pool = SamplerPool([dead], restart, restarts=1)
    new = await pool.replace(dead, WorkerError("gone"))
    assert (new.number, pool.samplers) == (5, [new])
    with pytest.raises(WorkerError, match="gone again"):
        await pool.replace(new, WorkerError("gone again"))


async def test_a_sampler_that_several_requests_lose_is_replaced_once():
    dead, fresh, started = Replica(0), Replica(5), []

    async def restart(index):
        started.append(index)
        return fresh

    pool = SamplerPool([dead], restart, restarts=3)
    waiting = [asyncio.create_task(ask(pool, 1, SamplingParams(1000))) for _ in range(3)]
    await asyncio.sleep(0)
    assert len(dead.waiting) == 3
    dead.die()
    async with asyncio.timeout(60):
        while len(fresh.waiting) < 3:
            await asyncio.sleep(0)
    assert (started, pool.deaths, pool.moved) == ([0], 1, 3)
    for answer in fresh.waiting:
        answer.set_result(None)
    assert [await task for task in waiting] == [[5]] * 3


async def test_nothing_is_started_after_close():
    dead, started = Replica(0), []

    async def restart(index):
        started.append(index)

    pool = SamplerPool([dead, Replica(1)], restart, restarts=3)
    await pool.close()
    dead.die()
    assert await ask(pool) == [1]
    await asyncio.sleep(0)
    assert started == []


async def test_close_ends_a_restart():
    async def restart(index):
        await asyncio.sleep(3600)

    dead = Replica(0)
    dead.die()
    pool = SamplerPool([dead], restart, restarts=1)
    waiting = asyncio.create_task(ask(pool))
    await asyncio.sleep(0.01)
    await asyncio.wait_for(pool.close(), 1)
    with pytest.raises(WorkerError, match="sampler 0 died"):
        await asyncio.wait_for(waiting, 1)


async def test_an_episode_goes_on_elsewhere_in_its_second_turn():
    """Its tokens are those that it would have had without the death."""
    first = ScriptedSampler(f"3+5=7.\n{call(7)}", WorkerError("killed"))
    second = ScriptedSampler("#### 8")
    with SamplerPool([first, second]).session() as sampler:
        moved = await run_episode(gsm8k_prompt(), sampler, environment(Gsm8kTool()))
    alone = ScriptedSampler(f"3+5=7.\n{call(7)}", "#### 8")
    stayed = await run_episode(gsm8k_prompt(), alone, environment(Gsm8kTool()))
    assert moved.tokens.tolist() == stayed.tokens.tolist()
    assert (moved.error, moved.turns, moved.stop_reason) == (None, 2, "stop")
    assert second.prompts == [alone.prompts[1]]


async def test_draining_waits_for_the_turns_in_progress_and_holds_back_new_ones():
    replica = Replica(0)
    pool = SamplerPool([replica])
    running = asyncio.create_task(ask(pool, 1, SamplingParams(1000)))
    await asyncio.sleep(0)
    entered, leave = asyncio.Event(), asyncio.Event()

    async def update():
        async with pool.drained(60.0):
            entered.set()
            await leave.wait()

    updating = asyncio.create_task(update())
    late = asyncio.create_task(ask(pool))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not entered.is_set()
    assert len(replica.asked) == 1
    replica.waiting[0].set_result(None)
    await entered.wait()
    assert await running == [0]
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(replica.asked) == 1
    leave.set()
    await updating
    assert await late == [0]


async def test_turns_that_do_not_end_are_named():
    pool = SamplerPool([Replica(0), Replica(1)])
    running = asyncio.create_task(ask(pool, 1, SamplingParams(1000)))
    await asyncio.sleep(0)
    with pytest.raises(DeadlineError, match=r"sampler 0: turns had not ended 0\.01 s after"):
        async with pool.drained(0.01):
            raise AssertionError("it went on")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert await asyncio.wait_for(ask(pool), 5) == [0]  # requests are admitted again


async def test_idle_time_is_told_since_the_last_time(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("posttrain.rollout.pool.time", SimpleNamespace(monotonic=lambda: clock[0]))
    busy, idle = Replica(0), Replica(1)
    pool = SamplerPool([busy, idle])
    clock[0] = 1.0
    running = asyncio.create_task(ask(pool, 1, SamplingParams(1000)))
    await asyncio.sleep(0)
    clock[0] = 4.0
    assert pool.idle_share() == pytest.approx(1 - 3 / 8)  # of 8 s of two replicas one was busy for 3 s
    clock[0] = 5.0
    busy.waiting[0].set_result(None)
    await running
    clock[0] = 6.0
    assert pool.idle_share() == pytest.approx(1 - 1 / 4)
