"""Preference rows: how they are checked, which layouts are read, and what of them is trained on."""

import itertools
import json
import pickle

import pytest
import torch

from posttrain.config import Config
from posttrain.core.errors import DataError
from posttrain.data.chat import render_chat
from posttrain.data.parquet import (
    Preference,
    parse_preference,
    preference_row,
    read_preferences,
    read_typed,
    write_rows,
)
from posttrain.data.preferences import PreferenceRow
from posttrain.data.prefetch import Row
from posttrain.data.stream import Counts
from posttrain.models.builtin import builtin_tokenizer
from posttrain.preference.command import Pairs, pack
from posttrain.prep import command as prep
from posttrain.prep.card import read_card
from posttrain.sft.samples import load_validation, notes, open_stream

TOKENIZER = builtin_tokenizer("builtin:tiny")
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def user(text="What is 2 + 2?"):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text="Be brief."):
    return {"role": "system", "content": text}


GOOD, BAD = assistant("It is 4."), assistant("I do not know that.")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


def row(**columns):
    return {"prompt": [user()], "chosen": [GOOD], "rejected": [BAD], **columns}


SAME = [
    row(),
    row(chosen=[user(), GOOD], rejected=[user(), BAD]),
    row(chosen=[user(), GOOD], rejected=[BAD]),
    {"chosen": [user(), GOOD], "rejected": [user(), BAD]},
    row(prompt=None, chosen=[user(), GOOD], rejected=[user(), BAD]),
    row(prompt=json.dumps([user()]), chosen=json.dumps([GOOD]), rejected=json.dumps([BAD])),
    row(prompt=[{"role": "user", "content": [{"type": "text", "text": "What is 2 + 2?"}]}]),
]


@pytest.mark.parametrize("raw", SAME)
def test_one_pair_in_every_way_of_writing_it(raw):
    assert parse_preference(raw, "f", 0) == Preference([user()], [GOOD], [BAD])


def test_conversations_of_several_turns_and_tools():
    before = [system(), user("Hi"), assistant("Hello"), user()]
    pair = parse_preference({"chosen": [*before, GOOD], "rejected": [*before, BAD]}, "f", 0)
    assert (pair.prompt, pair.chosen, pair.rejected) == (before, [GOOD], [BAD])
    called = [assistant("", tool_calls=[CALL]), {"role": "tool", "name": "add", "content": "4"}, GOOD]
    pair = parse_preference(row(chosen=called, tools=[ADD], extra_info={"annotator": 3}), "f", 0)
    assert (pair.chosen, pair.rejected, pair.tools) == (called, [BAD], [ADD])
    # A prompt may end with an assistant's message; the answers then go on from a user's.
    pair = parse_preference(
        row(prompt=[user("Hi"), assistant("Hello")], chosen=[user(), GOOD], rejected=[user(), BAD]), "f", 0
    )
    assert (len(pair.prompt), pair.chosen) == (3, [GOOD])


WRONG = [
    (row(rejected=[GOOD]), "column 'rejected': it is the same as `chosen`"),
    (row(chosen=[]), "column 'chosen': there is no message"),
    (row(chosen="It is 4."), "column 'chosen'"),
    (row(chosen=[{"role": "robot", "content": "x"}]), "column 'chosen.0.role'"),
    (row(chosen=[user("Another?"), GOOD]), "column 'chosen.0': it begins a conversation, and not with the messages of"),
    (row(rejected=[system(), user(), GOOD]), "column 'rejected.0': it begins a conversation"),
    (row(chosen=[GOOD, user()]), "column 'prompt \\+ chosen.2.role': the conversation ends with a user message"),
    (row(chosen=[GOOD, GOOD]), "column 'prompt \\+ chosen.2.role': roles out of order"),
    (
        row(chosen=[GOOD, user("And 3 + 3?"), assistant("6")], rejected=[GOOD]),
        "'rejected': it is the beginning of `chosen`",
    ),
    (row(prompt=None, chosen=[user("a"), GOOD], rejected=[user("b"), BAD]), "they answer different prompts"),
    (row(prompt=None), "column 'chosen': no user message"),
    (
        row(chosen=[assistant("", tool_calls=[CALL]), {"role": "tool", "content": "4"}, GOOD]),
        "a call of 'add', which `tools` does not",
    ),
]


@pytest.mark.parametrize(("raw", "message"), WRONG)
def test_bad_rows_are_refused_with_file_row_and_field(tmp_path, raw, message):
    with pytest.raises(DataError, match=f"f.parquet: row 1, .*{message}") as error:
        write_rows(tmp_path / "f.parquet", [row(), raw], PreferenceRow)
    assert error.value.hint
    assert list(tmp_path.iterdir()) == []


def test_files(tmp_path):
    file = tmp_path / "f.parquet"
    called = [assistant("", tool_calls=[CALL]), {"role": "tool", "name": "add", "content": "4"}, GOOD]
    pairs = [Preference([user()], [GOOD], [BAD]), Preference([system(), user()], called, [BAD], [ADD])]
    assert write_rows(file, [preference_row(pair) for pair in pairs], PreferenceRow) == 2
    assert read_preferences(file) == pairs
    assert [typed.typed(i) for i, typed in enumerate(read_typed(file, PreferenceRow))] == pairs
    write_rows(tmp_path / "sft.parquet", [{"messages": [user(), GOOD]}])
    with pytest.raises(DataError, match="column 'chosen' is missing") as error:
        read_preferences(tmp_path / "sft.parquet")
    assert error.value.hint.startswith(
        "this looks like an SFT file; here a preference file is needed (chosen, rejected)"
    )


# ---------------------------------------------------------------------- to tokens


def config(file, method="dpo", **data):
    fixed = {"train": str(file), "val": str(file), "batch_size": 2, "shuffle": False}
    return Config.model_validate({"command": "prefer", "prefer": {"method": method}, "data": {**fixed, **data}})


def stream(file, *rows, **settings):
    write_rows(file, rows)
    return open_stream(Pairs(), config(file, **settings), TOKENIZER)


def texts(batch, masked):
    """The decoded sequences of a batch, or of each what carries loss."""
    bounds = itertools.pairwise(batch.cu_seqlens.tolist())
    kept = batch.loss_mask if masked else torch.ones_like(batch.loss_mask)
    return [TOKENIZER.decode(batch.input_ids[a:b][kept[a:b]]) for a, b in bounds]


def test_loss_is_on_the_answers_alone(tmp_path):
    before = [user("Hi"), assistant("Hello"), user()]
    batch = pack(stream(tmp_path / "f.parquet", row(), row(prompt=before)).next().samples)
    whole = [[user(), GOOD], [*before, GOOD], [user(), BAD], [*before, BAD]]  # the chosen ones come first
    assert texts(batch, False) == [TOKENIZER.decode(render_chat(chat, TOKENIZER).ids) for chat in whole]
    end = TOKENIZER.eos_token
    assert texts(batch, True) == [m["content"] + end for m in (GOOD, GOOD, BAD, BAD)]


def test_a_reward_model_reads_the_last_token(tmp_path):
    called = [assistant("", tool_calls=[CALL]), {"role": "tool", "name": "add", "content": "4"}, GOOD]
    rows = [row(), row(chosen=called, tools=[ADD])]
    batch = pack(stream(tmp_path / "f.parquet", *rows, method="reward_model").next().samples)
    assert batch.loss_mask.nonzero().flatten().tolist() == [n - 1 for n in batch.cu_seqlens[1:].tolist()]
    # Behind the conversation as a reward model is shown it: without tools.
    conversations = [[user(), GOOD], [user(), *called], [user(), BAD], [user(), BAD]]
    shown = [TOKENIZER.apply_chat_template(chat, tokenize=True, return_dict=False) for chat in conversations]
    bounds = itertools.pairwise(batch.cu_seqlens.tolist())
    assert [batch.input_ids[a : b - 1].tolist() for a, b in bounds] == shown


@pytest.mark.parametrize("stream_above", [0, 100])
def test_a_pair_is_left_out_with_either_side(tmp_path, stream_above):
    long = assistant("word " * 200)
    rows = [row(), row(chosen=[long]), row(rejected=[long]), row(rejected=[{**BAD, "train": False}])]
    settings = {"max_length": 64, "truncation": "drop", "stream_above": stream_above, "workers": 0}
    with stream(tmp_path / "f.parquet", *rows, **settings) as data:
        batch = data.next()
        assert [sample.row for sample in batch.samples] == [0, 0]
        assert (batch.counts.drawn, batch.counts.too_long, batch.counts.nothing_to_learn) == (5, 2, 1)
        state = data.state()
    with stream(tmp_path / "f.parquet", *rows, **settings) as again:
        again.restore(state)
        assert again.position == 5


def test_a_pair_that_differs_in_no_token_is_left_out(tmp_path):
    """After a cut, or where the template drops the thoughts in which they differ."""
    cut = row(chosen=[assistant("word " * 200 + "2")], rejected=[assistant("word " * 200 + "3")])
    thoughts = row(rejected=[{**GOOD, "reasoning_content": "why"}])
    settings = {"max_length": 64, "truncation": "right"}
    for method in ("dpo", "reward_model"):
        data = stream(tmp_path / "f.parquet", cut, row(), thoughts, method=method, **settings)
        assert [sample.row for sample in data.next().samples] == [1, 1]
        assert [r.nothing_to_learn for r in data.rendered] == [True, False, True]
        (_, note) = notes(Pairs(), "f", Counts.of(data.rendered), config("f", **settings))
        assert note == f"f: 2 of 3 pairs left out: {Pairs.nothing}"
        with pytest.raises(DataError, match="no pair with assistant tokens is left") as error:
            stream(tmp_path / "f.parquet", thoughts, method=method)
        assert "both answers have the same tokens" in error.value.hint


def test_rendering_is_the_same_in_another_process(tmp_path):
    render = Pairs().renderer(config(tmp_path, method="reward_model"), TOKENIZER)
    rows = [Row("f", 0, row())]
    (here,) = render(rows)  # what is known about the template cannot be sent, and is found out anew
    (there,) = pickle.loads(pickle.dumps(render))(rows)
    assert (there.ids.tolist(), there.mask.tolist(), there.second) == (
        here.ids.tolist(),
        here.mask.tolist(),
        here.second,
    )


def test_what_cannot_be_rendered_is_named(tmp_path):
    with pytest.raises(
        DataError, match=r"row 1, column 'rejected': the conversation has \d+ tokens, data.max_length is"
    ):
        stream(tmp_path / "f.parquet", row(), row(rejected=[assistant("word " * 200)]), max_length=64)
    with pytest.raises(DataError, match="row 0, column 'images': it has 1"):
        stream(tmp_path / "f.parquet", row(prompt=[user("<image>?")], images=[{"bytes": b"PNG"}]))
    write_rows(tmp_path / "v.parquet", [row(rejected=[{**BAD, "train": False}])])
    with pytest.raises(DataError, match="no pair with assistant tokens is left"):
        load_validation(Pairs(), config(tmp_path / "v.parquet"), TOKENIZER)


# ---------------------------------------------------------------------- prep


def prepared(tmp_path, *rows, name="raw.jsonl", **options):
    source = tmp_path / name
    if name.endswith(".parquet"):
        write_rows(source, rows)
    else:
        lines = [json.dumps(r) for r in rows]
        source.write_text("\n".join(lines) if name.endswith(".jsonl") else f"[{', '.join(lines)}]")
    prep.run("preferences", str(source), str(tmp_path / "out"), overwrite=True, **options)
    return read_preferences(tmp_path / "out" / "prefer_train.parquet")


QUESTION, BETTER, WORSE = "What is 2 + 2?", "It is 4.", "I do not know that."
LAYOUTS = [
    {"prompt": QUESTION, "chosen": BETTER, "rejected": WORSE},
    {"question": QUESTION, "chosen": BETTER, "rejected": WORSE, "score": 3},
    {"prompt": [user()], "chosen": [GOOD], "rejected": [BAD]},
    {"prompt": [user()], "chosen": BETTER, "rejected": [BAD]},
    {"prompt": QUESTION, "chosen": [user(), GOOD], "rejected": [user(), BAD], "messages": [user(), GOOD]},
    {"chosen": [user(), GOOD], "rejected": [user(), BAD]},
    {
        "conversations": [{"from": "human", "value": QUESTION}],
        "chosen": {"from": "gpt", "value": BETTER},
        "rejected": {"from": "gpt", "value": WORSE},
    },
]


@pytest.mark.parametrize("name", ["raw.jsonl", "raw.json", "raw.parquet"])
@pytest.mark.parametrize("raw", LAYOUTS)
def test_layouts_that_people_publish(tmp_path, raw, name):
    assert prepared(tmp_path, raw, name=name) == [Preference([user()], [GOOD], [BAD])]


@pytest.mark.parametrize("text", ["[1, 2, 3]", '["a"]', '[{"name": "Ann"}]', "[]"])
def test_text_that_is_a_json_list_of_no_messages_is_text(tmp_path, text):
    (pair,) = prepared(tmp_path, {"prompt": text, "chosen": f"{text} ", "rejected": WORSE})
    assert [m["content"] for m in (*pair.prompt, *pair.chosen)] == [text, f"{text} "]


def test_system_and_tools_of_a_row(tmp_path):
    (pair,) = prepared(
        tmp_path, {"system": "Be brief.", "prompt": QUESTION, "chosen": BETTER, "rejected": WORSE, "tools": [ADD]}
    )
    assert pair == Preference([system(), user()], [GOOD], [BAD], [ADD])
    known = read_card(tmp_path / "out" / "prefer_train.parquet.card.json")
    assert (known.kind, known.rows) == ("preference", 1)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"prompt": QUESTION, "chosen": BETTER, "rejected": ""}, "`rejected` is missing or empty"),
        ({"chosen": BETTER, "rejected": WORSE}, "there is no prompt"),
        ({"prompt": QUESTION, "chosen": BETTER, "rejected": BETTER}, "it is the same as `chosen`"),
        ({"prompt": QUESTION, "chosen": [{"content": "x"}], "rejected": WORSE}, "`chosen`"),
        ({"prompt": QUESTION, "chosen": BETTER, "rejected": WORSE, "tools": "no"}, "the tools cannot be read"),
    ],
)
def test_bad_raw_rows_are_refused(tmp_path, raw, message):
    good = {"prompt": QUESTION, "chosen": BETTER, "rejected": WORSE}
    with pytest.raises(DataError, match=rf"preferences train row 1 \(.*raw.jsonl, row 1\): {message}"):
        prepared(tmp_path, good, raw)
    assert not (tmp_path / "out").exists()


def test_options_of_prep(tmp_path):
    raw = [{"prompt": f"How old is {n}?", "chosen": BETTER, "rejected": WORSE} for n in range(40)]
    pairs = prepared(tmp_path, *raw, val_fraction=0.25, tools=["gsm8k"], tokenizer="builtin:tiny")
    val = read_preferences(tmp_path / "out" / "prefer_val.parquet")
    assert 0 < len(val) < len(pairs) < 40 == len(val) + len(pairs)
    assert pairs[0].tools[0]["function"]["name"] == "calc_gsm8k_reward"
    lengths = read_card(tmp_path / "out" / "prefer_train.parquet.card.json").lengths
    longest = max(len(render_chat([*p.prompt, *p.rejected], TOKENIZER, p.tools).ids) for p in pairs)
    assert lengths["longer one of a pair in the chat template, tokens"]["p100"] == longest
    file = str(tmp_path / "out" / "prefer_val.parquet")
    prep.run("preferences", str(tmp_path / "raw.jsonl"), str(tmp_path / "clean"), decontaminate=[file])
    assert len(read_preferences(tmp_path / "clean" / "prefer_train.parquet")) == len(pairs)


def test_generated_pairs(tmp_path):
    report = prep.run("arith-preferences", out=str(tmp_path), train_rows=20, test_rows=5)
    assert report.rows == {"prefer_train.parquet": 20, "prefer_test.parquet": 5}
    for pair in read_preferences(tmp_path / "prefer_train.parquet"):
        (whole, hasty) = (side[0]["content"].splitlines() for side in (pair.chosen, pair.rejected))
        assert hasty == whole[:-1]
        assert pair.chosen[-1]["content"] != pair.rejected[-1]["content"]
