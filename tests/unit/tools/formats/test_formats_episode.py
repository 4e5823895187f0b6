"""An episode in another format than the built-in model's own: its calls run, with arguments of the declared types."""

import dataclasses

import pytest

from posttrain.tools import Tool, ToolResult, function_schema
from posttrain.tools.formats import PARSERS, ParsedCall, ParsedTurn
from tests.helpers.scripted import ScriptedSampler, environment, gsm8k_prompt, run_episode


class Add(Tool):
    name = "add"

    def __init__(self):
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        self.schema = function_schema(add)

    async def call(self, state, arguments):
        return ToolResult(str(arguments["a"] + arguments["b"]))


@pytest.mark.parametrize("name", PARSERS.names())
async def test_calls_of_every_format_run(name):
    parser = PARSERS.get(name)
    turn = ParsedTurn("I add.", [ParsedCall("add", {"a": 2, "b": 3}), ParsedCall("add", {"a": 4, "b": -1})])
    env = dataclasses.replace(environment(Add(), max_response_tokens=1000), parser=parser)
    text = parser.render(turn)
    trajectory = await run_episode(gsm8k_prompt(), ScriptedSampler(text, "5 and 3"), env)
    assert (trajectory.stop_reason, trajectory.tool_calls, trajectory.error) == ("stop", 2, None)
    own, *replies, last = trajectory.messages[1:]
    assert (own["content"], last["content"]) == (text, "5 and 3")
    assert [(m["role"], m["content"]) for m in replies] == [("tool", "5"), ("tool", "3")]


async def test_a_call_that_cannot_be_read_is_answered():
    env = dataclasses.replace(environment(Add(), max_response_tokens=1000), parser=PARSERS.get("kimi"))
    sampler = ScriptedSampler(
        "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}<|tool_call_end|>", "Oh."
    )
    trajectory = await run_episode(gsm8k_prompt(), sampler, env)
    assert trajectory.messages[2]["content"].startswith("error: the tool call is not between <|tool_calls_section_")
