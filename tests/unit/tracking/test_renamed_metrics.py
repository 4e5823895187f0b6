"""Metrics of older runs, whose names have changed."""

import json
from pathlib import Path

import pytest

from posttrain.tracking.metrics import RENAMED_METRICS, read_metrics, with_current_names


def test_reads_old_names_of_metrics_with_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "sync/canary_gap": 0.1 * step, "train/loss": 1.0} for step in (1, 2)]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"step": 3, "sync/check_gap": 0.5}]))
    found = read_metrics(tmp_path)
    assert [row["sync/check_gap"] for row in found] == [0.1, 0.2, 0.5]
    assert not RENAMED_METRICS.keys() & {name for row in found for name in row}
    assert capsys.readouterr().err == f"warning: {file}: sync/canary_gap is read as sync/check_gap, its current name\n"


def test_keeps_current_names_of_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"step": 1, "sync/check_gap": 0.5}
    assert with_current_names(row, tmp_path) == row
    assert not capsys.readouterr().err
