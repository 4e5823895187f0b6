"""The code interpreter: the model writes Python, and reads what it prints. Programs run in the sandbox of the run."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from typing import Any

from posttrain.core.errors import ConfigError
from posttrain.core.types import Prompt, ToolSchema
from posttrain.sandbox import check_sandbox, configured
from posttrain.sandbox.base import RunResult
from posttrain.sandbox.pool import PooledSession, SandboxBusy, SandboxPool
from posttrain.tools.base import Tool, ToolResult, cut

FUNCTION = "code_interpreter"
SCHEMA: ToolSchema = {
    "type": "function",
    "function": {
        "name": FUNCTION,
        "description": "Run Python code and read what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program."}},
            "required": ["code"],
        },
    },
}

NO_OUTPUT = "(no output)"
_STATE_LOST = "the session was restarted: variables, functions and imports of earlier calls are gone"
_FIRST_LINES, _LAST_LINES = 6, 10
"""Lines that are kept of what a program wrote to stderr: a traceback begins with the program's own lines and ends with
the message."""


@dataclass
class CodeState:
    """What belongs to one episode."""

    session: PooledSession | None = None
    """None: each call is a program of its own."""


class CodeInterpreter(Tool):
    """Registered as "code_interpreter". It has no opinion on an episode: its reward is None.

    Each call is a program of its own, or, with ``session``, a cell of the episode's notebook. Both print the value of a
    last expression.

    Args:
        session: the calls of an episode share variables, imports and functions.
        timeout_s: longest time of a call; none: `sandbox.deadline_s`.
        max_output_chars: of stdout and of stderr; more is cut in the middle.
        max_concurrent: programs that run at once, over all episodes.
        max_sessions: episodes that have a session at once; more wait before they begin.
        wait_s: longest time that a call waits until fewer than `max_concurrent` programs run.
        function_name: what the model calls.

    Raises:
        ConfigError: a number is not positive.
    """

    def __init__(
        self,
        *,
        session: bool = False,
        timeout_s: float | None = None,
        max_output_chars: int = 4096,
        max_concurrent: int = 8,
        max_sessions: int = 256,
        wait_s: float = 15.0,
        function_name: str = FUNCTION,
    ) -> None:
        numbers = {
            "timeout_s": timeout_s,
            "max_output_chars": max_output_chars,
            "max_concurrent": max_concurrent,
            "max_sessions": max_sessions,
            "wait_s": wait_s,
        }
        for option, value in numbers.items():
            if value is not None and not value > 0:
                raise ConfigError(
                    f"tool 'code_interpreter': {option} = {value} is not positive", hint="give a number above 0"
                )
        self.name = function_name
        self.schema = {"type": "function", "function": {**SCHEMA["function"], "name": function_name}}
        self._session = session
        self._timeout_s = timeout_s
        self._max_chars = max_output_chars
        self._pool = SandboxPool(max_concurrent, wait_s)
        self._sessions = asyncio.Semaphore(max_sessions)

    def check(self) -> None:
        """Run a first program.

        Raises:
            SandboxUnavailable, SandboxError: there is no sandbox, or none with sessions where the tool needs one.
        """
        cfg = configured()
        check_sandbox(cfg)
        if self._session and cfg.mode == "remote":
            raise ConfigError(
                "tool 'code_interpreter': session = true needs a local sandbox, and sandbox.mode is 'remote'",
                hint="leave session out (each call is then a program of its own), or set sandbox.mode = 'local'",
            )

    async def create(self, prompt: Prompt) -> CodeState:
        if not self._session:
            return CodeState()
        await self._sessions.acquire()
        return CodeState(self._pool.session())

    async def call(self, state: CodeState, arguments: dict[str, Any]) -> ToolResult:
        if unknown := sorted(set(arguments) - {"code"}):
            return ToolResult(f"error: unknown argument {unknown[0]!r}; give only 'code'", error=True)
        code = arguments.get("code")
        if not isinstance(code, str) or not code.strip():
            return ToolResult("error: argument 'code' must be a string with a Python program", error=True)
        runner = state.session or self._pool
        try:
            result = await runner.run(without_fence(code), deadline_s=self._timeout_s)
        except SandboxBusy as error:
            return ToolResult(f"error: {error.message}; nothing was run", error=True)
        text = self._shown(result)
        if state.session is not None and state.session.state_lost:
            text = f"note: before this call {_STATE_LOST}\n{text}"
        return ToolResult(text, error=result.status != "ok")

    async def release(self, state: CodeState) -> None:
        if state.session is not None:
            try:
                await state.session.close()
            finally:
                self._sessions.release()

    async def close(self) -> None:
        """End all sandboxes, at the end of the run."""
        await asyncio.to_thread(self._pool.close)

    def _shown(self, result: RunResult) -> str:
        """What the model reads of a result."""
        complaint = _complaint(result, self._timeout_s or configured().deadline_s)
        parts = [
            cut(result.stdout.rstrip(), self._max_chars),
            cut(useful_lines(result.stderr.rstrip()), self._max_chars),
            complaint,
            f"error: {_STATE_LOST}" if result.session_ended else "",
        ]
        return "\n".join(part for part in parts if part.strip()) or NO_OUTPUT


def _complaint(result: RunResult, seconds: float) -> str:
    """Why a program did not end well, where its own stderr does not say so."""
    code = result.exit_code
    if result.status == "timeout":
        return f"error: stopped after {seconds:g} s"
    if result.status == "memory":
        return "error: killed, because it used too much memory"
    if result.status == "output":
        return "error: stopped, because it printed too much"
    if result.status == "aborted":
        return "error: stopped"
    if code is not None and code < 0:
        return f"error: killed by {_signal_name(-code)}"
    if code and not result.stderr.strip():
        return f"error: exit code {code}"
    return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def without_fence(code: str) -> str:
    """The inside of a Markdown block, if the text begins as one; an end that was forgotten does not matter."""
    lines = code.strip().split("\n")
    if not lines[0].startswith("```"):
        return code
    if len(lines) == 1:
        return lines[0].strip("`")
    fences = [number for number, line in enumerate(lines) if number and line.strip() == "```"]
    return "\n".join(lines[1 : fences[-1] if fences else None])


def useful_lines(stderr: str) -> str:
    """The first and the last lines."""
    lines = stderr.splitlines()
    left_out = len(lines) - _FIRST_LINES - _LAST_LINES
    if left_out <= 1:
        return stderr
    return "\n".join([*lines[:_FIRST_LINES], f"... {left_out} lines cut ...", *lines[-_LAST_LINES:]])
