"""Step rate and learning of asynchronous `rl` beside synchronous, with a tool whose waits have a long tail.

    python scripts/bench_async.py --seeds 0 1 2                  every mode
    python scripts/bench_async.py --seeds 0 --modes "k = 1"      some

The tiny model learns word problems from demonstrations once (150 steps of `sft`), and each mode goes on from there with
the preset `tiny-arith` and steps of 8 prompts x 4 episodes. Its tool answers after a log-normal time: half of the calls
take ``--wait`` seconds, one in a hundred 16 times as long, one in a thousand 40 times. Engine and trainer share the
cores. Results are kept in ``--out``, and a script that is started again does what is missing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, median
from typing import Any

from posttrain.cluster.cluster import local_ray
from posttrain.config.presets import resolve
from posttrain.prep import command as prep
from posttrain.rl import command as rl
from posttrain.sft import command as sft

MODES: dict[str, list[str]] = {
    "synchronous": [],
    "over-sampling": ["rollout.over_sample_rate=0.25", "rollout.partial_rollouts=true"],
    "k = 1": ["rollout.staleness=1"],
    "k = 4": ["rollout.staleness=4"],
}
TOOL = '''
import asyncio

import numpy as np

from posttrain.tools.base import TOOLS
from posttrain.tools.gsm8k import Gsm8kTool


@TOOLS.register("slow_gsm8k")
class SlowGsm8k(Gsm8kTool):
    """The tool `gsm8k`, which answers late."""

    random = np.random.default_rng(0)

    async def call(self, state, arguments):
        await asyncio.sleep({wait} * self.random.lognormal(sigma=1.2))
        return await super().call(state, arguments)
'''
WARM = 3
"""Steps at the beginning that no time is taken of: in the first the processes start, and nothing was sampled ahead."""
LAST = 5
"""Steps whose mean reward is reported."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20, help="of RL")
    parser.add_argument("--wait", type=float, default=0.2, help="median seconds of a call")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_async"))
    args = parser.parse_args()
    with local_ray():
        learn_task(args.out)
        for seed in args.seeds:
            for mode in args.modes:
                measure(args.out, mode, seed, args.steps, args.wait)
    print(table(args.out, args.seeds, args.modes))


def learn_task(folder: Path) -> None:
    """Train the model that all modes start from, if that has not been done."""
    if not (folder / "sft" / "checkpoints" / "latest").is_file():
        prep.run("arith", out=str(folder / "data"), seed=0)
        flags = common(folder, "sft", 0) | {"data.train": str(folder / "data/sft_train.parquet"), "train.steps": 150}
        sft.run(resolve("sft", "tiny-arith-sft", ["train.optim.lr=5e-3"], flags))


def measure(folder: Path, mode: str, seed: int, steps: int, wait: float) -> None:
    """Train in one mode, if that has not been done."""
    result = folder / f"{slug(mode, seed)}.json"
    if result.is_file():
        return
    plugin = folder / "slow_gsm8k.py"
    if not plugin.is_file():
        plugin.write_text(TOOL.replace("{wait}", str(wait)))
    sets = [*MODES[mode], "data.batch_size=8", "rollout.n=4", f"plugins=['{plugin}']", "rollout.tools=['slow_gsm8k']"]
    sets += ["run.report=false", "val.limit=100"]
    flags = common(folder, slug(mode, seed), seed) | {"model.path": "run:sft", "train.steps": steps}
    data = {"data.train": str(folder / "data/train.parquet"), "data.val": str(folder / "data/test.parquet")}
    run = rl.run(resolve("rl", "tiny-arith", sets, flags | data))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    result.write_text(json.dumps(summary(rows)))
    print(f"seed {seed}  {mode}: {summary(rows)}", flush=True)


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Return what a run's metrics say of its speed, and what it has learned."""
    timed = rows[WARM:-1]  # the last step has the validation and the final checkpoint
    (accuracy,) = (value for key, value in rows[-1].items() if key.endswith("acc/mean@1"))
    return {
        "step_s": median(row["timing_s/step"] for row in timed),
        "mean_step_s": mean(row["timing_s/step"] for row in timed),
        "trainers_wait": mean(row["wait/trainers"] for row in timed),
        "engines_wait": mean(row["wait/engines"] for row in timed),
        "updates": mean(row["wait/updates"] for row in timed),
        "staleness": mean(row.get("staleness/mean", 0.0) for row in timed),
        "staleness_max": max(row.get("staleness/max", 0.0) for row in rows),
        "rewards": [row["critic/score/mean"] for row in rows],
        "seconds": [row["timing_s/step"] for row in rows],
        "accuracy": accuracy,
    }


def common(folder: Path, run: str, seed: int) -> dict[str, Any]:
    return {"run.dir": str(folder), "run.name": run, "run.seed": seed, "run.overwrite": True}


def slug(mode: str, seed: int) -> str:
    return "".join(c for c in mode if c.isalnum() or c == "-") + f"_{seed}"


def table(out: Path, seeds: list[int], modes: list[str]) -> str:
    """A markdown table of what has been measured: means over seeds; of rewards each seed's."""
    found = {
        mode: [json.loads(f.read_text()) for s in seeds if (f := out / f"{slug(mode, s)}.json").is_file()]
        for mode in modes
    }
    first = mean(r["mean_step_s"] for r in found[modes[0]])
    lines = [
        "| mode | seconds a step | step rate | trainers wait | engines wait | mean / largest staleness | reward, last "
        f"{LAST} steps | held-out accuracy |",
        "| --- " * 8 + "|",
    ]
    for mode, results in found.items():
        if not results:
            continue
        seconds = mean(r["mean_step_s"] for r in results)
        rewards = " / ".join(f"{mean(r['rewards'][-LAST:]):.2f}" for r in results)
        accuracies = " / ".join(f"{100 * r['accuracy']:.0f} %" for r in results)
        shares = " | ".join(f"{100 * mean(r[f'{who}_wait'] for r in results):.0f} %" for who in ("trainers", "engines"))
        age = f"{mean(r['staleness'] for r in results):.2f} / {max(r['staleness_max'] for r in results):.0f}"
        lines.append(
            f"| {mode} | {seconds:.2f} | {first / seconds:.2f} | {shares} | {age} | {rewards} | {accuracies} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
