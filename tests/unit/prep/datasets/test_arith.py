import re

import pytest

from posttrain.core.errors import DataError
from posttrain.prep.datasets.arith import ITEMS, NAMES, TEMPLATES, Arith, ArithSpec, generate, split_of

WIDE = ArithSpec(max_operand=20, max_result=400, steps=(1, 2))
"""Every template, and many more problems than the default difficulty has."""
TEXT = {t.name: t for t in TEMPLATES}


def problem(question: str) -> tuple[str, tuple[int, ...]]:
    """(question without names and items, numbers): the problem itself, read back from the words."""
    bare = re.sub(r"\b(" + "|".join(NAMES) + r")\b", "N", question)
    bare = re.sub(r"\b(" + "|".join(ITEMS) + r")\b", "I", bare)
    return re.sub(r"\d+", "#", bare), tuple(int(n) for n in re.findall(r"\d+", question))


def test_train_and_test_share_no_problem_and_repeat_no_question():
    train = list(generate("train", 4000, seed=1, spec=WIDE))
    test = list(generate("test", 1000, seed=2, spec=WIDE))
    train_problems = [problem(r["question"]) for r in train]
    test_problems = [problem(r["question"]) for r in test]
    assert len(set(train_problems)) == 4000
    assert len(set(test_problems)) == 1000
    assert not set(train_problems) & set(test_problems)
    assert len({template for template, _ in train_problems}) == len(TEMPLATES)


def test_every_answer_is_right_and_annotated():
    for row in generate("train", 2000, seed=3, spec=WIDE):
        steps = re.findall(r"^(\d+)([-+*])(\d+)=<<\1\2\3=(\d+)>>\4\.$", row["answer"], re.MULTILINE)
        assert len(steps) == row["answer"].count("\n")
        for left, op, right, result in steps:
            value = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[op]
            assert value == int(result) >= 0
        assert row["answer"].splitlines()[-1] == f"#### {steps[-1][3]}"
        # The first step starts with the question's first number, each later one with the result before it.
        numbers = re.findall(r"\d+", row["question"])
        assert steps[0][0] == numbers[0]
        assert [s[2] for s in steps] == numbers[1:]
        assert [s[0] for s in steps[1:]] == [s[3] for s in steps[:-1]]


def test_same_seed_same_rows_other_seed_other_rows():
    first = list(generate("train", 50, seed=7))
    assert first == list(generate("train", 50, seed=7))
    assert first != list(generate("train", 50, seed=8))


def test_the_split_of_a_problem_is_fixed_for_ever():
    # Literal values: a change here would leak held-out problems into models trained before it.
    assert [a for a in range(2, 22) if split_of(TEXT["buy"], (a, 3)) == "test"] == [2, 14, 15, 17, 19, 21]
    share = sum(split_of(TEXT["week"], (a, b, 5)) == "test" for a in range(50) for b in range(50)) / 2500
    assert 0.17 < share < 0.23


def test_more_rows_than_problems_is_an_error_before_the_first_row():
    spec = ArithSpec(max_operand=5, steps=(1,), templates=("buy",))
    with pytest.raises(DataError, match="has only") as error:
        generate("train", 17, spec=spec)
    available = int(re.search(r"only (\d+)", str(error.value)).group(1))
    assert error.value.hint
    assert available + int(re.search(r"only (\d+)", _error("test", spec)).group(1)) == 16  # operands 2..5, two of them
    assert len(list(generate("train", available, spec=spec))) == available


def _error(split: str, spec: ArithSpec) -> str:
    with pytest.raises(DataError) as error:
        generate(split, 17, spec=spec)
    return str(error.value)


@pytest.mark.parametrize(
    "spec", [ArithSpec(max_operand=51), ArithSpec(max_operand=1), ArithSpec(steps=(3,)), ArithSpec(templates=("buyy",))]
)
def test_bad_spec(spec):
    with pytest.raises(DataError) as error:
        generate("train", 1, spec=spec)
    assert error.value.hint


def test_difficulty_is_respected():
    rows = list(generate("train", 200, max_operand=9, steps=(1,)))
    assert all(row["answer"].count("<<") == 1 for row in rows)
    assert all(2 <= int(n) <= 9 for row in rows for n in re.findall(r"\d+", row["question"]))


def test_dataset_rows_and_prompt():
    dataset = Arith()
    assert [len(list(dataset.rows(split, None))) for split in ("train", "test")] == [1700, 200]
    row = next(dataset.rows("test", None, n=1))
    assert dataset.check(row).correct
    assert dataset.to_rlhf(row, 0, "test")["prompt"] == [{"role": "user", "content": row["question"]}]
    with pytest.raises(DataError, match="generated"):
        dataset.available("somewhere")


def test_hasty_demonstrations_stop_a_step_early_and_submit_what_they_have():
    dataset = Arith(hasty_share=0.5)
    rows = list(dataset.rows("train", None, n=400))
    hasty = 0
    for row in rows:
        conversation = dataset.to_sft(row, 0, "train")
        turn, result, close = conversation.messages[-3:]
        answer = turn["tool_calls"][0]["function"]["arguments"]["answer"]
        assert close["content"] == f"#### {answer}"
        # What the tool says is what it would say in an episode.
        assert result["content"] == f"answer={answer} reward={float(answer == dataset.gold(row)):.1f}"
        assert turn["content"].endswith(f"={answer}.")
        hasty += turn["content"].count("\n") == 0
    assert 150 < hasty < 250
    assert all(dataset.to_sft(row, 0, "test").messages[-3]["content"].count("\n") == 1 for row in rows)
    assert all(Arith(hasty_share=0.0).to_sft(row, 0, "train").messages[-3]["content"].count("\n") for row in rows)


def test_largest_result_is_respected():
    rows = list(generate("train", 300, spec=ArithSpec(max_result=9)))
    results = [int(n) for row in rows for n in re.findall(r"=(\d+)>>", row["answer"])]
    assert max(results) == 9
