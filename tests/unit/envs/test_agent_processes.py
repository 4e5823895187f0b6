"""Agents in processes of their own: the same episodes as in the run's, and failures that stay with their episodes."""

import asyncio
import os
import re
from contextlib import asynccontextmanager
from functools import partial

import psutil
import pytest

from posttrain.config import RolloutConfig
from posttrain.core.errors import WorkerError
from posttrain.core.types import ON_POLICY, Prompt
from posttrain.envs import agent_processes
from posttrain.envs.agent_processes import AgentProcesses
from posttrain.envs.agents import open_agent
from posttrain.runs.episodes import _processes
from tests.helpers.agents import RENDERER, play
from tests.helpers.scripted import ScriptedSampler

AGENT = """
import asyncio, os, time
from multiprocessing.connection import Connection
import httpx

def send_half(pipe, message):
    os.write(pipe.fileno(), message[: len(message) // 2])
    open(__file__ + ".blocked", "w").close()
    time.sleep(60)

async def agent(task):
    what = task.extra_info.get("do", "ask")
    if what == "raise":
        raise KeyError("a key")
    if what == "exit":
        os._exit(7)
    if what == "block":
        open(__file__ + ".blocked", "w").close()
        time.sleep(600)
    if what == "half":
        Connection._send = send_half
    if what == "garbage":
        Connection.send = lambda pipe, message: pipe.send_bytes(b"no pickle")
    if what == "wait":
        await asyncio.sleep(600)
    if what == "cancelled":
        shared = asyncio.get_running_loop().create_future()
        shared.cancel()
        await shared
    async with httpx.AsyncClient(timeout=0.2 if what == "go" else 20) as client:
        answer = await client.post(f"{task.openai_url}/chat/completions", json={"messages": task.messages})
    if what == "ask":
        return float(answer.json()["choices"][0]["message"]["content"])
    return float(os.getpid()) if what == "pid" else "much"
"""
LIMITS = RolloutConfig(agent="mine", episode_deadline_s=60)


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine.py").write_text(AGENT)
    return tmp_path / "mine.py"


@pytest.fixture
def processes(file):
    @asynccontextmanager
    async def running(count, cfg=LIMITS):
        async with AgentProcesses(partial(open_agent, f"{file}:agent", ""), count, RENDERER, cfg) as started:
            yield started

    return running


async def played(players, do, *turns):
    """Return what is left of an episode whose agent does something."""
    prompt = Prompt(0, [{"role": "user", "content": "?"}], "", None, {"do": do})
    return await players(prompt, 0, ON_POLICY, ScriptedSampler(*turns or ["0.5"]))


async def pid(players):
    """Return which process has played an episode."""
    left = await played(players, "pid")
    assert left.error is None
    return int(left.reward)


@pytest.mark.slow
async def test_episodes_of_a_process_are_those_of_the_run(file):
    agent = open_agent(f"{file}:agent", "")
    apart = AgentProcesses(partial(open_agent, f"{file}:agent", ""), 2, RENDERER, LIMITS)
    ours, _ = await play(agent, "0.5", "0.25", n=2)
    theirs, _ = await play(agent, "0.5", "0.25", n=2, processes=apart)
    assert [t.error for t in theirs] == [None, None]
    assert sorted(t.reward for t in theirs) == sorted(t.reward for t in ours) == [0.25, 0.5]
    assert {tuple(t.tokens) for t in theirs} == {tuple(t.tokens) for t in ours}


@pytest.mark.slow
async def test_the_process_that_plays_fewest_plays_next_and_all_end_with_the_run(processes):
    async with processes(2) as players:
        waiting = asyncio.create_task(played(players, "wait"))
        await asyncio.sleep(0)
        free = {await pid(players) for _ in range(3)}
        assert len(free) == 1
        other = asyncio.create_task(played(players, "wait"))
        await asyncio.sleep(0)
        first = await pid(players)  # both play one: the first is asked
        assert first not in free
        for task in (waiting, other):
            task.cancel()
        await asyncio.wait([waiting, other])
        assert await pid(players) == first  # a cancelled episode leaves its process alone
    assert not any(psutil.pid_exists(p) and psutil.Process(p).status() != "zombie" for p in (first, *free))


@pytest.mark.slow
async def test_failures_stay_with_their_episodes(processes, file):
    class Lost:
        async def generate(self, prompt_ids, params, images=()):
            raise WorkerError("the engine is lost")

    cancelled = asyncio.Event()

    class Never:
        async def generate(self, prompt_ids, params, images=()):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

    def prompt(do):
        return Prompt(0, [{"role": "user", "content": "?"}], "", None, {"do": do})

    async with processes(1) as players:
        other = asyncio.create_task(pid(players))
        unsent = await players(prompt(lambda: None), 0, ON_POLICY, ScriptedSampler("0.5"))
        assert unsent.error.startswith("RunError: a task cannot be sent to the agent's process: ")
        raised = await played(players, "raise")
        assert re.search(r"CodeError: the agent failed: KeyError: 'a key' \(.*mine.py, line 14\)", raised.error)
        leaked = await played(players, "cancelled")
        assert (leaked.reason, "the agent failed: it was cancelled from inside" in leaked.error) == ("error", True)
        returned = await played(players, "text")
        assert re.search(r"the agent returned 'much' \(.*mine.py, line 11\)", returned.error)
        assert [branch.turns for branch in returned.branches] == [1]  # what it sampled is kept
        assert (await players(prompt("ask"), 0, ON_POLICY, Lost())).error == "WorkerError: the engine is lost"
        assert (await players(prompt("go"), 0, ON_POLICY, Never())).reason == "error"
        async with asyncio.timeout(30):
            await cancelled.wait()  # a client that goes takes its request with it
        assert await pid(players) == await other


@pytest.mark.slow
async def test_a_process_that_dies_fails_its_episodes_and_is_replaced(processes):
    async with processes(1) as players:
        before = await pid(players)
        waiting = asyncio.create_task(played(players, "wait"))
        assert (await played(players, "exit")).error == "RunError: the agent's process died (exit code 7)"
        assert "died" in (await waiting).error
        waiting = asyncio.create_task(played(players, "wait"))
        unread = "RunError: a message of the agent's process cannot be read: UnpicklingError: "
        assert (await played(players, "garbage")).error.startswith(unread)
        assert (await waiting).error.startswith(unread)
        assert await pid(players) not in (0, before)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["block", "half"])  # also amid a message to the run's process
async def test_a_process_that_an_episode_blocks_is_replaced_when_that_one_is_cancelled(
    processes, file, monkeypatch, how
):
    async with processes(1) as players:
        monkeypatch.setattr(agent_processes, "_BLOCKED_S", 0.2)
        before = await pid(players)
        blocking = asyncio.create_task(played(players, how))
        behind = asyncio.create_task(played(players, "wait"))
        async with asyncio.timeout(60):
            while not file.with_name("mine.py.blocked").exists():
                await asyncio.sleep(0.01)
        blocking.cancel()
        assert "another episode blocked the agent's process" in (await behind).error
        assert await pid(players) != before


@pytest.mark.slow
async def test_a_process_that_an_episode_blocks_is_replaced_after_its_deadline(processes, monkeypatch):
    async with processes(1, RolloutConfig(agent="mine", episode_deadline_s=1)) as players:
        monkeypatch.setattr(agent_processes, "_BLOCKED_S", 0.2)
        late = await played(players, "block")
        assert (late.reason, late.error) == ("deadline", "episode took longer than 1 s (rollout.episode_deadline_s)")
        [child] = players._children
        async with asyncio.timeout(60):
            while not child.ended:
                await asyncio.sleep(0.01)
        assert players._least_busy() is not child


async def test_an_agent_that_cannot_be_opened_is_said(tmp_path):
    async with AgentProcesses(partial(open_agent, f"{tmp_path}/no.py:agent", ""), 1, RENDERER, LIMITS) as players:
        assert re.search(r"ConfigError: .*no\.py", (await played(players, "pid")).error)


class Unreadable:
    """A renderer that no other process can open."""

    def __reduce__(self):
        return (int, ("none",))


async def test_a_process_that_cannot_serve_says_why_at_once(file):
    async with AgentProcesses(partial(open_agent, f"{file}:agent", ""), 1, Unreadable(), LIMITS) as players:
        assert "the agent's process cannot serve it: ValueError: " in (await played(players, "pid")).error


def test_processes_for_three_of_four_cores(monkeypatch):
    from posttrain.config import Config

    def count(cores, **rollout):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        return _processes(Config(command="rl", rollout=rollout))

    assert [count(cores) for cores in (1, 2, 4, 16, 64)] == [0, 0, 3, 12, 16]
    assert count(2, agent="mine", agent_processes=3) == 3
