r"""Real gold answers: each grader accepts its own, and refuses wrong ones made from them."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.rewards import GRADERS
from posttrain.rewards.boxed import last_boxed
from posttrain.rewards.gsm8k import parse_number
from posttrain.rewards.kk import truth_roles


def jsonl(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def verdicts(grader: str, pairs: Iterable[tuple[str, Any]]) -> Counter[str]:
    """How many (response, ground truth) pairs are "right", "wrong" or an "error"."""
    grade = GRADERS.get(grader)
    counts: Counter[str] = Counter()
    for response, truth in pairs:
        try:
            counts["right" if grade(response, truth, {}).correct else "wrong"] += 1
        except ValueError:
            counts["error"] += 1
    return counts


def mutants(answer: str, rng: random.Random) -> Iterator[str]:
    """The answer with one digit changed, and with its sign flipped. Zero keeps its value, so that it keeps its sign."""
    digits = [match.start() for match in re.finditer(r"\d", answer)]
    if digits:
        at = rng.choice(digits)
        yield answer[:at] + rng.choice("0123456789".replace(answer[at], "")) + answer[at + 1 :]
    if not re.match(r"-?\s*0(?!\.)", answer):
        yield answer[1:] if answer.startswith("-") else "-" + answer


def test_gsm8k(test_data):
    rows = [row for split in ("train", "test") for row in jsonl(test_data / "gsm8k" / f"{split}.jsonl")]
    golds = [(row["answer"], row["answer"].rpartition("####")[2].strip()) for row in rows]
    assert verdicts("gsm8k", golds) == {"right": 8792}
    rng = random.Random(0)
    wrong = [
        (f"#### {mutant}", gold)
        for _, gold in golds
        for mutant in mutants(gold, rng)
        if parse_number(mutant) != parse_number(gold)
    ]
    assert len(wrong) > 17_000
    assert verdicts("gsm8k", wrong) == {"wrong": len(wrong)}


def math_rows(test_data: Path) -> list[dict[str, Any]]:
    return [row for split in ("train", "test") for row in jsonl(test_data / "math" / f"math_{split}.jsonl")]


@pytest.mark.slow
def test_math(test_data):
    rows = math_rows(test_data)
    empty = [row for row in rows if not last_boxed(row["solution"])]
    assert len(rows) == 12_500
    assert len(empty) == 2  # the data itself has "\boxed{}" there
    golds = [(row["solution"], last_boxed(row["solution"])) for row in rows if last_boxed(row["solution"])]
    assert verdicts("math", golds) == {"right": 12_498}
    assert verdicts("math", [(solution, solution) for solution, _ in golds]) == {"right": 12_498}
    rng = random.Random(0)
    wrong = [(rf"\boxed{{{mutant}}}", gold) for _, gold in golds for mutant in mutants(gold, rng)]
    counts = verdicts("math", wrong)
    assert counts["wrong"] >= 0.999 * len(wrong), counts


def test_math500_answers_were_written_apart_from_their_solutions(test_data):
    rows = jsonl(test_data / "math" / "math500.jsonl")
    assert verdicts("math", [(row["solution"], row["answer"]) for row in rows]) == {"right": 500}


@pytest.mark.slow
@pytest.mark.parametrize("grader", ["math_verify", "prime_math"])
def test_math_by_value(test_data, grader):
    rng = random.Random(0)
    solutions = [row["solution"] for row in rng.sample(math_rows(test_data), 1000)]
    golds = [(solution, last_boxed(solution)) for solution in solutions if last_boxed(solution)]
    counts = verdicts(grader, golds)
    assert counts["right"] >= 0.995 * len(golds), counts
    wrong = [(rf"\boxed{{{mutant}}}", gold) for _, gold in golds for mutant in mutants(gold, rng)]
    counts = verdicts(grader, wrong)
    assert counts["right"] <= 0.001 * len(wrong), counts


def test_knights_and_knaves(test_data):
    import pyarrow.parquet as pq

    rows = [row for file in sorted((test_data / "kk").glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
    assert len(rows) == 3000
    right: list[tuple[str, Any]] = []
    wrong: list[tuple[str, Any]] = []
    for row in rows:
        truth, text = row["reward_model"]["ground_truth"], row["solution_text"]
        people = list(zip(row["names"], row["solution"], strict=True))
        assert truth_roles(truth) == {name.lower(): "knight" if knight else "knave" for name, knight in people}
        right += [(text, truth), (f"<think>Hm.</think><answer>{row['solution_text_format']}</answer>", truth)]
        for name, knight in people:
            role, other = ("knight", "knave") if knight else ("knave", "knight")
            said = f"{name} is a {role}"
            assert said in text
            wrong += [
                (text.replace(said, f"{name} is a {other}"), truth),
                (text.replace(said, f"I like {name}"), truth),
                (f"{text} {name} is a {other}.", truth),
            ]
    assert verdicts("kk", right) == {"right": 6000}
    assert verdicts("kk", wrong) == {"wrong": 45_000}


def gaokao(test_data: Path, kind: str) -> list[dict[str, Any]]:
    files = sorted((test_data / "chinese_math").glob(f"gaokao_2010-2022_Math_*_{kind}.json"))
    return [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["example"]]


def test_gaokao_choices(test_data):
    rows = gaokao(test_data, "MCQs")
    assert len(rows) == 432
    for form in (r"\boxed{%s}", "答案是%s。", "The answer is (%s).", "想了很久。\n%s"):
        assert verdicts("choice", [(form % row["answer"][0], row["answer"]) for row in rows]) == {"right": 432}
        letters = [(form % letter, row["answer"]) for row in rows for letter in "ABCD" if [letter] != row["answer"]]
        assert verdicts("choice", letters) == {"wrong": 3 * 432}
    # 9 of the worked solutions do not say a letter at their end.
    assert verdicts("choice", [(row["analysis"], row["answer"]) for row in rows]) == {"right": 423, "wrong": 9}


SETS: dict[str, tuple[int, int]] = {
    # name: (answers, most that may be an error: answers that are not one formula, or that the library cannot parse)
    "aime24": (30, 0),
    "aime25": (30, 0),
    "amc23": (40, 0),
    "minerva": (272, 8),
    "olympiadbench": (675, 4),
    "deepmath": (4994, 62),
    "cmath": (600, 0),
    "gaokao_cloze": (118, 8),
}


def answers(test_data: Path, name: str) -> list[str]:
    math, chinese = test_data / "math", test_data / "chinese_math"
    match name:
        case "aime24" | "amc23":
            return [str(row["answer"]) for row in jsonl(math / f"{name}.jsonl")]
        case "aime25":
            return [row["output"] for row in jsonl(math / "aime25.jsonl")]
        case "minerva":
            return [last_boxed(row["solution"]) or "" for row in jsonl(math / "minerva_math.jsonl")]
        case "olympiadbench":
            return [row["final_answer"][0] for row in jsonl(math / "olympiadbench.jsonl")]
        case "deepmath":
            return [row["ground_truth"] for row in jsonl(test_data / "math_rl" / "deepmath_5k.jsonl")]
        case "cmath":
            return [row["answer"] for row in jsonl(chinese / "cmath_test.jsonl")]
    return [row["answer"] for row in jsonl(chinese / "gaokao_math_cloze.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_other_sets_by_value(test_data, name):
    """Each answer in a box is right, or its ground truth is an error; none is silently wrong."""
    golds = answers(test_data, name)
    count, errors = SETS[name]
    pairs = [(f"Thus the answer is \\boxed{{{gold.strip().strip('$')}}}.", gold) for gold in golds]
    counts = verdicts("math_verify", pairs)
    assert counts["wrong"] == 0
    assert counts["error"] <= errors
    assert sum(counts.values()) == count


def test_aime_answers_by_their_line(test_data):
    for name in ("aime24", "aime25", "amc23"):
        golds = answers(test_data, name)
        assert verdicts("math_dapo", [(f"Answer: {gold}", gold) for gold in golds]) == {"right": len(golds)}
        rng = random.Random(0)
        wrong = [(f"Answer: {mutant}", gold) for gold in golds for mutant in mutants(gold, rng)]
        assert verdicts("math_dapo", wrong) == {"wrong": len(wrong)}
