"""Statistics of responses against brute force and numbers worked out by hand; comparisons; failures; sampling first."""

import itertools
import json
from fractions import Fraction
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from posttrain import run_eval
from posttrain.cli import app
from posttrain.config import Config, RewardConfig
from posttrain.config.presets import resolve
from posttrain.core.errors import ConfigError, DataError, RunError
from posttrain.core.statistics import (
    bootstrap,
    difference_interval,
    intervals,
    majority,
    mcnemar,
    pass_at_k,
    wilson,
)
from posttrain.evaluation import command
from posttrain.evaluation.command import PAGER, evaluate, run, run_comparison, sample, with_run_name
from posttrain.evaluation.compare import compare, match
from posttrain.evaluation.grading import GradedProblem
from posttrain.evaluation.tables import _natural
from posttrain.rewards.grade import GradeItem, GraderPool

GSM = "openai/gsm8k"


def config(*sets: str) -> Config:
    return resolve("eval", sets=sets).config


# ---------------------------------------------------------------------- statistics


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_mean_over_all_subsets(right: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(right)))
    subsets = list(itertools.combinations(right, k))
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_the_binomial_test(only_a: int, only_b: int) -> None:
    n = only_a + only_b
    as_extreme = sum(comb(n, i) for i in range(n + 1) if abs(2 * i - n) >= abs(only_a - only_b))
    assert mcnemar(only_a, only_b) == pytest.approx(float(Fraction(as_extreme, 2**n)))
    assert mcnemar(only_a, only_b) == mcnemar(only_b, only_a)


def test_mcnemar_by_hand() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(0, 5) == pytest.approx(2 / 32)
    assert mcnemar(2, 8) == pytest.approx(2 * (1 + 10 + 45) / 1024)
    assert mcnemar(10_000, 10_400) == pytest.approx(0.00523, abs=2e-4)  # the normal approximation


def test_the_bootstrap_is_that_of_a_plain_loop() -> None:
    values = np.random.default_rng(1).random((30, 2))
    chance = np.random.default_rng(7)
    means = np.array([values[chance.integers(30, size=30)].mean(0) for _ in range(400)])
    np.testing.assert_allclose(bootstrap(values, 400, 7), np.quantile(means, [0.025, 0.975], axis=0))
    np.testing.assert_array_equal(bootstrap(values, 400, 7), bootstrap(values, 400, 7))


def test_intervals_are_as_wide_as_they_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    share, problems = 0.3, 2000
    values = (np.arange(problems) < share * problems).astype(float)[:, None]
    half = 1.96 * np.sqrt(share * (1 - share) / problems)
    for draws in (1 << 22, 5000):  # all at once, two resamples at a time
        monkeypatch.setattr("posttrain.core.statistics._DRAWS", draws)
        low, high = bootstrap(values, 4000, 0)[:, 0]
        assert (share - low, high - share) == (pytest.approx(half, rel=0.1), pytest.approx(half, rel=0.1))


def test_problems_without_a_value_do_not_count() -> None:
    values = np.array([[1.0, np.nan, np.nan], [0.0, 0.5, np.nan], [np.nan, 0.5, np.nan]])
    low, high = bootstrap(values, 500, 0)
    assert (low[0], high[0]) == (0.0, 1.0)
    assert (low[1], high[1]) == (0.5, 0.5)
    assert np.isnan([low[2], high[2]]).all()


def test_wilson_by_hand() -> None:
    """Tables of Newcombe 1998 (two-sided 95 %), and the ends."""
    for right, n, ends in ((81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)), (1, 29, (0.0061, 0.1718))):
        assert wilson(right / n, n) == pytest.approx(ends, abs=5e-5)
    assert wilson(0.0, 10) == (0.0, pytest.approx(0.2775, abs=5e-5))
    assert wilson(1.0, 1) == (pytest.approx(0.2065, abs=5e-5), 1.0)
    with pytest.raises(ValueError, match="n >= 1"):
        wilson(0.5, 0)


@pytest.mark.parametrize(
    ("right", "n"), [(0, 1), (1, 1), (0, 10), (10, 10), (5, 10), (0, 400), (400, 400), (2, 400), (100, 400)]
)
def test_an_interval_is_sane_at_every_size_and_end(right: int, n: int) -> None:
    values = (np.arange(n) < right).astype(float)[:, None]
    low, high = intervals(values, 500, 0)[:, 0]
    assert 0.0 <= low <= right / n <= high <= 1.0
    assert high - low >= 0.008  # 400 of 400 do not prove 100 %
    assert high - low <= (0.8 if n == 1 else 0.6)


def test_intervals_of_many_ordinary_problems_are_those_of_the_bootstrap() -> None:
    values = np.random.default_rng(0).random((30, 2))
    values[:20, 1] = np.nan  # ten are left
    ends = intervals(values, 500, 0)
    np.testing.assert_array_equal(ends[:, 0], bootstrap(values, 500, 0)[:, 0])
    assert tuple(ends[:, 1]) == wilson(float(values[20:, 1].mean()), 10)
    assert np.isnan(intervals(np.full((3, 1), np.nan), 100, 0)).all()


def test_the_difference_of_few_problems_is_not_certain() -> None:
    """Newcombe 1998, table II, method 8: 36 pairs both, 12 only one, 2 only the other, 0 neither."""
    a = np.array([1.0] * 48 + [0.0] * 2)
    b = np.array([1.0] * 36 + [0.0] * 12 + [1.0] * 2)
    low, high = difference_interval(b, a, 500, 0)
    assert (low, high) == (pytest.approx(0.0569, abs=5e-4), pytest.approx(0.3404, abs=5e-4))
    assert difference_interval(a, b, 500, 0) == pytest.approx((-high, -low))
    low, high = difference_interval(np.zeros(5), np.ones(5), 500, 0)
    assert -1.0 <= low < 0.5 < high == 1.0
    assert difference_interval(a, a, 500, 0) == pytest.approx((0.0, 0.0), abs=0.1)


@pytest.mark.parametrize(
    ("answers", "right", "share"),
    [
        ("aab", "110", 1.0),
        ("ab", "10", 0.5),
        ("a--", "100", 1.0),
        ("---", "000", 0.0),
        ("abb", "100", 0.0),
        ("aab", "100", 0.5),  # a grader that reads more than the answer
        ("aab", "010", 0.5),
        ("aabb", "1000", 0.25),
    ],
)
def test_majority_by_hand(answers: str, right: str, share: float) -> None:
    assert majority([None if a == "-" else a for a in answers], [r == "1" for r in right]) == share


# ---------------------------------------------------------------------- reports


def table(path: Path, problems: list[dict[str, Any]], truth: str = "4") -> Path:
    """A responses file of GSM8K problems: `texts`, and whatever else a problem has."""
    rows = [
        {
            "data_source": GSM,
            "prompt": [{"role": "user", "content": problem.get("ask", f"question {i}")}],
            "reward_model": {"style": "rule", "ground_truth": problem.get("truth", truth)},
            "extra_info": {"index": problem.get("index"), "split": "test", "level": problem.get("level")},
            "responses": [f"#### {text}" if text else "I do not know" for text in problem["texts"]],
            "errors": problem.get("errors", [None] * len(problem["texts"])),
        }
        for i, problem in enumerate(problems)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


PROBLEMS = [
    {"texts": ["4", "4", "5", ""], "level": "Level 10"},  # 2 of 4, votes: 4
    {"texts": ["5", "5", "4", "6"], "level": "Level 2"},  # 1 of 4, votes: 5
    {"texts": ["4", "5", "", ""], "level": "Level 2"},  # 1 of 4, votes: 4 or 5
    {"texts": ["5", "4", "4", "4"], "level": "Level 2", "errors": [None, None, None, "deadline"]},  # 2 of 3, votes: 4
]


def test_all_scores_by_hand(tmp_path: Path) -> None:
    report = evaluate(table(tmp_path / "r.parquet", PROBLEMS), [1, 2, 4], resamples=500, seed=3)
    found = report.overall
    assert found["pass@1"] == found["mean@4"] == pytest.approx((2 / 4 + 1 / 4 + 1 / 4 + 2 / 3) / 4)
    # 1 - C(n - c, 2) / C(n, 2)
    assert found["pass@2"] == pytest.approx(((1 - 1 / 6) + (1 - 3 / 6) + (1 - 3 / 6) + (1 - 0 / 3)) / 4)
    assert found["pass@4"] == 1.0  # of the three problems with four graded responses
    assert found["problems_below_4"] == 1
    assert found["best@4"] == 1.0
    assert found["maj@4"] == pytest.approx((1 + 0 + 0.5 + 1) / 4)
    assert (found["problems"], found["responses"], found["generation_errors"]) == (4, 15, 1)
    assert list(report.levels[GSM]) == ["Level 2", "Level 10"]
    assert sorted(["x²", "①", "Level 10", "3", "1" * 5000, "Level 2"], key=_natural)[0] == "3"  # and none is an error
    assert report.levels[GSM]["Level 10"]["mean@4"] == 0.5
    assert report.levels[GSM]["Level 2"]["maj@4"] == pytest.approx((0 + 0.5 + 1) / 3)
    for name in ("pass@1", "pass@2", "mean@4", "maj@4"):
        low, high = found["ci"][name]
        assert low <= found[name] <= high
    assert evaluate(table(tmp_path / "r.parquet", PROBLEMS), [1, 2, 4], resamples=500, seed=3) == report
    assert "ci" not in evaluate(table(tmp_path / "r.parquet", PROBLEMS), [1]).overall


def test_the_table_names_levels_and_intervals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(table(tmp_path / "r.parquet", PROBLEMS), config("eval.pass_at=[1,2]"), as_json=False)
    shown, err = capsys.readouterr()
    assert err == f"grading {tmp_path / 'r.parquet'}: 15 responses\n"  # announced, since it may take long
    for part in ("pass@2", "best@4", "maj@4", "  Level 2", "  Level 10", "41.7 %", " - ", "their episodes failed"):
        assert part in shown
    assert "mean@4" not in shown  # it is pass@1


@pytest.mark.parametrize("cheap", [True, False])
async def test_grading_tells_how_far_it_is(cheap: bool, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(data_source, solution_str, ground_truth, extra_info): return 1.0")
    told: list[int] = []
    with GraderPool(RewardConfig(function="" if cheap else f"{tmp_path}/mine.py:f")) as pool:
        scores = await pool.grade([GradeItem(GSM, f"#### {i}", "4") for i in range(40)], graded=told.append)
    assert (len(scores), sum(told)) == (40, 40)
    assert cheap or len([count for count in told if count]) > 4


def test_a_grader_without_answers_has_no_majority(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "def f(data_source, solution_str, ground_truth, extra_info): return {'score': 1.0 * ('4' in solution_str)}"
    )
    file = table(tmp_path / "r.parquet", PROBLEMS)
    run(file, config(f"reward.function={tmp_path}/mine.py:f"), as_json=False)
    assert f"no maj@4 of {GSM}: its grader does not tell" in capsys.readouterr().out


# ---------------------------------------------------------------------- two files


def problem(number: int, right: str, key: str = "", truth: str = "4", index: str | None = None) -> GradedProblem:
    verdicts = tuple(r == "1" for r in right)
    return GradedProblem(
        number, GSM, None, len(right), verdicts, (None,) * len(right), 0, 0, 0, index, key or f"p{number}", truth
    )


def test_a_comparison_by_hand() -> None:
    a = [problem(0, "11"), problem(1, "00"), problem(2, "10"), problem(3, "11"), problem(4, "00"), problem(9, "1")]
    b = [problem(0, "11"), problem(1, "11"), problem(2, "11"), problem(3, "00"), problem(4, ""), problem(7, "1")]
    found = compare(("a", "b"), a, b, 200, 0)
    assert (found.only_in, found.ungraded, found.matched_by) == ((1, 1), 1, "prompt")
    numbers = found.overall
    assert numbers["problems"] == 4
    assert (numbers["mean_a"], numbers["mean_b"]) == (pytest.approx(2.5 / 4), pytest.approx(3 / 4))
    assert numbers["difference"] == pytest.approx(0.125)
    # Half of its responses right is not solved.
    assert (numbers["both_solved"], numbers["only_a_solved"], numbers["only_b_solved"]) == (1, 1, 2)
    assert numbers["mcnemar_p"] == 1.0
    low, high = numbers["difference_ci"]
    assert -1 <= low <= 0.125 <= high <= 1
    assert compare(("a", "a"), a, a, 200, 0).overall["difference_ci"] == pytest.approx([0.0, 0.0], abs=0.1)


def test_problems_are_matched_by_what_they_are() -> None:
    a = [problem(0, "1", "x"), problem(1, "0", "x"), problem(2, "1", "y")]
    pairs, by = match(a, [problem(5, "1", "y"), problem(6, "1", "x"), problem(7, "1", "x")])
    assert ([(p.number, q.number) for p, q in pairs], by) == ([(0, 6), (1, 7), (2, 5)], "prompt")
    a = [problem(i, "1", index=f"{i}") for i in range(3)]
    pairs, by = match(a, [problem(9, "1", index="1"), problem(8, "1", index="2", truth="other")])
    assert ([(p.number, q.number) for p, q in pairs], by) == ([(1, 9)], "index")
    pairs, by = match(a, [problem(9, "1", "p2", index="1"), problem(8, "1", "p0", index="1")])  # no index of its own
    assert ([(p.number, q.number) for p, q in pairs], by) == ([(0, 8), (2, 9)], "prompt")
    with pytest.raises(DataError, match="a and b have no graded problem in common"):
        compare(("a", "b"), a, [problem(7, "1", "z")], 0, 0)


def test_two_files_are_compared_on_what_both_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = table(tmp_path / "a.parquet", [{"texts": ["4"], "index": 0}, {"texts": ["5"], "index": 1}])
    b = table(
        tmp_path / "b.parquet",
        [{"texts": ["4", "4"], "index": 1}, {"texts": ["4", "5"], "index": 0}, {"texts": ["4", "4"], "index": 7}],
    )
    run_comparison(a, b, config(), as_json=True, out=tmp_path / "c.json")
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "c.json").read_text())
    assert (found["overall"]["mean_a"], found["overall"]["mean_b"], found["only_in_b"]) == (0.5, 0.75, 1)
    run_comparison(a, b, config(), as_json=False)
    shown = capsys.readouterr().out
    for part in ("+25.0", "matched by index", "1 problems in B only: left out"):
        assert part in shown
    assert "in A only" not in shown


def test_a_ground_truth_is_the_same_as_a_number_and_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = table(tmp_path / "a.parquet", [{"texts": ["4"], "index": 0, "truth": 4}])
    b = table(tmp_path / "b.parquet", [{"texts": ["5"], "index": 0, "truth": "4"}])
    run_comparison(a, b, config(), as_json=True)
    assert json.loads(capsys.readouterr().out)["overall"]["difference"] == -1.0
    other = table(tmp_path / "c.parquet", [{"texts": ["5"], "index": 0, "truth": "5"}])
    with pytest.raises(DataError) as error:
        run_comparison(a, other, config(), as_json=True)
    assert "ground truth" in (error.value.hint or "")


def test_columns_of_json_text_are_read_as_structs_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = table(tmp_path / "a.parquet", [{"texts": ["4"]}, {"texts": ["5"]}])
    rows = pq.read_table(a).to_pylist()
    rows[0]["prompt"][0]["name"] = None
    written = [{**row, **{c: json.dumps(row[c]) for c in ("prompt", "reward_model", "extra_info")}} for row in rows]
    b = tmp_path / "b.parquet"
    pq.write_table(pa.Table.from_pylist(written), b)
    assert evaluate(b, [1]).overall == evaluate(a, [1]).overall
    run_comparison(a, b, config(), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["overall"]["mean_a"], found["overall"]["mean_b"], found["only_in_b"]) == (0.5, 0.5, 0)


# ---------------------------------------------------------------------- failures


def test_failures_can_be_read_and_worked_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problems = [*PROBLEMS, {"texts": ["4", "4", "4", "4"]}, {"texts": ["```x", "4", "4", "4"]}]
    file = table(tmp_path / "r.parquet", problems)
    for name in ("f.md", "f.jsonl", "f.parquet"):
        run(file, config(), as_json=True, failures=tmp_path / name)
    records = [json.loads(line) for line in (tmp_path / "f.jsonl").read_text().splitlines()]
    assert pq.read_table(tmp_path / "f.parquet").to_pylist() == records
    assert len(records) == 2 + 3 + 3 + 2 + 1
    assert [r["kind"] for r in records if r["row"] == 3] == ["wrong", "episode_failed"]
    assert (records[0]["sample"], records[0]["extracted"], records[0]["expected"]) == (2, "5", "4")
    text = (tmp_path / "f.md").read_text()
    assert "## Row 0: openai/gsm8k, level Level 10, 2 of 4 right" in text
    assert "[user] question 0" in text
    assert "Row 4" not in text
    assert "````text" in text  # a fence that the response does not close
    capsys.readouterr()
    run(file, config(), as_json=False, failures=PAGER)
    assert "## Row 1" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"not one of \.md"):
        run(file, config(), as_json=True, failures=tmp_path / "f.csv")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f.jsonl", "f.md", "f.parquet", "r.parquet"]


def test_existing_files_are_kept_unless_overwrite_is_given(tmp_path: Path) -> None:
    file = str(table(tmp_path / "r.parquet", PROBLEMS))
    kept = {option: tmp_path / name for option, name in (("--out", "keep.json"), ("--failures", "keep.md"))}
    for option, path in kept.items():
        path.write_text("keep")
        for words in ([file], ["--compare", file, file], ["--model", "builtin:tiny"]):
            if words[0] == "--compare" and option == "--failures":
                continue
            done = CliRunner().invoke(app, ["eval", *words, option, str(path)])
            assert (done.exit_code, path.read_text()) == (2, "keep"), done.output
            assert f"{path} exists" in done.output
            assert f"give --overwrite, or another {option}" in done.output
    done = CliRunner().invoke(app, ["eval", file, "--out", str(tmp_path), "--overwrite"])
    assert (done.exit_code, "is a folder" in done.output, "grading" in done.output) == (2, True, False), done.output
    done = CliRunner().invoke(app, ["eval", file, "--out", str(kept["--out"]), "--overwrite"])
    assert done.exit_code == 0, done.output
    assert "overall" in json.loads(kept["--out"].read_text())
    done = CliRunner().invoke(app, ["eval", file, "--failures", str(kept["--failures"]), "--overwrite"])
    assert done.exit_code == 0, done.output
    assert "## Row 0" in kept["--failures"].read_text()


def test_what_is_read_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "sample", lambda resolved: pytest.fail("sampled"))
    file, other = (str(table(tmp_path / name, PROBLEMS)) for name in ("r.parquet", "s.parquet"))
    before, named = Path(file).read_bytes(), str(tmp_path / "new.md")
    for words, told in (
        ([file, "--failures", file], "--failures"),
        ([file, "--out", file], "--out"),
        (["--compare", other, file, "--out", file], "--out"),
        (["--model", "builtin:tiny", "--data", file, "--failures", file], "--failures"),
        ([file, "--out", named, "--failures", named], "--out and --failures both name"),
    ):
        done = CliRunner().invoke(app, ["eval", *words, "--overwrite"])
        assert (done.exit_code, Path(file).read_bytes()) == (2, before), done.output
        assert told in done.stderr
    for read in ({"file": file}, {"model": "builtin:tiny", "data": file}):
        with pytest.raises(ConfigError, match="would replace"):
            run_eval(**read, failures=file, overwrite=True)


def test_a_comparison_names_the_option_that_it_does_not_take(tmp_path: Path) -> None:
    file = str(table(tmp_path / "r.parquet", PROBLEMS))
    done = CliRunner().invoke(app, ["eval", "--compare", file, file, "--failures", str(tmp_path / "f.md")])
    assert done.exit_code == 2
    assert "--compare writes no failures, and --failures is given too" in done.stderr


def test_scores_are_shown_also_where_they_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = table(tmp_path / "r.parquet", PROBLEMS)

    def full(*_: Any, **__: Any) -> None:
        raise RunError("no room is left")

    monkeypatch.setattr(command, "write_text", full)
    for as_json in (True, False):
        with pytest.raises(RunError, match="no room"):
            run(file, config(), as_json=as_json, out=tmp_path / "out.json")
        assert "pass@1" in capsys.readouterr().out


def test_stdout_has_json_or_failures(tmp_path: Path) -> None:
    file = table(tmp_path / "r.parquet", PROBLEMS)
    done = CliRunner().invoke(app, ["eval", str(file), "--json", "--failures", "-"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--json and --failures - both write to stdout" in done.stderr


# ---------------------------------------------------------------------- sampling first


def test_a_file_of_failures_is_checked_before_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "sample", lambda resolved: pytest.fail("sampled"))
    done = CliRunner().invoke(app, ["eval", "--model", "builtin:tiny", "--failures", str(tmp_path / "wrong.txt")])
    assert done.exit_code == 2, done.output
    assert "wrong.txt: not one of .md, .jsonl, .parquet" in done.output
    with pytest.raises(ConfigError, match=r"wrong.txt: not one of \.md"):
        run_eval(model="builtin:tiny", failures=tmp_path / "wrong.txt")


def test_what_would_fail_later_is_found_before_sampling(tmp_path: Path) -> None:
    file = table(tmp_path / "p.parquet", PROBLEMS)
    for change, message in (
        ({"eval.pass_at": [3]}, "pass@3 needs 3 responses per problem, and rollout.n = 2"),
        ({"reward.function": "no_such.py:f"}, "no_such"),
        ({"reward.on_error": "zero"}, "has no meaning in eval"),
    ):
        flags = {"generate.data": str(file), "rollout.n": 2, **change}
        with pytest.raises(ConfigError, match=message):
            sample(resolve("generate", "tiny-generate", flags=flags))
    unknown = pq.read_table(file).to_pylist()
    pq.write_table(pa.Table.from_pylist([row | {"data_source": "openai/gsm9k"} for row in unknown]), file)
    with pytest.raises(ConfigError, match="no grader for data source 'openai/gsm9k'"):
        sample(resolve("generate", "tiny-generate", flags={"generate.data": str(file)}))


@pytest.mark.parametrize(
    ("model", "data", "name"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", "data/gsm8k/test.parquet", "eval-Qwen2.5-0.5B-Instruct-gsm8k-test"),
        ("run:latest", "x.parquet", "eval-run-latest-x"),
        ("runs/sft/checkpoints/global_step_3/", "a/b.parquet", "eval-global_step_3-a-b"),
    ],
)
def test_models_are_sampled_in_runs_of_their_own(model: str, data: str, name: str) -> None:
    resolved = resolve("generate", "tiny-generate", flags={"model.path": model, "generate.data": data})
    named = with_run_name(resolved)
    assert named.config == resolved.config.model_copy(update={"run": named.config.run})
    assert (named.config.run.name, named.provenance["run.name"]) == (name, "model and data")


@pytest.mark.parametrize("how", [{"sets": ["run.name=mine"]}, {"flags": {"run.name": "mine"}}])
def test_a_name_that_is_given_is_the_name_of_the_run(how: dict[str, Any]) -> None:
    assert with_run_name(resolve("generate", "tiny-generate", **how)).config.run.name == "mine"


def test_the_command_line_samples_and_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def sampled(resolved: Any) -> Path:
        seen.append(resolved.config)
        return table(tmp_path / "r.parquet", PROBLEMS)

    monkeypatch.setattr(command, "sample", sampled)
    line = ["eval", "--model", "run:sft", "--data", "d/x.parquet", "--n", "4", "--pass-at", "1,2", "--limit", "3"]
    done = CliRunner().invoke(app, [*line, "--set", "rollout.max_turns=2", "--tools", "gsm8k,calculator", "--json"])
    assert done.exit_code == 0, done.output
    cfg = seen[0]
    assert (cfg.model.path, cfg.generate.data, cfg.rollout.n, cfg.generate.limit) == ("run:sft", "d/x.parquet", 4, 3)
    assert (cfg.rollout.max_turns, cfg.rollout.tools, cfg.run.name) == (2, ["gsm8k", "calculator"], "eval-run-sft-d-x")
    assert json.loads(done.stdout.splitlines()[-1])["overall"]["pass@2"] == pytest.approx(17 / 24)
    CliRunner().invoke(app, [*line, "--name", "mine"])
    assert seen[1].run.name == "mine"
    for bad, message in (
        (["eval", "--n", "3"], "rollout.n is set by --n, and eval does not read it"),
        (["eval", "x.parquet", "--set", "model.path=y"], "model.path is set by --set, and eval does not read it"),
        (["eval", "--compare", "a", "b", "--pass-at", "2"], "--compare does not read eval.pass_at"),
        (["eval", "--compare", "a", "b", "--set", "reward.examine=2"], "--compare does not read reward.examine"),
        (["eval", "x.parquet", "--model", "y"], "a file is given"),
        (["eval", "x.parquet", "--compare", "a", "b"], "takes its two files"),
    ):
        done = CliRunner().invoke(app, bad)
        assert done.exit_code == 2
        assert message in done.output
