"""A client of a SandboxFusion-compatible service: ``POST {url}/run_code``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx

from posttrain.config import SandboxConfig
from posttrain.core.http import api_key, http_url
from posttrain.sandbox.base import RunResult, SandboxError, SandboxUnavailable, Session
from posttrain.sandbox.bundle import harness_program

_PROGRAM = Path(__file__).with_name("program.py")
_SLACK_S = 15.0
"""Longest wait beyond a program's own deadline where the caller states none: the service may queue it."""
_ATTEMPTS = 4


class RemoteSandbox:
    """Runs programs on the service. How well it isolates them, and its limits on files and processes, are its own.

    Raises:
        ConfigError: the URL is none, or holds a user or password; or the variable with the key is not set.
    """

    def __init__(self, cfg: SandboxConfig) -> None:
        self.cfg = cfg
        url = http_url(cfg.url.rstrip("/"), what="sandbox.url", example="http://127.0.0.1:8080")
        key = api_key(cfg.api_key_env, what="sandbox.api_key_env")
        self._client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"} if key else {})

    @property
    def gaps(self) -> tuple[str, ...]:
        return ()

    def run(
        self,
        code: str,
        stdin: str = "",
        *,
        deadline_s: float | None = None,
        echo: bool = False,
        answer_s: float | None = None,
    ) -> RunResult:
        seconds = deadline_s or self.cfg.deadline_s
        if echo:
            run = f"sys.exit(execute({code!a}, new_main('main.py'), 'main.py', echo=True))"
            code = f"{_PROGRAM.read_text(encoding='utf-8')}\n\n{run}\n"
        request = {
            "code": code,
            "language": "python",
            "stdin": stdin,
            "compile_timeout": seconds,
            "run_timeout": seconds,
            "memory_limit_MB": self.cfg.memory_mb,
        }
        answer = self._post(request, seconds + _SLACK_S if answer_s is None else answer_s)
        result = answer.get("run_result")
        if answer.get("status") == "SandboxError" or not isinstance(result, dict):
            message = str(answer.get("message") or f"status {answer.get('status')!r} without a result")[:300]
            raise SandboxError(f"{self.cfg.url}: the service failed: {message}")
        return self._result(result)

    def run_harness(self, frames: bytes, *, deadline_s: float, answer_s: float | None = None) -> RunResult:
        stdin = frames.decode("utf-8", "surrogateescape")
        return self.run(harness_program(), stdin, deadline_s=deadline_s, answer_s=answer_s)

    def session(self) -> Session:
        raise SandboxUnavailable(
            "a remote sandbox has no sessions: each program there is a process of its own",
            hint="set sandbox.mode = 'local', or run programs without a session",
        )

    def abort(self) -> None:
        """Nothing: a program on a service ends at its own deadline."""

    def close(self) -> None:
        self._client.close()

    def _result(self, result: dict[str, Any]) -> RunResult:
        limit = self.cfg.output_kb * 1024
        out, err = str(result.get("stdout") or ""), str(result.get("stderr") or "")
        seconds, code = float(result.get("execution_time") or 0.0), result.get("return_code")
        if result.get("status") == "TimeLimitExceeded":
            return RunResult("timeout", None, out[:limit], err[:limit], seconds)
        if max(len(out), len(err)) > limit:
            return RunResult("output", None, out[:limit], err[:limit], seconds)
        finished = result.get("status") == "Finished" and code == 0
        return RunResult("ok" if finished else "error", code if isinstance(code, int) else None, out, err, seconds)

    def _post(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """One request, repeated while the service is busy or away, for so many ``seconds`` in all."""
        problem, end = "", time.monotonic() + seconds
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(min(0.25 * 2**attempt, max(0.0, end - time.monotonic())))
            if (left := end - time.monotonic()) <= 0:
                often = f"within {seconds:.3g} s"
                break
            try:
                response = self._client.post("/run_code", json=request, timeout=left)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if response.status_code in (408, 429) or response.status_code >= 500:
                problem = f"HTTP {response.status_code}"
                continue
            if response.status_code != 200:
                raise SandboxError(f"{self.cfg.url}: HTTP {response.status_code}: {response.text[:200]}")
            try:
                answer = response.json()
            except ValueError as error:
                raise SandboxError(f"{self.cfg.url}: the answer is not JSON: {response.text[:200]}") from error
            if not isinstance(answer, dict):
                raise SandboxError(f"{self.cfg.url}: the answer is not an object: {response.text[:200]}")
            return answer
        else:
            often = f"{_ATTEMPTS} times"
        raise SandboxError(
            f"{self.cfg.url} did not answer {often}: {problem}", hint="is the service running? sandbox.url"
        )
