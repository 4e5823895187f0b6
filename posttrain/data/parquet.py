"""RLHF, SFT and preference rows in parquet: writing them, and reading them back typed and checked
(``posttrain.data.schema``, ``posttrain.data.preferences``).

Two things have no fixed shape, which parquet needs, and are therefore stored as JSON text: the ``arguments`` of tool
calls and the ``tools`` column. Files of others may hold them as structs; reading accepts both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from posttrain.core.errors import DataError
from posttrain.core.files import replacing
from posttrain.core.registry import nearest
from posttrain.core.types import Message, Prompt, ToolSchema
from posttrain.data import wanted
from posttrain.data.preferences import Preference, PreferenceRow
from posttrain.data.schema import BaseRow, Conversation, RlhfRow, RowError, SftRow, parse_row

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

__all__ = [
    "Conversation",
    "Preference",
    "append_columns",
    "located",
    "open_parquet",
    "parse_conversation",
    "parse_preference",
    "parse_prompt",
    "preference_row",
    "prompt_row",
    "read_conversations",
    "read_preferences",
    "read_prompts",
    "read_rows",
    "read_typed",
    "refuse_images",
    "sft_row",
    "stream_prompts",
    "tools_text",
    "write_rows",
    "write_table",
]

_BATCH = 1024
"""Most rows in memory as Python objects at once."""
_GROUP_ROWS, _GROUP_BYTES = 8192, 32 << 20
"""Most rows, and about the most bytes, of a row group: what a reader that streams holds at once."""

_TEXT = json.JSONEncoder(ensure_ascii=False)
_MOST_TOOLS = 256
_TOOLS_TEXTS: dict[tuple[int, ...], tuple[Sequence[ToolSchema], str]] = {}

R = TypeVar("R", RlhfRow, SftRow, PreferenceRow)
_RLHF = (wanted.RLHF, ("ability", "extra_info", "tools", "tools_kwargs", "images"))
_SFT = (wanted.SFT, ("tools", "images"))
_PREFERENCE = (wanted.PREFERENCE, ("prompt", "tools", "images"))
"""Columns that a row must have, and that it may have."""
_NEEDED: dict[type[BaseRow], tuple[str, ...]] = {
    RlhfRow: _RLHF[0], SftRow: _SFT[0], PreferenceRow: _PREFERENCE[0],
}  # fmt: skip


def sft_row(conversation: Conversation) -> dict[str, Any]:
    """Return a conversation as a row for ``write_rows``."""
    row = {"messages": _message_rows(conversation.messages), "tools": tools_text(conversation.tools)}
    return {**row, "images": conversation.images} if conversation.images else row


def preference_row(pair: Preference) -> dict[str, Any]:
    """Return a pair of answers as a row for ``write_rows``."""
    row: dict[str, Any] = {name: _message_rows(getattr(pair, name)) for name in ("prompt", "chosen", "rejected")}
    row["tools"] = tools_text(pair.tools)
    return {**row, "images": pair.images} if pair.images else row


def prompt_row(prompt: Prompt) -> dict[str, Any]:
    """Return a prompt as a row for ``write_rows``."""
    row: dict[str, Any] = {
        "data_source": prompt.data_source,
        "prompt": _message_rows(prompt.messages),
        "reward_model": {"style": "rule", "ground_truth": prompt.ground_truth},
        "extra_info": prompt.extra_info,
    }
    return {**row, "images": prompt.images} if prompt.images else row


def _message_rows(messages: Sequence[Message]) -> list[dict[str, Any]]:
    rows = []
    for message in messages:
        row: dict[str, Any] = dict(message)
        if "tool_calls" in row:
            row["tool_calls"] = [_with_text_arguments(call) for call in row["tool_calls"]]
        rows.append(row)
    return rows


def tools_text(tools: Sequence[ToolSchema]) -> str | None:
    """Return function schemas as the text of the ``tools`` column; None where there are none."""
    if not tools:
        return None
    # Most rows have the same tools. They are kept beside their text, so that no other object gets their ids.
    key = tuple(map(id, tools))
    if key not in _TOOLS_TEXTS:
        if len(_TOOLS_TEXTS) == _MOST_TOOLS:
            _TOOLS_TEXTS.clear()
        _TOOLS_TEXTS[key] = (tuple(tools), _TEXT.encode(tools))
    return _TOOLS_TEXTS[key][1]


def write_rows(path: str | Path, rows: Iterable[dict[str, Any]], schema: type[BaseRow] | None = None) -> int:
    """Write rows to one parquet file, whole or not at all. Returns the number of rows.

    Nested dicts become structs with the union of the rows' keys; a key that a row lacks is null there. Columns that the
    schema does not know are written too.

    Args:
        schema: what each row must be; None: anything.

    Raises:
        DataError: a row breaks the schema, or values of one column have types that do not go together.
        RunError, ConfigError: the file cannot be written (``files.replacing``).
    """
    import pyarrow as pa

    kept = []
    for index, row in enumerate(rows):
        if schema is not None:
            _PARSERS[schema](row, path, index)
        kept.append(row)
    arrays: dict[str, Any] = {}
    for column in dict.fromkeys(column for row in kept for column in row):
        values = [row.get(column) for row in kept]
        try:
            arrays[column] = pa.array(values)
            if _has_empty_struct(arrays[column].type):
                # Parquet has no struct without fields, so an empty dict is written as null.
                arrays[column] = pa.array([_empty_as_none(value) for value in values])
        except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
            raise DataError(
                f"{path}: column {column!r} cannot be written: {error}",
                hint="give each column one type, and whole numbers of more than 64 bits as text",
            ) from error
    write_table(Path(path), pa.table(arrays))
    return len(kept)


def parse_prompt(raw: dict[str, Any], path: str | Path, index: int) -> Prompt:
    """Return a raw RLHF row, typed and checked. Raises ``DataError`` naming file, row and column."""
    with located(path, index):
        return parse_row(RlhfRow, raw).typed(index)


def parse_conversation(raw: dict[str, Any], path: str | Path, index: int) -> Conversation:
    """Return a raw SFT row, typed and checked. Raises ``DataError`` naming file, row and column."""
    with located(path, index):
        return parse_row(SftRow, raw).typed(index)


def parse_preference(raw: dict[str, Any], path: str | Path, index: int) -> Preference:
    """Return a raw preference row, typed and checked. Raises ``DataError`` naming file, row and column."""
    with located(path, index):
        return parse_row(PreferenceRow, raw).typed(index)


_PARSERS: dict[type[BaseRow], Callable[[dict[str, Any], str | Path, int], object]] = {
    RlhfRow: parse_prompt, SftRow: parse_conversation, PreferenceRow: parse_preference,
}  # fmt: skip


def refuse_images(row: Prompt | Conversation | Preference, path: str | Path, index: int) -> None:
    """Raise ``DataError`` for a row with images where they are not read: they would be the word ``<image>``."""
    if row.images:
        raise DataError(
            f"{path}: row {index}, column 'images': it has {len(row.images)}, and they would not be read here",
            hint="take a model that sees (docs/vision.md says where images work), or leave such rows out",
        )


@contextmanager
def located(path: str | Path, index: int) -> Iterator[None]:
    """Turn a ``RowError`` into a ``DataError`` that names file and row too."""
    try:
        yield
    except RowError as error:
        raise DataError(f"{path}: row {index}, {error}", hint=error.hint) from None


def _has_empty_struct(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_struct(kind) and kind.num_fields == 0:
        return True
    return any(_has_empty_struct(kind.field(i).type) for i in range(kind.num_fields))


def append_columns(
    source: str | Path,
    target: Path,
    count: int,
    columns: Callable[[int, int], pa.Table],
    schema: pa.Schema,
    *,
    rows_at_once: int = _BATCH,
    metadata: Mapping[bytes, bytes] | None = None,
    without: Sequence[str] = (),
) -> None:
    """Write the first ``count`` rows of ``source`` with columns added or replaced, some rows at a time: the file is
    there whole or not at all.

    Args:
        columns: gives the new columns of the rows from ``start`` up to ``stop``.
        schema: of the new columns.
        rows_at_once: at most.
        metadata: more of it, for the whole file.
        without: columns of ``source`` that are left out.

    Raises:
        DataError: ``source`` cannot be read, or its rows do not go with the new columns.
        RunError, ConfigError: ``target`` cannot be written (``files.replacing``).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = open_parquet(source, ())
    kept = [field for field in file.schema_arrow if field.name not in (*schema.names, *without)]
    whole = pa.schema([*kept, *schema], {**(file.schema_arrow.metadata or {}), **(metadata or {})})
    # pandas' own account of the columns would be of the old ones.
    whole = whole.with_metadata({key: value for key, value in whole.metadata.items() if key != b"pandas"})
    start = 0
    try:
        with replacing(target) as temporary, pq.ParquetWriter(temporary, whole) as writer:
            for batch in file.iter_batches(min(rows_at_once, _BATCH), columns=[field.name for field in kept]):
                stop = min(count, start + batch.num_rows)
                if start == stop:
                    break
                old, new = pa.Table.from_batches([batch]).slice(0, stop - start), columns(start, stop)
                writer.write_table(pa.table([*old.columns, *new.columns], schema=whole))
                start = stop
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{target}: cannot be written: {error}", hint=f"is {source} damaged?") from error
    finally:
        file.close()


def write_table(path: Path, table: pa.Table, **options: Any) -> None:
    """Write a parquet file under a temporary name, then rename it: it is there whole or not at all.

    Args:
        options: of ``pyarrow.parquet.write_table``.

    Raises:
        RunError, ConfigError: it cannot be written (``files.replacing``).
    """
    import pyarrow.parquet as pq

    per_row = max(1, table.nbytes // max(1, table.num_rows))
    rows = max(1, min(_GROUP_ROWS, _GROUP_BYTES // per_row))
    with replacing(path) as temporary:
        pq.write_table(table, temporary, row_group_size=rows, **options)


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Return the first ``limit`` rows (None: all) of an RLHF parquet.

    Raises:
        DataError: naming file, row and column, when the file is missing, unreadable, empty or of another schema.
    """
    return list(stream_prompts(path, limit))


def stream_prompts(path: str | Path, limit: int | None = None) -> Iterator[Prompt]:
    """Yield the prompts that ``read_prompts`` returns."""
    return (parse_prompt(raw, path, index) for index, raw in read_rows(path, *_RLHF, limit=limit))


def read_conversations(path: str | Path) -> list[Conversation]:
    """Return the rows of an SFT parquet.

    Raises:
        DataError: as ``read_prompts``; also for a conversation without an assistant message.
    """
    return [parse_conversation(raw, path, index) for index, raw in read_rows(path, *_SFT)]


def read_preferences(path: str | Path) -> list[Preference]:
    """Return the rows of a preference parquet. Raises ``DataError`` as ``read_prompts``."""
    return [parse_preference(raw, path, index) for index, raw in read_rows(path, *_PREFERENCE)]


def read_typed(path: str | Path, schema: type[R], limit: int | None = None) -> Iterator[R]:
    """Yield the first ``limit`` rows (None: all) as they stand in the file, checked, one after the other.

    All columns are read; those that the schema does not know are in ``row.model_extra``.

    Raises:
        DataError: as ``read_prompts``.
    """
    for index, raw in read_rows(path, _NEEDED[schema], None, limit=limit):
        with located(path, index):
            row = parse_row(schema, raw)
            row.typed(index)
        yield row


def read_rows(
    path: str | Path,
    needed: Sequence[str],
    optional: Sequence[str] | None = (),
    *,
    limit: int | None = None,
    made_by: str = "posttrain prep",
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row number, row) of the first ``limit`` rows (None: all) of a parquet file, a batch at a time.

    Args:
        needed: columns that the file must have.
        optional: columns that are read where the file has them, and no other; None: every column.
        made_by: the command that writes such files, for hints.

    Raises:
        DataError: the file is missing, unreadable, empty or lacks a column.
    """
    import pyarrow as pa

    file = open_parquet(path, needed, made_by=made_by)
    names: list[str] = file.schema_arrow.names
    columns = names if optional is None else [*needed, *(name for name in optional if name in names)]
    index = 0
    try:
        for batch in file.iter_batches(batch_size=min(limit or _BATCH, _BATCH), columns=columns):
            for row in cast("pa.RecordBatch", batch).to_pylist():
                if limit is not None and index >= limit:
                    return
                yield index, row
                index += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: unreadable after row {index}: {error}", hint="the file is damaged") from error
    finally:
        file.close()


def open_parquet(
    path: str | Path, needed: Sequence[str], *, made_by: str = "posttrain prep", **options: Any
) -> pq.ParquetFile:
    """Return an open parquet file that has rows and these columns.

    Args:
        made_by: the command that writes such files, for hints.
        options: of ``pyarrow.parquet.ParquetFile``.

    Raises:
        DataError: the file is missing, unreadable, empty or lacks a column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not os.path.exists(path):
        raise DataError(f"{path}: no such file", hint=f"make it with `{made_by}`, or check the path")
    if not os.path.isfile(path):
        raise DataError(f"{path}: not a file", hint="give the parquet file itself")
    try:
        file = pq.ParquetFile(path, **options)
    except (pa.ArrowException, OSError) as error:
        hint = wanted.of_other_format(path, needed) or "it may be truncated, or of another format"
        raise DataError(f"{path}: not a readable parquet file: {error}", hint=hint) from error
    names: list[str] = file.schema_arrow.names
    missing = next((column for column in needed if column not in names), None)
    if missing is None and file.metadata.num_rows:
        return file
    file.close()
    if missing is None:
        raise DataError(f"{path}: the file has no rows", hint=f"write it again with `{made_by}`")
    raise DataError(f"{path}: column {missing!r} is missing", hint=_column_hint(path, missing, needed, names, made_by))


def _column_hint(path: str | Path, column: str, needed: Sequence[str], names: Sequence[str], made_by: str) -> str:
    if hint := wanted.of_columns(path, needed, names):
        return hint
    close = nearest(column, names)
    guess = f"did you mean to name {close!r} so?" if close else f"the file has {', '.join(names)}"
    return f"{guess}; `{made_by}` writes what is needed"


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    function["arguments"] = _TEXT.encode(function["arguments"])
    return {**call, "function": function}


def _empty_as_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _empty_as_none(item) for key, item in value.items()} or None
    return [_empty_as_none(item) for item in value] if isinstance(value, list) else value
