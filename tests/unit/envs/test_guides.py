"""The snippets of the guides to agents and environments run as they stand."""

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from posttrain.core.registry import load_plugins
from posttrain.data.chat import ChatDeltas
from posttrain.envs.agents import Program, open_agent
from posttrain.envs.opening import open_world
from tests.helpers.agents import play
from tests.helpers.scripted import TOKENIZER, ScriptedSampler, environment, gsm8k_prompt, run_episode

DOCS = Path(__file__).parents[3] / "docs"


def snippets(page):
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.S | re.M)


async def test_the_environment_of_the_guide_plays(tmp_path):
    [code] = snippets("environments.md")
    file = tmp_path / "polite.py"
    file.write_text(code)
    load_plugins([str(file)])
    env = dataclasses.replace(environment(), world=open_world("polite", {}), deltas=ChatDeltas(TOKENIZER))
    trajectory = await run_episode(gsm8k_prompt(), ScriptedSampler("No.", "8, please"), env)
    assert (trajectory.error, trajectory.reward_parts, trajectory.turns) == (None, {"env": 1.0}, 2)
    assert trajectory.messages[2] == {"role": "user", "content": "Say please."}


async def test_the_agent_of_the_guide_plays(tmp_path):
    pytest.importorskip("openai")
    file = tmp_path / "mine.py"
    file.write_text(snippets("agents.md")[0])
    [trajectory], _ = await play(open_agent(f"{file}:play", ""), "9?", "8!")
    assert (trajectory.error, trajectory.reward, trajectory.turns) == (None, 1.0, 2)


async def test_the_program_of_the_guide_plays(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(snippets("agents.md")[1])
    [trajectory], _ = await play(Program(f"{sys.executable} {file}"), "It is 8.")
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
