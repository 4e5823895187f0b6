"""Step rate and learning of asynchronous `rl` beside synchronous, with waits that have a long tail.

    python scripts/bench_async.py --seeds 0 1 2                  every mode
    python scripts/bench_async.py --seeds 0 --modes "k = 1"      some

The untrained tiny model learns to write vowels: an episode's reward is their share among its characters. What it talks
to is ready after a log-normal time: half of the episodes wait ``--wait`` seconds, one in a hundred 16 times as long,
one in a thousand 40 times. A step has 8 prompts x 8 episodes; engine and trainer share the cores. Results are kept in
``--out``, and a script that is started again does what is missing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, median
from typing import Any

from posttrain.cluster.cluster import local_ray
from posttrain.config.presets import resolve
from posttrain.data.parquet import write_rows
from posttrain.rl import command as rl

UNCORRECTED = [
    "algo.correction.weight='none'",
    "algo.correction.reject='geometric_mean'",
    "algo.correction.reject_above=1e6",
]
"""A rejection that rejects nothing: ratios are taken to the policy before the update, and no weight makes up for the
older one that sampled."""
MODES: dict[str, list[str]] = {
    "synchronous": [],
    "over-sampling": ["rollout.over_sample_rate=0.25", "rollout.partial_rollouts=true"],
    "k = 1": ["rollout.staleness=1"],
    "k = 4": ["rollout.staleness=4"],
    "k = 4, no correction": ["rollout.staleness=4", *UNCORRECTED],
}
PLUGIN = '''
import asyncio

import numpy as np

from posttrain.core.types import Score
from posttrain.rewards import DATA_SOURCES, GRADERS, cheap
from posttrain.rollout.interaction import INTERACTIONS, Interaction, UserTurn

DATA_SOURCES["bench/vowels"] = "vowels"


@GRADERS.register("vowels")
@cheap
def vowels(response, ground_truth, extra_info):
    """Return the share of vowels."""
    share = sum(response.count(letter) for letter in "aeiou") / max(1, len(response))
    return Score(share, share > 0.5)


@INTERACTIONS.register("late")
class Late(Interaction):
    """Is ready late, and says nothing."""

    random = np.random.default_rng(0)

    async def create(self, prompt):
        await asyncio.sleep(WAIT * self.random.lognormal(sigma=1.2))

    async def respond(self, state, messages):
        return UserTurn(None)
'''
WARM = 3
"""Steps at the beginning that no time is taken of: in the first the processes start, and nothing was sampled ahead."""
LAST = 5
"""Steps whose mean reward is reported."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--wait", type=float, default=0.2, help="median seconds")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_async"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "late_vowels.py").write_text(PLUGIN.replace("WAIT", str(args.wait)))
    prompts = [{"role": "user", "content": f"Write {i}"} for i in range(64)]
    rows = [{"data_source": "bench/vowels", "prompt": [p], "reward_model": {"ground_truth": ""}} for p in prompts]
    write_rows(args.out / "train.parquet", rows)
    with local_ray():
        for seed in args.seeds:
            for mode in args.modes:
                measure(args.out, mode, seed, args.steps)
    print(table(args.out, args.seeds, args.modes))


def measure(folder: Path, mode: str, seed: int, steps: int) -> None:
    """Train in one mode, if that has not been done."""
    result = folder / f"{slug(mode, seed)}.json"
    if result.is_file():
        return
    sets = [*MODES[mode], "model.path='builtin:tiny'", "data.batch_size=8", "rollout.n=8", "train.optim.lr=6e-3"]
    sets += [f"plugins=['{folder / 'late_vowels.py'}']", "rollout.tools=[]", "rollout.interaction='late'"]
    sets += ["rollout.max_turns=2", "rollout.max_response_tokens=64", "run.report=false", "run.rollouts=false"]
    flags = {"run.dir": str(folder), "run.name": slug(mode, seed), "run.seed": seed, "run.overwrite": True}
    flags |= {"data.train": str(folder / "train.parquet"), "train.steps": steps}
    run = rl.run(resolve("rl", "tiny-arith", sets, flags))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    result.write_text(json.dumps(summary(rows)))
    print(f"seed {seed}  {mode}: {summary(rows)}", flush=True)


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Return what a run's metrics say of its speed, and what it has learned."""
    timed = rows[WARM:-1]  # the last step has the final checkpoint
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
    }


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
        f"{LAST} steps |",
        "| --- " * 7 + "|",
    ]
    for mode, results in found.items():
        if not results:
            continue
        seconds = mean(r["mean_step_s"] for r in results)
        rewards = " / ".join(f"{mean(r['rewards'][-LAST:]):.2f}" for r in results)
        shares = " | ".join(f"{100 * mean(r[f'{who}_wait'] for r in results):.0f} %" for who in ("trainers", "engines"))
        age = f"{mean(r['staleness'] for r in results):.2f} / {max(r['staleness_max'] for r in results):.0f}"
        lines.append(f"| {mode} | {seconds:.2f} | {first / seconds:.2f} | {shares} | {age} | {rewards} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
