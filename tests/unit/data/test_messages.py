"""Conversations as others write them: brought into one shape, or refused with a reason."""

import json

import pytest

from posttrain.core.errors import DataError
from posttrain.data import render_chat
from posttrain.data.messages import normalize_messages, normalize_tools
from tests.unit.data.test_chat import TINY, TOOLS, assistant, call, masked_runs, template_ids, tool, user

SAME = [user("1+2?"), assistant("I add.", call(a=1, b=2)), tool("3"), assistant("It is 3.")]
"""The conversation that each of these says."""
ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'

STYLES = {
    "openai": SAME,
    "arguments as text": [
        SAME[0],
        {
            "role": "assistant",
            "content": "I add.",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}],
        },
        *SAME[2:],
    ],
    "calls without envelope": [
        SAME[0],
        {"role": "assistant", "content": "I add.", "tool_calls": [json.loads(ADD)]},
        *SAME[2:],
    ],
    "sharegpt": [
        {"from": "human", "value": "1+2?"},
        {"from": "gpt", "value": "I add."},
        {"from": "function_call", "value": ADD},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "It is 3."},
    ],
    "typed lists": [
        {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "2?"}]},
        {"role": "assistant", "content": [{"type": "text", "value": "I add."}, {"type": "tool_call", "value": ADD}]},
        {"role": "tool", "content": [{"type": "text", "text": "3", "image": None}]},
        {"role": "assistant", "content": ["It is 3."], "tool_calls": None, "name": None},
    ],
}


@pytest.mark.parametrize("style", STYLES)
def test_one_conversation_in_many_styles(style):
    assert normalize_messages(STYLES[style]) == SAME
    assert render_chat(STYLES[style], TINY, TOOLS) == render_chat(SAME, TINY, TOOLS)
    assert render_chat(SAME, TINY, TOOLS).ids == template_ids(TINY, SAME, TOOLS)


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "llamacpp_Qwen-QwQ-32B", "qwen3_vl"])
def test_arguments_as_text_are_not_quoted_twice(qwen, template):
    chat = render_chat(STYLES["arguments as text"], qwen(template), TOOLS)
    assert f"<tool_call>\n{ADD}\n</tool_call>" in masked_runs(chat, qwen(template))[0]


def test_null_and_missing_content_is_empty(qwen):
    for content in ({"content": None}, {"content": ""}, {}):
        messages = [user("?"), {"role": "assistant", **content, "tool_calls": [call(a=1)]}, tool("3"), assistant("3")]
        for template in ("qwen2_5", "qwen3", "llamacpp_Qwen-QwQ-32B"):
            first = masked_runs(render_chat(messages, qwen(template), TOOLS), qwen(template))[0]
            assert first.endswith('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>')


@pytest.mark.parametrize("none", [None, "", "{}", {}])
def test_a_call_without_arguments_in_many_styles(none):
    """Servers say "" where the model wrote none."""
    (message,) = normalize_messages([assistant("", {"function": {"name": "now", "arguments": none}})])
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "now", "arguments": {}}}]


def test_ids_names_and_own_keys_are_kept_and_null_keys_are_not():
    call_with_id = {"id": "c1", **call(a=1)}
    messages = [
        {**assistant("", call_with_id), "mood": "good", "weight": None},
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "3"},
    ]
    kept = normalize_messages(messages)
    assert kept == [{**assistant("", call_with_id), "mood": "good"}, messages[1]]
    assert messages[0]["weight"] is None  # the caller's messages stay as they are


def test_train_flags_of_sharegpt_turns():
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "train": False}]
    turns += [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]
    assert masked_runs(render_chat(turns, TINY), TINY) == ["d<|im_end|>"]


def test_reasoning_parts(qwen):
    parts = [{"type": "reasoning", "value": "hm"}, {"type": "text", "value": "b"}]
    messages = [user("a"), {"role": "assistant", "content": parts}]
    assert normalize_messages(messages)[1] == assistant("b", reasoning_content="hm")
    written = masked_runs(render_chat(messages, qwen("qwen3")), qwen("qwen3"))
    assert written == ["<think>\nhm\n</think>\n\nb<|im_end|>"]


PICTURES = [
    {"type": "image", "image": b"\x89PNG"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    {"type": "image"},
]


@pytest.mark.parametrize("picture", PICTURES, ids=["bytes", "url", "bare"])
@pytest.mark.parametrize("template", ["qwen2_5_vl", "qwen2_5_vl_training", "qwen3_vl"])
def test_images_are_placeholders(qwen, template, picture):
    tokenizer = qwen(template)
    parts = [picture, {"type": "text", "text": "What is it?"}]
    chat = render_chat([{"role": "user", "content": parts}, assistant("A cat.")], tokenizer)
    assert "<|vision_start|><|image_pad|><|vision_end|>What is it?<|im_end|>" in tokenizer.decode(chat.ids)
    assert masked_runs(chat, tokenizer) == ["A cat.<|im_end|>"]


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "qwen3_instruct_2507_training"])
def test_a_template_that_would_drop_an_image_is_refused(qwen, template):
    parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    with pytest.raises(DataError, match="cannot show images"):
        render_chat([{"role": "user", "content": parts}, assistant("A cat.")], qwen(template))


def test_tools_in_many_styles():
    schema, bare = TOOLS[0], TOOLS[0]["function"]
    for tools in ([schema], [bare], json.dumps([schema]), json.dumps([bare]), [json.dumps(bare)]):
        assert normalize_tools(tools) == TOOLS
    for none in (None, [], "", "[]", "null"):
        assert normalize_tools(none) is None
    for bad, reason in (
        ("[", "not JSON"),
        ([5], "tool 0 .*: 5"),
        (['{"a": 1}'], "tool 0"),
        (5, "not JSON"),
        (schema, "one object"),
    ):
        with pytest.raises(DataError, match=reason):
            normalize_tools(bad)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": "a"}, "it has no role"),
        ({"from": "robot", "value": "a"}, "'from' is 'robot'; known: system, human"),
        ({"from": "human"}, "'value' is missing"),
        ({"role": "user", "content": 5}, "the content is a int"),
        ({"role": "user", "content": {"type": "text"}}, "the content is a dict"),
        ({"role": "user", "content": [{"type": "smell"}]}, "a part of the content has type 'smell'"),
        ({"role": "user", "content": [{"text": "a"}]}, "'type' is missing"),
        ({"role": "user", "content": [{"type": "text"}]}, "a part of type 'text' has no text"),
        ({"from": "function_call", "value": "add(1, 2)"}, "a tool call: not JSON"),
        ({"from": "function_call", "value": "{}"}, "a tool call has no function name"),
        (assistant("", {"function": {"name": "add", "arguments": "1, 2"}}), "the arguments of add: not JSON"),
        (
            assistant("", {"function": {"name": "add", "arguments": "[1]"}}),
            "the arguments of add are not a JSON object",
        ),
    ],
)
def test_messages_of_no_style_are_named(message, reason):
    with pytest.raises(DataError, match=r"conversation 0: message 1: ") as error:
        render_chat([user("a"), message], TINY)
    assert reason in error.value.message
