"""The stacks of a process's threads, which it writes at SIGUSR1 into a file in memory. Others on its node find that
file among those that it has open."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path


def write_stacks_at_signal() -> None:
    """Have this process write its stacks at SIGUSR1 from now on."""
    pid = os.getpid()
    if stacks_file(pid) is None:
        # faulthandler writes from C, without waiting for Python. Ray, SGLang and vLLM do not use this signal.
        faulthandler.register(signal.SIGUSR1, os.memfd_create(_name(pid)), all_threads=True)


def stacks_file(pid: int) -> Path | None:
    """Return the file that a process writes its stacks into. None: it has ended, or does not, so that the signal might
    end it."""
    try:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            if _link(file) == f"/memfd:{_name(pid)} (deleted)":
                return file
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return None


def _name(pid: int) -> str:
    """Return a name that tells the file from that of a process that this one was forked from."""
    return f"posttrain-stacks-{pid}"


def _link(file: Path) -> str:
    try:
        return os.readlink(file)
    except OSError:  # it was closed meanwhile
        return ""
