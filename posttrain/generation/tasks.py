"""What `generate` samples from: the rows of a parquet, or the own tasks of an environment or an agent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.errors import ConfigError
from posttrain.core.types import Prompt
from posttrain.data.parquet import open_parquet, prompt_row, stream_prompts, write_rows

if TYPE_CHECKING:
    from posttrain.rollout.context import EpisodeContext

_FILE = "tasks.parquet"
"""Name of the file in the folder of the parts that has own tasks as rows: the finished file is these with columns
added."""


@dataclass(frozen=True)
class Tasks:
    """The prompts of a command, in their order."""

    name: str
    """How messages call them: the file, or who brings them."""
    count: int
    limit: int | None = None
    """Maximum rows of a file."""
    own: Sequence[Prompt] = field(default=(), repr=False)
    """None: they are rows of the file ``name``."""
    sha256: str | None = None
    """Digest of all own tasks, whatever the limit."""
    note: str = ""
    """What a person should know of them."""

    def prompts(self) -> Iterator[Prompt]:
        """Yield them. Those of a file are read as they are taken."""
        return iter(self.own) if self.own else stream_prompts(self.name, self.limit)

    def row(self, prompt: Prompt) -> int:
        """Return the place of a prompt."""
        return self._rows[prompt.index] if self.own else prompt.index

    @cached_property
    def _rows(self) -> dict[int, int]:
        return {prompt.index: row for row, prompt in enumerate(self.own)}

    def file(self, folder: Path) -> Path:
        """Return the parquet with their rows; it is written to ``folder`` where there is none."""
        if not self.own:
            return Path(self.name)
        write_rows(folder / _FILE, [prompt_row(prompt) for prompt in _storable(self.own)])
        return folder / _FILE


def rows_of(file: str, limit: int | None) -> Tasks:
    """Return the rows of a parquet. Raises ``DataError`` for one that cannot be read."""
    parquet = open_parquet(file, ())
    rows = int(parquet.metadata.num_rows)
    parquet.close()
    return Tasks(file, rows if limit is None else min(rows, limit), limit)


def own_tasks(env: EpisodeContext, limit: int | None) -> Tasks:
    """Return the tasks that the environment or the agent brings to validate on, or else those to train on.

    Raises:
        ConfigError: it has none.
        CodeError: its ``tasks`` fails, or one of them is no task.
    """
    brings = env.world or env.agents
    assert brings is not None
    found, note = brings.tasks("val"), "those to validate on"
    if not found:
        found, note = brings.tasks("train"), "those to train on, as it has none to validate on"
    if not found:
        raise ConfigError(f"{brings.name} has no tasks of its own", hint="give --data FILE.parquet")
    own = found[:limit]
    text = json.dumps([prompt_row(prompt) | {"index": prompt.index} for prompt in found], default=str)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return Tasks(brings.name, len(own), own=own, sha256=sha256, note=f"tasks of {brings.name}: {note}")


def _storable(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts with values that columns can hold: where those of one key have no type in common, JSON text.
    ``extra_info`` gets their index, by which `eval --compare` knows them again."""
    extras = [{"index": prompt.index, **prompt.extra_info} for prompt in prompts]
    names = dict.fromkeys(name for extra in extras for name in extra)
    columns = {name: iter(_column([extra.get(name) for extra in extras])) for name in names}
    truths = _column([prompt.ground_truth for prompt in prompts])
    return [
        replace(prompt, ground_truth=truth, extra_info={name: next(column) for name, column in columns.items()})
        for prompt, truth in zip(prompts, truths, strict=True)
    ]


def _column(values: Sequence[Any]) -> Sequence[Any]:
    import pyarrow as pa

    try:
        pa.array(values)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        return [None if value is None else json.dumps(value, default=str) for value in values]
    return values
