"""Learning of asynchronous `rl` beside synchronous at equal samples, with and without the correction of staleness.

    python scripts/bench_staleness.py                                        every mode, three seeds
    python scripts/bench_staleness.py --seeds 1 --modes "k = 0" "k = 4"       some
    python scripts/bench_staleness.py --out runs/fast --set train.optim.lr=2e-3

Every run starts from the same model, the quickstart's after SFT, trains it with the preset `tiny-arith` and answers
held-out problems ``ANSWERS`` times each. Results are kept in ``--out``, and a script that is started again does what is
missing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from bench_async import UNCORRECTED

from posttrain.cluster.cluster import local_ray
from posttrain.config.presets import resolve
from posttrain.evaluation.command import evaluate
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--set", nargs="+", default=[], dest="sets", help="of every mode")
    parser.add_argument("--start", type=Path, default=Path("runs/bench_staleness_start"), help="data and first model")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_staleness"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with local_ray():
        before = start(args.start)
        for seed in args.seeds:
            for mode in args.modes:
                measure(args.out, args.start, mode, seed, args.sets)
    print(f"before: {100 * before:.1f} %\n\n" + table(args.out, args.seeds, args.modes))


def start(folder: Path) -> float:
    """Make the data and the model that all runs start from, if that has not been done; returns its accuracy."""
    result = folder / "result.json"
    if not (folder / "sft/checkpoints/latest").exists():
        prep.run("arith", out=str(folder / "data"), seed=0, test_rows=PROBLEMS, overwrite=True)
        flags = {"run.dir": str(folder), "run.name": "sft", "run.overwrite": True}
        flags |= {"data.train": str(folder / "data/sft_train.parquet")}
        sft.run(resolve("sft", "tiny-arith-sft", flags=flags))
    if not result.is_file():
        result.write_text(json.dumps(accuracy(folder, folder / "data", "sft", 0)))
    return float(json.loads(result.read_text()))


def measure(folder: Path, begin: Path, mode: str, seed: int, sets: list[str]) -> None:
    """Train in one mode and answer the problems, if that has not been done."""
    result = folder / f"{slug(mode, seed)}.json"
    if result.is_file():
        return
    flags = {"run.dir": str(folder), "run.name": slug(mode, seed), "run.seed": seed, "run.overwrite": True}
    flags |= {
        "data.train": str(begin / "data/train.parquet"),
        "model.path": weights_of(str(begin), "run:sft", "model.path"),
    }
    flags |= {"run.report": False, "run.rollouts": False}
    run = rl.run(resolve("rl", "tiny-arith", [*MODES[mode], *sets], flags))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = summary(rows) | {"accuracy": accuracy(folder, begin / "data", slug(mode, seed), seed)}
    result.write_text(json.dumps(found))
    shown = {name: round(value, 4) for name, value in found.items() if name != "rewards"}
    print(f"seed {seed}  {mode}: {shown}", flush=True)


def accuracy(folder: Path, data: Path, name: str, seed: int) -> float:
    """Return the share of right answers of a run's model to the held-out problems."""
    flags = {"run.dir": str(folder), "run.name": f"answers-{name}", "run.seed": seed, "run.overwrite": True}
    flags |= {"model.path": f"run:{name}", "generate.data": str(data / "test.parquet"), "generate.limit": PROBLEMS}
    file = generate.run(resolve("generate", "tiny-arith-generate", [f"rollout.n={ANSWERS}"], flags))
    return float(evaluate(file, (1,)).overall["pass@1"] or 0.0)


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Return what a run's metrics say of what it has learned, and from how old samples."""
    return {
        "rewards": [row["critic/score/mean"] for row in rows],
        "reward": mean(row["critic/score/mean"] for row in rows[-LAST:]),
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
        f"{LAST} steps | mean / largest staleness | mean gap of log-probabilities |",
        "| --- " * 7 + "|",
    ]
    first = found[modes[0]]
    for mode, results in found.items():
        if not results:
            continue
        points = {s: 100 * (r["accuracy"] - first[s]["accuracy"]) for s, r in results.items() if s in first}
        each = " / ".join(f"{p:+.1f}" for p in points.values())
        accuracies = " / ".join(f"{100 * r['accuracy']:.1f}" for r in results.values())
        rewards = " / ".join(f"{r['reward']:.3f}" for r in results.values())
        age = f"{mean(r['staleness'] for r in results.values()):.2f} / "
        age += f"{max(r['staleness_max'] for r in results.values()):.0f}"
        average = f"{mean(points.values()):+.1f}" if points else ""
        gap = mean(r["gap"] for r in results.values())
        lines.append(f"| {mode} | {accuracies} | {each} | {average} | {rewards} | {age} | {gap:.4f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
