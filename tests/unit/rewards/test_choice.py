"""Which letters a response chooses, and what is no ground truth of multiple choice."""

from __future__ import annotations

import pytest

from posttrain.core.types import Score
from posttrain.rewards import GRADERS
from posttrain.rewards.choice import chosen_letters, truth_letters


def grade(grader: str, response: str, truth: object) -> Score:
    return GRADERS.get(grader)(response, truth, {})


@pytest.mark.parametrize(
    ("response", "letters"),
    [
        (r"\boxed{B}", "B"),
        (r"\boxed{\text{B}}", "B"),
        (r"\boxed{\text{(B)}}", "B"),
        (r"\boxed{\textbf{(B)}\ 10}", "B"),
        (r"\boxed{B. 12}", "B"),
        (r"\boxed{\(B\)}", "B"),
        (r"\boxed{$A$, $\text{C}$}", "AC"),
        (r"\boxed{\(B > 0\)}", None),
        (r"\boxed{A, C}", "AC"),
        (r"\boxed{CA}", "AC"),
        (r"\boxed{A \text{ and } C}", "AC"),
        ("The answer is (B).", "B"),
        ("The answer is **B**", "B"),
        ("the answer is: B", "B"),
        ("Answer: $B$", "B"),
        ("The correct option is D because it is", "D"),
        ("So the answer is option C.", "C"),
        ("The correct answer is choice (B).", "B"),
        ("The answer is: **Option D**.", "D"),
        ("The answers are the options A and C.", "AC"),
        ("The answer is optional: A", None),
        ("The answer is option A good one", None),
        ("The answers are A and C.", "AC"),
        ("answer is A or B", "AB"),
        ("The answer is A. No, the answer is B.", "B"),
        ("答案是B", "B"),
        ("答案为:C.", "C"),
        ("因此,本题答案:(D)。", "D"),
        ("故选:B.", "B"),
        ("故选 A", "A"),
        ("应选D.", "D"),
        ("答案是ABD", "ABD"),
        ("答案是A、C", "AC"),
        ("答案是Ｂ", "B"),
        ("I reason.\n\nB", "B"),
        ("I reason.\n(B).", "B"),
        (r"The answer is \(B\).", "B"),
        (r"the correct answer is \(\text{B}\)", "B"),
        ("The answer is\n\\[\nB\n\\]", "B"),
        (r"故选\(\mathrm{B}\)", "B"),
        ("I reason.\n\\(B\\)", "B"),
        (r"I first thought the answer is A. But the answer is \(B\).", "B"),
        ("The answer is B, since option D fails.", "B"),
        ("We choose D at first. The answer is B.", "B"),
        ("答案是B,选项C错误", "B"),
        ("答案是B,不选C", "B"),
        ("答案是B,不应选C,也不能选D", "B"),
        ("正确选项是D", "D"),
        ("Answer: D\n\nExplanation: the others fail.", "D"),
        ("The answer is B\n\nHere is why: 3+4=7.", "B"),
        ("I first thought the answer is A. Now the answer is C\n\nBecause x > 0.", "C"),
        ("答案：B\nA不对", "B"),
        ("The answers are A, C and D", "ACD"),
        ("The answer is A good one", None),
        ("The answer is I think", None),
        ("The answer is 5", None),
        ("The answer is Bob", None),
        ("A is a letter", None),
        (r"\boxed{5}", None),
        (r"\boxed{5}. The answer is C", "C"),
        (r"\boxed{Bob}", None),
        ("", None),
        # Each letter with marks of its own.
        ("The answers are (A) and (C).", "AC"),
        ("answer is (A), (C)", "AC"),
        ("答案是(A)(C)", "AC"),
        ("Answer: **A** and **C**", "AC"),
        ("Answer: $A$ and $C$", "AC"),
        ("The answers are **(A)**, **(C)**, and **(D)**.", "ACD"),
        (r"The answer is \textbf{A} and \textbf{C}", "AC"),
        (r"\boxed{(A), (C)}", "AC"),
        (r"\boxed{A}, \boxed{C}", "AC"),
        (r"$\boxed{\text{A}}$ and $\boxed{\text{C}}$", "AC"),
        (r"\boxed{A}, not \boxed{C}", "C"),
        ("I reason.\nA) and C)", "AC"),
        ("I reason.\nA/C", "AC"),
        ("I reason.\nA+C", "AC"),
        ("The answer is A; C", "AC"),
        ("The answer is (A) I think", "A"),
        ("The answer is (B) apples", "B"),
        ("The answers are AB or C", "ABC"),
        # What is said of other letters after a comma.
        ("答案选A，B错", "A"),
        ("答案选A，B选项错误", "A"),
        ("答案是C，A、B都错", "C"),
        ("答案是A，C两项", "AC"),
        ("The answer is A, B is wrong", "A"),
        ("The answers are (A), (C) because x > 0", "AC"),
        ("The answer is A, AND only A", "A"),
    ],
)
def test_chosen_letters(response, letters):
    assert chosen_letters(response) == letters


@pytest.mark.parametrize(
    ("truth", "letters"),
    [("B", "B"), ("(B)", "B"), ("DBA", "ABD"), ("A, C", "AC"), (["D"], "D"), (["C", "A"], "AC"), ("B.", "B")],
)
def test_truth_letters(truth, letters):
    assert truth_letters(truth) == letters
    assert grade("choice", rf"\boxed{{{letters}}}", truth) == Score(1.0, True, extracted=letters)
    assert not grade("choice", r"\boxed{E}", truth).correct


@pytest.mark.parametrize("truth", ["", "K", "5", "AA", ["A", "A"], [], None, "Bob", ["A", "x"], 3])
def test_a_truth_that_is_no_choice_is_an_error(truth):
    with pytest.raises(ValueError, match="ground truth"):
        grade("choice", r"\boxed{A}", truth)


def test_several_letters_must_all_be_there():
    assert grade("choice", "答案是BD", "DB").correct
    for wrong in ("B", "ABD", "BC"):
        assert not grade("choice", f"答案是{wrong}", "BD").correct
