"""A run's metrics and rollouts as pandas frames, read from its folder, of a run that is going on too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.errors import DataError
from posttrain.tracking.report.folder import RunFolder

if TYPE_CHECKING:
    import pandas as pd

_JSON = ("prompt", "ground_truth", "extra_info", "messages")
"""Columns that hold JSON text in the files."""


@dataclass(frozen=True)
class LoadedRun:
    """A run as its folder describes it at the moment at which it was loaded. Load it again to see later steps."""

    folder: RunFolder

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self.folder.path

    @property
    def status(self) -> str:
        """`running`, `finished`, `failed` or `interrupted`, as the run recorded it. A run that was killed outright is
        recorded as `running`."""
        return str(self.folder.state["status"])

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config by dotted key, without keys that have no value."""
        return dict(self.folder.config)

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """One row a step (the index), one column of float64 a metric (docs/metrics.md); NaN where a step lacks it."""
        import pandas as pd

        rows = [{name: float(value) for name, value in row.items()} for row in self.folder.rows]
        frame = pd.DataFrame.from_records(rows, columns=None if rows else ["step"])
        return frame.astype({"step": int}).set_index("step")

    @cached_property
    def rollouts(self) -> pd.DataFrame:
        """One row a recorded rollout, training and validation, in order of step and group.

        The columns are those of the rollout files but for the ones with a value a token or a turn, JSON text decoded;
        ``response`` is what the assistant wrote, its turns joined by blank lines. The frame is empty where the run has
        recorded none.

        Raises:
            DataError: a file cannot be read.
        """
        import pandas as pd
        import pyarrow as pa

        from posttrain.rollout.files import rollout_schema, rollouts_folder

        scalars = [field.name for field in rollout_schema() if not pa.types.is_list(field.type)]
        columns = [*scalars, "response"]
        parts = [_read(file, scalars) for file in sorted(rollouts_folder(self.path).glob("*.parquet"))]
        if not parts:
            return pd.DataFrame(columns=columns)
        frame = pd.concat(parts, ignore_index=True)
        return frame.sort_values(["step", "kind", "group"], kind="stable", ignore_index=True)

    def __repr__(self) -> str:
        return f"LoadedRun({str(self.path)!r}, status={self.status!r}, steps={len(self.folder.rows)})"


def _read(file: Path, columns: Sequence[str]) -> pd.DataFrame:
    """Return the rollouts of one file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file, columns=list(columns))
        frame = table.to_pandas(maps_as_pydicts="strict")
        for name in _JSON:
            frame[name] = frame[name].map(json.loads)
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise DataError(f"{file}: unreadable: {error}", hint="the file is damaged: delete it") from error
    frame["response"] = [
        _response(said[len(asked) :]) for said, asked in zip(frame["messages"], frame["prompt"], strict=True)
    ]
    return frame


def _response(messages: Sequence[dict[str, Any]]) -> str:
    return "\n\n".join(m["content"] for m in messages if m["role"] == "assistant" and m.get("content"))
