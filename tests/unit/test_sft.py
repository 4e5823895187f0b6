"""Which conversations of a file are trained on, and what is said of the others."""

from pathlib import Path

import pytest

from posttrain.config import Config
from posttrain.data.parquet import Conversation, sft_row, write_rows
from posttrain.errors import DataError
from posttrain.models.builtin import builtin_tokenizer
from posttrain.sft import LoadedChats, load_chats
from posttrain.types import Message

TOKENIZER = builtin_tokenizer("builtin:tiny")


def chat(answer: str, question: str = "Hi", train: bool = True) -> Conversation:
    reply: Message = {"role": "assistant", "content": answer}
    return Conversation([{"role": "user", "content": question}, reply if train else {**reply, "train": False}])


def load(file: Path, *chats: Conversation, **data: object) -> LoadedChats:
    write_rows(file, map(sft_row, chats))
    return load_chats(str(file), TOKENIZER, Config.model_validate({"command": "sft", "data": data}))


def test_what_is_left_out_is_counted_and_said(tmp_path: Path) -> None:
    file = tmp_path / "c.parquet"
    silent = chat("nothing to learn", train=False)
    loaded = load(file, chat("yes"), silent, chat("word " * 300), silent, max_length=64, truncation="drop")
    assert (len(loaded.chats), loaded.too_long, loaded.nothing_to_learn) == (1, 1, 2)
    assert list(loaded.notes()) == [
        f"{file}: 1 conversations are longer than data.max_length (truncation = drop)",
        f"{file}: 2 conversations left out: no assistant token to train on",
    ]
    assert list(load(file, chat("yes")).notes()) == []


def test_a_cut_that_leaves_only_the_question_counts_as_both(tmp_path: Path) -> None:
    long_question = chat("yes", question="word " * 300)
    loaded = load(tmp_path / "c.parquet", long_question, chat("yes"), max_length=64, truncation="right")
    assert (len(loaded.chats), loaded.too_long, loaded.nothing_to_learn) == (1, 1, 1)
    kept = load(tmp_path / "c.parquet", long_question, max_length=64, truncation="left")
    assert (len(kept.chats), kept.too_long, kept.nothing_to_learn) == (1, 1, 0)
    assert len(kept.chats[0].ids) == 64


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"c\.parquet: no conversation with assistant tokens is left"):
        load(tmp_path / "c.parquet", chat("no", train=False))


def test_a_conversation_that_cannot_be_rendered_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = "{% if 'bad' in messages[0]['content'] %}{{ raise_exception('I do not like it') }}{% endif %}"
    monkeypatch.setattr(TOKENIZER, "chat_template", refusing + str(TOKENIZER.chat_template))
    with pytest.raises(DataError, match=r"c\.parquet, conversation 1: the chat template refuses .*do not like it"):
        load(tmp_path / "c.parquet", chat("yes"), chat("yes", question="bad"))
