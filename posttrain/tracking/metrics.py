"""Where metrics go: the interface, and `metrics.jsonl`, one JSON object a step, appended and flushed."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from posttrain.core.errors import DataError
from posttrain.core.files import writing
from posttrain.core.text import printable

FILE_NAME = "metrics.jsonl"
RENAMED_METRICS = {"sync/canary_gap": "sync/check_gap"}
"""Names of metrics in the files of older runs -> their current names."""


def with_current_names(row: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return a line of ``file`` with old names of metrics replaced by the current ones. Warns once for each name."""
    for old in RENAMED_METRICS.keys() & row.keys():
        _warn_renamed(file, old)
    return {RENAMED_METRICS.get(name, name): value for name, value in row.items()}


@functools.cache
def _warn_renamed(file: Path, old: str) -> None:
    print(printable(f"warning: {file}: {old} is read as {RENAMED_METRICS[old]}, its current name"), file=sys.stderr)


def read_metrics(run_path: Path) -> list[dict[str, Any]]:
    """Return the rows of `metrics.jsonl` by their current names, in order of their steps; of a step that is there twice
    the last. A line that is not whole, as of a process that was killed, is left out. Empty without the file.

    Raises:
        DataError: the file cannot be read.
    """
    file = run_path / FILE_NAME
    if not file.is_file():
        return []
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}", hint="make it readable") from error
    rows: dict[int, dict[str, Any]] = {}
    for line in text.splitlines():
        try:
            row = json.loads(line)
            step = int(row["step"])
        except (ValueError, TypeError, KeyError):
            continue
        rows[step] = with_current_names(row, file)
    return [rows[step] for step in sorted(rows)]


class MetricsSink(Protocol):
    """What takes the metrics of a run, step by step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take those of a finished step. A reader of the running run sees them."""

    def rewind(self, step: int) -> None:
        """Forget the steps after ``step``, from which the run continues: they are written again."""

    def close(self, *, failed: bool = False) -> None:
        """Finish; ``failed``: the run did. Safe to call twice."""


class MetricsFile:
    """``metrics.jsonl`` in the run's folder. The reader of a running run sees whole lines only.

    Raises:
        ConfigError: it cannot be written to.
        RunError: the disk is full, also in ``write``.
    """

    def __init__(self, run_path: Path) -> None:
        self._path = run_path / FILE_NAME
        with writing(self._path, hint="make it writable, or give --name NAME"):
            self._file: TextIO = self._path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": step, "time": round(time.time(), 3)} | {key: _plain(value) for key, value in metrics.items()}
        with writing(self._path):
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()

    def rewind(self, step: int) -> None:
        """Keep the lines up to ``step``, and drop a last line that a killed process left unfinished.

        The file is shortened in place, since it is open already: what is appended must end up here.
        """
        kept = [line for line in self._path.read_text(encoding="utf-8").splitlines() if _step(line) <= step]
        with self._path.open("r+", encoding="utf-8") as file:
            file.write("".join(line + "\n" for line in kept))  # the lines that stay come first: nothing moves
            file.truncate()

    def has(self, step: int) -> bool:
        """Return whether there is a line of this step."""
        return any(_step(line) == step for line in self._path.read_text(encoding="utf-8").splitlines())

    def close(self, *, failed: bool = False) -> None:
        with contextlib.suppress(OSError):  # what a full disk did not take, ``write`` has told
            self._file.close()


def _step(line: str) -> float:
    """Return the step of a line; infinity, so that it is dropped, for one that is not whole."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


def _plain(value: float) -> float | int | str:
    """Return a numpy number as Python's; JSON has no nan and inf, so these become text that ``float()`` reads back."""
    if isinstance(value, int):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else str(number)
