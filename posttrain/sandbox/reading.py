"""Reads tests before they run: which of the names that they use are the solution's.

Runs inside a sandbox, on tests only; stdlib only, found by its path.
"""

from __future__ import annotations

import ast
import bisect
import builtins
import collections
import copy
import datetime
import decimal
import fractions
import functools
import heapq
import importlib
import itertools
import math
import string
import sys
import typing
from collections.abc import Sequence
from typing import Any

_LIBRARY: dict[str, Any] = {
    name: getattr(module, name)
    for module in (
        typing,
        string,
        copy,
        fractions,
        decimal,
        datetime,
        bisect,
        heapq,
        functools,
        itertools,
        collections,
        math,
    )
    for name in getattr(module, "__all__", None) or dir(module)
    if not name.startswith("_")
}
"""What tests use of the standard library without importing it, as LeetCode's do."""
_PACKAGES = {"np": "numpy", "pd": "pandas", **{name: name for name in ("numpy", "pandas", "pytest", "scipy", "sympy")}}
"""Packages that tests use under these names, which are never the solution's."""


class Names:
    """The names that tests and their setup use without defining them, and whose they are.

    ``of_solution``: what the solution is asked for. ``of_library``: name and value of what the standard library has.

    A name of the standard library stands for that, and never for what the solution calls so, unless it is what is
    tested: a test with no other name of the solution tests the innermost function that it calls (``assert gcd(4, 6) ==
    2``). A builtin is tested only where nothing else is in any test.
    """

    def __init__(self, setup: ast.Module, tests: Sequence[ast.Module], tested: str | None) -> None:
        """``tested``: the only name of the solution, where that is known."""
        given = _bound(setup)
        self._defined = {name for tree in (setup, *tests) for name in _defined(tree)}
        uses = [_Uses(setup, given), *(_Uses(test, given) for test in tests)]
        self.of_library: dict[str, Any] = {}
        unknown: set[str] = set()
        for name in {name for use in uses for name in use.free}:
            attributes = {attribute for use in uses for attribute in use.attributes.get(name, ())}
            found, value = _of_library(name, attributes, any(name in use.called for use in uses))
            if found:
                self.of_library[name] = value
            elif name not in _PACKAGES and not hasattr(builtins, name):
                unknown.add(name)
        self.of_solution = unknown if tested is None else {tested}
        if tested is None:
            self._add_tested(uses[1:])
        for name in self.of_solution:
            self.of_library.pop(name, None)

    def of_tests(self, name: str) -> bool:
        """Return whether calling ``name`` runs nothing of the solution, unless it is passed on."""
        known = name in self.of_library or name in self._defined or hasattr(builtins, name)
        return known and name not in self.of_solution

    def _add_tested(self, tests: Sequence[_Uses]) -> None:
        unknown = set(self.of_solution)
        for test in tests:
            if not unknown & test.free:
                self.of_solution |= test.innermost({name for name in self.of_library if name not in test.attributes})
        if not self.of_solution:
            for test in tests:
                self.of_solution |= test.innermost(set(dir(builtins)))


class _Uses:
    """How one source uses names that it does not define."""

    def __init__(self, tree: ast.Module, given: set[str]) -> None:
        own = _bound(tree) | given
        self.tree = tree
        self.free: set[str] = set()
        self.called: set[str] = set()
        self.attributes: dict[str, set[str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id not in own:
                self.free.add(node.id)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                self.called.add(node.func.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                self.attributes.setdefault(node.value.id, set()).add(node.attr)

    def innermost(self, candidates: set[str]) -> set[str]:
        """Return the candidates that are called here and are not around a call of another one."""
        inner: set[str] = set()
        outer: set[str] = set()
        for call in ast.walk(self.tree):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Name)
                and call.func.id in candidates & self.free
            ):
                within = {n.id for n in ast.walk(call) if isinstance(n, ast.Name)} & candidates
                (outer if within - {call.func.id} else inner).add(call.func.id)
        return inner - outer


def _of_library(name: str, attributes: set[str], called: bool) -> tuple[bool, Any]:
    """Return whether the standard library (or numpy, under its usual name) has what is used so, and what it is."""
    if name in _PACKAGES or (attributes and not called and name in sys.stdlib_module_names):
        try:
            module = importlib.import_module(_PACKAGES.get(name, name))
        except ImportError:
            return False, None
        if name in _PACKAGES or all(hasattr(module, attribute) for attribute in attributes):
            return True, module
    if hasattr(builtins, name):
        return False, None
    return name in _LIBRARY, _LIBRARY.get(name)


def _bound(tree: ast.AST) -> set[str]:
    found = _defined(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
    return found


def _defined(tree: ast.AST) -> set[str]:
    """Names of functions, classes and imports."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
    return found
