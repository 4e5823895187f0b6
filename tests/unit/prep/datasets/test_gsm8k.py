import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.core.errors import DataError
from posttrain.prep.datasets.base import open_dataset, reasoning
from posttrain.prep.datasets.gsm8k import Gsm8k
from posttrain.rewards import compute_score
from posttrain.tools.calculator import Calculator

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
        "calculations": 2,
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


def turns(answer):
    """(text, expressions of its calls) of the assistant's turns, and the results, of the demonstration of an answer."""
    conversation = Gsm8k("calculator").to_sft({"question": "?", "answer": answer}, 0, "train")
    assert [tool["function"]["name"] for tool in conversation.tools] == ["calculator"]
    said = [message for message in conversation.messages if message["role"] == "assistant"]
    calls = [[call["function"]["arguments"]["expression"] for call in m.get("tool_calls", [])] for m in said]
    results = [message["content"] for message in conversation.messages if message["role"] == "tool"]
    return [(m["content"], *c) for m, c in zip(said, calls, strict=True)], results


@pytest.mark.parametrize(
    ("answer", "said", "results"),
    [
        (
            ROWS[0]["answer"],
            [("2+2=", "2+2"), ("4 ducks.\nThen 4*500=$", "4*500"), ("2,000.\n#### 2000",)],
            ["4", "2000"],
        ),
        (ROWS[1]["answer"], [("1\n#### -1",)], []),  # nothing is marked
        ("#### 5", [("#### 5",)], []),
        ("<<.5*10=5.00>>5\n#### 5", [("", ".5*10"), ("5\n#### 5",)], ["5"]),
        ("A third is <<1/3=.33>>.33\n#### 0", [("A third is", "1/3"), (".33\n#### 0",)], ["0.333333333333"]),
        ("It is <<3/4=3/4>>3/4\n#### 1", [("It is", "3/4"), ("3/4\n#### 1",)], ["0.75"]),
        ("So <<2+2=5>>5, then <<5+1=6>>6\n#### 6", [("So 5, then", "5+1"), ("6\n#### 6",)], ["6"]),  # a wrong one
        ("So <<8%*50=4>>4 <<x>>of <<2**9999=1>>1\n#### 4", [("So 4 of 1\n#### 4",)], []),  # none can be worked out
    ],
)
def test_calculator_demonstrations_call_it_for_each_step_of_the_solution(answer, said, results):
    assert turns(answer) == (said, results)


def test_plain_demonstrations_have_the_solution_and_no_tool():
    conversation = Gsm8k("plain").to_sft(ROWS[0], 0, "train")
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant"]
    assert conversation.messages[2] == {
        "role": "assistant",
        "content": "2+2=4 ducks.\nThen 4*500=$2,000.\n#### 2000",
    }
    assert conversation.tools == []


@pytest.mark.parametrize("demos", ["calculator", "plain"])
def test_prompts_without_the_answer_tool_do_not_name_it(demos):
    dataset = Gsm8k(demos)
    row = dataset.to_rlhf(ROWS[0], 3, "train")
    assert row["prompt"] == dataset.to_sft(ROWS[0], 3, "train").messages[:2]
    assert "calc_gsm8k_reward" not in json.dumps(row)
    assert ("calculator" in row["prompt"][0]["content"]) == (demos == "calculator")


async def test_results_in_demonstrations_are_what_the_calculator_says(test_data):
    steps = 0
    for line in (test_data / "gsm8k" / "test.jsonl").read_text().splitlines():
        row = json.loads(line)
        conversation = Gsm8k("calculator").to_sft(row, 0, "test")
        steps += row["answer"].count("<<")
        for called, result in zip(conversation.messages, conversation.messages[1:], strict=False):
            if result["role"] == "tool":
                steps -= 1
                (call,) = called["tool_calls"]
                said = await Calculator().call(None, call["function"]["arguments"])
                assert (said.text, said.error) == (result["content"], False)
        gold = Gsm8k().gold(row)
        assert compute_score("openai/gsm8k", conversation.messages[-1]["content"], gold).correct
    assert steps == 0


def test_a_data_set_is_asked_for_demonstrations_that_it_has():
    assert open_dataset("gsm8k").system == open_dataset("gsm8k", "check").system
    with pytest.raises(DataError, match="no demonstrations 'calculater'") as error:
        open_dataset("gsm8k", "calculater")
    assert error.value.hint == "it has: check, calculator, plain"
    with pytest.raises(DataError, match="'math' has no demonstrations 'plain'") as error:
        open_dataset("math", "plain")
    assert error.value.hint == "leave --demos out: it has one kind"


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
