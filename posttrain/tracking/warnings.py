"""The warnings of a run: raised once each, and kept in ``warnings.jsonl`` of its folder.

Every view of a run (panel, plain and JSON log, report) shows what is in this file, so that a warning is the same
everywhere, and a resumed run does not repeat it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from posttrain.core.files import write_text
from posttrain.core.types import Failure
from posttrain.tracking.rules import WINDOW, Observed, Rule

FILE_NAME = "warnings.jsonl"


@dataclass(frozen=True)
class RunWarning:
    """A finding of a rule, as it was raised. Its fields are those of a line of the file."""

    name: str
    """Name of the rule."""
    level: int
    """From 1; of two warnings of a name the later one has the higher level."""
    step: int
    text: str
    hint: str
    """What to do."""

    @property
    def message(self) -> str:
        """Return the warning as text for people."""
        return f"warning: step {self.step}: {self.text}\n  hint: {self.hint}"


class RunWarnings:
    """Applies rules to the steps of a run and keeps what they find.

    Args:
        run_path: folder of the run; warnings that are there are not raised again. None: nothing is kept.
        rules: by name.
    """

    def __init__(self, run_path: Path | None, rules: Mapping[str, Rule]) -> None:
        self._file = None if run_path is None else run_path / FILE_NAME
        self._rules = rules
        self._raised = [] if run_path is None else read_warnings(run_path)
        self._window: deque[Observed] = deque(maxlen=WINDOW)

    @property
    def newest(self) -> list[RunWarning]:
        """Return the last warning of each name."""
        return newest(self._raised)

    def observe(self, step: int, metrics: Mapping[str, float], errors: Mapping[Failure, str]) -> list[RunWarning]:
        """Take a finished step; returns the warnings that it raises, which are in the file then."""
        self._window.append(Observed(step, metrics, errors))
        window = tuple(self._window)
        levels = {warning.name: warning.level for warning in self._raised}
        found = {name: rule(window) for name, rule in self._rules.items()}
        new = [
            RunWarning(name, finding.level, step, finding.text, finding.hint)
            for name, finding in found.items()
            if finding is not None and finding.level > levels.get(name, 0)
        ]
        if new:
            self._raised += new
            if self._file is not None:  # a few lines: written anew, so that a reader never finds half of one
                write_text(self._file, "".join(json.dumps(asdict(warning)) + "\n" for warning in self._raised))
        return new

    def rewind(self, step: int) -> None:
        """Forget the steps after ``step``, which come again. Warnings that they raised stay."""
        self._window = deque((seen for seen in self._window if seen.step <= step), maxlen=WINDOW)


def read_warnings(run_path: Path) -> list[RunWarning]:
    """Return the warnings in a run's folder, in the order in which they were raised."""
    file = run_path / FILE_NAME
    if not file.is_file():
        return []
    found = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            found.append(
                RunWarning(str(row["name"]), int(row["level"]), int(row["step"]), str(row["text"]), str(row["hint"]))
            )
        except (ValueError, TypeError, KeyError):
            continue  # a line that somebody has edited costs itself only
    return found


def newest(warnings: list[RunWarning]) -> list[RunWarning]:
    """Return the last warning of each name, in the order in which the names first came up."""
    return list({warning.name: warning for warning in warnings}.values())
