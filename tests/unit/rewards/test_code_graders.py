"""The graders of programs, on the real sets and on programs that want to be graded better than they are."""

import asyncio
import gzip
import json
import time

import pytest

from posttrain.config import RewardConfig
from posttrain.rewards import compute_score
from posttrain.rewards.code import extract_code, same_output
from posttrain.rewards.grade import GradeItem, GraderPool
from tests.unit.sandbox.test_sandbox import REASON

pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def fenced(code):
    return f"Here it is:\n```python\n{code}\n```\nIt works."


def grade(code, truth, source="codecontests", **extra):
    score = compute_score(source, fenced(code), json.dumps(truth), extra)
    assert score.error is None, score
    return score


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("print(1)", "print(1)"),
        ("a\n```python\nx = 1\n```\nb", "x = 1\n"),
        ("```py\nx\n```\n```python3\ny\n```", "y\n"),
        ("```\nx\n```", "x\n"),
        ("```python\nx\n```\n```bash\nls\n```", "x\n"),
        ("```python\nprint(6*7)\n```\nIt prints:\n```\n42\n```", "print(6*7)\n"),
        ("```\nx\n```\n```\ny\n```\n```bash\nls\n```", "y\n"),
        ("```bash\nls\n```", None),
        ("```python\n\n```", None),
        ("", None),
        ("   ", None),
        ("```python\nx = 1", None),
        ("  ```python\n  x\n  ```", "x\n"),
        ("1. So:\n\n   ```python\n   def f():\n       return 1\n   ```\n", "def f():\n    return 1\n"),
        ("<think>Draft: ```python\nwrong\n```\nNo.</think>\n\n```python\nright\n```\n", "right\n"),
        ("<think>Let me\n```python\nwro</think>\n\n```python\nright\n```", "right\n"),
        ("Let me write\n```python\nwro\nAgain:\n```python\nright\n```", "right\n"),
        ("Solution: ```python\nright\n```\n", "right\n"),
        ("Call ```f``` so\nor so:\n```\nright\n```\n", "right\n"),
        ("```python\ns = '''``` inside'''\n```", "s = '''``` inside'''\n"),
    ],
)
def test_the_last_python_block_is_the_program(response, code):
    assert extract_code(response) == code


def test_fences_that_open_again_and_again_are_read_once():
    begin = time.process_time()
    assert extract_code("So ```python\n" * 20_000) is None
    assert time.process_time() - begin < 30.0  # 0.1 s, and minutes where each one is read to the end of the response


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1 2 \n3  \n\n", "1 2\n3", True),
        ("1  2", "1 2", True),
        ("1\n2", "1 2", False),
        ("", "", True),
        ("", "0", False),
        ("0.3333333", "0.33333333333", True),
        ("0.3334", "0.3333", False),
        ("1e-9", "0.0", True),
        ("0", "0.0000005", False),
        ("0", "5e-7", False),
        ("4.9999999e-7", "5e-7", True),
        ("-0.000000", "0.00", True),
        ("0.001", "0.0", False),
        ("0", "1e-320", False),
        ("1e400", "1.5", False),
        ("3", "3.0", True),
        ("3.0", "3", False),
        ("10000001", "10000000", False),
        ("nan", "0.0", False),
        ("inf", "1.0", False),
        ("YES", "yes", False),
        ("1" * 10**6, "1.5", False),
    ],
)
def test_outputs_are_compared_by_line_and_word(output, expected, same):
    assert same_output(output, expected) is same


PAIRS = {"inputs": ["1 2\n", "3 4\n", "5 6\n", "0 0\n"], "outputs": ["3\n", "7\n", "11\n", "0\n"]}


def test_stdin_and_stdout_pairs():
    assert grade("print(sum(map(int, input().split())))", PAIRS).score == 1.0
    half = grade("a, b = map(int, input().split())\nprint(a + b if a < 2 else 0)", PAIRS)
    assert (half.score, half.correct, half.parts) == (0.5, False, {"tests_passed": 0.5})
    assert grade("a, b = map(int, input().split())\nprint(a + b if a < 2 else 0)", PAIRS, continuous=None).score == 0.5
    nothing = grade("a, b = map(int, input().split())\nprint(a + b if a < 2 else 0)", PAIRS, continuous=False)
    assert (nothing.score, nothing.correct) == (0.0, False)
    assert grade("import os\nos._exit(0)", PAIRS).score == 0.0
    assert grade("print(3); 1 / 0", PAIRS).score == 0.0
    assert grade("while True: pass", PAIRS, continuous=False, time_limit_s=0.5).score == 0.0


@pytest.mark.slow
def test_a_slow_program_is_wrong_and_not_a_grader_that_hangs():
    """Were it only the grader's deadline that ends it, a slow program would be left out instead of failing."""
    truths = {
        "pairs": {"inputs": ["1\n"] * 30, "outputs": ["1\n"] * 30},
        "calls": {"fn_name": "f", "inputs": [[1]] * 30, "outputs": [1] * 30},
        "asserts": {"assert_case": ["assert f(1) == 1"] * 30},
    }
    code = "import time\ndef f(x):\n    time.sleep(60)\n    return x\n"
    items = [
        GradeItem("codecontests", fenced(code + "f(1)" * (kind == "pairs")), json.dumps(truth))
        for kind, truth in truths.items()
    ]
    with GraderPool(RewardConfig(deadline_s=15.0, workers=3)) as pool:
        scores = asyncio.run(pool.grade(items))
    assert [(score.score, score.correct, score.error) for score in scores] == [(0.0, False, None)] * 3


def test_no_program_is_wrong_and_has_no_format():
    score = compute_score("codecontests", "I do not know", json.dumps(PAIRS))
    assert (score.score, score.error) == (0.0, None)  # the words are tried as a program, and are none
    score = compute_score("codecontests", "```bash\nls\n```", json.dumps(PAIRS))
    assert (score.score, score.extracted, score.error) == (0.0, None, None)


CALLS = {"fn_name": "add", "inputs": [[1, 2], [[3], [4]], ["a", "b"], [0.1, 0.2]], "outputs": [3, [3, 4], "ab", 0.3]}


def test_functions_called_with_arguments():
    assert grade("def add(a, b): return a + b", CALLS).score == 1.0
    assert grade("class Solution:\n    def add(self, a: List[int], b): return a + b", CALLS).score == 1.0
    assert grade("def add(a, b): return tuple(a) + tuple(b) if isinstance(a, list) else a + b", CALLS).score == 1.0
    assert grade("def add(a, b): return a", CALLS).score == 0.0
    assert grade("def add(a, b): return True", {**CALLS, "outputs": [1, 1, 1, 1]}).score == 0.0
    lines = {"fn_name": "f", "inputs": ["[1, 2]\n3", "[]\n0"], "outputs": ["[6]", "[0]"]}
    assert grade("def f(xs, n): return sum(xs) + n", lines, "apps").score == 1.0


def test_assert_lists():
    truth = {"assert_case": ["assert f(2) == 4", "assert f(gcd(4, 6)) == 4", "assert f(3) == 8"]}
    code = "def f(x): return x * x"
    assert grade(code, truth).score == pytest.approx(2 / 3)
    assert grade(code, truth["assert_case"]).score == pytest.approx(2 / 3)
    # What is tested is the solution's, whatever the library calls so; what helps to test it is the library's.
    assert grade("def gcd(a, b): return 7", {"assert_case": ["assert gcd(1, 1) == 7"]}).correct
    assert grade("def gcd(a, b): return 7\ndef f(x): return x", {"assert_case": ["assert f(gcd(1, 1)) == 1"]}).correct


@pytest.mark.parametrize(
    "truth",
    [
        "not json",
        "3",
        "[]",
        '{"inputs": ["1"], "outputs": []}',
        '{"inputs": [], "outputs": []}',
        "{}",
        '{"assert_case": []}',
    ],
)
def test_an_unusable_ground_truth_is_the_graders_error(truth):
    score = compute_score("apps", fenced("print(1)"), truth)
    assert score.error is not None


def test_verls_cases(test_data):
    cases = json.loads((test_data / "graders" / "verl_sandbox_cases.json").read_text())
    for answer, truth, expected in zip(
        cases["prime_code_answers"], cases["prime_code_gts"], cases["prime_code_scores"], strict=True
    ):
        assert compute_score("codecontests", fenced(answer), truth).score == pytest.approx(expected)


def humaneval(test_data):
    with gzip.open(test_data / "code" / "HumanEval.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def test_humaneval_gold_passes_as_a_body_and_as_a_program(test_data):
    for number, task in enumerate(humaneval(test_data)):
        truth = {key: task[key] for key in ("prompt", "test", "entry_point")}
        body = task["canonical_solution"]
        response = body if number % 2 else fenced(task["prompt"] + body)
        score = compute_score("openai/openai_humaneval", response, json.dumps(truth))
        assert score.correct, (task["task_id"], score)


@pytest.mark.slow
def test_humaneval_wrong_answers_fail(test_data):
    for task in humaneval(test_data):
        truth = {key: task[key] for key in ("prompt", "test", "entry_point")}
        for body in ("    return None\n", "    import os\n    os._exit(0)\n"):
            score = compute_score("openai/openai_humaneval", fenced(task["prompt"] + body), truth)
            assert not score.correct
            assert score.error is None


def mbpp(test_data):
    return [json.loads(line) for line in (test_data / "code" / "mbpp.jsonl").read_text().splitlines()]


def grade_mbpp(task, code):
    truth = {key: task[key] for key in ("test_list", "test_setup_code", "challenge_test_list")}
    # Task 123 computes for seconds: what is tested is the grader, not how busy the machine is.
    return compute_score("google-research-datasets/mbpp", fenced(code), json.dumps(truth), {"time_limit_s": 20})


def test_mbpp_gold_passes(test_data):
    """A tenth of the test split. `test_datasets.test_mbpp` grades all reference programs."""
    tasks = [task for task in mbpp(test_data) if 11 <= task["task_id"] <= 510]
    assert len(tasks) == 500
    assert [task["task_id"] for task in tasks[::10] if not grade_mbpp(task, task["code"]).correct] == []


@pytest.mark.slow
def test_all_of_mbpp_passes_also_if_it_ends_early(test_data):
    early = "\nraise SystemExit(0)"
    wrong = [task["task_id"] for task in mbpp(test_data) if not grade_mbpp(task, task["code"] + early).correct]
    assert wrong == []


def test_codecontests_tests_can_be_run(test_data):
    """The set has no solutions here: programs that look the answer up stand for right ones."""
    for task in json.loads((test_data / "code" / "code_contests_test.json").read_text())[:15]:
        tests = task["tests"] if isinstance(task["tests"], dict) else __import__("ast").literal_eval(task["tests"])
        lookup = f"import sys\nprint({dict(zip(tests['inputs'], tests['outputs'], strict=True))!r}[sys.stdin.read()])"
        assert grade(lookup, tests).score == 1.0
        if any(o.strip() for o in tests["outputs"]):
            assert grade("print()", tests).score < 1.0
