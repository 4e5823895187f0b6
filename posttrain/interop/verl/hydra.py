"""Overrides as Hydra reads them: ``key=value``, ``+key=value``, ``++key=value``, ``~key``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from posttrain.interop.verl.expand import Text
from posttrain.interop.verl.shell import Launch

_OVERRIDE = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w./@]*)(?:=(.*))?", re.S)
_INTEGER = re.compile(r"[+-]?\d[\d_]*")
_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?inf|nan", re.I)


@dataclass(frozen=True)
class Override:
    """One word of a trainer's command line."""

    key: str
    value: Any
    problem: str = ""
    """Why the value is not known; empty: it is."""


@dataclass(frozen=True)
class Overrides:
    """A trainer's command line."""

    given: tuple[Override, ...]
    """The last one of a key alone, as in Hydra."""
    config_path: str = ""
    config_name: str = ""
    problems: tuple[str, ...] = ()
    """Words that are no override."""


def read_overrides(launch: Launch) -> Overrides:
    """What a trainer is told on its command line."""
    found: dict[str, Override] = {}
    options: dict[str, str] = {}
    problems: list[str] = []
    words = list(launch.words)
    while words:
        word = words.pop(0)
        option = re.match(r"(--config-path|--config-name|--config-dir|-cp|-cn|-cd)(=|$)", word.start)
        if option is not None:
            text = word.since(option.end()) if option[2] else (words.pop(0) if words else Text())
            if text.known is None:
                problems.append(f"{option[1]}: {'; '.join(text.reasons)}")
            else:
                options[{"-cp": "--config-path", "-cn": "--config-name"}.get(option[1], option[1])] = text.known
            continue
        override = _override(word)
        if override is None:
            problems.append(f"{word.start or '(a word)'}: {'; '.join(word.reasons) or 'is no override'}")
        else:
            found.pop(override.key, None)
            found[override.key] = override
    path = options.get("--config-path", options.get("--config-dir", ""))
    return Overrides(tuple(found.values()), path, options.get("--config-name", ""), tuple(problems))


def _override(word: Text) -> Override | None:
    parts = _OVERRIDE.fullmatch(word.start)
    if parts is None or (parts[3] is None and parts[1] != "~"):
        return None
    key = parts[2].replace("/", ".")
    if parts[1] == "~":
        return Override(key, None, "the script removes the key from verl's config")
    if word.known is None:
        return Override(key, None, "; ".join(word.reasons))
    text = word.known[parts.start(3) :]
    if "${" in text:
        return Override(key, None, f"{text} refers to another key of verl's config")
    return Override(key, parse_value(text))


def parse_value(text: str) -> Any:
    """A value as Hydra reads it: null, a bool, a number, a quoted text, ``[list]``, ``{key: value}``, else text."""
    return _Values(text.strip()).whole()


class _Values:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def whole(self) -> Any:
        value = self._value("")
        return value if self.at >= len(self.text) else self.text  # not of this grammar: a text

    def _value(self, ends: str) -> Any:
        self._blank()
        if self.text[self.at : self.at + 1] == "[":
            return self._list()
        if self.text[self.at : self.at + 1] == "{":
            return self._mapping()
        if self.text[self.at : self.at + 1] in ("'", '"'):
            return self._quoted()
        begin = self.at
        while self.at < len(self.text) and self.text[self.at] not in ends:
            self.at += 1
        return plain(self.text[begin : self.at].strip())

    def _list(self) -> list[Any]:
        items: list[Any] = []
        self.at += 1
        while self._next("]"):
            items.append(self._value(",]"))
            self._next(",")
        return items

    def _mapping(self) -> dict[str, Any]:
        items: dict[str, Any] = {}
        self.at += 1
        while self._next("}"):
            key = self._value(":}")
            self._next(":")
            items[str(key)] = self._value(",}")
            self._next(",")
        return items

    def _next(self, mark: str) -> bool:
        """Skip blanks and ``mark``; whether something else comes first."""
        self._blank()
        if self.at >= len(self.text):
            return False
        if self.text[self.at] == mark:
            self.at += 1
            return False
        return True

    def _quoted(self) -> str:
        quote, begin = self.text[self.at], self.at + 1
        end = begin
        while end < len(self.text) and self.text[end] != quote:
            end += 2 if self.text[end] == "\\" else 1
        self.at = end + 1
        return self.text[begin:end].replace(f"\\{quote}", quote)

    def _blank(self) -> None:
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1


def plain(text: str) -> Any:
    """A word without quotes."""
    if text.lower() in ("null", "~", "none") or not text:
        # Hydra takes None for a text. Nobody means that, and verl's code does not either.
        return None if text else ""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _INTEGER.fullmatch(text):
        return int(text.replace("_", ""))
    if _NUMBER.fullmatch(text):
        return float(text.replace("_", ""))
    return text


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A YAML tree by dotted key."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
