"""What runs generated code: the result type, the protocol, the errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from posttrain.core.errors import ConfigError, RunError

RunStatus = Literal["ok", "error", "timeout", "memory", "output", "aborted"]


class SandboxError(RunError):
    """The sandbox itself failed: nothing is known about the program."""


class SandboxUnavailable(ConfigError):
    """Nothing on this machine can isolate a program, or the remote service does not answer."""


@dataclass(frozen=True)
class RunResult:
    """What became of one program."""

    status: RunStatus
    """ok: it ended with exit code 0. error: other codes, or a signal. timeout, memory, output: it broke that limit.
    aborted: ``Sandbox.abort`` ended it."""
    exit_code: int | None
    """Minus the signal's number when a signal ended it; None when it was killed at a limit."""
    stdout: str
    stderr: str
    seconds: float
    """Wall time in the sandbox."""
    session_ended: bool = False
    """True where a cell ended the session: its process is gone, with all variables. The next cell starts a new one."""


class Session(Protocol):
    """Runs cells one after the other in one namespace, as a notebook does. Not for several threads at once."""

    def run(self, code: str, *, deadline_s: float | None = None) -> RunResult:
        """Run a cell. Its output is its own, the value of a last expression included. At the deadline it is
        interrupted, and the session goes on if that helps within a second.

        Raises:
            SandboxError: the sandbox failed, and the session's variables are gone.
        """

    def close(self) -> None:
        """End it with all its processes; its sandbox can be used again. Idempotent."""


class Sandbox(Protocol):
    """Runs one Python program, or one session, at a time. Not for several threads at once: give each its own."""

    @property
    def gaps(self) -> tuple[str, ...]:
        """The parts of the isolation that this machine lacks, in words; as far as it is known here."""

    def run(
        self,
        code: str,
        stdin: str = "",
        *,
        deadline_s: float | None = None,
        echo: bool = False,
        answer_s: float | None = None,
    ) -> RunResult:
        """Run a program to its end or to a limit.

        Args:
            deadline_s: replaces the configured one.
            echo: print the value of a last expression, as the interactive interpreter does.
            answer_s: longest wait for the result; None: what the sandbox itself adds to the program's deadline.

        Raises:
            SandboxError: the sandbox failed; whatever the program does, even to the sandbox, is a result instead.
        """

    def run_harness(self, frames: bytes, *, deadline_s: float, answer_s: float | None = None) -> RunResult:
        """Run ``posttrain.sandbox.harness`` on its input: a solution, then the tests of it."""

    def session(self) -> Session:
        """A session. Nothing else may run in this sandbox until it is closed.

        Raises:
            SandboxUnavailable: this kind of sandbox has none.
        """

    def abort(self) -> None:
        """End what runs now, where that is possible; for another thread than the one that waits for it."""

    def close(self) -> None:
        """End it. Idempotent."""
