"""Kills an asynchronous `rl` run at random moments, lets it go on, and checks what it was trained on.

    python scripts/chaos_async.py --kills 20

Processes are ended with SIGKILL as in chaos.py: the driver, a training worker or the engine, while the run updates,
takes a batch, writes or renames a checkpoint, or brings weights to the engine. Groups are sampled all the while, by a
model that learns to write vowels, as in bench_async.py, and whose episodes begin late. A driver that is gone is started
again with the same command. Such a run does not sample the same as one that is left alone, so what is compared is that
every prompt was trained as often as the order of the data says, that no token was older than `rollout.staleness`, that
no step is missing, and the mean reward of the last steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import mean

import numpy as np
import psutil
import pyarrow.parquet as pq
from bench_async import LAST, PLUGIN
from chaos import MOMENTS, VICTIMS, Killer, install

from posttrain.data.loader import BatchOrder
from posttrain.data.parquet import write_rows

ROWS, SIZE = 24, 8
DEADLINE_S = 900.0
"""Longest life of one attempt."""
KILLS = "kills.txt"
"""In the folder of it all: who was killed, and in what."""


class Deaths(Killer):
    """Ends one process after the other. What was done is in a file, since the driver is among them."""

    def __init__(self, folder: Path, seed: int, count: int) -> None:
        self.file, self.seed, self.count = folder / KILLS, seed, count
        super().__init__("", "", 0, 0.0)
        self.plan()

    def plan(self) -> None:
        """Choose the next one."""
        number = len(self.file.read_text().splitlines()) if self.file.exists() else 0
        chance = random.Random(f"{self.seed} {number}")
        self.victim, self.calls_left = chance.choice(VICTIMS["rl"]), chance.randint(1, 3)
        self.delay_s = chance.uniform(0.0, 0.5)
        self.moment = chance.choice(MOMENTS["rl"]) if number < self.count else ""

    def kill(self) -> None:
        pid = {"driver": self._driver, "worker": self._worker, "engine": self._engine}[self.victim]()
        if pid is None or not psutil.pid_exists(pid):  # it has not started, or is being replaced: next time
            self.calls_left = 1
            return
        with self.file.open("a") as file:
            file.write(f"{self.victim} {self.moment}\n")
        self.plan()
        os.kill(pid, signal.SIGKILL)


def child(folder: str, seed: str, count: str, *command_line: str) -> None:
    """One attempt at the run."""
    install(Deaths(Path(folder), int(seed), int(count)))
    from posttrain.cli import main as posttrain

    sys.argv = ["posttrain", *command_line]
    posttrain()


def command(folder: Path, name: str, k: int, steps: int) -> list[str]:
    """The run's command line, without the program."""
    sets = ["model.path=builtin:tiny", f"plugins=['{folder / 'late_vowels.py'}']", f"run.dir={folder / 'runs'}"]
    sets += [f"rollout.staleness={k}", f"data.batch_size={SIZE}", "rollout.n=8", "rollout.tools=[]"]
    sets += ["rollout.interaction=late", "rollout.max_turns=2", "rollout.max_response_tokens=48"]
    sets += ["train.optim.lr=6e-3", "train.save_every=1", "run.report=false", "run.logger=['jsonl']"]
    sets += ["run.restarts=100", "cluster.sampler_restarts=100"]
    line = ["rl", "--preset", "tiny-arith", "--name", name, "--steps", str(steps)]
    line += ["--data", str(folder / "train.parquet")]
    return [*line, *(word for one in sets for word in ("--set", one))]


def attempt(folder: Path, seed: int, count: int, line: list[str]) -> int:
    """Start the run with up to ``count`` deaths in all; its exit status."""
    env = os.environ | {"POSTTRAIN_CHAOS": str(folder), "OMP_NUM_THREADS": "1"}
    with (folder / "log.txt").open("ab") as log:
        words = [sys.executable, __file__, "child", str(folder), str(seed), str(count), *line]
        process = subprocess.Popen(words, env=env, stdout=log, stderr=log)
        try:
            return process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            sys.exit(f"an attempt has hung; see {folder / 'log.txt'}")


def play(folder: Path, name: str, args: argparse.Namespace, count: int) -> int:
    """Play a run to its end; how often it was started."""
    for number in range(1, args.kills + 2):
        status = attempt(folder, args.seed, count, command(folder, name, args.staleness, args.steps))
        if status == 0:
            return number
        if status != -signal.SIGKILL:
            sys.exit(f"an attempt at {name} ended with status {status}; see {folder / 'log.txt'}")
    sys.exit(f"{name} has not come to its end")


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def reward(run: Path) -> float:
    """The mean reward of the last steps."""
    return mean(row["critic/score/mean"] for row in metrics(run)[-LAST:])


def faults(run: Path, k: int, steps: int) -> list[str]:
    """What is wrong with what a run was trained on."""
    trained: Counter[int] = Counter()
    oldest = 0
    for file in sorted((run / "rollouts").glob("step_*.parquet")):
        rows = pq.read_table(file, columns=["step", "group", "row", "weight_version", "loss_mask"]).to_pylist()
        trained.update({row["group"]: row["row"] for row in rows}.values())
        for row in rows:
            versions = np.array(row["weight_version"])[np.array(row["loss_mask"])]
            oldest = max(oldest, int((row["step"] - 1 - versions).max(initial=0)))
    expected = Counter(BatchOrder(ROWS, SIZE, 0).take(SIZE * steps))
    found = [
        f"row {row}: trained {trained[row]} times instead of {n}" for row, n in expected.items() if trained[row] != n
    ]
    if trained.keys() - expected.keys() or oldest > k:
        found.append(f"rows {sorted(trained.keys() - expected.keys())} are none of the data's; oldest token: {oldest}")
    if [row["step"] for row in metrics(run)] != list(range(1, steps + 1)):
        found.append(f"steps {[row['step'] for row in metrics(run)]} instead of 1 to {steps}")
    print(
        f"{run.name}: {sum(trained.values())} groups, oldest token {oldest}, reward {reward(run):.3f}, faults: {found}"
    )
    return found


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        child(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--calm", action=argparse.BooleanOptionalAction, default=True, help="play one left alone, too")
    parser.add_argument("--within", type=float, default=0.1, help="largest difference of the rewards")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/chaos_async"), help="folder of it all; must not exist")
    args = parser.parse_args()
    folder = args.out.resolve()
    if folder.exists():
        sys.exit(f"{folder} exists")
    folder.mkdir(parents=True)
    (folder / "late_vowels.py").write_text(PLUGIN.replace("WAIT", "0.05"))
    prompts = [{"role": "user", "content": f"Write {i}"} for i in range(ROWS)]
    rows = [{"data_source": "bench/vowels", "prompt": [p], "reward_model": {"ground_truth": ""}} for p in prompts]
    write_rows(folder / "train.parquet", rows)
    begun = time.monotonic()
    if args.calm:
        play(folder, "calm", args, 0)
        print(f"a run that is left alone takes {time.monotonic() - begun:.0f} s")
    begun = time.monotonic()
    starts = play(folder, "stormy", args, args.kills)
    killed = (folder / KILLS).read_text().splitlines() if (folder / KILLS).exists() else []
    print(f"{len(killed)} kills, {starts} starts, {time.monotonic() - begun:.0f} s")
    for what, count in sorted(Counter(killed).items()):
        print(f"{count:3} x {what.replace(' ', ' killed in ')}")
    runs = [folder / "runs" / name for name in (["calm"] if args.calm else []) + ["stormy"]]
    wrong = [fault for run in runs for fault in faults(run, args.staleness, args.steps)]
    apart = abs(reward(runs[0]) - reward(runs[-1]))
    sys.exit(bool(wrong) or len(killed) < args.kills or apart > args.within)


if __name__ == "__main__":
    main()
