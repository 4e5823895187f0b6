"""What a rule is that says what keys of verl mean here, and what is noted down while rules are applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from posttrain.config import Config


class Outcome(StrEnum):
    """What became of a key."""

    MAPPED = "mapped"
    NO_NEED = "no need"
    """It asks for what is always so here, or for nothing."""
    NOT_MAPPED = "not mapped"


@dataclass(frozen=True)
class KeyFinding:
    """What became of one key of the script, and why."""

    key: str
    outcome: Outcome
    detail: str
    """Our keys, or the reason."""


class NotEvaluated(Exception):
    """A rule needs a value of the script that is not known."""


@dataclass
class ScriptValues:
    """The values of a script over verl's defaults."""

    given: dict[str, Any]
    defaults: Mapping[str, Any]
    unknown: dict[str, str] = field(default_factory=dict)
    """Keys whose values are not known, and why."""
    home: str = "~"

    def __getitem__(self, key: str) -> Any:
        """The script's value, else verl's default. Raises ``NotEvaluated`` where the script's is not known."""
        if key in self.unknown:
            raise NotEvaluated(key)
        return self.given[key] if key in self.given else self.defaults.get(key)

    def named(self, *keys: str) -> list[str]:
        """Those of the keys that the script gives."""
        return [key for key in keys if key in self.given]

    def origin(self, *keys: str) -> str:
        """For a comment: the keys that a value came from."""
        named = self.named(*keys)
        return ", ".join(named) if named else f"verl's default of {', '.join(keys[:1])}"


@dataclass
class Draft:
    """A preset in the making."""

    values: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    findings: dict[str, KeyFinding] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that the command of the run wants."""
    touched: set[str] = field(default_factory=set)
    """Our keys that the rule at hand has set."""

    def set(self, ours: str, value: Any, comment: str) -> None:
        """One of our keys gets a value. Raises ``ValueError``: it is null, which a preset cannot say."""
        if value is None or (isinstance(value, list) and None in value):
            raise ValueError(f"{ours} = null")
        self.values[ours], self.comments[ours] = value, comment
        self.touched.add(ours)

    def find(self, key: str, outcome: Outcome, detail: str) -> None:
        self.findings.setdefault(key, KeyFinding(key, outcome, detail))

    def refuse(self, view: ScriptValues, key: str, reason: str) -> None:
        """``key`` has no place here. Without effect for a key that is not in the script."""
        if key in view.given:
            self.find(key, Outcome.NOT_MAPPED, reason)

    def pass_over(self, view: ScriptValues, key: str, reason: str) -> None:
        """``key`` asks for nothing that would have to be said here."""
        if key in view.given:
            self.find(key, Outcome.NO_NEED, reason)


@dataclass(frozen=True)
class Rule:
    """Keys of verl that belong together, and our keys that they become."""

    theirs: tuple[str, ...]
    """Names; ``*`` in one stands for anything."""
    ours: tuple[str, ...]
    about: str
    """One line for people: how values change, or why nothing is to be said."""
    apply: Callable[[ScriptValues, Draft], None]
    kind: Outcome = Outcome.MAPPED

    def matches(self, key: str) -> bool:
        return any(fnmatchcase(key, name) for name in self.theirs)


Convert = Callable[[Any], Any]
SKIP = object()
"""What a ``Convert`` returns where nothing is to be set."""


def ours_default(key: str) -> Any:
    """The default of one of our keys."""
    value: Any = Config(command="rl")
    for part in key.split("."):
        value = getattr(value, part)
    return list(value) if isinstance(value, tuple) else value


def same(theirs: str, ours: str, about: str = "", convert: Convert = lambda value: value, idle: str = "") -> Rule:
    """One key becomes one of ours. verl's default is written out where ours is another. ``idle`` says why a value that
    ``convert`` skips needs no key."""

    def apply(view: ScriptValues, draft: Draft) -> None:
        value = convert(view[theirs])
        if value is SKIP:
            draft.pass_over(view, theirs, idle or "it is switched off")
        elif theirs in view.given or (theirs in view.defaults and value != ours_default(ours)):
            draft.set(ours, value, view.origin(theirs))

    return Rule((theirs,), (ours,), about, apply)


def no_need(why: str, *theirs: str, unless: Callable[[Any], str] = lambda value: "") -> Rule:
    """Keys that need not be said here. ``unless`` gives a reason why a value does need it, and has no place."""

    def apply(view: ScriptValues, draft: Draft) -> None:
        for key in list(view.given):
            if rule.matches(key):
                reason = unless(view.given[key])
                draft.find(key, Outcome.NOT_MAPPED if reason else Outcome.NO_NEED, reason or why)

    rule = Rule(theirs, (), why, apply, Outcome.NO_NEED)
    return rule


def missing(why: str, *theirs: str) -> Rule:
    """Keys that have no place here."""

    def apply(view: ScriptValues, draft: Draft) -> None:
        for key in list(view.given):
            if rule.matches(key):
                draft.find(key, Outcome.NOT_MAPPED, why)

    rule = Rule(theirs, (), why, apply, Outcome.NOT_MAPPED)
    return rule


def only(*allowed: Any) -> Callable[[Any], str]:
    """For ``no_need``: other values than these have no place."""
    return lambda value: "" if value in allowed else f"{value!r} has no place here"


def unless_set(value: Any) -> str:
    """For ``no_need``: anything but false, null, 0, -1 and empty has no place."""
    return "" if value in (None, False, 0, -1, "", [], "null", "disabled") else f"{value!r} has no place here"


def run_rules(rules: tuple[Rule, ...], view: ScriptValues) -> Draft:
    """Apply every rule. Every key of the script is found in the result once."""
    draft = Draft()
    for key, reason in view.unknown.items():
        draft.find(key, Outcome.NOT_MAPPED, f"not evaluated: {reason}")
    for rule in rules:
        draft.touched.clear()
        try:
            rule.apply(view, draft)
        except NotEvaluated as error:
            for key in filter(rule.matches, view.given):
                draft.find(key, Outcome.NOT_MAPPED, f"it depends on {error}, which was not evaluated")
            continue
        except (TypeError, ValueError, ZeroDivisionError):  # arithmetic on a text, null or zero of the script
            for ours in draft.touched:
                del draft.values[ours], draft.comments[ours]
            values = ", ".join(f"{key} = {view.given[key]!r}" for key in filter(rule.matches, view.given))
            for key in filter(rule.matches, view.given):
                draft.find(key, Outcome.NOT_MAPPED, f"no value of ours can be computed from {values}")
            continue
        for key in filter(rule.matches, view.given):
            if draft.touched:
                draft.find(key, Outcome.MAPPED, ", ".join(sorted(draft.touched)))
            else:
                draft.find(key, Outcome.NO_NEED, rule.about or "it asks for the default")
    for key in view.given:
        draft.find(key, Outcome.NOT_MAPPED, "import-verl does not know this key")
    return draft
