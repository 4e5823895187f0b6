"""Two nodes as two network namespaces of this machine: sft and rl run over both, one is killed, and the runs go on.

    python scripts/bench_nodes.py                              on a CPU, the tiny model
    python scripts/bench_nodes.py --model FOLDER --engine sglang --set rollout.memory_fraction=0.4     two GPUs

Each namespace has one end of a veth pair, a Ray node of its own and, where there are GPUs, one of them. Nothing else
connects them: gloo and NCCL go over sockets, as between machines (NCCL is told by NCCL_HOSTID that they are two). The
driver runs in the first. Without root the script starts itself again in a user namespace.

`sft`: a run that is left alone; and the same one again, whose second node is killed amid a step, with every process in
it. That run must end and name who was lost; the same command goes on with ``cluster.workers`` for what is left, is
stopped after some steps, and goes on at full size once the node is there again. Steps, order of the data and losses
must be those of the run that was left alone. `rl`: the run is killed and goes on likewise; each prompt is trained once.

The script ends with status 1 if one of these fails: all steps there once; the same data; losses within ``--tolerance``;
the error after the kill within ``--patience`` seconds; workers on both nodes; and with GPUs that all of NCCL between
the nodes went over sockets.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from _netns import ROOTLESS, Namespace, NetnsError, connect
from _nodes import ADDRESSES, DEVICE, PORT, START_S, Failed, Node

REWARD = '''"""A reward that the untrained model gets a little of, so that each step has gradients."""


def vowels(data_source, solution_str, ground_truth, extra_info):
    return sum(solution_str.count(letter) for letter in "aeiou") / max(1, len(solution_str))
'''
BATCH = 4
"""Prompts of a step of `rl`."""
SETS = {
    "sft": ["data.batch_size=32", "data.shuffle=true"],
    "rl": [f"data.batch_size={BATCH}", "rollout.n=4", "rollout.tools=[]", "rollout.max_response_tokens=32"],
}
COMMON = ["run.report=false", "run.logger=['jsonl']", "train.compile=off", "train.save_every=2"]


Driver = subprocess.Popen[bytes]


@dataclass
class Part:
    """One life of a run."""

    what: str
    workers: int
    code: int = 0
    first_s: float = float("nan")
    """Seconds from the command to the end of its first step."""
    steps: int = 0
    step_s: float = float("nan")
    bytes: int = 0
    actors: list[list[str]] = field(default_factory=list)
    """Of each node, at the first step."""
    transports: Counter[str] = field(default_factory=Counter)
    end_s: float = float("nan")
    """Seconds from the kill of a node, or from SIGTERM, to the end of the driver."""
    shown: str = ""
    whole: bool = False
    """Over both nodes."""

    def row(self) -> list[str]:
        moved = " + ".join(str(len(actors)) for actors in self.actors)
        transports = ", ".join(f"{name} x {count}" for name, count in sorted(self.transports.items()))
        transports = transports or ("gloo" if self.whole else "")
        cells = [self.what, str(self.workers), moved, f"{self.first_s:.1f}", str(self.steps), f"{self.step_s:.2f}"]
        ended = "" if math.isnan(self.end_s) else f"{self.end_s:.1f}"
        return [*cells, f"{self.bytes / 1e6:.1f}", transports, ended]


class Bench:
    """The machine as two nodes, and the runs on it."""

    def __init__(self, args: argparse.Namespace, nodes: tuple[Node, Node], out: Path) -> None:
        self.args, self.nodes, self.out = args, nodes, out
        self.parts: list[Part] = []
        self.wrong: list[str] = []

    def sets(self, kind: str, workers: int) -> list[str]:
        args = self.args
        sets = [*COMMON, *SETS[kind], f"run.dir={self.out / 'runs'}", f"cluster.address={ADDRESSES[0]}:{PORT}"]
        sets += [f"cluster.workers={workers}", f"train.steps={args.steps}"]
        if args.model != "builtin:tiny":
            sets.append("train.optim.lr=1e-5")  # the presets are for the tiny model
        if kind == "sft":
            return [
                *sets,
                f"model.path={args.model}",
                f"data.train={self.out / 'data/arith/sft_train.parquet'}",
                *args.sets,
            ]
        sets += [f"data.train={self.out / 'data/arith/train.parquet'}", f"rollout.engine={args.engine}"]
        sets += [f"reward.function={self.out / 'vowels.py'}:vowels", f"model.path={self.start_of_rl()}"]
        replicas = workers if args.placement == "colocated" else 1
        return [*sets, f"cluster.placement={args.placement}", f"rollout.replicas={replicas}", *args.sets]

    def start_of_rl(self) -> str:
        return "run:sft" if (self.out / "runs/sft/checkpoints").is_dir() else self.args.model

    def run(
        self,
        what: str,
        kind: str,
        name: str,
        workers: int,
        at: int = 0,
        then: Callable[[Driver], Any] | None = None,
        more: tuple[str, ...] = (),
    ) -> Part:
        """Run a command to its end; once step ``at`` is done, do ``then`` with its process. Raises ``Failed``.

        Args:
            more: sets.
        """
        preset = {"sft": "tiny-arith-sft", "rl": "tiny-arith"}[kind]
        command = [sys.executable, "-m", "posttrain", kind, "--preset", preset, "--name", name]
        for one in [*self.sets(kind, workers), *more]:
            command += ["--set", one]
        metrics, log = self.out / "runs" / name / "metrics.jsonl", self.out / f"{len(self.parts)}.{name}.log"
        part = Part(what, workers)
        self.parts.append(part)
        known, received = set(self.nccl_files()), self.received()
        begun, wall, done, killed = time.monotonic(), time.time(), 0, 0.0
        driver = self.nodes[0].popen(command, log)
        heard = begun
        while driver.poll() is None:
            time.sleep(0.01)
            new = rows_of(metrics, wall)
            if len(new) > done:
                done, heard = len(new), time.monotonic()
                if not part.actors:
                    part.first_s, part.actors = heard - begun, [node.actors() for node in self.nodes]
            if then is not None and new and new[-1]["step"] >= at:
                killed = time.monotonic()
                then(driver)
                then = None
            if time.monotonic() - heard > START_S:
                driver.kill()
                raise Failed(f"{what}: nothing for {START_S:g} s after {done} steps; {log}: {tail(log)}")
        part.end_s = time.monotonic() - killed if killed else float("nan")
        new = rows_of(metrics, wall)
        part.code, part.steps, part.shown = driver.returncode, len(new), log.read_text(errors="replace")
        if len(new) > 1:
            part.step_s = median(row["timing_s/step"] for row in new[1:])
        part.bytes = self.received() - received
        part.transports = transports([file for file in self.nccl_files() if file not in known])
        print(f"{what}: exit code {part.code}, {part.steps} steps", flush=True)
        if then is not None:
            self.wrong.append(f"{what}: it ended before step {at}")
        return part

    def received(self) -> int:
        return sum(node.namespace.received(DEVICE) for node in self.nodes)

    def nccl_files(self) -> list[Path]:
        return sorted((self.out / "nccl").glob("*.log"))

    def check(self, part: Part, code: int = 0) -> None:
        """Note what is wrong with where a part ran. Raises ``Failed`` where it did not end with ``code``."""
        if part.code != code:
            raise Failed(f"{part.what}: exit code {part.code} instead of {code}: {part.shown[-1500:]}")
        if not part.whole:
            return
        if not part.actors or not all(part.actors):
            self.wrong.append(f"{part.what}: a node had no process of the run: {part.actors}")
        if self.nodes[0].gpus and set(part.transports) != {"NET/Socket"}:
            self.wrong.append(f"{part.what}: NCCL between the nodes went by {dict(part.transports) or 'nothing'}")

    def whole(self, kind: str) -> Part:
        """Run a command over both nodes and leave it alone."""
        separate = kind == "rl" and self.args.placement == "separate"
        part = self.run(f"{kind}, left alone", kind, kind, 1 if separate else 2)
        part.whole = True
        self.check(part)
        self.steps(kind)
        return part

    def killed(self, kind: str) -> None:
        """Run a command over both nodes, kill one, go on with the other, and then with both again."""
        name, steps = f"{kind}_killed", self.args.steps
        first, second = steps // 3 | 1, 2 * steps // 3  # odd: the checkpoint is that of the step before
        part = self.run(
            f"{kind}, a node is killed", kind, name, 2, first, lambda _: self.nodes[1].kill(pull=self.args.pull)
        )
        part.whole = True
        self.check(part, code=1)
        told = re.search(r"error: .*", part.shown, re.DOTALL)
        message = told[0] if told else part.shown[-1000:]
        print(f"{part.end_s:.1f} s after the death of node 1 the run ended:\n{indented(message)}", flush=True)
        if not re.search(r"(worker|sampler) \d+", message) or ADDRESSES[1] not in message:
            self.wrong.append(f"{part.what}: the error does not name the actor that was lost and its node: {message}")
        if part.end_s > self.args.patience:
            self.wrong.append(f"{part.what}: the run ended {part.end_s:.0f} s after the death of the node")
        left = self.run(f"{kind}, on what is left", kind, name, 1, second, lambda driver: driver.terminate())
        self.check(left)
        self.nodes[1].start()
        back = self.run(f"{kind}, on both again", kind, name, 2)
        back.whole = True
        self.check(back)
        self.steps(name)
        if not (part.steps and left.steps and back.steps):
            self.wrong.append(f"{name}: a part had no step: {part.steps}, {left.steps}, {back.steps}")

    def restarted(self, kind: str) -> None:
        """Run a command that starts its workers again by itself, over both nodes; one is killed, and comes back."""

        def lose_and_bring_back(driver: Driver) -> None:
            self.lose(driver)
            self.nodes[1].start()

        name, at = f"{kind}_restarted", self.args.steps // 3 | 1
        what = f"{kind}, a node is killed and comes back"
        part = self.run(what, kind, name, 2, at, lose_and_bring_back, ("run.restarts=1",))
        part.whole = True
        self.check(part)
        self.steps(name)

    def lose(self, driver: Driver) -> None:
        """Kill the node that the driver is not on."""
        self.nodes[1].kill(pull=self.args.pull)

    def steps(self, name: str) -> None:
        """Note steps of a run that are missing or there twice."""
        found = [row["step"] for row in rows_of(self.out / "runs" / name / "metrics.jsonl")]
        if found != list(range(1, self.args.steps + 1)):
            self.wrong.append(f"{name}: steps {found} instead of 1 to {self.args.steps}")

    def compare(self, name: str) -> None:
        """Compare an sft run with the one that was left alone."""
        alone, killed = (rows_of(self.out / "runs" / run / "metrics.jsonl") for run in ("sft", name))
        data = ("train/tokens", "train/loss_tokens", "train/epoch")
        same = [[row[key] for key in data] for row in alone] == [[row[key] for key in data] for row in killed]
        if not same:
            self.wrong.append(f"{name}: the data of steps differ")
        pairs = list(zip(alone, killed, strict=False))
        gap = max((abs(a["train/loss"] - b["train/loss"]) / abs(a["train/loss"]) for a, b in pairs), default=math.inf)
        print(
            f"{name}: largest relative difference of a step's loss {gap:.2g}, data {'the same' if same else 'differ'}"
        )
        if not gap <= self.args.tolerance:
            self.wrong.append(f"{name}: a loss differs by {gap:.2g}, more than {self.args.tolerance:g}")

    def prompts(self, name: str) -> None:
        """Note prompts that an rl run trained twice, while others wait."""
        import pyarrow.parquet as pq

        seen: Counter[int] = Counter()
        for file in sorted((self.out / "runs" / name / "rollouts").glob("step_*.parquet")):
            rows = pq.read_table(file, columns=["row", "kind"]).to_pylist()
            of_step = {row["row"] for row in rows if row["kind"] == "train"}
            seen.update(of_step)
            if len(of_step) != BATCH:
                self.wrong.append(f"{name}: {file.name} has {len(of_step)} prompts instead of {BATCH}")
        print(f"{name}: {len(seen)} prompts, each at most {max(seen.values(), default=0)} times", flush=True)
        if len(seen) != BATCH * self.args.steps or max(seen.values()) > 1:
            self.wrong.append(f"{name}: {len(seen)} prompts instead of {BATCH * self.args.steps}, or some twice")


def rows_of(metrics: Path, since: float = 0.0) -> list[dict[str, Any]]:
    """Return the steps in a file of metrics that ended after ``since`` (seconds since 1970)."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if row["time"] > since]


def transports(files: list[Path]) -> Counter[str]:
    """Return how often NCCL told in its logs that a channel to another rank goes by which transport."""
    told = re.compile(r"Channel \S+ : .* via ([A-Za-z0-9]+(?:/Socket|/IB)?)")
    return Counter(name for file in files for name in told.findall(file.read_text(errors="replace")))


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-1500:]


def indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines())


def gpus_of_machine() -> int:
    """Return how many GPUs there are, by their device files: torch would start CUDA in this process."""
    return sum(re.fullmatch(r"nvidia\d+", device.name) is not None for device in Path("/dev").iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:tiny", help="folder")
    parser.add_argument("--steps", type=int, default=12, help="of each run")
    parser.add_argument("--only", nargs="+", choices=("sft", "rl"), default=["sft", "rl"])
    parser.add_argument("--no-kill", action="store_true", help="runs that are left alone, and nothing else")
    parser.add_argument("--restarts", action="store_true", help="also with run.restarts=1, where the node comes back")
    parser.add_argument("--pull", action="store_true", help="the node's cable, before it is killed")
    parser.add_argument("--engine", choices=("hf", "sglang", "vllm"), default="hf")
    parser.add_argument("--placement", choices=("colocated", "separate"), default="colocated", help="of rl")
    parser.add_argument("--gpus", type=int, choices=(0, 1), help="of each node; default: 1 where there are two")
    parser.add_argument("--tolerance", type=float, help="relative, of losses; default 1e-5, with GPUs (bfloat16) 1e-2")
    parser.add_argument("--patience", type=float, default=90.0, help="seconds from a node's death to the error")
    parser.add_argument("--limit", type=int, default=900, help="seconds for everything")
    parser.add_argument("--set", nargs="+", default=[], dest="sets", help="of every run")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_nodes"))
    parser.add_argument("--userns", action="store_true", help="in a user namespace, as is done without root")
    args = parser.parse_args()
    if (args.userns or os.geteuid() != 0) and "POSTTRAIN_BENCH_NODES" not in os.environ:
        os.environ["POSTTRAIN_BENCH_NODES"] = "inside"
        os.execvp(ROOTLESS[0], [*ROOTLESS, sys.executable, *sys.argv])
    args.gpus = int(gpus_of_machine() >= 2) if args.gpus is None else args.gpus
    args.tolerance = args.tolerance or (1e-2 if args.gpus else 1e-5)
    wrong = measure(args)
    for what in wrong:
        print(f"WRONG: {what}")
    sys.exit(bool(wrong))


def measure(args: argparse.Namespace) -> list[str]:
    """Make the nodes, run everything on them, print a table, and return what is wrong."""
    out = args.out.resolve()
    shutil.rmtree(out / "runs", ignore_errors=True)
    shutil.rmtree(out / "nccl", ignore_errors=True)
    (out / "nccl").mkdir(parents=True)
    (out / "vowels.py").write_text(REWARD)
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, give_up)
    signal.alarm(args.limit)
    namespaces: list[Namespace] = []
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: sockets have short paths only
    bench: Bench | None = None
    try:
        namespaces = [Namespace(), Namespace()]
        connect((namespaces[0], namespaces[1]), DEVICE, ADDRESSES)
        first, second = (Node(index, ends, Path(folder), out, args.gpus) for index, ends in enumerate(namespaces))
        bench = Bench(args, (first, second), out)
        rows = max(400, BATCH * args.steps)
        prepare = ["prep", "arith", "--train-rows", str(rows), "--test-rows", "20", "--overwrite"]
        prepared = first.popen([sys.executable, "-m", "posttrain", *prepare], out / "prep.log")
        if prepared.wait(timeout=START_S):
            raise Failed(f"posttrain prep arith: {tail(out / 'prep.log')}")
        first.start()
        second.start()
        parts(bench, args)
    except (Failed, NetnsError, subprocess.TimeoutExpired) as error:
        return [*(bench.wrong if bench else []), str(error)]
    finally:
        for number in (signal.SIGALRM, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        for namespace in namespaces:
            namespace.kill()
            namespace.close()
        shutil.rmtree(folder, ignore_errors=True)
        if bench is not None:
            print(table(bench.parts), flush=True)
    return bench.wrong


def give_up(number: int, frame: FrameType | None) -> None:
    raise Failed("not done within --limit" if number == signal.SIGALRM else "ended by SIGTERM")


def parts(bench: Bench, args: argparse.Namespace) -> None:
    """Run what was asked for."""
    kills = not args.no_kill
    if "sft" in args.only:
        bench.whole("sft")
        if kills:
            bench.killed("sft")
            bench.compare("sft_killed")
        if args.restarts:
            bench.restarted("sft")
            bench.compare("sft_restarted")
    if "rl" in args.only:
        kills &= args.placement == "colocated"  # an engine of its own node is waited for, until there is one again
        if kills:
            bench.killed("rl")
        else:
            bench.whole("rl")
        bench.prompts("rl_killed" if kills else "rl")
        if args.restarts:
            bench.restarted("rl")
            bench.prompts("rl_restarted")


def table(parts: list[Part]) -> str:
    """Return a table in Markdown, a row a life of a run."""
    columns = ["part", "workers", "processes on the nodes", "s to the first step", "steps", "s a step", "MB"]
    columns += ["between the nodes", "s to the end"]
    lines = [columns, ["---"] * len(columns), *(part.row() for part in parts)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    main()
