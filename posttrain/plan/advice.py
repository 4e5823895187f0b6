"""Advice that holds: every setting that a plan names was applied to the config, and the run planned again with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import ValidationError

from posttrain.config import Config
from posttrain.plan.estimate import Plan

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")

Settings = Mapping[str, Any]
"""Values by dotted key, as `--set` takes them; None resets an optional one"""
Replan = Callable[[Settings], "Plan | None"]
"""The plan of the same run with other settings; None: the config refuses them"""

_SHOWN = 3
"""Most alternatives that are named for a problem."""
MEMORY = "memory"
"""The kind of problem whose settings may be more than it takes: those that are not needed are left out."""


@dataclass(frozen=True)
class Problem:
    """One thing to know before the run."""

    kind: str
    """What it is about. A plan has at most one problem of a kind."""
    level: Level
    """error: the run cannot go on so; warning: it goes on, but not as one would want; note: what was assumed"""
    message: str
    settings: tuple[Settings, ...] = ()
    """That may put it right, each by itself, those that cost least first"""
    amount: float = 1.0
    """How bad it is, to tell whether a setting makes it worse"""
    otherwise: str = ""
    """What helps where no setting does, in words"""

    @property
    def advice(self) -> list[str]:
        """The settings as text, an alternative each: `a.b=1, c.d=true`."""
        return [", ".join(assignments(settings)) for settings in self.settings]

    @property
    def rank(self) -> int:
        """Return the rank of its level; 0 is the gravest."""
        return LEVELS.index(self.level)


Find = Callable[[Plan], Sequence[Problem]]
"""What is wrong with a plan"""


def assignments(settings: Settings) -> list[str]:
    """`key=value` of each setting, as `--set` takes it."""
    return [f"{key}={_text(value)}" for key, value in settings.items()]


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def changed(cfg: Config, settings: Settings) -> Config | None:
    """The config with other values; None: it refuses them."""
    tree = cfg.model_dump()
    for key, value in settings.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node[section]
        node[name] = value
    try:
        return Config.model_validate(tree)
    except ValidationError:
        return None


def advised(plan: Plan, find: Find, replan: Replan) -> list[Problem]:
    """The problems of a plan, the gravest first, each with those of its settings that hold: the config accepts them,
    the plan that they give does not have the problem (of a note: less of it), and has no other that is as grave, nor
    one made worse. The first settings of all problems hold together."""
    found = sorted(find(plan), key=lambda problem: problem.rank)
    search = _Search(found, find, replan)
    return [search.checked(problem) for problem in found]


class _Search:
    """For settings that hold, of one plan."""

    def __init__(self, found: Sequence[Problem], find: Find, replan: Replan) -> None:
        self._before = {problem.kind: problem for problem in found}
        self._find, self._replan = find, replan
        self._tried: dict[tuple[str, ...], dict[str, Problem] | None] = {}
        self._together: dict[str, Any] = {}

    def checked(self, problem: Problem) -> Problem:
        """The problem with its settings that hold alone, and beside those named before it."""
        after = self._after(self._together) if self._together else None
        if problem.settings and after is not None and self._eased(after, problem):
            return replace(problem, settings=(), otherwise="gone with the first settings above")
        holding: list[Settings] = []
        for settings in problem.settings:
            whole = self._completed(settings, problem)
            if whole is None or any(other.items() <= whole.items() for other in holding):
                continue
            if not self._agrees(whole, problem):
                continue
            if not holding:
                self._together |= whole
            holding.append(whole)
            if len(holding) == _SHOWN:
                break
        return replace(problem, settings=tuple(holding))

    def _agrees(self, settings: Settings, problem: Problem) -> bool:
        """Return whether settings hold together with those named before."""
        if any(self._together.get(key, value) != value for key, value in settings.items()):
            return False
        after = self._after({**self._together, **settings})
        before = self._after(self._together) if self._together else None
        return after is not None and not self._graver(after, problem, before)

    def _completed(self, settings: Settings, problem: Problem) -> Settings | None:
        """The settings, if they hold; of an error, with those of another error that they would bring. None: they do
        not hold."""
        after = self._after(settings)
        if after is None or not self._eased(after, problem):
            return None
        if not self._graver(after, problem):
            return self._pruned(settings, () if problem.kind == MEMORY else tuple(settings), problem)
        if problem.level != "error":
            return None
        for more in self._graver(after, problem)[0].settings:
            whole = {**settings, **more}
            then = None if settings.keys() & more.keys() else self._after(whole)
            if then is not None and self._eased(then, problem) and not self._graver(then, problem):
                return self._pruned(whole, tuple(settings), problem)
        return None

    def _pruned(self, settings: Settings, needed: Sequence[str], problem: Problem) -> Settings:
        """Without those beside ``needed`` that change nothing about whether they hold."""
        kept = dict(settings)
        for key in [key for key in settings if key not in needed]:
            fewer = {name: value for name, value in kept.items() if name != key}
            after = self._after(fewer) if fewer else None
            if after is not None and self._eased(after, problem) and not self._graver(after, problem):
                kept = fewer
        return kept

    def _after(self, settings: Settings) -> dict[str, Problem] | None:
        """The problems by kind that are found with these settings; None: the config refuses them."""
        key = tuple(sorted(assignments(settings)))
        if key not in self._tried:
            plan = self._replan(settings)
            self._tried[key] = None if plan is None else {found.kind: found for found in self._find(plan)}
        return self._tried[key]

    def _eased(self, after: Mapping[str, Problem], problem: Problem) -> bool:
        """Return whether a problem is gone, or of a lower level; a note's may also be smaller."""
        left = after.get(problem.kind)
        if left is None or left.rank > problem.rank:
            return True
        return problem.level == "note" and left.level == "note" and left.amount < problem.amount

    def _graver(
        self, after: Mapping[str, Problem], problem: Problem, before: Mapping[str, Problem] | None = None
    ) -> list[Problem]:
        """Other problems, as grave as this one, that are new or worse than before; for a note also warnings.

        Args:
            before: the problems to compare with; None: those of the plan.
        """
        before = self._before if before is None else before
        worst = min(problem.rank, LEVELS.index("warning"))
        return [
            other
            for other in after.values()
            if other.rank <= worst and other.kind != problem.kind and _is_worse(other, before.get(other.kind))
        ]


def _is_worse(now: Problem, before: Problem | None) -> bool:
    if before is None or now.rank < before.rank:
        return True
    return now.rank == before.rank and now.amount > before.amount * (1 + 1e-6)
