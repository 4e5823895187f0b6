"""Finds where a test looks at what a call of the solution did to an argument, and lets it see that there and nowhere
else.

Runs inside a sandbox, on tests only; stdlib only, found by its path.

The solution changes copies of its arguments. Were every change repeated on the test's side, a program could change what
it is compared with: ``assert f(x) == sorted(x)``. So a change is repeated on a variable only if no assert compares that
variable with what a call returned, and nothing else reads it after the call.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

_Node = TypeVar("_Node", bound=ast.AST)

CALLED = "__called__"
"""The name that picks, in compiled tests, how a function is called: ``__called__(f, (0, "key"))(x, key=y)``."""
_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.SetComp, ast.DictComp)
_NEW = (*_DISPLAYS, ast.Call, ast.BinOp)
"""Expressions whose value no other name stands for."""
_COPIES = {
    "all",
    "any",
    "dict",
    "frozenset",
    "len",
    "list",
    "max",
    "min",
    "repr",
    "set",
    "sorted",
    "str",
    "sum",
    "tuple",
}
"""Builtins that keep nothing of their argument but its items."""


def compiled(source: str, name: str, of_tests: Callable[[str], bool]) -> Any:
    """Return the code of a test; ``of_tests`` tells whether a name is none of the solution's.

    Raises:
        SyntaxError: it is no Python.
    """
    tree = ast.parse(source, name)
    plain = _plain_variables(tree)
    roots = {call: _root(call.func) for call in _nodes(tree, ast.Call)}
    calls = [call for call, root in roots.items() if root not in plain and not of_tests(root)]
    passed = {argument.id for call in calls for argument in _arguments(call) if isinstance(argument, ast.Name)}
    if passed:
        reader = _Reader(tree, calls)
        shown = {variable for variable in passed if reader.shows(variable)}
        for call in calls:
            positions = [i for i, a in enumerate(call.args) if isinstance(a, ast.Name) and a.id in shown]
            keywords = [k.arg for k in call.keywords if isinstance(k.value, ast.Name) and k.value.id in shown]
            if positions or keywords:
                which = ast.Tuple([ast.Constant(key) for key in (*positions, *keywords)], ast.Load())
                call.func = ast.Call(ast.Name(CALLED, ast.Load()), [call.func, which], [])
        ast.fix_missing_locations(tree)
    return compile(tree, name, "exec", dont_inherit=True)


def _plain_variables(tree: ast.Module) -> set[str]:
    """Variables that are never anything but a container that the test writes out: their methods are not the
    solution's."""
    bound = [node.id for node in _nodes(tree, ast.Name) if not isinstance(node.ctx, ast.Load)]
    displays = [
        node.targets[0].id
        for node in _nodes(tree, ast.Assign)
        if isinstance(node.value, _DISPLAYS) and isinstance(node.targets[0], ast.Name)
    ]
    arguments = {node.arg for node in _nodes(tree, ast.arg)}
    return {name for name in displays if displays.count(name) == bound.count(name)} - arguments


class _Reader:
    """What a test does with its variables. Names are taken as they are written: scopes within a test are not told
    apart."""

    def __init__(self, tree: ast.Module, calls: list[ast.Call]) -> None:
        self.tree, self.calls = tree, calls
        self.parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self.results = self._results()
        self.changing = {node.id for node in _nodes(tree, ast.Name) if self._is_passed(node)}
        self.changing &= {node.id for node in _nodes(tree, ast.Name) if self._binds_new_value(node)}

    def shows(self, name: str) -> bool:
        """Return whether the test sees what calls do to this variable."""
        uses = [node for node in _nodes(self.tree, ast.Name) if node.id == name]
        bindings = [node for node in uses if not isinstance(node.ctx, ast.Load)]
        passing = [node for node in uses if self._is_passed(node)]
        reads = [node for node in uses if node not in bindings and node not in passing]
        first = min(node.lineno for node in passing)
        return (
            bool(bindings)
            and all(self._binds_new_value(node) for node in bindings)
            and not any(node.arg == name for node in _nodes(self.tree, ast.arg))
            and all(self._begins_anew(node, bindings) for node in passing)
            and all(self._is_apart(node, first) for node in reads)
        )

    def _results(self) -> set[str]:
        """Variables that hold something of what calls returned."""
        found: set[str] = set()
        while True:
            before = len(found)
            for node in ast.walk(self.tree):
                value = (
                    getattr(node, "value", None) or getattr(node, "iter", None) or getattr(node, "context_expr", None)
                )
                target = getattr(node, "target", None) or getattr(node, "optional_vars", None)
                targets = node.targets if isinstance(node, ast.Assign) else [target] if target is not None else []
                if targets and value is not None and self._speaks_of(found, value):
                    found |= {name.id for target in targets for name in _nodes(target, ast.Name)}
            if len(found) == before:
                return found

    def _speaks_of(self, names: set[str], part: ast.AST, of: str = "") -> bool:
        """Return whether a part of the test has a call of the solution or one of ``names`` in it, other than ``of``,
        and other than to tell where a slice of that begins and ends."""
        if isinstance(part, ast.Name):
            return part.id in names and part.id != of
        if part in self.calls:
            return True
        slices = isinstance(part, ast.Subscript) and isinstance(part.value, ast.Name) and part.value.id == of
        within = ast.iter_child_nodes(part)
        return any(self._speaks_of(set() if slices else names, child, of) for child in within)

    def _is_passed(self, node: ast.Name) -> bool:
        parent = self.parents[node]
        call = self.parents[parent] if isinstance(parent, ast.keyword) else parent
        return call in self.calls and isinstance(node.ctx, ast.Load)

    def _binds_new_value(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Name) or isinstance(node.ctx, ast.Load):
            return False
        parent = self.parents[node]
        if isinstance(parent, ast.Assign):
            return len(parent.targets) == 1 and isinstance(parent.value, _NEW)
        while isinstance(parent, ast.Tuple | ast.List):
            parent = self.parents[parent]
        return isinstance(parent, ast.For) and isinstance(parent.iter, ast.Tuple | ast.List)

    def _begins_anew(self, node: ast.AST, bindings: list[ast.Name]) -> bool:
        """Return whether each round of the loops around binds the variable: else one begins with what the last one
        left."""
        return all(
            any(binding in ast.walk(loop) for binding in bindings)
            for loop in self._around(node)
            if isinstance(loop, ast.For | ast.While | ast.comprehension | ast.Lambda)
        )

    def _is_apart(self, node: ast.Name, first_line: int) -> bool:
        """Return whether this use of a variable could not be compared with what the solution returns or changes."""
        statement = next(around for around in self._around(node) if isinstance(around, ast.stmt))
        if not isinstance(statement, ast.Assert):
            return node.lineno < first_line and self._is_copied(node)
        test = statement.test
        parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
        return not any(
            self._speaks_of(self.results | self.changing, part, node.id) for part in parts if node in ast.walk(part)
        )

    def _is_copied(self, node: ast.Name) -> bool:
        parent = self.parents[node]
        if isinstance(parent, ast.Call):
            return isinstance(parent.func, ast.Name) and parent.func.id in _COPIES
        return isinstance(parent, ast.Subscript | ast.Attribute)

    def _around(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self.parents:
            node = self.parents[node]
            yield node


def _nodes(tree: ast.AST, kind: type[_Node]) -> list[_Node]:
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _root(function: ast.expr) -> str:
    """The name that ``a.b.c`` begins with."""
    while isinstance(function, ast.Attribute):
        function = function.value
    return function.id if isinstance(function, ast.Name) else ""
