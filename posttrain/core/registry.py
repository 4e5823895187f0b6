"""A named set of things that a config can ask for (datasets, tools, graders, samplers, algorithms).

Names map to ``"module:attribute"`` strings or to objects; strings are imported on first use, so that listing the names
of a registry imports nothing heavy. ``plugins = ["my_task.py"]`` in a preset imports a user's file, whose decorators
add to the registries.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from posttrain.core.errors import CodeError, ConfigError
from posttrain.core.plugins import place_of, user_code, with_place

T = TypeVar("T")


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The known name closest to ``name``, or None when nothing is close.

    Letters left out, doubled, mistyped or swapped with their neighbour count, as do parts that the two share; capitals
    and the signs between words do not.
    """
    best, known = (0.0, 0.0), None
    for candidate in names:
        one, other = _plain(name), _plain(candidate)
        edits = 1.0 - _edits(one, other) / max(1, len(one), len(other))
        shared = difflib.SequenceMatcher(None, one, other).ratio()
        score = (edits + shared, max(edits, shared))
        if score[1] >= _CLOSE and score > best:
            best, known = score, candidate
    return known


_CLOSE = 0.6
"""Two names that are this alike, of 1, may have been meant for each other."""


def unknown(name: str, names: Iterable[str]) -> str:
    """A hint for a name that is not among ``names``: the nearest of them, else all."""
    known = sorted(names)
    close = nearest(name, known)
    return f"did you mean {close!r}?" if close else f"known: {', '.join(known) or 'none'}"


def _plain(name: str) -> str:
    return re.sub(r"[-_ .]+", "-", name.lower())


def _edits(one: str, other: str) -> int:
    """Letters to insert, delete, replace or swap with their neighbour to come from one text to the other (optimal
    string alignment, a restricted Damerau-Levenshtein distance)."""
    before, last = list[int](), list(range(len(other) + 1))
    for i, a in enumerate(one, start=1):
        row = [i]
        for j, b in enumerate(other, start=1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and b == one[i - 2]:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
    return last[-1]


def some(names: Sequence[str], shown: int = 3) -> str:
    """Return the first of several names, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


class Registry(Generic[T]):
    """Names to things of one kind. ``kind`` is the word used in messages ("tool", "dataset")."""

    def __init__(self, kind: str, builtin: dict[str, str] | None = None) -> None:
        self.kind = kind
        self._entries: dict[str, T | str] = dict(builtin or {})

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: add a thing under ``name``. A name taken by another thing is an error."""

        def add(thing: T) -> T:
            existing = self._entries.get(name)
            if existing is not None and not isinstance(existing, str) and existing is not thing:
                raise ConfigError(f"{self.kind} {name!r} is registered twice", hint="give one of them another name")
            self._entries[name] = thing
            return thing

        return add

    def names(self) -> list[str]:
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def get(self, name: str) -> T:
        """The thing called ``name``. Raises ``ConfigError`` with the nearest name when there is none."""
        entry = self._entries.get(name)
        if entry is None:
            raise ConfigError(f"unknown {self.kind} {name!r}", hint=unknown(name, self._entries))
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = getattr(importlib.import_module(module), attribute)
            self._entries[name] = entry
        return entry


def load_plugins(paths: Iterable[str]) -> None:
    """Import each user file (``my_task.py``) or module (``my_package.task``) once in this process.

    Raises:
        ConfigError: there is no such file or module. As ``CodeError``: it raises while it is imported.
    """
    for path in paths:
        try:
            with user_code(f"plugin {path} failed to import"):
                if path.endswith(".py"):
                    _import_file(Path(path))
                else:
                    importlib.import_module(path)
        except CodeError as error:
            if place_of(error) is None and isinstance(error.__cause__, ModuleNotFoundError):
                error.hint = "a plugin is the path of a .py file, or a module that Python can import"
            raise
        except ConfigError as error:  # of a decorator of ours in the plugin
            if (place := place_of(error)) is None:
                raise
            raise CodeError(with_place(f"plugin {path}: {error.message}", place), hint=error.hint) from error


def load_object(path: str, *, what: str) -> Any:
    """The object that ``my_file.py:name`` or ``package.module:name`` names; ``what`` is the config key, for messages.

    Raises:
        ConfigError: there is no such file, module or name.
    """
    place, colon, name = path.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(f"{what} = {path!r} is not FILE.py:NAME or MODULE:NAME", hint="for example my_file.py:reward")
    load_plugins([place])
    module = sys.modules[_module_name(Path(place)) if place.endswith(".py") else place]
    if not hasattr(module, name):
        public = [other for other in vars(module) if not other.startswith("_")]
        raise ConfigError(f"{what}: {place} has no {name!r}", hint=unknown(name, public))
    return getattr(module, name)


def _module_name(file: Path) -> str:
    """Files of the same name in different folders are different modules."""
    return f"posttrain_plugin_{file.stem}_{zlib.crc32(str(file.resolve()).encode()):08x}"


def _import_file(file: Path) -> None:
    if not os.path.isfile(file):
        raise ConfigError(f"plugin file not found: {file}", hint="plugins are paths relative to where you run")
    name = _module_name(file)
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
