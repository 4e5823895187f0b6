"""The advantages of a step's trajectories, in a file beside their rollout file: they are known only after the models
looked at what was sampled, when that file is on its way to the disk already.

The format is Arrow's own, so that the rollout files are the only parquet files of the folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.core.errors import DataError
from posttrain.core.files import replacing
from posttrain.core.types import Trajectory

SCHEMA = pa.schema([("row", pa.int32()), ("advantages", pa.list_(pa.float32()))])
"""Row of the trajectory in the step's rollout file; [T] advantage of each of its tokens, 0 where none was sampled."""


def advantages_file(rollouts: Path) -> Path:
    """Return the path of the advantages of a rollout file's trajectories."""
    return rollouts.with_suffix(".advantages.arrow")


def write_advantages(path: Path, groups: Sequence[Sequence[Trajectory]]) -> None:
    """Write those of the trajectories that have some, whole or not at all. Raises as ``replacing``."""
    episodes = [(row, t) for row, t in enumerate(t for group in groups for t in group) if t.advantages is not None]
    values = [t.advantages for _, t in episodes if t.advantages is not None]
    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    flat = np.concatenate([*values, np.empty(0, np.float32)]).astype(np.float32)
    lists = pa.ListArray.from_arrays(pa.array(ends), pa.array(flat))
    table = pa.table([pa.array([row for row, _ in episodes], pa.int32()), lists], schema=SCHEMA)
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with (
        replacing(path) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_file(sink, SCHEMA, options=options) as writer,
    ):
        writer.write_table(table)


def read_advantages(path: Path) -> dict[int, npt.NDArray[np.float32]]:
    """Return row -> [T] advantages; empty where there is no file. Raises ``DataError`` for a damaged file."""
    if not path.is_file():
        return {}
    try:
        with pa.OSFile(str(path), "rb") as source, pa.ipc.open_file(source) as reader:
            table = reader.read_all()
        if table.schema != SCHEMA:
            raise pa.ArrowInvalid(f"other columns: {', '.join(table.schema.names)}")
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: unreadable: {error}", hint="the file is damaged: delete it") from error
    lists = table["advantages"].combine_chunks()
    ends = np.cumsum(lists.value_lengths())
    return dict(zip(table["row"].to_pylist(), np.split(np.asarray(lists.flatten()), ends[:-1]), strict=True))
