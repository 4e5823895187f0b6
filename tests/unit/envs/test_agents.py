"""Agents in place of episodes: their rewards, branches, failures; programs; and the same game by both ways."""

import asyncio
import dataclasses
import json
import os
import sys
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from pydantic import ValidationError

from posttrain.config import Config
from posttrain.core.errors import CodeError, ConfigError, RunError
from posttrain.core.types import Prompt
from posttrain.envs.agents import AgentTask, Program, open_agent
from posttrain.envs.opening import open_world
from posttrain.rl.metrics import rollout_metrics
from posttrain.rollout.agents import with_branches
from posttrain.rollout.pool import SamplerPool
from posttrain.rollout.source import TrajectorySource
from posttrain.tools.calculator import Calculator
from tests.helpers.agents import play
from tests.helpers.scripted import EOS, ScriptedSampler, environment, gsm8k_prompt, tokens

REPO = Path(__file__).parents[3]


async def chat(task, messages):
    """Ask for a turn; return the messages with it, or raise."""
    async with httpx.AsyncClient(timeout=20) as client:
        answer = await client.post(f"{task.openai_url}/chat/completions", json={"messages": messages})
        answer.raise_for_status()
        return [*messages, answer.json()["choices"][0]["message"]]


def user(text):
    return {"role": "user", "content": text}


async def test_an_agents_conversation_is_a_trajectory_with_its_reward():
    async def agent(task):
        messages = await chat(task, task.messages)
        await chat(task, [*messages, user("more")])
        return 1.0

    [trajectory], source = await play(agent, "one", "two")
    assert (trajectory.error, trajectory.reward, trajectory.correct, trajectory.turns) == (None, 1.0, True, 2)
    sampled = [i for text in ("one", "two") for i in [*tokens(text), EOS]]
    assert trajectory.tokens[trajectory.loss_mask].tolist() == sampled
    assert set(trajectory.weight_version[trajectory.loss_mask].tolist()) == {11, 12}
    assert [m["content"] for m in trajectory.messages] == ["What is 3 + 5?", "one", "more", "two"]
    assert (trajectory.response_text, source.stats.branches, source.stats.unmatched) == ("one\ntwo", 0, 0)


async def test_an_agent_may_change_the_messages_of_its_task():
    async def agent(task):
        messages = task.messages
        messages.append((await chat(task, messages))[-1])
        await chat(task, [*messages, user("more")])
        return 1.0

    prompt = gsm8k_prompt()
    group, _ = await play(agent, "one", "two", "three", "four", n=2, prompt=prompt)
    assert [len(t.messages) for t in group] == [4, 4]
    assert len(prompt.messages) == 1


@pytest.mark.parametrize("reward", [np.float32(0.5), np.array([True, False]).mean(), np.int64(1), np.bool_(True)])
async def test_a_number_of_numpy_is_a_reward(reward):
    async def agent(task):
        await chat(task, task.messages)
        return reward

    [trajectory], _ = await play(agent, "one")
    assert (trajectory.error, trajectory.reward) == (None, float(reward))


@pytest.mark.parametrize("seed", [None, 7])
async def test_requests_of_an_agent_have_seeds_of_their_own_where_its_episode_has_one(seed):
    async def agent(task):
        await chat(task, await chat(task, task.messages) + [user("more")])

    _, source = await play(agent, *"abcd", n=2, seed=seed)
    [sampler] = source.pool.samplers
    assert len({params.seed for params in sampler.params}) == (1 if seed is None else 4)
    assert all((params.seed is None) == (seed is None) for params in sampler.params)


async def test_an_agent_without_a_reward_is_graded():
    async def agent(task):
        await chat(task, task.messages)

    [trajectory], _ = await play(agent, "#### 8")
    assert (trajectory.reward, trajectory.correct) == (1.0, True)


async def test_branches_share_the_reward_of_their_episode():
    async def agent(task):
        await chat(task, [user("a question of a sub-agent")])
        messages = await chat(task, task.messages)
        await chat(task, [*messages, user("more")])
        await chat(task, [user("before: one"), {"role": "assistant", "content": "edited"}, user("and then?")])
        return 0.5

    [trajectory], source = await play(agent, "sub", "one", "two", "three", max_turns=9)
    assert (source.stats.branches, source.stats.unmatched) == (2, 1)
    whole = with_branches([trajectory])
    assert [t.response_text for t in whole] == ["three", "sub", "one\ntwo"]
    assert [t.branch for t in whole] == [0, 1, 2]
    assert {(t.reward, t.correct, t.error, t.prompt.index) for t in whole} == {(0.5, False, None, 0)}
    counted = rollout_metrics([whole], source)
    assert (counted["rollout/branches"], counted["rollout/unmatched_requests"]) == (2, 1)
    [only], _ = await play(agent, "sub", "one", "two", "three", max_turns=9, branches="last")
    assert [t.response_text for t in with_branches([only])] == ["three"]


async def _raises(task):
    await chat(task, task.messages)
    raise ValueError("no idea")


async def _cancelled(task):
    await chat(task, task.messages)
    raise asyncio.CancelledError


async def _idle(task):
    return 1.0


async def _endless(task):
    await chat(task, task.messages)
    await asyncio.sleep(60)


async def _strange(task):
    await chat(task, task.messages)
    return "good"


async def _malformed(task):
    async with httpx.AsyncClient() as client:
        await client.post(f"{task.openai_url}/chat/completions", content=b"{")
    return 1.0


async def _huge(task):
    async def parts():
        for _ in range(50):
            yield b"x" * 1_000_000

    async with httpx.AsyncClient(timeout=20) as client:
        await client.post(f"{task.openai_url}/chat/completions", content=parts())
    return 1.0


async def _leaves(task):
    url = httpx.URL(task.url)
    _, writer = await asyncio.open_connection(url.host, url.port)
    body = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}'
    head = f"POST {url.path}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    writer.close()
    await asyncio.sleep(60)  # the episode ends all the same


@pytest.mark.parametrize(
    ("agent", "reason", "said"),
    [
        (_raises, "error", "the agent failed: ValueError: no idea"),
        (_cancelled, "error", "the agent failed: it was cancelled from inside: CancelledError"),
        (_idle, "error", "without a turn of the model"),
        (_endless, "deadline", "rollout.episode_deadline_s"),
        (_strange, "error", "the agent returned 'good'"),
        (_malformed, "error", "a request that is not JSON"),
        (_huge, "error", "a request of 50,000,000 bytes"),
        (_leaves, "error", "the client disconnected amid a request"),
    ],
)
async def test_a_failure_of_an_agent_is_a_failed_episode_with_its_reason(agent, reason, said):
    turns = [30.0, "one"] if agent is _leaves else ["one"]
    [trajectory], source = await play(agent, *turns, episode_deadline_s=2.0 if agent is _endless else 60.0)
    assert (trajectory.stop_reason, said in trajectory.error) == (reason, True), trajectory.error
    assert source.stats.failed == 1


async def test_an_agent_has_the_tokens_of_an_ordinary_episode():
    async def agent(task):
        messages = task.messages
        while True:
            messages = [*await chat(task, messages), user("more")]

    [trajectory], _ = await play(agent, *["one two"] * 9, max_turns=9, max_response_tokens=60)
    assert (trajectory.error, trajectory.stop_reason) == (None, "length")
    assert 30 < trajectory.response_length <= 60


async def test_an_agent_that_gives_up_at_a_limit_has_not_failed():
    async def agent(task):
        messages = task.messages
        while True:
            messages = [*await chat(task, messages), user("more")]

    [trajectory], _ = await play(agent, "one", "two", max_turns=2)
    assert (trajectory.error, trajectory.stop_reason, trajectory.turns) == (None, "max_turns", 2)
    assert trajectory.reward_parts["env"] == 0.0


async def test_an_agent_whose_first_request_is_beyond_a_limit_has_failed():
    async def agent(task):
        async with httpx.AsyncClient(timeout=20) as client:
            asked = {"messages": task.messages, "n": 3}
            (await client.post(f"{task.openai_url}/chat/completions", json=asked)).raise_for_status()

    [trajectory], _ = await play(agent, "one", "two", "three", max_turns=2)
    assert trajectory.stop_reason == "error"
    assert "HTTPStatusError" in trajectory.error


PROGRAM = """
import json, os, sys, urllib.request
def post(url, body):
    key = os.environ["OPENAI_API_KEY"]
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Authorization": "Bearer " + key})
    return json.load(urllib.request.urlopen(request))
with open(os.environ["POSTTRAIN_TASK_FILE"]) as file:
    task = json.load(file)
assert json.loads(os.environ.get("POSTTRAIN_TASK", "null")) in (None, task)
answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": task["messages"]})
if "die" in sys.argv:
    print("out of luck", file=sys.stderr)
    os.kill(os.getpid(), 9)
right = answer["choices"][0]["message"]["content"] == task["ground_truth"]
post(os.environ["POSTTRAIN_SESSION_URL"] + "/reward", {"reward": float(right)})
"""


async def test_a_program_plays_and_posts_its_reward_and_one_that_dies_fails_its_episode(tmp_path):
    file = tmp_path / "agent.py"
    file.write_text(PROGRAM)
    [trajectory], _ = await play(Program(f"{sys.executable} {file}"), "8")
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    [died], _ = await play(Program(f"{sys.executable} {file} die"), "8")
    assert died.stop_reason == "error"
    assert "the agent's program ended with signal SIGKILL: out of luck" in died.error


@pytest.mark.parametrize(("length", "in_variable"), [(1000, True), (200_000, False)])
async def test_a_program_reads_its_task_from_a_file_that_ends_with_the_episode(tmp_path, length, in_variable):
    """Linux allows no environment variable of 128 KiB."""
    program, seen = tmp_path / "agent.py", tmp_path / "seen"
    program.write_text(
        "import json, os, sys\nname = os.environ['POSTTRAIN_TASK_FILE']\n"
        "seen = [name, open(name).read(), os.environ.get('POSTTRAIN_TASK')]\n"
        "json.dump(seen, open(sys.argv[1], 'w'))"
    )
    task = AgentTask([user("é" * length)], "1", {"a": 1}, 3, 5, "http://127.0.0.1:1", "key")
    await Program(f"{sys.executable} {program} {seen}")(task)
    name, in_file, variable = json.loads(seen.read_text())
    told = {"messages": task.messages, "ground_truth": "1", "extra_info": {"a": 1}, "index": 3, "seed": 5}
    assert json.loads(in_file) == told
    assert variable == (in_file if in_variable else None)
    assert not Path(name).exists()


async def test_a_program_that_dies_amid_a_request_fails_its_episode_and_no_other(tmp_path):
    file = tmp_path / "agent.py"
    soon = "import threading\nthreading.Timer(0.1, os.kill, (os.getpid(), 9)).start()\nanswer = "
    file.write_text(PROGRAM.replace("answer = ", soon))
    [died], _ = await play(Program(f"{sys.executable} {file}"), 30.0, "8", episode_deadline_s=25.0)
    assert died.stop_reason == "error"
    assert "ended with signal SIGKILL" in died.error or "disconnected amid a request" in died.error


@pytest.mark.parametrize("start", ["", "setsid "], ids=["in its group", "in a session of its own"])
async def test_a_program_ends_when_it_ends_whatever_it_leaves_in_the_background(start):
    task = AgentTask([user("?")], None, {}, 0, 0, "http://127.0.0.1:1", "key")
    async with asyncio.timeout(20):
        assert await Program(f"sh -c '{start}sleep 40 & exit 0'")(task) is None
        with pytest.raises(RunError, match="ended with exit code 3: out of luck"):
            await Program(f"sh -c 'echo out of luck >&2; {start}sleep 40 & exit 3'")(task)


async def test_a_program_that_is_cancelled_takes_along_what_it_started_in_a_session_of_its_own(tmp_path):
    file = tmp_path / "agent.py"
    file.write_text(
        "import subprocess, sys\n"
        "started = subprocess.Popen(['sleep', '600'], start_new_session=True, stderr=subprocess.DEVNULL)\n"
        f"with open({str(tmp_path / 'pid')!r}, 'w') as file:\n"
        "    print(started.pid, file=file)\n"
        "started.wait()"
    )
    task = AgentTask([user("?")], None, {}, 0, 0, "http://127.0.0.1:1", "key")
    running = asyncio.create_task(Program(f"{sys.executable} {file}")(task))
    async with asyncio.timeout(60):
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith("\n"):
            await asyncio.sleep(0.01)
    started = psutil.Process(int((tmp_path / "pid").read_text()))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    try:
        started.wait(30)
    finally:
        if started.is_running():
            started.kill()


@pytest.mark.parametrize("turns", range(6))
async def test_a_program_that_is_cancelled_while_it_starts_leaves_no_descriptor(turns):
    """``turns`` of the event loop after it was called."""
    before = set(os.listdir("/proc/self/fd"))
    task = AgentTask([user("?")], None, {}, 0, 0, "http://127.0.0.1:1", "key")
    running = asyncio.create_task(Program("sleep 40")(task))
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    async with asyncio.timeout(20):  # transports close in a turn of their own
        while not set(os.listdir("/proc/self/fd")) <= before:
            await asyncio.sleep(0.01)


def test_agents_that_cannot_be_are_refused(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def plain(task):\n    return 1.0\n")
    with pytest.raises(CodeError, match=r"is no `async def` \(.*mine.py, line 1") as error:
        open_agent(f"{file}:plain", "")
    assert "async def" in error.value.hint
    with pytest.raises(ConfigError, match="unknown agent 'nobody'"):
        open_agent("nobody", "")
    with pytest.raises(ConfigError, match="there is no program"):
        open_agent("", "/no/such/program --fast")


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ({"agent": "a", "agent_command": "b"}, "exclude each other"),
        ({"agent": "a", "tools": ["calculator"]}, "rollout.tools has no effect"),
        ({"agent": "a", "env": "guess"}, "rollout.env has no effect"),
        ({"branches": "last"}, "rollout.branches has no effect"),
    ],
)
def test_settings_of_agents_without_effect_are_refused(rollout, said):
    with pytest.raises(ValidationError, match=said):
        Config(command="rl", rollout=rollout)


async def test_the_same_game_by_an_episode_and_by_an_openai_client_has_the_same_tokens():
    pytest.importorskip("openai")
    agent = open_agent(f"{REPO / 'examples' / 'guess.py'}:play", "")
    task = Prompt(5, [user("I think of a number from 1 to 3. Which?")], "guess", "train")
    turns = ("eh", "0", "10")
    [by_agent], _ = await play(agent, *turns, prompt=task)
    env = dataclasses.replace(environment(), world=open_world(f"{REPO / 'examples' / 'guess.py'}:Guess", {}))
    [[ordinary]] = await TrajectorySource(SamplerPool([ScriptedSampler(*turns)]), env).sample([task], 1)
    assert by_agent.error is None
    for column in ("tokens", "loss_mask", "logprobs", "weight_version"):
        assert getattr(by_agent, column).tolist() == getattr(ordinary, column).tolist()
    assert by_agent.reward_parts["env"] == ordinary.reward_parts["env"]


async def test_a_calculator_that_an_openai_client_runs_gives_the_tokens_of_one_that_the_run_calls():
    pytest.importorskip("openai")
    agent = open_agent(f"{REPO / 'examples' / 'calculator_agent.py'}:play", "")
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3 + 5"}}\n</tool_call>'
    turns = (call, call, "#### 8")
    [by_agent], _ = await play(agent, *turns, max_turns=4)
    env = environment(Calculator(), max_turns=4)
    [[ordinary]] = await TrajectorySource(SamplerPool([ScriptedSampler(*turns)]), env).sample([gsm8k_prompt()], 1)
    assert (by_agent.error, by_agent.turns, by_agent.correct) == (None, 3, True)
    for column in ("tokens", "loss_mask", "logprobs", "weight_version"):
        assert getattr(by_agent, column).tolist() == getattr(ordinary, column).tolist()
