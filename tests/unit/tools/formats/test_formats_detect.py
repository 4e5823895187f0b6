"""`rollout.tool_format = "auto"`: the format is told by the chat template, or the run is refused."""

import re
from pathlib import Path

import pytest

from posttrain.config import Config
from posttrain.core.errors import ConfigError
from posttrain.models.builtin import builtin_tokenizer
from posttrain.models.load import ModelSource
from posttrain.runs.episodes import episode_context
from posttrain.tools.formats import PARSERS, ParsedCall, ParsedTurn, detect

# What matters of the templates of each family, in few words.
EXCERPTS = {
    "deepseek": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool.type + '<｜tool▁sep｜>' + tool.function.name + "
    "'\\n' + '```json' + '\\n' + tool.function.arguments + '\\n' + '```' + '<｜tool▁call▁end｜>'}}",
    "deepseek_v31": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + call.name + '<｜tool▁sep｜>' + call.arguments}}",
    "glm": "<tool_call>{{ call.name }}\n{% for k, v in call.arguments.items() %}<arg_key>{{ k }}</arg_key>{% endfor %}",
    "gpt_oss": '{{- "<|start|>assistant to=" }}{{- "functions." + name + "<|channel|>commentary json<|message|>" }}',
    "hermes": '{{- \'<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' + call.arguments | tojson }}',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ arguments }}",
    "llama3_json": "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{\"name\": \"' + call.name + '\", ' }}"
    "{{- '\"parameters\": ' }}{{- call.arguments | tojson }}",
    "mistral": "{{- '[TOOL_CALLS]' + call.name + '[ARGS]' + call.arguments | tojson }}",
    "mistral_v3": "{{- '[TOOL_CALLS] [' }}{{- call | tojson }}{{- ']' + eos_token }}",
    "qwen3_coder": "{{- '<tool_call>\\n<function=' + call.name + '>\\n' }}{{- '<parameter=' + key + '>\\n' }}"
    "{{- '\\n</parameter>\\n' }}{%- if call.arguments is defined %}{%- endif %}",
}


def test_every_format_has_an_excerpt():
    assert sorted(EXCERPTS) == PARSERS.names()


@pytest.mark.parametrize("name", EXCERPTS)
def test_detect(name):
    assert detect(EXCERPTS[name]) == name


def test_detect_is_not_sure_of_more_than_one_format_or_of_none():
    assert detect(EXCERPTS["hermes"] + EXCERPTS["kimi"]) is None
    assert detect(EXCERPTS["llama3_json"] + EXCERPTS["mistral"]) is None
    assert detect("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}") is None
    assert detect("") is None
    for other in ("<seed:tool_call><function=f><parameter=a>", '<TOOLCALL>[{"name": "f", "arguments": {}}]</TOOLCALL>'):
        assert detect(other) is None


def test_detect_on_real_templates(test_data):
    files = sorted((test_data / "tokenizer" / "templates").glob("*.jinja"))
    assert len(files) > 10
    for file in files:
        expected = None if file.name.startswith("qwen2_5_vl") else "hermes"  # those two show no tools
        assert detect(file.read_text(encoding="utf-8")) == expected, file.name


# ---------------------------------------------------------------------- the run


def environment(template=None, **rollout):
    tokenizer = builtin_tokenizer("builtin:tiny")
    if template is not None:
        tokenizer.chat_template = template
    cfg = Config.model_validate({"command": "rl", "run": {"name": "x"}, "rollout": rollout})
    return episode_context(cfg, ModelSource("builtin:tiny"), tokenizer)


TOOLS = "{{ (tools or []) | tojson }}"
CHAT = TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHAT += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def test_the_format_comes_from_the_template():
    assert environment(tools=["gsm8k"]).parser is PARSERS.get("hermes")
    assert environment(CHAT + "{# <tool_call> <arg_key> #}", tools=["gsm8k"]).parser is PARSERS.get("glm")
    both = {"default": CHAT, "tool_use": CHAT + "{# <tool_call> <function= <parameter= #}"}
    assert environment(both, tools=["gsm8k"]).parser is PARSERS.get("qwen3_coder")


def test_a_template_that_does_not_tell_is_refused_where_there_are_tools():
    with pytest.raises(ConfigError, match="does not tell") as error:
        environment(CHAT, tools=["gsm8k"])
    assert "rollout.tool_format" in error.value.hint
    assert all(name in error.value.hint for name in PARSERS.names())
    assert environment(CHAT).schemas is None


def test_the_format_can_be_named():
    assert environment(CHAT, tools=["gsm8k"], tool_format="kimi").parser is PARSERS.get("kimi")
    with pytest.raises(ConfigError, match="unknown tool format 'lama3_json'") as error:
        environment(tool_format="lama3_json")
    assert error.value.hint == "did you mean 'llama3_json'?"


@pytest.mark.parametrize("tool_format", ["auto", "hermes"])
def test_a_template_that_does_not_show_tools_is_refused_whatever_the_format(tool_format):
    """The hint is not about the format: a model that reads of no tool cannot call it in any."""
    plain = CHAT.removeprefix(TOOLS)
    with pytest.raises(ConfigError, match="does not show calc_gsm8k_reward: the model would not know of it") as error:
        environment(plain, tools=["gsm8k"], tool_format=tool_format)
    assert "tool_format" not in error.value.hint
    assert "rollout.tools=[]" in error.value.hint
    both = {"default": plain, "tool_use": CHAT}
    assert list(environment(both, tools=["gsm8k"], tool_format="hermes").tools) == ["calc_gsm8k_reward"]
    assert environment(plain, tool_format=tool_format).schemas is None


def test_the_example_of_the_docs():
    page = (Path(__file__).resolve().parents[4] / "docs" / "tool-formats.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(example, {"__name__": "example"})
    parser = environment(tools=["gsm8k"], tool_format="lines").parser
    turn = ParsedTurn("Hm.", [ParsedCall("f"), ParsedCall("g")])
    assert parser.parse(parser.render(turn)) == turn


def test_the_docs_name_every_format():
    page = (Path(__file__).resolve().parents[4] / "docs" / "tool-formats.md").read_text(encoding="utf-8")
    assert all(f"\n| `{name}` |" in page for name in EXCERPTS)


def test_a_plugin_may_add_a_format():
    class Shout(type(PARSERS.get("hermes"))):
        stop_tokens = ("<|endoftext|>", "<|not a token|>")

    PARSERS.register("shout")(shout := Shout())
    env = environment(tools=["gsm8k"], tool_format="shout")
    assert env.parser is shout
    # Its stop tokens end a turn where the tokenizer has them, and where there are tools.
    stop = env.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert env.stop_token_ids == {env.tokenizer.eos_token_id, stop}
    assert stop != env.tokenizer.eos_token_id
    assert environment(tool_format="shout").stop_token_ids == {env.tokenizer.eos_token_id}
