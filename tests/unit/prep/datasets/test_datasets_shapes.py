"""The data sets on small files of each raw shape that their docstrings name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.core.errors import DataError
from posttrain.data.parquet import Conversation, read_conversations, read_prompts, sft_row, write_rows
from posttrain.prep.datasets import DATASETS, Dataset, refusal
from posttrain.prep.datasets.base import RawRow

WRONG = "the gold answer is not graded as right"


def jsonl(path: Path, rows: list[RawRow]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return str(path)


def parquet(path: Path, rows: list[RawRow]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def read(name: str, split: str, source: str) -> tuple[Dataset, list[RawRow]]:
    dataset = DATASETS.get(name)()
    return dataset, list(dataset.rows(split, source))


def rlhf(dataset: Dataset, row: RawRow, folder: Path) -> dict[str, Any]:
    """The RLHF row, after it went through parquet unchanged."""
    assert refusal(dataset, row) is None
    made = dataset.to_rlhf(row, 7, "train")
    assert made is not None
    write_rows(folder / "rlhf.parquet", [made])
    (prompt,) = read_prompts(folder / "rlhf.parquet")
    assert prompt.messages == made["prompt"]
    assert prompt.ground_truth == made["reward_model"]["ground_truth"]
    assert made["extra_info"]["index"] == 7
    assert made["extra_info"]["split"] == "train"
    return made


def sft(dataset: Dataset, row: RawRow, folder: Path) -> Conversation:
    """The conversation, after it went through parquet unchanged."""
    assert refusal(dataset, row) is None
    made = dataset.to_sft(row, 7, "train")
    assert made is not None
    write_rows(folder / "sft.parquet", [sft_row(made)])
    assert read_conversations(folder / "sft.parquet") == [made]
    return made


DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'


def dapo_row(problem: str, answer: str, index: str) -> RawRow:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": DAPO_BEFORE + problem + DAPO_AFTER}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def test_dapo_takes_each_problem_once_and_asks_it_as_it_came(tmp_path):
    rows = [dapo_row("What is 2+2?", "4", "a"), dapo_row("What is 3+3?", "6", "b")] * 3
    dataset, kept = read("dapo-math-17k", "train", parquet(tmp_path / "data" / "dapo-math-17k.parquet", rows))
    assert len(kept) == 2
    assert dataset.skipped == {"a duplicate": 4}
    made = rlhf(dataset, kept[1], tmp_path)
    assert made["prompt"] == rows[1]["prompt"]
    assert made["data_source"] == "math_dapo"
    assert made["reward_model"]["ground_truth"] == "6"
    assert made["extra_info"]["question"] == "What is 3+3?"
    assert dataset.to_sft(kept[0], 0, "train") is None
    assert len(list(dataset.rows("train", str(tmp_path / "data" / "dapo-math-17k.parquet")))) == 2  # also a second time


def test_dapo_with_text_as_prompt(tmp_path):
    dataset, rows = read(
        "dapo-math-17k", "train", jsonl(tmp_path / "train.jsonl", [{"prompt": "What is 2+2?", "solution": "4"}])
    )
    assert rlhf(dataset, rows[0], tmp_path)["prompt"] == dapo_row("What is 2+2?", "4", "")["prompt"]


def test_deepmath_of_the_hub(tmp_path):
    row = {
        "question": "What is $1/2+1/3$?",
        "final_answer": "\\frac{5}{6}",
        "difficulty": 4.5,
        "topic": "Arithmetic",
        "r1_solution_1": "Add: \\boxed{\\dfrac{5}{6}}",
        "r1_solution_2": "x",
    }
    dataset, rows = read("deepmath", "train", parquet(tmp_path / "data" / "train-00000-of-00002.parquet", [row]))
    made = rlhf(dataset, rows[0], tmp_path)
    assert made["extra_info"]["difficulty"] == 4.5
    assert made["prompt"][0]["content"].endswith("output the final answer within \\boxed{}.")
    assert sft(dataset, rows[0], tmp_path).messages[-1]["content"] == row["r1_solution_1"]
    found = refusal(dataset, {**row, "r1_solution_1": "So \\boxed{1}"})
    assert found is not None
    assert found.reason == WRONG
    assert found.detail == "the grader read '1'"


def test_math_as_the_hub_and_as_the_first_authors_have_it(tmp_path):
    row = {"problem": "What is 2+2?", "level": "Level 1", "type": "Algebra", "solution": "It is $\\boxed{4}$."}
    parquet(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet", [row])
    for number in (1, 2):
        folder = tmp_path / "original" / "train" / "algebra"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.json").write_text(json.dumps(row, indent=1))
    assert read("math", "train", str(tmp_path / "hub"))[1] == [row]
    dataset, rows = read("math", "train", str(tmp_path / "original"))
    assert rows == [row, row]
    assert list(dataset.available(str(tmp_path / "original"))) == ["train"]
    with pytest.raises(DataError, match="has no split 'test'"):
        list(dataset.rows("test", str(tmp_path / "original")))
    made = rlhf(dataset, row, tmp_path)
    assert made["reward_model"]["ground_truth"] == "4"
    assert made["extra_info"]["level"] == "Level 1"


def test_aime_of_two_files(tmp_path):
    for part, answer in (("I", "70"), ("II", "033")):
        jsonl(tmp_path / f"aime2025-{part}.jsonl", [{"question": "What?", "answer": answer}])
    dataset, rows = read("aime25", "test", str(tmp_path))
    assert [row["answer"] for row in rows] == ["70", "033"]
    assert [refusal(dataset, row) for row in rows] == [None, None]


def test_numina_cot(tmp_path):
    raw = [
        {"source": "olympiads", "problem": "Find $x$ if $2x=6$.", "solution": "So $x = \\boxed{3}$.", "messages": []},
        {"source": "olympiads", "problem": "Prove it.", "solution": "Clear.", "messages": []},
        {"source": "orca_math", "problem": "1+1", "solution": "\\boxed{2}", "messages": []},
        {"source": "cn_k12", "problem": "See ![](x.png) <image>: 1+1", "solution": "\\boxed{2}", "messages": []},
    ]
    dataset, rows = read("numina", "train", jsonl(tmp_path / "train.jsonl", raw))
    assert dataset.skipped == {"the solution has no boxed answer": 1, "of another source": 1}
    made = rlhf(dataset, rows[0], tmp_path)
    assert made["data_source"] == "numina_olympiads"
    assert made["reward_model"]["ground_truth"] == "3"
    assert made["prompt"] == [
        {
            "role": "user",
            "content": "Find $x$ if $2x=6$.\n\nPresent the answer in LaTex format: \\boxed{Your answer}",
        }
    ]
    assert sft(dataset, rows[0], tmp_path).messages[-1]["content"] == "So $x = \\boxed{3}$."
    other = rlhf(dataset, rows[1], tmp_path)
    assert other["data_source"] == "numina_cn_k12"
    assert "[figure]: 1+1" in other["prompt"][0]["content"]  # a lost figure is no image of the row


def prime_row(source: str, question: str, truth: str) -> RawRow:
    return {
        "data_source": source,
        "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": question}],
        "ability": "code" if "numina" not in source else "math",
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"index": 0, "split": "dummy"},
    }


TESTS = json.dumps({"inputs": ["1\n", "5\n"], "outputs": ["2\n", "6\n"]})


def test_prime_rows_are_shared_by_numina_and_code(tmp_path):
    raw = [
        prime_row("numina_amc_aime", "What?\n\nPresent the answer in LaTex format: \\boxed{Your answer}", "\\sqrt{2}"),
        prime_row("taco", "Read a number, print the next. <image>", TESTS),
    ]
    source = parquet(tmp_path / "train.parquet", raw)
    dataset, rows = read("numina", "train", source)
    assert dataset.skipped == {"of another source": 1}
    made = rlhf(dataset, rows[0], tmp_path)
    assert made["prompt"] == raw[0]["prompt"]
    assert made["extra_info"]["question"] == "What?"
    assert made["reward_model"]["ground_truth"] == "\\sqrt{2}"
    dataset, rows = read("code", "train", source)
    assert dataset.skipped == {"of another source": 1}
    made = rlhf(dataset, rows[0], tmp_path)
    assert made["data_source"] == "taco"
    assert made["prompt"][1]["content"] == "Read a number, print the next. [figure]"
    assert json.loads(made["reward_model"]["ground_truth"]) == json.loads(TESTS)
    assert dataset.to_sft(rows[0], 0, "train") is None


NEXT = "print(int(input()) + 1)"
CODE_SHAPES: list[tuple[RawRow, str]] = [
    ({"problem": "P", "tests": json.loads(TESTS), "solutions": [NEXT]}, "codecontests"),
    ({"problem": "P", "tests": TESTS, "solutions": [NEXT], "source": "codeforces"}, "codeforces"),
    ({"problem": "P", "tests": [{"type": "stdin_stdout", "input": "1\n", "output": "2\n"}]}, "codecontests"),
    ({"question": "P", "input_output": TESTS, "solutions": json.dumps([NEXT]), "starter_code": ""}, "apps"),
    (
        {
            "question": "P",
            "input_output": TESTS,
            "solutions": json.dumps([NEXT]),
            "raw_tags": "x",
            "source": "codeforces",
        },
        "taco",
    ),
    (
        {
            "description": "P",
            "public_tests": {"input": ["1\n"], "output": ["2\n"]},
            "private_tests": {"input": ["5\n"], "output": ["6\n"]},
            "generated_tests": {"input": [], "output": []},
            "solutions": {"language": [2, 3], "solution": ["int main() {}", NEXT]},
        },
        "codecontests",
    ),
]


@pytest.mark.parametrize(("row", "source"), CODE_SHAPES)
def test_shapes_of_code(tmp_path, row, source):
    dataset, rows = read("code", "train", jsonl(tmp_path / "train.jsonl", [row]))
    made = rlhf(dataset, rows[0], tmp_path)
    assert made["data_source"] == source
    assert made["prompt"][0]["content"].startswith("P\n\nWrite Python code to solve the problem.")
    assert json.loads(made["reward_model"]["ground_truth"])["inputs"][0] == "1\n"
    if "solutions" in row:
        assert sft(dataset, rows[0], tmp_path).messages[-1]["content"] == f"```python\n{NEXT}\n```"
        wrong = json.loads(json.dumps(rows[0]).replace("+ 1", "+ 2"))
        found = refusal(dataset, wrong)
        assert found is not None
        assert found.reason == WRONG


def test_code_that_calls_a_function(tmp_path):
    row = {
        "question": "Add one.",
        "input_output": json.dumps({"fn_name": "inc", "inputs": [[1], [5]], "outputs": [2, 6]}),
        "solutions": json.dumps(["class Solution:\n    def inc(self, n):\n        return n + 1"]),
        "starter_code": "class Solution:\n    def inc(self, n):",
    }
    dataset, rows = read("code", "train", jsonl(tmp_path / "train.jsonl", [row, {"question": "x", "input_output": ""}]))
    assert dataset.skipped == {"there are no tests": 1}
    assert "def inc(self, n):" in rlhf(dataset, rows[0], tmp_path)["prompt"][0]["content"]
    listed = {"problem": "P", "tests": [{"input": [1], "output": 2, "fn_name": "inc"}], "solutions": []}
    tests = dataset.to_rlhf(listed, 0, "train")
    assert tests is not None
    assert json.loads(tests["reward_model"]["ground_truth"]) == {"inputs": [[1]], "outputs": [2], "fn_name": "inc"}


PNG = b"\x89PNG\r\n\x1a\n and so on"


def test_geometry3k_of_the_hub(tmp_path):
    row = {"images": [{"bytes": PNG, "path": None}], "problem": "<image>Find x.", "answer": "3"}
    dataset, rows = read("geometry3k", "validation", parquet(tmp_path / "data" / "validation-00000.parquet", [row]))
    made = rlhf(dataset, rows[0], tmp_path)
    assert made["images"] == [{"bytes": PNG}]
    assert made["prompt"][0]["content"].startswith("<image>Find x. You FIRST think")
    assert "<think>" in made["prompt"][0]["content"]
    for bad, reason in (
        ({**row, "images": []}, "the image is missing"),
        ({**row, "images": [{"bytes": None, "path": "a.png"}]}, "the image is missing"),
        ({**row, "problem": "<image><image>Find x."}, "images are missing, or not named in the problem"),
        ({**row, "choices": ["1", "2"], "answer": "D"}, "the gold answer is none of the choices"),
    ):
        found = refusal(dataset, bad)
        assert found is not None
        assert found.reason == reason


def test_geometry3k_folder_without_its_figure(tmp_path):
    folder = tmp_path / "train" / "11"
    folder.mkdir(parents=True)
    row = {"annotat_text": "Find x.", "choices": ["1", "2"], "answer": "B", "data_type": "train"}
    (folder / "data.json").write_text(json.dumps(row))
    dataset, rows = read("geometry3k", "train", str(tmp_path))
    found = refusal(dataset, rows[0])
    assert found is not None
    assert found.reason == "the image is missing"
    (folder / "img_diagram.png").write_bytes(PNG)
    made = rlhf(dataset, next(iter(dataset.rows("train", str(tmp_path)))), tmp_path)
    assert made["reward_model"]["ground_truth"] == "2"
    assert list(dataset.available(str(tmp_path))) == ["train"]


def test_kk_of_the_hub_takes_three_five_and_seven_people(tmp_path):
    row = {
        "quiz": "Zoey said that Ann is a knave. Who is what?",
        "names": ["Zoey", "Ann"],
        "solution": [True, False],
        "solution_text_format": "(1) Zoey is a knight\n(2) Ann is a knave",
        "cot_head": "Let's think.",
        "cot_repeat_steps": ["Assume Zoey is a knight."],
        "cot_foot": "Done.",
        "statements": "()",
    }
    (tmp_path / "train").mkdir()
    for people in (2, 3, 5, 7):
        jsonl(tmp_path / "train" / f"people{people}_num1000.jsonl", [{**row, "index": people}])
    dataset, rows = read("kk", "train", str(tmp_path))
    assert [row["index"] for row in rows] == [3, 5, 7]
    assert sft(dataset, rows[0], tmp_path).messages[-1]["content"] == (
        "<think>\nLet's think.\nAssume Zoey is a knight.\nDone.\n</think>\n"
        "<answer>\n(1) Zoey is a knight\n(2) Ann is a knave\n</answer>"
    )
    assert rlhf(dataset, rows[0], tmp_path)["reward_model"]["ground_truth"]["statements"] == "()"


def test_olympiadbench_asks_for_several_answers_and_the_unit(tmp_path):
    row = {
        "question": "Find $x$.",
        "context": "Let $x^2=4$.",
        "solution": ["So $x=\\pm 2$.", "Or so."],
        "final_answer": ["$2$,$-2$"],
        "is_multiple_answer": True,
        "unit": "m",
    }
    dataset, rows = read("olympiadbench", "test", jsonl(tmp_path / "test.jsonl", [row]))
    asked = rlhf(dataset, rows[0], tmp_path)["prompt"][0]["content"]
    assert asked.startswith("Let $x^2=4$.\n\nFind $x$.\n\nThere are several answers")
    assert "in the unit m" in asked
    worked = sft(dataset, rows[0], tmp_path).messages[-1]["content"]
    assert worked.startswith("So $x=\\pm 2$.\n\nThe final answer is $\\boxed{")


RETOOL = (
    "Let me compute.\n<code>\n```python\nprint(2+2)\n```\n</code>\n<interpreter>\n4\n</interpreter>\n"
    "Again: <code>print(5)</code><interpreter>5</interpreter>So it is 4.\n<answer>\n\\boxed{4}\n</answer>"
)


def test_retool_programs_become_calls(tmp_path):
    row = {
        "messages": [
            {"role": "user", "content": "Use tools.\n\n*user question:*\nWhat is 2+2? Use <answer>\\boxed{}</answer>."},
            {"role": "assistant", "content": RETOOL},
        ]
    }
    dataset, rows = read("retool-sft", "train", parquet(tmp_path / "data" / "train-00000.parquet", [row]))
    made = sft(dataset, rows[0], tmp_path)
    assert [message["role"] for message in made.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert made.messages[0]["content"] == "What is 2+2? Use \\boxed{}."
    assert made.messages[1]["content"] == "Let me compute."
    assert [m["tool_calls"][0]["function"] for m in made.messages if "tool_calls" in m] == [
        {"name": "code_interpreter", "arguments": {"code": "print(2+2)"}},
        {"name": "code_interpreter", "arguments": {"code": "print(5)"}},
    ]
    assert made.messages[2] == {"role": "tool", "name": "code_interpreter", "content": "4"}
    assert made.messages[-1]["content"].endswith("\\boxed{4}\n</answer>")
    assert [tool["function"]["name"] for tool in made.tools] == ["code_interpreter"]
    for text, reason in (
        (RETOOL.partition("So it")[0], "the solution ends with a program"),
        ("<code>print(1)</code> and so \\boxed{1}", "a program without its output, or the other way round"),
    ):
        bad = {"messages": [row["messages"][0], {"role": "assistant", "content": text}]}
        found = refusal(dataset, bad)
        assert found is not None
        assert found.reason == reason


TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
CALL = {"name": "add", "arguments": {"a": 1}}
DONE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "2"},
]
OPENAI: list[RawRow] = [
    {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
    {"role": "user", "content": "1+1?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {**CALL, "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "2"},
]
LEGACY = [
    *OPENAI[:2],
    {"role": "assistant", "content": None, "function_call": CALL},
    {"role": "function", "content": "2"},
    OPENAI[4],
]
SHAREGPT = [
    {"from": "human", "value": "1+1?"},
    {"from": "function_call", "value": json.dumps(CALL)},
    {"from": "observation", "value": "2"},
    {"from": "gpt", "value": "2"},
]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": OPENAI, "tools": [TOOL]},
        {"messages": json.dumps(OPENAI), "tools": json.dumps([{"type": "function", "function": TOOL}])},
        {"messages": LEGACY, "functions": [TOOL]},
        {"conversations": SHAREGPT, "system": "Be brief.", "tools": json.dumps([TOOL])},
    ],
)
def test_every_style_of_messages_gives_the_same_conversation(tmp_path, row):
    dataset, rows = read("messages", "train", jsonl(tmp_path / "my.jsonl", [row]))
    made = sft(dataset, rows[0], tmp_path)
    assert made.messages == DONE
    assert made.tools == [{"type": "function", "function": TOOL}]
    assert dataset.to_rlhf(rows[0], 0, "train") is None


def test_structs_of_parquet_have_no_keys_of_other_rows(tmp_path):
    def row(name: str, key: str) -> RawRow:
        properties = {key: {"type": "integer"}}
        tool = {"name": name, "parameters": {"type": "object", "properties": properties}}
        call = {"type": "function", "function": {"name": name, "arguments": {key: 1}}}
        talk = [OPENAI[1], {"role": "assistant", "content": None, "tool_calls": [call]}]
        answer = {"role": "assistant", "content": "No."}
        return {"messages": talk, "chosen": talk[1:], "rejected": [answer], "prompt": talk[:1], "tools": [tool]}

    raw = [row("add", "a"), row("halve", "b")]
    path = parquet(tmp_path / "my.parquet", raw)
    dataset, rows = read("messages", "train", path)
    pairs, _ = read("preferences", "train", path)
    for i, given in enumerate(raw):
        made, pair = sft(dataset, rows[i], tmp_path), pairs.to_preference(rows[i], i, "train")
        assert pair is not None
        assert made.tools == pair.tools == [{"type": "function", "function": given["tools"][0]}]
        assert made.messages[1]["tool_calls"] == pair.chosen[0]["tool_calls"] == given["messages"][1]["tool_calls"]


USER, GOOD, BAD = OPENAI[1], OPENAI[4], {"role": "assistant", "content": "3"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "1+1?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"chosen": [USER, GOOD], "rejected": [DONE[0], USER, BAD]},
    ],
)
def test_the_system_message_of_a_pair_may_be_a_column(row):
    pair = DATASETS.get("preferences")().to_preference({"system": "Be brief.", **row}, 0, "train")
    assert (pair.prompt, pair.chosen, pair.rejected) == ([DONE[0], USER], [GOOD], [BAD])


def test_a_null_content_of_a_user_in_parquet_is_an_empty_text(tmp_path):
    row = {"messages": [{"role": "user", "content": None}, GOOD]}
    dataset, rows = read("messages", "train", parquet(tmp_path / "my.parquet", [row]))
    assert [m["content"] for m in sft(dataset, rows[0], tmp_path).messages] == ["", "2"]


def test_answers_that_go_on_from_a_prompt_get_no_system_message_of_their_own():
    asks = {"role": "user", "content": "1+2?"}
    row = {"prompt": [USER, GOOD], "chosen": [asks, BAD], "rejected": [asks, GOOD], "system": "Be brief."}
    pair = DATASETS.get("preferences")().to_preference(row, 0, "train")
    assert [m["role"] for m in pair.prompt] == ["system", "user", "assistant", "user"]
    assert (pair.chosen, pair.rejected) == ([BAD], [GOOD])


@pytest.mark.parametrize("origin", ["gpt", "model", "chatgpt", "assistant"])
def test_a_weight_of_0_leaves_a_turn_of_sharegpt_out_of_the_loss(origin):
    asked = {"from": "human", "value": "1+1?", "weight": 0}
    turns = [asked, {"from": origin, "value": "3", "weight": 0}, asked, {"from": origin, "value": "2", "weight": 1}]
    made = DATASETS.get("messages")().to_sft({"conversations": turns}, 0, "train")
    assert [message.get("train") for message in made.messages] == [None, False, None, True]


@pytest.mark.parametrize("weight", ["0", 0.5, [0]])
def test_a_weight_that_is_neither_0_nor_1_refuses_the_row(weight):
    talk = [OPENAI[1], {**OPENAI[4], "weight": weight}]
    found = refusal(DATASETS.get("messages")(), {"messages": talk})
    assert found is not None
    assert found.reason == "the weight of a message is neither 0 nor 1"


def test_half_of_a_surrogate_pair_in_json_text_refuses_the_row():
    talk = json.dumps([{"role": "user", "content": "Hi \ud83d"}, OPENAI[4]])
    for name, row in (("messages", {"messages": talk}), ("preferences", {"chosen": talk, "rejected": talk})):
        found = refusal(DATASETS.get(name)(), row)
        assert found is not None
        assert found.reason == "a message has a character that UTF-8 cannot hold"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1?", "response": "2"},
        {"prompt": "1+1?", "completion": "2"},
        {"prompt": [OPENAI[1]], "completion": [OPENAI[4]]},
        {"question": "1+1?", "answer": "2", "split": "train"},
        {
            "data_source": "x",
            "prompt": [{"role": "user", "content": "?"}],
            "extra_info": {"question": "1+1?", "answer": "2"},
        },
    ],
)
def test_a_prompt_and_a_response_are_a_conversation(tmp_path, row):
    dataset, rows = read("messages", "train", jsonl(tmp_path / "my.jsonl", [row]))
    made = sft(dataset, rows[0], tmp_path)
    assert [(m["role"], m["content"]) for m in made.messages] == [("user", "1+1?"), ("assistant", "2")]


@pytest.mark.parametrize("shape", [("role", "content", "user", "assistant"), ("from", "value", "human", "gpt")])
def test_turns_of_a_prompt_are_not_trained(tmp_path, shape):
    """The completion alone is to be learned, as by TRL."""
    role, text, asks, answers = shape
    prompt = [{role: asks, text: "1+1?"}, {role: answers, text: "3"}, {role: asks, text: "Sure?"}]
    row = {"prompt": prompt, "completion": [{role: answers, text: "No, 2."}]}
    dataset, rows = read("messages", "train", jsonl(tmp_path / "my.jsonl", [row]))
    made = sft(dataset, rows[0], tmp_path)
    assert [m["content"] for m in made.messages] == ["1+1?", "3", "Sure?", "No, 2."]
    assert [m.get("train", True) for m in made.messages if m["role"] == "assistant"] == [False, True]


@pytest.mark.parametrize(
    ("columns", "texts"),
    [
        ({"input": "1 and 2"}, ["Add.\n\n1 and 2", "3"]),
        ({"input": " ", "history": []}, ["Add.", "3"]),
        ({"input": "1", "history": [["Hi", "Yes"], ["?", "!"]]}, ["Hi", "Yes", "?", "!", "Add.\n\n1", "3"]),
        ({"input": None, "history": '[["Hi", "Hello"]]', "system": "S"}, ["S", "Hi", "Hello", "Add.", "3"]),
    ],
)
def test_input_and_history_of_alpaca_are_read(tmp_path, columns, texts):
    row = {"instruction": "Add.", "output": "3", **columns}
    dataset, rows = read("messages", "train", jsonl(tmp_path / "my.jsonl", [row]))
    assert [m["content"] for m in sft(dataset, rows[0], tmp_path).messages] == texts
    pair = {**row, "chosen": "3", "rejected": "4"}
    assert [m["content"] for m in DATASETS.get("preferences")().to_preference(pair, 0, "train").prompt] == texts[:-1]


@pytest.mark.parametrize("images", [["a.png"], '["a.png"]', "a.png", [{"path": "a.png", "bytes": None}]])
def test_images_of_conversations_and_pairs_are_kept(tmp_path, images):
    row = {"messages": [{"role": "user", "content": "<image>What?"}, OPENAI[4]], "images": images}
    dataset, rows = read("messages", "train", jsonl(tmp_path / "my.jsonl", [row]))
    assert sft(dataset, rows[0], tmp_path).images == [{"path": "a.png"}]
    pair = {"prompt": "<image>What?", "chosen": "2", "rejected": "3", "images": images}
    assert DATASETS.get("preferences")().to_preference(pair, 0, "train").images == [{"path": "a.png"}]


def test_weight_zero_is_train_false(tmp_path):
    row = {
        "messages": [
            OPENAI[1],
            {"role": "assistant", "content": "3", "weight": 0},
            OPENAI[1],
            {"role": "assistant", "content": "2", "weight": 1},
        ]
    }
    dataset, rows = read("messages", "train", jsonl(tmp_path / "my.jsonl", [row]))
    assert [m.get("train") for m in sft(dataset, rows[0], tmp_path).messages] == [None, False, None, True]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": []},
        {"messages": "no JSON"},
        {"text": "x"},
        {"messages": ["x"]},
        {"messages": [OPENAI[1]]},
        {"messages": [OPENAI[4]]},
        {"messages": [{"content": "x"}, OPENAI[4]]},
        {"messages": [OPENAI[4], OPENAI[1]]},
        {"messages": [OPENAI[1], {"role": "assistant", "content": 3}]},
        {"messages": OPENAI, "tools": [{**TOOL, "name": "subtract"}]},
        {"messages": OPENAI, "tools": "no JSON"},
        {"messages": [OPENAI[1], OPENAI[3], OPENAI[4]], "tools": [TOOL]},
        {"conversations": [{"from": "nobody", "value": "x"}]},
        {"conversations": [SHAREGPT[0], {"from": "function_call", "value": "no JSON"}]},
        {"messages": [{"role": "user", "content": "<image>What?"}, OPENAI[4]]},
        {"messages": [OPENAI[1], OPENAI[4]], "images": ["a.png"]},
        {"messages": [{"role": "user", "content": "<image>What?"}, OPENAI[4]], "images": [3]},
        {"instruction": "Add.", "input": {"a": 1}, "output": "3"},
        {"instruction": "Add.", "history": [["Hi"]], "output": "3"},
    ],
)
def test_bad_conversations_are_refused_with_a_reason_to_count_by(tmp_path, row):
    dataset, rows = read("messages", "train", jsonl(tmp_path / "my.jsonl", [row]))
    found = refusal(dataset, rows[0])
    assert found is not None
    assert found.reason
    assert found.detail


def test_the_reason_does_not_name_the_place(tmp_path):
    """Else every row would have a reason of its own."""
    dataset = DATASETS.get("messages")()
    good = [OPENAI[1], OPENAI[4]]
    for bad in ({"content": "x"}, {"role": "assistant", "content": 3}, OPENAI[3], {"role": "nobody", "content": "x"}):
        found = [refusal(dataset, {"messages": [*good * turns, bad]}) for turns in (1, 2)]
        assert found[0] is not None
        assert found[1] is not None
        assert found[0].reason == found[1].reason
        assert found[0].detail != found[1].detail


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("math500", {"answer": "4"}, "the problem is missing or empty"),
        ("math500", {"problem": " ", "answer": "4"}, "the problem is missing or empty"),
        ("math500", {"problem": "x"}, "the gold answer is missing or empty"),
        ("math500", {"problem": "x", "answer": "4", "solution": "So \\boxed{5}"}, WRONG),
        ("olympiadbench", {"question": "x", "final_answer": []}, "the gold answer is missing or empty"),
        ("dapo-math-17k", {"prompt": []}, "the gold answer is missing or empty"),
        ("dapo-math-17k", {"prompt": [], "solution": "3"}, "the problem is missing or empty"),
        ("gaokao", {"question": "x", "answer": ["Z"]}, "the grader cannot judge the gold answer"),
        ("gaokao", {"question": "x", "answer": []}, "the gold answer is missing or empty"),
        ("kk", {"quiz": "x"}, "`solution_text_format` is missing or empty"),
        ("kk", {"quiz": "x", "solution_text_format": "x"}, "the grader cannot judge the gold answer"),
        ("humaneval", {"prompt": "def f():", "test": "x"}, "`canonical_solution` is missing or empty"),
        ("mbpp", {"text": "x", "code": "y", "test_list": []}, "there are no tests"),
        (
            "code",
            {"problem": "x", "tests": {"inputs": ["1"], "outputs": []}},
            "the grader cannot judge the gold answer",
        ),
        ("code", {"tests": TESTS}, "the problem is missing or empty"),
        ("numina", {"problem": "x", "source": "olympiads"}, "the gold answer is missing or empty"),
    ],
)
def test_bad_rows_have_a_reason(name, row, reason):
    found = refusal(DATASETS.get(name)(), row)
    assert found is not None
    assert found.reason == reason
    assert found.detail


def test_a_set_that_is_on_no_hub_says_so():
    with pytest.raises(DataError, match="gaokao is on no hub") as error:
        DATASETS.get("gaokao")().available(None)
    assert "--source" in (error.value.hint or "")
