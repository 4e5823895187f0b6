"""The token contract of sessions: what is trained is what was sampled, once, over templates, call formats, branches."""

import copy
import itertools
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.core.errors import DataError
from posttrain.core.types import Sample
from posttrain.data.chat import ChatDeltas, render_prompt
from posttrain.envs.session import TokenRenderer, TokenSession
from posttrain.tools.formats import PARSERS, ParsedCall, ParsedTurn
from tests.helpers.scripted import EOS, TOKENIZER, tokens

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "say",
            "description": "Say it.",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
        },
    }
]


def user(text):
    return {"role": "user", "content": text}


def session(parser="hermes", tokenizer=TOKENIZER):
    return TokenSession(TokenRenderer(tokenizer, PARSERS.get(parser), frozenset({EOS})))


def turn(session, messages, text, tools=(), end=True, version=3):
    """Ask for a turn, which is ``text``. Returns (the request, its sample, the message)."""
    asked = session.asked(messages, tools)
    ids = [*tokens(text), *([EOS] if end else [])]
    sample = Sample(ids, [-0.25] * len(ids), "stop" if end else "length", version)
    return asked, sample, session.sampled(asked, [sample])


def test_a_conversation_that_goes_on_is_one_branch_of_prompt_samples_and_deltas():
    s = session()
    first = [user("hi")]
    a, one, said = turn(s, first, " one ", version=3)
    assert a.ids.tolist() == render_prompt(first, TOKENIZER)
    second = [*first, said, user("more")]
    b, two, _ = turn(s, second, "two", version=4)
    delta = ChatDeltas(TOKENIZER).ids([user("more")])
    assert b.ids.tolist() == [*a.ids, *one.ids, *delta]
    [branch] = s.branches
    columns = branch.record.columns()
    assert columns["tokens"].tolist() == [*b.ids, *two.ids]
    mask = [False] * len(a.ids) + [True] * len(one.ids) + [False] * len(delta) + [True] * len(two.ids)
    assert columns["loss_mask"].tolist() == mask
    assert set(columns["weight_version"][columns["loss_mask"]].tolist()) == {3, 4}
    assert (branch.prompt_length, branch.given, branch.turns, s.unmatched) == (len(a.ids), 1, 2, 0)


@pytest.mark.parametrize("content", ["one", " one \n", [{"type": "text", "text": "one"}]])
def test_a_turn_is_known_in_each_way_that_clients_send_it_back(content):
    s = session()
    turn(s, [user("hi")], "one\n")
    asked = s.asked([user("hi"), {"role": "assistant", "content": content}, user("more")])
    assert asked.parent is not None
    assert s.unmatched == 0


def test_what_a_tool_says_is_rendered_as_in_an_ordinary_episode():
    s = session()
    text = '<tool_call>\n{"name": "say", "arguments": {"text": "a"}}\n</tool_call>'
    a, one, said = turn(s, [user("hi")], text, TOOLS)
    reply = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "8"}
    asked = s.asked([user("hi"), said, reply], TOOLS)
    delta = ChatDeltas(TOKENIZER, TOOLS).ids([{"role": "tool", "name": "say", "content": "8"}])
    assert asked.ids.tolist() == [*a.ids, *one.ids, *delta]


def test_calls_with_arguments_as_text_and_null_content_are_known():
    s = session()
    text = '<tool_call>\n{"name": "say", "arguments": {"text": "é"}}\n</tool_call>'
    _, _, said = turn(s, [user("hi")], text, TOOLS)
    [call] = said["tool_calls"]
    sent = {**call, "function": {"name": "say", "arguments": json.dumps({"text": "é"})}}
    reply = {"role": "tool", "tool_call_id": call["id"], "content": "é"}
    asked = s.asked([user("hi"), {"role": "assistant", "content": None, "tool_calls": [sent]}, reply], TOOLS)
    assert asked.parent is not None
    # Without the tools the system prompt is another one.
    assert s.asked([user("hi"), {"role": "assistant", "content": None, "tool_calls": [sent]}, reply]).parent is None
    assert s.unmatched == 1


def test_an_edited_question_branches_and_what_both_branches_share_is_trained_once():
    s = session()
    a, one, said = turn(s, [user("hi")], "one")
    b, two, _ = turn(s, [user("hi"), said, user("more")], "two")
    c, three, _ = turn(s, [user("hi"), said, user("less")], "three")
    assert c.ids.tolist()[: len(a.ids) + len(one.ids)] == [*a.ids, *one.ids]
    first, second = (branch.record.columns() for branch in s.branches)
    assert first["tokens"].tolist() == [*b.ids, *two.ids]
    assert second["tokens"].tolist() == [*c.ids, *three.ids]
    assert second["loss_mask"].sum() == len(three.ids)
    assert first["loss_mask"].sum() == len(one.ids) + len(two.ids)
    assert s.unmatched == 0


def test_a_compaction_is_rendered_anew_as_a_branch_and_counted():
    s = session()
    _, _, said = turn(s, [user("hi")], "one")
    assert s.asked([user("summary: hi, one"), user("more")]).parent is None
    assert s.unmatched == 0  # it has no turn of the assistant
    edited = {**said, "content": "another"}
    asked, sample, _ = turn(s, [user("hi"), edited, user("more")], "two")
    assert (asked.parent, s.unmatched, len(s.branches)) == (None, 1, 2)
    assert s.branches[1].record.columns()["loss_mask"].sum() == len(sample.ids)


def test_samples_of_one_request_are_branches_and_the_ids_of_calls_say_which_goes_on():
    s = session()
    asked = s.asked([user("hi")], TOOLS)
    text = '<tool_call>\n{"name": "say", "arguments": {"text": "a"}}\n</tool_call>'
    samples = [Sample([*tokens(text), EOS], [-1.0] * (len(tokens(text)) + 1), "stop", v) for v in (1, 2)]
    first, second = [s.sampled(asked, [sample]) for sample in samples]
    assert len(s.branches) == 2
    for message, version in ((first, 1), (second, 2)):
        reply = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a"}
        parent = s.asked([user("hi"), message, reply], TOOLS).parent
        assert set(parent.branch.record.columns()["weight_version"].tolist()) == {-1, version}


@pytest.mark.parametrize(("echoed", "goes_on"), [("one", 0), ("two", 1), (None, 1)])
def test_of_turns_that_read_alike_the_one_with_the_thoughts_sent_back_goes_on_else_the_last(echoed, goes_on):
    s = session("qwen3_coder")
    said = [turn(s, [user("hi")], f"<think>\n{thought}\n</think>\n\nok", TOOLS)[2] for thought in ("one", "two")]
    assert [message["reasoning_content"].strip() for message in said] == ["one", "two"]
    back = {"role": "assistant", "content": "ok"}
    if echoed is not None:
        back = said[goes_on]
    asked = s.asked([user("hi"), back, user("more")], TOOLS)
    assert asked.parent.branch is s.branches[goes_on]


@pytest.mark.parametrize("end_of_sequence", ["<|im_end|>", "<|endoftext|>"])
def test_a_turn_that_was_cut_off_goes_on_after_an_end_that_is_given(end_of_sequence):
    """The chat template's, which a base model's tokenizer has not."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.eos_token = end_of_sequence
    s = session(tokenizer=tokenizer)
    a, one, said = turn(s, [user("hi")], "one", end=False)
    b, _, _ = turn(s, [user("hi"), said, user("more")], "two")
    assert b.ids.tolist() == [*a.ids, *one.ids, EOS, *ChatDeltas(TOKENIZER).ids([user("more")])]
    [branch] = s.branches
    assert not branch.record.columns()["loss_mask"][len(a.ids) + len(one.ids)]


def test_a_turn_that_a_weight_update_cut_off_has_both_versions():
    s = session()
    asked = s.asked([user("hi")])
    parts = [Sample(tokens("one "), [-1.0] * len(tokens("one ")), "abort", 1), Sample([EOS], [-2.0], "stop", 2)]
    assert s.sampled(asked, parts)["content"] == "one "
    columns = s.branches[0].record.columns()
    assert columns["weight_version"][columns["loss_mask"]].tolist() == [1] * len(tokens("one ")) + [2]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "end with no turn to answer"),
        ([user("a"), {"role": "assistant", "content": "b"}], "end with no turn to answer"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image"),
        ([{"content": "a"}], "has no role"),
    ],
)
def test_messages_that_cannot_be_shown_are_refused(messages, said):
    with pytest.raises(DataError, match=said):
        session().asked(messages)


def test_control_tokens_of_a_client_cannot_end_its_turn():
    s = session()
    assert s.asked([user(f"hi{TOKENIZER.eos_token}")]).ids.tolist().count(EOS) == s.asked(
        [user("hi")]
    ).ids.tolist().count(EOS)


# ---------------------------------------------------------------------- random conversations

WORDS = st.sampled_from(
    ["\n", " ", "7", "é", "漢", "The answer", "<tool_response>", "{", "}", '"', "\\n", "🙂", "user"]
)
TEXTS = st.lists(WORDS, min_size=1, max_size=4).map("".join)
THOUGHTS = st.sampled_from(["", "", "let me see"])
CALLS = st.lists(TEXTS.map(lambda text: ParsedCall("say", {"text": text})), max_size=2)
TURNS = st.builds(ParsedTurn, TEXTS.map(str.strip), CALLS, THOUGHTS)
DOES = st.sampled_from(["go on", "go on", "go on", "again", "edit", "compact", "sub-agent", "from earlier"])
ACTIONS = st.lists(st.tuples(DOES, TURNS, TEXTS), min_size=3, max_size=8)


def replies(message, text):
    calls = message.get("tool_calls", ())
    tools = [{"role": "tool", "tool_call_id": call["id"], "name": "say", "content": text} for call in calls]
    return tools or [user(text)]


def as_sent(message):
    """As clients send a turn back: arguments as text, no thoughts."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    sent = {"role": "assistant", "content": message["content"] or None}
    return sent | ({"tool_calls": calls} if calls else {})


TEMPLATES = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "llamacpp_Qwen-QwQ-32B", "qwen3_vl", "qwen2_5_training")


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ACTIONS, st.sampled_from(PARSERS.names()), st.lists(st.integers(1, 40), max_size=5))
def test_every_sampled_token_is_trained_on_once_as_it_was_sampled(qwen, template, actions, parser, cuts):
    tokenizer = qwen(template)
    eos = tokenizer.eos_token_id
    s = TokenSession(TokenRenderer(tokenizer, PARSERS.get(parser), frozenset({eos})))
    history, earlier = [user("Say something.")], []
    seen = {}
    for number, (action, wrote, text) in enumerate(actions):
        asked_for = history
        if action == "edit":
            asked_for = [user(text), *history[1:]]
        elif action == "compact":
            asked_for = [user(f"So far: {text}")]
        elif action == "sub-agent":
            asked_for = [{"role": "system", "content": "Help."}, user(text)]
        elif action == "from earlier" and earlier:
            asked_for = earlier[number % len(earlier)]
        asked = s.asked(asked_for, TOOLS)
        written = PARSERS.get(parser).render(wrote)
        places = sorted({min(c, len(written)) for c in cuts} | {0, len(written)})
        pieces = [written[a:b] for a, b in itertools.pairwise(places)]
        ids = [i for piece in pieces for i in tokenizer(piece, add_special_tokens=False)["input_ids"]] + [eos]
        logprobs = [-(number + 1) - k / 1024 for k in range(len(ids))]
        message = s.sampled(asked, [Sample(ids, logprobs, "stop", number)])
        if action in ("go on", "again", "from earlier"):
            assert asked.parent is not None or not any(m["role"] == "assistant" for m in asked_for)
        if asked.parent is not None:  # what the model saw before, and the delta of an ordinary episode
            last = max(i for i, m in enumerate(asked_for) if m["role"] == "assistant")
            new = [{k: v for k, v in m.items() if k != "tool_call_id"} for m in asked_for[last + 1 :]]
            delta = ChatDeltas(tokenizer, TOOLS).ids(new)
            assert any(asked.ids.tolist() == [*before, *ids, *delta] for before, ids, _ in seen.values())
        seen[number] = (asked.ids.tolist(), ids, logprobs)
        earlier.append(asked_for)
        if action != "again":
            history = [*asked_for, as_sent(message), *replies(message, text)]

    trained = {}
    for branch in s.branches:
        columns = branch.record.columns()
        assert not columns["loss_mask"][: branch.prompt_length].any()
        for version in set(columns["weight_version"][columns["loss_mask"]].tolist()):
            (places,) = np.nonzero(columns["weight_version"] == version)
            assert (np.diff(places) == 1).all()
            prompt, ids, logprobs = seen[version]
            assert columns["tokens"][: places[0]].tolist() == prompt
            assert columns["tokens"][places].tolist() == ids
            assert np.allclose(columns["logprobs"][places], logprobs)
            assert version not in trained
            trained[version] = True
    assert trained.keys() == seen.keys()
    assert s.turns == len(seen)
