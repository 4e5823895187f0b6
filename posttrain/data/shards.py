"""Parquet shards: which rows there are, known from the footers alone, and any range of them read in little memory."""

from __future__ import annotations

import glob
import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.errors import DataError
from posttrain.core.registry import some
from posttrain.data import wanted
from posttrain.data.parquet import open_parquet

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 256
"""Most rows that a cursor has decoded at once. A row may be megabytes long."""


def shard_files(paths: str | Sequence[str], *, made_by: str = "posttrain prep") -> list[str]:
    """Return the files that `data.train` names: a file, a folder (its ``*.parquet``, at any depth), a glob, or several.

    Files of a folder or a glob are sorted by name; hidden ones are left out.

    Args:
        made_by: the command that writes such files, for hints.

    Raises:
        DataError: something named is not there, or has no parquet file in it.
    """
    named = [paths] if isinstance(paths, str) else list(paths)
    if not named or not all(named):
        raise DataError("no training data", hint=f"give --data FILE.parquet ({made_by} writes it)")
    files: list[str] = []
    for path in named:
        if os.path.isdir(path):
            found = sorted(str(f) for f in Path(path).rglob("*.parquet") if not f.name.startswith("."))
            if not found:
                hint = wanted.of_folder(path) or f"`{made_by}` writes some"
                raise DataError(f"{path}: no .parquet file in this folder", hint=hint)
            files += found
        elif os.path.exists(path) or not glob.has_magic(path):
            files.append(path)
        else:
            found = sorted(f for f in glob.glob(path, recursive=True) if Path(f).is_file())
            if not found:
                raise DataError(f"{path}: no file matches", hint="a glob is relative to the current folder")
            files += found
    return files


def one_file(paths: str | Sequence[str]) -> str:
    """Return the file that ``paths`` names, for a reader of one file. Raises ``DataError`` where it names several."""
    files = shard_files(paths)
    if len(files) > 1:
        raise DataError(f"{len(files)} files where one is read: {files[0]}, ...", hint="put the rows into one file")
    return files[0]


@dataclass(frozen=True)
class RowGroup:
    """One row group of one file."""

    path: str
    index: int
    """Its number in the file."""
    rows: int
    first: int
    """Its first row, counted over all shards."""


class Shards:
    """The row groups of some files, in their order. Rows are numbered from 0 over all files.

    Args:
        files: parquet files (see ``shard_files``).
        needed: columns that each must have.
        optional: columns that are read where a file has them; no other column is.

    Raises:
        DataError: a file is missing, unreadable, empty or lacks a column.
    """

    def __init__(self, files: Sequence[str], needed: Sequence[str], optional: Sequence[str] = ()) -> None:
        self.files = list(files)
        self.columns = (*needed, *optional)
        self.groups: list[RowGroup] = []
        self._starts: list[int] = []
        self.rows = 0
        for path in self.files:
            self._starts.append(self.rows)
            with open_parquet(path, needed) as file:
                for index in range(file.metadata.num_row_groups):
                    rows = file.metadata.row_group(index).num_rows
                    if rows:
                        self.groups.append(RowGroup(path, index, rows, self.rows))
                        self.rows += rows

    @property
    def name(self) -> str:
        """Return what messages call the files."""
        return some(self.files, 1)

    def locate(self, row: int) -> tuple[str, int]:
        """Return (file, number in that file) of a row."""
        shard = bisect_right(self._starts, row) - 1
        return self.files[shard], row - self._starts[shard]

    def fingerprint(self) -> str:
        """Return a hash that changes when a shard is added, taken away, renamed or written anew with other row
        groups."""
        digest = hashlib.sha256()
        for group in self.groups:
            digest.update(f"{Path(group.path).name}\0{group.index}\0{group.rows}\0".encode())
        return digest.hexdigest()


class ShardReader:
    """Reads ranges of row groups. The ranges of one group come cheap in ascending order, since its decoder stays where
    it stopped; a range before that starts the group again, and one far behind decodes what lies between.

    In memory are at most ``open_groups`` decoders, each with some pages and ``BATCH_ROWS`` rows.
    """

    def __init__(self, shards: Shards, open_groups: int) -> None:
        self._shards = shards
        self._open_groups = open_groups
        self._cursors: dict[int, _Cursor] = {}

    def read(self, group: int, start: int, stop: int) -> list[pa.RecordBatch]:
        """Return rows ``start:stop`` of a row group, in batches of at most ``BATCH_ROWS``. Raises ``DataError``."""
        cursor = self._cursors.pop(group, None)
        if cursor is None or cursor.at > start:
            cursor = _Cursor(self._shards.groups[group], self._shards.columns)
        cursor.skip(start - cursor.at)
        batches = list(cursor.take(stop - start))
        if cursor.at < self._shards.groups[group].rows:
            self._cursors[group] = cursor
            while len(self._cursors) > self._open_groups:
                del self._cursors[next(iter(self._cursors))]
        return batches


class _Cursor:
    """A place in a row group."""

    def __init__(self, group: RowGroup, columns: Sequence[str]) -> None:
        self.at = 0
        self._group = group
        # No prefetch of whole column chunks: a file may be a single row group.
        self._file = open_parquet(group.path, (), pre_buffer=False, buffer_size=1 << 20)
        kept = [name for name in columns if name in self._file.schema_arrow.names]
        self._batches: Iterator[Any] = self._file.iter_batches(BATCH_ROWS, row_groups=[group.index], columns=kept)
        self._rest: pa.RecordBatch | None = None

    def skip(self, rows: int) -> None:
        for _ in self.take(rows):
            pass

    def take(self, rows: int) -> Iterator[pa.RecordBatch]:
        while rows > 0:
            batch = self._rest if self._rest is not None else self._decode()
            self._rest = batch.slice(rows) if rows < batch.num_rows else None
            part = batch.slice(0, rows)
            self.at += part.num_rows
            rows -= part.num_rows
            yield part

    def _decode(self) -> pa.RecordBatch:
        import pyarrow as pa

        try:
            return next(self._batches)
        except (pa.ArrowException, OSError, StopIteration) as error:
            what = "it has fewer rows than before" if isinstance(error, StopIteration) else error
            raise DataError(
                f"{self._group.path}: unreadable after row {self.at} of row group {self._group.index}: {what}",
                hint="the file is damaged, or was written anew during the run",
            ) from error
