"""The Python API under a running event loop: the notebook and the guide's snippets run as a reader would run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain import load_run

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_notebook_and_guide_run_under_an_event_loop_and_plot_curves(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    runner = [sys.executable, str(Path(__file__).with_name("run_python_api.py")), str(tmp_path)]
    pages = [str(REPO / "examples" / "quickstart.ipynb"), str(REPO / "docs" / "python-api.md")]
    done = subprocess.run([*runner, *pages], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"quickstart.ipynb": 2, "python-api.md": 0}

    run = load_run("notebook-rl", tmp_path / "runs")
    assert run.status == "finished"
    assert list(run.metrics.index) == [1, 2, 3, 4]
    assert run.rollouts.groupby("step").size().to_dict() == dict.fromkeys((1, 2, 3, 4), 8 * 4)
    means = run.rollouts.groupby("step")["reward"].mean()
    assert means.to_numpy() == pytest.approx(run.metrics["critic/score/mean"].to_numpy())
    assert load_run("api-rl", tmp_path / "runs").config["algo.name"] == "rloo"
    assert (tmp_path / "merged" / "api-rl" / "config.json").is_file()
