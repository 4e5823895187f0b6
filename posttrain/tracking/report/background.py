"""The report of a run that goes on: made beside it, so that training never waits, and never a reason to fail."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path

from posttrain.tracking.report.collect import Collector
from posttrain.tracking.report.page import write_page

FILE = "report.html"


class Reporter:
    """Keeps ``report.html`` in the run's folder up to date, in a thread that ends with the process.

    Args:
        note: shows a line to the user.
    """

    def __init__(self, run: Path, note: Callable[[str], None]) -> None:
        self.file = run / FILE
        self._run, self._note = run, note
        self._collector = Collector()
        self._thread: threading.Thread | None = None
        self._made = self._warned = False

    def refresh(self) -> None:
        """Begin to make it anew, unless that is being done: the next time has all of this one."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._make, name="report", daemon=True)
            self._thread.start()

    def finish(self, deadline_s: float) -> bool:
        """Make it a last time; whether it was made."""
        until = time.monotonic() + deadline_s
        if self._thread is not None:
            self._thread.join(deadline_s)
        self.refresh()
        assert self._thread is not None
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._made = False
            self._warn(f"it was not made within {deadline_s:g} s")
        return self._made

    def _make(self) -> None:
        try:
            write_page(self.file, [self._run], self._collector)
            self._made = True
        except Exception as error:  # whatever it is, the run is more important
            self._made = False
            self._warn(f"{type(error).__name__}: {error}")

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            self._note(f"warning: no report: {what} (`posttrain report {shlex.quote(self._run.name)}` makes it later)")
