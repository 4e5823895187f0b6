"""Bash's integer arithmetic."""

from __future__ import annotations

import re
from collections.abc import Callable

_TOKEN = re.compile(r"\s*(?:(\d+)(?![\w.])|([A-Za-z_]\w*)|(\*\*|[-+*/%()]))")
_LARGEST = 2**63 - 1


class NotKnown(Exception):
    """An expression that is not evaluated, or a name in it whose value is not known."""


def evaluate(expression: str, value_of: Callable[[str], str], depth: int = 0) -> int:
    """The value of ``+ - * / % **`` with brackets over whole numbers and names.

    Raises:
        NotKnown: anything else, a name that ``value_of`` does not know, or a number that bash would wrap around.
    """
    tokens = _tokens(expression)
    at = 0

    def number(token: str) -> int:
        if token.isdigit():
            if len(token) > 1 and token.startswith("0"):
                raise NotKnown(f"{token} is an octal number")
            return int(token)
        inner = value_of(token).strip()
        if depth > 20:
            raise NotKnown(f"{token} refers to itself")
        return evaluate(inner, value_of, depth + 1) if inner else 0

    def operand() -> int:
        nonlocal at
        if at >= len(tokens):
            raise NotKnown("the expression ends early")
        token = tokens[at]
        at += 1
        if token in "+-":
            return operand() if token == "+" else -operand()
        if token == "(":
            inner = terms()
            if tokens[at : at + 1] != [")"]:
                raise NotKnown("a bracket is not closed")
            at += 1
            return inner
        if not re.match(r"\w", token):
            raise NotKnown(f"{token!r} is no number")
        return number(token)

    def power() -> int:
        nonlocal at
        base = operand()
        if tokens[at : at + 1] == ["**"]:
            at += 1
            exponent = power()
            if not 0 <= exponent <= 63:
                raise NotKnown(f"the exponent {exponent}")
            return int(base**exponent)
        return base

    def product() -> int:
        nonlocal at
        left = power()
        while tokens[at : at + 1] in (["*"], ["/"], ["%"]):
            operator = tokens[at]
            at += 1
            left = _multiply(left, operator, power())
        return left

    def terms() -> int:
        nonlocal at
        left = product()
        while tokens[at : at + 1] in (["+"], ["-"]):
            operator = tokens[at]
            at += 1
            right = product()
            left = left + right if operator == "+" else left - right
        return left

    result = terms()
    if at < len(tokens):
        raise NotKnown(f"{tokens[at]!r} is not understood")
    if abs(result) > _LARGEST:
        raise NotKnown("the number has more than 64 bits")
    return result


def _tokens(expression: str) -> list[str]:
    tokens, at = [], 0
    while expression[at:].strip():
        found = _TOKEN.match(expression, at)
        if found is None:
            raise NotKnown(f"{expression[at:].strip()!r} is not understood")
        tokens.append(found[1] or found[2] or found[3])
        at = found.end()
    return tokens


def _multiply(left: int, operator: str, right: int) -> int:
    if operator == "*":
        return left * right
    if right == 0:
        raise NotKnown("division by 0")
    quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)  # bash rounds towards 0
    return quotient if operator == "/" else left - quotient * right
