"""Loss masks on the real Qwen tokenizer: every template on real conversations, random conversations, thoughts."""

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import Template

from posttrain.core.errors import DataError
from posttrain.data import render_chat
from posttrain.data.chat import render_chats, render_prompt
from posttrain.data.messages import normalize_messages, normalize_tools
from tests.unit.data.test_chat import TOOLS, assistant, call, masked_runs, template_ids, tool, user

TEMPLATES = [
    "llamacpp_Qwen-QwQ-32B",
    "llamacpp_Qwen-Qwen2.5-7B-Instruct",
    "llamacpp_Qwen-Qwen3-0.6B",
    "qwen2_5",
    "qwen2_5_training",
    "qwen2_5_vl",
    "qwen2_5_vl_training",
    "qwen3",
    "qwen3_instruct_2507",
    "qwen3_instruct_2507_training",
    "qwen3_training",
    "qwen3_vl",
]
WITHOUT_TOOLS = ("qwen2_5_vl", "qwen2_5_vl_training")
"""These templates know neither tools nor calls."""


def test_text_to_ids(qwen, test_data):
    tokenizer = qwen("qwen3")
    cases = test_data / "tokenizer" / "qwen2_tokenize_cases.gguf"
    with cases.with_suffix(".gguf.inp").open(encoding="utf-8", newline="") as file:
        texts = file.read().split("\n__ggml_vocab_test__\n")
    wanted = [[int(i) for i in line.split()] for line in cases.with_suffix(".gguf.out").read_text().split("\n")]
    assert len(texts) == 47
    assert [tokenizer(text)["input_ids"] for text in texts] == wanted


# ---------------------------------------------------------------------- real conversations


def real_conversations(folder):
    """(file, messages, tools) as they are written in the files."""
    for row in json.loads((folder / "glaive_toolcall_en_demo.json").read_text()):
        yield "glaive", row["conversations"], row["tools"]
    for name in ("reason_tool_use_demo_50", "tora_examples"):
        for line in (folder / f"{name}.jsonl").read_text().splitlines():
            row = json.loads(line)
            yield name, row["messages"], row.get("tools")
    questions = [json.loads(line) for line in (folder / "bfcl_multi_turn_base.jsonl").read_text().splitlines()]
    answers = [json.loads(line) for line in (folder / "bfcl_multi_turn_base_answers.jsonl").read_text().splitlines()]
    schemas = json.loads((folder / "tau_retail_tools.json").read_text())
    for question, answer in zip(questions, answers, strict=True):
        turns = zip(question["question"], answer["ground_truth"], strict=True)
        messages = [m for asked, calls in turns for m in (*asked, assistant("\n".join(calls)))]
        yield "bfcl", messages, schemas[:3]


def says(message):
    """A piece of each thing that an assistant message must leave in the mask."""
    yield message["content"].strip()[-20:]
    for one in message.get("tool_calls", ()):
        yield one["function"]["name"]
        yield from (json.dumps(value, ensure_ascii=False) for value in one["function"]["arguments"].values())


FILES = {"glaive", "reason_tool_use_demo_50", "tora_examples", "bfcl"}
HOW_MANY = [pytest.param(10, id="a tenth"), pytest.param(1, id="all", marks=pytest.mark.slow)]


@pytest.mark.parametrize("every", HOW_MANY)
@pytest.mark.parametrize("template", TEMPLATES)
def test_real_conversations(qwen, test_data, template, every):
    """Ids are those of the whole rendering, or the row is reported; each turn's own words are in the mask."""
    tokenizer = qwen(template)
    rows = list(real_conversations(test_data / "tools"))[::every]
    assert {name for name, _, _ in rows} == FILES
    for _, raw, raw_tools in rows:
        messages, tools = normalize_messages(raw), normalize_tools(raw_tools)
        if template in WITHOUT_TOOLS:
            tools = raw_tools = None
            if re.search("'(function|tool)_call'", str(raw)):
                with pytest.raises(DataError, match=r"leaves out (its call|calls) of"):
                    render_chat(raw, tokenizer)
                continue
        chat = render_chat(raw, tokenizer, raw_tools)
        assert chat.ids == template_ids(tokenizer, messages, tools)
        assert chat.straddling == 0
        turns = [m for m in messages if m["role"] == "assistant"]
        runs = masked_runs(chat, tokenizer)
        assert len(runs) == len(turns)
        for turn, run in zip(turns, runs, strict=True):
            assert run.endswith("<|im_end|>")
            assert "<|im_start|>" not in run
            assert all(piece in run for piece in says(turn))


def test_tools_that_the_template_leaves_out_are_refused(qwen):
    chat = [user("Hi"), assistant("Hello")]
    with pytest.raises(DataError, match="does not show the tools of the conversation: ") as error:
        render_chat(chat, qwen("qwen2_5_vl"), TOOLS)
    assert "remove the rows' tools" in error.value.hint
    name = TOOLS[0]["function"]["name"]
    with pytest.raises(DataError, match="does not show the tools"):  # though somebody has the word
        render_chat([user(f"Please {name}."), assistant(f"I {name}.")], qwen("qwen2_5_vl"), TOOLS[:1])
    assert render_chat(chat, qwen("qwen2_5_vl")).ids
    assert render_chat(chat, qwen("qwen2_5"), TOOLS).ids


@pytest.mark.parametrize("every", HOW_MANY)
@pytest.mark.parametrize("template", ["qwen2_5", "qwen3_instruct_2507", "qwen2_5_vl"])
def test_real_conversations_have_the_masks_of_generation_marks(qwen, test_data, template, every):
    rows = [
        (messages, None if template in WITHOUT_TOOLS else tools)
        for name, messages, tools in real_conversations(test_data / "tools")
        if template not in WITHOUT_TOOLS or name in ("bfcl", "tora_examples")
    ][::every]
    traced = render_chats(rows, qwen(template))
    assert traced == render_chats(rows, qwen(f"{template}_training"))


# ---------------------------------------------------------------------- random conversations

LETTERS = {"system": "аб", "user": "жш", "tool": "אב", "trained": "αβ", "untrained": "γδ"}
"""Each origin has letters of its own, so that the role of a token is seen from its characters alone."""


def texts(origin):
    letters = st.text(LETTERS[origin] + " \n\t0.,:{}\"'\\🙂", max_size=12)
    return letters.map(lambda text: text.strip() + LETTERS[origin][0])


def spaced(origin):
    """Also with white space at both ends."""
    space = st.sampled_from(["", "\n", "\n\n", " ", "\r\n"])
    return st.tuples(space, texts(origin), space).map("".join)


@st.composite
def assistant_turns(draw, contents, calls):
    origin = "untrained" if draw(st.integers(0, 3)) == 0 else "trained"
    message = assistant(draw(contents(origin)), **({"train": False} if origin == "untrained" else {}))
    if calls and draw(st.booleans()):
        message["tool_calls"] = [call(a=draw(contents(origin))) for _ in range(draw(st.integers(1, 2)))]
        if draw(st.booleans()):
            message["content"] = ""
    return message


@st.composite
def conversations(draw, contents=spaced, calls=True):
    """One to four questions, each with up to two turns of tool calls before the answer."""
    messages = [{"role": "system", "content": draw(contents("system"))}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        messages.append(user(draw(contents("user"))))
        for _ in range(draw(st.integers(1, 3))):
            turn = draw(assistant_turns(contents, calls))
            messages.append(turn)
            if "tool_calls" not in turn:
                break
            messages += [tool(draw(contents("tool"))) for _ in turn["tool_calls"]]
    return messages, draw(st.sampled_from([TOOLS, None])) if calls else None


def check_roles(messages, tools, tokenizer, **template_kwargs):
    """No letter of another origin in the mask, none that is trained outside, one end of turn for each trained turn."""
    chat = render_chat(messages, tokenizer, tools, **template_kwargs)
    plain = [{k: v for k, v in m.items() if k != "train"} for m in messages]
    assert chat.ids == template_ids(tokenizer, plain, tools, **template_kwargs)
    text = tokenizer.apply_chat_template(plain, tools=tools, tokenize=False, **template_kwargs)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    inside = "".join(text[slice(*span)] for span, on in zip(offsets, chat.mask, strict=True) if on)
    outside = "".join(text[slice(*span)] for span, on in zip(offsets, chat.mask, strict=True) if not on)
    assert not set(inside) & set("".join(letters for origin, letters in LETTERS.items() if origin != "trained"))
    assert not set(outside) & set(LETTERS["trained"])
    trained = sum(m["role"] == "assistant" and m.get("train", True) for m in messages)
    assert inside.count(tokenizer.eos_token) == trained
    return chat


many = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("template", [t for t in TEMPLATES if t not in WITHOUT_TOOLS])
@many
@given(data=conversations(), thinking=st.sampled_from([{}, {"enable_thinking": True}, {"enable_thinking": False}]))
def test_every_token_has_its_role(qwen, template, data, thinking):
    check_roles(*data, qwen(template), **thinking)


@pytest.mark.parametrize("template", WITHOUT_TOOLS)
@many
@given(data=conversations(calls=False))
def test_every_token_has_its_role_without_tools(qwen, template, data):
    check_roles(*data, qwen(template))


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3_instruct_2507"])
@many
@given(data=conversations())
def test_traced_masks_are_those_of_generation_marks(qwen, template, data):
    messages, tools = data
    traced = render_chat(messages, qwen(template), tools)
    assert traced == render_chat(messages, qwen(f"{template}_training"), tools)


@many
@given(data=conversations(calls=False))
def test_traced_masks_are_those_of_generation_marks_without_tools(qwen, data):
    traced = render_chat(*data[:1], qwen("qwen2_5_vl"))
    assert traced == render_chat(*data[:1], qwen("qwen2_5_vl_training"))


# ---------------------------------------------------------------------- what the policy would have sampled


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3_instruct_2507", "qwen3_vl"])
@many
@given(data=conversations(contents=texts))
def test_the_mask_begins_where_the_policy_is_asked(qwen, template, data):
    """A turn's first token in the mask is the one that follows the prompt of the conversation so far."""
    messages, tools = data
    tokenizer = qwen(template)
    chat = render_chat(messages, tokenizer, tools)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = render_prompt(messages[:i], tokenizer, tools)
            assert chat.ids[: len(prompt)] == prompt
            trained = message.get("train", True)
            assert chat.mask[len(prompt) - 1 : len(prompt) + 1] == [False, trained]


def test_a_turn_that_begins_with_a_line_break(qwen):
    """Qwen makes one token of the header's line break and the turn's own. The policy, asked to go on after the header,
    never writes that token; what follows it is trained."""
    tokenizer = qwen("qwen2_5")
    messages = [user("a"), assistant("\n\nb"), user("c"), assistant("d")]
    chat = render_chat(messages, tokenizer)
    assert chat.ids == template_ids(tokenizer, messages, None)
    assert masked_runs(chat, tokenizer) == ["b<|im_end|>", "d<|im_end|>"]
    assert chat.straddling == 1
    merged = chat.mask.index(True) - 1
    assert tokenizer.decode(chat.ids[merged]) == "\n\n\n"
    assert chat.ids[merged] != render_prompt(messages[:1], tokenizer)[-1]


THOUGHT = "<think>\nhm\n</think>\n\n"


@pytest.mark.parametrize("template", ["qwen3", "llamacpp_Qwen-Qwen3-0.6B"])
def test_thoughts_that_the_template_drops_have_no_tokens(qwen, template):
    tokenizer = qwen(template)
    messages = [user("a"), assistant(f"{THOUGHT}b"), user("c"), assistant(f"{THOUGHT}d")]
    chat = render_chat(messages, tokenizer)
    assert chat.ids == template_ids(tokenizer, messages, None)
    assert masked_runs(chat, tokenizer) == ["b<|im_end|>", f"{THOUGHT}d<|im_end|>"]
    # The turns of one question keep theirs.
    messages = [user("a"), assistant(f"{THOUGHT}b", call(a=1)), tool("3"), assistant(f"{THOUGHT}d")]
    first, last = masked_runs(render_chat(messages, tokenizer, TOOLS), tokenizer)
    assert first == f'{THOUGHT}b\n<tool_call>\n{{"name": "add", "arguments": {{"a": 1}}}}\n</tool_call><|im_end|>'
    assert last == f"{THOUGHT}d<|im_end|>"
    # Reasoning in a key of its own, and what a training template keeps of it.
    messages = [user("a"), assistant("b", reasoning_content="hm"), user("c"), assistant("d", reasoning_content="hm")]
    assert masked_runs(render_chat(messages, tokenizer), tokenizer) == ["b<|im_end|>", f"{THOUGHT}d<|im_end|>"]
    tokenizer = qwen("qwen3_training")
    assert masked_runs(render_chat(messages, tokenizer), tokenizer) == [f"{THOUGHT}{x}<|im_end|>" for x in "bd"]


@many
@given(data=conversations(contents=texts))
def test_qwen3_and_its_training_template_agree_where_all_thoughts_are_kept(qwen, data):
    messages, tools = data
    first = next(i for i, m in enumerate(messages) if m["role"] == "user")
    more = (i for i, m in enumerate(messages) if m["role"] == "user" and i > first)
    messages = messages[: next(more, None)]  # one question: thoughts after it are kept
    messages = [{**m, "reasoning_content": "hm"} if m["role"] == "assistant" else m for m in messages]
    traced = render_chat(messages, qwen("qwen3"), tools)
    assert traced == render_chat(messages, qwen("qwen3_training"), tools)


@pytest.mark.parametrize("template", ["qwen3", "qwen3_training"])
def test_the_empty_thought_of_enable_thinking_false_is_given_not_sampled(qwen, template):
    tokenizer = qwen(template)
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    empty = "<think>\n\n</think>\n\n"
    past = empty if template == "qwen3_training" else ""  # it writes the thought into every turn
    for kwargs, wanted in (
        ({"enable_thinking": False}, ["b<|im_end|>", "d<|im_end|>"]),
        ({}, [f"{past}b<|im_end|>", f"{empty}d<|im_end|>"]),
    ):
        chat = render_chat(messages, tokenizer, **kwargs)
        assert chat.ids == template_ids(tokenizer, messages, None, **kwargs)
        assert masked_runs(chat, tokenizer) == wanted
    prompt = render_prompt(messages[:3], tokenizer, enable_thinking=False)
    assert tokenizer.decode(prompt).endswith(empty)


def test_qwq_begins_its_thought_in_the_prompt(qwen):
    tokenizer = qwen("llamacpp_Qwen-QwQ-32B")
    messages = [user("a"), assistant(f"{THOUGHT}b"), user("c"), assistant(f"{THOUGHT}d")]
    chat = render_chat(messages, tokenizer, enable_thinking=True)
    assert chat.ids == template_ids(tokenizer, messages, None, enable_thinking=True)
    given = "<think>\n"
    assert masked_runs(chat, tokenizer) == ["b<|im_end|>", THOUGHT.removeprefix(given) + "d<|im_end|>"]


# ---------------------------------------------------------------------- cost


@pytest.mark.parametrize("template", ["qwen2_5_training", "qwen3"])
def test_renderings_do_not_grow_with_the_turns(qwen, monkeypatch, template):
    rendered = []
    render = Template.render

    def counting(self, *args, **kwargs):
        rendered.append(self)
        return render(self, *args, **kwargs)

    monkeypatch.setattr(Template, "render", counting)
    counts = []
    for turns in (1, 40):
        rendered.clear()
        render_chats([([user("a"), assistant("b")] * turns, None)] * 10, qwen(template))
        counts.append(len(rendered))
    assert counts[0] == counts[1]
    assert counts[0] <= 2 * 10 + 12  # two for each conversation, and a few to know the template
