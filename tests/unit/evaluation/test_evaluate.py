"""pass@k against brute force, and files that are not what they should be."""

import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from posttrain.config import Config
from posttrain.config.presets import resolve
from posttrain.core.errors import ConfigError, DataError, RunError
from posttrain.core.statistics import pass_at_k
from posttrain.core.types import Score
from posttrain.evaluation.command import evaluate, run
from posttrain.evaluation.tables import print_report
from posttrain.rewards import DATA_SOURCES, GRADERS, cheap

GSM = "openai/gsm8k"


def config(*sets: str) -> Config:
    return resolve("eval", sets=sets, flags={"eval.pass_at": [1, 2]}).config


@st.composite
def draws(draw: st.DrawFn) -> tuple[int, int, int]:
    n = draw(st.integers(1, 9))
    return n, draw(st.integers(0, n)), draw(st.integers(1, n))


@given(draws())
def test_pass_at_k_equals_brute_force(case: tuple[int, int, int]) -> None:
    n, c, k = case
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets), abs=1e-12)


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k(5, 1, 1) == pytest.approx(0.2)
    assert pass_at_k(4, 2, 2) == pytest.approx(1 - 1 / 6)
    assert pass_at_k(200, 0, 100) == 0.0
    assert pass_at_k(200, 101, 100) == 1.0
    for bad in ((3, 4, 1), (3, 1, 4), (3, 1, 0), (3, -1, 1)):
        with pytest.raises(ValueError, match="needs 0 <= c <= n"):
            pass_at_k(*bad)


def table(folder: Path, problems: list[tuple[str, list[str]]], **more: list[Any]) -> Path:
    """A responses file whose ground truth is always 4."""
    columns: dict[str, Any] = {
        "data_source": [source for source, _ in problems],
        "reward_model": [{"style": "rule", "ground_truth": "4"} for _ in problems],
        "responses": [responses for _, responses in problems],
    }
    pq.write_table(pa.table(columns | more), folder / "responses.parquet")
    return folder / "responses.parquet"


def test_sources_are_scored_apart_and_together(tmp_path: Path) -> None:
    file = table(
        tmp_path,
        [
            (GSM, ["#### 4", "#### 5"]),
            (GSM, ["#### 5", "#### 5"]),
            ("posttrain/arith", ["#### 4", "#### 4"]),
        ],
    )
    report = evaluate(file, [1, 2])
    assert report.sources[GSM]["pass@1"] == pytest.approx(0.25)
    assert report.sources[GSM]["pass@2"] == pytest.approx(0.5)
    assert report.sources["posttrain/arith"]["pass@1"] == 1.0
    assert report.overall["pass@1"] == report.overall["mean@2"] == pytest.approx(0.5)
    assert report.overall["pass@2"] == pytest.approx(2 / 3)
    assert (report.overall["problems"], report.overall["responses"]) == (3, 6)


@pytest.fixture
def moody(monkeypatch: pytest.MonkeyPatch) -> str:
    """A data source whose grader fails on the word `hard`."""

    @cheap  # so that it runs here, where it is registered
    def grade(response: str, ground_truth: Any, extra_info: dict[str, Any]) -> Score:
        if response == "hard":
            raise TimeoutError("too hard")
        return Score(float(response == ground_truth), response == ground_truth)

    monkeypatch.setitem(GRADERS._entries, "moody", grade)
    monkeypatch.setitem(DATA_SOURCES, "test/moody", "moody")
    return "test/moody"


def test_answers_that_a_grader_cannot_finish_are_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Were they left out, an answer that hangs its grader would raise pass@1."""
    grader = (
        "import os, time\n"
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if solution_str == 'hang': time.sleep(60)\n"
        "    if solution_str == 'end': os._exit(3)\n"
        "    if solution_str == 'eat': bytearray(10 ** 13)\n"
        "    if solution_str == 'raise': raise ValueError('no')\n"
        "    return {'score': float(solution_str == ground_truth), 'pred': solution_str}\n"
    )
    (tmp_path / "grader.py").write_text(grader)
    file = table(tmp_path, [(GSM, ["4", "hang", "end", "4"]), (GSM, ["eat", "5", "4", "raise"])])
    records = tmp_path / "failures.jsonl"
    run(file, config(f"reward.function={tmp_path}/grader.py:f", "reward.deadline_s=1"), as_json=True, failures=records)
    shown = capsys.readouterr()
    overall = json.loads(shown.out)["overall"]
    assert (overall["responses"], overall["unfinished"], overall["grader_errors"]) == (7, 3, 1)
    assert overall["pass@1"] == pytest.approx((2 / 4 + 1 / 3) / 2)
    kinds = [json.loads(line)["kind"] for line in records.read_text().splitlines()]
    assert kinds == ["unfinished", "unfinished", "unfinished", "wrong", "grader_failed"]
    report = evaluate(file, [1], config(f"reward.function={tmp_path}/grader.py:f", "reward.deadline_s=1").reward)
    print_report(report, [1], Console(width=240))
    shown_text = " ".join(capsys.readouterr().out.split())
    assert "3 responses count as wrong: their grader did not finish, first at row 0: timed out after 1 s" in shown_text
    assert "1 responses left out: their grader failed, first at row 1: " in shown_text


def test_no_score_where_no_grader_finishes(tmp_path: Path) -> None:
    (tmp_path / "grader.py").write_text("import os\ndef f(data_source, solution_str, ground_truth, **_): os._exit(3)")
    with pytest.raises(RunError, match="not one response could be graded") as error:
        evaluate(table(tmp_path, [(GSM, ["4"])]), [1], config(f"reward.function={tmp_path}/grader.py:f").reward)
    assert "died (exit code 3)" in (error.value.hint or "")


def test_failures_of_graders_are_counted_and_never_zero(
    tmp_path: Path, moody: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = table(tmp_path, [(moody, ["4", "hard", "5"]), (moody, ["hard", "hard", "4"])])
    report = evaluate(file, [1, 2])
    assert report.overall["grader_errors"] == 3
    assert report.overall["pass@1"] == pytest.approx((1 / 2 + 1) / 2)
    assert report.overall["pass@2"] == 1.0  # of the one problem with two graded responses
    assert (report.overall["problems_below_1"], report.overall["problems_below_2"]) == (0, 1)
    assert report.first_error is not None
    assert "too hard" in report.first_error
    run(file, config(), as_json=False)
    shown = " ".join(capsys.readouterr().out.split())
    assert "3 responses left out: their grader failed, first at row 0: " in shown
    assert "1 problems left out of pass@2" in shown
    with pytest.raises(RunError, match="not one response"):
        evaluate(table(tmp_path, [(moody, ["hard"])]), [1])


def test_failed_episodes_are_left_out(tmp_path: Path) -> None:
    errors = pa.array([[None, "deadline", None]], pa.list_(pa.string()))
    file = table(tmp_path, [(GSM, ["#### 4", "", "#### 5"])], errors=errors)
    report = evaluate(file, [1])
    assert report.overall["generation_errors"] == 1
    assert report.overall["pass@1"] == pytest.approx(0.5)


def test_a_setting_of_one_row_says_nothing_of_another(tmp_path: Path) -> None:
    infos = [{"method": "flexible"}, {"method": None}]
    report = evaluate(table(tmp_path, [(GSM, ["It is 4."]), (GSM, ["#### 4"])], extra_info=infos), [1])
    assert report.sources[GSM]["pass@1"] == 1.0
    assert report.first_error is None


def test_json_table_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = table(tmp_path, [(GSM, ["#### 4", "#### 5"])])
    run(file, config(), as_json=True, out=tmp_path / "deep" / "scores.json")
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == json.loads((tmp_path / "deep" / "scores.json").read_text())
    assert json.loads(out)["sources"][GSM]["pass@2"] == 1.0
    run(file, config(), as_json=False)
    shown = capsys.readouterr().out
    for part in (GSM, "pass@1", "50.0 %", "100.0 %"):
        assert part in shown


def test_examined_conversations_go_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = table(tmp_path, [(GSM, ["it is #### 4", "#### 5"]), (GSM, ["#### 6", ""])])
    run(file, config("reward.examine=2"), as_json=True)
    shown = capsys.readouterr()
    assert shown.out.count("\n") == 1
    assert shown.err.count(f"---- {GSM}") == 2
    assert "[assistant] it is #### 4\n[expected] 4\n[graded] score 1, correct True" in shown.err
    assert "#### 6" not in shown.err


def test_a_function_of_the_users_grades(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "def f(data_source, solution_str, ground_truth, extra_info): return solution_str == 'a'"
    )
    file = table(tmp_path, [("unknown/source", ["a", "b"])])
    run(file, config(f"reward.function={tmp_path}/mine.py:f"), as_json=True)
    assert json.loads(capsys.readouterr().out)["overall"]["pass@1"] == 0.5


@pytest.mark.parametrize("setting", ["reward.on_error=zero", "reward.weights={score=2.0}"])
def test_what_only_training_composes_is_refused(tmp_path: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match="has no meaning in eval"):
        run(table(tmp_path, [(GSM, ["a"])]), config(setting), as_json=True)


def test_k_above_n(tmp_path: Path) -> None:
    file = table(tmp_path, [(GSM, ["a", "b"]), (GSM, ["a"])])
    with pytest.raises(ConfigError, match=r"row 1 of .* has 1") as caught:
        evaluate(file, [1, 2])
    assert "posttrain generate --n 2" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="k >= 1"):
        evaluate(file, [0])


def test_unknown_data_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no grader for data source 'openai/gsm9k'"):
        evaluate(table(tmp_path, [("openai/gsm9k", ["a"])]), [1])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"responses": None}, "column 'responses' is missing"),
        ({"responses": ["text"]}, "row 0, column 'responses' is not a list"),
        ({"responses": [[]]}, "row 0, column 'responses' is not a list"),
        ({"responses": [[1, 2]]}, "row 0, column 'responses' is not a list of text"),
        ({"data_source": [3]}, "row 0, column 'data_source' is not text"),
        ({"reward_model": ["4"]}, "row 0, column 'reward_model' is not a struct"),
        ({"reward_model": [{"style": "rule"}]}, "row 0, column 'reward_model' is not a struct"),
        ({"errors": [["a", "b", "c"]]}, "row 0, column 'errors' is not a list of 2"),
        ({"extra_info": ["x"]}, "row 0, column 'extra_info' is not a struct"),
        ({"env_scores": [[1.0]]}, "row 0, column 'env_scores' is not a list of 2"),
        ({"env_scores": [["a", "b"]]}, "row 0, column 'env_scores' is not a list of numbers"),
        ({"env_scores": [[1.0, None]]}, "row 0, column 'env_correct' is not a list of 2"),
        ({"env_scores": [[1.0, float("nan")]], "env_correct": [[True, False]]}, "'env_scores' is not a list of finite"),
        ({"env_scores": [[1.0, float("inf")]], "env_correct": [[True, True]]}, "'env_scores' is not a list of finite"),
        ({"env_scores": [[1.0, 1.0]], "env_correct": [[True, None]]}, "null where env_correct is"),
        ({"branches": [["[]"]]}, "row 0, column 'branches' is not a list of 2"),
        ({"branches": [["[]", "[{}]"]]}, "row 0, column 'branches' is not a list of JSON texts"),
        ({"branches": [["[]", "not json"]]}, "row 0, column 'branches' is not a list of JSON texts"),
        ({"conversations": [["[]", "not json"]]}, "row 0, column 'conversations' is not a list of JSON texts"),
        ({"conversations": [["[]", "[3]"]]}, "row 0, column 'conversations' is not a list of JSON texts"),
        ({"conversations": [["[]", None]]}, "row 0, column 'conversations' is not a list of JSON texts"),
        ({"prompt": [["hi"]]}, "row 0, column 'prompt' is not a list of messages"),
    ],
)
def test_wrong_schema_names_file_row_and_column(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"data_source": [GSM], "reward_model": [{"ground_truth": "4"}], "responses": [["a", "b"]]}
    rows = {name: values for name, values in (good | columns).items() if values is not None}
    file = tmp_path / "r.parquet"
    pq.write_table(pa.table(rows), file)
    with pytest.raises(DataError) as caught:
        evaluate(file, [1])
    assert str(file) in caught.value.message
    assert message in caught.value.message
    assert caught.value.hint


def test_failures_show_a_prompt_whose_messages_have_null_tool_calls(tmp_path: Path) -> None:
    call = {"function": {"name": "calculator", "arguments": "{}"}}
    prompt = [
        {"role": "user", "content": "2 + 2?", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    row = {"data_source": GSM, "reward_model": {"ground_truth": "4"}, "responses": ["#### 5"], "prompt": prompt}
    file, failures = tmp_path / "r.parquet", tmp_path / "f.md"
    pq.write_table(pa.Table.from_pylist([row]), file)
    evaluate(file, [1], failures=failures)
    assert "[user] 2 + 2?" in failures.read_text()
    assert "calls {" in failures.read_text()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        evaluate(tmp_path / "x.parquet", [1])
    (tmp_path / "x.parquet").write_text("not parquet")
    with pytest.raises(DataError, match="not a readable parquet file"):
        evaluate(tmp_path / "x.parquet", [1])
    with pytest.raises(DataError, match="no rows"):
        evaluate(table(tmp_path, []), [1])
