"""Learning of asynchronous `rl` beside synchronous at equal samples, with and without the correction of staleness.

    python scripts/bench_staleness.py                                        every mode, three seeds
    python scripts/bench_staleness.py --seeds 1 --modes "k = 0" "k = 4"       some
    python scripts/bench_staleness.py --out runs/fast --set train.optim.lr=2e-3
    python scripts/bench_staleness.py --task vowels --late 4                  old tokens

Every run starts from the same model, trains it, and answers held-out problems. Of `arith` that is the quickstart's
model after SFT with the preset `tiny-arith`, and what counts are right answers; of `vowels` the untrained tiny model,
which learns to write vowels, and what counts is their share. With ``--late`` an asynchronous run gets the reward of an
episode so many seconds after its last token, so that more is sampled ahead and tokens are as old as the bound allows.
Results are kept in ``--out``, and a script that is started again does what is missing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from bench_async import PLUGIN, UNCORRECTED

from posttrain.cluster.cluster import local_ray
from posttrain.config.presets import resolve
from posttrain.data.parquet import write_rows
from posttrain.evaluation.command import evaluate
from posttrain.evaluation.rows import read_responses
from posttrain.generation import command as generate
from posttrain.prep import command as prep
from posttrain.rl import command as rl
from posttrain.runs.run import weights_of
from posttrain.sft import command as sft

MODES: dict[str, list[str]] = {
    "k = 0": [],
    "k = 1": ["rollout.staleness=1"],
    "k = 4": ["rollout.staleness=4"],
    "k = 4, ratios to the engine": ["rollout.staleness=4", "algo.correction.weight='none'"],
    "k = 4, no correction": ["rollout.staleness=4", *UNCORRECTED],
}
PROBLEMS, ANSWERS = 400, 3
LAST = 5
"""Steps whose mean reward is reported."""
VOWELS = ["data.batch_size=8", "rollout.n=8", "train.optim.lr=3e-3", "rollout.tools=[]", "rollout.max_turns=1"]
VOWELS += ["rollout.max_response_tokens=32", "train.optim.schedule='constant'"]
SLOW = '''

@INTERACTIONS.register("slow")
class Slow(Interaction):
    """Says nothing, and takes its time to close an episode, which is graded then."""

    async def create(self, prompt):
        return None

    async def respond(self, state, messages):
        return UserTurn(None)

    async def release(self, state):
        await asyncio.sleep(LATE)
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("arith", "vowels"), default="arith")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--late", type=float, default=0.0, help="seconds from an episode's last token to its reward")
    parser.add_argument("--set", nargs="+", default=[], dest="sets", help="of every mode")
    parser.add_argument("--start", type=Path, default=Path("runs/bench_staleness_start"), help="data and first model")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_staleness"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    plugin = args.out / "late_and_slow.py"
    plugin.write_text(PLUGIN.replace("WAIT", "0.0") + SLOW.replace("LATE", str(args.late)))
    task = {"arith": Arith, "vowels": Vowels}[args.task](args.start, args.out, plugin)
    with local_ray():
        before = task.begin()
        for seed in args.seeds:
            for mode in args.modes:
                late = "'slow'" if args.late and mode != "k = 0" else "''"
                measure(task, mode, seed, [f"rollout.interaction={late}", *args.sets])
    print(f"before: {100 * before:.1f} %\n\n" + table(args.out, args.seeds, args.modes))


class Arith:
    """The quickstart's word problems, and its model after SFT.

    Args:
        start: folder of data and first model, which runs share.
        out: folder of runs and results.
        plugin: file of the simulated user.
    """

    def __init__(self, start: Path, out: Path, plugin: Path) -> None:
        self.data, self.start, self.out, self.plugin = start / "data", start, out, plugin
        self.sets: list[str] = []

    @property
    def model(self) -> str:
        return weights_of(str(self.start), "run:sft", "model.path")

    def begin(self) -> float:
        """Make data and model, if that has not been done; returns the model's accuracy."""
        result = self.start / "result.json"
        if not (self.start / "sft/checkpoints/latest").exists():
            prep.run("arith", out=str(self.data), seed=0, test_rows=PROBLEMS, overwrite=True)
            flags = {"run.dir": str(self.start), "run.name": "sft", "run.overwrite": True}
            flags |= {"data.train": str(self.data / "sft_train.parquet")}
            sft.run(resolve("sft", "tiny-arith-sft", flags=flags))
        if not result.is_file():
            result.write_text(json.dumps(self.accuracy(self.model, "sft", 0)))
        return float(json.loads(result.read_text()))

    def accuracy(self, model: str, name: str, seed: int) -> float:
        """Return the share of right answers of a model to the held-out problems."""
        return float(evaluate(self.answers(model, name, seed, []), (1,)).overall["pass@1"] or 0.0)

    def answers(self, model: str, name: str, seed: int, sets: list[str]) -> Path:
        flags = {"run.dir": str(self.out), "run.name": f"answers-{name}", "run.seed": seed, "run.overwrite": True}
        flags |= {"model.path": model, "generate.data": str(self.data / "test.parquet"), "generate.limit": PROBLEMS}
        return generate.run(resolve("generate", "tiny-arith-generate", [f"rollout.n={ANSWERS}", *sets], flags))


class Vowels(Arith):
    """Writing vowels; what the prompts say does not matter."""

    model = "builtin:tiny"

    def __init__(self, start: Path, out: Path, plugin: Path) -> None:
        super().__init__(start, out, plugin)
        self.data, self.sets = out, VOWELS

    def begin(self) -> float:
        for name, numbers in (("train", range(64)), ("test", range(64, 192))):
            prompts = [[{"role": "user", "content": f"Write {i}"}] for i in numbers]
            rows = [{"data_source": "bench/vowels", "prompt": p, "reward_model": {"ground_truth": ""}} for p in prompts]
            write_rows(self.data / f"{name}.parquet", rows)
        return self.accuracy(self.model, "untrained", 0)

    def accuracy(self, model: str, name: str, seed: int) -> float:
        """Return the share of vowels in a model's answers to the held-out prompts."""
        sets = [f"plugins=['{self.plugin}']", "rollout.tools=[]", "rollout.max_response_tokens=32"]
        file = self.answers(model, name, seed, [*sets, "rollout.max_turns=1"])
        texts = [text for row in read_responses(file) for text in row.responses]
        return mean(sum(map(text.count, "aeiou")) / max(1, len(text)) for text in texts)


def measure(task: Arith, mode: str, seed: int, sets: list[str]) -> None:
    """Train in one mode and answer the problems, if that has not been done."""
    result = task.out / f"{slug(mode, seed)}.json"
    if result.is_file():
        return
    flags = {"run.dir": str(task.out), "run.name": slug(mode, seed), "run.seed": seed, "run.overwrite": True}
    flags |= {"data.train": str(task.data / "train.parquet"), "model.path": task.model}
    flags |= {"run.report": False, "run.rollouts": False}
    sets = [*MODES[mode], f"plugins=['{task.plugin}']", *task.sets, *sets]
    run = rl.run(resolve("rl", "tiny-arith", sets, flags))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    weights = weights_of(str(task.out), f"run:{slug(mode, seed)}", "model.path")
    found = summary(rows) | {"accuracy": task.accuracy(weights, slug(mode, seed), seed)}
    result.write_text(json.dumps(found))
    shown = {name: round(value, 4) for name, value in found.items() if name != "rewards"}
    print(f"seed {seed}  {mode}: {shown}", flush=True)


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Return what a run's metrics say of what it has learned, and from how old samples."""
    return {
        "rewards": [row["critic/score/mean"] for row in rows],
        "reward": mean(row["critic/score/mean"] for row in rows[-LAST:]),
        "mean_reward": mean(row["critic/score/mean"] for row in rows),
        "staleness": mean(row.get("staleness/mean", 0.0) for row in rows),
        "staleness_max": max(row.get("staleness/max", 0.0) for row in rows),
        "gap": mean(row["rollout_gap/mean_abs"] for row in rows),
        "step_s": mean(row["timing_s/step"] for row in rows[1:]),
    }


def slug(mode: str, seed: int) -> str:
    return "".join(c for c in mode if c.isalnum()) + f"_{seed}"


def table(out: Path, seeds: list[int], modes: list[str]) -> str:
    """A markdown table of what has been measured: of each seed, and the mean difference from the first mode."""
    found = {
        mode: {s: json.loads(f.read_text()) for s in seeds if (f := out / f"{slug(mode, s)}.json").is_file()}
        for mode in modes
    }
    lines = [
        f"| mode | accuracy, seeds {' / '.join(map(str, seeds))} | points from {modes[0]}, each | mean | reward, last "
        f"{LAST} steps | reward, all steps | mean / largest staleness | mean gap of log-probabilities |",
        "| --- " * 8 + "|",
    ]
    first = found[modes[0]]
    for mode, results in found.items():
        if not results:
            continue
        points = {s: 100 * (r["accuracy"] - first[s]["accuracy"]) for s, r in results.items() if s in first}
        each = " / ".join(f"{p:+.1f}" for p in points.values())
        accuracies = " / ".join(f"{100 * r['accuracy']:.1f}" for r in results.values())
        rewards = " | ".join(" / ".join(f"{r[w]:.3f}" for r in results.values()) for w in ("reward", "mean_reward"))
        age = f"{mean(r['staleness'] for r in results.values()):.2f} / "
        age += f"{max(r['staleness_max'] for r in results.values()):.0f}"
        average = f"{mean(points.values()):+.1f}" if points else ""
        gap = mean(r["gap"] for r in results.values())
        lines.append(f"| {mode} | {accuracies} | {each} | {average} | {rewards} | {age} | {gap:.4f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
