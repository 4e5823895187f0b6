"""`metrics.jsonl`: one JSON object a step, appended and flushed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

FILE_NAME = "metrics.jsonl"


class MetricsFile:
    """Appends steps to a file. The reader of a running run sees whole lines only."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": step, "time": round(time.time(), 3)} | {key: _plain(value) for key, value in metrics.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def truncate_metrics(path: Path, from_step: int) -> None:
    """Keep the lines of steps before ``from_step`` (a resumed run writes the later ones again), and drop a last line
    that a killed process left unfinished. A missing file stays missing.

    The file is shortened in place, since the run's tracker has it open already: what it appends must end up here.
    """
    if not path.is_file():
        return
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step(line) < from_step]
    with path.open("r+", encoding="utf-8") as file:
        file.write("".join(line + "\n" for line in kept))  # the lines that stay come first: nothing moves
        file.truncate()


def _step(line: str) -> float:
    """The step of a line; infinity, so that it is dropped, for one that is not whole."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


def _plain(value: float) -> float | int | str:
    """numpy's numbers to Python's; JSON has no nan and inf, so these become text that ``float()`` reads back."""
    if isinstance(value, int):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else str(number)
