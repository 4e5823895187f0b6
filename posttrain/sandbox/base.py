"""What runs generated code: the result type, the protocol, the errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from posttrain.errors import ConfigError, RunError

RunStatus = Literal["ok", "error", "timeout", "memory", "output"]


class SandboxError(RunError):
    """The sandbox itself failed: nothing is known about the program."""


class SandboxUnavailable(ConfigError):
    """Nothing on this machine can isolate a program, or the remote service does not answer."""


@dataclass(frozen=True)
class RunResult:
    """What became of one program."""

    status: RunStatus
    """ok: it ended with exit code 0. error: other codes, or a signal. timeout, memory, output: killed at that limit."""
    exit_code: int | None
    """Minus the signal's number when a signal ended it; None when it was killed at a limit."""
    stdout: str
    stderr: str
    seconds: float
    """Wall time in the sandbox."""


class Sandbox(Protocol):
    """Runs one Python program at a time. Not for several threads at once: give each its own."""

    def run(self, code: str, stdin: str = "", *, deadline_s: float | None = None) -> RunResult:
        """Run a program to its end or to a limit. ``deadline_s`` replaces the configured one.

        Raises:
            SandboxError: the sandbox failed; whatever the program does, even to the sandbox, is a result instead.
        """

    def run_harness(self, frames: bytes, *, deadline_s: float) -> RunResult:
        """Run ``posttrain.sandbox.harness`` on its input: a solution, then the tests of it."""

    def close(self) -> None:
        """End it. Idempotent."""
