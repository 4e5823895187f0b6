#!/usr/bin/env python
"""Time of writing and reading rollout files, their size, and how long the writer holds up the event loop of the driver.

python scripts/bench_rollout_files.py [--trajectories 1000] [--tokens 2000]

Token ids follow Zipf's law over 151,643 ids, log-probabilities have the shape of a model's that is mostly sure, and the
text is random words, 4 characters a token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

from posttrain.core.types import Message, Prompt, Trajectory
from posttrain.rollout.files import RolloutFiles
from posttrain.rollout.writer import RolloutWriter

VOCABULARY, GROUP, REPEATS = 151_643, 8, 5


def trajectories(count: int, length: int) -> list[list[Trajectory]]:
    """Groups of ``GROUP`` episodes of one prompt."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("etaoinshrdlu"), 3)) for _ in range(5000)]
    asked = length // 10
    groups = []
    for index in range(count // GROUP):
        question: list[Message] = [{"role": "user", "content": " ".join(rng.choice(words, asked))}]
        prompt = Prompt(index, question, "openai/gsm8k", "8", {"index": index, "split": "train"})
        groups.append([episode(prompt, length, asked, words, rng) for _ in range(GROUP)])
    return groups


def episode(prompt: Prompt, length: int, asked: int, words: list[str], rng: np.random.Generator) -> Trajectory:
    mask = np.arange(length) >= asked
    answer: Message = {"role": "assistant", "content": " ".join(rng.choice(words, length - asked))}
    return Trajectory(
        prompt=prompt,
        tokens=(rng.zipf(1.3, length) % VOCABULARY).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -(rng.exponential(0.3, length) ** 2), 0.0).astype(np.float32),
        weight_version=np.where(mask, 12, -1).astype(np.int32),
        messages=[*prompt.messages, answer],
        stop_reason="stop",
        turns=1,
        tool_calls=0,
        seconds=3.2,
        prompt_length=asked,
        reward=float(rng.random() < 0.5),
        reward_parts={"score": 1.0, "correct": 1.0, "format": 1.0, "length": -0.3},
    )


async def write(folder: Path, groups: list[list[Trajectory]]) -> tuple[float, float, float]:
    """Seconds of one file, those of all threads' CPU, and the longest that the event loop was held up meanwhile."""
    longest, done = 0.0, False

    async def watch() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not done:
            await asyncio.sleep(0.001)
            longest, last = max(longest, time.perf_counter() - last), time.perf_counter()

    watching = asyncio.create_task(watch())
    start, cpu = time.perf_counter(), time.process_time()
    async with RolloutWriter(folder, 1, "none", 60.0) as writer:
        await writer.write(1, groups, temperature=1.0)
    seconds, cpu, done = time.perf_counter() - start, time.process_time() - cpu, True
    await watching
    return seconds, cpu, longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=2000)
    arguments = parser.parse_args()
    groups = trajectories(arguments.trajectories, arguments.tokens)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writes, cpus, waits = zip(*(asyncio.run(write(folder, groups)) for _ in range(REPEATS)), strict=True)
        files = RolloutFiles(name, vocabulary=VOCABULARY, tokenizer="none")
        reads = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            files.read(1)
            reads.append(time.perf_counter() - start)
        size = next(folder.iterdir()).stat().st_size
    tokens = sum(len(t.tokens) for group in groups for t in group)
    numbers = {
        "python": platform.python_version(),
        "pyarrow": version("pyarrow"),
        "trajectories": sum(map(len, groups)),
        "tokens": tokens,
        "write_ms": round(1000 * statistics.median(writes)),
        "write_cpu_ms": round(1000 * statistics.median(cpus)),
        "loop_held_up_ms": round(1000 * statistics.median(waits)),
        "read_ms": round(1000 * statistics.median(reads)),
        "bytes": size,
        "bytes_a_token": round(size / tokens, 2),
    }
    print(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
