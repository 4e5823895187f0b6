"""13-gram overlap of prompts: against a plain nested loop, and on real data."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.prep.decontaminate import NGRAM, EvalSet, PromptText, asked, words

LONG = "A train leaves the station at nine and travels sixty miles each hour until it stops at noon"


def plain(text: str) -> PromptText:
    return PromptText(words(text), " ".join(words(text)))


def overlaps(train: list[str], test: list[str]) -> list[tuple[int, int]]:
    return [(o.row, o.eval_row) for o in EvalSet([plain(t) for t in test]).overlaps([plain(t) for t in train])]


def test_words_are_normalised() -> None:
    assert words("Don't  PANIC—it's 3.5%, \\frac{１}{2}!") == [
        "don",
        "t",
        "panic",
        "it",
        "s",
        "3",
        "5",
        "frac",
        "1",
        "2",
    ]
    assert words("小明有3个苹果，吃了1个。") == ["小", "明", "有", "3", "个", "苹", "果", "吃", "了", "1", "个"]
    assert words("") == words("$ -- !") == []


@given(st.text(st.characters(max_codepoint=127)))
def test_words_of_ascii_text_are_those_of_any_text(text: str) -> None:
    assert [*words(text), "é"] == words(f"{text} é")


def test_the_same_question_in_other_words_of_punctuation() -> None:
    assert overlaps([f"{LONG.upper()}!! How far, then?"], [f"({LONG.replace(' ', '  ')})"]) == [(0, 0)]


def test_thirteen_words_overlap_and_twelve_do_not() -> None:
    split = LONG.split()
    assert overlaps([" ".join(["Once", *split[:NGRAM], "it", "stopped"])], [LONG]) == [(0, 0)]
    assert overlaps([" ".join(["Once", *split[: NGRAM - 1], "ended", "there"])], [LONG]) == []


def test_short_prompts_overlap_only_when_they_are_the_same() -> None:
    assert overlaps(["Compute sin 60!", "Compute sin 60 plus 1", "", "Compute"], ["compute: sin(60)", ""]) == [(0, 0)]


def test_a_run_of_words_over_two_prompts_is_no_overlap() -> None:
    split = LONG.split()
    assert overlaps([" ".join(split[:7]), " ".join(split[7:])], [LONG]) == []
    assert overlaps([LONG], [" ".join(split[:7]), " ".join(split[7:])]) == []


def test_nothing_to_compare() -> None:
    assert overlaps([], [LONG]) == overlaps([LONG], []) == overlaps(["a"], ["b"]) == []


def test_instructions_that_all_prompts_share_do_not_count() -> None:
    instruction = "Let's think step by step and output the final answer within \\boxed{}."
    train = [f"Solve this. How many are {i} and {i} {instruction}" for i in range(8)]
    test = [f"Solve this. Find {i} of {i} where x is prime. {instruction}" for i in range(100, 106)]
    everything = EvalSet([plain(t) for t in test]).overlaps([plain(t) for t in train])
    assert len(everything) == 8  # the instruction itself has more than 13 words
    kept = EvalSet(asked(test, ["t"] * 6)).overlaps(asked(train, ["a"] * 8))
    assert kept == []
    own = asked([train[0], *test], ["a", *["t"] * 6])
    assert own[0].own == words(train[0])  # one prompt alone has no instruction to tell
    assert own[1].own == ["100", "of", "100"]
    # What is left is short, and yet a copy is found: beside its instruction, and without it.
    copies = EvalSet(asked(train, ["a"] * 8)).overlaps(asked([train[3], "4 and 4"], ["b", "b"]))
    assert [(o.row, o.eval_row) for o in copies] == [(0, 3), (1, 4)]


def test_an_instruction_within_the_prompts_counts_as_one_word() -> None:
    middle = "your code should pass these tests python assert"
    tasks = ["sort it", "add both", "reverse each word of a given list", "count", "join two", "find it"]
    train = [f"{task} {middle} {task[:3]} {number}" for number, task in enumerate(tasks)]
    test = [text.replace("reverse each", "drop a").replace("it", "them").replace("both", "all") for text in train]
    found = asked(train, ["a"] * 6)
    assert found[2][:2] == plain(train[2])[:2]
    overlapping = lambda index, prompts: [(o.row, o.eval_row) for o in EvalSet(index).overlaps(prompts)]  # noqa: E731
    # They share 13 words in a row and more, of which eight are the instruction.
    assert (2, 2) in overlapping([plain(t) for t in test], [plain(t) for t in train])
    assert (2, 2) not in overlapping(asked(test, ["b"] * 6), found)
    # Where the other side has no such instruction, it may be a part of the problem.
    assert overlapping(asked(test[2:3], ["c"]), found) == [(2, 0)]
    assert overlapping(found, asked([train[2]], ["c"])) == [(0, 2)]


def test_mbpp_is_not_its_own_test_set_by_its_instruction(test_data: Path) -> None:
    """Ten words stand between each task and its tests."""
    rows = list(map(json.loads, (test_data / "code" / "mbpp.jsonl").read_text().splitlines()))
    prompts = [f"{row['text']} Your code should pass these tests: {' '.join(row['test_list'])}" for row in rows]
    sets = [prompts[600:], prompts[10:510]]
    train, test = (asked(texts, ["m"] * len(texts)) for texts in sets)
    without = [asked([t.replace("Your code should pass these tests: assert", "") for t in texts], ["m"] * len(texts))
               for texts in sets]  # fmt: skip
    rows_of = lambda index, prompts: {o.row for o in EvalSet(index).overlaps(prompts)}  # noqa: E731
    assert len(rows_of(test, train)) <= len(rows_of(without[1], without[0])) + 3
    assert len(rows_of(test, test)) == len(test)


def test_equal_prompts_are_not_taken_for_an_instruction() -> None:
    assert asked([LONG] * 9, ["a"] * 9) == [plain(LONG)] * 9


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.sampled_from("abc"), max_size=20), max_size=6), st.data())
def test_it_finds_what_a_nested_loop_finds(test: list[list[str]], data: st.DataObject) -> None:
    pieces = st.one_of(st.lists(st.sampled_from("abcd"), max_size=20), st.sampled_from(test or [[]]))
    train = [
        [w for part in parts for w in part] for parts in data.draw(st.lists(st.lists(pieces, max_size=3), max_size=6))
    ]

    def grams(prompt: list[str]) -> set[tuple[str, ...]]:
        return {tuple(prompt[i : i + NGRAM]) for i in range(len(prompt) - NGRAM + 1)}

    expected = {
        row: {
            j
            for j, other in enumerate(test)
            if grams(prompt) & grams(other) or (prompt == other != [] and not grams(other))
        }
        for row, prompt in enumerate(train)
    }
    found = {
        o.row: o
        for o in EvalSet(list(map(plain, map(" ".join, test)))).overlaps(list(map(plain, map(" ".join, train))))
    }
    assert set(found) == {row for row, others in expected.items() if others}
    assert all(o.eval_row in expected[row] for row, o in found.items())


def test_gsm8k_against_itself_and_in_time(test_data) -> None:  # type: ignore[no-untyped-def]
    read = lambda split: [  # noqa: E731
        json.loads(line)["question"] for line in (test_data / "gsm8k" / f"{split}.jsonl").read_text().splitlines()
    ]
    train, test = read("train"), read("test")
    started = time.process_time()
    index = EvalSet(asked(test, ["g"] * len(test)))
    between = index.overlaps(asked(train, ["g"] * len(train)))
    seconds = time.process_time() - started
    # A few questions of the test set have a twin in the train set, with other numbers or with another last sentence.
    assert 0 < len(between) < 0.01 * len(train)
    assert len(index.overlaps(asked(test, ["g"] * len(test)))) == len(test)
    assert seconds < 3


@pytest.mark.parametrize("name", ["math500", "aime24", "amc23"])
def test_a_copied_problem_is_found(test_data, name: str) -> None:  # type: ignore[no-untyped-def]
    lines = (test_data / "math" / f"{name}.jsonl").read_text().splitlines()
    problems = [row.get("problem") or row["question"] for row in map(json.loads, lines)]
    index = EvalSet(asked(problems, ["m"] * len(problems)))
    copied = [f"Solve: {problem} Explain." for problem in problems if len(words(problem)) >= NGRAM]
    assert len(copied) > 20
    assert len(index.overlaps([plain(text) for text in copied])) == len(copied)
