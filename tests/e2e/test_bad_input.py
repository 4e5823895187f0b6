"""Bad inputs through the commands, as processes of their own: the short form of ``scripts/bad_input.py``."""

import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


@pytest.mark.slow
def test_bad_inputs_end_with_a_message_a_hint_and_nothing_half_written() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/bad_input.py", "--short"], cwd=REPO, capture_output=True, text=True, timeout=560
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-3000:]
    assert " 0 failed" in done.stdout.splitlines()[-1]
