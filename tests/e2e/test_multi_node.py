"""The commands of docs/multi-node.md, on two Ray nodes of this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MINUTE = 60.0
RAY = str(Path(sys.executable).with_name("ray"))
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
FRESH = """
command = "rl"
extends = "tiny-arith"
[model]
path = "builtin:tiny"
[data]
batch_size = 2
[rollout]
n = 2
max_response_tokens = 16
[train]
steps = 2
"""


@contextmanager
def ray_node(command: str, folder: str) -> Iterator[subprocess.Popen[str]]:
    """A Ray node with two cores, as long as this lasts."""
    options = f"--block --num-cpus 2 --disable-usage-stats --temp-dir {folder}"
    node = subprocess.Popen(
        [RAY, *command.split()[1:], *options.split()],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert node.stdout is not None
        assert any("Ray runtime started" in line for line in iter(node.stdout.readline, ""))
        yield node
        assert node.poll() is None  # the cluster is not a run's to end
    finally:
        node.send_signal(signal.SIGTERM)
        node.communicate(timeout=MINUTE)


def start(command: str, cwd: Path) -> subprocess.Popen[str]:
    name, *arguments = command.split()
    program = [sys.executable, "-m", name] if name == "posttrain" else [RAY]
    return subprocess.Popen(
        [*program, *arguments],
        cwd=cwd,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_the_commands_of_the_guide(tmp_path: Path) -> None:
    """A run over both nodes, and another one beside it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    (tmp_path / "mine.toml").write_text(FRESH)
    prepared = start("posttrain prep arith --train-rows 100 --test-rows 20", tmp_path)
    assert prepared.wait(MINUTE) == 0
    # Sockets have short paths only.
    with (
        tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder,
        ray_node(f"ray start --head --port {address.split(':')[1]} --include-dashboard false", f"{folder}/1"),
        ray_node(f"ray start --address {address}", f"{folder}/2"),
    ):
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        runs = [
            start(f"posttrain rl --preset mine.toml --set cluster.address={address} --set cluster.workers=2", tmp_path),
            # Its folder is relative to where the run begins, and not to where Ray did.
            start(
                f"posttrain sft --preset tiny-arith-sft --steps 2 --set cluster.address={address} "
                "--set run.dir='../other' --set data.train='../data/arith/sft_train.parquet'",
                elsewhere,
            ),
        ]
        for run in runs:
            _, shown = run.communicate(timeout=3 * MINUTE)
            assert run.returncode == 0, shown[-2000:]
            assert "step 2/2" in shown
        assert (tmp_path / "runs" / "mine" / "checkpoints" / "global_step_2").is_dir()
        assert (tmp_path / "other" / "tiny-arith-sft" / "checkpoints" / "global_step_2").is_dir()
        looked = start(f"posttrain doctor --address {address}", tmp_path)
        status = start(f"ray status --address {address}", tmp_path)
        found, _ = looked.communicate(timeout=2 * MINUTE)
        assert f"Ray answers at {address}: 2 nodes, 4 CPUs, 0 GPUs" in found
        assert status.communicate(timeout=MINUTE)[0].count("1 node_") == 2
