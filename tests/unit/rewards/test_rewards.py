"""The gsm8k grader, the table of data sources and the grader pool (with real processes)."""

import asyncio
import os
import re
import time

import numpy as np
import pytest

from posttrain.config import RewardConfig
from posttrain.core.errors import ConfigError
from posttrain.core.registry import load_plugins
from posttrain.core.types import Score
from posttrain.rewards import DATA_SOURCES, GRADERS, checked, compute_score, grade, grader_name, is_cheap
from posttrain.rewards.custom import load_function, to_score
from posttrain.rewards.grade import GradeItem, GraderPool
from posttrain.rewards.gsm8k import extract, last_number, parse_number

GRADER_FILE = """
import os, time
from posttrain.rewards import DATA_SOURCES, GRADERS
from posttrain.core.types import Score

@GRADERS.register("moody")
def moody(response, ground_truth, extra_info):
    if response == "hang":
        time.sleep(60)
    if response == "die":
        os._exit(3)
    if response == "eat":
        held = []
        while True:
            try:
                held.append(bytearray(b"x") * 10_000_000)
            except Exception:  # as libraries do
                return Score(0.0, False)
    if response == "eat and forget":
        del [b"x" * 400_000_000][:]
    if response == "eat at once":
        bytearray(10 ** 12)
    if response == "raise":
        raise ValueError("bad mood")
    if response == "float":
        return 1.0
    if response == "nan":
        return Score(float("nan"), False)
    if response == "local":
        class Local(float):
            pass  # and cannot be pickled
        return Score(1.0, True, parts={"local": Local(1.0)})
    if response == "print":
        print("noise")
    return Score(float(len(response)), True, extracted=str(os.getpid()))

DATA_SOURCES["test/moody"] = "moody"
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    path = tmp_path / f"moody_{os.urandom(4).hex()}.py"
    path.write_text(GRADER_FILE)
    monkeypatch.setattr(GRADERS, "_entries", dict(GRADERS._entries))
    for name in list(DATA_SOURCES):
        monkeypatch.setitem(DATA_SOURCES, name, DATA_SOURCES[name])
    monkeypatch.setitem(DATA_SOURCES, "test/moody", "")
    load_plugins([str(path)])
    return str(path)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 8", "8"),
        ("3+5=8.\n#### 8\n", "8"),
        ("####8", "8"),
        ("#### $18.00.", "18"),
        ("#### 1,234,567.50", "1234567.5"),
        ("#### -5", "-5"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### \u22123", "-3"),
        ("#### +3", "3"),
        ("#### 007", "7"),
        ("#### .50", "0.5"),
        ("#### -0.0", "0"),
        ("#### 8 apples", "8"),
        ("#### 25%", "25"),
        ("#### 8 #### 9", "9"),
        ("#### 8\n#### none", "8"),
        ("8", None),
        ("", None),
        ("####", None),
        ("####\n8", None),
        ("### 8", None),
        ("#### eight", None),
        ("#### 3/4", None),
        ("#### 1.5/4", None),
        ("#### 1,2", None),
        ("#### 1234,567", None),
        ("#### 1e5", None),
        ("#### 12:30", None),
        ("#### 10^3", None),
        ("#### \u0668", None),
    ],
)
def test_extract(text, number):
    assert extract(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [("it is 20-12 so 8.", "8"), ("20-12", "12"), ("3 / 4 is 0.75", "0.75"), ("3/4", None), ("x", None)],
)
def test_last_number(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "value"),
    [("8", 8), ("$1,000", 1000), ("#### 8", 8), ("8.0", 8), ("8 apples", 8), ("12 + 3", None), ("", None)],
)
def test_parse_number(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    ("response", "truth", "correct"),
    [
        ("#### 18.00", "18", True),
        ("#### 1,000", "1000", True),
        ("#### 1000", "1,000", True),
        ("#### 18", 18, True),
        ("#### 0.1", 0.1, True),
        ("#### 18.01", "18", False),
        ("#### -18", "18", False),
        ("18", "18", False),
    ],
)
def test_gsm8k_verdicts(response, truth, correct):
    for source in ("openai/gsm8k", "posttrain/arith"):
        score = compute_score(source, response, truth)
        assert (score.correct, score.score, score.error) == (correct, float(correct), None)


def test_flexible_reads_a_number_without_the_mark():
    assert compute_score("openai/gsm8k", "so it is 18.", "18", {"method": "flexible"}).correct
    assert not compute_score("openai/gsm8k", "so it is 18.", "18", {"method": "strict"}).correct


def test_a_grader_that_fails_says_so():
    assert "is not a number" in (compute_score("openai/gsm8k", "#### 8", "soon").error or "")
    assert "unknown method" in (compute_score("openai/gsm8k", "#### 8", "8", {"method": "x"}).error or "")


def test_a_long_hostile_response_is_graded_quickly():
    started = time.perf_counter()
    for text in ("#### " + "1," * 50_000, "1" * 50_000 + "/2", "$-" * 50_000, "#" * 100_000, "1,111" * 20_000):
        compute_score("openai/gsm8k", text, "8", {"method": "flexible"})
        compute_score("openai/gsm8k", text, "8")
    assert time.perf_counter() - started < 20


def test_unknown_data_source_names_the_nearest():
    with pytest.raises(ConfigError, match="openai/gsm8") as error:
        compute_score("openai/gsm8", "", "")
    assert "'openai/gsm8k'" in (error.value.hint or "")


def test_graders_that_break_the_contract(plugin):
    error = compute_score("test/moody", "raise", "").error or ""
    assert re.fullmatch(r"grader 'moody' raised ValueError: bad mood \(.*/moody_\w+.py, line \d+\)", error)
    assert "returned float" in (compute_score("test/moody", "float", "").error or "")
    assert "nan" in (compute_score("test/moody", "nan", "").error or "")
    assert not is_cheap("test/moody")
    assert is_cheap("openai/gsm8k")


def test_cheap_graders_start_no_process():
    with GraderPool() as pool:
        items = [GradeItem("openai/gsm8k", f"#### {i}", "3") for i in range(6)]
        scores = asyncio.run(pool.grade(items))
        assert [s.correct for s in scores] == [i == 3 for i in range(6)]
        assert all(grader._process is None for grader in pool._graders)


def test_stuck_and_dying_graders_cost_their_own_item_only(plugin, capfd):
    responses = ["a", "hang", "bb", "die", "ccc", "raise", "local", "print", "dddd"]
    items = [GradeItem("test/moody", response, None) for response in responses]
    items.insert(4, GradeItem("openai/gsm8k", "#### 8", "8"))
    with GraderPool(RewardConfig(deadline_s=1.0), plugins=[plugin]) as pool:
        scores = dict(zip([i.response for i in items], asyncio.run(pool.grade(items)), strict=True))
        pids = [grader._process.pid for grader in pool._graders if grader._process]
    assert [scores[r].score for r in ("a", "bb", "ccc", "dddd", "print", "#### 8")] == [1.0, 2.0, 3.0, 4.0, 5.0, 1.0]
    assert scores["hang"].error == "timed out after 1 s"
    assert scores["die"].error == "the grader process died (exit code 3)"
    assert "bad mood" in (scores["raise"].error or "")
    assert "cannot be sent" in (scores["local"].error or "")
    assert {r for r, score in scores.items() if score.unfinished} == {"hang", "die"}
    assert int(scores["a"].extracted) != os.getpid()
    assert capfd.readouterr().out == ""  # stdout belongs to the command's data
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_grader_that_takes_too_much_memory_costs_its_own_item_only(plugin):
    """Also where a library takes the end of memory for an answer, where the memory is free again by then, and where one
    allocation is too large."""
    responses = ["a", "eat", "bb", "eat at once", "ccc", "eat and forget", "dddd"]
    items = [GradeItem("test/moody", response, None) for response in responses]
    with GraderPool(RewardConfig(memory_mb=300, workers=1), plugins=[plugin]) as pool:
        scores = dict(zip(responses, asyncio.run(pool.grade(items)), strict=True))
    assert [scores[r].score for r in ("a", "bb", "ccc", "dddd")] == [1.0, 2.0, 3.0, 4.0]
    assert scores["eat"].error == scores["eat and forget"].error == "took more memory than reward.memory_mb = 300"
    assert scores["eat at once"].error == "grader 'moody' needs more memory for this response than reward.memory_mb"
    assert {r for r, score in scores.items() if score.unfinished} == {"eat", "eat at once", "eat and forget"}


def test_a_grader_process_that_does_not_start_in_time_says_so(plugin, monkeypatch):
    monkeypatch.setattr(grade, "START_DEADLINE_S", 0.0)
    with GraderPool(RewardConfig(workers=1), plugins=[plugin]) as pool:
        (score,) = asyncio.run(pool.grade([GradeItem("test/moody", "a", None)]))
    assert re.search(r"the grader process did not start: process \d+ sent nothing within 0 s", score.error or "")
    assert not score.unfinished  # which is not the doing of the item


def test_a_grader_process_that_is_too_large_before_its_first_item_says_so(plugin):
    with GraderPool(RewardConfig(memory_mb=10, workers=1), plugins=[plugin]) as pool:
        (score,) = asyncio.run(pool.grade([GradeItem("test/moody", "a", None)]))
    assert "its process took more memory than reward.memory_mb = 10 as it started" in (score.error or "")
    assert not score.unfinished  # it is not the response's doing


@pytest.mark.slow
def test_items_that_are_sent_together_fail_alone(plugin):
    """With one worker, 48 items go in chunks of 12; each chunk here has one that ends the process or cannot be sent."""
    responses = ["a" * (1 + i % 5) for i in range(48)]
    for index, response in ((3, "hang"), (12, "die"), (30, "local"), (47, "die"), (46, "raise")):
        responses[index] = response
    items = [GradeItem("test/moody", response, None) for response in responses]
    items[20] = GradeItem("test/moody", "aa", lambda: None)  # cannot be pickled
    with GraderPool(RewardConfig(deadline_s=1.0, workers=1), plugins=[plugin]) as pool:
        scores = asyncio.run(pool.grade(items))
    errors = {i: s.error for i, s in enumerate(scores) if s.error is not None}
    assert sorted(errors) == [3, 12, 20, 30, 46, 47]
    assert "timed out" in errors[3]
    assert "died (exit code 3)" in errors[12]
    assert "could not be asked" in errors[20]
    assert [s.score for i, s in enumerate(scores) if i not in errors] == [
        float(len(r)) for i, r in enumerate(responses) if i not in errors
    ]


def test_close_ends_a_stuck_grader(plugin):
    async def close_meanwhile() -> float:
        pool = GraderPool(RewardConfig(workers=1, deadline_s=50), plugins=[plugin])
        await pool.grade([GradeItem("test/moody", "a", None)])
        stuck = asyncio.create_task(pool.grade([GradeItem("test/moody", "hang", None)]))
        await asyncio.sleep(0.2)
        started = time.perf_counter()
        await asyncio.to_thread(pool.close)
        (score,) = await stuck
        assert score.error
        with pytest.raises(RuntimeError, match="closed"):
            await pool.grade([])
        return time.perf_counter() - started

    assert asyncio.run(close_meanwhile()) < 5


def test_unknown_source_and_broken_plugin(plugin, tmp_path):
    with GraderPool() as pool, pytest.raises(ConfigError):
        asyncio.run(pool.grade([GradeItem("no/such", "", "")]))
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    with GraderPool(plugins=[str(broken)]) as pool:
        (score,) = asyncio.run(pool.grade([GradeItem("test/moody", "a", None)]))
    assert "division by zero" in (score.error or "")


FUNCTIONS = """
import asyncio, os, time
from posttrain.core.types import Score

def number(data_source, solution_str, ground_truth, extra_info=None):
    return 0.5 if solution_str == ground_truth else 0

def table(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    return {"score": 1 + bonus, "acc": solution_str == ground_truth, "pred": solution_str, "style": 0.25, "note": "x"}

def of_numpy(data_source, solution_str, ground_truth, extra_info=None):
    import numpy as np
    parts = {"share": np.float32(0.25), "found": np.int64(3), "short": np.bool_(True), "none": None, "all": np.ones(2)}
    return {"score": np.float32(0.5), **parts}

async def slow(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.01)
    return Score(2.0, True, extracted=data_source)

async def cancelled(data_source, solution_str, ground_truth, extra_info=None):
    raise asyncio.CancelledError("a scope that leaks")

def bad(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "raise":
        raise KeyError("nope")
    return {"none": None, "text": "1.0", "nan": float("nan"), "dict": {"acc": True}, "hang": 0}[solution_str] if (
        solution_str != "hang" or time.sleep(60)) else 0

not_a_function = 3
"""


def grade_by(function, items, tmp_path, **reward):
    path = tmp_path / "my_reward.py"
    path.write_text(FUNCTIONS)
    with GraderPool(RewardConfig(function=f"{path}:{function}", **reward)) as pool:
        return asyncio.run(pool.grade(items))


def test_functions_of_the_user_grade_every_source(tmp_path):
    items = [GradeItem("no/such/source", "a", "a"), GradeItem("openai/gsm8k", "b", "a")]
    # A number names no answer to vote on, and its format is not found wanting.
    numbers = [Score(0.5, False, parts={"format": 1.0}), Score(0.0, False, parts={"format": 1.0})]
    assert grade_by("number", items, tmp_path) == numbers
    first, second = grade_by("table", items, tmp_path, function_kwargs={"bonus": 0.5})
    assert first == Score(1.5, True, extracted="a", parts={"style": 0.25})
    assert (second.score, second.correct) == (1.5, False)
    (numpys,) = grade_by("of_numpy", items[:1], tmp_path)
    assert numpys == Score(0.5, False, parts={"share": 0.25, "found": 3.0, "short": 1.0})
    assert grade_by("slow", items, tmp_path)[0] == Score(2.0, True, extracted="no/such/source")


@pytest.mark.parametrize(
    ("acc", "right"), [(True, True), (1.0, True), (0.3, False), (-1, False), (np.bool_(False), False), (None, True)]
)
def test_a_share_as_acc_is_not_right(acc, right):
    for name in ("acc", "correct"):
        assert to_score({"score": 1.0, name: acc}) == Score(1.0, right)


@pytest.mark.parametrize(("correct", "right"), [(np.True_, True), (0, False), (1.0, True)])
def test_a_verdict_has_a_truth_value_and_text(correct, right):
    score = checked(Score(0.5, correct, extracted=[5]), "it")
    assert score == Score(0.5, right, extracted="[5]")
    assert type(score.correct) is bool


@pytest.mark.parametrize("correct", [0.3, "no", None])
def test_a_verdict_that_is_neither_true_nor_false_is_refused(correct):
    error = checked(Score(0.5, correct), "it").error
    assert error == f"it returned {correct!r} as 'correct', which is neither true nor false"


def test_acc_that_is_text_is_refused():
    with pytest.raises(TypeError, match="acc is 'False', not a number"):
        to_score({"score": 1.0, "acc": "False"})


def test_functions_of_the_user_that_fail_say_so(tmp_path):
    words = ["raise", "none", "text", "nan", "dict", "hang"]
    errors = [s.error for s in grade_by("bad", [GradeItem("x", w, "") for w in words], tmp_path, deadline_s=1.0)]
    assert all(errors)
    for error, expected in zip(
        errors,
        ["KeyError: 'nope'", "None, not a number", "'1.0', not a number", "nan", "no 'score'", "timed out"],
        strict=True,
    ):
        assert expected in (error or "")
    (found,) = grade_by("cancelled", [GradeItem("x", "a", "")], tmp_path)
    assert "'cancelled' raised CancelledError: a scope that leaks" in (found.error or "")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nofile.py:f", "plugin file not found"),
        ("my_reward.py", "is not FILE.py:NAME"),
        ("{path}:nummber", "has no 'nummber'"),
        ("{path}:not_a_function", "not a function"),
        ("no_such_module:f", "failed to import"),
    ],
)
def test_a_function_that_is_not_there_is_found_before_the_run(path, message, tmp_path):
    file = tmp_path / "my_reward.py"
    file.write_text(FUNCTIONS)
    with pytest.raises(ConfigError, match=message):
        load_function(path.format(path=file))


@pytest.mark.parametrize(
    ("source", "grader"),
    [
        ("aime24", "math_dapo"),
        ("aime_2025_I", "math_dapo"),
        ("numina_cn_k12", "prime_math"),
        ("codecontests", "prime_code"),
        ("hiyouga/geometry3k", "geo3k"),
        ("HuggingFaceH4/MATH-500", "math"),
    ],
)
def test_the_table_of_data_sources(source, grader):
    assert grader_name(source) == grader


def test_every_row_of_the_table_has_a_grader_that_imports():
    for name in sorted(set(DATA_SOURCES.values())):
        assert callable(GRADERS.get(name))
    assert set(DATA_SOURCES.values()) <= set(GRADERS.names())


def test_a_power_tower_does_not_stall_its_neighbours(tmp_path):
    """Python computes it in one uninterruptible operation: only killing the process helps."""
    path = tmp_path / "towers.py"
    path.write_text("def f(data_source, solution_str, ground_truth, extra_info): return float(eval(solution_str) == 7)")
    items = [GradeItem("x", text, "7") for text in ("7", "9**9**9**9", "3 + 4", "9**9**9**9", "8", "7", "14 // 2", "6")]
    started = time.perf_counter()
    with GraderPool(RewardConfig(function=f"{path}:f", deadline_s=1.5)) as pool:
        scores = asyncio.run(pool.grade(items))
    assert [s.error for s in scores] == [
        None,
        "timed out after 1.5 s",
        None,
        "timed out after 1.5 s",
        None,
        None,
        None,
        None,
    ]
    assert [s.score for s in scores if s.error is None] == [1.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    assert time.perf_counter() - started < 30


def test_the_maths_graders_refuse_a_power_tower_at_once():
    towers = [r"\boxed{9**9**9**9}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{100000!}", "#### 9**9**9**9", "Answer: 9^9^9^9"]
    items = [
        GradeItem(s, t, "7") for t in towers for s in ("openai/gsm8k", "lighteval/MATH", "aime24", "numina_olympiads")
    ]
    with GraderPool(RewardConfig(deadline_s=20.0)) as pool:
        scores = asyncio.run(pool.grade([*items, GradeItem("numina_olympiads", r"\boxed{7}", "7")]))
    assert [s.error for s in scores] == [None] * len(scores)
    assert [s.correct for s in scores] == [False] * len(items) + [True]
