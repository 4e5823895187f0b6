"""Runs commands of posttrain one after the other in this process, which shares one Ray among them.

python run_commands.py FOLDER < commands.json      a list of lists of words; ends at the first that fails
"""

import json
import os
import sys
import time
import traceback

from typer.testing import CliRunner

from posttrain.cli import app
from posttrain.cluster.cluster import local_ray

if __name__ == "__main__":
    os.chdir(sys.argv[1])
    with local_ray():
        for words in json.load(sys.stdin):
            begin = time.monotonic()
            result = CliRunner().invoke(app, words)
            print(f"{time.monotonic() - begin:.1f} s  {' '.join(words)}", flush=True)
            if result.exit_code != 0:
                trace = "".join(traceback.format_exception(result.exception))
                sys.exit(f"exit code {result.exit_code}\n{result.output[-3000:]}\n{trace[-2000:]}")
