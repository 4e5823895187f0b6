import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.core.errors import ConfigError, DataError
from posttrain.data.parquet import (
    Conversation,
    append_columns,
    read_conversations,
    read_prompts,
    read_rows,
    sft_row,
    write_rows,
)

SCHEMA = {
    "type": "function",
    "function": {"name": "run", "parameters": {"type": "object", "properties": {"code": {"type": "string"}}}},
}


def rlhf(**changes):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 0, "tools_kwargs": {"run": {"create_kwargs": {"seed": 3}}}},
    }
    return row | changes


def conversation(arguments):
    call = {"type": "function", "function": {"name": "run", "arguments": arguments}}
    return Conversation(
        [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "ok", "tool_calls": [call]},
            {"role": "tool", "name": "run", "content": "done"},
            {"role": "assistant", "content": "fine", "train": False},
        ],
        [SCHEMA],
    )


def test_prompts_survive_a_round_trip(tmp_path):
    path = tmp_path / "p.parquet"
    other = rlhf(extra_info={"index": 1, "tools_kwargs": {"look": {"create_kwargs": {"deep": {"a": [1, 2]}}}}})
    assert write_rows(path, [rlhf(), other, rlhf(extra_info={"index": 2, "tools_kwargs": {}})]) == 3
    prompts = read_prompts(path)
    assert [p.index for p in prompts] == [0, 1, 2]
    assert prompts[0].messages == [{"role": "user", "content": "1+1?"}]
    assert prompts[0].ground_truth == "2"
    # Parquet fills missing struct fields with nulls; they must not come back as tools.
    assert prompts[0].tools_kwargs == {"run": {"create_kwargs": {"seed": 3}}}
    assert prompts[1].tools_kwargs == {"look": {"create_kwargs": {"deep": {"a": [1, 2]}}}}
    assert prompts[2].tools_kwargs == {}
    assert [p.index for p in read_prompts(path, limit=2)] == [0, 1]


def test_conversations_survive_a_round_trip(tmp_path):
    path = tmp_path / "c.parquet"
    # Arguments with other keys in each row, and one key with two types, have no common struct.
    written = [conversation({"code": "1"}), conversation({"code": 2, "deep": {"x": [None]}}), conversation({})]
    write_rows(path, map(sft_row, written))
    assert read_conversations(path) == written


def test_arguments_and_tools_as_structs_and_numpy_arrays_from_pandas(tmp_path):
    path = tmp_path / "c.parquet"
    messages = np.array(conversation({"code": "1"}).messages, dtype=object)
    pd.DataFrame({"messages": [messages], "tools": [np.array([SCHEMA], dtype=object)], "note": ["x"]}).to_parquet(path)
    assert read_conversations(path) == [conversation({"code": "1"})]


def test_prompts_from_pandas(tmp_path):
    path = tmp_path / "p.parquet"
    row = rlhf(reward_model={"style": "rule", "ground_truth": np.array(["2", "two"])})
    pd.DataFrame([row]).to_parquet(path)
    assert read_prompts(path)[0].ground_truth == ["2", "two"]


def test_tools_as_a_list_of_json_texts(tmp_path):
    path = tmp_path / "c.parquet"
    write_rows(path, [sft_row(conversation({})) | {"tools": [json.dumps(SCHEMA)]}])
    assert read_conversations(path)[0].tools == [SCHEMA]


def test_datasets_style_large_lists_and_row_groups(tmp_path):
    path = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_pylist([rlhf() for _ in range(10)]), path, row_group_size=3)
    assert [p.index for p in read_prompts(path)] == list(range(10))
    assert [p.index for p in read_prompts(path, limit=4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (rlhf(prompt=[{"role": "robot", "content": "x"}]), ["row 0", "'prompt.0.role'", "robot"]),
        (rlhf(prompt=[{"role": "user", "content": 5}]), ["row 0", "'prompt.0.content'"]),
        (rlhf(prompt=[{"role": "system", "content": "x"}]), ["row 0", "'prompt'", "no user message"]),
        (rlhf(prompt=[]), ["row 0", "'prompt'", "no user message"]),
        (rlhf(prompt="1+1?"), ["row 0", "'prompt'"]),
        (rlhf(data_source=None), ["row 0", "'data_source'"]),
        (rlhf(reward_model={"style": "rule", "ground_truth": "2"}, extra_info=[1]), ["row 0", "'extra_info'"]),
    ],
)
def test_bad_rlhf_rows_are_named(tmp_path, row, words):
    path = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    with pytest.raises(DataError) as error:
        read_prompts(path)
    for word in [str(path), *words]:
        assert word in str(error.value)
    assert error.value.hint


def test_the_row_number_counts_from_the_start_of_the_file_and_rows_beyond_the_limit_are_not_read(tmp_path):
    path = tmp_path / "p.parquet"
    write_rows(path, [*(rlhf() for _ in range(5000)), rlhf(prompt=[])])
    with pytest.raises(DataError, match="row 5000, column 'prompt'"):
        read_prompts(path)
    assert len(read_prompts(path, limit=5000)) == 5000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, ["row 0", "'messages'", "no assistant message"]),
        ({"tools": "{not json"}, ["row 0", "'tools'"]),
        ({"tools": "[1]"}, ["row 0", "'tools'", "tool 0 "]),
    ],
)
def test_bad_sft_rows_are_named(tmp_path, changes, words):
    path = tmp_path / "c.parquet"
    write_rows(path, [sft_row(conversation({})) | changes])
    with pytest.raises(DataError) as error:
        read_conversations(path)
    for word in [str(path), *words]:
        assert word in str(error.value)


def test_arguments_that_are_not_json_are_named(tmp_path):
    path = tmp_path / "c.parquet"
    row = sft_row(conversation({}))
    row["messages"][1]["tool_calls"][0]["function"]["arguments"] = "{code}"
    write_rows(path, [row])
    with pytest.raises(DataError, match=r"messages\.1\.tool_calls\.0\.function\.arguments"):
        read_conversations(path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_prompts(tmp_path / "none.parquet")
    with pytest.raises(DataError, match="not a file"):
        read_prompts(tmp_path)
    whole = tmp_path / "p.parquet"
    write_rows(whole, [rlhf() for _ in range(2000)])
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(DataError, match="not a readable parquet file") as error:
        read_prompts(cut)
    assert "truncated" in (error.value.hint or "")
    # The footer is whole and a data page is not.
    damaged = bytearray(whole.read_bytes())
    damaged[4:60] = b"\xff" * 56
    cut.write_bytes(damaged)
    with pytest.raises(DataError, match="unreadable after row"):
        read_prompts(cut)


def test_empty_file_and_missing_columns(tmp_path):
    path = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_pylist([rlhf()]).slice(0, 0), path)
    with pytest.raises(DataError, match="has no rows"):
        read_prompts(path)
    row = rlhf()
    row["promt"] = row.pop("prompt")
    pq.write_table(pa.Table.from_pylist([row]), path)
    with pytest.raises(DataError, match="column 'prompt' is missing") as error:
        read_prompts(path)
    assert "promt" in (error.value.hint or "")


def test_the_other_kind_of_file_is_recognised(tmp_path):
    write_rows(tmp_path / "sft.parquet", [sft_row(conversation({}))])
    with pytest.raises(DataError) as error:
        read_prompts(tmp_path / "sft.parquet")
    assert "SFT file" in (error.value.hint or "")
    write_rows(tmp_path / "rl.parquet", [rlhf()])
    with pytest.raises(DataError) as error:
        read_conversations(tmp_path / "rl.parquet")
    assert "RLHF file" in (error.value.hint or "")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "p.parquet"
    write_rows(path, [rlhf()])
    before = path.read_bytes()
    with pytest.raises(DataError, match="column 'ability'"):
        write_rows(path, [rlhf(), rlhf(ability=5)])
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["p.parquet"]


def test_only_the_named_columns_are_read(tmp_path):
    path = tmp_path / "r.parquet"
    write_rows(path, [{"a": i, "b": str(i), "heavy": "x"} for i in range(3000)])
    rows = list(read_rows(path, ("a",), ("b", "absent")))
    assert [index for index, _ in rows] == list(range(3000))
    assert rows[2500] == (2500, {"a": 2500, "b": "2500"})
    assert [row for _, row in read_rows(path, ("a",), limit=2)] == [{"a": 0}, {"a": 1}]


def test_hints_name_the_command_that_makes_such_files(tmp_path):
    path = tmp_path / "r.parquet"
    for needed in ("a", "c"):
        with pytest.raises(DataError) as error:
            next(read_rows(path, (needed,), made_by="posttrain generate"))
        assert "`posttrain generate`" in error.value.hint
        write_rows(path, [{"a": 1}])
    assert "the file has a;" in error.value.hint


def test_appended_columns_go_with_the_first_rows(tmp_path):
    source, target = tmp_path / "s.parquet", tmp_path / "new" / "t.parquet"
    write_rows(source, [{"a": i, "b": i} for i in range(5)])
    asked = []

    def columns(start, stop):
        asked.append((start, stop))
        return pa.table({"b": ["x", "y", "z"][start:stop], "c": [[1], [], [2, 3]][start:stop]})

    schema = pa.schema([("b", pa.string()), ("c", pa.list_(pa.int64()))])
    append_columns(source, target, 3, columns, schema, rows_at_once=2, metadata={b"made": b"here"})
    assert asked == [(0, 2), (2, 3)]
    assert pq.read_schema(target).metadata[b"made"] == b"here"
    table = pq.read_table(target)
    assert table.to_pydict() == {"a": [0, 1, 2], "b": ["x", "y", "z"], "c": [[1], [], [2, 3]]}
    assert [p.name for p in target.parent.iterdir()] == ["t.parquet"]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("in the way")
    target = tmp_path / "taken.parquet"
    target.mkdir()
    write_rows(tmp_path / "s.parquet", [{"a": 1}])
    before = sorted(tmp_path.rglob("*"))
    for path in (tmp_path / "file" / "t.parquet", target):
        with pytest.raises(ConfigError, match=r"a file is in the way|it is a folder"):
            write_rows(path, [{"a": 1}])
        with pytest.raises(ConfigError, match=r"a file is in the way|it is a folder"):
            append_columns(
                tmp_path / "s.parquet", path, 1, lambda *_: pa.table({"b": [2]}), pa.schema([("b", pa.int64())])
            )
    assert sorted(tmp_path.rglob("*")) == before
