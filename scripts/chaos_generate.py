"""Kills `posttrain generate` at random moments, lets it go on, and compares its file with that of a run left alone.

    python scripts/chaos_generate.py --kills 10 --prompts 2000

The driver is ended with SIGKILL when a random share of the prompts is done; the same command is then started again.
In the end the file must hold the same rows, in every column: tokens, masks, text, conversations, errors.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

POSTTRAIN = [sys.executable, "-c", "from posttrain.cli import main; main()"]
DEADLINE_S = 1800.0
"""Longest life of one attempt."""


def prepare(folder: Path, prompts: int, steps: int) -> None:
    """A file with so many prompts, and a model that answers some of them."""
    log = (folder / "log.txt").open("ab")
    run = functools.partial(subprocess.run, check=True, stdout=log, stderr=log)
    data = folder / "data"
    run([*POSTTRAIN, "prep", "arith", "--out", str(data), "--train-rows", "400", "--test-rows", "400"])
    table = pq.read_table(data / "test.parquet")
    repeated = pa.concat_tables([table] * -(-prompts // table.num_rows)).slice(0, prompts)
    pq.write_table(repeated, data / "prompts.parquet")
    options = ["--name", "start", "--steps", str(steps), "--data", str(data / "sft_train.parquet")]
    run([*POSTTRAIN, "sft", "--preset", "tiny-arith-sft", *options, "--set", f"run.dir={folder / 'runs'}"])


def command(folder: Path, name: str, samples: int) -> list[str]:
    """The command line of both runs."""
    line = ["generate", "--preset", "tiny-arith-generate", "--model", "run:start", "--name", name]
    line += ["--data", str(folder / "data" / "prompts.parquet"), "--n", str(samples)]
    return [*POSTTRAIN, *line, "--set", f"run.dir={folder / 'runs'}", "--limit", "1000000"]


def done(parts: Path) -> int:
    """Rows in the parts so far."""
    return sum(pq.read_metadata(part).num_rows for part in parts.glob("part-*.parquet"))


def attempt(folder: Path, line: list[str], parts: Path, until: int | None, delay_s: float) -> tuple[int, float]:
    """Run it, to its end or until so many rows are done and ``delay_s`` seconds more; exit status and seconds."""
    begin = time.monotonic()
    with (folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(line, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
        while process.poll() is None:
            if time.monotonic() - begin > DEADLINE_S:
                process.kill()
                sys.exit(f"an attempt has hung; see {folder / 'log.txt'}")
            if until is not None and parts.exists() and done(parts) >= until:
                time.sleep(delay_s)
                process.send_signal(signal.SIGKILL)
                process.wait()
            time.sleep(0.05)
    return process.returncode, time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--train-steps", type=int, default=200, help="of the model that answers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/chaos-generate"), help="must not exist")
    args = parser.parse_args()
    folder = args.out.resolve()
    if folder.exists():
        sys.exit(f"{folder} exists")
    folder.mkdir(parents=True)
    prepare(folder, args.prompts, args.train_steps)

    files = {name: folder / "runs" / name / "responses.parquet" for name in ("calm", "stormy")}
    parts = files["stormy"].with_name("responses.parquet.parts")
    status, calm_s = attempt(folder, command(folder, "calm", args.samples), parts, None, 0.0)
    if status:
        sys.exit(f"the run that nobody disturbs failed; see {folder / 'log.txt'}")
    chance = random.Random(args.seed)
    killed_at, stormy_s = [], 0.0
    for kill in range(args.kills + 1):
        until = None if kill == args.kills else int(args.prompts * (kill + chance.random()) / (args.kills + 1))
        status, seconds = attempt(
            folder, command(folder, "stormy", args.samples), parts, until, chance.uniform(0.0, 0.5)
        )
        stormy_s += seconds
        if status == -signal.SIGKILL:
            killed_at.append(round(done(parts) / args.prompts, 3))
        elif status:
            sys.exit(f"an attempt ended with status {status}; see {folder / 'log.txt'}")
        if status == 0:
            break
    calm, stormy = (pq.read_table(file) for file in files.values())
    different = {
        name: sum(a != b for a, b in zip(calm[name].to_pylist(), stormy[name].to_pylist(), strict=False))
        for name in calm.column_names
    }
    result = {
        "prompts": args.prompts, "samples": args.samples, "kills": len(killed_at), "killed_at": killed_at,
        "rows": stormy.num_rows, "same_columns": calm.schema.equals(stormy.schema),
        "different_rows": {name: count for name, count in different.items() if count},
        "calm_s": round(calm_s, 1), "stormy_s": round(stormy_s, 1),
        "calm_rows_per_s": round(args.prompts / calm_s, 2), "parts_left": parts.exists(),
    }  # fmt: skip
    print(json.dumps(result))
    same = calm.num_rows == stormy.num_rows == args.prompts and not result["different_rows"] and not parts.exists()
    sys.exit(not (same and len(killed_at) == args.kills))


if __name__ == "__main__":
    main()
