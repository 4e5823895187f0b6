#!/usr/bin/env python
"""A real model on GSM8K, several seeds: base, after SFT, after RL, by the presets of docs/smollm2.md.

    python scripts/bench_smollm2.py run --seeds 0 1 2 --algos grpo dapo --gpus 0 1
    python scripts/bench_smollm2.py show

`run` trains `sft-SEED` and then `ALGO-SEED` for each seed, and evaluates the untrained model. An RL run starts as soon
as its SFT has ended; runs of one algorithm share a GPU, so `--rl-set` must give each engine its part of the memory.
Validation samples at temperature 1.0. With `--greedy` the models of a seed are evaluated by greedy decoding as well,
once its runs have ended; `greedy-RUN.log` has the table.
All of them read `models/` and `data/` of this folder and write `runs/`; logs go into `--logs`. A run that fails stops
those that need it, and no other. `show` prints the tables of what `runs/` holds, of unfinished runs too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SFT, RL, GENERATE = "smollm2-135m-gsm8k-sft", "smollm2-135m-gsm8k", "smollm2-135m-gsm8k-generate"
MODEL = "./models/smollm2-135m-instruct"
SCORE = re.compile(r"val-core/openai/gsm8k/acc/mean@\d+")
FIRST = 8
"""Steps over which the first and last rewards are taken."""


async def command(name: str, gpu: str, logs: Path, *words: str) -> bool:
    """Run a command of posttrain on one GPU and say how long it took. Returns whether it ended well."""
    began = time.monotonic()
    with (logs / f"{name}.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "posttrain",
            *words,
            stdout=log,
            stderr=log,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu},
        )
        code = await process.wait()
    print(f"{name}: {'done' if code == 0 else f'failed ({code})'} after {time.monotonic() - began:.0f} s", flush=True)
    return code == 0


async def run(args: argparse.Namespace) -> int:
    args.logs.mkdir(parents=True, exist_ok=True)
    gpu_of = {algo: args.gpus[i % len(args.gpus)] for i, algo in enumerate(args.algos)}

    def sets(values: Sequence[str]) -> list[str]:
        return [word for value in values for word in ("--set", value)]

    async def base() -> bool:
        words = ("eval", "--preset", GENERATE, "--model", MODEL, "--name", "base", *sets(args.eval_set))
        return "base" in args.skip or await command("base", args.gpus[-1], args.logs, *words)

    async def of_seed(index: int, seed: int) -> bool:
        words = ("sft", "--preset", SFT, "--seed", str(seed), "--name", f"sft-{seed}", *sets(args.sft_set))
        if "sft" not in args.skip and not await command(
            f"sft-{seed}", args.gpus[index % len(args.gpus)], args.logs, *words
        ):
            return False
        ended = await asyncio.gather(*(of_algo(algo, seed) for algo in args.algos))
        if args.greedy:
            models = [f"sft-{seed}", *(f"{algo}-{seed}" for algo, good in zip(args.algos, ended, strict=True) if good)]
            gpu = args.gpus[index % len(args.gpus)]
            ended += await asyncio.gather(*(greedy(model, gpu) for model in models))
        return all(ended)

    async def greedy(model: str, gpu: str) -> bool:
        words = ("eval", "--preset", GENERATE, "--model", f"run:{model}", "--name", f"greedy-{model}")
        return await command(f"greedy-{model}", gpu, args.logs, *words, *sets(args.eval_set))

    async def of_algo(algo: str, seed: int) -> bool:
        words = ["rl", "--preset", RL, "--algo", algo, "--seed", str(seed), "--name", f"{algo}-{seed}"]
        words += ["--model", f"run:sft-{seed}", *sets(args.rl_set)]
        return await command(f"{algo}-{seed}", gpu_of[algo], args.logs, *words)

    ended = await asyncio.gather(base(), *(of_seed(index, seed) for index, seed in enumerate(args.seeds)))
    show()
    return 0 if all(ended) else 1


def show() -> None:
    """Print the tables of the runs of this folder."""
    runs = {path.name: path for path in sorted(Path("runs").iterdir()) if (path / "metrics.jsonl").is_file()}
    console = Console(width=180)
    table = Table(title="runs")
    columns = (
        "run",
        "steps",
        "s",
        "s a step",
        "pass@1 (%), by step",
        "reward, first -> last",
        "length",
        "gap",
        "check",
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    for name, path in runs.items():
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        table.add_row(name, *summary(rows))
    console.print(table)
    for name, path in runs.items():
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        for key, digits in (("critic/rewards/mean", 3), ("response_length/mean", 0), ("timing_s/gen", 1)):
            if curve := [round(row[key], digits) for row in rows if key in row]:
                print(f"{name} {key}: {curve}")


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """The cells of one run's row."""

    def mean(key: str, of: list[dict[str, Any]]) -> float:
        values = [row[key] for row in of if key in row]
        return sum(values) / len(values) if values else float("nan")

    steps = [row for row in rows if row.get("step", 0) > 0]
    seconds = [row["timing_s/step"] for row in steps if "timing_s/step" in row]
    scores = ", ".join(f"{row['step']}: {100 * row[key]:.1f}" for row in rows for key in row if SCORE.fullmatch(key))
    first, last = steps[:FIRST], steps[-FIRST:]
    middle = sorted(seconds)[len(seconds) // 2] if seconds else float("nan")
    return [
        str(len(steps)), f"{sum(seconds):.0f}", f"{middle:.1f}", scores or "-",
        f"{mean('critic/rewards/mean', first):.3f} -> {mean('critic/rewards/mean', last):.3f}",
        f"{mean('response_length/mean', first):.0f} -> {mean('response_length/mean', last):.0f}",
        f"{mean('rollout_gap/mean_abs', steps):.4f}", f"{mean('sync/check_gap', steps):.3f}",
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "show"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algos", nargs="*", default=["grpo"], help="bundles of `rl --algo`; none: no RL")
    parser.add_argument("--gpus", nargs="+", default=["0"], help="their numbers: the runs of an algorithm share one")
    parser.add_argument("--skip", nargs="*", choices=("base", "sft"), default=[], help="what has been run already")
    parser.add_argument("--greedy", action="store_true", help="evaluate all models by greedy decoding as well")
    parser.add_argument("--logs", type=Path, default=Path("logs"))
    for name in ("sft", "rl", "eval"):
        parser.add_argument(f"--{name}-set", nargs="*", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    if args.what == "show":
        show()
        return 0
    return asyncio.run(run(args))


if __name__ == "__main__":
    sys.exit(main())
