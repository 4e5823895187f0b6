"""Agents in processes of their own: the same episodes as in the run's, and failures that stay with their episodes."""

import asyncio
import os
from contextlib import asynccontextmanager
from functools import partial

import psutil
import pytest

from posttrain.core.errors import CodeError, ConfigError, RunError
from posttrain.envs import agent_processes
from posttrain.envs.agent_processes import AgentProcesses
from posttrain.envs.agents import AgentTask, open_agent
from posttrain.runs.episodes import _processes
from tests.helpers.agents import play

AGENT = """
import asyncio, os, time
import httpx

async def agent(task):
    what = task.extra_info.get("do", "ask")
    if what == "ask":
        async with httpx.AsyncClient(timeout=20) as client:
            answer = await client.post(f"{task.openai_url}/chat/completions", json={"messages": task.messages})
        return float(answer.json()["choices"][0]["message"]["content"])
    if what == "pid":
        return float(os.getpid())
    if what == "raise":
        raise KeyError("a key")
    if what == "exit":
        os._exit(7)
    if what == "block":
        time.sleep(600)
    if what == "text":
        return "much"
    await asyncio.sleep(600)
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine.py").write_text(AGENT)
    return tmp_path / "mine.py"


@pytest.fixture
def processes(file):
    @asynccontextmanager
    async def running(count):
        async with AgentProcesses(partial(open_agent, f"{file}:agent", ""), count) as started:
            yield started

    return running


def task(do):
    return AgentTask([], None, {"do": do}, 0, 0, "", "")


async def test_episodes_of_a_process_are_those_of_the_run(file):
    agent = open_agent(f"{file}:agent", "")
    apart = AgentProcesses(partial(open_agent, f"{file}:agent", ""), 2)
    ours, _ = await play(agent, "0.5", "0.25", n=2)
    theirs, _ = await play(agent, "0.5", "0.25", n=2, processes=apart)
    assert [t.error for t in theirs] == [None, None]
    assert sorted(t.reward for t in theirs) == sorted(t.reward for t in ours) == [0.25, 0.5]
    assert {tuple(t.tokens) for t in theirs} == {tuple(t.tokens) for t in ours}


async def test_the_process_that_plays_fewest_plays_next(processes):
    async with processes(2) as players:
        waiting = asyncio.create_task(players(task("wait")))
        await asyncio.sleep(0)
        free = {await players(task("pid")) for _ in range(3)}
        assert len(free) == 1
        other = asyncio.create_task(players(task("wait")))
        await asyncio.sleep(0)
        assert await players(task("pid")) not in free  # both play one: the first is asked
        waiting.cancel()
        other.cancel()


async def test_what_an_agent_raises_or_returns_is_said_with_its_line(processes, file):
    async with processes(1) as players:
        with pytest.raises(CodeError, match=r"the agent failed: KeyError: 'a key' \(.*mine.py, line 14\)"):
            await players(task("raise"))
        with pytest.raises(CodeError, match=r"the agent returned 'much' \(.*mine.py, line 5\)"):
            await players(task("text"))
        assert await players(task("pid")) > 0


async def test_a_process_that_dies_fails_its_episodes_and_is_replaced(processes):
    async with processes(1) as players:
        before = await players(task("pid"))
        waiting = asyncio.create_task(players(task("wait")))
        with pytest.raises(RunError, match=r"the agent's process died \(exit code 7\)"):
            await players(task("exit"))
        with pytest.raises(RunError, match="died"):
            await waiting
        assert await players(task("pid")) not in (0, before)


async def test_a_cancelled_episode_leaves_the_others_alone(processes):
    async with processes(1) as players:
        before = await players(task("pid"))
        waiting = asyncio.create_task(players(task("wait")))
        assert await players(task("pid")) == before
        waiting.cancel()
        await asyncio.wait([waiting])
        assert await players(task("pid")) == before


async def test_a_process_that_an_episode_blocks_is_replaced_when_that_one_is_cancelled(processes, monkeypatch):
    monkeypatch.setattr(agent_processes, "_CANCEL_S", 0.2)
    async with processes(1) as players:
        before = await players(task("pid"))
        blocking = asyncio.create_task(players(task("block")))
        behind = asyncio.create_task(players(task("wait")))
        await asyncio.sleep(0)
        blocking.cancel()
        with pytest.raises(RunError, match="another episode blocked the agent's process"):
            await behind
        assert await players(task("pid")) != before


async def test_an_agent_that_cannot_be_opened_is_said(tmp_path):
    async with AgentProcesses(partial(open_agent, f"{tmp_path}/none.py:agent", ""), 1) as players:
        with pytest.raises(ConfigError, match=r"none\.py"):
            await players(task("pid"))


async def test_processes_end_with_the_run(processes):
    async with processes(2) as players:
        pids = [int(await players(task("pid"))) for _ in range(2)]
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)


def test_one_process_for_each_two_cores(monkeypatch):
    from posttrain.config import Config

    def count(cores, **rollout):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        return _processes(Config(command="rl", rollout=rollout))

    assert [count(cores) for cores in (1, 2, 4, 16, 64)] == [0, 0, 2, 8, 8]
    assert count(2, agent="mine", agent_processes=3) == 3
