"""The logs in a run's folder: what the driver showed, and what its workers wrote to stdout and stderr.

    runs/<name>/logs/driver.log            notes, a line a step, the traceback of a failure
    runs/<name>/logs/actor-worker-0.log    one for each worker

A log that has grown beyond ``MOST_BYTES`` loses its first half.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from pathlib import Path

from posttrain.core.text import printable
from posttrain.tracking.console import PlainLines
from posttrain.tracking.progress import Progress

LOGS = "logs"
"""The folder of logs in that of a run."""
DRIVER = "driver.log"
MOST_BYTES = 8 << 20
"""Largest size of one log."""


class RunLog:
    """The driver's log. A disk that does not take it is no reason to end the run: what cannot be left out tells."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / DRIVER

    def write(self, text: str) -> None:
        """Append text with the time, so that nothing is lost when the process is killed."""
        with contextlib.suppress(OSError):
            self.file.parent.mkdir(exist_ok=True)
            with self.file.open("a", encoding="utf-8") as file:
                file.write(f"{_now()}  {printable(text)}\n")
            shorten(self.file)


class LogLines(PlainLines):
    """A ``View`` that writes to a log."""

    def __init__(self, progress: Progress, log: RunLog) -> None:
        super().__init__(progress)
        self._log = log

    def _print(self, text: str) -> None:
        self._log.write(text)


def worker_log(folder: Path, name: str) -> Path:
    """Return the log of a worker, by its name in messages."""
    return folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', name)}.log"


def take_over(file: Path) -> None:
    """Send stdout and stderr of this process, and of those that it starts, to the end of a log. Where the disk does not
    take it, they stay where they are."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        print(f"warning: cannot write {file}: {error.strerror}", file=sys.stderr)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    print(f"{_now()}  process {os.getpid()}", file=sys.stderr, flush=True)


def shorten(file: Path, most: int = MOST_BYTES) -> None:
    """Drop the first half of a log that has more than ``most`` bytes, in place: others may have it open to append."""
    with contextlib.suppress(OSError):
        if file.stat().st_size <= most:
            return
        with file.open("r+b") as log:
            log.seek(-(most // 2), os.SEEK_END)
            log.readline()  # the rest of a line
            kept = log.read()
            log.seek(0)
            log.write(b"(the beginning was dropped)\n" + kept)
            log.truncate()


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
