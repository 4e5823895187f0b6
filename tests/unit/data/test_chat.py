"""Chat rendering and loss masks, with the built-in tokenizer and with the real Qwen one."""

import copy
import re
import unicodedata

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from posttrain.config import Config, DataConfig
from posttrain.core.errors import DataError
from posttrain.core.types import Prompt
from posttrain.data.chat import ChatDeltas, encoded_lengths, render_chat, render_chats, render_prompt
from posttrain.models.builtin import builtin_tokenizer
from posttrain.models.load import ModelSource
from posttrain.runs.episodes import episode_context

TINY = builtin_tokenizer("builtin:tiny")
QWEN = ["qwen2_5", "qwen2_5_training", "qwen3_instruct_2507", "qwen3_instruct_2507_training"]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    }
]


def call(**arguments):
    return {"type": "function", "function": {"name": "add", "arguments": arguments}}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, *calls, **more):
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {}), **more}


def tool(text):
    return {"role": "tool", "content": text}


CONVERSATIONS = {
    "one turn": ([user("Hi"), assistant("Hello there.")], None),
    "two turns": ([user("Hi"), assistant("Hello."), user("Once more"), assistant("Hello again, 你好 🙂.")], None),
    "system": ([{"role": "system", "content": "Be brief."}, user("Hi"), assistant("Yo")], None),
    "tool": ([user("1+2?"), assistant("I add.", call(a=1, b=2)), tool("3"), assistant("It is 3.")], TOOLS),
    "only a call": ([user("1+2?"), assistant("", call(a=1, b=2)), tool("3"), assistant("3")], TOOLS),
    "two calls": (
        [
            {"role": "system", "content": "Use tools."},
            user("1+2, 3+4?"),
            assistant("Both.", call(a=1, b=2), call(a=3, b=4)),
            tool("3"),
            tool("7\n\n"),
            assistant("3 and 7\n\nDone.\n"),
            user("Thanks"),
            assistant("  Welcome  "),
        ],
        TOOLS,
    ),
    "empty turn": ([user("Hi"), assistant(""), user("?"), assistant("Sorry")], None),
    "nfc": ([user("e\u0301"), assistant("cafe\u0301 au lait e\u0301")], None),
}


@pytest.fixture(params=["tiny", *QWEN])
def tokenizer(request):
    return TINY if request.param == "tiny" else request.getfixturevalue("qwen")(request.param)


def template_ids(tokenizer, messages, tools, **kwargs):
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False, **kwargs)


def masked_runs(chat, tokenizer):
    """The text of each unbroken run of masked tokens."""
    runs, ids = [], []
    for token, on in zip([*chat.ids, -1], [*chat.mask, False], strict=True):
        if on:
            ids.append(token)
        elif ids:
            runs.append(tokenizer.decode(ids))
            ids = []
    return runs


def written(message):
    """What the model has to write for a turn, its end-of-turn token included."""
    blocks = [message["content"]] if message["content"] else []
    for one in message.get("tool_calls", []):
        arguments = ", ".join(f'"{k}": {v}' for k, v in one["function"]["arguments"].items())
        blocks.append(f'<tool_call>\n{{"name": "add", "arguments": {{{arguments}}}}}\n</tool_call>')
    return "\n".join(blocks) + "<|im_end|>"


@pytest.mark.parametrize("name", sorted(CONVERSATIONS))
def test_ids_are_those_of_the_whole_conversation(tokenizer, name):
    messages, tools = CONVERSATIONS[name]
    chat = render_chat(messages, tokenizer, tools)
    assert chat.ids == template_ids(tokenizer, messages, tools)
    assert len(chat.mask) == len(chat.ids)


@pytest.mark.parametrize("name", sorted(CONVERSATIONS))
def test_the_mask_is_what_the_assistant_writes(tokenizer, name):
    messages, tools = CONVERSATIONS[name]
    turns = [unicodedata.normalize("NFC", written(m)) for m in messages if m["role"] == "assistant"]
    assert masked_runs(render_chat(messages, tokenizer, tools), tokenizer) == turns


@pytest.mark.parametrize("name", sorted(CONVERSATIONS))
def test_marks_and_prefixes_give_the_same_mask(qwen, name):
    messages, tools = CONVERSATIONS[name]
    for template in ("qwen2_5", "qwen3_instruct_2507"):
        by_prefix = render_chat(messages, qwen(template), tools)
        by_marks = render_chat(messages, qwen(f"{template}_training"), tools)
        assert by_prefix == by_marks


def test_a_turn_with_train_false_is_left_out(tokenizer):
    messages = [user("a"), assistant("wrong", train=False), user("b"), assistant("right", train=True)]
    chat = render_chat(messages, tokenizer)
    assert masked_runs(chat, tokenizer) == ["right<|im_end|>"]
    plain = [{k: v for k, v in m.items() if k != "train"} for m in messages]
    assert chat.ids == template_ids(tokenizer, plain, None)


def test_many_conversations_are_rendered_as_each_alone(tokenizer):
    several = list(CONVERSATIONS.values())
    assert render_chats(several, tokenizer) == [render_chat(m, tokenizer, t) for m, t in several]


def test_the_prompt_is_the_start_of_the_whole(tokenizer):
    for messages, tools in CONVERSATIONS.values():
        first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
        prompt = render_prompt(messages[:first], tokenizer, tools)
        assert prompt == template_ids(tokenizer, messages[:first], tools, add_generation_prompt=True)
        chat = render_chat(messages, tokenizer, tools)
        assert chat.ids[: len(prompt)] == prompt
        assert chat.mask.index(True) == len(prompt)


# Text that a policy may sample and tools may return. No control tokens of the chat format: they are not text.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40).filter(lambda s: not re.search(r"<\|?\w*", s))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(TEXT, st.one_of(st.lists(TEXT, min_size=1, max_size=3), TEXT)), min_size=1, max_size=3),
    st.booleans(),
)
def test_prompt_samples_and_deltas_are_the_whole(tokenizer, rounds, with_tools):
    """Sampled turns and rendered deltas, put together, decode to the rendering of the whole conversation; the ids are
    the same wherever a turn does not begin in the middle of a token."""
    tools = TOOLS if with_tools else None
    messages = [{"role": "system", "content": "s"}, user("question")]
    deltas = ChatDeltas(tokenizer, tools)
    ids = render_prompt(messages, tokenizer, tools)
    for text, reply in rounds:
        # What a policy samples is tokens, and its message is their text.
        sampled = tokenizer(text)["input_ids"]
        replies = [tool(t) for t in reply] if isinstance(reply, list) else [user(reply)]
        messages += [assistant(tokenizer.decode(sampled)), *replies]
        ids += [*sampled, tokenizer.eos_token_id, *deltas.ids(replies)]
    whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    whole_ids = tokenizer(whole)["input_ids"]
    assert tokenizer.decode(ids) == tokenizer.decode(whole_ids)
    if not any(text[:1].isspace() for text, _ in rounds) and not any(
        starts_inside_a_token(tokenizer, t) for t, _ in rounds
    ):
        assert ids == whole_ids


def starts_inside_a_token(tokenizer, text):
    """Whether ``text`` after the line break of "assistant" is tokenized otherwise than alone (a combining accent)."""
    return tokenizer("\n" + text)["input_ids"] != [*tokenizer("\n")["input_ids"], *tokenizer(text)["input_ids"]]


def test_deltas_of_a_template_that_thinks(qwen):
    """Qwen3 puts an empty thought into the last turn only. With tools it leaves the turns of one question alone."""
    tokenizer = qwen("qwen3")
    sampled = tokenizer("<think>\nadd\n</think>\n\nI add.")["input_ids"]
    ids = [*render_prompt([user("1+2?")], tokenizer, TOOLS), *sampled, tokenizer.eos_token_id]
    ids += ChatDeltas(tokenizer, TOOLS).ids([tool("3")])
    whole = [user("1+2?"), assistant(tokenizer.decode(sampled)), tool("3")]
    assert ids == template_ids(tokenizer, whole, TOOLS, add_generation_prompt=True)


def test_deltas_by_hand():
    deltas = ChatDeltas(TINY, TOOLS)
    assert TINY.decode(deltas.ids([tool("3")])) == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert TINY.decode(deltas.ids([user("more")])) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


# ---------------------------------------------------------------------- white space of other tokenizers


def of_letters(pre_tokenizer, **eos):
    """A tokenizer whose tokens are letters, besides the end of a turn."""
    letters = sorted({*map(chr, range(32, 127)), "\u2581", "\n", *pre_tokenizers.ByteLevel.alphabet()})
    whole = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    whole.pre_tokenizer = pre_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=whole, eos_token=AddedToken("</s>", special=True, **eos))
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>\n{% endif %}"
    )
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        pytest.param(of_letters(pre_tokenizers.Metaspace(prepend_scheme="first", split=False)), id="Mistral's"),
        pytest.param(of_letters(pre_tokenizers.ByteLevel(add_prefix_space=False), rstrip=True), id="Phi-3's"),
    ],
)
def test_a_delta_has_the_tokens_of_the_whole_conversation(tokenizer):
    """The first puts a space before a text, the second takes the white space behind the end of a turn for its own."""
    asked, answered, asks = user("a"), assistant("b"), user("c")
    delta = ChatDeltas(tokenizer).ids([asks])
    whole = template_ids(tokenizer, [asked, answered, asks], None, add_generation_prompt=True)
    first = template_ids(tokenizer, [asked, answered], None)
    last = len(first) - first[::-1].index(tokenizer.eos_token_id)
    assert delta == whole[last:]


def test_the_end_of_a_turn_that_takes_the_white_space_behind_it_is_in_the_mask():
    tokenizer = of_letters(pre_tokenizers.ByteLevel(add_prefix_space=False), rstrip=True)
    chat = render_chat([user("a"), assistant("yes"), user("c"), assistant("no")], tokenizer)
    shown = [token for token, on in zip(tokenizer.convert_ids_to_tokens(chat.ids), chat.mask, strict=True) if on]
    assert shown == [*"yes", "</s>", *"no", "</s>"]
    assert chat.straddling == 0


def test_half_of_a_surrogate_pair_is_a_question_mark(tokenizer):
    """JSON text can bring it, in a message and in the arguments of a call."""
    said = [user("1 \ud83d é"), assistant("2 \ude00", call(a="3 \ud83d")), tool("4"), assistant("5")]
    read = [user("1 ? é"), assistant("2 ?", call(a="3 ?")), tool("4"), assistant("5")]
    assert render_chat(said, tokenizer, TOOLS) == render_chat(read, tokenizer, TOOLS)
    assert render_prompt(said[:1], tokenizer) == render_prompt(read[:1], tokenizer)
    assert encoded_lengths(tokenizer, ["\ud83d é"]) == encoded_lengths(tokenizer, ["? é"])


# ---------------------------------------------------------------------- refused


def test_the_conversation_at_fault_is_named():
    good = ([user("a"), assistant("b")], None)
    bad = ([user("a"), {"role": "assistant", "content": 5}], None)
    with pytest.raises(DataError, match="conversation 2: message 1: the content is a int"):
        render_chats([good, good, bad], TINY)


def test_a_template_that_raises_is_a_data_error():
    tokenizer = copy.deepcopy(TINY)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    for work in (
        lambda: render_chat([user("a"), assistant("b")], tokenizer),
        lambda: render_prompt([user("a")], tokenizer),
        lambda: ChatDeltas(tokenizer).ids([tool("x")]),
    ):
        with pytest.raises(DataError, match="roles must alternate"):
            work()
    tokenizer.chat_template = "{% generation %}{{ raise_exception('no tools here') }}{% endgeneration %}"
    with pytest.raises(DataError, match="no tools here"):
        render_chat([user("a"), assistant("b")], tokenizer)


def test_a_template_that_does_not_end_turns_cannot_continue_them():
    tokenizer = copy.deepcopy(TINY)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(DataError, match="does not continue a finished assistant turn"):
        ChatDeltas(tokenizer).ids([tool("x")])
    with pytest.raises(DataError, match="does not continue a finished assistant turn"):
        ChatDeltas(tokenizer, TOOLS)  # before the first episode


# ---------------------------------------------------------------------- template arguments of a run


def test_template_arguments_of_the_config():
    assert DataConfig().chat_kwargs == {}
    data = DataConfig(enable_thinking=False, template_kwargs={"add_vision_id": True})
    assert data.chat_kwargs == {"enable_thinking": False, "add_vision_id": True}
    with pytest.raises(ValidationError, match=r"a key of its own: data\.enable_thinking"):
        DataConfig(template_kwargs={"enable_thinking": False})
    with pytest.raises(ValidationError, match="tokenize, tools: not variables of a template"):
        DataConfig(template_kwargs={"tools": [], "tokenize": True})


def test_a_run_samples_with_the_template_arguments_of_its_config(qwen):
    tokenizer = qwen("qwen3")
    cfg = Config.model_validate({"command": "rl", "rollout": {"n": 2}, "data": {"enable_thinking": False}})
    env = episode_context(cfg, ModelSource("builtin:tiny"), tokenizer)
    empty_thought = "<think>\n\n</think>\n\n"
    prompt = Prompt(0, [user("a")], "x", "1")
    assert tokenizer.decode(env.prompt_ids(prompt)).endswith(empty_thought)
    assert tokenizer.decode(env.deltas.ids([user("b")])).endswith(empty_thought)
