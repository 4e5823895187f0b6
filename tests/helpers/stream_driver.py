"""A driver of a ``SampleStream`` that can be killed: it writes down every batch, and its state every few steps.

    python tests/helpers/stream_driver.py FOLDER WORKERS WORLD STEPS HOLD

After ``HOLD`` batches (0: never) it stops where it is, to be killed there. Each line of ``log.jsonl`` is
``[step, [[rows of rank 0], ...], digest]``. What was logged after the last state is not taken back, as with a run that
dies: it comes again.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.config import DataConfig
from posttrain.data.prefetch import Rendered, Row
from posttrain.data.shards import Shards
from posttrain.data.stream import SampleStream, TokenRow

BATCH = 8
SAVE_EVERY = 5


def write(folder: Path, sizes: Sequence[int], group: int = 10) -> list[tuple[int, int]]:
    """Shards of so many rows, in row groups of ``group``. Every seventh is one that is left out. Returns the rows."""
    folder.mkdir(exist_ok=True)
    rng = random.Random(1)
    rows: list[tuple[int, int]] = []
    for shard, size in enumerate(sizes):
        some = [(n, 0 if n % 7 == 3 else rng.randint(1, 30)) for n in range(len(rows), len(rows) + size)]
        table = pa.table({"messages": [list(row) for row in some], "other": [0] * size})
        pq.write_table(table, folder / f"shard-{shard}.parquet", row_group_size=group)
        rows += some
    return rows


class Numbers:
    """Renders a row ``{"messages": [number, length]}``, as ids that tell both. Rows of length 0 are left out; some take
    longer than others, so that processes overtake each other."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s

    def __call__(self, rows: Sequence[Row]) -> list[Rendered]:
        if rows[0].index % 3 == 0:
            time.sleep(self.pause_s)
        return [self.one(*row.columns["messages"]) for row in rows]

    def one(self, number: int, length: int) -> Rendered:
        if length == 0:
            return Rendered.nothing(nothing_to_learn=True)
        return Rendered(np.arange(number, number + length, dtype=np.int32), np.ones(length, dtype=np.bool_))


def open_stream(folder: Path, workers: int, pause_s: float = 0.0, **settings: object) -> SampleStream:
    settings = {"shuffle_rows": 64, "stream_above": 0, "prefetch": 3, "deadline_s": 60, **settings}
    cfg = DataConfig.model_validate({"workers": workers, **settings})
    shards = Shards(sorted(map(str, folder.glob("*.parquet"))), ("messages",), ("tools",))
    return SampleStream(shards, Numbers(pause_s), cfg, batch_size=BATCH, seed=7)


def digest(samples: Sequence[TokenRow]) -> str:
    content = hashlib.sha256()
    for sample in samples:
        content.update(sample.ids.tobytes())
        content.update(sample.mask.tobytes())
    return content.hexdigest()


def main(folder: Path, workers: int, world: int, steps: int, hold: int) -> None:
    from posttrain.data.pack import place

    with open_stream(folder, workers, 0.002) as stream, (folder / "log.jsonl").open("a") as log:
        step = done = 0
        if (folder / "state.json").is_file():
            saved = json.loads((folder / "state.json").read_text())
            step = saved["step"]
            stream.restore(saved["loader"])
        while step < steps:
            step, done = step + 1, done + 1
            samples = stream.next().samples
            placement = place([len(s.ids) for s in samples], ranks=world, token_budget=64)
            ranks = [[samples[b].row for micro in rank for b in micro] for rank in placement.parts]
            log.write(json.dumps([step, ranks, digest(samples)]) + "\n")
            log.flush()
            if done == hold:
                signal.pause()
            if step % SAVE_EVERY == 0:
                (folder / "state.tmp").write_text(json.dumps({"step": step, "loader": stream.state()}))
                os.replace(folder / "state.tmp", folder / "state.json")


if __name__ == "__main__":
    # Tokenizing processes import what they are given from its module, and no program's main one.
    from tests.helpers.stream_driver import main

    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
