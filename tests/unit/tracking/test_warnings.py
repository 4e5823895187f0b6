"""Warnings of a run: what each rule finds, that each is raised once, and that every view shows the same ones."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from posttrain.cli import app
from posttrain.config.presets import Resolved, resolve
from posttrain.core.errors import RunError, WorkerError
from posttrain.data.parquet import Conversation, sft_row, write_rows
from posttrain.rl.metrics import failures, rollout_metrics
from posttrain.runs import report
from posttrain.runs.prompts import validation_note
from posttrain.runs.recording import open_tracker
from posttrain.runs.run import RunDir
from posttrain.tracking import Tracker
from posttrain.tracking.console import Mode
from posttrain.tracking.panel import LivePanel
from posttrain.tracking.progress import Progress
from posttrain.tracking.report.folder import RunFolder
from posttrain.tracking.rules import RULES, WINDOW, Finding, Observed, rules_of
from posttrain.tracking.warnings import RunWarnings, read_warnings
from tests.helpers.scripted import Gsm8kTool, ScriptedSampler, call, environment, gsm8k_prompt
from tests.helpers.written_runs import many, write_run
from tests.unit.rollout.test_source import source

REPO = Path(__file__).resolve().parents[3]


def found(rule: str, *steps: Mapping[str, float], errors: Mapping[Any, str] | None = None) -> Finding | None:
    """What a rule finds in steps 1, 2, ... of which the last one had the errors."""
    last = len(steps)
    window = [Observed(i, metrics, (errors or {}) if i == last else {}) for i, metrics in enumerate(steps, start=1)]
    return RULES[rule](window[-WINDOW:])


def level(rule: str, *steps: Mapping[str, float]) -> int:
    finding = found(rule, *steps)
    return 0 if finding is None else finding.level


EPISODES = {"rollout/episodes": 64.0}
SAME = {"critic/score/max": 0.0, "critic/score/min": 0.0, "critic/score/mean": 0.0}
MIXED = {"critic/score/max": 1.0, "critic/score/min": 0.0, "critic/score/mean": 0.5}
FLAT = {"rollout/groups_without_signal": 1.0}
CASES: list[tuple[str, list[Mapping[str, float]], int]] = [
    ("graders_fail", [EPISODES | {"rollout/grader_failed": 0.0}], 0),
    ("graders_fail", [EPISODES | {"rollout/grader_failed": 1.0}], 1),
    ("graders_fail", [EPISODES | {"rollout/grader_failed": 32.0}], 3),
    ("graders_fail", [EPISODES | {"rollout/grader_failed": 64.0}, *[EPISODES] * 10], 0),  # long ago
    ("episodes_fail", [EPISODES | {"rollout/failed": 7.0}], 2),
    ("episodes_fail", [{}], 0),  # sft
    ("validation_fails", [{"rollout/val_episodes": 10.0, "rollout/val_failed": 10.0}], 3),
    ("validation_fails", [{"rollout/val_episodes": 10.0, "rollout/val_failed": 10.0}, {}], 0),
    ("tools_fail", [{"rollout/tool_calls": 20.0, "rollout/tool_errors": 20.0}], 2),
    ("tools_fail", [{"rollout/tool_calls": 19.0, "rollout/tool_errors": 19.0}], 0),
    ("tools_fail", [{"rollout/tool_calls": 100.0, "rollout/tool_errors": 50.0}], 0),
    ("engines_lost", [{"rollout/samplers_lost": 1.0}], 1),
    ("engines_lost", [{"rollout/samplers_lost": 0.0}], 0),
    ("skipped_updates", [{"train/skipped_steps": 1.0}], 1),
    ("skipped_updates", [{"actor/skipped_steps": 10.0}], 2),
    ("no_signal", [FLAT | MIXED] * 9, 0),
    ("no_signal", [FLAT | MIXED] * 10, 1),
    ("no_signal", [FLAT | MIXED] * 200, 2),
    ("no_signal", [*[FLAT | MIXED] * 9, MIXED | {"rollout/groups_without_signal": 0.9}, *[FLAT | MIXED] * 9], 0),
    ("no_signal", [FLAT | SAME] * 10, 1),
    ("equal_rewards", [SAME] * 10, 1),
    ("equal_rewards", [SAME] * 9 + [MIXED], 0),
    ("equal_rewards", [SAME | {"rollout/episodes": 1.0}] * 10, 0),
    ("groups_filtered", [{"rollout/groups": 8.0, "rollout/filtered_groups": 40.0}] * 5, 1),
    ("groups_filtered", [{"rollout/groups": 8.0, "rollout/filtered_groups": 8.0}] * 5, 0),
    ("answers_cut", [{"response_length/clip_ratio": 1.0}] * 5, 2),
    ("answers_cut", [{"response_length/clip_ratio": 1.0}] * 4, 0),
    ("answers_cut", [{"response_length/clip_ratio": 0.4}] * 50, 0),
    ("trainer_engine_gap", [{"rollout_gap/outside": 0.2, "rollout_gap/mean_abs": 0.3}] * 5, 1),
    ("trainer_engine_gap", [{"rollout_gap/outside": 0.01, "rollout_gap/mean_abs": 0.01}] * 5, 0),
    ("trainer_engine_gap", [{"rollout_gap/outside": 0.9, "staleness/max": 1.0}] * 5, 0),
    ("trainer_engine_gap", [{"rollout_gap/same_weights/outside": 0.2, "staleness/max": 1.0}] * 5, 1),
    ("policy_moved", [{"actor/ppo_kl": -2.0}] * 5, 2),
    ("policy_moved", [{"actor/ppo_kl": float("nan")}] * 5, 0),
    ("kl_explodes", [{"actor/kl_loss": 3.0}] * 5, 1),
    ("kl_explodes", [{"actor/reward_kl_penalty": 20.0}] * 5, 2),
    ("entropy_collapses", [{"actor/entropy": 1.0}] * 10 + [{"actor/entropy": 0.001}] * 10, 2),
    ("entropy_collapses", [{"actor/entropy": 0.001}] * 20, 0),
    ("memory_grows", [{"sync/gpu_used_gib": 42.0 + 0.3 * step} for step in range(20)], 1),
    ("memory_grows", [{"sync/gpu_used_gib": 42.0 + 0.3 * step} for step in range(40)], 2),
    ("memory_grows", [{"sync/gpu_used_gib": 42.0 + 0.3 * step} for step in range(19)], 0),
    ("memory_grows", [{"sync/gpu_used_gib": 42.0 + min(step, 15)} for step in range(200)], 0),
    ("memory_grows", [{"sync/gpu_used_gib": 60.0 + step % 3 * 0.1} for step in range(200)], 0),
    ("memory_grows", [{}] * 40, 0),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "steps", "expected"), CASES)
def test_a_rule_finds_what_is_wrong_and_nothing_else(
    rule: str, steps: list[Mapping[str, float]], expected: int
) -> None:
    assert level(rule, *steps) == expected


def test_every_rule_is_tried_and_described() -> None:
    assert {rule for rule, _, _ in CASES} == set(RULES)
    page = (REPO / "docs" / "metrics.md").read_text()
    assert [rule for rule in RULES if f"| `{rule}` |" not in page] == []


def test_a_warning_has_the_count_the_first_error_and_what_to_do() -> None:
    finding = found(
        "graders_fail", EPISODES | {"rollout/grader_failed": 32.0}, errors={"grader": "ValueError: no\n number"}
    )
    assert finding is not None
    assert finding.text == "32 of 64 episodes could not be graded in step 1 (50 %); the first: ValueError: no number"
    assert "reward.function" in finding.hint


@pytest.mark.parametrize(
    ("sets", "without"),
    [
        ((), {"equal_rewards"}),
        (("algo.advantage='gae'",), {"no_signal"}),
        (("rollout.only=true", "rollout.n=1"), {"no_signal"}),
        (("algo.advantage='distill'", "algo.teacher='builtin:tiny'"), {"no_signal", "equal_rewards"}),
        (("rollout.replay='x'",), {"equal_rewards", "trainer_engine_gap", "policy_moved"}),
    ],
)
def test_rules_without_a_meaning_are_left_out(sets: tuple[str, ...], without: set[str]) -> None:
    assert set(RULES) - set(rules_of(resolve("rl", "tiny-arith", sets).config)) == without


# ---------------------------------------------------------------------- raised once, kept, shown


def failing(step: int, count: float) -> dict[str, float]:
    return EPISODES | {"rollout/grader_failed": count, "critic/score/mean": 0.5}


def test_a_warning_comes_once_and_again_when_it_is_worse(tmp_path: Path) -> None:
    rules = {"graders_fail": RULES["graders_fail"]}
    warnings = RunWarnings(tmp_path, rules)
    counts = {1: 0.0, 2: 2.0, 3: 1.0, 4: 0.0, 5: 64.0, 6: 64.0, 7: 0.0, 8: 64.0}
    raised = {step: [w.level for w in warnings.observe(step, failing(step, n), {})] for step, n in counts.items()}
    assert raised == {1: [], 2: [1], 3: [], 4: [], 5: [2], 6: [], 7: [], 8: []}
    assert [w.step for w in read_warnings(tmp_path)] == [2, 5]
    assert [(w.step, w.level) for w in warnings.newest] == [(5, 2)]

    resumed = RunWarnings(tmp_path, rules)
    assert resumed.observe(3, failing(3, 8.0), {}) == []
    (worse,) = resumed.observe(4, failing(4, 64.0), {})
    assert (worse.level, [w.level for w in read_warnings(tmp_path)]) == (3, [1, 2, 3])


def test_steps_that_come_again_do_not_count_twice() -> None:
    warnings = RunWarnings(None, {"no_signal": RULES["no_signal"]})
    for step in range(1, 10):
        assert warnings.observe(step, FLAT | MIXED, {}) == []
    warnings.rewind(5)
    assert warnings.observe(6, FLAT | MIXED, {}) == []


def test_a_line_that_is_damaged_costs_itself_only(tmp_path: Path) -> None:
    RunWarnings(tmp_path, RULES).observe(1, failing(1, 64.0), {})
    file = tmp_path / "warnings.jsonl"
    file.write_text('{"name": "torn\n[1]\n' + file.read_text())
    assert [w.name for w in read_warnings(tmp_path)] == ["graders_fail"]


@pytest.mark.parametrize("mode", ["plain", "json", "quiet"])
def test_every_log_shows_a_warning(mode: Mode, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Tracker(tmp_path, "t", 4, ["console"], console=mode, rules=RULES) as tracker:
        tracker.failed({"grader": "ValueError: \x1b[31mfirst"})
        tracker.failed({"grader": "ValueError: second"})
        tracker.log(1, failing(1, 32.0))
        tracker.log(2, failing(2, 32.0))
    err = capsys.readouterr().err
    assert "second" not in err
    assert "\x1b" not in err
    text = "32 of 64 episodes could not be graded in step 1 (50 %); the first: ValueError: \\x1b[31mfirst"
    if mode == "json":
        (line,) = [line for line in map(json.loads, err.splitlines()) if "warning" in line]
        assert (line["warning"], line["step"], line["level"], line["text"]) == ("graders_fail", 1, 3, text)
        assert line["hint"]
    else:
        assert err.count("warning: step 1: ") == 1
        assert f"warning: step 1: {text}\n  hint: mend the grader" in err


def test_the_panel_shows_warnings_also_of_a_run_that_goes_on(tmp_path: Path) -> None:
    RunWarnings(tmp_path, RULES).observe(7, failing(7, 64.0), {})
    stream = io.StringIO()
    progress = Progress("rl", 9, warnings=RunWarnings(tmp_path, RULES).newest)
    LivePanel(progress, Console(file=stream, force_terminal=True, width=108, color_system=None)).close()
    assert re.search(r"│ warning +step 7: 64 of 64 episodes could not be graded", stream.getvalue())


def test_the_report_has_the_newest_warning_of_each_name(tmp_path: Path) -> None:
    path = write_run(tmp_path, "a", many(1, 1, 2))
    warnings = RunWarnings(path, RULES)
    for step, count in ((1, 1.0), (2, 64.0)):
        warnings.observe(step, failing(step, count), {"grader": "<b>boom</b>"})
    (shown,) = RunFolder.read(path).summary()["warnings"]
    assert (shown["name"], shown["step"], shown["level"]) == ("graders_fail", 2, 3)
    assert "<b>boom" not in report.run([str(path)], "runs", None).read_text()


def test_a_run_warns_by_the_rules_of_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"run.dir": str(tmp_path), "run.name": "r", "run.logger": ["console"]}
    resolved = resolve("rl", "tiny-arith", ["algo.advantage='distill'", "algo.teacher='builtin:tiny'"], flags)
    (tmp_path / "r").mkdir()
    with open_tracker(resolved.config, RunDir(tmp_path / "r", resumed=False), 20) as tracker:
        for step in range(1, 12):
            tracker.log(step, FLAT | SAME | {"response_length/clip_ratio": 1.0})
    assert re.findall(r"warning: step (\d+): (.*) of the answers in steps 1 to 5 ", capsys.readouterr().err) == [
        ("5", "100 %")
    ]
    assert [w.name for w in read_warnings(tmp_path / "r")] == ["answers_cut"]


# ---------------------------------------------------------------------- where failures come from


async def test_the_first_message_of_each_kind_of_failure_is_kept() -> None:
    """A tool that is not there, an engine that fails, and a grader that fails whose episode earns 0."""
    sampler = ScriptedSampler(call(8, "nobody"), "#### 8", RunError("engine fell over"), "#### 8")
    pool = source(sampler, env=environment(Gsm8kTool()))
    groups = await pool.sample([gsm8k_prompt()], 3)
    assert failures(pool) == {
        "tool": "error: unknown tool 'nobody'; known: calc_gsm8k_reward",
        "episode": "RunError: engine fell over",
    }
    metrics = rollout_metrics(groups, pool)
    counts = ("episodes", "groups", "failed", "tool_calls", "tool_errors")
    assert [metrics[f"rollout/{name}"] for name in counts] == [3, 1, 1, 1, 1]

    ungradable = source(ScriptedSampler("#### 8"), on_error="zero", weights={"tool/x": 1.0, "gone": 1.0})
    ((episode,),) = await ungradable.sample([gsm8k_prompt()], 1)
    assert episode.error is None
    assert "reward.weights names gone" in failures(ungradable)["grader"]
    dead = source(ScriptedSampler(WorkerError("out of memory")))
    await dead.sample([gsm8k_prompt()], 1)
    assert failures(dead)["engine"] == "out of memory"


# ---------------------------------------------------------------------- what takes a while


def test_a_long_validation_is_announced_and_shows_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with (
        Tracker(None, "t", 4, ["console"], console="plain") as tracker,
        tracker.counting("validation", 1319, "prompts") as advance,
    ):
        for _ in range(120):
            now[0] += 1.0
            advance(10)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "validation: 1,319 prompts"
    assert lines[1] == "validation: 150 of 1,319 prompts  elapsed 0:15  eta 1:57"
    assert len(lines) == 1 + 120 // 15


def test_programs_read_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with Tracker(None, "t", 4, ["console"], console="json") as tracker, tracker.counting("validation", 5, "prompts"):
        pass
    line = json.loads(capsys.readouterr().err)
    assert line == {"progress": "validation", "done": 0, "total": 5, "unit": "prompts"}


def note(*sets: str, **flags: Any) -> str:
    resolved: Resolved = resolve(
        "rl", "qwen2.5-0.5b-gsm8k", sets, {f"data.{name}": value for name, value in flags.items()}
    )
    return validation_note(resolved, 1319 if resolved.config.data.val else 0, "prompts")


def test_data_that_leaves_the_presets_validation_set_is_said() -> None:
    assert "validation on 1,319 prompts of data/gsm8k/test.parquet, " in note()
    assert "data.val is still" not in note()
    assert "data.val is still that of preset qwen2.5-0.5b-gsm8k: --data replaces data.train alone" in note(
        train="mine.parquet"
    )
    assert "data.val is still" in note("data.train='mine.parquet'")
    assert "data.val is still" not in note("data.val='other.parquet'", train="mine.parquet")
    assert note("data.val=", train="mine.parquet") == "no validation: data.val is empty"
    all_too_long = resolve("rl", "qwen2.5-0.5b-gsm8k")
    assert validation_note(all_too_long, 0, "prompts") == "no validation: none of the prompts of data.val are usable"


@pytest.mark.parametrize(("command", "preset"), [("rl", "tiny-arith"), ("sft", "tiny-arith-sft")])
def test_a_missing_validation_set_of_the_preset_is_named_by_its_key(command: str, preset: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        f'command = "{command}"\nextends = "{preset}"\n[model]\npath = "builtin:tiny"\n[data]\nval = "gone.parquet"\n'
    )
    chat = [{"role": "user", "content": "Say 8"}, {"role": "assistant", "content": "8"}]
    row: dict[str, Any] = sft_row(Conversation(chat))  # type: ignore[arg-type]
    if command == "rl":
        answer = {"style": "rule", "ground_truth": "8"}
        row = {"data_source": "posttrain/arith", "prompt": chat[:1], "reward_model": answer, "extra_info": {"index": 0}}
    write_rows(tmp_path / "mine.parquet", [row] * 64)
    arguments = [
        command,
        "--preset",
        str(tmp_path / "mine.toml"),
        "--data",
        str(tmp_path / "mine.parquet"),
        "--dry-run",
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "error: data.val: gone.parquet: no such file\n" in done.output
    assert "--data replaces data.train alone: --set data.val=FILE, or --set data.val= for none" in done.output
