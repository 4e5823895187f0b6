r"""The graders that compare text: math, math_dapo, kk, and the boxes and normal forms they share."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.types import Score
from posttrain.rewards import GRADERS, compute_score
from posttrain.rewards.boxed import after, answer_phrase, last_boxed, nesting, truth_text
from posttrain.rewards.kk import truth_roles
from posttrain.rewards.math_dapo import minerva_form
from posttrain.rewards.normal_form import normal_form, same_answer, without_units


def grade(grader: str, response: str, truth: object, **extra: object) -> Score:
    return GRADERS.get(grader)(response, truth, extra)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\fbox{7}", "7"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed { 5 }", "5"),
        (r"\boxed 9$", "9"),
        (r"\boxed 12", "1"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{x\right.}", r"\left\{x\right."),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{}", ""),
        (r"\boxedtext{3}", None),
        (r"\boxed", None),
        ("42", None),
        ("", None),
    ],
)
def test_last_boxed(text, content):
    assert last_boxed(text) == content


def test_where_an_answer_stands():
    assert after("<think>1</think>2</think>3", "</think>") == "3"
    assert after("no mark", "</think>") is None
    assert answer_phrase("The answer is 5.\nThe Answer: **7**\nbye") == "7**"
    assert answer_phrase("the answers are 5") is None
    assert nesting("((1)+[2])") == 2
    assert nesting("(((") == 0
    assert nesting("1) (2) 3)") == 1


@pytest.mark.parametrize("truth", [None, "", "  ", [], {}, True, object()])
def test_a_ground_truth_that_is_no_text_is_an_error(truth):
    with pytest.raises(ValueError, match="ground truth"):
        truth_text(truth)
    for grader in ("math", "math_dapo", "prime_math", "math_verify", "geo3k"):
        with pytest.raises(ValueError, match="ground truth"):
            grade(grader, r"\boxed{1} Answer: 1", truth)


SAME = [
    (r"1\frac{1}{2}", "1 1/2"),
    (r"-5\frac34", r"-5\ 3/4\text{ cm}"),
    (r"\frac{1}{2}", r"\frac12"),
    (r"\frac{1}{2}", r"\dfrac{1}{2}"),
    (r"\frac{1}{2}", r"\tfrac1{2}"),
    (r"\frac{1}{2}", "1/2"),
    (r"\frac{1}{2}", "0.5"),
    (r"\frac{1}{2}", ".50"),
    (r"\frac{25}{2}", "12.5"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"-\frac{1}{2}", "-0.5"),
    (r"\frac{\pi}{2}", r"\frac\pi2"),
    (r"\frac{\sqrt{3}}{2}", r"\frac{\sqrt3}2"),
    ("5", "5.0"),
    ("1000", "1,000"),
    ("1000", r"1,\!000"),
    ("1000", "1{,}000"),
    ("25", "025"),
    ("10", r"\$10"),
    ("10", "$10$"),
    ("10", r"10\%"),
    ("45", r"45^\circ"),
    ("45", r"45^{\circ}"),
    ("45", "45°"),
    ("15", r"15\mbox{ cm}^2"),
    ("15", r"15 \text{ square feet}"),
    ("15", "15 cm^2"),
    ("15", "15 square units"),
    ("15", r"15\text{ m}"),
    ("60", r"60 \text{ miles per hour}"),
    ("5", "5个"),
    (r"\frac34", r"\frac{3}{4}\text{ 平方厘米}"),
    ("60", "60千米/小时"),
    ("-5", "−5"),
    ("C", r"\text{(C)}"),
    ("C", "(C)"),
    (r"\text{Evelyn}", "evelyn"),
    (r"1,2", r"1 \text{ and } 2"),
    (r"1,2", "1 or 2"),
    ("(3,4)", r"\left( 3, 4 \right)"),
    (r"[0,\infty)", r"[0,+\infty)"),
    (r"x \le 5", r"x\leq 5"),
    (r"x \ne 5", "x ≠ 5"),
    ("5", "x = 5"),
    ("2x+1", "f(x) = 2x + 1"),
    ("12", "AB=12"),
    (r"(0,1)", r"x \in (0,1)"),
    (r"11\sqrt{2}", r"11\sqrt2"),
    (r"2\pi", "2π"),
    ("10_2", "10_{2}"),
    ("x^{2}", "x^2"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    ("5.", "5"),
    (r"\\frac{1}{2}", r"\frac{1}{2}"),
    (r"\emptyset", r"\varnothing"),
    (r"\emptyset", "∅"),
]

DIFFERENT = [
    (r"\frac{11}{2}", "1 1/2"),
    ("53/4", "5~3/4 cm"),
    ("1", "2"),
    ("12", "1,2"),
    ("1", "-1"),
    (r"\frac{1}{2}", r"\frac{2}{1}"),
    (r"\frac{1}{2}", r"\frac{2}{4}"),
    (r"\frac{1}{12}", r"\frac{11}{2}"),
    ("0.5", "5"),
    ("0.05", "0.5"),
    ("1.5", "1.05"),
    ("5", "5x"),
    ("5", "5m"),
    ("5", r"5\text{ million}"),
    ("5", r"5\text{ dozen}"),
    ("5", "5 thousand"),
    *(("5", f"5{more}") for more in ("万", "万人", "千", "亿元", "个以上", "个半", "折", "分之一", "米8")),
    ("x=5", "y=5"),
    ("x=5", "x=6"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", "(1,2]"),
    ("x < 5", r"x \le 5"),
    ("x > 5", "x < 5"),
    ("10_2", "10_3"),
    ("x^2", "x_2"),
    ("A", "B"),
    ("Monday", "Sunday"),
    ("4:30 p.m.", "4:30 a.m."),
    (r"\sqrt{2}", r"\sqrt{3}"),
    (r"\sqrt{2}3", r"\sqrt{23}"),
    (r"\sin x", r"\cos x"),
    (r"\infty", r"-\infty"),
    (r"2\pi", "2"),
    (r"1+\sqrt{2}", r"1-\sqrt{2}"),
    ("", ""),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_same_answers(one, other):
    assert same_answer(one, other)
    assert same_answer(other, one)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_answers(one, other):
    assert not same_answer(one, other)
    assert not same_answer(other, one)


@given(st.integers(-(10**15), 10**15), st.integers(-(10**15), 10**15))
def test_integers_are_the_same_when_they_are_equal(a, b):
    assert same_answer(str(a), str(b)) == (a == b)
    assert same_answer(f"{a:,}", str(a))
    assert same_answer(rf"\${a}", f"{a}.00")


@given(st.integers(-999, 999), st.integers(1, 999), st.integers(-999, 999), st.integers(1, 999))
def test_fractions_are_compared_term_by_term(a, b, c, d):
    assert same_answer(f"{a}/{b}", rf"\dfrac{{{a}}}{{{b}}}")
    if a * d != c * b:
        assert not same_answer(rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{c}}}{{{d}}}")


def test_a_very_long_answer_is_compared_as_it_stands():
    text = "1 + " * 1000 + "1"
    assert same_answer(text, text + " ")
    assert not same_answer(text, text.replace(" ", ""))
    assert normal_form(text) == text


def test_units_are_taken_from_the_end_only():
    assert without_units(r"5\text{ cm}") == "5"
    assert without_units("5 miles per hour") == "5"
    assert without_units("2t") == "2t"
    assert without_units(r"\text{ cm}") == ""
    assert without_units(r"5\text{ apples}") == r"5\text{ apples}"


@pytest.mark.parametrize(
    ("response", "truth", "correct", "extracted"),
    [
        (r"Thus $\boxed{\frac12}$.", r"\frac{1}{2}", True, r"\frac12"),
        (r"Thus $\boxed{2}$, no, $\boxed{3}$.", "3", True, "3"),
        (r"Thus $\boxed{3}$, no, $\boxed{2}$.", "3", False, "2"),
        (r"\boxed{3}", r"As shown, it is $\boxed{3}$.", True, "3"),
        (r"\boxed{3}", 3, True, "3"),
        ("It is 3.", "3", False, None),
        (r"It is \boxed{}.", "3", False, None),
        ("", "3", False, None),
    ],
)
def test_math(response, truth, correct, extracted):
    score = grade("math", response, truth)
    assert (score.correct, score.score, score.extracted) == (correct, float(correct), extracted)


def test_math_refuses_a_solution_with_an_empty_box():
    with pytest.raises(ValueError, match="empty box"):
        grade("math", r"\boxed{1}", r"so \boxed{}")
    assert compute_score("lighteval/MATH", r"\boxed{1}", r"so \boxed{}").error


@pytest.mark.parametrize(
    ("response", "truth", "correct", "extracted"),
    [
        ("Answer: 42", "42", True, "42"),
        ("So\n\nAnswer: $42$.", "42", True, "$42$."),
        (r"Answer: \boxed{42}", "42", True, "42"),
        (r"Answer: \boxed{42}<|im_end|>", "42", True, "42"),
        ("**Answer:** 42", "42", True, "42"),
        ("Answer: x = 42", "42", True, "x = 42"),
        ("answer: 042", "42", True, "042"),
        ("Answer: 25", "025", True, "25"),
        ("Answer: 1,024", "1024", True, "1,024"),
        ("Answer: 1\nAnswer: 2", "2", True, "2"),
        ("Answer: 2\nAnswer: 1", "2", False, "1"),
        ("Answer: 42 or 43", "42", False, "42 or 43"),
        (r"Answer: \boxed{0.5}", r"\frac{1}{2}", False, "0.5"),
        (r"\boxed{42}", "42", False, None),
        ("Answer:", "42", False, None),
        ("Answer: 42" + " and so on" * 40, "42", False, None),
        ("", "42", False, None),
    ],
)
def test_math_dapo(response, truth, correct, extracted):
    score = grade("math_dapo", response, truth)
    assert (score.correct, score.score, score.extracted) == (correct, 1.0 if correct else -1.0, extracted)


def test_math_dapo_with_a_strict_box():
    strict = {"strict_box_verify": True}
    assert grade("math_dapo", r"so \boxed{42}", "42", **strict).correct
    assert not grade("math_dapo", "Answer: 42", "42", **strict).correct
    assert not grade("math_dapo", r"\boxed{42}" + " " * 100, "42", **strict).correct
    assert grade("math_dapo", "Answer: 42", "42", **strict).extracted is None


def test_minerva_form():
    assert minerva_form(r"\boxed{12 \text{ cm}}") == "12"
    assert minerva_form("-007") == "-7"
    assert minerva_form("0.5") != minerva_form(r"\frac12")
    with pytest.raises(ValueError, match="nothing to compare"):
        grade("math_dapo", "Answer: 1", "$$")


TRUTH = {"solution_text_format": "(1) Ann is a knight\n(2) Bob is a knave\n(3) Cid is a knave", "statements": "()"}


@pytest.mark.parametrize(
    ("response", "right", "extracted"),
    [
        ("<answer>(1) Ann is a knight\n(2) Bob is a knave\n(3) Cid is a knave</answer>", 3, True),
        ("<think>Ann is a knave?</think><answer>Ann is a knight, Bob is a knave, Cid is a knave", 3, True),
        ("Let Ann be a knave.\n\nAnn is a knight, Bob is a knave, and Cid is a knave.", 3, True),
        ("Bob is a knight?\n\nCONCLUSION:\n(1) Ann is a knight\n\n(2) Bob is a knave\n(3) Cid is a knave", 3, True),
        ("**Ann** is a **knight**; Bob: knave; CID = Knave", 3, True),
        ("Ann is a knight, Bob is not a knight, Cid isn't a knight.", 3, True),
        ("<answer>Cid is a knave. Bob is a knave. Ann is a knight.</answer>", 3, True),
        ("<answer>Ann is a knight, Bob is a knight, Cid is a knave</answer>", 2, True),
        ("<answer>Ann is a knave, Bob is a knight, Cid is a knight</answer>", 0, True),
        ("<answer>Ann is a knight, Bob is a knave</answer>", 2, True),
        ("<answer>Ann is a knight, Bob is a knave, Cid is a knave, Cid is a knight</answer>", 2, True),
        ("Ann is a knight, Bob isn\u2019t a knight, Cid isn\u2019t a knight.", 3, True),
        ("Ann is a knight or a knave, Bob is a knave, Cid is a knave", 2, True),
        ("Ann: knight/knave, Bob: **knave** / **knight**, Cid is a knave (or maybe a knight)", 0, True),
        ("<answer>all are knaves</answer> Ann is a knight, Bob is a knave, Cid is a knave", 0, False),
        ("Ann is a knight, Bob is a knave, Cid is a knave.\n\nI hope this helps.", 0, False),
        ("Joann is a knight, Bobby is a knave, Cidney is a knave", 0, False),
        ("", 0, False),
    ],
)
def test_kk(response, right, extracted):
    score = grade("kk", response, TRUTH)
    assert score.parts == {"people": right / 3}
    assert (score.correct, score.score) == (right == 3, float(right == 3))
    assert (score.extracted is not None) == extracted
    assert grade("kk", response, TRUTH["solution_text_format"]) == score


@pytest.mark.parametrize("truth", [None, "", "who knows", {}, {"statements": "()"}, "Al is a knight, Al is a knave", 3])
def test_kk_truths_that_say_nothing(truth):
    with pytest.raises(ValueError, match="does not say"):
        truth_roles(truth)


def test_which_graders_may_run_in_process():
    cheap = {name for name in GRADERS.names() if getattr(GRADERS.get(name), "cheap", False)}
    assert cheap >= {"gsm8k", "math", "math_dapo", "choice", "kk"}
    assert not cheap & {"math_verify", "prime_math", "geo3k"}


LONG = 100_000
HOSTILE = {
    "nested braces": r"\boxed{" + "{" * 10_000 + "5" + "}" * 10_000 + "}",
    "boxes that do not close": r"\boxed{" * 14_000,
    "boxes": r"\boxed{5}" * 10_000,
    "opening braces": "{" * LONG,
    "a tower": r"\boxed{9**9**9**9}",
    "a tower as LaTeX": "Answer: 9^{9^{9^9}}",
    "digits": r"\boxed{" + "9" * LONG + "}",
    "digits after a mark": "#### " + "9" * LONG,
    "spaces after a letter": "A" + " " * LONG + "x",
    "spaces in a box": r"\boxed{A" + " " * LONG + "x}",
    "spaces after answer": "answer" + " " * LONG + "is" + " " * LONG + "x",
    "answers": "the answer is " * 7_000,
    "answer lines": "answer:" * 15_000,
    "letters": "A" * LONG,
    "letters in a row": "A, " * 33_000,
    "letters with and": "A and " * 16_000,
    "fractions": r"\boxed{" + r"\frac" * 390 + "}",
    "open fractions": r"\boxed{" + r"\frac{" * 300 + "}" * 301,
    "open texts": r"\boxed{" + r"\text{" * 320 + "}" * 321,
    "units": r"\boxed{" + "5 square " * 220 + "}",
    "Chinese units": r"\boxed{" + "5" + "个米" * 990 + "x}",
    "commas": r"\boxed{" + "1," * 999 + "}",
    "spaces up to the longest answer": r"\boxed{5" + " " * 1_980 + "x}",
    "names": "a" * LONG,
    "roles": "is a " * 20_000,
    "people": "Ann is a knight " * 6_000,
    "colons": "a: " * 33_000,
    "Chinese": "答案选" * 33_000,
    "stars": "*" * LONG,
    "stars after a name": "Ann is " + "*" * LONG,
    "marked letters": "answer is " + "**A**, (C) " * 10_000 + "x",
    "boxes of letters": r"\boxed{A}, " * 10_000 + "x",
    "backslashes": "\\" * LONG,
    "dollars": "$" * LONG,
    "lines": "\n" * LONG,
    "tags": "<answer>" * 12_000,
}
TRUTHS = {"gsm8k": "7", "math": "7", "math_dapo": "7", "choice": "B", "kk": "Zoe is a knight"}


@pytest.mark.parametrize("bait", HOSTILE)
@pytest.mark.parametrize("grader", TRUTHS)
def test_hostile_responses_are_graded_fast_and_wrong(grader, bait):
    started = time.process_time()
    for extra in ({}, {"method": "flexible", "strict_box_verify": True}):
        assert not grade(grader, HOSTILE[bait], TRUTHS[grader], **extra).correct
    assert time.process_time() - started < 5
