"""metrics.jsonl, phase timings, and what the console shows."""

import io
import json
import math
import re
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from posttrain.core.errors import ConfigError
from posttrain.tracking import Tracker
from posttrain.tracking.console import Mode, PlainLines
from posttrain.tracking.gpus import describe
from posttrain.tracking.metrics import MetricsFile
from posttrain.tracking.panel import LivePanel, sparkline
from posttrain.tracking.progress import Progress, Work, clock
from posttrain.tracking.warnings import RunWarning
from tests.helpers.recorded import trajectory


def rows(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_metrics_lines_and_timings(tmp_path: Path) -> None:
    with Tracker(tmp_path, "t", 2, ["jsonl"]) as tracker:
        for _ in range(2):
            with tracker.phase("gen"):
                time.sleep(0.02)
        with tracker.phase("update"), tracker.phase("inner"):
            time.sleep(0.01)
        tracker.log(1, {"train/loss": np.float32(0.5), "n": 3})  # type: ignore[dict-item]
        tracker.log(2, {"train/loss": 0.25})
        first = rows(tmp_path)[0]  # flushed while the run goes on
    first, second = rows(tmp_path)
    assert (first["step"], first["train/loss"], first["n"]) == (1, 0.5, 3)
    assert first["timing_s/gen"] >= 0.04  # both visits
    assert first["timing_s/update"] >= first["timing_s/inner"] >= 0.01
    assert first["timing_s/step"] >= first["timing_s/gen"] + first["timing_s/update"]
    assert "timing_s/gen" not in second
    assert second["time"] == pytest.approx(time.time(), abs=60)


def test_a_phase_that_fails_is_timed_and_left(tmp_path: Path) -> None:
    with Tracker(tmp_path, "t", 1, ["jsonl"]) as tracker:
        with pytest.raises(ValueError, match="boom"), tracker.phase("gen"):
            raise ValueError("boom")
        tracker.log(1, {})
    assert rows(tmp_path)[0]["timing_s/gen"] >= 0


def test_nan_stays_readable_json(tmp_path: Path) -> None:
    with Tracker(tmp_path, "t", 1, ["jsonl"]) as tracker:
        tracker.log(1, {"a": math.nan, "b": math.inf})
    row = rows(tmp_path)[0]
    assert math.isnan(float(row["a"]))
    assert float(row["b"]) == math.inf


def test_resume_cuts_back_to_the_checkpoint(tmp_path: Path) -> None:
    with Tracker(tmp_path, "t", 5, ["jsonl"]) as tracker:
        for step in (1, 2, 3, 4):
            tracker.log(step, {})
    file = tmp_path / "metrics.jsonl"
    with file.open("a") as torn:
        torn.write('{"step": 1, "ti')
    with Tracker(tmp_path, "t", 5, ["jsonl"]) as tracker:
        tracker.rewind(2)
        assert [row["step"] for row in rows(tmp_path)] == [1, 2]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "metrics.jsonl"]
        tracker.log(3, {})
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]


def test_plain_lines_go_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Tracker(tmp_path, "t", 4, ["console"]) as tracker:
        tracker.note("resuming at step 1")
        with tracker.phase("gen"):
            pass
        tracker.log(1, {"critic/score/mean": 0.5, "actor/pg_loss": -0.01, "perf/throughput": 1234.5, "other": 1.0})
    out, err = capsys.readouterr()
    note, line = err.splitlines()
    assert out == ""
    assert note == "resuming at step 1"
    assert line.startswith("step 1/4  reward 0.500  loss -0.0100  tokens/s 1234")
    assert "(gen 0.0)" in line
    assert "eta 0:0" in line
    assert "other" not in line
    assert not (tmp_path / "metrics.jsonl").exists()


def test_no_logger_no_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Tracker(None, "t", None, ["jsonl"]) as tracker:
        tracker.note("hello")
        tracker.log(1, {})
    assert capsys.readouterr() == ("", "")


def drawn(progress: Progress, *notes: str, width: int = 100) -> str:
    """What a terminal gets of a panel."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, color_system=None, legacy_windows=False)
    panel = LivePanel(progress, console)
    for note in notes:
        panel.note(note)
    panel.close()
    panel.close()
    return stream.getvalue()


def test_panel_shows_the_run() -> None:
    progress = Progress("rl tiny", 10)
    for step, reward in ((1, 0.0), (2, 0.5), (3, 1.0)):
        progress.update(
            step,
            {
                "critic/score/mean": reward,
                "actor/pg_loss": -reward,
                "response_length/mean": 10.0 * step,
                "actor/grad_norm": 0.25,
                "val-core/x": 0.125,
                "timing_s/step": 2.0,
            },
        )
    progress.step_started = time.monotonic() - 4.0
    progress.open_phases.append(("gen", time.monotonic() - 3.0))
    progress.took("data", 1.0)
    progress.in_flight = lambda: {"sampling": 12, "tool": 3, "grading": 0}
    progress.sampled([[trajectory(0, 0.0), trajectory(1, 1.0)], [trajectory(2, error="gone")]])
    text = drawn(progress, "[saved] step 3")
    for part in ("rl tiny", "3/10", "eta 0:14", "gen 0:03   of this step: gen 75 % · data 25 %", "1.000    ▁▅█"):
        assert part in text
    for part in ("-1.0000  █▅▁", "30       ▁▅█", "0.250", "0.125", "[saved] step 3", "12 sampling, 3 tool"):
        assert part in text
    assert "│ step         3/10   eta 0:14   elapsed 0:00" in text
    assert "good sample  1 · #### 8" in text
    assert "bad sample   0 · #### 8" in text


def test_what_a_model_says_cannot_drive_the_terminal() -> None:
    hostile = "\x1b[2J\x1b]0;owned\x07\x9b31m \u202egnissim [bold]x[/bold]\nnext\ttab"
    progress = Progress(f"rl {hostile}", 2)
    progress.update(1, {"timing_s/step": 1.0, f"val-core/{hostile}": 1.0})
    episode = trajectory(0, 1.0)
    episode.messages = [*episode.messages[:1], {"role": "assistant", "content": hostile}]
    progress.sampled([[episode]])
    text = drawn(progress, f"note {hostile}")
    for bad in ("\x1b[2J", "\x1b]", "\x07", "\x9b", "\u202e"):
        assert bad not in text
    assert r"\x1b[2J\x1b]0;owned\x07\x9b31m \u202egnissim [bold]x[/bold]" in text


def test_a_validation_is_shown_with_its_interval(capsys: pytest.CaptureFixture[str]) -> None:
    name = "val-core/openai/gsm8k/acc/mean@1"
    values = {name: 0.0481, f"{name}/low": 0.037, f"{name}/high": 0.0604, "timing_s/step": 1.0}
    progress = Progress("rl", 2)
    PlainLines(progress).step(1, values)
    assert f"{name} 0.048 (0.037 - 0.060)  1.0 s" in capsys.readouterr().err
    assert "0.048 (0.037 - 0.060) openai/gsm8k/acc/mean@1" in drawn(progress)


@pytest.mark.parametrize("width", [60, 108, 150])
def test_the_panel_uses_the_width_that_there_is(width: int) -> None:
    """Labels are whole, a curve ends with its newest value, and of the phases those that fit are shown."""
    progress = Progress("rl tiny", 1000, warnings=[RunWarning("x", 1, 5, "32 of 64 episodes " * 9, "")])
    for step in range(1, 141):
        values = {"critic/score/mean": float(step == 140), "val-core/openai/gsm8k/acc/mean@16": 0.125}
        progress.update(step, values | {"timing_s/step": 12.0})
    progress.step_started = time.monotonic() - 100.0
    progress.open_phases.append(("testing", time.monotonic() - 50.0))
    for name in ("gen", "update_actor", "old_log_prob"):
        progress.took(name, 12.0)
    progress.work = Work("validation", 1319, "prompts", time.monotonic() - 50.0, done=500)
    progress.samples = {"good": (1.0, "a long answer " * 20)}
    lines = [line.rstrip() for line in drawn(progress, width=width).splitlines() if line.startswith("│ ")]
    rows = {line[2:13].rstrip(): line[15:-1].rstrip() for line in lines[1:]}
    assert {"step", "phase", "progress", "reward", "validation", "good sample", "warning"} <= rows.keys()
    assert rows["reward"].endswith("▁█")
    assert len(rows["reward"]) == 9 + min(140, width - 26)
    assert rows["validation"] == "0.125    openai/gsm8k/acc/mean@16"
    assert rows["progress"].startswith("validation 500 of 1,319 prompts   eta 1:2")
    assert rows.get("this step", rows["phase"]).endswith("old_log_prob 12 %" if width > 60 else "update_actor 12 %")
    assert len(rows["good sample"]) in (width - 17, width - 18)
    assert all(len(line) == width for line in lines)


def test_narrow_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("rl tiny", 10)
    progress.sampled([[trajectory(0, 1.0)]])
    progress.update(1, {"timing_s/step": 1.0, "critic/score/mean": 0.5})
    assert all(
        len(line) <= 42 for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn(progress, width=40)).splitlines()
    )


@pytest.mark.parametrize("mode", ["plain", "json", "quiet"])
def test_modes(mode: Mode, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Tracker(None, "t", 4, ["console"], console=mode) as tracker:
        tracker.note("hello \x1b[31m")
        tracker.note("warning: careful")
        with tracker.phase("gen"):
            pass
        tracker.log(1, {"critic/score/mean": 0.5, "x": math.nan})
    out, err = capsys.readouterr()
    assert out == ""
    assert "\x1b" not in err
    lines = err.splitlines()
    if mode == "quiet":
        assert lines == ["warning: careful"]
    elif mode == "json":
        first, second, step = map(json.loads, lines)
        assert (first["note"], second["note"]) == ("hello \x1b[31m", "warning: careful")
        assert (step["step"], step["total_steps"], step["critic/score/mean"], step["x"]) == (1, 4, 0.5, "nan")
        assert "timing_s/gen" in step
    else:
        assert lines[0] == r"hello \x1b[31m"
        assert lines[2].startswith("step 1/4  reward 0.500")


def test_gpus_in_a_few_words() -> None:
    assert describe("1024, 81920, 97\n2048, 81920, 3\n") == "1.0/80 GiB 97 %   2.0/80 GiB 3 %"
    assert describe("1024, 81920, 50\n" * 7 + "2048, 81920, 100\n") == "8 GPUs: 1.0 to 2.0 of 80 GiB, 50 to 100 %"
    assert describe("1024, 81920, [N/A]\n") == "1.0/80 GiB"
    assert describe("") == ""


def test_what_the_driver_does_not_tell_of_gpus_is_left_out() -> None:
    assert describe("1024, 81920, [N/A]\n2048, 81920, [N/A]\n", most=1) == "2 GPUs: 1.0 to 2.0 of 80 GiB"
    assert describe("[N/A], [N/A], 3\n2048, 81920, 5\n", most=1) == "2 GPUs: 2.0 of 80 GiB, 3 to 5 %"
    assert describe("[N/A], [N/A], 3\n") == "3 %"
    assert describe("[N/A], [N/A], [N/A]\n") == describe("[N/A], [N/A], [N/A]\n" * 2, most=1) == ""


def test_eta_leaves_out_what_comes_once_before_the_first_update() -> None:
    progress = Progress("t", 11)
    once = {"timing_s/start": 20.0, "timing_s/engines": 10.0, "timing_s/first_sync": 10.0, "timing_s/warm_up": 20.0}
    progress.update(1, {"timing_s/step": 62.0, "timing_s/gen": 1.0, **once})
    assert progress.eta == "0:20"


def test_eta_leaves_out_a_validation_before_the_first_step() -> None:
    progress = Progress("t", 11)
    progress.update(0, {"timing_s/step": 300.0, "timing_s/testing": 300.0})
    assert progress.eta == ""
    progress.update(1, {"timing_s/step": 2.0})
    assert progress.eta == "0:20"


def test_eta_of_what_is_reported_at_its_beginning_counts_all_that_comes_after() -> None:
    progress = Progress("t", 30)
    progress.update(0, {"timing_s/step": 5.0})
    progress.update(10, {"timing_s/step": 10.0})
    assert progress.eta == "0:20"


def test_sparkline_and_clock() -> None:
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([0.0, math.nan, 1.0]) == "▁ █"
    assert sparkline([math.inf]) == ""
    assert [clock(s) for s in (0, 61, 3661)] == ["0:00", "1:01", "1:01:01"]


def test_metrics_that_cannot_be_written_are_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"cannot write .*metrics\.jsonl"):
        MetricsFile(tmp_path)
