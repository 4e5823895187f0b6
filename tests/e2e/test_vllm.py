"""The tests that have vLLM in their own process, in the environment that scripts/test_vllm makes."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VENV = Path(os.environ.get("POSTTRAIN_VLLM_VENV") or ROOT / ".venv-vllm")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not VENV.is_dir(), reason=f"no vLLM: {VENV} is not there (make it with scripts/test_vllm)")
def test_the_tests_with_vllm_pass() -> None:
    done = subprocess.run(["scripts/test_vllm"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-3000:]
