"""The calculator: what it works out, and what it refuses at once."""

import asyncio
import math
import operator
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import ConfigError
from posttrain.tools import TOOLS
from posttrain.tools.calculator import CalculatorError, calculate
from posttrain.tools.sets import open_tools


def ask(arguments, **options):
    return asyncio.run(TOOLS.get("calculator")(**options).call(None, arguments))


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4", "20"),
        ("-2 ** 2", "-4"),
        ("+-+3", "-3"),
        ("7 // 2", "3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("0.1 + 0.2", "0.3"),
        ("2 ** 100", str(2**100)),
        ("2 ** -2", "0.25"),
        ("1e3", "1000"),
        ("1_000 + 1", "1001"),
        ("sqrt(2)", "1.41421356237"),
        ("abs(-3) + min(1, 2, 3) + max(4, 5)", "9"),
        ("round(2.567, 2)", "2.57"),
        ("round(2.5)", "2"),
        ("round(1234, -2)", "1200"),
        ("floor(-1.5) + ceil(1.2)", "0"),
        ("log(e)", "1"),
        ("log(8, 2)", "3"),
        ("exp(0) + sin(0) + cos(0) + tan(0)", "2"),
        ("cos(pi)", "-1"),
        ("-0.0", "0"),
        (" 3 × 4 ÷ 2 − 1 ", "5"),
        ("1 +\t1", "2"),
    ],
)
def test_values(expression, text):
    result = ask({"expression": expression})
    assert (result.text, result.error) == (text, False)


def test_digits():
    assert ask({"expression": "1 / 3"}, digits=3).text == "0.333"
    with pytest.raises(ConfigError, match=r"\[tools.x\]: digits = 0: Input should be greater than or equal to 1"):
        open_tools(["x"], {"x": {"type": "calculator", "digits": 0}})


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("1 / 0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("sqrt(-1)", "undefined"),
        ("log(0)", "undefined"),
        ("(-8) ** 0.5", "not a real number"),
        ("1e400", "not a real number"),
        ("10.0 ** 400", "too large"),
        ("exp(1000)", "too large"),
        ("sqrt(10 ** 1000)", "too large"),
        ("2 ^ 3", r"write a power as \*\*"),
        ("1,000 + 2", "write 1000, not 1,000"),
        ("2 +", "not an arithmetic expression"),
        ("", "not an arithmetic expression"),
        ("x = 3", "not an arithmetic expression"),
        ("3 apples", "not an arithmetic expression"),
        ("15% of 80", "not an arithmetic expression"),
        ("x + 1", "unknown name 'x'; known: sqrt"),
        ("sqrt + 1", r"write sqrt\(\.\.\.\)"),
        ("sqrt()", "sqrt does not take 0 arguments"),
        ("min(3)", "min does not take 1 arguments"),
        ("sqrt(x=4)", r"write sqrt\(\.\.\.\)"),
        ("max(*[1, 2])", "does not take 1 arguments|not arithmetic"),
        ("round(1.5, 0.5)", "whole number of places"),
        ("round(5, -999999999)", "whole number of places"),
        ("1 if 2 else 3", "not arithmetic"),
        ("True + 1", "not arithmetic"),
        ("3j", "not arithmetic"),
        ("'a' * 3", "not arithmetic"),
        ("[1] * 9", "not arithmetic"),
        ("1 < 2", "not arithmetic"),
        ("~5", "not arithmetic"),
        ("1 << 99", "not arithmetic"),
        ("__import__('os').system('true')", "not arithmetic"),
        ("(1).__class__", "not arithmetic"),
        ("eval('1')", "unknown name 'eval'"),
        ("lambda: 1", "not arithmetic"),
        ("(x := 3)", "not arithmetic"),
        ("\x00", "undefined|not an arithmetic"),
    ],
)
def test_what_has_no_value_says_why(expression, why):
    with pytest.raises(CalculatorError, match=why):
        calculate(expression)
    result = ask({"expression": expression})
    assert result.error
    assert result.text.startswith("error: ")


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9**9",
        "9**9**9",
        "2**(10**1000)",
        "(10**1000)**(10**1000)",
        "(-10)**99999999",
        "*".join(["10**1000"] * 20),
        "(" * 400 + "1" + ")" * 400,
        "+".join(["1"] * 600),
        "9" * 5000,
        "round(10**1000, 99) ** 99",
    ],
    ids=lambda expression: expression[:20],
)
def test_big_work_is_refused_at_once(expression):
    started = time.perf_counter()
    with pytest.raises(CalculatorError, match=r"too large|too deeply|more than 1000 characters|not an arith"):
        calculate(expression)
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize(
    "arguments", [{}, {"expr": "1"}, {"expression": "1", "x": 1}, {"expression": None}, {"expression": True}]
)
def test_wrong_arguments_are_told_to_the_model(arguments):
    result = ask(arguments)
    assert result.error
    assert "'expression'" in result.text


def test_a_bare_number_is_an_expression():
    assert ask({"expression": 8}).text == "8"


def test_the_models_text_is_not_echoed():
    assert "im_end" not in ask({"expression": "'<|im_end|>'"}).text
    assert "im_end" not in ask({"expression": "<|im_end|>"}).text


def test_a_long_chain_of_signs_is_no_work():
    assert calculate("-" * 101 + "1") == -1


OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod}
trees = st.recursive(
    st.integers(-50, 50).map(lambda n: (f"({n})", n)),
    lambda inner: st.tuples(inner, st.sampled_from(sorted(OPERATORS)), inner).map(
        lambda t: (f"({t[0][0]} {t[1]} {t[2][0]})", (t[0][1], t[1], t[2][1]))
    ),
    max_leaves=12,
)


def value(tree):
    if isinstance(tree, int):
        return tree
    left, sign, right = tree
    return OPERATORS[sign](value(left), value(right))


@given(trees)
def test_integers_are_exact(tree):
    text, tree = tree
    try:
        expected = value(tree)
    except ZeroDivisionError:
        with pytest.raises(CalculatorError, match="division by zero"):
            calculate(text)
    else:
        assert calculate(text) == expected


@given(st.text(st.sampled_from("0123456789+-*/%()., eEpijx_<>=!&|^~'\"[]{}:\\\n") | st.characters(), max_size=40))
def test_any_text_has_a_finite_value_or_says_why(text):
    try:
        result = calculate(text)
    except CalculatorError:
        return
    assert type(result) in (int, float)
    assert math.isfinite(result)
