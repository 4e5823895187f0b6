"""JSON as models write it, somewhere in a text: where a value ends, and what it is.

Time is linear in what is read, also over many values of one text: an object that breaks off is given up where it does.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_DEPTH = 100
"""Values that are nested deeper are refused: Python's JSON would run out of stack on some of them."""


def write_json(value: Any) -> str:
    """JSON as chat templates write it, without escapes of what is not ASCII."""
    return json.dumps(value, ensure_ascii=False)


class BadJson(ValueError):
    """Text that is not JSON. From ``position`` on another value may begin: where reading gave up, or at the last string
    before that place, which may have swallowed the beginning of one."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(f"the tool call is not valid JSON: {reason}")
        self.position = position


def read_json(text: str, start: int, *, whole: bool = False) -> tuple[Any, int]:
    """The JSON object or list that begins at ``start``, after white space, and where it ends.

    Args:
        whole: only white space may follow.

    Raises:
        BadJson: there is none, or it breaks off, or it holds a number that is no number.
    """
    start = skip_space(text, start)
    end = _closing_bracket(text, start)
    if whole and skip_space(text, end) < len(text):
        raise BadJson("text follows", end)
    try:
        # Decoded apart: the decoder's errors count the lines of all that it was given.
        return _DECODER.decode(text[start:end]), end
    except json.JSONDecodeError as error:
        raise BadJson(f"{error.msg} at character {error.pos}", end) from None
    except ValueError as error:
        raise BadJson(str(error), end) from None


def skip_space(text: str, start: int) -> int:
    """The first position from ``start`` on that holds no white space."""
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def _closing_bracket(text: str, start: int) -> int:
    """Where the bracketed value that begins at ``start`` ends; brackets inside strings do not count.

    It gives up at the first character that JSON cannot have outside a string, so that text which only begins like JSON
    is not searched to its end.
    """
    if text[start : start + 1] not in ("{", "["):
        raise BadJson("it does not begin with a bracket", start)
    depth, position, last_string = 0, start, None
    while match := _JSON_TOKEN.match(text, position):
        position = match.end()
        if text[position - 1] == '"':
            last_string = match.start()
        elif match[0] in ("{", "["):
            depth += 1
        elif match[0] in ("}", "]"):
            depth -= 1
        if depth == 0:
            return position
        if depth > MAX_DEPTH:
            raise BadJson(f"it is nested deeper than {MAX_DEPTH} levels", position)
    what = f"unexpected {text[position]!r}" if position < len(text) else "it breaks off"
    raise BadJson(f"{what} at character {position - start}", position if last_string is None else last_string)


def finite(text: str) -> float:
    """A number that is one: ``1e999`` is infinity to Python. Raises ``ValueError``."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_JSON_TOKEN = re.compile(r'"[^"\\]*+(?>(?:\\.[^"\\]*+)*)"|[{}\[\]]|[\s,:+\-.0-9eEtrufalsn]++', re.DOTALL)
# strict=False: models write line breaks inside strings, most of all in code arguments.
_DECODER = json.JSONDecoder(strict=False, parse_float=finite, parse_constant=_refuse_constant)
