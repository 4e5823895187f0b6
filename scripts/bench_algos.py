"""What each `--algo` gains on the generated word problems: pass@1 of held-out problems before and after, over seeds.

    python scripts/bench_algos.py --seeds 0 1 2                  every algorithm
    python scripts/bench_algos.py --seeds 0 --algos ppo grpo     some

For each seed the tiny model learns the task from demonstrations once (`sft`), and each algorithm goes on from there,
with the preset `tiny-arith` and the bundle of the algorithm. Distillation learns from the result of `grpo`. Results are
kept in `--out`, and a script that is started again does what is missing.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from posttrain.algos import BUNDLES
from posttrain.cluster.cluster import local_ray
from posttrain.config.presets import resolve
from posttrain.evaluation.command import evaluate
from posttrain.generation import command as generate
from posttrain.prep import command as prep
from posttrain.rl import command as rl
from posttrain.sft import command as sft

SETTINGS: dict[str, list[str]] = {
    "gdpo": ["reward.weights={score = 1.0, format = 0.5}"],
    "opd": ["algo.teacher=run:grpo"],
    "ppo": ["critic.optim.lr=2e-3", "critic.optim.weight_decay=0.0", "critic.warmup_steps=5"],
}
"""What an algorithm needs besides its bundle."""
MORE: dict[str, tuple[str, list[str]]] = {
    "grpo + KL loss": ("grpo", ["algo.kl_coef=0.01"]),
    "grpo + KL reward": ("grpo", ["algo.kl_coef=0.01", "algo.kl_in=reward", "algo.kl_estimator=k1"]),
    "grpo, 2 updates": ("grpo", ["algo.updates_per_step=2"]),
    "gspo, 2 updates": ("gspo", ["algo.updates_per_step=2"]),
    "grpo + TIS": ("grpo", ["algo.correction.weight=token"]),
}
"""Variants: what they are of, and their settings."""
VARIANTS = {name: (name, SETTINGS.get(name, [])) for name in BUNDLES.names()} | MORE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algos", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20, help="of RL")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_algos"))
    args = parser.parse_args()
    with local_ray():
        for seed in args.seeds:
            for name in args.algos:
                measure(args.out / f"seed_{seed}", name, seed, args.steps)
    print(table(args.out, args.seeds, args.algos))


def measure(folder: Path, name: str, seed: int, steps: int) -> None:
    """Train and evaluate one variant, if that has not been done."""
    start = once(folder, "sft", lambda: learn_task(folder, seed))
    of, sets = VARIANTS[name]
    run = slug(name)
    if of == "opd":
        measure(folder, "grpo", seed, steps)

    def train() -> float:
        flags = common(folder, run, seed) | {"model.path": "run:sft", "train.steps": steps, "algo.name": of}
        rl.run(resolve("rl", "tiny-arith", sets, flags | {"data.train": str(folder / "data/train.parquet")}))
        return accuracy(folder, run, seed)

    result = once(folder, run, train)
    gain = f"{start['pass@1']:.1%} -> {result['pass@1']:.1%}"
    print(f"seed {seed}  {name:22} {gain}  {result['seconds']:.0f} s", flush=True)


def learn_task(folder: Path, seed: int) -> float:
    prep.run("arith", out=str(folder / "data"), seed=seed)
    flags = common(folder, "sft", seed) | {"data.train": str(folder / "data/sft_train.parquet")}
    sft.run(resolve("sft", "tiny-arith-sft", flags=flags))
    return accuracy(folder, "sft", seed)


def accuracy(folder: Path, run: str, seed: int) -> float:
    """pass@1 of the newest checkpoint of a run."""
    flags = common(folder, f"generate-{run}", seed) | {"generate.data": str(folder / "data/test.parquet")}
    file = generate.run(resolve("generate", "tiny-arith-generate", flags=flags | {"model.path": f"run:{run}"}))
    return float(evaluate(file, (1,)).overall["pass@1"] or 0.0)


def common(folder: Path, run: str, seed: int) -> dict[str, Any]:
    return {"run.dir": str(folder), "run.name": run, "run.seed": seed, "run.overwrite": True}


def once(folder: Path, name: str, work: Any) -> dict[str, float]:
    """The result of ``work``, from an earlier time if there was one."""
    file = folder / f"{name}.json"
    if not file.is_file():
        began = time.monotonic()
        result = {"pass@1": work(), "seconds": time.monotonic() - began}
        file.write_text(json.dumps(result))
    found: dict[str, float] = json.loads(file.read_text())
    return found


def slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.replace("++", "pp")).strip("-")


def table(out: Path, seeds: list[int], names: list[str]) -> str:
    """A markdown table of what has been measured."""
    rows = [f"| algo | {' | '.join(f'seed {s}' for s in seeds)} | mean gain |", "| --- " * (len(seeds) + 2) + "|"]
    for name in names:
        cells, gains = [], []
        for seed in seeds:
            start, end = (out / f"seed_{seed}" / f"{part}.json" for part in ("sft", slug(name)))
            if not end.is_file():
                cells.append("")
                continue
            before, after = (100 * json.loads(file.read_text())["pass@1"] for file in (start, end))
            cells.append(f"{before:.1f} -> {after:.1f}")
            gains.append(after - before)
        mean = f"{sum(gains) / len(gains):+.1f}" if gains else ""
        rows.append(f"| `{name}` | {' | '.join(cells)} | {mean} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
