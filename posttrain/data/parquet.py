"""RLHF and SFT rows in parquet: writing them, and reading them back typed and checked.

RLHF row: ``data_source``, ``prompt`` (messages), ``ability``, ``reward_model {style, ground_truth}``,
``extra_info {split, index, answer, question, need_tools_kwargs, tools_kwargs}``. SFT row: ``messages``, ``tools``.
Two things have no fixed shape, which parquet needs, and are therefore stored as JSON text: the ``arguments`` of tool
calls and the ``tools`` column. Files of others may hold them as structs; reading accepts both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from posttrain.errors import DataError
from posttrain.registry import nearest
from posttrain.types import Message, Prompt, Role, ToolSchema

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_BATCH = 1024
"""Most rows in memory as Python objects at once."""


@dataclass(frozen=True)
class Conversation:
    """One SFT row, typed."""

    messages: list[Message]
    tools: list[ToolSchema] = field(default_factory=list)


class _Row(BaseModel):
    # A column that we do not know is someone else's; it stays out of the typed row.
    model_config = ConfigDict(extra="ignore")


class _Function(_Row):
    name: str
    arguments: dict[str, Any] = {}

    @field_validator("arguments", mode="before")
    @classmethod
    def _decode(cls, value: Any) -> Any:
        return json.loads(value) if isinstance(value, str) else _without_none(value)


class _Call(_Row):
    id: str | None = None
    type: str = "function"
    function: _Function

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, value: Any) -> Any:
        return _without_none(value, deep=False)


class _Message(_Row):
    role: Role
    content: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    train: bool | None = None

    def typed(self) -> Message:
        message = self.model_dump(exclude_none=True)
        message.setdefault("content", "")
        if not self.tool_calls:
            message.pop("tool_calls", None)
        return cast(Message, message)


class _RewardModel(_Row):
    style: str | None = None
    ground_truth: Any


class _RlhfRow(_Row):
    data_source: str
    prompt: list[_Message]
    ability: str | None = None
    reward_model: _RewardModel
    extra_info: dict[str, Any] | None = None


class _SftRow(_Row):
    messages: list[_Message]
    tools: list[dict[str, Any]] | None = None

    @field_validator("tools", mode="before")
    @classmethod
    def _decode(cls, value: Any) -> Any:
        tools = json.loads(value or "null") if isinstance(value, str) else value
        if not isinstance(tools, list):
            return tools
        return [_without_none(json.loads(tool) if isinstance(tool, str) else tool) for tool in tools]


def sft_row(conversation: Conversation) -> dict[str, Any]:
    """A conversation as a row for ``write_rows``."""
    messages = []
    for message in conversation.messages:
        row: dict[str, Any] = dict(message)
        if "tool_calls" in row:
            row["tool_calls"] = [_with_text_arguments(call) for call in row["tool_calls"]]
        messages.append(row)
    tools = json.dumps(conversation.tools, ensure_ascii=False) if conversation.tools else None
    return {"messages": messages, "tools": tools}


def write_rows(path: str | Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write rows to one parquet file, whole or not at all. Returns the number of rows.

    Nested dicts become structs with the union of the rows' keys; a key that a row lacks is null there.

    Raises:
        DataError: values of one column have types that do not go together, or the file cannot be written.
    """
    import pyarrow as pa

    kept = list(rows)
    columns = list(dict.fromkeys(column for row in kept for column in row))
    arrays: dict[str, Any] = {}
    for column in columns:
        try:
            # Parquet has no struct without fields, so an empty dict is written as null.
            arrays[column] = pa.array([_empty_as_none(row.get(column)) for row in kept])
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise DataError(
                f"{path}: column {column!r} cannot be written: {error}", hint="give each column one type"
            ) from error
    _write_table(Path(path), pa.table(arrays))
    return len(kept)


def append_columns(source: str | Path, target: str | Path, columns: dict[str, list[Any]]) -> None:
    """Write the first rows of ``source``, as many as the new columns are long, with these columns added or replaced.

    Raises:
        DataError: ``target`` cannot be written; nothing is left there then.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = len(next(iter(columns.values())))
    table = pq.read_table(source).slice(0, count)
    for name, values in columns.items():
        if name in table.column_names:
            table = table.drop_columns([name])
        table = table.append_column(name, pa.array(values))
    _write_table(Path(target), table)


def _write_table(path: Path, table: pa.Table) -> None:
    """Write a parquet file under a temporary name, then rename it. Raises ``DataError`` where it cannot be written."""
    import pyarrow.parquet as pq

    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            pq.write_table(table, temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error}", hint="choose another output folder") from error


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """The first ``limit`` rows (None: all) of an RLHF parquet.

    Raises:
        DataError: naming file, row and column, when the file is missing, unreadable, empty or of another schema.
    """
    prompts = []
    for index, raw in read_rows(
        path, ("data_source", "prompt", "reward_model"), ("ability", "extra_info"), limit=limit
    ):
        row = _checked(_RlhfRow, raw, path, index)
        messages = _messages(row.prompt, path, index, "prompt", needs=("user",))
        extra = row.extra_info or {}
        extra["tools_kwargs"] = _without_none(extra.get("tools_kwargs") or {})
        prompts.append(Prompt(index, messages, row.data_source, row.reward_model.ground_truth, extra))
    return prompts


def read_conversations(path: str | Path, limit: int | None = None) -> list[Conversation]:
    """The first ``limit`` rows (None: all) of an SFT parquet.

    Raises:
        DataError: as ``read_prompts``; also for a conversation without an assistant message.
    """
    conversations = []
    for index, raw in read_rows(path, ("messages",), ("tools",), limit=limit):
        row = _checked(_SftRow, raw, path, index)
        messages = _messages(row.messages, path, index, "messages", needs=("user", "assistant"))
        conversations.append(Conversation(messages, row.tools or []))
    return conversations


def read_rows(
    path: str | Path,
    needed: Sequence[str],
    optional: Sequence[str] = (),
    *,
    limit: int | None = None,
    made_by: str = "posttrain prep",
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row number, row) of the first ``limit`` rows (None: all) of a parquet file, a batch at a time.

    Args:
        needed: columns that the file must have.
        optional: columns that are read where the file has them; no other column is.
        made_by: the command that writes such files, for hints.

    Raises:
        DataError: the file is missing, unreadable, empty or lacks a column.
    """
    import pyarrow as pa

    file = _open(path, made_by)
    names: list[str] = file.schema_arrow.names
    for column in needed:
        if column not in names:
            hint = _column_hint(column, needed, names, made_by)
            raise DataError(f"{path}: column {column!r} is missing", hint=hint)
    if file.metadata.num_rows == 0:
        raise DataError(f"{path}: the file has no rows", hint=f"write it again with `{made_by}`")
    columns = [*needed, *(name for name in optional if name in names)]
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


def _open(path: str | Path, made_by: str) -> pq.ParquetFile:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not Path(path).exists():
        raise DataError(f"{path}: no such file", hint=f"make it with `{made_by}`, or check the path")
    if not Path(path).is_file():
        raise DataError(f"{path}: not a file", hint="give the parquet file itself")
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: not a readable parquet file: {error}", hint="it may be truncated, or of another format"
        ) from error


def _column_hint(column: str, needed: Sequence[str], names: Sequence[str], made_by: str) -> str:
    if "prompt" in needed and "messages" in names:
        return "this looks like an SFT file; here an RLHF file is needed (data_source, prompt, reward_model)"
    if column == "messages" and "prompt" in names:
        return "this looks like an RLHF file; here an SFT file is needed (messages)"
    close = nearest(column, names)
    guess = f"did you mean to name {close!r} so?" if close else f"the file has {', '.join(names)}"
    return f"{guess}; `{made_by}` writes what is needed"


R = TypeVar("R", bound=_Row)


def _checked(schema: type[R], raw: dict[str, Any], path: str | Path, index: int) -> R:
    try:
        return schema.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DataError(
            f"{path}: row {index}, column {where!r}: {first['msg']}",
            hint=f"it holds {_short(first['input'])}",
        ) from None


def _messages(
    rows: list[_Message], path: str | Path, index: int, column: str, needs: tuple[Literal["user", "assistant"], ...]
) -> list[Message]:
    roles = {row.role for row in rows}
    for role in needs:
        if role not in roles:
            raise DataError(
                f"{path}: row {index}, column {column!r}: no {role} message",
                hint=f"it has {len(rows)} messages, of roles {sorted(roles)}" if rows else "it has no message at all",
            )
    return [row.typed() for row in rows]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": function}


def _without_none(value: Any, deep: bool = True) -> Any:
    """Dicts without the null fields that parquet fills in for keys other rows have."""
    if isinstance(value, dict):
        return {key: _without_none(item) if deep else item for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if deep and isinstance(value, list) else value


def _empty_as_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _empty_as_none(item) for key, item in value.items()} or None
    return [_empty_as_none(item) for item in value] if isinstance(value, list) else value
