"""Run commands of posttrain one after the other in one process, which shares one Ray among them."""

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from typer.testing import CliRunner

REPO = Path(__file__).resolve().parents[2]


def run_commands(folder: Path, commands: Sequence[Sequence[str]]) -> None:
    """Run commands, each a list of words after ``posttrain``, in ``folder``, in a process of their own: a plugin
    registers names for good. Ends at the first that fails.

    Raises:
        AssertionError: A command failed; the message has its output.
    """
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        input=json.dumps([list(words) for words in commands]),
        env=environment,
        capture_output=True,
        text=True,
        timeout=570,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def _main() -> None:
    from posttrain.cli import app
    from posttrain.cluster.cluster import local_ray

    os.chdir(sys.argv[1])
    with local_ray():
        for words in json.load(sys.stdin):
            begin = time.monotonic()
            result = CliRunner().invoke(app, words)
            print(f"{time.monotonic() - begin:.1f} s  {' '.join(words)}", flush=True)
            if result.exit_code != 0:
                trace = "".join(traceback.format_exception(result.exception))
                sys.exit(f"exit code {result.exit_code}\n{result.output[-3000:]}\n{trace[-2000:]}")


if __name__ == "__main__":
    _main()
