"""Gradings a second: the grader pool against a plain loop and against a process per item, and the sandbox's start.

    python scripts/bench_graders.py [--seconds 3] [--memory 100000]

Every figure is of one run on one machine, so the ratios are what counts. The items are made here: real answers, right
and wrong, of the length that models write.

    loop        the same library in a plain loop in this process (programs: `python -c` for each test)
    per item    a new process for each item, which is how a deadline is often put on a grader
    1, 2        the pool with one and two worker processes (graders that cannot hang run in this process anyway)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from posttrain.config import RewardConfig, SandboxConfig
from posttrain.rewards import DATA_SOURCES, GRADERS, compute_score, needs_sandbox
from posttrain.rewards.code import extract_code
from posttrain.rewards.grade import GradeItem, GraderPool
from posttrain.sandbox import open_sandbox

THOUGHT = "We set up the equation and solve it step by step. First x + 3 = 10, so x = 7. " * 12
KK = (
    "(1) Ann is a knight\n(2) Bob is a knave",
    "<answer>(1) Ann is a knight (2) Bob is a {}</answer>",
    ("knave", "knight"),
)
WORK = "total = 0\nfor i in range(50_000):\n    total += i * i % 7\n"
"""Some milliseconds, of the order of what a contest's program takes on a test."""
ADD = f"{WORK}def add(a, b):\n    return a + b\n"
PAIRS = {"inputs": ["1 2\n", "30 40\n", "5 6\n"], "outputs": ["3\n", "70\n", "11\n"]}


def items(grader: str) -> list[GradeItem]:
    """Eight items of one grader, half of them right."""
    source = f"bench/{grader}"
    fence = "```python\n{}\n```"
    programs = [f"{WORK}a, b = map(int, input().split())\nprint(a {sign} b)" for sign in "+*"]
    task = {"prompt": "def add(a, b):\n", "entry_point": "add", "test": "def check(f):\n    assert f(1, 2) == 3\n"}
    made: dict[str, tuple[Any, list[str]]] = {
        "gsm8k": ("42", ["#### 42", "#### 43"]),
        "math": (r"\frac{1}{2}", [r"\boxed{\dfrac12}", r"\boxed{2}"]),
        "math_dapo": ("42", ["Answer: 42", "Answer: 7"]),
        "math_verify": (r"\frac{\sqrt{2}}{2}", [r"so $\boxed{\frac{1}{\sqrt{2}}}$", r"so $\boxed{\sqrt{2}}$"]),
        "prime_math": (r"(x+2)^2", [r"\boxed{x^2+4x+4}", r"\boxed{x^2+4}"]),
        "geo3k": ("5", [r"<think>a</think>\boxed{5}", r"<think>a</think>\boxed{6}"]),
        "choice": ("B", [r"\boxed{B}", "The answer is (C)."]),
        "kk": (KK[0], [KK[1].format(role) for role in KK[2]]),
        "apps": (PAIRS, [fence.format(program) for program in programs]),
        "prime_code": (PAIRS, [fence.format(program) for program in programs]),
        "humaneval": (task, [fence.format(ADD), fence.format(ADD.replace("+", "-"))]),
        "mbpp": ({"test_list": ["assert add(1, 2) == 3"]}, [fence.format(ADD), fence.format(ADD.replace("+", "-"))]),
    }
    truth, answers = made[grader]
    DATA_SOURCES[source] = grader
    truth = json.dumps(truth) if isinstance(truth, dict) else truth
    return [GradeItem(source, f"{THOUGHT}\n{answers[i % 2]}", truth) for i in range(8)]


def rate(work: Callable[[list[GradeItem]], None], batch: list[GradeItem], seconds: float) -> float:
    """Items a second, over at least ``seconds``, after a first batch that warms up."""
    work(batch[:2])
    done, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < seconds:
        work(batch)
        done += len(batch)
    return done / spent


def check(batch: list[GradeItem], verdicts: list[bool]) -> None:
    if verdicts != [i % 2 == 0 for i in range(len(batch))]:
        raise SystemExit(f"{batch[0].data_source}: wrong verdicts {verdicts}")


def loop(batch: list[GradeItem]) -> None:
    check(batch, [_score(item) for item in batch])


def _score(item: GradeItem) -> bool:
    return compute_score(item.data_source, item.response, item.ground_truth, item.extra_info).correct


def cold_programs(batch: list[GradeItem]) -> None:
    """What a plain loop does with programs: an interpreter for each test."""
    check(batch, [_cold(item) for item in batch])


def _cold(item: GradeItem) -> bool:
    code, truth = extract_code(item.response) or "", json.loads(item.ground_truth)
    if "inputs" in truth:
        pairs = zip(truth["inputs"], truth["outputs"], strict=True)
        return all(_interpreter(code, given).strip() == wanted.strip() for given, wanted in pairs)
    test = truth["test"] + "check(add)" if "test" in truth else "\n".join(truth["test_list"])
    return _interpreter(f"{code}\n{test}\nprint('passed')", "") == "passed\n"


def _interpreter(code: str, given: str) -> str:
    return subprocess.run(
        [sys.executable, "-I", "-c", code], input=given, capture_output=True, text=True, timeout=10, check=False
    ).stdout


def process_per_item(batch: list[GradeItem]) -> None:
    context = multiprocessing.get_context("fork")
    verdicts = []
    for item in batch:
        ours, theirs = context.Pipe()
        process = context.Process(target=_answer, args=(theirs, item))
        process.start()
        theirs.close()
        verdicts.append(ours.recv())
        process.join()
        ours.close()
    check(batch, verdicts)


def _answer(pipe: Any, item: GradeItem) -> None:
    if needs_sandbox(item.data_source):
        pipe.send(_cold(item))
    else:
        pipe.send(_score(item))


def pool_rate(batch: list[GradeItem], workers: int, seconds: float, plugin: str) -> float:
    big = batch * (64 if not needs_sandbox(batch[0].data_source) else 8)

    with GraderPool(RewardConfig(workers=workers), SandboxConfig(), [plugin]) as pool:

        async def measure() -> float:
            await pool.grade(batch[:2] * workers)
            done, started = 0, time.perf_counter()
            while (spent := time.perf_counter() - started) < seconds:
                check(big, [s.correct for s in await pool.grade(big)])
                done += len(big)
            return done / spent

        return asyncio.run(measure())


_NOW = "import time; print(time.monotonic())"


def sandbox_starts(runs: int = 100) -> dict[str, tuple[float, float]]:
    """Milliseconds (to a program's first instruction, to its result) in the warm sandbox and in a new process."""
    sandbox = open_sandbox(SandboxConfig())
    for _ in range(10):
        sandbox.run(_NOW)
    found: dict[str, tuple[float, float]] = {}
    for label, pause, count, run in (
        ("warm, slot idle before", 0.02, runs, lambda: sandbox.run(_NOW).stdout),
        ("warm, back to back", 0.0, runs, lambda: sandbox.run(_NOW).stdout),
        ("cold interpreter, not isolated", 0.0, runs // 2, lambda: _interpreter(_NOW, "")),
    ):
        times = [_start_and_end(run, pause) for _ in range(count)]
        found[label] = (statistics.median(a for a, _ in times), statistics.median(b for _, b in times))
    sandbox.close()
    return found


def _start_and_end(run: Callable[[], str], pause: float) -> tuple[float, float]:
    time.sleep(pause)
    asked = time.monotonic()
    first = float(run())
    return 1000 * (first - asked), 1000 * (time.monotonic() - asked)


def memory(count: int, plugin: str) -> Iterator[tuple[int, float]]:
    """(gradings done, MiB of this process and all below it), while ``count`` items of all kinds are graded."""
    kinds = ["gsm8k", "math", "kk", "choice", "math_dapo", "math_verify"]
    fast = [item for kind in kinds for item in items(kind)]
    programs = items("mbpp")
    with GraderPool(RewardConfig(), SandboxConfig(), [plugin]) as pool:
        done = 0
        while done < count:
            batch = fast * 20 + programs
            asyncio.run(pool.grade(batch))
            done += len(batch)
            if done // (count // 10 or 1) != (done - len(batch)) // (count // 10 or 1):
                yield done, _resident()


def _resident() -> float:
    this = psutil.Process()
    return sum(p.memory_info().rss for p in [this, *this.children(recursive=True)]) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--memory", type=int, default=0, help="gradings after which memory is looked at")
    parser.add_argument("--only", default="", help="graders, separated by commas")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else GRADERS.names()
    plugin = str(Path(__file__).resolve())
    console = Console(width=120)

    table = Table(title=f"gradings/s, {os.cpu_count()} cores")
    for column in (
        "grader",
        "runs in",
        "loop",
        "per item",
        "1 worker",
        "2 workers",
        "2 / 1",
        "2 / loop",
        "2 / per item",
    ):
        table.add_column(column, justify="left" if column in ("grader", "runs in") else "right")
    for name in names:
        batch = items(name)
        programs = needs_sandbox(batch[0].data_source)
        plain = rate(cold_programs if programs else loop, batch, args.seconds)
        per_item = rate(process_per_item, batch, args.seconds)
        cheap = bool(getattr(GRADERS.get(name), "cheap", False))
        one = pool_rate(batch, 1, args.seconds, plugin)
        two = one if cheap else pool_rate(batch, 2, args.seconds, plugin)
        place = "this process" if cheap else "sandbox" if programs else "workers"
        figures = [f"{value:,.0f}" for value in (plain, per_item, one, two)]
        table.add_row(name, place, *figures, *(f"{two / value:.2f}" for value in (one, plain, per_item)))
    console.print(table)

    starts = sandbox_starts()
    cold = starts["cold interpreter, not isolated"]
    table = Table(title="an empty program, ms (times faster than cold)")
    for column in ("", "to its first instruction", "to its result"):
        table.add_column(column, justify="right" if column else "left")
    for label, values in starts.items():
        table.add_row(label, *(f"{value:.2f} ({slow / value:.1f})" for value, slow in zip(values, cold, strict=True)))
    console.print(table)

    if args.memory:
        for done, size in memory(args.memory, plugin):
            console.print(f"{done:>9,} gradings: {size:,.0f} MiB")


if __name__ == "__main__":
    main()
else:  # imported by the pool's workers, which need the rows of the table
    for _name in GRADERS.names():
        DATA_SOURCES[f"bench/{_name}"] = _name
