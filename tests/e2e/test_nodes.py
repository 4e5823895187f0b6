"""Two nodes as two network namespaces of this machine: one dies, and the run goes on without it and with it again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = [sys.executable, str(ROOT / "scripts" / "bench_nodes.py")]
LIMIT_S = 600


def namespaces_missing() -> str | None:
    """Return why this machine gives no network namespaces; None: it does."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from _netns import ROOTLESS
    finally:
        sys.path.pop(0)
    before = ROOTLESS if os.geteuid() else ()
    try:
        command = [*before, sys.executable, str(ROOT / "scripts" / "_netns.py")]
        tried = subprocess.run(command, capture_output=True, text=True, timeout=60.0)
    except FileNotFoundError as error:
        return f"no network namespaces: {error}"
    return tried.stderr.strip() if tried.returncode else None


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 120)
def test_a_run_over_two_nodes_survives_the_death_of_one(tmp_path: Path) -> None:
    if (reason := namespaces_missing()) is not None:
        pytest.skip(reason)
    done = subprocess.run(
        [*SCRIPT, "--only", "sft", "--gpus", "0", "--limit", str(LIMIT_S), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S + 60,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "WRONG" not in done.stdout
    assert "actor worker 1 died during" in done.stdout
    assert "its node has died or cannot be reached (10.77.0.2)" in done.stdout
    assert "data the same" in done.stdout
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| sft")]
    assert [row[2].strip() for row in rows] == ["1 + 1", "1 + 1", "1 + 0", "1 + 1"]
    over_both = [float(row[6]) for row in rows if row[1].strip() == "2"]
    assert min(over_both) > 10.0  # megabytes of gradients, and not heartbeats alone
    assert float(rows[2][6]) < 1.0
