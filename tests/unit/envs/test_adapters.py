"""Environments of other packages, played with the real packages."""

import dataclasses
import json

import pytest

from posttrain.core.errors import ConfigError
from posttrain.data.chat import ChatDeltas
from posttrain.envs.opening import open_world
from posttrain.rollout.episode import run_episode
from tests.helpers.scripted import TOKENIZER, ScriptedSampler, environment, gsm8k_prompt


async def played(name, options, *turns, task=None):
    world = open_world(name, options)
    env = dataclasses.replace(
        environment(max_turns=12, max_response_tokens=4000), world=world, deltas=ChatDeltas(TOKENIZER)
    )
    return await run_episode(task or world.tasks("train")[0], ScriptedSampler(*turns), env)


async def test_a_game_of_gymnasium_is_won_by_numbers():
    pytest.importorskip("gymnasium")
    options = {"options": {"render_mode": "ansi", "is_slippery": False}, "count": 4}
    turns = ("down: 1", "eh", "1", "7 or 2", "1", "2", "2")
    trajectory = await played("gymnasium:FrozenLake-v1", options, *turns)
    assert (trajectory.error, trajectory.stop_reason, trajectory.reward_parts) == (None, "stop", {"env": 1.0})
    said = [m["content"] for m in trajectory.messages if m["role"] == "user"]
    assert said[0] == "Answer with a number from 0 to 3.\n\n[S]FFF\nFHFH\nFFFH\nHFFG"
    assert said[1].endswith("SFFF\n[F]HFH\nFFFH\nHFFG")
    assert said[2] == "Answer with a number from 0 to 3."


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
