"""CPU time of vLLM's two processes for what is sampled, token by token and in chunks: no model, and no GPU.

    python scripts/bench_vllm_outputs.py --requests 1024 --new 64

Requests go through vLLM's scheduler or ours with a table of tokens in place of the model, and their outputs through
vLLM's messages to its reader. Microseconds of a sampled token: the scheduler's choice and update, and writing messages,
are of the process with the model; reading them is of the process that asked. Both schedulers play in turns.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from tests.helpers.vllm_table import Played, config_of, play, scheduler_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    import vllm
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from posttrain.engines.vllm_scheduler import ChunkScheduler

    schedulers = {"vLLM's": AsyncScheduler, "ours": ChunkScheduler}
    found: dict[str, list[Played]] = {name: [] for name in schedulers}
    blocks = args.requests * (1 + (args.prompt + args.new) // 16) + 1
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(Path(folder), args.requests, step_tokens=8192)
        gc.freeze()  # as the engine does
        for _ in range(args.rounds):
            for name, cls in schedulers.items():
                scheduler = scheduler_of(cls, config, blocks)
                found[name].append(play(scheduler, [args.prompt] * args.requests, args.new, stop=False))
    title = f"vLLM {vllm.__version__}, us a token of each round"
    table = Table("scheduler", "outputs sent", "choice", "update", "writing", "reading", title=title)
    for name, rounds in found.items():

        def each(what: str, rounds: list[Played] = rounds) -> str:
            return ", ".join(f"{getattr(r, what) / args.requests / args.new * 1e6:.1f}" for r in rounds)

        table.add_row(
            name, f"{rounds[0].handed_on:,}", each("schedule_s"), each("update_s"), each("write_s"), each("read_s")
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
