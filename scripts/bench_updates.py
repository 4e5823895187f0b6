"""Weight updates amid sampling under load: that each arrives, that no memory is lost, and that an engine may die.

    python scripts/bench_updates.py --steps 50 --kill 25                              the embedded engine
    python scripts/bench_updates.py --model MODEL --out runs/updates_vllm --set rollout.engine=vllm \\
        train.dtype=bfloat16 train.optim.lr=1e-5 data.batch_size=32 rollout.max_response_tokens=512
    python scripts/bench_updates.py --steps 20 --kill 10 --in-broadcast --set cluster.placement=separate \\
        cluster.weight_transfer=broadcast                                             it dies amid an update

An asynchronous run of `rl` (staleness 2, answers as long as they may be) learns to write vowels, as in bench_async.py.
Each step brings new weights to the engine while it samples, and compares log-probabilities with the trainer's; a
difference ends the run. In step ``--kill`` the engine is killed with all of its processes amid its requests; with
``--in-broadcast`` in that step's update, a second after the trainer began to broadcast weights which the engine, that
was stopped before, does not take. The script ends with status 1 if one of these fails: every step trained, all updates
checked, requests amid their tokens in at least the share ``--amid`` of the updates, no token older than the bound, one
engine lost, and memory that does not grow by more than ``--grows``: GPU memory, or on a CPU that of the run's
processes, from a tenth of the steps before and after the death to the end of either.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pyarrow.parquet as pq
from bench_async import VOWELS, write_vowels
from chaos import Killer, install

from posttrain.cluster.cluster import local_ray
from posttrain.config.presets import resolve
from posttrain.core.errors import PosttrainError
from posttrain.core.sizes import GIB
from posttrain.rl import command as rl
from posttrain.weight_sync.transfers import BroadcastTransfer

STALENESS = 2
LONG = "rollout.max_response_tokens=192"
"""Sampling is to take longer than training, so that updates come amid tokens."""
POLL_S = 0.05


class Watcher(Killer):
    """Looks at a run while it goes on: its memory after each step, and kills its engine in one of them."""

    def __init__(self, metrics: Path, kill: int, *, in_broadcast: bool = False) -> None:
        self.samplers: dict[str, Any] = {}
        self.groups: list[Any] = []
        self.moment = ""
        self.metrics, self.at = metrics, kill
        self.in_broadcast = in_broadcast
        self.due = False
        """The step has come."""
        self.memory: list[float] = []
        """GiB of the engine's and the trainers' processes after each step."""
        self.killed = 0
        """Processes."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def begins(self) -> None:
        self.groups.clear()
        self.samplers.clear()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(timeout=10.0)

    def _watch(self) -> None:
        while not self._over.wait(POLL_S):
            steps = self.metrics.read_text().count("\n") if self.metrics.exists() else 0
            if steps > len(self.memory):
                self.memory += [self._held()] * (steps - len(self.memory))
            self.due = bool(self.at) and steps >= self.at - 1
            if self.due and not self.killed and not self.in_broadcast:
                time.sleep(0.2)  # amid the step
                self.kill()

    def broadcast_begins(self) -> None:
        """The trainer is about to send a bucket."""
        if self.in_broadcast and self.due and not self.killed:
            self.killed = self._signal(signal.SIGSTOP)
            threading.Timer(1.0, self.kill).start()

    def kill(self) -> None:
        self.killed = self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> int:
        """Send a signal to the engine's processes. Returns how many got it."""
        pid, sent = self._engine(), 0
        if pid is None or not psutil.pid_exists(pid):
            return 0
        engine = psutil.Process(pid)
        for process in [*engine.children(recursive=True), engine]:
            try:
                os.kill(process.pid, number)
                sent += 1
            except ProcessLookupError:
                continue
        return sent

    def _held(self) -> float:
        pids = [self._engine(), self._worker()]
        held = 0
        for pid in pids:
            try:
                family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)] if pid else []
                held += sum(process.memory_info().rss for process in family)
            except psutil.NoSuchProcess:  # it has just died
                return float("nan")
        return held / GIB


def watching_broadcasts(watcher: Watcher) -> Any:
    """Return a context in which the watcher sees the broadcasts of the run that this process is the driver of."""
    deliver = BroadcastTransfer.deliver

    async def watched(self: BroadcastTransfer, *args: Any) -> None:
        watcher.broadcast_begins()
        await deliver(self, *args)

    return mock.patch.object(BroadcastTransfer, "deliver", watched)


def mixed(run: Path) -> set[int]:
    """Return the versions of weights that came amid the tokens of a trained episode."""
    found: set[int] = set()
    for file in sorted((run / "rollouts").glob("step_*.parquet")):
        for row in pq.read_table(file, columns=["weight_version", "loss_mask"]).to_pylist():
            versions = np.unique(np.array(row["weight_version"])[np.array(row["loss_mask"], bool)])
            found |= set(versions[1:].tolist())
    return found


def growth(values: list[float], kill: int) -> float:
    """Return the largest growth of memory within the steps before the death of the engine, and within those after."""
    parts = [values[: kill - 1], values[kill + 1 :]] if kill else [values]
    found = [0.0]
    for part in parts:
        later = [value for value in part[len(values) // 10 :] if value == value]
        if len(later) > 1:
            found.append(later[-1] - later[0])
    return max(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:tiny", help="folder, or run:NAME")
    parser.add_argument("--steps", type=int, default=50, help="updates")
    parser.add_argument("--kill", type=int, default=25, help="step in which the engine dies; 0: none")
    parser.add_argument("--in-broadcast", action="store_true", help="it dies amid a broadcast of weights")
    parser.add_argument("--amid", type=float, default=0.5, help="least share of updates that come amid tokens")
    parser.add_argument("--grows", type=float, default=0.5, help="GiB that memory may grow by")
    parser.add_argument("--set", nargs="+", default=[], dest="sets")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_updates"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_vowels(args.out, 0.0)
    sets = [f"plugins=['{args.out / 'late_vowels.py'}']", *VOWELS, f"rollout.staleness={STALENESS}"]
    sets += [f"model.path='{args.model}'", "run.report=false", "cluster.sampler_restarts=1", LONG, *args.sets]
    flags = {"run.dir": str(args.out), "run.name": "updates", "run.overwrite": True, "train.steps": args.steps}
    resolved = resolve("rl", "tiny-arith", sets, flags | {"data.train": str(args.out / "train.parquet")})
    file = args.out / "updates/metrics.jsonl"
    file.unlink(missing_ok=True)
    watcher = Watcher(file, args.kill, in_broadcast=args.in_broadcast)
    install(watcher)
    failure = ""
    with local_ray(), watching_broadcasts(watcher):
        watcher.start()
        try:
            rl.run(resolved)
        except PosttrainError as error:
            failure = f"the run failed: {error.message}"
        finally:
            watcher.stop()
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    wrong = [failure] if failure else []
    if rows:
        wrong += report(rows, watcher, mixed(args.out / "updates"), args, resolved.config.rollout.engine)
    for what in wrong:
        print(f"WRONG: {what}")
    sys.exit(bool(wrong))


def report(
    rows: list[dict[str, float]], watcher: Watcher, amid: set[int], args: argparse.Namespace, engine: str
) -> list[str]:
    """Print a table of a run, and return what is wrong with it."""
    used = [row.get("sync/gpu_used_gib", float("nan")) for row in rows]
    on_gpu = any(value == value for value in used)
    memory = used if on_gpu else watcher.memory
    grown, lost = growth(memory, args.kill), max(row["rollout/samplers_lost"] for row in rows)
    gaps = [row["sync/check_gap"] for row in rows if "sync/check_gap" in row]
    updates = [row["timing_s/sync"] for row in rows if "timing_s/sync" in row]
    moved = max(row["rollout/requests_moved"] for row in rows)
    oldest = max(row["staleness/max"] for row in rows)
    after = [value for value in memory[len(rows) // 10 :] if value == value]
    columns = {
        "engine": engine,
        "updates, all checked": f"{len(gaps)} of {args.steps}",
        "largest gap of the check": f"{max(gaps):.2g}",
        "amid tokens of trained episodes": str(len(amid)),
        "seconds, median and longest": f"{median(updates):.2f} / {max(updates):.2f}",
        "oldest token": f"{oldest:.0f}",
        "engines lost": f"{lost:.0f} ({watcher.killed} processes killed)",
        "requests moved": f"{moved:.0f}",
        "GiB at a tenth and at the end": f"{after[0]:.2f} / {after[-1]:.2f} ({'GPU' if on_gpu else 'processes'})",
        "grown": f"{grown:+.2f}",
    }
    for cells in (columns, ["---"] * len(columns), columns.values()):
        print("| " + " | ".join(cells) + " |")
    checks = {
        f"{len(rows)} steps instead of {args.steps}": len(rows) != args.steps,
        f"{len(gaps)} checked updates instead of {args.steps}": len(gaps) != args.steps,
        f"only {len(amid)} updates came amid tokens": len(amid) < args.steps * args.amid,
        f"a token was {oldest:.0f} versions old": oldest > STALENESS,
        f"{lost:.0f} engines were lost instead of {int(args.kill > 0)}": lost != (args.kill > 0),
        f"memory grew by {grown:.2f} GiB": grown > args.grows,
    }
    return [what for what, wrong in checks.items() if wrong]


if __name__ == "__main__":
    main()
