"""What the benchmarks of asynchronous `rl` read of runs, and updates amid sampling with an engine that dies in one."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


def result(seconds, rewards):
    waits = {"trainers_wait": 0.5, "engines_wait": 0.25, "updates": 0.1, "staleness": 0.0, "staleness_max": 0.0}
    return {"mean_step_s": seconds[1], "seconds": seconds, "rewards": rewards, "compared": [], **waits}


def test_rewards_are_compared_at_equal_samples_and_at_equal_seconds(load, tmp_path):
    bench = load("bench_async")
    rewards = [float(step) for step in range(30)]
    (tmp_path / f"{bench.slug('synchronous', 0)}.json").write_text(json.dumps(result([9.0] + [2.0] * 29, rewards)))
    (tmp_path / f"{bench.slug('k = 1', 0)}.json").write_text(json.dumps(result([5.0] + [1.0] * 29, rewards)))
    slow, fast = bench.curves(tmp_path, [0], ["synchronous", "k = 1"]).splitlines()[2:]
    # By samples both are equal; in the 29 s of the fast one, after the first step, the slow one takes 14 steps.
    assert [cell.strip() for cell in slow.split("|")[2:8]] == ["7.000", "17.000", "27.000", "2.000", "7.000", "12.000"]
    assert [cell.strip() for cell in fast.split("|")[2:8]] == ["7.000", "17.000", "27.000", "7.000", "17.000", "27.000"]
    row = bench.table(tmp_path, [0], ["synchronous", "k = 1"]).splitlines()[-1]
    assert [cell.strip() for cell in row.split("|")[1:6]] == ["k = 1", "1.00", "2.00", "2.00", "50 %"]


def test_memory_that_grows_is_seen_before_and_after_the_death_of_an_engine(load):
    growth = load("bench_updates").growth
    flat = [9.0, 3.0, *[4.0] * 8, math.nan, *[1.0] * 9]
    assert growth(flat, 10) == 0.0  # the first steps, and the engine that comes back smaller, are no growth
    assert growth([*flat[:9], 4.75, *flat[10:]], 11) == pytest.approx(0.75)
    assert growth([*flat[:-1], 1.5], 10) == pytest.approx(0.5)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_updates_come_amid_sampling_and_an_engine_dies(tmp_path):
    line = [sys.executable, str(SCRIPTS / "bench_updates.py"), "--steps", "10", "--kill", "5", "--out", str(tmp_path)]
    # How many updates come amid tokens depends on how fast the machine samples and trains: one will do.
    line += ["--amid", "0.1", "--in-broadcast", "--set", "rollout.max_response_tokens=320", "data.batch_size=4"]
    line += ["cluster.placement=separate", "cluster.weight_transfer=broadcast"]
    done = subprocess.run(
        line, capture_output=True, text=True, check=False, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "| hf | 10 of 10 |" in done.stdout
    assert "| 1 (1 processes killed) |" in done.stdout
