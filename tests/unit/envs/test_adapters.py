"""Environments of other packages, played with the real packages."""

import asyncio
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import uvicorn

from posttrain.config import Config
from posttrain.core.errors import ConfigError, RunError
from posttrain.data.chat import ChatDeltas
from posttrain.envs.opening import open_environment_agent, open_world
from posttrain.models.load import ModelSource
from posttrain.rollout.seeds import seed_of
from posttrain.runs.episodes import episode_context
from tests.helpers.agents import play
from tests.helpers.scripted import TOKENIZER, ScriptedSampler, environment, gsm8k_prompt, run_episode

EXAMPLES = Path(__file__).parents[3] / "examples"


async def played(name, options, *turns, task=None):
    world = open_world(name, options)
    env = dataclasses.replace(
        environment(max_turns=12, max_response_tokens=9000), world=world, deltas=ChatDeltas(TOKENIZER)
    )
    return await run_episode(task or world.tasks("train")[0], ScriptedSampler(*turns), env)


async def test_a_game_of_gymnasium_is_won_by_numbers():
    pytest.importorskip("gymnasium")
    options = {"options": {"render_mode": "ansi", "is_slippery": False}, "count": 4}
    turns = ("down: 1", "1" * 5000, "1", "7 or 2", "1", "2", "2")  # Python makes no int of more than 4,300 digits
    trajectory = await played("gymnasium:FrozenLake-v1", options, *turns)
    assert (trajectory.error, trajectory.stop_reason, trajectory.reward_parts) == (None, "stop", {"env": 1.0})
    said = [m["content"] for m in trajectory.messages if m["role"] == "user"]
    assert said[0] == "Answer with a number from 0 to 3.\n\n[S]FFF\nFHFH\nFFFH\nHFFG"
    assert said[1].endswith("SFFF\n[F]HFH\nFFFH\nHFFG")
    assert said[2] == "Answer with a number from 0 to 3."


async def test_a_large_observation_of_gymnasium_is_shown_whole():
    gymnasium = pytest.importorskip("gymnasium")

    class Growing(gymnasium.Env):
        action_space = gymnasium.spaces.Discrete(2)
        observation_space = gymnasium.spaces.Sequence(gymnasium.spaces.Discrete(10), stack=True)

        def reset(self, *, seed=None, options=None):
            return np.full(1, 7), {}

        def step(self, action):
            return np.full(1100, 8), 1.0, action == 1, False, {}

    gymnasium.register("posttrain/Growing-v0", entry_point=Growing)
    trajectory = await played("gymnasium:posttrain/Growing-v0", {}, "0", "1")
    assert (trajectory.error, trajectory.reward_parts) == (None, {"env": 2.0})
    assert trajectory.messages[2]["content"].count("8") == 1100


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("gymnasium:NoSuchGame-v0", {}, "NoSuchGame"),
        ("gymnasium:FrozenLake-v1", {"options": {"ice": 1}}, "ice"),
        ("gymnasium:Pendulum-v1", {}, "actions of Box"),
        ("gymnasium:FrozenLake-v1", {"counts": 1}, "unknown option 'counts'"),
    ],
)
def test_what_gymnasium_cannot_play_is_refused(name, options, said):
    pytest.importorskip("gymnasium")
    with pytest.raises(ConfigError, match=said):
        open_world(name, options)


async def test_an_environment_of_skyrl_gym_pays_for_each_turn():
    pytest.importorskip("skyrl_gym")
    task = gsm8k_prompt()
    trajectory = await played("skyrl:gsm8k_multi_turn", {"max_turns": 4}, "#### 7", "#### 8", task=task)
    assert (trajectory.error, trajectory.turns) == (None, 2)
    assert trajectory.reward_parts["env"] == pytest.approx(1.05)
    assert "step-by-step" in trajectory.messages[2]["content"]
    with pytest.raises(ConfigError, match="has no environment 'gsm9k'") as error:
        open_world("skyrl:gsm9k", {})
    assert "gsm8k" in error.value.hint
    json.dumps(trajectory.messages)


@pytest.mark.parametrize(
    ("package", "name"), [("gymnasium", "gymnasium:FrozenLake-v1"), ("skyrl_gym", "skyrl:gsm8k_multi_turn")]
)
def test_steps_that_never_return_hold_up_no_other_work(package, name):
    """More of them than ``asyncio.to_thread`` has threads."""
    pytest.importorskip(package)
    forever = threading.Event()
    world = SimpleNamespace(step=lambda action: forever.wait(40))

    async def main():
        hung = []
        for _ in range((os.cpu_count() or 1) + 5):
            environment = open_world(name, {}).make()
            environment.world = world
            hung.append(asyncio.create_task(environment.step({"role": "assistant", "content": "1"})))
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            assert await asyncio.to_thread(lambda: "done") == "done"
        for task in hung:
            task.cancel()

    try:
        asyncio.run(main())
    finally:
        forever.set()


# ---------------------------------------------------------------------- verifiers

TOOLS_ENVIRONMENT = '''
import threading

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


RELEASED = threading.Event()


def right(completion, answer):
    if answer == "late":
        RELEASED.wait(30)
    if answer == "?":
        raise ValueError("no answer is known")
    return float(completion[-1]["content"] == answer)


def load_environment(answer: str = "8", together: bool = False):
    rows = [{"question": "3 + 5?", "answer": answer, "info": {"level": 1}}]

    def best(completions):
        return [1.0] * len(completions)

    funcs = [best] if together else [right]
    return vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[add], rubric=vf.Rubric(funcs=funcs), max_turns=4)
'''


@pytest.fixture
def verifiers(tmp_path, monkeypatch):
    """Opens environments of verifiers: that of the examples, and one with a tool."""
    pytest.importorskip("verifiers")
    (tmp_path / "vf_adding.py").write_text(TOOLS_ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield lambda name, **options: open_environment_agent(f"verifiers:{name}", options)
    sys.modules.pop("vf_adding", None)


async def test_an_environment_of_verifiers_plays_several_turns_at_the_endpoint(verifiers):
    handler = signal.getsignal(signal.SIGINT)
    agent = verifiers("guess-verifiers", highest=1, guesses=3)
    assert signal.getsignal(signal.SIGINT) is handler  # verifiers sets its own
    task = agent.tasks("train")[0]
    assert (len(agent.tasks("train")), len(agent.tasks("val"))) == (64, 16)
    assert not {t.index for t in agent.tasks("train")} & {t.index for t in agent.tasks("val")}
    [won], source = await play(agent, "5", "eh", "1", prompt=task)
    assert (won.error, won.stop_reason, won.reward_parts["env"], won.turns) == (None, "stop", 1.0, 3)
    assert [m["content"] for m in won.messages[1:]] == ["5", "No, lower.", "eh", "Say a number.", "1"]
    assert (source.stats.branches, source.stats.unmatched) == (0, 0)
    [lost], _ = await play(agent, "3", "2", "9", prompt=task)
    assert (lost.error, lost.reward_parts["env"], lost.turns) == (None, 0.0, 3)
    [silent], _ = await play(agent, "", prompt=task)  # verifiers calls it an error
    assert (silent.error, silent.reward_parts["env"], silent.turns) == (None, 0.0, 1)


async def test_an_environment_of_verifiers_calls_its_tools(verifiers):
    agent = verifiers("vf_adding")
    text = 'I add. <tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 5}}\n</tool_call>'
    [trajectory], _ = await play(agent, text, "8", prompt=agent.tasks("train")[0], max_response_tokens=2000)
    assert (trajectory.error, trajectory.reward, trajectory.turns, trajectory.tool_calls) == (None, 1.0, 2, 1)
    assert trajectory.messages[-2]["content"] == "8"


async def test_a_reward_function_of_verifiers_that_raises_fails_the_episode(verifiers):
    agent = verifiers("vf_adding", answer="?")
    [trajectory], _ = await play(agent, "8", prompt=agent.tasks("train")[0], max_response_tokens=2000)
    assert "Error calling reward function right: no answer is known" in trajectory.error


async def test_a_reward_function_of_verifiers_that_blocks_holds_up_nobody_else(verifiers):
    agent = verifiers("vf_adding", answer="late")
    [late], _ = await play(agent, "8", prompt=agent.tasks("train")[0], max_response_tokens=2000, episode_deadline_s=1.0)
    assert not sys.modules["vf_adding"].RELEASED.is_set()  # it still blocks
    sys.modules["vf_adding"].RELEASED.set()
    assert (late.stop_reason, "rollout.episode_deadline_s" in late.error) == ("deadline", True)


def test_a_schedule_of_an_environment_that_an_agent_plays_cannot_be_recorded(verifiers):
    rollout = {"env": "verifiers:vf_adding", "record_schedule": True, "batch_invariant": True}
    config = Config(command="rl", rollout=rollout)
    with pytest.raises(ConfigError, match=r"rollout.record_schedule with an agent: such runs cannot be repeated"):
        episode_context(config, ModelSource("builtin:tiny"), TOKENIZER)


async def test_an_episode_of_verifiers_that_has_no_turns_left_keeps_its_rubrics_reward(verifiers):
    agent = verifiers("guess-verifiers", highest=1, guesses=9)
    [trajectory], _ = await play(agent, "2", "3", prompt=agent.tasks("train")[0], max_turns=2)
    assert (trajectory.error, trajectory.stop_reason, trajectory.reward_parts["env"]) == (None, "max_turns", 0.0)
    [failed], _ = await play(agent, RunError("the engine is gone"), prompt=agent.tasks("train")[0])
    assert failed.error == "RunError: the engine is gone"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("no-such-thing", {}, "there is no module 'no_such_thing'"),
        ("vf_adding", {"answers": 1}, "unknown option 'answers'"),
        ("vf_adding", {"together": True}, "compare the episodes of a group"),
    ],
)
def test_what_verifiers_cannot_play_is_refused(verifiers, name, options, said):
    with pytest.raises(ConfigError, match=said):
        verifiers(name, **options)


def test_a_run_plays_an_environment_of_verifiers_by_an_agent(verifiers):
    settings = {"env": "verifiers:guess-verifiers", "env_options": {"highest": 2}, "branches": "last"}
    source = ModelSource("builtin:tiny")
    context = episode_context(Config(command="rl", rollout=settings), source, TOKENIZER)
    assert (context.world, context.agents.name) == (None, "environment 'verifiers:guess-verifiers'")
    assert "from 1 to 2" in context.agents.tasks("val")[0].messages[0]["content"]
    plain = Config(command="rl", rollout={"env": f"{EXAMPLES / 'guess.py'}:Guess", "branches": "last"})
    with pytest.raises(ConfigError, match=r"rollout.branches has no effect without an agent"):
        episode_context(plain, source, TOKENIZER)


# ---------------------------------------------------------------------- OpenEnv

OPENENV = '''
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Say(Action):
    message: str


class Number(Action):
    number: int


class Heard(Observation):
    text: str = ""


class Game(Environment):
    """Wants the seed's last digit, or a word."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, word="", **kwargs):
        self.wanted, self.turns = word or str(seed % 10), 0
        return Heard(text="Guess.", done=False)

    def step(self, action, timeout_s=None, **kwargs):
        said = action.message if isinstance(action, Say) else str(action.number)
        self.turns += 1
        if said == "break":
            raise ValueError("broken")
        return Heard(text=f"{said}? No.", done=said == self.wanted, reward=float(said == self.wanted))

    @property
    def state(self):
        return State(step_count=self.turns)
'''


@pytest.fixture
def openenv():
    """Serves the game over a kind of action; returns its URL."""
    server = pytest.importorskip("openenv.core.env_server", reason="openenv-core is not installed")
    game = {}
    exec(OPENENV, game)
    running = []

    def serve(kind):
        app = server.create_fastapi_app(game["Game"], game[kind], game["Heard"], max_concurrent_envs=4)
        running.append(serving := uvicorn.Server(uvicorn.Config(app, port=0, log_level="error")))
        thread = threading.Thread(target=serving.run, daemon=True)
        thread.start()
        while not serving.started:
            assert thread.is_alive()
            time.sleep(0.01)
        return f"http://127.0.0.1:{serving.servers[0].sockets[0].getsockname()[1]}"

    yield serve
    for serving in running:
        serving.should_exit = True


async def test_a_server_of_openenv_takes_texts(openenv):
    options = {"instructions": "Say it.", "count": 8}
    world = f"openenv:{openenv('Say')}"
    task = dataclasses.replace(gsm8k_prompt("Say hi."), extra_info={"reset": {"word": "hi"}})
    trajectory = await played(world, options, "ho", "hi", task=task)
    assert (trajectory.error, trajectory.turns, trajectory.reward_parts) == (None, 2, {"env": 1.0})
    assert [m["content"] for m in trajectory.messages] == ["Say hi.\n\nGuess.", "ho", "ho? No.", "hi"]
    broken = await played(world, options, "break", task=task)
    assert "the OpenEnv server at http://127.0.0.1:" in broken.error
    assert "broken" in broken.error


async def test_a_server_of_openenv_takes_numbers_and_seeds_its_tasks(openenv):
    world = f"openenv:{openenv('Number')}"
    task = open_world(world, {}).tasks("train")[3]
    wanted = seed_of(3) % 10
    trajectory = await played(world, {}, "9" * 400, f"{wanted + 1}", f"1.5 or 0{wanted}", task=task)  # infinite
    assert (trajectory.error, trajectory.reward_parts) == (None, {"env": 1.0})
    said = [m["content"] for m in trajectory.messages]
    assert (said[0], said[2]) == ("Answer with a number.\n\nGuess.", "Answer with a number.")


def test_a_server_of_openenv_that_is_not_there_is_refused():
    pytest.importorskip("websockets")
    with pytest.raises(ConfigError, match=r"no OpenEnv server answers at http://127\.0\.0\.1:9"):
        open_world("openenv:http://127.0.0.1:9", {})
