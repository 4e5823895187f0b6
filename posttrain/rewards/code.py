"""Graders of programs: ``prime_code``, ``humaneval``, ``mbpp``. Everything runs in the sandbox.

Tests on stdin and stdout run the program once a test and compare its output here. Tests that call functions run in
another process than the solution's (``posttrain.sandbox.harness``), which therefore cannot claim success.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.rewards import item_deadline_s, sandboxed
from posttrain.sandbox import Sandbox, TestResult, check_solution, shared_sandbox
from posttrain.types import Score

TEST_DEADLINE_S = 10.0
"""Longest time for one test, unless the row's ``extra_info["time_limit_s"]`` says otherwise."""
_BUDGET = 0.75
"""Share of ``reward.deadline_s`` that all tests of a response may take. Those that do not get to run count as failed: a
slow program must not look like a grader that hangs."""
_FIRST = 10
"""Tests that PRIME's share is of."""
_FENCE = re.compile(r"^[ \t]*```([\w+-]*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "python3", "py", "")
_MODULES = (
    "import bisect, collections, functools, heapq, itertools, json, math, operator, os, random, re, string, sys\n"
)
_COMMON_IMPORTS = f"""\
{_MODULES}from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
import math
"""
"""What LeetCode-style solutions take for granted."""
_SAME = '''
def _same(result, expected):
    """Equality of a JSON expectation: a tuple is a list, a number with a point is compared as one."""
    if isinstance(result, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(result) == len(expected) and all(map(_same, result, expected))
    if isinstance(result, dict) and isinstance(expected, dict):
        texts = {str(key): value for key, value in result.items()}
        return texts.keys() == expected.keys() and all(_same(texts[key], expected[key]) for key in expected)
    if isinstance(expected, bool) or isinstance(result, bool):
        return result is expected
    if isinstance(result, float) and isinstance(expected, (int, float)):
        return abs(result - expected) <= 1e-6 * max(1.0, abs(expected))
    return type(result) is type(expected) and result == expected
'''


def extract_code(response: str) -> str | None:
    """The last fenced Python block, or the whole response where there is no fence at all; None when it is empty or the
    fences hold other languages only."""
    blocks = _FENCE.findall(response)
    if not blocks:
        body = response.split("```")[0] if response.count("```") == 1 and response.strip().endswith("```") else response
        return body if body.strip() and "```" not in body else None
    found = [body for language, body in blocks if language.lower() in _PYTHON]
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
    tests = _parse_tests(ground_truth)
    continuous = bool(extra_info.get("continuous", True))
    code = extract_code(response)
    if code is None:
        return _verdict([], continuous, None)
    seconds = _seconds(extra_info)
    results = run_tests(shared_sandbox(), code, tests, deadline_s=seconds, budget_s=_budget_s(), stop=not continuous)
    return _verdict(results, continuous, code)


@sandboxed
def grade_humaneval(response: str, ground_truth: Any, extra_info: dict[str, Any]) -> Score:
    """HumanEval (Chen et al. 2021, arXiv:2107.03374): 1 if ``check(entry_point)`` passes.

    ``ground_truth`` is JSON with ``prompt``, ``test`` and ``entry_point``. The response is a whole program in a fence,
    or the body that goes on where the prompt ends.
    """
    task = _mapping(ground_truth, "prompt", "test", "entry_point")
    code = extract_code(response)
    if code is None:
        return _verdict([], False, None)
    entry, prompt = task["entry_point"], task["prompt"]
    if re.search(rf"^[ \t]*(async[ \t]+)?def[ \t]+{re.escape(entry)}\b", code, re.MULTILINE):
        program = f"{prompt[: prompt.find('def ')]}\n{code}" if "def " in prompt else code
    else:
        program = prompt + code
    test = f"{task['test']}\ncheck({entry})"
    results = _check(program, [test], "", extra_info)
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
    results = _check(code, tests, setup, extra_info)
    return _verdict(results, False, code)


def run_tests(
    sandbox: Sandbox, code: str, tests: Mapping[str, Any], *, deadline_s: float, budget_s: float, stop: bool
) -> list[TestResult]:
    """Results by test, of tests as ``grade_prime_code`` takes them. ``deadline_s`` is of one test, ``budget_s`` of all;
    with ``stop``, tests after a failure count as failed.

    Raises:
        SandboxError: the sandbox failed.
    """
    if "assert_case" in tests:
        program = _COMMON_IMPORTS + code
        return check_solution(
            sandbox, program, tests["assert_case"], setup=_MODULES, deadline_s=deadline_s, budget_s=budget_s, stop=stop
        )
    pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
    if tests.get("fn_name"):
        calls = [_call_test(tests["fn_name"], given, expected) for given, expected in pairs]
        program = _COMMON_IMPORTS + code
        return check_solution(sandbox, program, calls, setup=_SAME, deadline_s=deadline_s, budget_s=budget_s, stop=stop)
    results: list[TestResult] = []
    end = time.monotonic() + budget_s
    for given, expected in pairs:
        left = min(deadline_s, end - time.monotonic())
        if left <= 0:
            results.append(TestResult("timeout", f"the {budget_s:g} s for all tests are over"))
            continue
        results.append(_run_pair(sandbox, code, _text(given), _text(expected), left))
        if stop and not results[-1].passed:
            break
    return results + [TestResult("failed", "not run")] * (len(pairs) - len(results))


def same_output(output: str, expected: str) -> bool:
    """Line by line without trailing blanks, then word by word where a number with a decimal point need only be close
    (relative or absolute 1e-6)."""
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
    if len(word) > 400 or not _DECIMAL.fullmatch(wanted) or not _NUMBER.fullmatch(word):
        return False
    return math.isclose(float(word), float(wanted), rel_tol=1e-6, abs_tol=1e-6)


def _run_pair(sandbox: Sandbox, code: str, given: str, expected: str, deadline_s: float) -> TestResult:
    result = sandbox.run(code, given, deadline_s=deadline_s)
    if result.status == "timeout":
        return TestResult("timeout", f"no end within {deadline_s:g} s")
    if result.status != "ok":
        return TestResult("error", result.stderr.strip()[-500:] or f"{result.status}, exit code {result.exit_code}")
    if same_output(result.stdout, expected):
        return TestResult("passed")
    return TestResult("failed", f"expected {expected[:200]!r}, got {result.stdout[:200]!r}")


def _call_test(name: str, given: Any, expected: Any) -> str:
    """A test of one call: arguments as a list, or as text with one JSON value a line (APPS)."""
    args = [json.loads(line) for line in given.splitlines() if line.strip()] if isinstance(given, str) else given
    wanted = json.loads(expected) if isinstance(expected, str) and isinstance(given, str) else expected
    call = f"(Solution().{name} if 'Solution' in globals() else {name})"
    # APPS wraps some results in a list of one.
    return (
        f"_result = {call}(*{args!r})\n"
        f"_wanted = {wanted!r}\n"
        "assert _same(_result, _wanted) or isinstance(_wanted, list) and len(_wanted) == 1 "
        "and _same(_result, _wanted[0]), repr(_result)[:300]"
    )


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


def _check(code: str, tests: Sequence[str], setup: str, extra_info: Mapping[str, Any]) -> list[TestResult]:
    seconds = _seconds(extra_info)
    return check_solution(
        shared_sandbox(), code, tests, setup=setup, deadline_s=seconds, budget_s=_budget_s(), stop=True
    )


def _budget_s() -> float:
    return _BUDGET * item_deadline_s()


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
