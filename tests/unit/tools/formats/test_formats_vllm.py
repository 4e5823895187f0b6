"""Each format and vLLM's parser of it read the same texts. Run it with vLLM installed: ``scripts/test_vllm``.

vLLM is asked as its server asks: the reasoning parser first, then the tool parser.
"""

import json
import math
import shutil
from dataclasses import dataclass

import pytest

from posttrain.tools.formats import PARSERS, ParsedCall, ParsedTurn
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
    kimi_call,
    xml_call,
)

pytestmark = pytest.mark.vllm

ENGINE = {  # vLLM's names of the tool parser and the reasoning parser
    "deepseek": ("deepseek_v3", "deepseek_r1"),
    "deepseek_v31": ("deepseek_v31", "deepseek_r1"),
    "glm": ("glm45", "glm45"),
    "gpt_oss": ("openai", "openai_gptoss"),
    "hermes": ("hermes", "qwen3"),
    "kimi": ("kimi_k2", "kimi_k2"),
    "llama3_json": ("llama3_json", None),
    "mistral": ("mistral", "mistral"),
    "mistral_v3": ("mistral", None),
    "qwen3_coder": ("qwen3_coder", "qwen3"),
}
SPECIAL = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[THINK]", "[/THINK]"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    "<|tool_call_argument_begin|>",
]


@pytest.fixture(scope="module")
def tokenizers(test_data, tmp_path_factory):
    """Qwen's tokenizer with every format's special tokens, by whether it is one of a newer Mistral (``[ARGS]``)."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(test_data / "tokenizer" / name, folder)
    shutil.copy(test_data / "tokenizer" / "qwen3_tokenizer_config.json", folder / "tokenizer_config.json")
    found = {}
    for newer in (False, True):
        found[newer] = AutoTokenizer.from_pretrained(folder)
        found[newer].add_tokens([*SPECIAL, *(["[ARGS]", "[CALL_ID]"] if newer else [])], special_tokens=True)
    return found


@pytest.fixture
def vllm_turn(tokenizers):
    """What vLLM makes of a text: a turn whose arguments are text where they are no JSON."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager

    def parse(name, text, *, thinking=False):
        tool_parser, reasoning_parser = ENGINE[name]
        harmony = name == "gpt_oss"
        make = ParserManager.get_parser(
            tool_parser_name=tool_parser,
            reasoning_parser_name=reasoning_parser if thinking or harmony else None,
            enable_auto_tools=True,
            is_harmony=harmony,
        )
        request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "?"}], tools=TOOLS)
        tokenizer = tokenizers[name == "mistral"]
        parser = make(tokenizer, request.tools)
        ids = harmony_ids(text) if harmony else tokenizer(text, add_special_tokens=False)["input_ids"]
        reasoning, content, calls = parser.parse(text, request, enable_auto_tools=True, model_output_token_ids=ids)
        return ParsedTurn(
            (content or "").strip(),
            [ParsedCall(call.name, json_or_text(call.arguments)) for call in calls or []],
            (reasoning or "").strip(),
        )

    return parse


def harmony_ids(text):
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

    return get_encoding().encode(text, allowed_special="all")


def json_or_text(text):
    try:
        return json.loads(text)
    except ValueError:
        return text


def run(**arguments):
    return ParsedCall("run", arguments)


CODE = "def f(x):\n\tif x < 1 && 2 > 3:\n\t\treturn \"a\\n\" + 'b'\n\n"
TURNS = {
    "one call": ParsedTurn("", [ROME]),
    "parallel calls": ParsedTurn("", [ROME, run(code="1"), ROME]),
    "no arguments": ParsedTurn("", [run()]),
    "nested": ParsedTurn("", [run(options={"a": [1, {"b": None, "c": [True, False]}], "d": {}}, files=[[], [{}]])]),
    "unicode": ParsedTurn("", [ParsedCall("get_weather", {"city": "São Paulo, 北京 🌧 \u2028 é"})]),
    "numbers": ParsedTurn("", [run(options={"a": -2.5, "b": 1e-7, "c": 12345678901234567890, "d": 0})]),
    "typed": ParsedTurn("", [ParsedCall("get_weather", {"city": "007", "days": -3, "metric": True})]),
    "undeclared argument": ParsedTurn("", [run(other="5")]),
    "code": ParsedTurn("", [run(code=CODE)]),
    "quotes": ParsedTurn("", [run(code='"\\"' + "'")]),
    "null in a string": ParsedTurn("", [run(code="null")]),
    "words": ParsedTurn("It is 20 degrees."),
}


@pytest.mark.parametrize("case", TURNS)
@pytest.mark.parametrize("name", PARSERS.names())
def test_well_formed_turns_are_read_alike(name, case, vllm_turn):
    text = PARSERS.get(name).render(TURNS[case])
    assert vllm_turn(name, text) == PARSERS.get(name).parse(text, TOOLS) == TURNS[case]


@pytest.mark.parametrize("name", PARSERS.names())
def test_words_before_a_call(name, vllm_turn):
    turn = ParsedTurn("I look it up.", [ROME])
    text = PARSERS.get(name).render(turn)
    theirs = vllm_turn(name, text)
    assert PARSERS.get(name).parse(text, TOOLS) == turn
    assert theirs.calls == turn.calls
    # vLLM's parser for Llama drops the words beside a call.
    assert theirs.content == ("" if name == "llama3_json" else turn.content)


@pytest.mark.parametrize("name", [name for name in PARSERS.names() if ENGINE[name][1]])
def test_thoughts(name, vllm_turn):
    parser = PARSERS.get(name)
    for turn in (ParsedTurn("Hi.", [ROME], "They want the weather."), ParsedTurn("Hi.", [], "They want nothing.")):
        text = parser.render(turn)
        assert vllm_turn(name, text, thinking=True) == parser.parse(text, TOOLS) == turn


@pytest.mark.parametrize("name", ["deepseek", "glm", "hermes", "kimi", "mistral", "qwen3_coder"])
def test_a_call_in_thoughts_that_never_end(name, vllm_turn):
    parser = PARSERS.get(name)
    text = f"{parser.think[0]}They want the weather. {ONE_CALL[name]}"
    ours, theirs = parser.parse(text, TOOLS), vllm_turn(name, text, thinking=True)
    assert ours.calls == theirs.calls == ([ROME] if parser.call_ends_thoughts else [])
    assert ours.reasoning == theirs.reasoning


# ---------------------------------------------------------------------- where the two differ on purpose


@dataclass(frozen=True)
class Difference:
    """A text, the calls that vLLM finds in it, and what is found here: a call, or a text of which the error holds."""

    name: str
    text: str
    theirs: list[ParsedCall]
    ours: ParsedCall | str | None
    thinking: bool = False


def hermes_call(body):
    return f"<tool_call>\n{body}\n</tool_call>"


ROME_JSON = '{"city": "Rome", "days": 3}'
LINES = ROME_JSON.replace(", ", ",\n")
DIFFERENCES = {
    "a mark inside a string argument is part of it; vLLM looks for marks before it reads JSON": [
        Difference(
            "hermes",
            PARSERS.get("hermes").render(ParsedTurn("", [run(code="</tool_call>")])),
            [],
            run(code="</tool_call>"),
        ),
        Difference(
            "mistral",
            '[TOOL_CALLS]run[ARGS]{"code": "[TOOL_CALLS]"}',
            [ParsedCall("run", '{"code": "'), ParsedCall('"}')],
            run(code="[TOOL_CALLS]"),
        ),
        Difference(
            "kimi",
            KIMI + kimi_call("run:0", '{"code": "<|tool_call_end|>"}') + KIMI_END,
            [ParsedCall("run", '{"code": "')],
            run(code="<|tool_call_end|>"),
        ),
        Difference(
            "deepseek_v31",
            f'{CALLS}{CALL}run{SEP}{{"code": "{CALL_END}"}}{CALL_END}{CALLS_END}',
            [ParsedCall("run", '{"code": "')],
            run(code=CALL_END),
        ),
    ],
    "a closing tag inside an argument is part of it if the call does not go on after it": [
        Difference(
            "qwen3_coder", xml_call("run", {"code": "a </parameter> b"}), [run(code="a ")], run(code="a </parameter> b")
        ),
        Difference(
            "glm", glm_call("run", {"code": "a </arg_value> b"}), [run(code="a ")], run(code="a </arg_value> b")
        ),
    ],
    "the end of thoughts inside an argument is part of it; vLLM takes it out of the argument": [
        Difference(
            name,
            PARSERS.get(name).render(ParsedTurn("", [run(code="a </think> b")], "Hm.")),
            [run(code="a  b")],
            run(code="a </think> b"),
            thinking=True,
        )
        for name in ("hermes", "qwen3_coder", "glm", "kimi")
    ],
    "a call before the end of thoughts is none; SGLang agrees, for vLLM the call has ended them": [
        Difference(name, f"<think>I could write {ONE_CALL[name]} or not.</think>No.", [ROME], None, thinking=True)
        for name in ("hermes", "qwen3_coder", "glm", "kimi")
    ],
    "a call without its closing tag is an error, also at the end of a turn": [
        Difference("hermes", ONE_CALL["hermes"].removesuffix("</tool_call>"), [ROME], "no closing </tool_call>"),
        Difference(
            "qwen3_coder",
            "<tool_call>\n<function=run>\n<parameter=code>\n1\n</function>\n</tool_call>",
            [run()],
            "no closing tag",
        ),
        Difference(
            "glm", "<tool_call>run\n<arg_key>code</arg_key>\n<arg_value>1\n</tool_call>", [run()], "no closing tag"
        ),
    ],
    "arguments that are missing are an error": [
        Difference("mistral", "[TOOL_CALLS]run[ARGS]", [run()], "not valid JSON"),
        Difference("kimi", KIMI + kimi_call("run:0", "") + KIMI_END, [run()], "not valid JSON"),
    ],
    "JSON may have line breaks in its strings, and between its parts": [
        Difference("hermes", hermes_call('{"name": "run", "arguments": {"code": "a\nb"}}'), [], run(code="a\nb")),
        Difference("deepseek", ONE_CALL["deepseek"].replace(ROME_JSON, LINES), [], ROME),
        Difference("deepseek_v31", ONE_CALL["deepseek_v31"].replace(ROME_JSON, LINES), [], ROME),
    ],
    "a number that is none, or is infinite, is an error": [
        Difference(
            "hermes", hermes_call('{"name": "run", "arguments": {"code": 1e999}}'), [run(code=math.inf)], "too large"
        ),
    ],
    "text that does not fit the declared type stays text, and the tool says so": [
        Difference(
            "qwen3_coder",
            xml_call("get_weather", {"days": "5.5"}),
            [ParsedCall("get_weather", {"days": 5.5})],
            ParsedCall("get_weather", {"days": "5.5"}),
        ),
        Difference(
            "qwen3_coder",
            xml_call("get_weather", {"days": "1_000"}),
            [ParsedCall("get_weather", {"days": 1000})],
            ParsedCall("get_weather", {"days": "1_000"}),
        ),
        Difference(
            "glm",
            glm_call("get_weather", {"metric": "1"}),
            [ParsedCall("get_weather", {"metric": True})],
            ParsedCall("get_weather", {"metric": "1"}),
        ),
        Difference("glm", glm_call("run", {"options": "[1]"}), [run(options=[1])], run(options="[1]")),
    ],
    "arguments may be JSON in a string, and `parameters` may stand for `arguments`, as for SGLang": [
        Difference(
            "hermes",
            hermes_call('{"name": "run", "arguments": "{\\"code\\": \\"1\\"}"}'),
            [ParsedCall("run", '{"code": "1"}')],
            run(code="1"),
        ),
        Difference("hermes", hermes_call('{"name": "run", "parameters": {"code": "1"}}'), [], run(code="1")),
    ],
    "both ways of Mistral and of DeepSeek are read, and call ids are no part of a name": [
        Difference(
            "mistral", "[TOOL_CALLS]run[CALL_ID]a1B2c3D4e[ARGS]{}", [ParsedCall("run[CALL_ID]a1B2c3D4e")], run()
        ),
        Difference(
            "mistral",
            ONE_CALL["mistral_v3"].replace(" ", "", 1),
            [ParsedCall("[", {"name": "get_weather", "arguments": ROME.arguments})],
            ROME,
        ),
        Difference("deepseek", ONE_CALL["deepseek_v31"], [], ROME),
    ],
    "an unknown tool is a call, which the model reads about": [
        Difference("glm", glm_call("nope", {}), [], ParsedCall("nope")),
    ],
    "other JSON beside a call does not hide it": [
        Difference("llama3_json", '{"a": 1} ' + ONE_CALL["llama3_json"], [], ROME),
    ],
}


@pytest.mark.parametrize("difference", [d for some in DIFFERENCES.values() for d in some], ids=lambda d: d.name)
def test_differences(difference, vllm_turn):
    """Also vLLM's side is checked: a difference that is gone belongs out of the table and of docs/tool-formats.md."""
    assert vllm_turn(difference.name, difference.text, thinking=difference.thinking).calls == difference.theirs
    calls = PARSERS.get(difference.name).parse(difference.text, TOOLS).calls
    if isinstance(difference.ours, str):
        assert difference.ours in calls[0].error
    else:
        assert calls == ([difference.ours] if difference.ours else [])


def test_one_bad_call_does_not_hide_the_others(vllm_turn):
    text = hermes_call("oops") + ONE_CALL["hermes"]
    bad, good = PARSERS.get("hermes").parse(text).calls
    assert bad.error
    assert good == ROME
    assert vllm_turn("hermes", text).calls == []


@pytest.mark.parametrize("name", ["deepseek", "glm", "hermes", "kimi", "mistral", "qwen3_coder"])
def test_words_after_a_call_are_kept(name, vllm_turn):
    text = f"Before\n{ONE_CALL[name]}\nafter"
    assert PARSERS.get(name).parse(text, TOOLS).content.split() == ["Before", "after"]
    assert vllm_turn(name, text).content == "Before"


@pytest.mark.parametrize("name", ["glm", "hermes", "kimi", "qwen3_coder"])
def test_words_of_a_turn_without_thoughts_are_words(name, vllm_turn):
    """vLLM's reasoning parsers take them for thoughts that the prompt opened."""
    text = f"I look it up.\n{ONE_CALL[name]}"
    ours, theirs = PARSERS.get(name).parse(text, TOOLS), vllm_turn(name, text, thinking=True)
    assert ours.calls == theirs.calls == [ROME]
    assert (ours.content, ours.reasoning) == (theirs.reasoning, theirs.content) == ("I look it up.", "")


@pytest.mark.parametrize("name", PARSERS.names())
def test_a_call_that_breaks_off(name, vllm_turn):
    """Here the model reads what is wrong; vLLM finds no call, or one with half its arguments."""
    call = ONE_CALL[name]
    text = call[: call.index("Rome") + 4]
    (ours,) = PARSERS.get(name).parse(text, TOOLS).calls
    assert ours.error
    assert ROME not in vllm_turn(name, text).calls
