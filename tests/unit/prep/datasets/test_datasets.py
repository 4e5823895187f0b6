"""The data sets on their real files: counts against the manifest, and every gold answer by its own grader."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.parquet import read_conversations, read_prompts, sft_row, write_rows
from posttrain.prep.datasets import DATASETS, Dataset, refusal
from posttrain.rewards import compute_score

EMPTY_BOX = {"the gold answer is missing or empty": 2}
WRONG = "the gold answer is not graded as right"

# name: (source, rows of each split, rows passed over, rows refused)
SETS: dict[str, tuple[str, dict[str, int], dict[str, int], dict[str, int]]] = {
    "gsm8k": ("gsm8k", {"train": 7473, "test": 1319}, {}, {}),
    "math": ("math", {"train": 7500, "test": 5000}, {}, EMPTY_BOX),
    "math500": ("math", {"test": 500}, {}, {}),
    "aime24": ("math", {"test": 30}, {}, {}),
    "aime25": ("math", {"test": 30}, {}, {}),
    "amc23": ("math", {"test": 40}, {}, {}),
    "minerva": ("math", {"test": 272}, {}, {}),
    "olympiadbench": ("math", {"test": 675}, {}, {}),
    "deepmath": ("math_rl", {"train": 4994}, {}, {}),
    "cmath": ("chinese_math", {"test": 600}, {}, {}),
    "gaokao": (
        "chinese_math",
        {"test": 689},
        {
            "the answer lists statements": 5,
            "the question has several blanks or answers": 21,
            "the answer is in words": 2,
        },
        {},
    ),
    "kk": ("kk", {"train": 2700, "test": 300}, {}, {}),
    "geometry3k": ("geometry3k", {"train": 10}, {}, {}),
    "code": ("code/code_contests_test.json", {"test": 165}, {}, {}),
    "humaneval": ("code", {"test": 164}, {}, {}),
    "glaive-toolcall": ("tools", {"train": 300}, {}, {}),
    "messages": ("tools/reason_tool_use_demo_50.jsonl", {"train": 50}, {}, {}),
}
SLOW = {"gsm8k", "math", "kk", "gaokao", "humaneval"}


def manifest_rows(test_data: Path, files: list[Path]) -> int:
    entries = json.loads((test_data / "MANIFEST.json").read_text())
    rows = {entry["file"]: entry["rows"] for entry in entries}
    return sum(rows[str(file.relative_to(test_data))] for file in files)


def refused(dataset: Dataset, rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(found.reason for row in rows if (found := refusal(dataset, row)) is not None)


def written(dataset: Dataset, rows: list[dict[str, Any]], split: str, folder: Path) -> None:
    """Both kinds of rows go through parquet and come back the same."""
    rlhf = [row for i, raw in enumerate(rows) if (row := dataset.to_rlhf(raw, i, split)) is not None]
    assert bool(rlhf) == ("rlhf" in dataset.kinds)
    if rlhf:
        write_rows(folder / "rlhf.parquet", rlhf)
        prompts = read_prompts(folder / "rlhf.parquet")
        assert [prompt.ground_truth for prompt in prompts] == [row["reward_model"]["ground_truth"] for row in rlhf]
        assert [prompt.messages for prompt in prompts] == [row["prompt"] for row in rlhf]
        assert {prompt.data_source for prompt in prompts} <= set(dataset.data_sources)
        assert [row["extra_info"]["index"] for row in rlhf] == list(range(len(rows)))
    sft = [row for i, raw in enumerate(rows) if (row := dataset.to_sft(raw, i, split)) is not None]
    assert (
        sft or "sft" not in dataset.kinds or dataset.name in ("deepmath", "code")
    )  # their files here have no solution
    if sft:
        write_rows(folder / "sft.parquet", (sft_row(conversation) for conversation in sft))
        conversations = read_conversations(folder / "sft.parquet")
        assert [c.messages for c in conversations] == [c.messages for c in sft]
        assert [c.tools for c in conversations] == [c.tools for c in sft]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in SETS])
def test_every_gold_answer_passes_its_own_grader(test_data, tmp_path, name):
    folder, counts, passed_over, bad = SETS[name]
    dataset = DATASETS.get(name)()
    source = str(test_data / folder)
    assert list(dataset.available(source)) == list(counts)
    skipped: Counter[str] = Counter()
    found: Counter[str] = Counter()
    for split, count in counts.items():
        rows = list(dataset.rows(split, source))
        assert len(rows) == count
        skipped.update(dataset.skipped)
        reasons = refused(dataset, rows)
        assert sum(reasons.values()) <= 0.005 * count
        found += reasons
        good = [row for row in rows if refusal(dataset, row) is None] if reasons else rows
        written(dataset, good, split, tmp_path)
    assert skipped == passed_over
    assert found == bad
    files = list(dataset.source_files(source))
    if name == "geometry3k":
        assert len(files) == 10  # one problem a file; the manifest counts its keys
    else:
        assert manifest_rows(test_data, files) == sum(counts.values()) + sum(skipped.values())


@pytest.mark.slow
def test_mbpp(test_data, tmp_path):
    """One file holds all splits. Of 974 reference programs one defines `sum` and is not reached by its tests, and one
    needs about as long as a test may take."""
    dataset, source = DATASETS.get("mbpp")(), str(test_data / "code")
    assert list(dataset.available(source)) == ["train", "validation", "test", "prompt"]
    total = 0
    for split, count in dataset.size.items():
        rows = list(dataset.rows(split, source))
        assert len(rows) == count
        total += count
        bad = {row["task_id"] for row in rows if refusal(dataset, row) is not None}
        assert bad <= {123, 126}
        written(dataset, rows, split, tmp_path)
    assert manifest_rows(test_data, list(dataset.source_files(source))) == total


def test_every_set_tells_what_list_shows():
    for name in DATASETS.names():
        dataset = DATASETS.get(name)()
        assert dataset.name == name
        assert dataset.licence
        assert set(dataset.size) <= set(dataset.splits)
        assert dataset.kinds
        assert set(dataset.kinds) <= {"rlhf", "sft", "preference"}
        assert bool(dataset.grader) == bool(dataset.data_sources) == ("rlhf" in dataset.kinds)
    assert DATASETS.get("gaokao")().grader == "choice, math_verify"
    assert DATASETS.get("numina")().data_sources[0] == "numina_aops_forum"


def test_wrong_answers_are_refused(test_data):
    """The check is no formality: with another row's answer or program, a row is refused."""
    for name, folder, field in (("math500", "math", "answer"), ("mbpp", "code", "code"), ("kk", "kk", None)):
        dataset = DATASETS.get(name)()
        rows = list(dataset.rows("test", str(test_data / folder), n=40))
        if field is None:
            mixed = [{**row, "solution_text_format": row["solution_text_format"] + f"\n{row['quiz']}"} for row in rows]
            assert refused(dataset, mixed)["the grader cannot judge the gold answer"] > 0.8 * len(rows)
            continue
        mixed = [{**row, field: other[field]} for row, other in zip(rows, [*rows[1:], rows[0]], strict=True)]
        assert refused(dataset, mixed)[WRONG] > 0.8 * len(rows)


def test_prompts_ask_for_the_form_that_the_grader_reads(test_data):
    """A response that gives the answer as the prompt asks is right; the bare answer is not always."""
    for name, form in (
        ("aime24", "Answer: {}"),
        ("amc23", "Answer: {}"),
        ("math500", "\\boxed{{{}}}"),
        ("minerva", "\\boxed{{{}}}"),
        ("olympiadbench", "\\boxed{{{}}}"),
    ):
        dataset = DATASETS.get(name)()
        row = next(iter(dataset.rows("test", str(test_data / "math"))))
        rlhf = dataset.to_rlhf(row, 0, "test")
        assert rlhf is not None
        asked = rlhf["prompt"][-1]["content"]
        assert ("Answer:" in asked) == form.startswith("Answer")
        assert ("\\boxed{}" in asked) == form.startswith("\\boxed")
        gold = rlhf["reward_model"]["ground_truth"]
        assert compute_score(rlhf["data_source"], form.format(gold), gold).correct


def test_chinese_prompts(test_data):
    dataset = DATASETS.get("gaokao")()
    rows = list(dataset.rows("test", str(test_data / "chinese_math")))
    sources = Counter(dataset.to_rlhf(row, i, "test")["data_source"] for i, row in enumerate(rows))  # type: ignore[index]
    assert sources == {"gaokao_choice": 432, "gaokao_cloze": 257}
    golds = {str(dataset.to_rlhf(row, 0, "test")["reward_model"]["ground_truth"]) for row in rows}  # type: ignore[index]
    assert {"0.98", "\\frac{3}{10}", "-\\frac{3}{4}"} <= golds  # written "0. 98." and "$\\frac{3}{10} \\# \\# 0.3$"


def test_knights_and_knaves_prompts_hold_no_chat_marks(test_data):
    dataset = DATASETS.get("kk")()
    row = next(iter(dataset.rows("train", str(test_data / "kk" / "5ppl_train.parquet"))))
    rlhf = dataset.to_rlhf(row, 0, "train")
    assert rlhf is not None
    assert [message["role"] for message in rlhf["prompt"]] == ["system", "user"]
    assert "<|im_start|>" in row["prompt"][0]["content"]
    assert "<|im_start|>" not in str(rlhf["prompt"])
    # Word for word what Logic-RL asks, without its marks.
    assert rlhf["prompt"][0]["content"] in row["prompt"][0]["content"]
    assert rlhf["prompt"][1]["content"] in row["prompt"][0]["content"]
    assert rlhf["extra_info"]["people"] == 5


def test_images_are_kept_as_bytes(test_data, tmp_path):
    import pyarrow.parquet as pq

    dataset = DATASETS.get("geometry3k")()
    rows = list(dataset.rows("train", str(test_data / "geometry3k")))
    rlhf = [dataset.to_rlhf(row, i, "train") for i, row in enumerate(rows)]
    write_rows(tmp_path / "a.parquet", [row for row in rlhf if row is not None])
    back = pq.read_table(tmp_path / "a.parquet").to_pylist()
    figures = [(test_data / "geometry3k" / str(row["id"]) / "img_diagram.png").read_bytes() for row in rows]
    assert [row["images"] for row in back] == [[{"bytes": figure}] for figure in figures]
    assert all(row["prompt"][-1]["content"].count("<image>") == 1 for row in back)
    assert back[0]["reward_model"]["ground_truth"] == "80"  # the text of choice D


def test_tool_calls_of_glaive(test_data):
    dataset = DATASETS.get("glaive-toolcall")()
    source = str(test_data / "tools" / "glaive_toolcall_en_demo.json")
    rows = list(dataset.rows("train", source))
    conversations = [dataset.to_sft(row, i, "train") for i, row in enumerate(rows)]
    calls = [
        call["function"]
        for conversation in conversations
        if conversation is not None
        for message in conversation.messages
        for call in message.get("tool_calls", [])
    ]
    turns = [turn for row in rows for turn in row["conversations"]]
    assert calls == [json.loads(turn["value"]) for turn in turns if turn["from"] == "function_call"]


def test_typed_parts_and_text_only_conversations(test_data):
    dataset = DATASETS.get("messages")()
    rows = list(dataset.rows("train", str(test_data / "tools" / "reason_tool_use_demo_50.jsonl")))
    conversations = [dataset.to_sft(row, i, "train") for i, row in enumerate(rows)]
    messages = [message for c in conversations if c is not None for message in c.messages]
    parts = [part for row in rows for message in row["messages"] for part in message["content"]]
    count = Counter(part["type"] for part in parts)
    assert sum(len(message.get("tool_calls", [])) for message in messages) == count["tool_call"] == 68
    assert sum(bool(message.get("reasoning_content")) for message in messages) == count["reasoning"] == 112
    assert sum(bool(message["content"]) for message in messages) == count["text"]
    tora = list(dataset.rows("train", str(test_data / "tools" / "tora_examples.jsonl")))
    assert len(tora) == 30
    assert not refused(dataset, tora)
