"""What a template puts around texts that it does not look into, so that it need not run for each of them.

Most templates write a tool's result as it is. Whether one does is found out by rendering a text that notes every
operation on it, and whose characters no escaping or stripping leaves as they are. Only if none was noted, and the
text stands in the output unchanged, does the output around it hold for all texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import nodes

from posttrain.data.template import is_generation, parse

PROBE = " \t\n<&>\"'\\/{{ x }}{% y %}%s\u00e9\u2028\ufeff#"
"""Changed by JSON, HTML and URL escaping, by stripping at its start, and by formatting; its end gets a number."""


def frame(render: Callable[[Sequence[str]], str], count: int) -> list[str] | None:
    """Return the ``count + 1`` pieces that ``render`` puts around ``count`` texts; None where they depend on the texts.

    Args:
        render: the output for some texts; it must give them to a template that ``keeps_track``.
    """
    looked: list[str] = []
    texts = [_watched(f"{PROBE}{i} \n", looked) for i in range(count)]
    rest = render(texts)
    pieces = []
    for text in texts:
        before, found, rest = rest.partition(str.__str__(text))
        if not found:
            return None
        pieces.append(before)
    pieces.append(rest)
    return None if looked or any(PROBE in piece for piece in pieces) else pieces


_FILTERS = {"count", "d", "default", "first", "items", "last", "length", "list", "rejectattr", "reverse", "selectattr"}
_FILTERS |= {"string", "tojson", "trim"}
"""Filters that note what they do to a watched text, or change its characters."""


@lru_cache(maxsize=32)
def keeps_track(source: str) -> bool:
    """Return true if a template does nothing that could look into a watched text unnoticed: make a plain text of it, or
    search for it in another."""
    _, tree = parse(source)
    blocks = tree.find_all((nodes.AssignBlock, nodes.CallBlock, nodes.Concat, nodes.FilterBlock, nodes.Macro))
    calls = [(node.node, node.args) for node in tree.find_all(nodes.Call)]
    return (
        all(isinstance(node, nodes.CallBlock) and is_generation(node) for node in blocks)
        and {node.name for node in tree.find_all(nodes.Filter)} <= _FILTERS
        and all(_constant(args) or _takes_any(method) for method, args in calls if isinstance(method, nodes.Getattr))
        and not any(isinstance(node.left, nodes.Const) for node in tree.find_all(nodes.Mod))
        and not any(_may_search(node) for node in tree.find_all(nodes.Compare))
    )


def _takes_any(method: nodes.Getattr) -> bool:
    return method.attr in ("append", "get")


def _constant(expressions: Sequence[nodes.Node]) -> bool:
    return all(isinstance(expression, nodes.Const) for expression in expressions)


def _may_search(comparison: nodes.Compare) -> bool:
    """Return true if an expression may be ``a in b`` where a may be a watched text and b a plain one."""
    return not isinstance(comparison.expr, nodes.Const) and any(
        operand.op in ("in", "notin") and not isinstance(operand.expr, nodes.List | nodes.Tuple | nodes.Dict)
        for operand in comparison.ops
    )


_OPERATIONS = (
    *("__bool__", "__contains__", "__eq__", "__format__", "__ge__", "__getitem__", "__gt__", "__hash__", "__iter__"),
    *("__le__", "__len__", "__lt__", "__mod__", "__mul__", "__ne__", "__reversed__", "__rmod__", "__rmul__"),
)


def _watched(text: str, looked: list[str]) -> str:
    """Return ``text``, which appends to ``looked`` when anything is done with it but writing it and adding texts to
    it."""

    def noting(operation: str) -> Callable[..., Any]:
        def method(self: str, *arguments: Any) -> Any:
            looked.append(operation)
            plain: Any = str.__str__(self)
            return bool(plain) if operation == "__bool__" else getattr(plain, operation)(*arguments)

        return method

    def get(self: str, name: str) -> Any:
        if not name.startswith("__"):
            looked.append(name)
        return str.__getattribute__(self, name)

    members: dict[str, Any] = {operation: noting(operation) for operation in _OPERATIONS}
    members["__getattribute__"] = get
    members["__add__"] = lambda self, other: kind(str.__add__(self, other))
    members["__radd__"] = lambda self, other: kind(str.__add__(other, str.__str__(self)))
    kind: Any = type("Watched", (str,), members)
    watched: str = kind(text)
    return watched
