"""Memory and use of this machine's GPUs, asked of `nvidia-smi` now and then by a thread."""

from __future__ import annotations

import math
import shutil
import subprocess
import threading
from collections.abc import Sequence

_EVERY_S = 5.0
_DEADLINE_S = 10.0
_MOST = 4
"""GPUs with a text of their own; of more the range is told."""


class Gpus:
    """``text`` is what they do, and ``range`` the same in fewer words; empty where there is none, or `nvidia-smi` does
    not answer."""

    def __init__(self) -> None:
        self.text = self.range = ""
        self._ended = threading.Event()
        self._program = shutil.which("nvidia-smi")
        if self._program is not None:
            threading.Thread(target=self._watch, name="gpus", daemon=True).start()

    def close(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        query = ["--query-gpu=memory.used,memory.total,utilization.gpu", "--format=csv,noheader,nounits"]
        while True:
            try:
                command = [str(self._program), *query]
                done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=True)
                self.text, self.range = describe(done.stdout), describe(done.stdout, most=1)
            except (OSError, subprocess.SubprocessError, ValueError):
                self.text = self.range = ""  # a driver that does not answer is not this thread's to report
            if self._ended.wait(_EVERY_S):
                return


def describe(lines: str, most: int = _MOST) -> str:
    """Return the answer of `nvidia-smi` (MiB used, MiB in all, per cent busy; a line a GPU) in a few words: of each of
    at most ``most`` GPUs, or of the range of more."""
    gpus = [[_number(part) for part in line.split(",")] for line in lines.splitlines() if line.strip()]
    if not gpus:
        return ""
    if len(gpus) <= most:
        return "   ".join(filter(None, (_one(*gpu) for gpu in gpus)))
    memory = [(used / 1024, total / 1024) for used, total, _ in gpus if math.isfinite(used + total)]
    busy = [busy for _, _, busy in gpus if math.isfinite(busy)]
    parts = [f"{_range([used for used, _ in memory], '.1f')} of {memory[0][1]:.0f} GiB"] if memory else []
    parts += [f"{_range(busy, '.0f')} %"] if busy else []
    return f"{len(gpus)} GPUs: {', '.join(parts)}" if parts else ""


def _number(text: str) -> float:
    """Return a number of the answer; nan for `[N/A]`: a part of a GPU has no use of its own, and a GPU that shares the
    host's memory tells none."""
    return math.nan if "N/A" in text else float(text)


def _one(used: float, total: float, busy: float) -> str:
    """Return what is known of a GPU."""
    memory = f"{used / 1024:.1f}/{total / 1024:.0f} GiB" if math.isfinite(used + total) else ""
    return f"{memory} {busy:.0f} %".lstrip() if math.isfinite(busy) else memory


def _range(values: Sequence[float], style: str) -> str:
    low, high = f"{min(values):{style}}", f"{max(values):{style}}"
    return low if low == high else f"{low} to {high}"
