"""Runs that end badly say why, keep what they have, and go on with the same command."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from posttrain.cli import app
from posttrain.cluster.cluster import local_ray
from posttrain.prep import command as prep
from posttrain.tracking.log import DRIVER, worker_log
from posttrain.tracking.report.folder import RunFolder
from posttrain.train import checkpoint
from tests.helpers.small_disk import small_disk

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    prep.run("arith", out=str(folder), seed=0, train_rows=60, test_rows=10)
    return folder / "sft_train.parquet"


def words(data, runs, *more):
    sets = (f"run.dir='{runs}'", "data.batch_size=8", "run.console='plain'")
    given = [part for one in sets for part in ("--set", one)]
    return ["sft", "--preset", "tiny-arith-sft", "--data", str(data), "--name", "a", *given, *more]


@pytest.mark.slow
def test_a_run_fills_its_disk_and_goes_on_and_is_trained_further(data, tmp_path):
    """A checkpoint takes 6 MB here: the first has room, the second does not."""
    with small_disk(tmp_path, "9m") as disk, ExitStack() as shared:
        command = words(data, disk / "runs", "--steps", "4", "--set", "train.save_every=2")
        run = disk / "runs" / "a"
        failed = CliRunner().invoke(app, command)  # with a Ray of its own, which ends the workers before it says why
        shared.enter_context(local_ray())
        assert failed.exit_code == 1, failed.output
        error, hint = failed.stderr.splitlines()[-2:]
        assert error.startswith("error: the checkpoint of step 4 could not be written: cannot write ")
        assert error.endswith(": no room is left on its disk")
        assert hint == (
            "hint: free some room there, then run the same command again; it goes on from the checkpoint before"
        )
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["global_step_2", "latest"]
        assert not list(run.rglob("*.tmp"))
        # Why, in the run's folder and in its report.
        failure = json.loads((run / "run.json").read_text())["failure"]
        assert f"error: {failure['message']}" == error
        assert f"hint: {failure['hint']}" == hint
        assert (failure["exit_code"], failure["time"][:2]) == (1, "20")
        assert RunFolder.read(run).summary()["failure"] == failure
        log = (run / "logs" / DRIVER).read_text()
        assert "step 3/4" in log
        assert "Traceback" in log
        assert error in log
        # What libraries say of themselves is not in the worker's log, and "the end of its log" is nothing else.
        lines = worker_log(run / "logs", "actor worker 0").read_text()
        assert "process " in lines.splitlines()[0]
        assert not any(noise in lines for noise in ("torchao", "_pytree", "it/s]", "%|"))

        subprocess.run(["mount", "-o", "remount,size=40m", str(disk)], check=True)
        again = CliRunner().invoke(app, command)
        assert again.exit_code == 0, again.output
        assert "resuming after step 2" in again.stderr
        state = json.loads((run / "run.json").read_text())
        assert state["status"] == "finished"
        assert "failure" not in state

        # The finished run: refused before anything is read, with what trains it further; which does.
        refused = CliRunner().invoke(app, [*command, "--data", "missing.parquet"])
        assert refused.exit_code == 2
        assert refused.stderr.splitlines()[-2] == f"error: output folder exists: {run} holds a finished run"
        assert f"to train it further: --resume {run} --steps N, with N above 4" in refused.stderr
        assert "to start from its weights: --model run:a --name OTHER" in refused.stderr
        for more in (["--resume", str(run)], ["--resume", str(run), "--name", "b"]):
            nothing = CliRunner().invoke(app, [*command, *more])
            assert nothing.exit_code == 2, nothing.output
            assert "nothing is left to train: the run goes on after step 4, and ends after step 4" in nothing.stderr
            assert "hint: --steps counts all steps: give more than 4" in nothing.stderr
        assert [path.name for path in run.parent.iterdir()] == ["a"]
        further = CliRunner().invoke(app, [*command, "--resume", str(run), "--steps", "5"])
        assert further.exit_code == 0, further.output
        assert checkpoint.find(run).step == 5
        other = CliRunner().invoke(app, [*command, "--model", "run:a", "--name", "b", "--steps", "1"])
        assert other.exit_code == 0, other.output


def started(command):
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    line = [sys.executable, "-m", "posttrain", *command]
    return subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=env, start_new_session=True)


def lines_of(process, wanted, seconds=120.0):
    """Read stderr until a line begins with ``wanted``; returns it."""
    end = time.monotonic() + seconds
    for line in process.stderr:
        assert time.monotonic() < end
        if line.decode().startswith(wanted):
            return line.decode()
    raise AssertionError(f"it ended without {wanted!r}")


@pytest.mark.slow
def test_a_terminal_that_goes_away_and_a_head_that_dies(data, tmp_path):
    """SIGHUP goes to Ray's processes too: the run saves all the same. The same command goes on, with its --overwrite;
    then Ray's head is killed."""
    run = tmp_path / "runs" / "a"
    command = words(data, tmp_path / "runs", "--steps", "100000", "--overwrite")
    process = started(command)
    lines_of(process, "step 3/")
    os.killpg(process.pid, signal.SIGHUP)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert b"stopped by SIGHUP after step" in err
    assert b"the same command goes on from there" in err
    saved = checkpoint.find(run).step
    assert saved >= 3

    process = started(command)
    assert (
        lines_of(process, "run ")
        .rstrip()
        .endswith("was begun by this --overwrite: it goes on, and with --resume never it begins anew")
    )
    assert f"after step {saved} " in lines_of(process, "resuming")
    lines_of(process, "step ")
    children = subprocess.run(["ps", "-eo", "pid,ppid,comm"], capture_output=True, text=True, check=True).stdout
    heads = [
        int(line.split()[0]) for line in children.splitlines() if line.split()[1:] == [str(process.pid), "gcs_server"]
    ]
    os.kill(heads[0], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    error, hint = err.decode().splitlines()[-2:]
    assert error.startswith("error: Ray's head process (GCS, ")
    assert error.endswith("gcs_server.out")
    assert hint.endswith("the same command goes on from the last checkpoint")
    assert json.loads((run / "run.json").read_text())["failure"]["who"] == "Ray's head process"
