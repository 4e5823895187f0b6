"""`rl` runs that sample while they train: the staleness of every token, though an engine or the driver is killed."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from posttrain.cluster.cluster import local_ray
from posttrain.config.presets import resolve
from posttrain.data.loader import BatchOrder
from posttrain.data.parquet import write_rows
from posttrain.rl import command as rl
from posttrain.train import checkpoint
from tests.e2e.test_rollout_faults import PLUGIN, hit_sampler

REPO = Path(__file__).parents[2]
ROWS, SIZE, STEPS = 12, 4, 6


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    path = tmp_path_factory.mktemp("plugin") / "async_plugin.py"
    path.write_text(PLUGIN.replace("varied", "any_length").replace('"slow"', '"late"'))
    return path


@pytest.fixture
def settings(tmp_path, plugin):
    """``settings(*sets)``: the ``--set`` of a run of the untrained tiny model whose simulated user is late for some
    rows."""
    rows = [
        {
            "data_source": "test/any_length",
            "prompt": [{"role": "user", "content": f"Say {i}"}],
            "reward_model": {"ground_truth": ""},
        }
        for i in range(ROWS)
    ]
    write_rows(tmp_path / "train.parquet", rows)

    def sets(*more):
        return [
            "model.path='builtin:tiny'", f"plugins=['{plugin}']", f"run.dir='{tmp_path}'",
            "run.name='r'", f"data.train='{tmp_path / 'train.parquet'}'", f"data.batch_size={SIZE}",
            f"train.steps={STEPS}", "rollout.n=2", "rollout.tools=[]", "rollout.interaction='late'",
            "rollout.max_turns=2", "rollout.max_response_tokens=48", "run.report=false", *more,
        ]  # fmt: skip

    sets.folder = tmp_path / "r"
    return sets


def check(folder, k):
    """Check what a run was trained on, by its rollout files: every prompt as often as the order of the data says, no
    token older than ``k`` versions. Returns the metrics."""
    trained: Counter[int] = Counter()
    for file in sorted((folder / "rollouts").glob("step_*.parquet")):
        columns = ["step", "group", "row", "weight_version", "loss_mask", "error"]
        table = pq.read_table(file, columns=columns).to_pylist()
        assert {row["error"] for row in table} == {None}
        trained.update({row["group"]: row["row"] for row in table}.values())
        for row in table:
            ages = row["step"] - 1 - np.array(row["weight_version"])[np.array(row["loss_mask"])]
            assert ages.min() >= 0
            assert ages.max() <= k
    assert trained == Counter(BatchOrder(ROWS, SIZE, 0).take(SIZE * STEPS))
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert 0 < max(row["staleness/max"] for row in steps) <= k
    assert max(row["sync/check_gap"] for row in steps) < 1e-3
    assert all(0.0 <= row[f"wait/{who}"] <= 1.0 for row in steps for who in ("trainers", "engines", "updates"))
    return steps


@pytest.mark.parametrize(
    ("k", "in_flight"), [(2, "true"), pytest.param(1, "false", marks=pytest.mark.slow)], ids=["in flight", "by turn"]
)
def test_no_token_is_older_than_the_bound_though_an_engine_dies(settings, k, in_flight):
    with local_ray():
        hit_sampler(settings.folder / "metrics.jsonl", signal.SIGKILL, after_lines=2)
        sets = settings(f"rollout.staleness={k}", f"rollout.in_flight_updates={in_flight}", "train.val_every=3")
        sets += [f"data.val='{settings.folder.parent / 'train.parquet'}'", "val.limit=2"]
        rl.run(resolve("rl", "tiny-arith", sets))
    steps = check(settings.folder, k)
    assert steps[-1]["rollout/samplers_lost"] == 1
    # Validations are played beside groups of later steps, and count their own episodes.
    assert [row.get("rollout/val_episodes") for row in steps] == [None, None, 2.0, None, None, 2.0]
    assert sum(row["rollout/episodes"] for row in steps) == 2 * SIZE * STEPS


@pytest.mark.slow
def test_a_driver_that_is_killed_goes_on_with_the_groups_in_flight(settings):
    sets = settings("rollout.staleness=2", "rollout.keep_kv=true", "train.save_every=1", "run.console='plain'")
    command = [sys.executable, "-m", "posttrain", "rl", "--preset", "tiny-arith"]
    command += [word for one in sets for word in ("--set", one)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=env, start_new_session=True, text=True)
    assert any(line.startswith("step 3/") for line in process.stderr)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    saved = checkpoint.find(settings.folder)
    state = saved.read("loader.json")
    # What is drawn ahead at least, and what may be, less the window of a group.
    assert SIZE - 1 <= len(state["left"]) <= 2 * SIZE - 1
    assert (saved.path / "in_flight.parquet").is_file() == bool(state["in_flight"])
    again = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert f"resuming after step {saved.step} " in again.stderr
    check(settings.folder, 2)


@pytest.mark.slow
def test_chaos(tmp_path):
    """A training worker in a step and an engine in a save. More of them: the script by itself."""
    script = REPO / "scripts" / "chaos_async.py"
    command = [sys.executable, str(script), "--no-calm", "--out", str(tmp_path / "chaos")]
    env = os.environ | {"PYTHONPATH": str(REPO)}
    options = ["--kills", "2", "--seed", "21", "--steps", "4"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=500, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kills, 1 starts" in done.stdout
    assert "32 groups, oldest token" in done.stdout
