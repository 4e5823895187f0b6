"""Step rate and learning of asynchronous `rl` beside synchronous, with waits that have a long tail, or on GSM8K.

    python scripts/bench_async.py --seeds 0 1 2                  every mode
    python scripts/bench_async.py --seeds 0 --modes "k = 1"      some

    python scripts/bench_async.py --out runs/tails --model MODEL --seeds 0 --wait 1 --set rollout.engine=sglang \\
        train.dtype=bfloat16 train.optim.lr=1e-5 data.batch_size=16 rollout.max_response_tokens=256
    python scripts/bench_async.py --out runs/gsm8k --task gsm8k --model MODEL --data FOLDER --seeds 0 \\
        --modes synchronous "k = 1" "k = 4" --set rollout.engine=sglang
    python scripts/bench_async.py --out runs/apart --model MODEL --seeds 0 --words 300 --modes synchronous \\
        "k = 4, separate" --set cluster.workers=2 rollout.replicas=2 rollout.engine=sglang data.batch_size=32

`vowels`: the untrained tiny model, or another, learns to write vowels: an episode's reward is their share among its
characters. What it talks to is ready after a log-normal time: half of the episodes wait ``--wait`` seconds, one in a
hundred 16 times as long, one in a thousand 40 times. A step has 8 prompts x 8 episodes; prompts begin with ``--words``
words, as those of agents with long contexts do. `gsm8k`: the preset `smollm2-135m-gsm8k` with a model after SFT and the
folder that `posttrain prep gsm8k --demos calculator` wrote.

Engine and trainer share the cores and the GPU, except in the modes "separate": these have one trainer and one engine,
each with a GPU of its own, where `cluster.workers` and `rollout.replicas` may give the other modes two of each on both.
The modes of a seed run one after the other. Results are kept in ``--out``, and a script that is started again does what
is missing. Of seconds the first steps are left out, in which processes start and nothing was sampled ahead.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from statistics import mean, median
from typing import Any

from posttrain.cluster.cluster import local_ray
from posttrain.config.presets import resolve
from posttrain.core.errors import UserError
from posttrain.data.parquet import write_rows
from posttrain.plan.command import show_run
from posttrain.plan.inputs import PlanOptions
from posttrain.rl import command as rl

UNCORRECTED = [
    "algo.correction.weight='none'",
    "algo.correction.reject='geometric_mean'",
    "algo.correction.reject_above=1e6",
]
"""A rejection that rejects nothing: ratios are taken to the policy before the update, and no weight makes up for the
older one that sampled."""
APART = ["cluster.placement='separate'", "cluster.workers=1", "rollout.replicas=1"]
MODES: dict[str, list[str]] = {
    "synchronous": [],
    "over-sampling": ["rollout.over_sample_rate=0.25", "rollout.partial_rollouts=true"],
    "k = 1": ["rollout.staleness=1"],
    "k = 1, window 0.25": ["rollout.staleness=1", "rollout.window=0.25"],
    "k = 4": ["rollout.staleness=4"],
    "k = 4, no correction": ["rollout.staleness=4", *UNCORRECTED],
    "k = 1, separate": ["rollout.staleness=1", *APART],
    "k = 4, separate": ["rollout.staleness=4", *APART],
    "k = 4, separate, no pacing": ["rollout.staleness=4", "rollout.pacing=false", *APART],
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
VOWELS = ["data.batch_size=8", "rollout.n=8", "train.optim.lr=6e-3", "rollout.tools=[]", "rollout.interaction='late'"]
VOWELS += ["rollout.max_turns=2", "rollout.max_response_tokens=64"]
GSM8K = ["data.val=''", "val.before_train=false", "rollout.replicas=1", "rollout.memory_fraction=0.5"]
WARM = 3
"""Steps at the beginning that no time is taken of: in the first the processes start, and nothing was sampled ahead."""
LAST = 5
"""Steps whose mean reward is reported."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=[m for m in MODES if "separate" not in m], choices=MODES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--wait", type=float, default=0.2, help="median seconds")
    parser.add_argument("--words", type=int, default=0, help="that prompts begin with")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_async"))
    parser.add_argument("--task", choices=("vowels", "gsm8k"), default="vowels")
    parser.add_argument("--model", default="builtin:tiny", help="folder, or run:NAME")
    parser.add_argument("--data", type=Path, help="of gsm8k: the folder with train.parquet")
    parser.add_argument("--set", nargs="+", default=[], dest="sets", help="of every mode")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.task == "vowels":
        write_vowels(args.out, args.wait, args.words)
        task = ("tiny-arith", args.out / "train.parquet", [f"plugins=['{args.out / 'late_vowels.py'}']", *VOWELS])
    else:
        if args.data is None:
            parser.error("--task gsm8k needs --data")
        task = ("smollm2-135m-gsm8k", args.data / "train.parquet", GSM8K)
    with local_ray():
        for seed in args.seeds:
            for mode in args.modes:
                measure(args.out, mode, seed, args.steps, *task, [f"model.path='{args.model}'", *args.sets])
    print(table(args.out, args.seeds, args.modes))
    print("\n" + curves(args.out, args.seeds, args.modes))


def write_vowels(folder: Path, wait: float, words: int = 0) -> None:
    """Write the plugin and the prompts of `vowels`."""
    (folder / "late_vowels.py").write_text(PLUGIN.replace("WAIT", str(wait)))
    prompts = [{"role": "user", "content": f"{'word ' * words}Write {i}"} for i in range(64)]
    rows = [{"data_source": "bench/vowels", "prompt": [p], "reward_model": {"ground_truth": ""}} for p in prompts]
    write_rows(folder / "train.parquet", rows)


def measure(
    folder: Path, mode: str, seed: int, steps: int, preset: str, data: Path, of_task: list[str], sets: list[str]
) -> None:
    """Train in one mode, if that has not been done."""
    result = folder / f"{slug(mode, seed)}.json"
    if result.is_file():
        return
    sets = [*of_task, "run.report=false", "run.rollouts=false", *sets, *MODES[mode]]
    flags = {"run.dir": str(folder), "run.name": slug(mode, seed), "run.seed": seed, "run.overwrite": True}
    flags |= {"data.train": str(data), "train.steps": steps}
    run = rl.run(resolve("rl", preset, sets, flags))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = summary(rows) | {"compared": compared(run)}
    result.write_text(json.dumps(found))
    shown = {name: value for name, value in found.items() if name not in ("rewards", "seconds", "compared")}
    print(f"seed {seed}  {mode}: {shown}", flush=True)
    for pair in found["compared"]:
        print(f"  {pair['metric']}: predicted {pair['predicted']:.3g}, measured {pair['measured']:.3g}", flush=True)


def compared(run: Path) -> list[dict[str, Any]]:
    """What `posttrain plan --run` says of a run; nothing, where it knows nothing."""
    try:
        found: list[dict[str, Any]] = json.loads(show_run(run, PlanOptions(), as_json=True))["compared"]
    except UserError as error:
        print(f"  not compared with the plan: {error.message}")
        return []
    return found


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


def results_of(out: Path, seeds: list[int], modes: list[str]) -> dict[str, list[dict[str, Any]]]:
    found = {
        mode: [json.loads(f.read_text()) for s in seeds if (f := out / f"{slug(mode, s)}.json").is_file()]
        for mode in modes
    }
    return {mode: results for mode, results in found.items() if results}


def table(out: Path, seeds: list[int], modes: list[str]) -> str:
    """A markdown table of what has been measured: means over seeds; of rewards and rates each seed's."""
    found = results_of(out, seeds, modes)
    first = [r["mean_step_s"] for r in found[modes[0]]]
    lines = [
        "| mode | seconds a step | step rate, each seed | mean | trainers wait | engines wait | updates | "
        f"mean / largest staleness | reward, last {LAST} steps | step of the plan |",
        "| --- " * 10 + "|",
    ]
    for mode, results in found.items():
        each = [r["mean_step_s"] for r in results]
        rates = [one / other for one, other in zip(first, each, strict=False)]
        seconds, rate = (" / ".join(f"{value:.2f}" for value in values) for values in (each, rates))
        rewards = " / ".join(f"{mean(r['rewards'][-LAST:]):.2f}" for r in results)
        waits = [mean(r[name] for r in results) for name in ("trainers_wait", "engines_wait", "updates")]
        shares = " | ".join(f"{100 * share:.0f} %" for share in waits)
        age = f"{mean(r['staleness'] for r in results):.2f} / {max(r['staleness_max'] for r in results):.0f}"
        steps = [p for r in results for p in r.get("compared", []) if p["metric"] == "timing_s/step"]
        plan = " / ".join(f"{p['predicted']:.2f} ({p['off']:+.0%})" for p in steps)
        lines.append(f"| {mode} | {seconds} | {rate} | {mean(rates):.2f} | {shares} | {age} | {rewards} | {plan} |")
    return "\n".join(lines)


def curves(out: Path, seeds: list[int], modes: list[str]) -> str:
    """A markdown table of the mean reward of ``LAST`` steps, at equal samples and at equal seconds."""
    found = results_of(out, seeds, modes)
    steps = min(len(r["rewards"]) for results in found.values() for r in results)
    seconds = min(sum(r["seconds"][1:]) for results in found.values() for r in results)
    parts = (1 / 3, 2 / 3, 1.0)
    at = [f"step {round(part * steps)}" for part in parts] + [f"{part * seconds:.0f} s" for part in parts]
    lines = ["| mode | " + " | ".join(at) + " |", "| --- " * (1 + len(at)) + "|"]
    for mode, results in found.items():
        cells = [mean(until(r["rewards"], round(part * steps)) for r in results) for part in parts]
        cells += [
            mean(until(r["rewards"], steps_within(r["seconds"], part * seconds)) for r in results) for part in parts
        ]
        lines.append(f"| {mode} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")
    return "\n".join(lines)


def until(rewards: list[float], step: int) -> float:
    """Return the mean reward of the ``LAST`` steps up to one."""
    return mean(rewards[max(0, step - LAST) : max(1, step)])


def steps_within(seconds: list[float], limit: float) -> int:
    """Return how many steps ended within so many seconds after the first."""
    return 1 + sum(total <= limit + 1e-9 for total in itertools.accumulate(seconds[1:]))


if __name__ == "__main__":
    main()
