"""Kills runs at random moments, lets them go on, and compares what comes out with a run that was never stopped.

    python scripts/chaos.py sft --kills 20
    python scripts/chaos.py rl --kills 20

Processes are ended with SIGKILL: the driver, a training worker or an engine; while it computes a step, samples, writes
a checkpoint, renames it or brings weights to the engine. A driver that is gone is started again with the same command;
of a worker or an engine the run must take care itself (`run.restarts`, `cluster.sampler_restarts`). In the end the
metrics of all steps and the last weights must equal those of the run that was left alone: to the bit, since nothing
here is random but by seed (of RL, see chaos_engine.py).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MOMENTS = {"sft": ("step", "save", "rename"), "rl": ("step", "gen", "save", "rename", "sync")}
VICTIMS = {"sft": ("driver", "worker"), "rl": ("driver", "worker", "engine")}
TIMES = ("time", "timing_s/", "perf/", "wait/", "tools/seconds", "rollout/samplers_lost", "rollout/requests_moved")
"""Beginnings of metrics that tell how fast it went, or what was lost."""
DEADLINE_S = 300.0
"""Longest life of one attempt."""


def command(kind: str, folder: Path, name: str, workers: int) -> list[str]:
    """The run's command line, without the program."""
    data = folder / "data"
    common = ["--name", name, "--set", f"run.dir={folder / 'runs'}", "--set", f"cluster.workers={workers}"]
    common += ["--set", "run.restarts=100", "--set", "run.logger=['jsonl']"]
    if kind == "sft":
        common += ["--data", str(data / "sft_train.parquet"), "--steps", "16", "--set", "train.save_every=2"]
        return ["sft", "--preset", "tiny-arith-sft", *common]
    common += ["--data", str(data / "train.parquet"), "--steps", "6", "--set", "train.save_every=1"]
    common += ["--set", "data.batch_size=4", "--set", "rollout.n=4", "--set", "rollout.max_turns=2"]
    common += ["--set", f"plugins=['{HERE / 'chaos_engine.py'}']", "--set", "run.rollouts=false"]
    common += ["--set", "cluster.sampler_restarts=100"]
    return ["rl", "--preset", "tiny-arith", "--model", "run:start", *common]


# ---------------------------------------------------------------------- in the process that is killed


class Killer:
    """Ends a process at a moment of this run."""

    def __init__(self, victim: str, moment: str, call: int, delay_s: float) -> None:
        self.victim, self.moment, self.calls_left, self.delay_s = victim, moment, call, delay_s
        self.groups: list[Any] = []
        self.samplers: dict[str, Any] = {}
        self.done = Path(os.environ["POSTTRAIN_CHAOS"]) / "killed"

    def begins(self) -> None:
        """The run starts, or starts again."""
        self.groups.clear()
        self.samplers.clear()

    def reached(self) -> None:
        """The moment has come, once more."""
        self.calls_left -= 1
        if self.calls_left != 0:
            return
        if self.moment == "rename":
            self.kill()
        else:
            threading.Timer(self.delay_s, self.kill).start()

    def kill(self) -> None:
        pid = {"driver": self._driver, "worker": self._worker, "engine": self._engine}[self.victim]()
        if pid is not None and not self.done.exists():
            self.done.write_text(f"{self.victim} {self.moment}")
            os.kill(pid, signal.SIGKILL)

    def _driver(self) -> int:
        return os.getpid()

    def _worker(self) -> int | None:
        processes = [handle.process for group in self.groups for handle in group.handles if handle.process is not None]
        return random.choice(processes).pid if processes else None

    def _engine(self) -> int | None:
        processes = [sampler.handle.process for sampler in self.samplers.values() if sampler.handle.process is not None]
        return random.choice(processes).pid if processes else None


def install(killer: Killer) -> None:
    """Let the killer see the moments of the run that this process is the driver of."""
    from posttrain.cluster.cluster import Cluster
    from posttrain.cluster.samplers import RemoteSampler
    from posttrain.cluster.synced_samplers import SyncedSamplers
    from posttrain.cluster.trainers import TrainerGroup
    from posttrain.rollout.batches import TrainingBatches
    from posttrain.runs.checkpoints import RunCheckpoints
    from posttrain.train import checkpoint

    def watch(owner: Any, name: str, moment: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if moment == killer.moment:
                killer.reached()
            return original(*args, **kwargs)

        setattr(owner, name, wrapper)

    for owner, name, moment in (
        (TrainerGroup, "update", "step"),
        (TrainingBatches, "next", "gen"),
        (RunCheckpoints, "begin", "save"),
        (SyncedSamplers, "publish", "sync"),
    ):
        watch(owner, name, moment)

    def remember(owner: Any, name: str, keep: Callable[[Any], None]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        async def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            keep(self)
            return await original(self, *args, **kwargs)

        setattr(owner, name, wrapper)

    remember(Cluster, "__aenter__", lambda _: killer.begins())
    remember(TrainerGroup, "start", killer.groups.append)
    remember(RemoteSampler, "start", lambda sampler: killer.samplers.__setitem__(str(sampler.handle), sampler))

    class Renaming:
        """``os`` for the module of checkpoints."""

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def replace(self, old: Any, new: Any) -> None:
            before = random.random() < 0.5
            if before and killer.moment == "rename":
                killer.reached()
            os.replace(old, new)
            if not before and killer.moment == "rename":
                killer.reached()

    checkpoint.os = Renaming()  # type: ignore[assignment]


def child(arguments: list[str]) -> None:
    """One attempt at the run, with somebody to be killed in it."""
    victim, moment, call, delay_s, *command_line = arguments
    if victim != "nobody":
        install(Killer(victim, moment, int(call), float(delay_s)))
    from posttrain.cli import main as posttrain

    sys.argv = ["posttrain", *command_line]
    posttrain()


# ---------------------------------------------------------------------- around it


def attempt(folder: Path, command_line: list[str], plan: tuple[str, str, int, float]) -> int:
    """Start the run with one death planned; its exit status."""
    env = os.environ | {"POSTTRAIN_CHAOS": str(folder), "OMP_NUM_THREADS": "1"}
    (folder / "killed").unlink(missing_ok=True)
    with (folder / "log.txt").open("ab") as log:
        line = [sys.executable, str(HERE / "chaos.py"), "child", *map(str, plan), *command_line]
        process = subprocess.Popen(line, env=env, stdout=log, stderr=log)
        try:
            return process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            sys.exit(f"an attempt has hung: {plan}; see {folder / 'log.txt'}")


def metrics(run: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in rows]


def weights(run: Path) -> Mapping[str, Any]:
    import torch

    from posttrain.models.load import load_model, locate
    from posttrain.train import checkpoint

    model = load_model(locate(str(checkpoint.find(run).path)), dtype=torch.float32)
    return dict(model.named_parameters())


def compare(calm: Path, stormy: Path) -> list[str]:
    """How two runs differ."""
    import torch

    found = []
    a, b = metrics(calm), metrics(stormy)
    if [row["step"] for row in a] != [row["step"] for row in b]:
        found.append(f"steps {[row['step'] for row in b]} instead of {[row['step'] for row in a]}")
    for left, right in zip(a, b, strict=False):
        different = [key for key in left.keys() | right.keys() if left.get(key) != right.get(key)]
        found += [f"step {left['step']}: {key} {right.get(key)} instead of {left.get(key)}" for key in different]
    one, other = weights(calm), weights(stormy)
    found += [f"weights {name} differ" for name in one if not torch.equal(one[name], other[name])]
    return found


def prepare(kind: str, folder: Path) -> None:
    """Data, and for RL a model that earns something."""
    run = functools.partial(subprocess.run, check=True, stdout=subprocess.DEVNULL)
    posttrain = [sys.executable, "-c", "from posttrain.cli import main; main()"]
    run([*posttrain, "prep", "arith", "--out", str(folder / "data"), "--train-rows", "400", "--test-rows", "20"])
    if kind == "rl":
        options = ["--name", "start", "--steps", "150", "--data", str(folder / "data" / "sft_train.parquet")]
        run([*posttrain, "sft", "--preset", "tiny-arith-sft", *options, "--set", f"run.dir={folder / 'runs'}"])


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=list(MOMENTS))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"), help="folder of it all; must not exist")
    args = parser.parse_args()
    folder = args.out.resolve() / args.kind
    if folder.exists():
        sys.exit(f"{folder} exists")
    folder.mkdir(parents=True)
    prepare(args.kind, folder)
    start = time.monotonic()
    if attempt(folder, command(args.kind, folder, "calm", args.workers), ("nobody", "", 0, 0.0)):
        sys.exit(f"the run that nobody disturbs failed; see {folder / 'log.txt'}")
    calm_s = time.monotonic() - start
    tally: Counter[str] = Counter()
    chance = random.Random(args.seed)
    names, number = ["stormy-0"], 0
    while sum(tally.values()) < args.kills:
        number += 1
        plan = (
            chance.choice(VICTIMS[args.kind]),
            chance.choice(MOMENTS[args.kind]),
            chance.randint(1, 3),
            chance.uniform(0.0, 0.25),
        )
        status = attempt(folder, command(args.kind, folder, names[-1], args.workers), plan)
        if (folder / "killed").exists():
            tally[(folder / "killed").read_text()] += 1
        if status not in (0, -signal.SIGKILL):
            sys.exit(f"attempt {number} ended with status {status}: {plan}; see {folder / 'log.txt'}")
        if status == 0:  # it came to its end: the next deaths are another run's
            names.append(f"stormy-{len(names)}")
    if (folder / "runs" / names[-1]).exists():
        if attempt(folder, command(args.kind, folder, names[-1], args.workers), ("nobody", "", 0, 0.0)):
            sys.exit(f"the last attempt failed; see {folder / 'log.txt'}")
    else:
        names.pop()
    different = {name: compare(folder / "runs" / "calm", folder / "runs" / name) for name in names}
    for what, count in sorted(tally.items()):
        print(f"{count:3} x {what.replace(' ', ' killed in ')}")
    print(
        f"{sum(tally.values())} kills in {number} attempts at {len(names)} runs; a run of its own takes {calm_s:.0f} s"
    )
    for name, lines in different.items():
        print(f"{name}: {'equal to the bit, metrics and weights' if not lines else 'DIFFERS'}")
        for line in lines[:10]:
            print(f"  {line}")
    sys.exit(any(different.values()))


if __name__ == "__main__":
    main()
