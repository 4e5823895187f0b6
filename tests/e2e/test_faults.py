"""Runs that lose a process, are told to go, or go on elsewhere: what comes out is what would have come out."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from posttrain import merge_ckpt
from posttrain.cluster.cluster import local_ray
from posttrain.cluster.trainers import TrainerGroup
from posttrain.config.presets import resolve
from posttrain.core.errors import Interrupted
from posttrain.models.load import load_model, locate
from posttrain.prep import command as prep
from posttrain.sft import command as sft
from posttrain.train import checkpoint

STEPS = 10
PROGRAM = [sys.executable, "-c", "from posttrain.cli import main; main()"]
CHAOS = Path(__file__).parents[2] / "scripts" / "chaos.py"


@pytest.fixture(scope="module", autouse=True)
def ray_here():
    """For the runs in this process, which are compared to the bit with those of other processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with local_ray():
            yield


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    prep.run("arith", out=str(folder / "data"), seed=0, train_rows=60, test_rows=10)
    return folder


def sets(place, *more):
    data = place / "data"
    return [
        f"run.dir='{place / 'runs'}'", f"data.train='{data / 'sft_train.parquet'}'", "data.batch_size=8",
        f"train.steps={STEPS}", "train.save_every=2", "run.logger=['jsonl']", *more,
    ]  # fmt: skip


def flags(name):
    return {"run.name": name}


def train(place, name, *more):
    return sft.run(resolve("sft", "tiny-arith-sft", sets(place, *more), flags(name)))


@pytest.fixture(scope="module")
def calm(place):
    """A run that nobody disturbs."""
    return train(place, "calm")


def rows(folder):
    times = ("time", "timing_s/", "perf/")
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(times)} for row in found]


def weights(folder):
    return dict(load_model(locate(str(checkpoint.find(folder).path)), dtype=torch.float32).named_parameters())


def assert_same(one, other):
    assert rows(one) == rows(other)
    expected = weights(other)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(one).items())


@pytest.mark.slow
def test_a_run_whose_worker_dies_starts_it_again(place, calm, monkeypatch):
    """And is the one that it would have been, to the bit."""
    started: list[int] = []
    start = TrainerGroup.start

    async def watched(group, deadline_s):
        await start(group, deadline_s)
        started.append(group.handles[0].process.pid)

    monkeypatch.setattr(TrainerGroup, "start", watched)
    file = place / "runs" / "again" / "metrics.jsonl"

    def kill():
        while not (file.exists() and len(file.read_text().splitlines()) >= 5):
            time.sleep(0.005)
        os.kill(started[0], signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    folder = train(place, "again", "run.restarts=1")
    assert len(started) == 2
    assert_same(folder, calm)


def test_it_branches_off_and_keeps_the_best(place, calm):
    """Another run begins with a checkpoint of the first, where this was half done; it keeps the best of its steps."""
    data = place / "data"
    folder = train(
        place, "branch",
        f"run.resume='{calm}/checkpoints/global_step_8'", f"data.val='{data / 'sft_train.parquet'}'",
        "train.steps=14", "train.val_every=2", "checkpoint.best='val/loss'", "checkpoint.best_mode='min'",
        "checkpoint.keep=1", "train.optim.schedule='constant'", "train.optim.lr=0.3",
    )  # fmt: skip
    found = rows(folder)
    assert [row["step"] for row in found] == list(range(9, 15))
    assert found[0]["train/loss"] == pytest.approx(rows(calm)[8]["train/loss"], rel=1e-6)  # the ninth batch
    losses = {row["step"]: row["val/loss"] for row in found if "val/loss" in row}
    best = min(losses, key=losses.get)
    assert best != 14  # at such a rate it gets worse
    kept = sorted(path.name for path in (folder / "checkpoints").glob("global_step_*"))
    assert kept == sorted([f"global_step_{best}", "global_step_14"])
    assert checkpoint.find(folder / "best").step == best
    merged = merge_ckpt.run("branch/best", str(place / "merged"), runs=str(place / "runs"), check=True)
    expected = weights(folder / "checkpoints" / f"global_step_{best}")
    found = dict(load_model(locate(str(merged)), dtype=torch.float32).named_parameters())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def start(command, *more):
    line = [*PROGRAM, *command, *(part for one in more for part in ("--set", one))]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition, process, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_a_preempted_job_saves_and_exits_with_0(place, calm):
    """SIGTERM amid a run; the same command goes on, and nothing tells the two apart."""
    folder = place / "runs" / "preempted"
    command = ["sft", "--preset", "tiny-arith-sft", "--name", "preempted"]
    process = start(command, *sets(place, "train.save_every=100"))
    wait_for(lambda: (folder / "metrics.jsonl").exists() and len(rows(folder)) >= 3, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "stopped by SIGTERM after step" in err
    assert out == ""
    done = checkpoint.find(folder).step
    assert 3 <= done < STEPS
    assert json.loads((folder / "run.json").read_text())["status"] == "interrupted"
    process = start(command, *sets(place, "train.save_every=100"))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert_same(folder, calm)


@pytest.mark.slow
def test_a_preempted_rl_run_does_not_wait_for_its_episodes(place):
    """They are long here: the step that was being sampled is left, and the one before it saved."""
    folder = place / "runs" / "long"
    command = ["rl", "--preset", "tiny-arith", "--name", "long", "--model", "builtin:tiny"]
    command += ["--data", str(place / "data" / "train.parquet"), "--steps", "50"]
    more = [f"run.dir='{place / 'runs'}'", "run.logger=['jsonl']", "data.batch_size=8", "rollout.n=8"]
    process = start(command, *more, "rollout.max_response_tokens=400", "rollout.kv_tokens=8192")
    wait_for(lambda: (folder / "metrics.jsonl").exists() and len(rows(folder)) >= 1, process, 300.0)
    steps = len(rows(folder))
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    start_s = time.monotonic()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert time.monotonic() - start_s < 60
    assert checkpoint.find(folder).step >= steps
    assert "stopped by SIGTERM" in err


@pytest.mark.slow
def test_chaos(tmp_path):
    done = subprocess.run(
        [sys.executable, str(CHAOS), "sft", "--kills", "2", "--seed", "3", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"PYTHONPATH": str(CHAOS.parents[1])},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal to the bit" in done.stdout
    assert "2 kills in" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["cluster.workers=2"], []),
        ([], ["cluster.workers=2"]),
        ([], ["cluster.workers=2", "train.sequence_parallel=2"]),
    ],
    ids=["2 to 1", "1 to 2", "1 to 2 that share sequences"],
)
def test_it_goes_on_with_other_workers(place, calm, before, after):
    """Equal within float32's noise. Stopped as by Ctrl-C, with the same total of steps."""
    name = f"resized-{len(before)}-{len(after)}"
    file = place / "runs" / name / "metrics.jsonl"

    def stop():
        while not (file.exists() and len(file.read_text().splitlines()) >= 3):
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(Interrupted):
        train(place, name, *before)
    assert 3 <= checkpoint.find(file.parent).step < STEPS
    folder = train(place, name, *after)
    for row, wanted in zip(rows(folder), rows(calm), strict=True):
        assert row == pytest.approx(wanted, rel=2e-4, abs=1e-6)
    expected = weights(calm)
    for key, tensor in weights(folder).items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-3, atol=1e-4)
