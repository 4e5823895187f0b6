"""Which conversations of a file are trained on, and what is said of the others."""

from pathlib import Path

import pytest

from posttrain.config import Config
from posttrain.config.presets import resolve
from posttrain.core.errors import DataError
from posttrain.core.types import Message
from posttrain.data.parquet import Conversation, sft_row, write_rows
from posttrain.data.stream import Counts, SampleStream
from posttrain.models.builtin import builtin_tokenizer
from posttrain.models.export import save_whole
from posttrain.models.load import locate
from posttrain.sft.command import Conversations
from posttrain.sft.job import prepare
from posttrain.sft.samples import describe, load_validation, notes, open_stream

TOKENIZER = builtin_tokenizer("builtin:tiny")
SFT = Conversations()


def chat(answer: str, question: str = "Hi", train: bool = True) -> Conversation:
    reply: Message = {"role": "assistant", "content": answer}
    return Conversation([{"role": "user", "content": question}, reply if train else {**reply, "train": False}])


def config(**data: object) -> Config:
    return Config.model_validate({"command": "sft", "data": data})


def load(file: Path, *chats: Conversation, **data: object) -> SampleStream:
    write_rows(file, map(sft_row, chats))
    return open_stream(SFT, config(train=str(file), **{"batch_size": 1, **data}), TOKENIZER)


def said(stream: SampleStream) -> list[str]:
    assert stream.rendered is not None
    cfg = config(truncation=stream.cfg.truncation, max_length=stream.cfg.max_length)
    return list(notes(SFT, stream.shards.name, Counts.of(stream.rendered), cfg))


def test_what_is_left_out_is_counted_and_said(tmp_path: Path) -> None:
    file = tmp_path / "c.parquet"
    silent = chat("nothing to learn", train=False)
    stream = load(file, chat("yes"), silent, chat("word " * 300), silent, max_length=64, truncation="drop")
    assert stream.usable_rows == 1
    assert said(stream) == [
        f"{file}: 1 of 4 conversations are longer than data.max_length = 64 tokens, the longest has 912 "
        "(data.truncation = drop)",
        f"{file}: 2 of 4 conversations left out: no assistant token to train on",
    ]
    assert said(load(file, chat("yes"))) == []


def test_a_conversation_with_images_is_refused(tmp_path: Path) -> None:
    shown = chat("A cat.", "<image> What is it?")
    shown.images.append({"bytes": b"PNG"})
    with pytest.raises(DataError, match="row 1, column 'images': it has 1"):
        load(tmp_path / "c.parquet", chat("yes"), shown)


def test_what_is_left_out_is_counted_as_it_is_met(tmp_path: Path) -> None:
    silent = chat("nothing to learn", train=False)
    chats = [chat("yes"), silent, chat("word " * 300), chat("no")]
    for stream_above in (0, 100):
        data = {"max_length": 64, "truncation": "drop", "shuffle": False, "workers": 0, "stream_above": stream_above}
        with load(tmp_path / "c.parquet", *chats, **data) as stream:
            batches = [stream.next() for _ in range(3)]
            assert [sample.row for batch in batches for sample in batch.samples] == [0, 3, 0]
            assert [batch.counts for batch in batches] == [
                Counts(1),
                Counts(4, 1, 1, longest=912),
                Counts(5, 1, 1, longest=912),
            ]
            counts = {"drawn": 5, "too_long": 1, "nothing_to_learn": 1, "straddling": 0, "longest": 912}
            assert stream.state()["counts"] == counts


@pytest.mark.slow
def test_processes_render_as_the_driver_does(tmp_path: Path) -> None:
    """With the tokenizer as it is here, its template changed."""
    tokenizer = builtin_tokenizer("builtin:tiny")
    tokenizer.chat_template = str(tokenizer.chat_template).replace("message.role + '\\n'", "message.role + '!\\n'")
    chats = [chat(f"word {n} " * (n % 9), question=f"What is {n}?", train=n % 5 != 0) for n in range(300)]
    write_rows(tmp_path / "c.parquet", map(sft_row, chats))
    seen = []
    for workers in (0, 2):
        cfg = config(train=str(tmp_path), batch_size=16, stream_above=0, shuffle_rows=100, workers=workers)
        with open_stream(SFT, cfg, tokenizer) as stream:
            batches = [stream.next() for _ in range(40)]
        seen.append([(s.row, s.ids.tolist(), s.mask.tolist()) for batch in batches for s in batch.samples])
        assert stream.counts.nothing_to_learn > 100
    assert seen[0] == seen[1]
    assert "user!" in tokenizer.decode(seen[0][0][1])


def test_a_cut_that_leaves_only_the_question_counts_as_both(tmp_path: Path) -> None:
    long_question = chat("yes", question="word " * 300)
    stream = load(tmp_path / "c.parquet", long_question, chat("yes"), max_length=64, truncation="right")
    assert stream.usable_rows == 1
    assert Counts.of(stream.rendered or []) == Counts(drawn=2, too_long=1, nothing_to_learn=1, longest=912)
    kept = load(tmp_path / "c.parquet", long_question, max_length=64, truncation="left")
    assert Counts.of(kept.rendered or []) == Counts(drawn=1, too_long=1, nothing_to_learn=0, longest=912)
    assert len(kept.next().samples[0].ids) == 64


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    silent = chat("no", train=False)
    with pytest.raises(DataError, match=r"c\.parquet: no conversation with assistant tokens is left"):
        load(tmp_path / "c.parquet", silent)
    with pytest.raises(DataError, match=r"c\.parquet: no conversation with assistant tokens is left"):
        load_validation(SFT, config(val=str(tmp_path / "c.parquet")), TOKENIZER)
    # Of data that is streamed this is known when all of it was seen.
    with load(tmp_path / "c.parquet", silent, silent, stream_above=0, workers=0) as stream:
        for _ in range(2):
            with pytest.raises(DataError, match=r"c\.parquet: no conversation with assistant tokens is left"):
                stream.next()


def test_what_is_said_of_nothing_left_is_why(tmp_path: Path) -> None:
    silent, long = chat("no", train=False), chat("word " * 300)
    for chats, says, says_not in (
        ([silent], '"train": false', "data.max_length"),
        ([long], "data.max_length", "train"),
        ([silent, long], 'data.max_length; in the rows that are not longer, all assistant messages have "train"', "?"),
    ):
        file = tmp_path / "c.parquet"
        with pytest.raises(DataError) as caught:
            load(file, *chats, max_length=64, truncation="drop")
        with pytest.raises(DataError) as in_validation:
            load_validation(SFT, config(val=str(file), max_length=64, truncation="drop"), TOKENIZER)
        assert caught.value.hint == in_validation.value.hint
        assert says in str(caught.value.hint)
        assert says_not not in str(caught.value.hint)


def test_too_long_names_the_row(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"c\.parquet: row 1: the conversation has \d+ tokens, data.max_length is 64"):
        load(tmp_path / "c.parquet", chat("yes"), chat("word " * 300), max_length=64)


def test_a_conversation_that_cannot_be_rendered_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = "{% if 'bad' in messages[0]['content'] %}{{ raise_exception('I do not like it') }}{% endif %}"
    monkeypatch.setattr(TOKENIZER, "chat_template", refusing + str(TOKENIZER.chat_template))
    with pytest.raises(DataError, match=r"c\.parquet: row 1: the chat template refuses .*do not like it"):
        load(tmp_path / "c.parquet", chat("yes"), chat("yes", question="bad"))


def test_the_validation_set_is_loaded_whole(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_rows(tmp_path / f"{name}.parquet", [sft_row(chat(name * n)) for n in range(1, 4)])
    rows = load_validation(SFT, config(val=str(tmp_path), stream_above=0), TOKENIZER)
    assert len(rows) == 6
    assert not any(row.left_out for row in rows)


def test_how_much_there_is(tmp_path: Path) -> None:
    many = [chat("yes")] * 12
    assert describe(SFT, load(tmp_path / "c.parquet", *many)).startswith("12 conversations, ")
    assert describe(SFT, load(tmp_path / "c.parquet", *many, stream_above=5)) == "12 conversations streamed from 1 file"


@pytest.mark.parametrize("endless", [False, True])
def test_a_template_that_teaches_no_end_is_said(tmp_path: Path, endless: bool) -> None:
    """In GLM's the header of the next turn ends a turn, and a conversation ends without one."""
    save_whole(locate("builtin:tiny"), tmp_path / "model")
    if endless:
        tokenizer = builtin_tokenizer("builtin:tiny")
        tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
        tokenizer.save_pretrained(tmp_path / "model")
    write_rows(tmp_path / "c.parquet", [sft_row(chat("yes"))])
    flags = {"model.path": str(tmp_path / "model"), "data.train": str(tmp_path / "c.parquet"), "data.batch_size": 1}
    said = list(prepare(resolve("sft", "tiny-arith-sft", flags=flags), objective=SFT).notes())
    assert any("nothing teaches the model to stop" in note for note in said) == endless
