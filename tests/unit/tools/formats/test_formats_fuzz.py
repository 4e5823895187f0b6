"""Any turn survives writing and reading, and any text at all is read, in time that is linear in its length."""

import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.tools.formats import PARSERS, ParsedCall, ParsedTurn

PIECES = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[THINK]", "[/THINK]"),
    *("<function=f>", "</function>", "<parameter=a>", "</parameter>", "<arg_key>a</arg_key>", "<arg_key>"),
    *("<arg_value>", "</arg_value>", "<|python_tag|>", "<|eom_id|>", "<|user|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "functions.f:0", "function", "```json\n", "```"),
    *("<|start|>assistant", "<|channel|>analysis", "<|channel|>commentary", "<|channel|>final", "<|message|>"),
    *(" to=functions.f", "<|constrain|>json", "<|end|>", "<|call|>", "<|return|>"),
    *('{"name": "f", "parameters": {"a": 1}}', '{"name": "f"', ', "arguments": {', '{"a": 1}', "{", "}", "[", "]"),
    *('"', "\\", "\\ud800", "\n", " ", ",", ":", ";", "f", "1e999", "NaN", "0"),
]
FORMATS = pytest.mark.parametrize("name", PARSERS.names())

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
nasty = st.lists(text | st.sampled_from([p for p in PIECES if p != "\\ud800"]), max_size=4).map("".join)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | nasty,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(nasty, inner, max_size=3),
    max_leaves=6,
)
names = st.text("abzA_.-09", min_size=1, max_size=6).filter(lambda name: name[0] not in ".-")
calls = st.lists(st.builds(ParsedCall, name=names, arguments=st.dictionaries(names, values, max_size=3)), max_size=3)
words = nasty.map(str.strip)
turns = st.builds(ParsedTurn, content=words, calls=calls, reasoning=words)

# What a format cannot express, as its docstring says: words with its own marks, and for the two formats of untyped
# arguments, arguments with pieces of a call.
MARKS = {
    "deepseek": "<｜tool▁calls?▁begin｜>",
    "deepseek_v31": "<｜tool▁calls?▁begin｜>",
    "glm": "<tool_call>",
    "gpt_oss": r"<\|\w+\|>",
    "hermes": "<tool_call>",
    "kimi": r"<\|tool_call(s_section)?_begin\|>",
    "llama3_json": r'<\|python_tag\|>|\{\s*"(name|type|parameters|arguments)"\s*:',
    "mistral": r"\[TOOL_CALLS\]",
    "mistral_v3": r"\[TOOL_CALLS\]",
    "qwen3_coder": "<tool_call>|<function=",
}
UNTYPED = {"glm": "<arg_key>|</arg_value>", "qwen3_coder": "<parameter=|</function>|</parameter>"}


def schemas(turn):
    """Tools that declare the types of a turn's arguments. Two calls of one tool may need different ones."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
    tools = {}
    for call in turn.calls:
        properties = tools.setdefault(call.name, {})
        for key, value in call.arguments.items():
            kind = kinds.get(type(value), "null")
            if properties.setdefault(key, {"type": kind}) != {"type": kind}:
                return None
    return [
        {"function": {"name": name, "parameters": {"properties": properties}}} for name, properties in tools.items()
    ]


def expressible(name, turn, tools):
    if re.search(MARKS[name], turn.content) or re.search(MARKS[name], turn.reasoning):
        return False
    if turn.content.endswith(PARSERS.get(name).stop_tokens or "\0"):
        return False
    begin, end = getattr(PARSERS.get(name), "think", ("<|channel|>", "<|end|>"))
    if end in turn.reasoning or turn.reasoning.startswith(begin):
        return False
    if name not in UNTYPED:
        return True
    values = [str(value) for call in turn.calls for value in call.arguments.values()]
    return tools is not None and not any(re.search(UNTYPED[name], value) for value in values)


@settings(max_examples=150, deadline=None)
@given(turns)
def test_render_then_parse_gives_the_turn_back(turn):
    tools = schemas(turn)
    for name in PARSERS.names():
        parser = PARSERS.get(name)
        if expressible(name, turn, tools):
            assert parser.parse(parser.render(turn), tools) == turn, name


@st.composite
def spliced(draw):
    """A turn of some formats cut into pieces, with the pieces in any order and loose tags between them."""
    turn = draw(turns)
    written = draw(st.lists(st.sampled_from(PIECES), max_size=6))
    for name in draw(st.lists(st.sampled_from(PARSERS.names()), min_size=1, max_size=3)):
        whole = PARSERS.get(name).render(turn)
        cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=3)))
        written += [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    return "".join(draw(st.permutations(written))[: draw(st.integers(1, len(written)))])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(PIECES) | text, max_size=20).map("".join) | spliced())
def test_any_text_is_read(text):
    tools = [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": ["integer", "object"]}}}}}]
    for name in PARSERS.names():
        turn = PARSERS.get(name).parse(text, tools)
        assert turn.content == turn.content.strip()
        for call in turn.calls:
            assert call.name or call.error, name
            json.dumps(call.arguments, allow_nan=False).encode("utf-8")


@FORMATS
def test_every_prefix_of_a_turn_is_read(name):
    turn = ParsedTurn("words", [ParsedCall("f", {"a": 1, "b": '"}</x>'}), ParsedCall("g")], "thoughts")
    whole = PARSERS.get(name).render(turn)
    for end in range(len(whole)):
        cut = PARSERS.get(name).parse(whole[:end], schemas(turn))
        assert len(cut.calls) <= 2
        assert all(call in turn.calls for call in cut.calls if call.error is None)


# ---------------------------------------------------------------------- time

MEGABYTE = 1_000_000
SECONDS = 8.0
"""For a megabyte. Code that is quadratic in the text takes minutes."""
FIRST = [
    "",
    "<think>",
    "<tool_call>",
    "<tool_call>f<arg_key>a</arg_key><arg_value>",
    "<tool_call><function=f><parameter=a>",
    "[TOOL_CALLS]f[ARGS]",
    "<|python_tag|>",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "<|tool_calls_section_begin|><|tool_call_begin|>",
    "<|channel|>commentary to=functions.f<|message|>",
    '{"name": "f", "parameters": {"a": "',
]
AGAIN = [
    *PIECES,
    "word ",
    '{"a":',
    '{"name": "f", "parameters": ',
    '{"name": "f", "parameters": {"a": "',
    '<tool_call>{"',
    "<tool_call> ",
    '<tool_call>{"name": "</think>"}</tool_call>',
    "<tool_call><function=f><parameter=a>\n</parameter>",
    "<tool_call>f<arg_key>a</arg_key><arg_value></arg_value>",
    '[TOOL_CALLS]f[ARGS]{"a": [',
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"',
    '<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"',
    "<|channel|>commentary to=functions.f<|message|>{",
]


def check_time(name, text):
    started = time.process_time()
    PARSERS.get(name).parse(text)
    assert time.process_time() - started < SECONDS * len(text) / MEGABYTE, text[:100]


@FORMATS
def test_a_megabyte_of_calls_takes_a_second_or_two(name):
    turn = ParsedTurn("words", [ParsedCall("f", {"a": 1, "b": '"}</x>'})], "thoughts")
    whole = PARSERS.get(name).render(turn)
    for unit in (whole, whole[: len(whole) // 2], whole.replace('"a"', ',"a"')):
        check_time(name, unit * (MEGABYTE // len(unit)))
    check_time(name, '{"name": ' * 90 + "[1], " * (MEGABYTE // 5))


@pytest.mark.slow
@FORMATS
def test_time_is_linear_in_the_length(name):
    """Any piece again and again, after any opening."""
    for first in FIRST:
        for unit in AGAIN:
            check_time(name, first + unit * (MEGABYTE // 5 // len(unit)))
