"""From the command to the first request of `rl`, beside the start of SGLang's engine alone.

    python scripts/bench_start.py --model models/smollm2-135m-instruct --data data/gsm8k-calculator
    python scripts/bench_start.py --engine hf --preset tiny-arith --model builtin:tiny      on a CPU, without SGLang

The engine alone and `rl` start in turns, `--rounds` times: at first with the caches that there are, on a fresh machine
none, and then with what the starts before have left in memory and on the disk. `rl` trains one step and ends. All
seconds are from the start of a process to what a column says; those of `rl` between its checks and its first request
are `timing_s/start` (Ray and trainers), `engines` (what is left of their start then) and `first_sync`.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

PARTS = ("start", "engines", "first_sync")
ALONE = {
    "dtype": "bfloat16", "sampling_backend": "pytorch", "mem_fraction_static": 0.4, "max_running_requests": 1024,
    "cuda_graph_max_bs_decode": 1024, "context_length": 1032,
}  # fmt: skip
"""Arguments of the engine alone: graphs for as many requests as a step has, as `rl` gives it."""
DEADLINE_S = 600.0
"""Longest wait for the engine alone; `rl` has deadlines of its own."""


def start_of_engine(args: argparse.Namespace) -> float:
    """Seconds until an engine of SGLang without us has started. Raises ``RuntimeError`` where it has not in time."""
    from bench_real_rollouts import RawEngine

    began = time.time()
    engine = RawEngine("alone", dict(ALONE), argparse.Namespace(model=args.model, new=1), [])
    deadline = threading.Timer(DEADLINE_S, engine.signal, [signal.SIGKILL])
    deadline.start()
    try:
        engine.read("started")
        return time.time() - began
    finally:
        deadline.cancel()
        engine.signal(signal.SIGKILL)
        engine.process.wait()


def start_of_run(args: argparse.Namespace, folder: Path, number: int) -> dict[str, float]:
    """Seconds of a run of one step, by what they were spent on."""
    settings = [
        f"run.dir={folder}", f"run.name=start-{number}", "run.report=false", "train.steps=1", "data.val=",
        f"rollout.engine={args.engine}", *([f"data.train={args.data}/train.parquet"] if args.data else []), *args.set,
    ]  # fmt: skip
    command = [sys.executable, "-m", "posttrain", "rl", "--preset", args.preset, "--model", args.model]
    began, checked = time.time(), 0.0
    sets = [word for setting in settings for word in ("--set", setting)]
    with subprocess.Popen([*command, *sets], stderr=subprocess.PIPE, stdout=sys.stderr, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            checked = checked or (time.time() - began if " prompts, " in line else 0.0)  # its first note
            print(line, end="", file=sys.stderr)
    if process.returncode:
        sys.exit(f"rl ended with exit code {process.returncode}")
    row = json.loads((folder / f"start-{number}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
    return seconds_of(row, began) | {"checked": checked}


def seconds_of(row: dict[str, Any], began: float) -> dict[str, float]:
    """What the metrics of a first step say of a start: its parts, and seconds to the first request and to the step's
    end."""
    end = float(row["time"]) - began
    parts = {part: float(row[f"timing_s/{part}"]) for part in PARTS}
    after = float(row["timing_s/step"]) - sum(parts.values())
    return parts | {"first request": end - after, "first step": end}


def table(rounds: list[tuple[float, dict[str, float]]]) -> str:
    """A Markdown table of (seconds of the engine alone or NaN, those of `rl`)."""
    names = ("checked", *PARTS, "first request", "first step")
    lines = ["| engine alone | " + " | ".join(names) + " | first request / engine alone |", "| --- " * 8 + "|"]
    for alone, seconds in rounds:
        found = [alone, *(seconds[name] for name in names)]
        values = [*(f"{x:.1f}" for x in found), f"{seconds['first request'] / alone:.2f}"]
        lines.append("| " + " | ".join(values) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, help="folder with train.parquet; by default the preset's")
    parser.add_argument("--preset", default="smollm2-135m-gsm8k")
    parser.add_argument("--engine", default="sglang", help="of rl; only SGLang is started alone as well")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of rl")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            alone = start_of_engine(args) if args.engine == "sglang" else float("nan")
            rounds.append((alone, start_of_run(args, Path(folder), number)))
            print(table(rounds[-1:]), file=sys.stderr)
    print(table(rounds))


if __name__ == "__main__":
    main()
