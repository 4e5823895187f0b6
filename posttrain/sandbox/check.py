"""Running a solution's tests in a sandbox."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from posttrain.sandbox.base import RunResult, Sandbox, SandboxError


@dataclass(frozen=True)
class TestResult:
    """What became of one test."""

    __test__ = False  # for pytest

    status: Literal["passed", "failed", "error", "timeout"]
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.status == "passed"


@dataclass(frozen=True)
class CallTest:
    """A call and what it must return, as JSON has them (``posttrain.sandbox.same`` compares)."""

    entry: str
    """A function, or a method of the class ``Solution`` where the solution has one."""
    args: Sequence[Any]
    expected: Any
    wrapped: bool = False
    """True where an expected list of one stands for its item too."""


def check_solution(
    sandbox: Sandbox,
    solution: str,
    tests: Sequence[str | CallTest],
    *,
    prelude: str = "",
    setup: str = "",
    tested: str | None = None,
    deadline_s: float,
    budget_s: float | None = None,
    answer_s: float | None = None,
    stop: bool = False,
) -> list[TestResult]:
    """Run tests (calls, or sources such as ``assert f(1) == 2``) against a solution, in another process than the
    solution's.

    ``prelude`` runs before the solution, in its namespace; ``setup`` before each test, and is trusted as they are.
    ``tested`` is the one name in the tests that is the solution's (None: every name that neither tests, setup nor the
    standard library have). ``deadline_s`` is of one test, ``budget_s`` of all together (None: as many times
    ``deadline_s``), ``answer_s`` of the wait for the results, as in ``Sandbox.run``; ``stop`` ends at the
    first that does not pass. Returns a result for every test; those that did not run count as failed.

    Raises:
        SandboxError: the sandbox failed, or could start nothing of the solution.
    """
    budget_s = deadline_s * len(tests) if budget_s is None else budget_s
    secret = secrets.token_hex(16)
    job = {
        "secret": secret,
        "setup": setup,
        "tested": tested,
        "tests": [asdict(test) if isinstance(test, CallTest) else test for test in tests],
        "deadline_s": deadline_s,
        "budget_s": budget_s,
        "stop": stop,
    }
    source = {"prelude": prelude, "source": solution, "once": stop or len(tests) == 1}
    frames = [json.dumps(frame).encode() for frame in (source, job)]
    spare = 1.0 if answer_s is None else min(1.0, (answer_s - budget_s) / 2)
    sent = b"".join(b"%d\n" % len(data) + data for data in frames)
    result = sandbox.run_harness(sent, deadline_s=budget_s + spare, answer_s=answer_s)
    found = _verdict(result, secret, len(tests))
    return found + [TestResult("failed", "not run")] * (len(tests) - len(found))


def _verdict(result: RunResult, secret: str, tests: int) -> list[TestResult]:
    """The results that the tests' process wrote; only it knows the secret. Without a verdict, one result that says why:
    that process can only be harmed by killing it, which is the solution's doing."""
    try:
        if result.status != "ok":
            raise ValueError(result.status)
        answer = json.loads(result.stdout)
        if answer["secret"] != secret:
            raise ValueError("it is not from the tests")
        if "refused" not in answer:
            return [TestResult(item["status"], item["detail"]) for item in answer["results"]][:tests]
    except (ValueError, KeyError, TypeError) as error:
        reason = f"no verdict ({error}): {result.stderr.strip()[-300:]}"
        return [TestResult("timeout" if result.status == "timeout" else "error", reason)]
    raise SandboxError(
        f"no solution could be tested: {answer['refused']}", hint="is the machine short of processes or memory?"
    )
