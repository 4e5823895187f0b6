"""Graders of programs: ``prime_code``, ``humaneval``, ``mbpp``. Everything runs in the sandbox.

Tests on stdin and stdout run the program once a test and compare its output here. Tests that call functions run in
another process than the solution's (``posttrain.sandbox.harness``), which therefore cannot claim success.
"""

from __future__ import annotations

import json
import re
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.core.types import Score
from posttrain.rewards import item_deadline_s, sandboxed
from posttrain.sandbox import CallTest, RunResult, Sandbox, TestResult, check_solution, shared_sandbox
from posttrain.sandbox.same import close

TEST_DEADLINE_S = 10.0
"""Longest time for one test, unless the row's ``extra_info["time_limit_s"]`` says otherwise."""
_BUDGET = 0.75
"""Share of ``reward.deadline_s`` that all tests of a response may take. Those that do not get to run count as failed: a
slow program must not look like a grader that hangs."""
_ANSWERS = 0.9
"""Share of ``reward.deadline_s`` after which results of tests are no longer waited for: a sandbox that hangs must not
look like a slow program."""
_FIRST = 10
"""Tests that PRIME's share is of."""
_FENCE = re.compile(
    r"(?:^[ \t]*```([\w+-]*)|```(python3?|py))[^\n`]*\n((?:(?!^[ \t]*```).)*)(^[ \t]*```(?![\w+-]))?",
    re.DOTALL | re.MULTILINE,
)
"""That of Python may open after words; it closes at the start of a line. One that another opens before is none: it
matches without its last group, so that what is in it is read once."""
_PYTHON = ("python", "python3", "py")
_COMMON_IMPORTS = """\
import bisect, collections, functools, heapq, itertools, json, math, operator, os, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
import math
"""
"""What LeetCode-style solutions take for granted."""


def extract_code(response: str) -> str | None:
    """The last block fenced as Python, else the last fenced without a language (beside a program that is its output),
    or the whole response where there is no fence at all; None when it is empty or the fences hold other languages
    only. Thoughts that have ended are not looked at. A block in a list has its indentation taken off."""
    response = response.rpartition("</think>")[2]
    blocks = [(first or later, textwrap.dedent(body)) for first, later, body, end in _FENCE.findall(response) if end]
    if not blocks:
        body = response.split("```")[0] if response.count("```") == 1 and response.strip().endswith("```") else response
        return body if body.strip() and "```" not in body else None
    marked = [body for language, body in blocks if language.lower() in _PYTHON]
    found = marked or [body for language, body in blocks if not language]
    return found[-1] if found and found[-1].strip() else None


@sandboxed
def grade_prime_code(response: str, ground_truth: Any, extra_info: dict[str, Any]) -> Score:
    """Share of tests passed (PRIME, arXiv:2502.01456), or 1 and 0 with ``extra_info["continuous"] = False``.

    As in PRIME the share is of the first ten tests, unless that of all is less.

    ``ground_truth`` is JSON: ``{"inputs": [...], "outputs": [...]}`` of stdin and stdout; the same with ``fn_name``, of
    arguments and results; or ``{"assert_case": [...]}`` (or a list) of assert statements. All or nothing ends at the
    first test that fails. ``extra_info["time_limit_s"]``: of one test.

    Raises:
        ValueError: the ground truth is none of these.
    """
    return _grade_tests(response, ground_truth, extra_info, wrapped=False)


@sandboxed
def grade_apps(response: str, ground_truth: Any, extra_info: dict[str, Any]) -> Score:
    """``grade_prime_code`` for APPS and TACO, which wrap some expected results of calls in a list of one.

    Raises:
        ValueError: the ground truth is not as there.
    """
    return _grade_tests(response, ground_truth, extra_info, wrapped=True)


@sandboxed
def grade_humaneval(response: str, ground_truth: Any, extra_info: dict[str, Any]) -> Score:
    """HumanEval (Chen et al. 2021, arXiv:2107.03374): 1 if ``check(entry_point)`` passes.

    ``ground_truth`` is JSON with ``prompt``, ``test`` and ``entry_point``. The response is a whole program in a fence,
    or the body that goes on where the prompt ends. What the prompt defines before the function is there for both the
    program and the test, to each in a version of its own.
    """
    task = _mapping(ground_truth, "prompt", "test", "entry_point")
    code = extract_code(response)
    if code is None:
        return _verdict([], False, None)
    entry, prompt = task["entry_point"], task["prompt"]
    definition = re.compile(rf"^[ \t]*(async[ \t]+)?def[ \t]+{re.escape(entry)}\b", re.MULTILINE)
    start = definition.search(prompt)
    helpers = prompt[: start.start()] if start else ""
    program = code if definition.search(code) else prompt + code
    test = f"{task['test']}\ncheck({entry})"
    results = _check(program, [test], extra_info, prelude=helpers, setup=helpers, tested=entry)
    return _verdict(results, False, program)


@sandboxed
def grade_mbpp(response: str, ground_truth: Any, extra_info: dict[str, Any]) -> Score:
    """MBPP (Austin et al. 2021, arXiv:2108.07732): 1 if every assert passes.

    ``ground_truth`` is JSON with ``test_list`` and perhaps ``test_setup_code`` and ``challenge_test_list``.
    """
    task = _mapping(ground_truth, "test_list")
    code = extract_code(response)
    if code is None:
        return _verdict([], False, None)
    tests = [*task["test_list"], *(task.get("challenge_test_list") or [])]
    setup = task.get("test_setup_code") or ""
    results = _check(code, tests, extra_info, setup=setup)
    return _verdict(results, False, code)


def run_tests(
    sandbox: Sandbox,
    code: str,
    tests: Mapping[str, Any],
    *,
    deadline_s: float,
    budget_s: float,
    answer_s: float | None = None,
    stop: bool,
    wrapped: bool = False,
) -> list[TestResult]:
    """Return results by test, of tests as ``grade_prime_code`` takes them. ``deadline_s`` is of one test, ``budget_s``
    of all, ``answer_s`` of the wait for the results of all, as in ``Sandbox.run``; with ``stop``, tests after a failure
    count as failed. ``wrapped``: an expected list of one stands for its item too.

    Raises:
        SandboxError: the sandbox failed.
    """
    pairs = list(zip(tests.get("inputs", ()), tests.get("outputs", ()), strict=True))
    calls: list[str | CallTest] | None = None
    if "assert_case" in tests:
        calls = list(tests["assert_case"])
    elif tests.get("fn_name"):
        calls = [_call_test(tests["fn_name"], given, expected, wrapped) for given, expected in pairs]
    if calls is not None:
        return check_solution(
            sandbox,
            code,
            calls,
            prelude=_COMMON_IMPORTS,
            deadline_s=deadline_s,
            budget_s=budget_s,
            answer_s=answer_s,
            stop=stop,
        )
    results: list[TestResult] = []
    begin = time.monotonic()
    end = begin + budget_s
    for given, expected in pairs:
        now = time.monotonic()
        left = min(deadline_s, end - now)
        if left <= 0:
            results.append(TestResult("timeout", f"the {budget_s:g} s for all tests are over"))
            continue
        answer_left = None if answer_s is None else begin + answer_s - now
        results.append(_run_pair(sandbox, code, _text(given), _text(expected), left, answer_left))
        if stop and not results[-1].passed:
            break
    return results + [TestResult("failed", "not run")] * (len(pairs) - len(results))


def same_output(output: str, expected: str) -> bool:
    """Line by line without trailing blanks, then word by word where a number with a decimal point need only be close
    (``posttrain.sandbox.same.close``)."""
    lines, wanted = (text.rstrip().splitlines() for text in (output, expected))
    if [line.rstrip() for line in lines] == [line.rstrip() for line in wanted]:
        return True
    if len(lines) != len(wanted):
        return False
    return all(_same_words(line.split(), want.split()) for line, want in zip(lines, wanted, strict=True))


def _same_words(words: list[str], wanted: list[str]) -> bool:
    return len(words) == len(wanted) and all(w == v or _close(w, v) for w, v in zip(words, wanted, strict=True))


_DECIMAL = re.compile(r"[-+]?(\d+\.\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\d+[eE][-+]?\d+")
_NUMBER = re.compile(rf"({_DECIMAL.pattern})|[-+]?\d+")


def _close(word: str, wanted: str) -> bool:
    if max(len(word), len(wanted)) > 400 or not _DECIMAL.fullmatch(wanted) or not _NUMBER.fullmatch(word):
        return False
    return close(float(word), wanted)


def _run_pair(
    sandbox: Sandbox, code: str, given: str, expected: str, deadline_s: float, answer_s: float | None
) -> TestResult:
    result = sandbox.run(code, given, deadline_s=deadline_s, answer_s=answer_s)
    if result.status == "timeout":
        return TestResult("timeout", f"no end within {deadline_s:g} s")
    if not _ended_itself(result):
        return TestResult("error", result.stderr.strip()[-500:] or f"{result.status}, exit code {result.exit_code}")
    if same_output(result.stdout, expected):
        return TestResult("passed")
    return TestResult("failed", f"expected {expected[:200]!r}, got {result.stdout[:200]!r}")


_TRACEBACK = re.compile(r'^ +File ".*", line \d+', re.MULTILINE)


def _ended_itself(result: RunResult) -> bool:
    """Return whether a program came to its end or called ``sys.exit``, with whatever exit code: to the graders of APPS,
    PRIME and LiveCodeBench, too, ``sys.exit(1)`` after the right output is right, and an exception or a signal is
    not."""
    if result.status == "ok":
        return True
    return result.status == "error" and (result.exit_code or 0) > 0 and not _TRACEBACK.search(result.stderr)


def _call_test(name: str, given: Any, expected: Any, wrapped: bool) -> CallTest:
    """A test of one call: arguments as a list, or as text with one JSON value a line (APPS)."""
    if not isinstance(given, str):
        return CallTest(name, given, expected, wrapped)
    args = [json.loads(line) for line in given.splitlines() if line.strip()]
    return CallTest(name, args, json.loads(expected) if isinstance(expected, str) else expected, wrapped)


def _parse_tests(ground_truth: Any) -> Mapping[str, Any]:
    tests = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if isinstance(tests, list):
        tests = {"assert_case": tests}
    if not isinstance(tests, Mapping):
        raise ValueError(f"ground truth is {type(tests).__name__}, not an object of tests")
    if "assert_case" in tests:
        ok = bool(tests["assert_case"])
    else:
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
        ok = isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs) > 0
    if not ok:
        raise ValueError("ground truth has neither assert_case nor as many inputs as outputs, or no test at all")
    return tests


def _mapping(ground_truth: Any, *keys: str) -> Mapping[str, Any]:
    task = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    missing = [key for key in keys if not isinstance(task, Mapping) or not task.get(key)]
    if missing:
        raise ValueError(f"ground truth has no {', '.join(missing)}")
    return dict(task)


def _grade_tests(response: str, ground_truth: Any, extra_info: Mapping[str, Any], *, wrapped: bool) -> Score:
    tests = _parse_tests(ground_truth)
    asked = extra_info.get("continuous")  # null: parquet fills in what other rows have
    continuous = asked is None or bool(asked)
    code = extract_code(response)
    if code is None:
        return _verdict([], continuous, None)
    results = run_tests(
        shared_sandbox(),
        code,
        tests,
        deadline_s=_seconds(extra_info),
        budget_s=_BUDGET * item_deadline_s(),
        answer_s=_ANSWERS * item_deadline_s(),
        stop=not continuous,
        wrapped=wrapped,
    )
    return _verdict(results, continuous, code)


def _check(
    code: str,
    tests: Sequence[str],
    extra_info: Mapping[str, Any],
    *,
    setup: str,
    prelude: str = "",
    tested: str | None = None,
) -> list[TestResult]:
    return check_solution(
        shared_sandbox(),
        code,
        tests,
        prelude=prelude,
        setup=setup,
        tested=tested,
        deadline_s=_seconds(extra_info),
        budget_s=_BUDGET * item_deadline_s(),
        answer_s=_ANSWERS * item_deadline_s(),
        stop=True,
    )


def _seconds(extra_info: Mapping[str, Any]) -> float:
    return float(extra_info.get("time_limit_s") or TEST_DEADLINE_S)


def _text(value: Any) -> str:
    """A test's stdin or stdout; some sets keep it as a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _verdict(results: Sequence[TestResult], continuous: bool, code: str | None) -> Score:
    passed = sum(result.passed for result in results)
    correct = bool(results) and passed == len(results)
    share = passed / len(results) if results else 0.0
    first = [result.passed for result in results[:_FIRST]]
    score = min(share, sum(first) / max(1, len(first))) if continuous else float(correct)
    return Score(score, correct, extracted=code, parts={"tests_passed": share})
