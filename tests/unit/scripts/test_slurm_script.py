"""`scripts/slurm_rl.sbatch` with stand-ins for Slurm, Ray and posttrain."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "slurm_rl.sbatch"
TOOLS = {
    "srun": 'exec sleep 60 </dev/null >/dev/null 2>&1 # Ray on all nodes, until the script ends it\n',
    "python": 'echo 10.0.0.1 # the address; as the wait for the nodes it ends at once\n',
    "scontrol": 'echo "scontrol $*"\n',
    "posttrain": (
        'echo "posttrain $*"\n'
        '[ -n "${EXIT:-}" ] && exit "$EXIT"\n'
        "told=0; trap 'told=$((told + 1))' TERM\n"
        '[ -n "${EARLY:-}" ] && kill -TERM "$PPID" && touch "$EARLY"\n'
        'echo running; while [ "$told" = 0 ]; do sleep 0.05; done\n'
        'sleep 0.5; echo "saved, told $told"; exit "$AFTER_TERM"\n'
    ),
}  # fmt: skip


def start(folder: Path, *args: str, **more: str) -> subprocess.Popen[str]:
    for name, text in TOOLS.items():
        (folder / name).write_text("#!/usr/bin/env bash\n" + text)
        (folder / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RAY_"))}
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7", **more}
    environment.pop("POSTTRAIN_VENV", None)
    return subprocess.Popen(["bash", str(SCRIPT), *args], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("gpus", "workers"), [(None, 2), ("0", 2), ("8", 16)])
def test_workers_are_the_gpus_of_all_nodes_or_one_on_each(tmp_path: Path, gpus: str | None, workers: int) -> None:
    more = {} if gpus is None else {"SLURM_GPUS_ON_NODE": gpus}
    job = start(tmp_path, "rl", "--set", "cluster.workers=3", EXIT="0", **more)
    out, _ = job.communicate(timeout=30)
    assert job.returncode == 0
    line = f"posttrain rl --set cluster.address=10.0.0.1:6379 --set cluster.workers={workers} --set cluster.workers=3"
    assert line in out.splitlines()
    assert "requeue" not in out


def test_a_failing_command_fails_the_job(tmp_path: Path) -> None:
    job = start(tmp_path, "rl", EXIT="3")
    assert "requeue" not in job.communicate(timeout=30)[0]
    assert job.returncode == 3


@pytest.mark.parametrize("code", [0, 1])
def test_a_run_that_saved_after_sigterm_goes_back_into_the_queue(tmp_path: Path, code: int) -> None:
    job = start(tmp_path, "rl", AFTER_TERM=str(code))
    assert job.stdout is not None
    while job.stdout.readline() != "running\n":
        assert job.poll() is None
    job.send_signal(signal.SIGTERM)
    out, _ = job.communicate(timeout=30)
    assert job.returncode == code
    assert ("scontrol requeue 7" in out) == (code == 0)
    assert "saved" in out


@pytest.mark.parametrize("before", ["run=$!", '[ "$stopped" != early ]'])
def test_a_signal_that_comes_as_the_run_starts_reaches_it_once(tmp_path: Path, before: str) -> None:
    """The script waits before one of its commands, until the run has sent it the signal."""
    sent, hold = tmp_path / "sent", tmp_path / "hold.bash"
    hold.write_text(f"trap '[[ $BASH_COMMAND == \"$HELD\" ]] && until [ -e {sent} ]; do sleep 0.2; done' DEBUG\n")
    job = start(tmp_path, "rl", AFTER_TERM="0", EARLY=str(sent), BASH_ENV=str(hold), HELD=before)
    out, _ = job.communicate(timeout=30)
    assert job.returncode == 0
    assert "saved, told 1\n" in out
    assert "scontrol requeue 7" in out
