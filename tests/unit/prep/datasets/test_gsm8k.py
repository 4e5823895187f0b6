import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.core.errors import DataError
from posttrain.prep.datasets.base import reasoning
from posttrain.prep.datasets.gsm8k import Gsm8k

ROWS = [
    {"question": "How many?", "answer": "2+2=<<2+2=4>>4 ducks.\nThen 4*500=$<<4*500=2000>>2,000.\n#### 2,000"},
    {"question": "And now?", "answer": "1\n#### -1"},
]


def folder(path: Path) -> str:
    for split in ("train", "test"):
        (path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def test_rows_of_a_folder_in_order(tmp_path):
    dataset = Gsm8k()
    source = folder(tmp_path)
    assert dataset.available(source) == ["train", "test"]
    assert list(dataset.rows("test", source)) == ROWS
    assert list(dataset.rows("test", source, n=1)) == ROWS[:1]


def test_parquet_of_the_hub_layout(tmp_path):
    (tmp_path / "main").mkdir()
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "main" / f"{split}-00000-of-00001.parquet")
    assert list(Gsm8k().rows("train", str(tmp_path))) == ROWS


def test_a_single_file_gives_the_split_of_its_name(tmp_path):
    folder(tmp_path)
    assert Gsm8k().available(str(tmp_path / "test.jsonl")) == ["test"]


def test_rlhf_row():
    row = Gsm8k().to_rlhf(ROWS[0], 3, "train")
    assert row["data_source"] == "openai/gsm8k"
    assert [m["role"] for m in row["prompt"]] == ["system", "user"]
    assert row["prompt"][1]["content"] == "How many?"
    assert row["reward_model"] == {"style": "rule", "ground_truth": "2000"}
    assert row["extra_info"] == {
        "split": "train",
        "index": 3,
        "answer": ROWS[0]["answer"],
        "question": "How many?",
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "2000"}}},
    }


def test_sft_conversation():
    conversation = Gsm8k().to_sft(ROWS[0], 0, "train")
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant", "tool", "assistant"]
    call = conversation.messages[2]
    assert call["content"] == "2+2=4 ducks.\nThen 4*500=$2,000."
    assert call["tool_calls"][0]["function"] == {"name": "calc_gsm8k_reward", "arguments": {"answer": "2000"}}
    assert conversation.messages[3]["content"] == "answer=2000 reward=1.0"
    assert conversation.messages[4]["content"] == "#### 2000"
    assert [tool["function"]["name"] for tool in conversation.tools] == ["calc_gsm8k_reward"]


def test_reasoning_of_an_answer_with_nothing_but_the_number():
    assert reasoning("#### 5") == ""


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("train.jsonl", "{", "line 1 is not JSON"),
        ("train.jsonl", '{"question": "a", "answer": "#### 1"}\n[]\n', "line 2 is not a JSON object"),
        ("train.jsonl", b"\xff\xfe", "unreadable"),
        ("train.parquet", b"PAR1 not really", "not a readable parquet"),
    ],
)
def test_broken_files_are_named(tmp_path, name, text, message):
    file = tmp_path / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=message) as error:
        list(Gsm8k().rows("train", str(file)))
    assert str(file) in str(error.value)
    assert error.value.hint


def test_missing_sources(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        Gsm8k().available(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"neither train\.jsonl nor train\.parquet"):
        Gsm8k().available(str(tmp_path))
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match="neither split nor format"):
        Gsm8k().available(str(tmp_path / "notes.txt"))


def test_without_a_network_the_hint_names_source(monkeypatch, tmp_path):
    # A port on which nothing listens stands for the missing network; the hub client itself is the real one.
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    dataset = Gsm8k()
    dataset.hub_id = "nobody/no-such-dataset"
    with pytest.raises(DataError, match="cannot be fetched") as error:
        dataset.available(None)
    assert "--source" in (error.value.hint or "")
