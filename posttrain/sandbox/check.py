"""Running a solution's tests in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from posttrain.sandbox.base import Sandbox


@dataclass(frozen=True)
class TestResult:
    """What became of one test."""

    __test__ = False  # for pytest

    status: Literal["passed", "failed", "error", "timeout"]
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.status == "passed"


def check_solution(
    sandbox: Sandbox,
    solution: str,
    tests: Sequence[str],
    *,
    setup: str = "",
    deadline_s: float,
    budget_s: float | None = None,
    stop: bool = False,
) -> list[TestResult]:
    """Run test sources (``assert f(1) == 2``) against a solution, in another process than the solution's.

    ``setup`` runs before the tests and is trusted as they are. ``deadline_s`` is of one test, ``budget_s`` of all
    together (None: as many times ``deadline_s``); ``stop`` ends at the first that does not pass. Returns a result for
    every test; those that did not run count as failed.

    Raises:
        SandboxError: the sandbox failed.
    """
    budget_s = deadline_s * len(tests) if budget_s is None else budget_s
    job = json.dumps(
        {"setup": setup, "tests": list(tests), "deadline_s": deadline_s, "budget_s": budget_s, "stop": stop}
    )
    frames = b"".join(
        b"%d\n" % len(data) + data for data in (solution.encode("utf-8", "surrogateescape"), job.encode())
    )
    result = sandbox.run_harness(frames, deadline_s=budget_s + 1.0)
    try:
        if result.status != "ok":
            raise ValueError(result.status)
        found = [TestResult(item["status"], item["detail"]) for item in json.loads(result.stdout)]
    except (ValueError, KeyError, TypeError) as error:
        # The tests' process cannot be harmed from within but by killing it: that is the solution's doing.
        reason = f"no verdict ({error}): {result.stderr.strip()[-300:]}"
        found = [TestResult("timeout" if result.status == "timeout" else "error", reason)]
    return found + [TestResult("failed", "not run")] * (len(tests) - len(found))
