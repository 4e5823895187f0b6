"""What `generate` writes of a prompt's episodes: the columns, and the part files that hold them until all are there.

    <out>.parts/
        manifest.json       what the rows depend on: settings, data, seeds
        part-000000.parquet rows in the order in which they were finished, with the column `row`
        .lock               held by the process that writes

A part is written aside and renamed, so a process may end at any moment: what it has written is found again, and what it
has not is not there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from posttrain.config.keys import current_keys
from posttrain.core.errors import ConfigError, DataError
from posttrain.core.files import write_text, writing
from posttrain.core.text import encodable
from posttrain.data.parquet import append_columns, write_table
from posttrain.rewards.compose import own_verdict
from posttrain.runs.lock import RunLock

if TYPE_CHECKING:
    import pyarrow as pa

    from posttrain.core.types import Trajectory
    from posttrain.rollout.context import EpisodeContext

MANIFEST = "manifest.json"
KEY = b"posttrain.generation.command"
"""The manifest in the metadata of the finished file."""
TELLING = "tells_answer"
"""Key of the manifest: names of the tools that told the model whether its answer was right."""
_BATCH_BYTES = 64 << 20
"""About the most bytes of responses in memory while the file is put together."""
_TABLES = 8
"""Parts in memory then."""

VERDICTS = ("env_scores", "env_correct")
"""Columns of what an environment or an agent says of its episodes; null where it gave no reward."""
TOOL_IMAGES = "tool_images"
"""Column of the images that tools gave, in the order in which the conversations name them after the prompt's."""
BRANCHES = "branches"
"""Column of the further branches of an agent's episodes."""
_FURTHER = (*VERDICTS, TOOL_IMAGES, BRANCHES)

Row = tuple[int, Sequence["Trajectory"]]
"""A prompt's row number, and its episodes."""


def further_columns(env: EpisodeContext) -> tuple[str, ...]:
    """Return the columns that a file has beside the usual ones, by what plays its episodes."""
    if env.agents is not None:
        return (*VERDICTS, BRANCHES)
    if env.world is not None:
        return VERDICTS
    return (TOOL_IMAGES,) if env.vision is not None and env.tools else ()


def response_schema(further: Sequence[str] = ()) -> pa.Schema:
    """Return the schema of a part. But for ``row`` each column is a list with one element a response.

    Args:
        further: see ``further_columns``.
    """
    import pyarrow as pa

    from posttrain.rollout.files import TRAJECTORY

    ids, text = pa.list_(pa.int32()), pa.string()
    columns = {
        "responses": text, "response_ids": ids, "response_masks": pa.list_(pa.bool_()), "conversations": text,
        "stop_reasons": text, "num_turns": pa.int32(), "errors": text,
    }  # fmt: skip
    more = {"env_scores": pa.float64(), "env_correct": pa.bool_(), BRANCHES: text}
    more[TOOL_IMAGES] = TRAJECTORY[TOOL_IMAGES].type
    columns |= {name: more[name] for name in further}
    return pa.schema([("row", pa.int64()), *((name, pa.list_(kind)) for name, kind in columns.items())])


def response_table(rows: Sequence[Row], further: Sequence[str] = ()) -> pa.Table:
    """Groups as a table of ``response_schema``."""
    import pyarrow as pa

    groups = [group for _, group in rows]
    verdicts = [[None if t.error is not None else own_verdict(t) for t in g] for g in groups]
    columns: dict[str, list[Any]] = {
        "row": [row for row, _ in rows],
        "responses": [[encodable(t.response_text) for t in g] for g in groups],
        "response_ids": [[t.tokens[t.prompt_length :] for t in g] for g in groups],
        "response_masks": [[t.loss_mask[t.prompt_length :] for t in g] for g in groups],
        "conversations": [[encodable(_json(t.messages)) for t in g] for g in groups],
        "stop_reasons": [[t.stop_reason for t in g] for g in groups],
        "num_turns": [[t.turns for t in g] for g in groups],
        "errors": [[None if t.error is None else encodable(t.error) for t in g] for g in groups],
        "env_scores": [[None if verdict is None else verdict.score for verdict in g] for g in verdicts],
        "env_correct": [[None if verdict is None else verdict.correct for verdict in g] for g in verdicts],
        TOOL_IMAGES: [[t.tool_images for t in g] for g in groups],
        BRANCHES: [[encodable(_json([*map(_branch, t.branches)])) for t in g] for g in groups],
    }
    schema = response_schema(further)
    return pa.table({name: columns[name] for name in schema.names}, schema=schema)


def _branch(branch: Trajectory) -> dict[str, Any]:
    """Return what is written of a further branch: its messages, how many of them were given to it, and how many tokens
    were sampled in it."""
    return {
        "messages": branch.messages,
        "given": len(branch.prompt.messages),
        "sampled_tokens": int(branch.loss_mask.sum()),
    }


def _json(value: Any) -> str:
    """Return JSON text. What JSON has no form for, such as metadata of an environment's messages, is text."""
    return json.dumps(value, ensure_ascii=False, default=str)


def manifest_of(
    settings: Mapping[str, Any], data: str | Path, version: str, sha256: str | None = None
) -> dict[str, Any]:
    """What rows depend on, as JSON.

    Args:
        data: the file of the prompts, or a name for them.
        sha256: of the prompts; None: of the file.

    Raises:
        DataError: the file cannot be read.
    """
    if sha256 is None:
        try:
            with Path(data).open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"{data}: cannot be read: {error.strerror}", hint="check the path") from error
    plain: dict[str, Any] = json.loads(json.dumps(dict(settings), default=str))
    return {"posttrain": version, "data": {"path": str(data), "sha256": sha256}, "settings": plain}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`key: old -> new` for what rows of two manifests do not have in common. The version is none of it."""
    before, now = current_keys(old.get("settings", {}), "the settings of earlier responses"), new["settings"]
    keys = [key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key)]
    lines = [f"{key}: {before.get(key, 'none')!r} -> {now.get(key, 'none')!r}" for key in keys]
    if old.get("data", {}).get("sha256") != new["data"]["sha256"]:
        lines.append(f"generate.data: the content of {new['data']['path']} is another")
    return lines


def manifest_in(file: Path) -> dict[str, Any] | None:
    """The manifest that a finished file was made with; None: it is none of ours."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_schema(file).metadata or {}
        found = json.loads(metadata[KEY])
    except (OSError, pa.ArrowException, KeyError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def telling_tools(file: Path) -> list[str]:
    """The tools that told the model whether its answers in ``file`` were right; none where the file does not say."""
    return list((manifest_in(file) or {}).get(TELLING, ()))


class ResponseParts:
    """The finished rows of one output file. Make it with ``open``; ``close`` it.

    Memory: 8 bytes for each prompt, beside the rows that are being written.
    """

    def __init__(
        self, folder: Path, manifest: dict[str, Any], count: int, lock: RunLock, further: Sequence[str] = ()
    ) -> None:
        self.folder, self.manifest, self.further = folder, manifest, further
        self.notes: list[str] = []
        """What a person should know of the parts that were found."""
        self._lock = lock
        self._part = np.full(count, -1, np.int32)
        self._offset = np.zeros(count, np.int32)
        self._next = 0

    @classmethod
    def open(cls, out: Path, manifest: dict[str, Any], count: int, further: Sequence[str] = ()) -> ResponseParts:
        """The parts of ``out``: new, or those of a process that was ended.

        Args:
            count: prompts.
            further: columns beside the usual ones (``further_columns``).

        Raises:
            ConfigError: they are in use, were made with other settings or data, or cannot be written there.
            RunError: the disk is full or broken.
        """
        folder = parts_folder(out)
        with writing(folder, hint="choose another --out"):
            shutil.rmtree(_gone(folder), ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            lock = RunLock.take(folder)
        try:
            parts = cls(folder, manifest, count, lock, further)
            parts._find()
        except BaseException:
            lock.release()
            raise
        return parts

    @classmethod
    def goes_on(cls, out: Path, manifest: Mapping[str, Any]) -> bool:
        """Return whether there are parts of ``out`` that a command with this manifest and `--overwrite` has begun: it
        goes on with them, after Ctrl-C or a full disk."""
        try:
            stored = json.loads((parts_folder(out) / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return stored.get("overwrite") is True and not differences(stored, manifest)

    @classmethod
    def discard(cls, out: Path) -> None:
        """Delete the parts of ``out``. Raises ``ConfigError`` where they are in use."""
        cls(parts_folder(out), {}, 0, RunLock.take(parts_folder(out))).remove()

    @property
    def done(self) -> npt.NDArray[np.bool_]:
        """[count] which rows are there."""
        return self._part >= 0

    def _find(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        for stray in self.folder.glob(".*.tmp"):
            stray.unlink()
        file = self.folder / MANIFEST
        if not file.is_file():
            write_text(file, json.dumps(self.manifest, indent=1) + "\n")
            return
        stored = json.loads(file.read_text(encoding="utf-8"))
        if lines := differences(stored, self.manifest):
            raise ConfigError(
                f"{self.folder} holds rows that were sampled with other settings:\n  " + "\n  ".join(lines[:5]),
                hint="give the same values to go on, --overwrite to begin again, or another --out (or --name)",
            )
        for path in sorted(self.folder.glob("part-*.parquet")):
            number = int(path.stem.removeprefix("part-"))
            self._next = max(self._next, number + 1)
            try:
                rows = pq.read_table(path, columns=["row"])["row"].to_numpy()
            except (OSError, pa.ArrowException) as error:
                path.unlink()
                self.notes.append(f"{path} could not be read, its rows are sampled again: {error}")
                continue
            self._remember(number, rows)

    def _remember(self, number: int, rows: npt.NDArray[np.int64]) -> None:
        kept = rows < len(self._part)  # `generate.limit` may be lower now
        self._part[rows[kept]] = number
        self._offset[rows[kept]] = np.arange(len(rows), dtype=np.int32)[kept]

    def write(self, rows: Sequence[Row]) -> None:
        """Keep finished rows, in one part. It may run in a thread, one at a time. Raises as ``write_table``."""
        write_table(self._path(self._next), response_table(rows, self.further))
        self._remember(self._next, np.array([row for row, _ in rows], np.int64))
        self._next += 1

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number:06d}.parquet"

    def finish(self, data: str | Path, out: Path) -> None:
        """Write ``out``: the rows of ``data`` in their order, with their responses. All must be there; parts then go.

        Raises:
            RunError, ConfigError: it cannot be written; the parts stay.
        """
        count = len(self._part)
        bytes_of_row = max(1, sum(p.stat().st_size for p in self.folder.glob("part-*.parquet")) // max(1, count))
        rows_at_once = max(1, _BATCH_BYTES // (8 * bytes_of_row))  # they are compressed
        tables: OrderedDict[int, pa.Table] = OrderedDict()
        schema = response_schema(self.further).remove(0)
        append_columns(
            data, out, count, lambda start, stop: self._rows(start, stop, tables), schema,
            rows_at_once=rows_at_once, metadata={KEY: json.dumps(self.manifest).encode()},
            without=_FURTHER,  # those of the responses that prompts came with: `eval` would take them for these ones'
        )  # fmt: skip
        self.remove()

    def _rows(self, start: int, stop: int, tables: OrderedDict[int, pa.Table]) -> pa.Table:
        """The responses of some rows. ``tables`` keeps what was read last: parts are nearly in order."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        numbers, where = np.unique(self._part[start:stop], return_inverse=True)
        needed = []
        for number in numbers.tolist():
            if number not in tables:
                tables[number] = pq.read_table(self._path(number)).drop_columns(["row"])
            tables.move_to_end(number)
            needed.append(tables[number])
        begins = np.cumsum([0, *(table.num_rows for table in needed[:-1])])
        found = pa.concat_tables(needed).take(pa.array(begins[where] + self._offset[start:stop]))
        while len(tables) > _TABLES:
            tables.popitem(last=False)
        return found

    def remove(self) -> None:
        """Delete the folder, and with it the lock. Under its name it is whole, or is not there."""
        gone = _gone(self.folder)
        os.replace(self.folder, gone)
        shutil.rmtree(gone)
        self._lock.release()

    def close(self) -> None:
        """Let another process go on."""
        self._lock.release()


def parts_folder(out: Path) -> Path:
    """Where the rows of ``out`` are until all are there."""
    return out.with_name(f"{out.name}.parts")


def _gone(folder: Path) -> Path:
    """Where a folder of parts is while it is deleted."""
    return folder.with_name(f"{folder.name}.gone")
