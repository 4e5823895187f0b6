"""What all systems of ``bench_peers.py`` have in common: the reward and the tool. It imports none of them but verl,
which is told of the tool where it is installed."""

from __future__ import annotations

import ast
import importlib.util
import operator
import re
from collections.abc import Callable
from typing import Any

_OPERATORS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any) -> float:
    """Return the reward of a response: of the source `letters` the share of its characters that are a to z, which
    random weights can learn within a few steps; else 1 where its last number is the ground truth."""
    if data_source == "letters":
        return sum("a" <= c <= "z" for c in solution_str) / max(1, len(solution_str))
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", solution_str)
    return float(bool(numbers) and numbers[-1].replace(",", "") == str(ground_truth))


def calculator(expression: str) -> str:
    """Compute an arithmetic expression of numbers with + - * / and parentheses.

    Args:
        expression: the expression, for example "(3 + 4) * 2.5".

    Returns:
        Its value, or what is wrong with it.
    """
    try:
        return f"{_value(ast.parse(expression, mode='eval').body):.10g}"
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError) as error:
        return f"error: {error}"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError("only numbers, + - * / and parentheses")


if importlib.util.find_spec("verl"):
    from verl.tools.function_tool import function_tool

    function_tool(calculator)
