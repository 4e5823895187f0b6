"""Call formats, one by one: what each reads, what it refuses, and what the model is told."""

import pytest

from posttrain.core.errors import ConfigError
from posttrain.tools.formats import PARSERS, ParsedCall, ParsedTurn
from posttrain.tools.formats.json_text import MAX_DEPTH
from posttrain.tools.formats.untyped import from_text
from tests.helpers.call_texts import (
    CALL,
    CALL_END,
    CALLS,
    CALLS_END,
    KIMI,
    KIMI_END,
    ONE_CALL,
    ROME,
    SEP,
    TOOLS,
    glm_call,
    harmony,
    kimi_call,
    tool,
    xml_call,
)

CODE = "def f(x):\n\treturn '</think>' if x < 1 else \"\\n\"\n"


def test_every_format_is_here():
    assert sorted(ONE_CALL) == PARSERS.names()


@pytest.mark.parametrize("name", ONE_CALL)
def test_one_call(name):
    parser = PARSERS.get(name)
    assert parser.parse(ONE_CALL[name], TOOLS) == ParsedTurn("", [ROME])
    assert parser.render(ParsedTurn("", [ROME])) == ONE_CALL[name]


@pytest.mark.parametrize("name", ONE_CALL)
def test_the_end_of_turn_token_may_be_there_or_not(name):
    parser = PARSERS.get(name)
    for token in parser.stop_tokens:
        text = ONE_CALL[name].removesuffix(token) + token
        assert parser.parse(text, TOOLS) == parser.parse(text.removesuffix(token), TOOLS) == ParsedTurn("", [ROME])


@pytest.mark.parametrize("name", PARSERS.names())
def test_a_turn_of_words(name):
    parser = PARSERS.get(name)
    assert parser.parse(" It is {3} < 4 [here].\n") == ParsedTurn("It is {3} < 4 [here].")
    assert parser.parse("") == ParsedTurn("")


# Other ways to write a call that the engines read too, with the turn that each is.
VARIANTS = [
    ("hermes", '<tool_call>{"name": "run", "arguments": "{\\"code\\": \\"1\\"}"}</tool_call>', {"code": "1"}),
    ("hermes", '<tool_call>\n{"name": "run", "parameters": {"code": "1"}}\n</tool_call>', {"code": "1"}),
    ("qwen3_coder", xml_call("run", {"code": "1"}).removeprefix("<tool_call>\n"), {"code": "1"}),
    ("qwen3_coder", xml_call("run", {"code": "1"}).removesuffix("\n</tool_call>"), {"code": "1"}),
    ("qwen3_coder", "<tool_call><function=run><parameter=code>1</parameter></function></tool_call>", {"code": "1"}),
    ("qwen3_coder", xml_call("run", {"code": "\n  x\n"}), {"code": "\n  x\n"}),
    ("qwen3_coder", xml_call("run", {"code": "a </parameter> b"}), {"code": "a </parameter> b"}),
    ("qwen3_coder", xml_call("run", {}), {}),
    ("glm", "<tool_call>run<arg_key>code</arg_key><arg_value>1</arg_value></tool_call>", {"code": "1"}),
    ("glm", "<tool_call>run</tool_call>", {}),
    ("glm", glm_call("run", {"code": "a </arg_value> b"}), {"code": "a </arg_value> b"}),
    ("llama3_json", '<|python_tag|>{"name": "run", "parameters": {"code": "1"}}', {"code": "1"}),
    ("llama3_json", '{"name": "run", "arguments": {"code": "1"}}<|eom_id|>', {"code": "1"}),
    ("llama3_json", '{"type": "function", "name": "run", "parameters": {"code": "1"}}', {"code": "1"}),
    ("mistral", '[TOOL_CALLS]run{"code": "1"}', {"code": "1"}),
    ("mistral", '[TOOL_CALLS]run[CALL_ID]a1B2c3D4e[ARGS]{"code": "1"}', {"code": "1"}),
    ("mistral", '[TOOL_CALLS][{"name": "run", "arguments": {"code": "1"}, "id": "a1B2c3D4e"}]', {"code": "1"}),
    ("mistral", '[TOOL_CALLS]run[ARGS]{"code": "[TOOL_CALLS]"}', {"code": "[TOOL_CALLS]"}),
    ("mistral_v3", '[TOOL_CALLS] {"name": "run", "arguments": {"code": "1"}}', {"code": "1"}),
    ("deepseek", f'{CALLS}{CALL}run{SEP}{{"code": "1"}}{CALL_END}{CALLS_END}', {"code": "1"}),
    ("deepseek", f'{CALLS}{CALL}function{SEP}run\n```json\n{{"code": "```"}}\n```{CALL_END}', {"code": "```"}),
    ("deepseek_v31", f"{CALLS}{CALL}function{SEP}run\n```json\n{{}}\n```{CALL_END}{CALLS_END}", {}),
    ("kimi", KIMI + "\n" + kimi_call(" run:12 ", ' {"code": "1"} ') + "\n" + KIMI_END, {"code": "1"}),
    ("gpt_oss", '<|start|>assistant to=functions.run<|channel|>commentary json<|message|>{"code": "1"}', {"code": "1"}),
    ("gpt_oss", harmony('{"code": "<|call|>"}', " to=functions.run", "analysis"), {"code": "<|call|>"}),
]


@pytest.mark.parametrize(("name", "text", "arguments"), VARIANTS)
def test_variants(name, text, arguments):
    assert PARSERS.get(name).parse(text, TOOLS) == ParsedTurn("", [ParsedCall("run", arguments)])


@pytest.mark.parametrize("name", PARSERS.names())
def test_words_and_parallel_calls(name):
    parser = PARSERS.get(name)
    other = ParsedCall("run", {"code": CODE, "options": {"深": [1, 2.5, {"a": None}]}, "files": []})
    turn = ParsedTurn("I look it up.", [ROME, other, ROME], "They want the weather.")
    text = parser.render(turn)
    assert text.index("I look it up.") < text.index("get_weather") < text.index("深")
    assert parser.parse(text, TOOLS) == turn


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm", "llama3_json", "mistral"])
def test_words_may_follow_a_call(name):
    turn = PARSERS.get(name).parse(f"Before\n{ONE_CALL[name]}\nafter", TOOLS)
    assert turn.calls == [ROME]
    assert turn.content.split() == ["Before", "after"]


# ---------------------------------------------------------------------- thoughts

THINKING = [name for name in PARSERS.names() if name != "gpt_oss"]


@pytest.mark.parametrize("name", THINKING)
def test_a_call_inside_the_thoughts_is_none(name):
    parser, call = PARSERS.get(name), ONE_CALL[name]
    begin, end = parser.think
    for opened in (begin, ""):  # "": the prompt has opened the thoughts
        turn = parser.parse(f"{opened}\nI could write {call} or so.\n{end}\n\nNo.", TOOLS)
        assert (turn.content, turn.calls) == ("No.", [])
        assert turn.reasoning.startswith("I could write")
        assert parser.parse(f"{opened}{call}{end}{call}", TOOLS).calls == [ROME]
    ending = ParsedTurn("", [ROME], "I write") if parser.call_ends_thoughts else ParsedTurn("", [], f"I write {call}")
    assert parser.parse(f"{begin}\nI write {call}", TOOLS) == ending
    assert parser.parse(f"{begin}\nI write", TOOLS) == ParsedTurn("", [], "I write")


@pytest.mark.parametrize("name", THINKING)
def test_a_tag_of_thoughts_inside_an_argument_is_part_of_it(name):
    parser = PARSERS.get(name)
    begin, end = parser.think
    code = ParsedCall("run", {"code": f"{begin} x {end}"})
    written = parser.write([code])
    assert parser.parse(written, TOOLS) == ParsedTurn("", [code])
    assert parser.parse(f"{begin}\nHm.\n{end}\n\n{written}", TOOLS) == ParsedTurn("", [code], "Hm.")
    assert parser.parse(f"Hm. {written}{end}{ONE_CALL[name]}", TOOLS).calls == [ROME]


def test_half_a_call_inside_the_thoughts_does_not_hide_the_real_one():
    turn = PARSERS.get("hermes").parse(f"I should use <tool_call> tags.\n</think>\n{ONE_CALL['hermes']}")
    assert turn == ParsedTurn("", [ROME], "I should use <tool_call> tags.")


def test_only_the_first_stretch_is_thoughts():
    turn = PARSERS.get("hermes").parse(f"<think>a</think>b <think>c</think> {ONE_CALL['hermes']}")
    assert turn == ParsedTurn("b <think>c</think>", [ROME], "a")


def test_harmony_channels():
    parser = PARSERS.get("gpt_oss")
    analysis = f"<|channel|>analysis<|message|>I could write {ONE_CALL['hermes']} to=functions.x<|end|>"
    final = "<|start|>assistant<|channel|>final<|message|>It is 20 degrees.<|return|>"
    turn = parser.parse(analysis + final)
    assert turn == ParsedTurn("It is 20 degrees.", [], f"I could write {ONE_CALL['hermes']} to=functions.x")
    preamble = "<|start|>assistant<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"
    assert parser.parse(analysis + preamble + ONE_CALL["gpt_oss"]).content == "One moment."
    assert parser.parse("<|channel|>analysis<|message|>Hm. <|channel|>final<|message|>Yes").content == "Yes"


# ---------------------------------------------------------------------- what the model is told

UNREADABLE = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', "1e999 is too large"),
    ("hermes", "<tool_call>" + '{"a": ' * (MAX_DEPTH + 1) + "1", "no closing"),
    ("hermes", "<tool_call>" + '{"a": ' * (MAX_DEPTH + 1) + "</tool_call>", f"deeper than {MAX_DEPTH}"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {]}</tool_call>', "not valid JSON"),
    ("hermes", '<tool_call>"f"</tool_call>', "does not begin with a bracket"),
    ("qwen3_coder", ONE_CALL["hermes"], "not of the form <tool_call>\n<function=NAME>"),
    ("qwen3_coder", "<tool_call>\n<function=run\n</tool_call>", "not of the form"),
    ("qwen3_coder", "<tool_call>\n<function=run>\n<parameter=code>\n1", "no closing </tool_call>"),
    (
        "qwen3_coder",
        "<function=run>\n<parameter=code>\n1\n</function>\n</tool_call>",
        "'code' of the tool call has no cl",
    ),
    ("qwen3_coder", "<tool_call><function=run>1</function></tool_call>", "not of the form"),
    ("qwen3_coder", "<tool_call><function=></function></tool_call>", "no 'name'"),
    ("glm", ONE_CALL["hermes"], "not of the form <tool_call>NAME"),
    ("glm", "<tool_call>run\n<arg_key>code</arg_key>\n1\n</tool_call>", "not of the form"),
    ("glm", "<tool_call>run\n<arg_key>code</arg_key>\n<arg_value>1\n</tool_call>", "'code' of the tool call has no cl"),
    ("llama3_json", '<|python_tag|>brave_search.call(query="x")', "not valid JSON"),
    ("llama3_json", '<|python_tag|>{"city": "Rome"}', "no 'name'"),
    ("llama3_json", '{"name": "run", "parameters": {"code": x}}', "unexpected 'x' at character 39"),
    ("llama3_json", '{"name": "run", "parameters": {"code": "x"', "it breaks off"),
    ("mistral", "[TOOL_CALLS]", "not valid JSON"),
    ("mistral", "[TOOL_CALLS]run[ARGS]", "not valid JSON"),
    ("mistral", "[TOOL_CALLS]run[ARGS][1]", "'arguments' must be"),
    ("mistral_v3", "[TOOL_CALLS] []", "is empty"),
    ("mistral_v3", "[TOOL_CALLS] [1]", "must be a JSON object"),
    ("deepseek", CALLS, "no tool call follows"),
    ("deepseek", f"{CALL}run{SEP}{{}}{CALL_END}", f"not between {CALLS}"),
    ("deepseek", f"{CALLS}{CALL}run{{}}{CALL_END}{CALLS_END}", "not of the form"),
    ("deepseek", f"{CALLS}{CALL}function{SEP}run\n```json\n{{}}{CALL_END}{CALLS_END}", "text after its JSON"),
    ("deepseek_v31", f"{CALLS}{CALL}run{SEP}{{}}{CALLS_END}", f"no closing {CALL_END}"),
    ("deepseek_v31", f"{CALLS}{CALL}run{SEP}{{", f"no closing {CALL_END}"),
    ("kimi", KIMI + kimi_call("run") + KIMI_END, "not of the form <|tool_call_begin|>functions.NAME:INDEX"),
    ("kimi", KIMI + kimi_call("run:0", "") + KIMI_END, "not valid JSON"),
    ("kimi", kimi_call("functions.run:0"), "not between"),
    ("gpt_oss", harmony("{}", " to=python"), "nobody answers to 'python'"),
    ("gpt_oss", harmony("print(1)"), "not valid JSON"),
    ("gpt_oss", harmony("{} and"), "text after its JSON"),
    ("gpt_oss", "<|channel|>commentary to=functions.run", "no <|message|>"),
]


@pytest.mark.parametrize(("name", "text", "error"), UNREADABLE)
def test_unreadable_calls_say_why(name, text, error):
    turn = PARSERS.get(name).parse(text, TOOLS)
    assert len(turn.calls) == 1
    assert error in (turn.calls[0].error or "")


@pytest.mark.parametrize("name", PARSERS.names())
def test_a_call_that_breaks_off_does_not_hide_the_next(name):
    parser, call = PARSERS.get(name), ONE_CALL[name]
    after_name = call.index("get_weather") + len("get_weather")
    cuts = [call[: call.index("Rome")], call.replace("Rome", 'Ro"m{e').replace("</", "<")]
    if name != "llama3_json":  # without a mark, the next object goes on with this one
        cuts.append(call[:after_name])
    for broken in cuts:
        turn = parser.parse(broken + ("<|end|><|start|>assistant" if name == "gpt_oss" else "") + call, TOOLS)
        assert turn.calls[-1] == ROME, turn
        assert turn.calls[0].error


def test_json_that_is_no_call_is_words_for_llama():
    for text in ('{"name": "Rome"}', '{"type": "city", "of": {"name": "x", "parameters": {}}}', '{"name": 3', "{3}"):
        assert PARSERS.get("llama3_json").parse(text) == ParsedTurn(text)


# ---------------------------------------------------------------------- untyped arguments


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "007", "007"),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, "007", 7),
        ({"type": "integer"}, "-3", -3),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "integer"}, "1_000", "1_000"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "number"}, "5.5", 5.5),
        ({"type": "number"}, " 1e3\n", 1000.0),
        ({"type": "number"}, "nan", "nan"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"type": "object"}, "[1]", "[1]"),
        ({"type": "object"}, "{'a': 1}", "{'a': 1}"),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "array"}, "[1] 2", "[1] 2"),
        ({"type": "null"}, "None", None),
        ({"type": "integer"}, "null", None),
        ({"type": "object"}, "None", None),
        ({}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["integer", "string"]}, "3", 3),
        ({"type": ["string", "integer"]}, "3", "3"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"oneOf": [{"type": "boolean"}, {"anyOf": [{"type": "array"}]}]}, "[]", []),
        ({"type": "date"}, "3", "3"),
        ({}, "3", "3"),
        (None, "true", "true"),
    ],
)
def test_text_becomes_what_the_schema_declares(schema, text, value):
    got = from_text(text, schema)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(("name", "write"), [("qwen3_coder", xml_call), ("glm", glm_call)])
def test_arguments_are_typed_by_their_own_tool(name, write):
    parser, text = PARSERS.get(name), write("get_weather", {"days": "3", "metric": "true", "other": "4"})
    typed = {"days": 3, "metric": True, "other": "4"}
    assert parser.parse(text, TOOLS).calls[0].arguments == typed
    for unknown in (None, [], [tool("another", days={"type": "integer"})], [{"function": {"name": "get_weather"}}]):
        assert parser.parse(text, unknown).calls[0].arguments == {"days": "3", "metric": "true", "other": "4"}


def test_an_unknown_format_names_the_nearest():
    with pytest.raises(ConfigError, match="unknown tool format 'hermess'") as error:
        PARSERS.get("hermess")
    assert error.value.hint == "did you mean 'hermes'?"
