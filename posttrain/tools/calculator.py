"""A calculator: arithmetic on numbers, read as a Python expression and worked out node by node, never with ``eval``."""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field

from posttrain.core.types import ToolSchema
from posttrain.tools.base import Tool, ToolResult

Number = int | float

_LONGEST = 1000
"""Characters of an expression. With ``_MOST_BITS`` it bounds the work of one call to about a millisecond."""
_MOST_BITS = 4096
"""Maximum bits of an integer, also between two steps: about 1,200 digits."""
_MOST_PLACES = 100
"""Decimal places that ``round`` may be asked for."""


SCHEMA: ToolSchema = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Work out an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "For example (3 + 4) * 2 ** 5 / sqrt(2). Operators: + - * / // % **. Functions: "
                    "sqrt, abs, min, max, round, floor, ceil, log, exp, sin, cos, tan. Constants: pi, e.",
                }
            },
            "required": ["expression"],
        },
    },
}


class CalculatorError(Exception):
    """The expression has no value; the message is for the model."""


class Calculator(Tool):
    """Works out an arithmetic expression.

    Args:
        digits: significant digits of a result that is no integer.
    """

    name = "calculator"
    schema = SCHEMA

    def __init__(self, digits: Annotated[int, Field(ge=1, le=17)] = 12) -> None:
        self.digits = digits

    async def call(self, state: Any, arguments: dict[str, Any]) -> ToolResult:
        if set(arguments) != {"expression"}:
            return ToolResult("error: give one argument, 'expression'", error=True)
        expression = arguments["expression"]
        if isinstance(expression, int | float) and not isinstance(expression, bool):
            expression = str(expression)
        if not isinstance(expression, str):
            return ToolResult("error: 'expression' must be a string", error=True)
        try:
            return ToolResult(self.work_out(expression))
        except CalculatorError as error:
            return ToolResult(f"error: {error}", error=True)

    def work_out(self, expression: str) -> str:
        """Return the value of an expression as the model reads it. Raises ``CalculatorError``."""
        value = calculate(expression)
        return str(value) if isinstance(value, int) else format(value + 0.0, f".{self.digits}g")


def calculate(expression: str) -> Number:
    """The value of an expression, an integer where Python's own arithmetic gives one.

    Raises:
        CalculatorError: it is malformed, undefined, not a real number, or too much work.
    """
    if len(expression) > _LONGEST:
        raise CalculatorError(f"the expression has more than {_LONGEST} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Python thinks of a model's style is nobody's concern
            tree = ast.parse(expression.strip().translate(_SIGNS), mode="eval")
        return _value(tree.body)
    except SyntaxError as error:
        raise CalculatorError(f"not an arithmetic expression: {error.msg}") from error
    except (RecursionError, MemoryError) as error:
        raise CalculatorError("the expression is nested too deeply") from error
    except ZeroDivisionError as error:
        raise CalculatorError("division by zero") from error
    except OverflowError as error:
        raise CalculatorError("the result is too large") from error
    except ValueError as error:  # of the math module, and of the parser for null bytes
        raise CalculatorError(f"undefined: {error}") from error


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _checked(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _checked(_UNARY[type(op)](_value(operand)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _checked(_BINARY[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            fewest, most, function = _FUNCTIONS[name]
            if not fewest <= len(args) <= most:
                raise CalculatorError(f"{name} does not take {len(args)} arguments")
            return _checked(function(*(_value(arg) for arg in args)))
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)) if name in _FUNCTIONS:
            raise CalculatorError(f"write {name}(...) with its arguments in parentheses")
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            raise CalculatorError(f"unknown name {name!r}; known: {', '.join([*_FUNCTIONS, *_CONSTANTS])}")
        case ast.BinOp(op=ast.BitXor()):
            raise CalculatorError("write a power as **, not as ^")
        case ast.Tuple():
            raise CalculatorError("a comma stands between arguments only: write 1000, not 1,000")
        case _:  # the model's own text is not echoed: it could hold tokens of the chat format
            raise CalculatorError(f"not arithmetic: Python reads a {type(node).__name__} in it")


def _checked(value: Any) -> Number:
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise CalculatorError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise OverflowError
    number: Number = value
    return number


def _power(base: Number, exponent: Number) -> Any:
    """The size of the result is known before the work is done."""
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and abs(base) > 1 and (int(base).bit_length() - 1) * exponent > _MOST_BITS:
        raise OverflowError
    return base**exponent


def _round(value: Number, places: Number = 0) -> Number:
    if not isinstance(places, int) or abs(places) > _MOST_PLACES:
        raise CalculatorError(f"round takes a whole number of places, at most {_MOST_PLACES}")
    return round(value, places) if places else round(value)


_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})
"""Signs of print that models write."""
_CONSTANTS: dict[str, float] = {"pi": math.pi, "e": math.e}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: dict[str, tuple[int, int, Callable[..., Any]]] = {
    "sqrt": (1, 1, math.sqrt),
    "abs": (1, 1, abs),
    "min": (2, _LONGEST, min),
    "max": (2, _LONGEST, max),
    "round": (1, 2, _round),
    "floor": (1, 1, math.floor),
    "ceil": (1, 1, math.ceil),
    "log": (1, 2, math.log),
    "exp": (1, 1, math.exp),
    "sin": (1, 1, math.sin),
    "cos": (1, 1, math.cos),
    "tan": (1, 1, math.tan),
}
"""Fewest and most arguments, and the function."""
