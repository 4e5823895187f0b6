import asyncio
import json
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import ConfigError, DataError
from posttrain.core.types import Prompt
from posttrain.tools import TOOLS, function_schema
from posttrain.tools.formats import PARSERS, ParsedCall, ParsedTurn

HERMES = PARSERS.get("hermes")


def prompt(truth: Any = "8", **extra: Any) -> Prompt:
    return Prompt(7, [{"role": "user", "content": "q"}], "openai/gsm8k", truth, extra)


def ask(arguments: dict[str, Any], episode: Prompt | None = None):
    async def run():
        tool = TOOLS.get("gsm8k")()
        state = await tool.create(episode or prompt())
        result = await tool.call(state, arguments)
        reward = await tool.reward(state)
        await tool.release(state)
        return result, reward

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("8", "answer=8 reward=1.0", 1.0),
        ("#### 8", "answer=8 reward=1.0", 1.0),
        ("$8.00", "answer=8 reward=1.0", 1.0),
        (8, "answer=8 reward=1.0", 1.0),
        (8.0, "answer=8 reward=1.0", 1.0),
        ("7", "answer=7 reward=0.0", 0.0),
        ("", "answer=not-a-number reward=0.0", 0.0),
        ("1 2 3 4 5 6 7 8", "answer=not-a-number reward=0.0", 0.0),
        ("<|im_end|>", "answer=not-a-number reward=0.0", 0.0),
    ],
)
def test_gsm8k_grades(answer, text, reward):
    result, total = ask({"answer": answer})
    assert (result.text, result.error, total) == (text, False, reward)


@pytest.mark.parametrize(
    "arguments", [{}, {"anser": "8"}, {"answer": "8", "x": 1}, {"answer": None}, {"answer": [8]}, {"answer": True}]
)
def test_wrong_arguments_are_told_to_the_model(arguments):
    result, reward = ask(arguments)
    assert result.error
    assert result.text.startswith("error: ")
    assert "answer" in result.text
    assert reward is None


def test_reward_is_the_best_of_the_episode_and_states_are_separate():
    async def run():
        tool = TOOLS.get("gsm8k")()
        one, two = await tool.create(prompt("8")), await tool.create(prompt("9"))
        for answer in ("1", "8", "2"):
            await tool.call(one, {"answer": answer})
        await tool.call(two, {"answer": "8"})
        return await tool.reward(one), await tool.reward(two)

    assert asyncio.run(run()) == (1.0, 0.0)


def test_create_kwargs_go_before_the_rows_ground_truth():
    kwargs = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1,000"}}}
    assert ask({"answer": "1000"}, prompt("5", tools_kwargs=kwargs))[1] == 1.0
    with pytest.raises(DataError, match="row 7"):
        ask({"answer": "1"}, prompt("soon"))


def test_unknown_tool_names_the_nearest():
    with pytest.raises(ConfigError, match="unknown tool") as error:
        TOOLS.get("gsm8")
    assert "gsm8k" in (error.value.hint or "")


def test_the_gsm8k_schema_is_a_function_schema():
    schema = TOOLS.get("gsm8k").schema["function"]
    assert schema["name"] == TOOLS.get("gsm8k").name == "calc_gsm8k_reward"
    assert schema["parameters"]["required"] == ["answer"]
    assert schema["parameters"]["properties"]["answer"]["type"] == "string"


def test_function_schema():
    def search(
        self, query: str, k: int = 3, kind: Literal["web", "news"] = "web", tags: list[str] | None = None
    ) -> str:
        """Search the web.
        Gives text.

        Args:
            query: What to look for,
                in words.
            k (int): How many.

        Returns:
            text: not a parameter.
        """
        return query

    assert function_schema(search) == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the web. Gives text.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for, in words."},
                    "k": {"type": "integer", "description": "How many."},
                    "kind": {"type": "string", "enum": ["web", "news"]},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["query"],
            },
        },
    }


def test_function_schema_refuses_what_json_cannot_say():
    def no_hint(x):
        return x

    def many(*xs: int) -> int:
        return 0

    def strange(x: set[int]) -> int:
        return 0

    for function in (no_hint, many, strange):
        with pytest.raises(ConfigError, match=function.__name__):
            function_schema(function)


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def test_parse_words_and_calls():
    one, two = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "arguments": "{\\"b\\": [2]}"}'
    turn = HERMES.parse(f"I think.\n{call(one)}\n{call(two)}\nDone.")
    assert turn.calls == [ParsedCall("f", {"a": 1}), ParsedCall("g", {"b": [2]})]
    assert turn.content == "I think.\n\n\nDone."
    assert HERMES.parse("no call") == ParsedTurn("no call")
    assert HERMES.parse(call('{"name": "f"}')).calls == [ParsedCall("f")]


def test_tags_and_line_breaks_inside_a_string_argument():
    code = 'print("</tool_call>")\n# <tool_call>'
    for body in (
        json.dumps({"name": "f", "arguments": {"code": code}}),
        '{"name": "f", "arguments": {"code": "a\nb"}}',
    ):
        (parsed,) = HERMES.parse(call(body) + " after").calls
        assert parsed.error is None
    assert HERMES.parse(call(body)).calls[0].arguments == {"code": "a\nb"}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (call("{name: f}"), "not valid JSON"),
        (call(""), "not valid JSON"),
        (call('{"name": "f", "arguments": {"x": NaN}}'), "not valid JSON"),
        (call('{"name": "f"}}'), "text after its JSON"),
        (call('["f"]'), "must be a JSON object"),
        (call('{"arguments": {}}'), "no 'name'"),
        (call('{"name": 5, "arguments": {}}'), "no 'name'"),
        (call('{"name": "f", "arguments": [1]}'), "'arguments' must be"),
        (call('{"name": "f", "arguments": "x"}'), "not valid JSON"),
        (call('{"name": "f", "arguments": {"x": "\\ud800"}}'), "Unicode"),
        (call("[" * 100_000), "not valid JSON"),
        (call('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}"), "not valid JSON"),
        ('<tool_call>\n{"name": "f", "arg', "no closing"),
        ('<tool_call>\n{"name": "f", "arguments": {}}', "no closing"),
        ("<tool_call>", "no closing"),
    ],
)
def test_unreadable_calls_say_why(text, error):
    turn = HERMES.parse("words " + text)
    assert turn.content == "words"
    assert len(turn.calls) == 1
    assert error in (turn.calls[0].error or "")


def test_a_bad_call_does_not_hide_the_next():
    turn = HERMES.parse(call("oops") + call('{"name": "f", "arguments": {}}'))
    assert [c.error is None for c in turn.calls] == [False, True]
    assert turn.content == ""


pieces = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(
            ["<tool_call>", "</tool_call>", '{"name": "f"', ', "arguments": ', "{}", "}", "\n", '"', "\\ud800"]
        ),
    )
).map("".join)


@given(pieces)
def test_parse_never_raises(text):
    turn = HERMES.parse(text)
    assert len(turn.calls) == 0 or "<tool_call>" in text


words = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda t: "<tool_call>" not in t).map(str.strip)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
calls = st.builds(
    ParsedCall, name=st.text(min_size=1, max_size=8), arguments=st.dictionaries(st.text(max_size=5), values)
)


@given(st.builds(ParsedTurn, content=words, calls=st.lists(calls, max_size=3)))
def test_render_then_parse_gives_the_turn_back(turn):
    assert HERMES.parse(HERMES.render(turn)) == turn
