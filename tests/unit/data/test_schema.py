"""Row schemas: what is refused and under which name, and which shapes of other frameworks read as they are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.core.errors import DataError
from posttrain.data.messages import normalize_messages
from posttrain.data.parquet import (
    append_columns,
    parse_prompt,
    read_conversations,
    read_prompts,
    read_typed,
    sft_row,
    write_rows,
)
from posttrain.data.schema import Conversation, RlhfRow, RowError, SftRow, parse_row, typed_messages

SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
Row = dict[str, Any]


def call(name: str = "search", identity: str | None = None, **arguments: Any) -> Row:
    named = {} if identity is None else {"id": identity}
    return {**named, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def user(text: Any = "hi") -> Row:
    return {"role": "user", "content": text}


def assistant(text: Any = "yes", *calls: Row) -> Row:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


def tool(text: str = "found", identity: str | None = None) -> Row:
    return {"role": "tool", "content": text, **({} if identity is None else {"tool_call_id": identity})}


def system() -> Row:
    return {"role": "system", "content": "be brief"}


def sft(*messages: Row, **columns: Any) -> Row:
    return {"messages": list(messages), "tools": json.dumps([SEARCH]), **columns}


def rlhf(*messages: Row, **columns: Any) -> Row:
    return {"data_source": "d", "prompt": list(messages), "reward_model": {"ground_truth": "1"}, **columns}


GOOD = [
    sft(user(), assistant()),
    sft(system(), user(), assistant("", call()), tool(), assistant()),
    sft(user(), user(), assistant(None, call(), call()), tool(), tool(), assistant(), user(), assistant()),
    sft(
        user(),
        assistant("", call(identity="a"), call(identity="b")),
        tool(identity="b"),
        tool(identity="a"),
        assistant(),
    ),
    sft(user(), assistant("", call())),
    sft(user(), assistant("", call()), user("never mind"), assistant()),
    sft(user(), assistant('<tool_call>\n{"name": "f"}\n</tool_call>'), tool(), tool(), assistant()),
]


@pytest.mark.parametrize("row", GOOD)
def test_a_good_conversation_is_accepted_and_comes_back(row: Row, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "c.parquet"
    assert write_rows(path, [row], SftRow) == 1
    (conversation,) = read_conversations(path)
    assert [m["role"] for m in conversation.messages] == [m["role"] for m in row["messages"]]
    assert write_rows(path, [sft_row(conversation)], SftRow) == 1
    assert read_conversations(path) == [conversation]


BAD_SFT = [
    (sft(assistant()), "'messages': no user message"),
    (sft(user()), "'messages': no assistant message"),
    (sft(), "'messages': no user message"),
    (sft(assistant(), user()), "'messages.0.role': roles out of order: an assistant message starts"),
    (sft(system(), assistant(), user()), "'messages.1.role': roles out of order"),
    (sft(user(), system(), assistant()), "'messages.1.role': roles out of order: a system message follows the user"),
    (sft(user(), assistant(), assistant()), "'messages.2.role': roles out of order"),
    (sft(user(), assistant("", call("serch"))), "'messages.1.tool_calls.0.function.name': a call of 'serch'"),
    (sft(user(), assistant("", call()), tools=None), "'messages.1.tool_calls.0.function.name': a call of 'search'"),
    (sft(user(), {**user(), "tool_calls": [call()]}, assistant()), "'messages.1.tool_calls': a user message calls"),
    (sft(tool(), user(), assistant()), "'messages.0': a tool result without a call"),
    (sft(user(), tool(), assistant()), "'messages.1': a tool result without a call"),
    (sft(user(), assistant(), tool()), "'messages.2': a tool result without a call"),
    (sft(user(), assistant("", call()), tool(), tool()), "'messages.3': a tool result without a call"),
    (
        sft(user(), assistant("", call(identity="a")), tool(identity="b")),
        "'messages.2.tool_call_id': a tool result without a call: no open call has the id 'b'",
    ),
    (sft({"role": "robot", "content": "x"}, assistant()), "'messages.0.role'"),
    (sft({"content": "x"}, assistant()), "'messages.0.role'"),
    (sft(user(5), assistant()), "'messages.0.content'"),
    (sft(user({"a": 1}), assistant()), "'messages.0.content'"),
    (sft(user([{"type": "text"}]), assistant()), "'messages.0.content': a part of type 'text' has no text"),
    (sft(user([{"type": "smell", "text": "x"}]), assistant()), "'messages.0.content': a part of the content has type"),
    (sft(user(), assistant("", {"function": {"arguments": "{}"}})), "'messages.1.tool_calls.0.function.name'"),
    (sft(user(), assistant("", call() | {"function": {"name": "search", "arguments": "{x}"}})), "function.arguments'"),
    (sft(user(), assistant("", call() | {"function": {"name": "search", "arguments": "[1]"}})), "function.arguments'"),
    (sft(user(), {**assistant(), "train": "perhaps"}), "'messages.1.train'"),
    (sft(user(), assistant(), tools='[{"type": "function", "function": {}}]'), "'tools.0.function.name'"),
    (sft(user(), assistant(), tools='[{"type": "function"}]'), "'tools': tool 0 "),
    (sft(user(), assistant(), tools="not json"), "'tools'"),
    (sft(user(), assistant(), tools=7), "'tools'"),
    ({"messages": "a text", "tools": None}, "'messages'"),
    ({"tools": None}, "'messages': Field required"),
    (sft(user("<image>"), assistant()), "'messages.0.content': the text says <image> 1 times"),
    (sft(user("<image> <image>"), assistant(), images=[b"x"]), "'messages.0.content': the text says <image> 2 times"),
    (sft(user(), assistant(), images=[b"x"]), "'images': 1 images, and the text says <image> 0 times"),
    (sft(user("<image>"), assistant(), images=[{"bytes": None, "path": None}]), "'images.0.bytes'"),
]


@pytest.mark.parametrize(("row", "message"), BAD_SFT)
def test_a_bad_sft_row_is_named_on_write_and_nothing_is_written(row: Row, message: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "c.parquet"
    with pytest.raises(DataError) as error:
        write_rows(path, [GOOD[0], row], SftRow)
    assert f"{path}: row 1, column " in error.value.message
    assert message in error.value.message
    assert error.value.hint
    assert list(tmp_path.iterdir()) == []


BAD_RLHF = [
    (rlhf(system()), "'prompt': no user message"),
    (rlhf(user(), assistant()), "'prompt.1.role': roles out of order: the prompt ends with an assistant message"),
    (rlhf(user(), assistant("", call("other")), tool(), tools=[SEARCH]), "'prompt.1.tool_calls.0.function.name'"),
    (rlhf(user("<image>")), "'prompt.0.content': the text says <image>"),
    (rlhf(user(), data_source=None), "'data_source'"),
    (rlhf(user(), reward_model={"style": "rule"}), "'reward_model.ground_truth'"),
    (rlhf(user(), reward_model=None), "'reward_model'"),
    (rlhf(user(), reward_model="not json"), "'reward_model'"),
    (rlhf(user(), extra_info={"tools_kwargs": [1]}), "'extra_info.tools_kwargs'"),
    (rlhf(user(), extra_info={"tools_kwargs": "not json"}), "'extra_info.tools_kwargs'"),
    (rlhf(user(), ability=5), "'ability'"),
]


@pytest.mark.parametrize(("row", "message"), BAD_RLHF)
def test_a_bad_rlhf_row_is_named(row: Row, message: str) -> None:
    with pytest.raises(DataError) as error:
        parse_prompt(row, "p.parquet", 7)
    assert error.value.message.startswith(f"p.parquet: row 7, column {message}")
    assert error.value.hint


def test_the_nearest_tool_is_named() -> None:
    with pytest.raises(DataError) as error:
        write_rows("x.parquet", [sft(user(), assistant("", call("serch")))], SftRow)
    assert error.value.hint == "did you mean 'search'?"


# ---------------------------------------------------------------------- shapes of others


def test_weights_of_messages_are_openai_s_name_of_train() -> None:
    messages = [user(), {**assistant(), "weight": 0}, user(), {**assistant(), "weight": 1.0}, user(), assistant()]
    given = typed_messages(parse_row(SftRow, sft(*messages)).messages, "messages")
    assert [message.get("train") for message in given[1::2]] == [False, True, None]
    both = parse_row(SftRow, sft(user(), {**assistant(), "weight": 0, "train": True})).messages
    assert typed_messages(both, "messages")[1]["train"] is True
    with pytest.raises(RowError, match=r"messages\.1\.weight"):
        parse_row(SftRow, sft(user(), {**assistant(), "weight": 0.5}))


def test_typed_content_lists() -> None:
    parts = [
        {"type": "text", "text": "Is ", "image": None},
        {"type": "image", "text": None},
        {"type": "text", "text": "red?"},
    ]
    prompt = parse_prompt(rlhf(user(parts), images=[b"png"]), "p", 0)
    assert prompt.messages == [{"role": "user", "content": "Is <image>red?"}]
    thought = [{"type": "reasoning", "value": "hm"}, {"type": "text", "value": "yes"}]
    row = sft(user(np.array([{"type": "text", "text": "so"}], dtype=object)), assistant(thought))
    (message,) = parse_row(SftRow, row).typed(0).messages[1:]
    assert message == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


def test_verls_parquet_as_it_is(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Nulls for absent keys, numpy arrays, structs as JSON text, a ground truth that is itself JSON text."""
    path = tmp_path / "v.parquet"
    messages = np.array([{"role": "user", "content": "1+1?", "name": None, "tool_calls": None}], dtype=object)
    tests = json.dumps({"inputs": ["1"], "outputs": ["2"]})
    rows = [
        {
            "data_source": "codecontests",
            "prompt": messages,
            "ability": "code",
            "reward_model": {"style": "rule", "ground_truth": tests},
            "extra_info": {"index": 3, "tools_kwargs": {"search": {"create_kwargs": {"seed": 1}}, "run": None}},
            "difficulty": 2,
        }
    ]
    pd.DataFrame(rows).to_parquet(path)
    (prompt,) = read_prompts(path)
    assert prompt.messages == [{"role": "user", "content": "1+1?"}]
    assert prompt.ground_truth == tests
    assert prompt.extra_info == {"index": 3, "tools_kwargs": {"search": {"create_kwargs": {"seed": 1}}}}
    texts = {key: json.dumps(rows[0][key]) for key in ("reward_model", "extra_info")}
    pd.DataFrame([rows[0] | texts | {"prompt": json.dumps(list(messages))}]).to_parquet(path)
    assert read_prompts(path) == [prompt]


def test_logic_rl_parquet_as_it_is(test_data) -> None:  # type: ignore[no-untyped-def]
    path = test_data / "kk" / "3ppl_test.parquet"
    prompts = read_prompts(path)
    assert len(prompts) == 100
    assert set(prompts[0].ground_truth) == {"solution_text_format", "statements"}
    (row,) = read_typed(path, RlhfRow, limit=1)
    assert {"quiz", "names", "solution", "statements"} <= set(row.model_extra or {})


@pytest.mark.parametrize(
    "columns",
    [
        {"extra_info": {"tools_kwargs": {"search": {"create_kwargs": {"a": 1}}}}},
        {"extra_info": {"tools_kwargs": json.dumps({"search": {"create_kwargs": {"a": 1}}})}},
        {"tools_kwargs": {"search": {"create_kwargs": {"a": 1}}}, "extra_info": None},
        {"tools_kwargs": json.dumps({"search": {"create_kwargs": {"a": 1}}})},
    ],
)
def test_every_style_of_tools_kwargs_is_one_to_the_reader(columns: Row) -> None:
    assert parse_prompt(rlhf(user(), **columns), "p", 0).tools_kwargs == {"search": {"create_kwargs": {"a": 1}}}


@pytest.mark.parametrize(
    "tools",
    [[SEARCH], json.dumps([SEARCH]), [json.dumps(SEARCH)], [SEARCH["function"]], np.array([SEARCH], dtype=object)],
)
def test_every_style_of_tools_is_one_to_the_reader(tools: Any) -> None:
    assert parse_row(SftRow, sft(user(), assistant(), tools=tools)).typed(0).tools == [SEARCH]
    prompt = parse_prompt(rlhf(user(), tools=tools), "p", 0)
    assert prompt.extra_info == {"tools": [SEARCH], "tools_kwargs": {"search": {}}}


def test_tools_with_more_than_we_know_stay_as_they_are() -> None:
    schema = {"function": {"strict": True, "parameters": {"type": "dict"}, "name": "f"}, "type": "function", "v": 1}
    (known,) = parse_row(SftRow, sft(user(), assistant(), tools=[schema])).typed(0).tools
    assert json.dumps(known) == json.dumps(schema)


def test_a_null_that_someone_wrote_stays_and_one_of_parquet_goes() -> None:
    schema = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"default": None}}}}}
    assert parse_row(SftRow, sft(user(), assistant(), tools=json.dumps([schema]))).tools == [schema]
    (filled,) = parse_row(SftRow, sft(user(), assistant(), tools=[schema])).tools or []
    assert filled["function"]["parameters"] == {"properties": {"x": {}}}


@pytest.mark.parametrize("column", [list, json.dumps])
def test_a_user_message_whose_text_has_another_name_is_refused(column: Any) -> None:
    """As in files that mix OpenAI's style and ShareGPT's: all of its messages were empty."""
    talk = [{"role": "user", "value": "1+1?"}, {"role": "assistant", "value": "2"}]
    with pytest.raises(RowError, match=r"'messages\.0\.content': a user message without it") as error:
        parse_row(SftRow, {"messages": column(talk)}).typed(0)
    assert "`value`" in error.value.hint
    with pytest.raises(DataError, match="message 0: a user message without `content`"):
        normalize_messages(talk)
    assert parse_row(SftRow, {"messages": column([user(None), assistant()])}).typed(0).messages[0]["content"] == ""


@pytest.mark.parametrize("content", ["Yes.", [{"type": "text", "text": "Yes."}]])
def test_a_null_argument_that_someone_wrote_stays(content: Any) -> None:
    def arguments(given: Any, column: Any = None) -> Any:
        message = assistant(content, {"function": {"name": "search", "arguments": given}})
        row = sft(user(), message)
        conversation = parse_row(SftRow, {**row, "messages": column(row["messages"])} if column else row).typed(0)
        return conversation.messages[1]["tool_calls"][0]["function"]["arguments"]

    null = {"query": None, "options": {"limit": None}}
    assert arguments(json.dumps(null)) == null
    assert arguments(null, column=json.dumps) == null
    assert arguments(null) == {"options": {}}


def test_images_survive_and_need_no_bytes(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "i.parquet"
    row = sft(user("<image> or <image>?"), assistant(), images=[{"bytes": b"\x89PNG"}, {"path": "b.png"}])
    write_rows(path, [row], SftRow)
    (conversation,) = read_conversations(path)
    assert conversation.images == [{"bytes": b"\x89PNG"}, {"path": "b.png"}]
    assert sft_row(conversation)["images"] == conversation.images


# ---------------------------------------------------------------------- files


def test_columns_that_nobody_knows_are_kept(tmp_path) -> None:  # type: ignore[no-untyped-def]
    source, target = tmp_path / "s.parquet", tmp_path / "t.parquet"
    write_rows(source, [rlhf(user(), mine={"deep": [i, None]}, other=f"{i}") for i in range(3)], RlhfRow)
    assert [row.model_extra for row in read_typed(source, RlhfRow)] == [
        {"mine": {"deep": [i, None]}, "other": f"{i}"} for i in range(3)
    ]
    schema = pa.schema([("responses", pa.list_(pa.string()))])
    append_columns(source, target, 2, lambda *_: pa.table({"responses": [["a"], ["b"]]}, schema=schema), schema)
    assert [(row.model_extra or {})["responses"] for row in read_typed(target, RlhfRow)] == [["a"], ["b"]]
    assert [(row.model_extra or {})["other"] for row in read_typed(target, RlhfRow)] == ["0", "1"]


def test_a_row_that_cannot_be_read_is_named_wherever_it_stands(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "c.parquet"
    rows = [sft(user(), assistant()) for _ in range(2000)]
    pq.write_table(pa.Table.from_pylist([*rows, sft(user(), assistant(), assistant())]), path)
    for read in (read_conversations, lambda path: list(read_typed(path, SftRow))):
        with pytest.raises(DataError, match=r"row 2000, column 'messages\.2\.role'"):
            read(path)


def test_a_message_of_ten_megabytes(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "c.parquet"
    text = "0123456789" * (1 << 20)
    write_rows(path, [sft(user(text), assistant())] * 2, SftRow)
    conversations = read_conversations(path)
    assert [len(c.messages[0]["content"]) for c in conversations] == [len(text)] * 2


def test_numbers_that_parquet_cannot_hold(tmp_path: Path) -> None:
    for value in (2**64, {"nested": [-(2**70)]}):
        with pytest.raises(DataError, match=r"column 'extra_info' cannot be written: .*too large"):
            write_rows(tmp_path / "c.parquet", [{"extra_info": value}])


def test_text_that_utf8_cannot_hold(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DataError, match="column 'messages' cannot be written"):
        write_rows(tmp_path / "c.parquet", [sft(user("half \ud83d"), assistant())], SftRow)
    table = pa.table({"messages": pa.array([[{"role": "user", "content": b"\xff\xfe"}]])})
    fields = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    pq.write_table(table, tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"row 0, column 'messages\.0\.content'"):
        read_conversations(tmp_path / "b.parquet")
    bad = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.array([0, 2], pa.int32()).buffers()[1], pa.py_buffer(b"\xff\xfe")]
    )
    struct = pa.StructArray.from_arrays([pa.array(["user"]), bad], names=["role", "content"])
    messages = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), struct)
    pq.write_table(pa.table({"messages": messages.cast(fields)}), tmp_path / "u.parquet")
    with pytest.raises(DataError, match="unreadable after row 0"):
        read_conversations(tmp_path / "u.parquet")


def test_row_groups_are_small_enough_to_stream(tmp_path) -> None:  # type: ignore[no-untyped-def]
    many, heavy = tmp_path / "many.parquet", tmp_path / "heavy.parquet"
    write_rows(many, ({"a": i} for i in range(20_000)))
    write_rows(heavy, ({"a": b"x" * (1 << 20)} for _ in range(80)))
    assert pq.ParquetFile(many).metadata.num_row_groups == 3
    assert pq.ParquetFile(heavy).metadata.num_row_groups == 3


def test_rows_share_the_schemas_that_they_share(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "c.parquet"
    conversation = Conversation([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], [SEARCH])
    write_rows(path, [sft_row(conversation)] * 3, SftRow)
    first, _, last = read_conversations(path)
    assert first.tools[0]["function"] is last.tools[0]["function"]
    assert first.tools is not last.tools


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_are_read_by_each_of_their_names(name: str) -> None:
    row = sft(user(), {**assistant(), name: "why"})
    assert parse_row(SftRow, row).typed(0).messages[1]["reasoning_content"] == "why"
