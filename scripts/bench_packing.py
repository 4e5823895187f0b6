"""How full token budgets get: best-fit decreasing against first fit, against padding, and against equal micro-batches.

    python scripts/bench_packing.py [--data FOLDER] [--budget 8192 ...] [--json]

Lengths are those of real tool-calling conversations (Glaive, reasoning with tools), rendered with a Qwen tokenizer and
its chat template. The folder (``POSTTRAIN_TEST_DATA``, else ``../shared/data``) holds them in ``tools`` and
``tokenizer``. As the files are small, a data set of 20,000 conversations is drawn from their lengths with a fixed seed;
the row `as they are` has no such step, and the last bin then costs a large part.

    best fit    posttrain.data.bins.best_fit
    first fit   in the order of the file, each into the first bin that has space
    in order    each into the last bin, or else a new one: concatenation without cutting
    padding     as many rows at once as the budget holds when each is padded to the longest of them, in file order
    sorted      the same, after sorting by length

The second table is one optimizer step: micro-batches that a worker runs, equal ones against `place`, which takes
best-fit ones where equal ones do not fit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from posttrain.data.bins import best_fit, partition
from posttrain.data.chat import render_chats
from posttrain.data.pack import place

SAMPLED = 20_000
BATCH, RANKS = 128, 4
"""Conversations of an optimizer step, and workers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    default = os.environ.get("POSTTRAIN_TEST_DATA") or str(Path(__file__).resolve().parents[2] / "shared" / "data")
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--budget", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not (args.data / "tools").is_dir():
        sys.exit(f"no folder {args.data / 'tools'}; give --data")
    real = real_lengths(args.data)
    result = {"conversations": len(real), "mean": sum(real) / len(real), "longest": max(real)}
    result["fill"] = fills(real, args.budget)
    result["micro_batches"] = [micro_batches(real, budget) for budget in args.budget]
    if args.json:
        print(json.dumps(result))
    else:
        show(result)


# ---------------------------------------------------------------------- lengths


def real_lengths(data: Path) -> list[int]:
    """Tokens of each conversation."""
    tokenizer = qwen_tokenizer(data / "tokenizer")
    chats = render_chats(list(conversations(data / "tools")), tokenizer)
    return [len(chat.ids) for chat in chats]


def conversations(folder: Path) -> Iterator[tuple[Sequence[Any], Any]]:
    """(messages, tools) of the conversation files, as they are: the renderer reads both styles."""
    for row in json.loads((folder / "glaive_toolcall_en_demo.json").read_text(encoding="utf-8")):
        yield row["conversations"], row.get("tools")
    for line in (folder / "reason_tool_use_demo_50.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield row["messages"], row.get("tools")


def qwen_tokenizer(folder: Path) -> Any:
    """The tokenizer of Qwen3 from its parts."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as made:
        for name in ("vocab.json", "merges.txt"):
            (Path(made) / name).write_bytes((folder / name).read_bytes())
        (Path(made) / "tokenizer_config.json").write_bytes((folder / "qwen3_tokenizer_config.json").read_bytes())
        return AutoTokenizer.from_pretrained(made)


# ---------------------------------------------------------------------- ways to fill


def first_fit(lengths: Sequence[int], budget: int) -> int:
    """Bins that first fit needs."""
    left: list[int] = []
    for n in lengths:
        at = next((i for i, free in enumerate(left) if free >= n), None)
        if at is None:
            left.append(budget - n)
        else:
            left[at] -= n
    return len(left)


def in_order(lengths: Sequence[int], budget: int) -> int:
    """Bins of conversations laid end to end, a new one wherever the next does not fit."""
    bins, free = 0, 0
    for n in lengths:
        if n > free:
            bins, free = bins + 1, budget
        free -= n
    return bins


def padded(lengths: Sequence[int], budget: int) -> int:
    """Batches of rows that are padded to their longest."""
    batches, rows, longest = 1, 0, 0
    for n in lengths:
        longest = max(longest, n)
        rows += 1
        if rows * longest > budget:
            batches, rows, longest = batches + 1, 1, n
    return batches


WAYS: dict[str, Callable[[Sequence[int], int], int]] = {
    "best fit": lambda lengths, budget: len(best_fit(lengths, budget).bins),
    "first fit": first_fit,
    "in order": in_order,
    "sorted": lambda lengths, budget: padded(sorted(lengths), budget),
    "padding": padded,
}


def fills(real: Sequence[int], budgets: Sequence[int]) -> list[dict[str, Any]]:
    """For each budget and data set, the share of each way's bins that holds tokens."""
    rows = []
    for budget in budgets:
        cut = [min(n, budget) for n in real]  # as `data.max_length` with truncation
        for name, lengths in (
            (f"{SAMPLED:,} drawn", random.Random(0).choices(cut, k=SAMPLED)),
            ("as they are", cut),
        ):
            start = time.perf_counter()
            best_fit(lengths, budget)
            row: dict[str, Any] = {"budget": budget, "data": name, "seconds": time.perf_counter() - start}
            rows.append(row | {way: sum(lengths) / (count(lengths, budget) * budget) for way, count in WAYS.items()})
    return rows


def micro_batches(real: Sequence[int], budget: int, steps: int = 100) -> dict[str, Any]:
    """Mean micro-batches a worker and step, equal ones only and as `place` makes them; how equal the workers are."""
    rng = random.Random(0)
    equal = mixed = spread = tokens = 0.0
    for _ in range(steps):
        lengths = [min(n, budget) for n in rng.choices(real, k=BATCH)]
        parts = place(lengths, ranks=RANKS, token_budget=budget).parts
        mixed += len(parts[0])
        equal += equal_only(lengths, budget)
        loads = [sum(lengths[b] for micro in rank for b in micro) for rank in parts]
        spread += max(loads) / (sum(loads) / RANKS)
        tokens += sum(loads)
    return {
        "budget": budget,
        "equal": equal / steps,
        "place": mixed / steps,
        "fewest": tokens / steps / RANKS / budget,
        "heaviest worker": spread / steps,
    }


def equal_only(lengths: Sequence[int], budget: int) -> int:
    """Micro-batches a worker where all of them are of equal cost."""
    shares = partition(lengths, RANKS)
    bins = 1
    while True:
        cuts = [
            [sum(lengths[share[i]] for i in part) for part in partition([lengths[b] for b in share], bins)]
            for share in shares
        ]
        if all(n <= budget for cut in cuts for n in cut):
            return bins
        bins += 1


def show(result: dict[str, Any]) -> None:
    console = Console()
    console.print(
        f"{result['conversations']} conversations, {result['mean']:.0f} tokens on average, {result['longest']} at most"
    )
    table = Table("budget", "data", *WAYS, "best fit, s")
    for row in result["fill"]:
        table.add_row(str(row["budget"]), row["data"], *(f"{row[way]:.1%}" for way in WAYS), f"{row['seconds']:.3f}")
    console.print(table)
    table = Table("budget", "equal", "place", "fewest", "heaviest worker")
    for row in result["micro_batches"]:
        table.add_row(
            str(row["budget"]),
            *(f"{row[key]:.2f}" for key in ("equal", "place", "fewest")),
            f"{row['heaviest worker']:.4f}",
        )
    console.print(table, f"{BATCH} conversations a step on {RANKS} workers", sep="\n")


if __name__ == "__main__":
    main()
