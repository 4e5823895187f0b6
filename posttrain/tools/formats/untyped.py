"""Formats that write each argument as text between tags: the tools' schemas say what the text stands for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.core.types import ToolSchema
from posttrain.tools.formats.base import BlockFormat, ParsedCall, to_call, unreadable
from posttrain.tools.formats.json_text import finite, read_json, write_json


class UntypedFormat(BlockFormat):
    """A call is a head with its name, arguments one after the other, and a tail.

    An argument's end is searched for, since its text is not escaped: it is the first closing tag after which the call
    goes on as a call does. So an argument may hold a closing tag, but not a piece of a call.
    """

    head: re.Pattern[str]
    """From the start of the block to the first argument, with a group ``name``."""
    argument: re.Pattern[str]
    """Begin of an argument, with a group ``name``."""
    value_end: re.Pattern[str]
    """End of an argument's text; without a group ``closed`` it is where the next part begins with no closing tag."""
    tail: re.Pattern[str]
    close: str
    edge: re.Pattern[str]
    """``close``, and where another block may begin."""
    shape: str
    """What a call should look like, for a model that has written another thing."""

    def block(self, text: str, start: int, tools: Sequence[ToolSchema] | None) -> tuple[list[ParsedCall], int]:
        head = self.head.match(text, start)
        if head is None:
            opened = self.opening.match(text, start)
            assert opened is not None
            return self._unreadable(text, opened.end(), f"the tool call is not of the form {self.shape}")
        name, position = head["name"].strip(), head.end()
        values: dict[str, str] = {}
        while argument := self.argument.match(text, position):
            key = argument["name"].strip()
            end = self.value_end.search(text, argument.end())
            if end is None or not end["closed"]:
                return self._unreadable(text, position, f"argument {key!r} of the tool call has no closing tag")
            values[key] = text[argument.end() : end.start()]
            position = end.end()
        tail = self.tail.match(text, position)
        if tail is None:
            return self._unreadable(text, position, f"the tool call is not of the form {self.shape}")
        types = _properties(name, tools)
        arguments = {key: from_text(value, types.get(key)) for key, value in values.items()}
        return [to_call(name, arguments)], tail.end()

    def _unreadable(self, text: str, start: int, reason: str) -> tuple[list[ParsedCall], int]:
        call, end = unreadable(text, start, reason, self.close, self.edge)
        return [call], end


def to_text(value: Any) -> str:
    """An argument as templates write it: text as it is, all else as JSON."""
    return value if isinstance(value, str) else write_json(value)


def from_text(text: str, schema: Any) -> Any:
    """The value that an argument's text stands for, by the JSON schema of the parameter.

    The declared types are tried in their order. Text stays text where no type is declared, and where it fits none: the
    tool then says what it wanted. ``True`` and ``None`` count as their JSON names, because some templates show
    arguments as Python writes them. Null is tried first, and always unless the text may be a string: an argument that
    may be left out is often declared without it.
    """
    types = _types(schema)
    if types and "string" not in types:
        types.append("null")
    for name in sorted(types, key=lambda name: name != "null"):
        try:
            return _READERS[name](text)
        except ValueError:
            continue
    return text


def _properties(name: str, tools: Sequence[ToolSchema] | None) -> Mapping[str, Any]:
    """Schemas of the parameters of the tool called ``name``."""
    for tool in tools or ():
        function = tool.get("function", tool)
        if function.get("name") == name:
            return (function.get("parameters") or {}).get("properties") or {}
    return {}


def _types(schema: Any) -> list[str]:
    """JSON types that a schema admits, in its order."""
    if not isinstance(schema, Mapping):
        return []
    declared = schema.get("type") or []
    names = [declared] if isinstance(declared, str) else list(declared)
    for option in [*(schema.get("anyOf") or []), *(schema.get("oneOf") or [])]:
        names += _types(option)
    return [name for name in names if name in _READERS]


def _null(text: str) -> None:
    if text.strip().lower() not in ("null", "none"):
        raise ValueError(text)


def _boolean(text: str) -> bool:
    word = text.strip().lower()
    if word not in ("true", "false"):
        raise ValueError(text)
    return word == "true"


def _integer(text: str) -> int:
    value = _number(text)
    if value != int(value):
        raise ValueError(text)
    return int(value)


def _number(text: str) -> int | float:
    """A decimal number: neither ``1_000`` nor ``nan``, which Python would read."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    return finite(match[0]) if match["fraction"] else int(match[0])


def _container(kind: type) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value, _ = read_json(text, 0, whole=True)
        if not isinstance(value, kind):
            raise ValueError(text)
        return value

    return read


_NUMBER = re.compile(r"[+-]?\d+(?P<fraction>(?:\.\d+)?(?:[eE][+-]?\d+)?)", re.ASCII)
_READERS: dict[str, Callable[[str], Any]] = {
    "string": str,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "object": _container(dict),
    "array": _container(list),
    "null": _null,
}
