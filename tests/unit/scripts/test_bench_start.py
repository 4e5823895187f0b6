"""The benchmark of a run's start: what it makes of a first step's metrics, and a whole start on this machine."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[3] / "scripts" / "bench_start.py"


def test_the_first_request_comes_when_the_engines_have_the_weights(load):
    bench = load("bench_start")
    parts = {"start": 5.0, "engines": 3.0, "first_sync": 1.0}
    row = {"time": 1100.0, "timing_s/step": 20.0, **{f"timing_s/{name}": x for name, x in parts.items()}}
    seconds = bench.seconds_of(row, began=1075.0)
    assert seconds["first step"] == 25.0
    assert seconds["first request"] == 25.0 - (20.0 - 9.0)
    assert [seconds[part] for part in bench.PARTS] == [5.0, 3.0, 1.0]
    assert "| 10.0 | 4.0 | 5.0 | 3.0 | 1.0 | 14.0 | 25.0 | 1.40 |" in bench.table([(10.0, seconds | {"checked": 4.0})])


def test_an_engine_alone_that_does_not_start_is_an_error(load, tmp_path):
    """As here, where there is no SGLang; what was started has ended."""
    bench = load("bench_start")
    with pytest.raises(RuntimeError, match="the raw engine alone has ended"):
        bench.start_of_engine(argparse.Namespace(model=str(tmp_path)))


@pytest.mark.slow
def test_a_start_with_the_embedded_engine(tmp_path):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "posttrain", "prep", "arith"], cwd=tmp_path, env=env, check=True)
    command = [sys.executable, str(FILE), "--engine", "hf", "--preset", "tiny-arith", "--model", "builtin:tiny"]
    done = subprocess.run(
        [*command, "--rounds", "1"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    _, _, row = done.stdout.splitlines()
    alone, checked, start, engines, sync, request, step, _ = map(float, row.strip("| ").split(" | "))
    assert alone != alone  # no engine alone: it is SGLang's
    # Each is rounded to a tenth.
    assert 0 < checked < request < step
    assert checked + start + engines + sync <= request + 0.6
