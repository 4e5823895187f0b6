"""What the tiny model learns in the text game of examples/guess.py: by an ordinary episode, by an agent with the client
of OpenAI at the endpoint, and as an environment of the package verifiers.

    python scripts/bench_envs.py [--seeds 0 1 2] [--ways env agent verifiers]

For each seed the model first learns from recorded games (`sft`), of which few heed the hints. Each way goes on from
there with `rl`. A curve is the mean reward of each step; what is reported is the mean over its first and its last
steps. Games are alike in all three ways, and so should be the curves, within noise.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from posttrain.cluster.cluster import local_ray
from posttrain.config.presets import resolve
from posttrain.data.parquet import write_rows
from posttrain.rl import command as rl
from posttrain.sft import command as sft

EXAMPLES = Path(__file__).parents[1] / "examples"
HIGHEST, GUESSES, BY_HINTS = 3, 2, 0.3
WAYS = {
    "env": {"rollout.env": f"{EXAMPLES / 'guess.py'}:Guess"},
    "agent": {"rollout.agent": f"{EXAMPLES / 'guess.py'}:play", "rollout.env": ""},
    "verifiers": {"rollout.env": "verifiers:guess_verifiers"},
}
AVERAGED = 5
"""Steps at either end of a curve whose mean is reported."""


def games(count: int, seed: int) -> list[dict[str, Any]]:
    """Return conversations of games; in a share of ``BY_HINTS`` the player heeds the hints, else guesses by chance."""
    chance = random.Random(seed)
    return [{"messages": _game(chance, chance.random() < BY_HINTS)} for _ in range(count)]


def _game(chance: random.Random, by_hints: bool) -> list[dict[str, str]]:
    hidden, low, high = chance.randint(1, HIGHEST), 1, HIGHEST
    messages = [{"role": "user", "content": f"I think of a number from 1 to {HIGHEST}. Which?"}]
    for turn in range(GUESSES):
        guess = (low + high) // 2 if by_hints else chance.randint(1, HIGHEST)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == hidden or turn + 1 == GUESSES:
            break
        messages.append({"role": "user", "content": f"No, {'higher' if guess < hidden else 'lower'}."})
        low, high = (guess + 1, high) if guess < hidden else (low, guess - 1)
    return messages


def learn_numbers(folder: Path, seed: int, steps: int) -> None:
    """Train a model that guesses by chance: run ``sft`` of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "games.parquet", games(1024, seed))
    flags = {
        "model.path": "builtin:tiny", "data.train": str(folder / "games.parquet"), "data.batch_size": 32,
        "train.steps": steps, "train.optim.lr": 2.5e-3, "train.optim.weight_decay": 0.0,
    }  # fmt: skip
    sft.run(resolve("sft", "tiny-arith-sft", flags=flags | common(folder, "sft", seed)))


def curve(folder: Path, way: str, seed: int, steps: int) -> list[float]:
    """Train by one of ``WAYS`` from run ``sft``. Returns the mean reward of each step."""
    flags = WAYS[way] | {
        "model.path": "run:sft", "data.batch_size": 16, "train.steps": steps, "train.optim.lr": 5e-4,
        "train.optim.weight_decay": 0.0, "rollout.engine": "hf", "rollout.n": 8, "rollout.max_turns": GUESSES,
        "rollout.max_prompt_tokens": 64, "rollout.max_response_tokens": 64,
    }  # fmt: skip
    rl.run(resolve("rl", str(EXAMPLES / "guess.toml"), flags=flags | common(folder, way, seed)))
    lines = (folder / way / "metrics.jsonl").read_text().splitlines()
    return [row["reward/score/mean"] for row in map(json.loads, lines) if "reward/score/mean" in row]


def common(folder: Path, run: str, seed: int) -> dict[str, Any]:
    return {"run.dir": str(folder), "run.name": run, "run.seed": seed, "run.overwrite": True}


def ends(rewards: Sequence[float]) -> tuple[float, float]:
    """Return the mean reward of the first and of the last steps."""
    return fmean(rewards[:AVERAGED]), fmean(rewards[-AVERAGED:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=25, help="of RL")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_envs"))
    args = parser.parse_args()
    sys.path.insert(0, str(EXAMPLES))  # verifiers' environments are modules that can be imported
    print("| seed | way | reward, first steps | last steps | gain | seconds of rl |", "| --- " * 6 + "|", sep="\n")
    with local_ray():
        for seed in args.seeds:
            folder = args.out / f"seed_{seed}"
            learn_numbers(folder, seed, 100)
            for way in args.ways:
                begun = time.monotonic()
                first, last = ends(curve(folder, way, seed, args.steps))
                gain = f"{100 * (last - first):+.1f} points"
                seconds = time.monotonic() - begun
                print(f"| {seed} | {way} | {first:.1%} | {last:.1%} | {gain} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
