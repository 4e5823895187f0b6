"""Rollout files: trajectories in parquet, a row an episode, a file a step, and exactly the same trajectories read back.

The columns are the fields of ``RowHead`` and the stored fields of ``Trajectory`` (``posttrain.core.types.stored``).
`posttrain rl` writes the files (``posttrain.rollout.writer``) and `--replay` trains from them.

Shape legend: T tokens of one episode (prompt and all turns).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.core.errors import DataError
from posttrain.core.registry import some
from posttrain.core.types import ImageFile, Message, Prompt, StopReason, Trajectory
from posttrain.data.parquet import located, open_parquet, write_table
from posttrain.data.shards import shard_files
from posttrain.data.turns import RowError

if TYPE_CHECKING:
    import pyarrow.parquet as pq
    from transformers import PreTrainedTokenizerBase

Kind = Literal["train", "val"]

MADE_BY = "posttrain rl"
_LIST_VALUES = 2**31 - 1
"""Most values of the lists of one Arrow array."""
_TOKENIZER = b"posttrain.tokenizer"
"""Key of the file's metadata that holds the fingerprint of the tokenizer."""


@dataclass(frozen=True)
class RowHead:
    """The first columns of a row: which episode it is, and its prompt. The columns of the trajectory follow."""

    kind: Kind
    """`train`, or `val` for an episode of a validation."""
    step: int
    """The RL step, from 1."""
    group: int
    """Number of the prompt in the step. Rows of a step lie together, and so do those of a group."""
    temperature: float
    """The sampling temperature; `logprobs` are of the distribution at this temperature."""
    row: int
    """Row of the prompt in its data file."""
    data_source: str
    """The prompt's data source; it chooses the grader."""
    prompt: list[Message]
    """The prompt's messages."""
    ground_truth: Any
    """What the grader compared with."""
    extra_info: dict[str, Any]
    """The prompt's `extra_info`. What JSON has no form for, such as a date, is text."""
    images: list[ImageFile] = dataclasses.field(default_factory=list, metadata={"required": False})
    """The prompt's images, in the first row of each group alone."""


@dataclass(frozen=True)
class Column:
    """A field of ``RowHead`` or a stored field of ``Trajectory`` as a column of a file.

    An int is int32, a float is double, an array is a list, a dict of floats is a map. A field of another structure,
    such as a list of messages, is JSON text. A field that may be None gives a column that may be null.
    """

    name: str
    type: pa.DataType
    json: Any
    """The type that the JSON text holds; None: the column is not JSON text."""
    nullable: bool
    required: bool
    """Every file must have the column; else rows of files without it have the field's default."""

    @staticmethod
    def of(field: dataclasses.Field[Any], hint: Any) -> Column:
        """Return the column of a field whose resolved type is ``hint``."""
        args = get_args(hint)
        nullable = get_origin(hint) in (Union, types.UnionType) and type(None) in args
        kind = args[0] if nullable else hint
        arrow = _arrow(kind)
        required = bool(field.metadata.get("required", True))
        return Column(field.name, arrow or pa.string(), None if arrow else kind, nullable, required)

    def encode(self, value: Any) -> Any:
        """Return the value of the field as the file holds it."""
        if value is None and self.nullable:
            return None
        if self.json is not None:
            value = json.dumps(value, ensure_ascii=False, default=str)
        if pa.types.is_map(self.type):
            return list(value.items())
        return _utf8(value) if isinstance(value, str) else value

    def decode(self, value: Any) -> Any:
        """Return the field of a value from the file. Raises ``RowError`` for JSON text that does not hold the field."""
        if self.json is None or (value is None and self.nullable):
            return value
        try:
            found = json.loads(value)
        except ValueError as error:
            raise RowError(self.name, f"not JSON text: {error}", f"it holds {value[:80]!r}") from None
        kind: type = get_origin(self.json) or object
        fits, what = isinstance(found, kind), "object" if kind is dict else kind.__name__
        if self.json == list[Message]:
            what = "list of messages"
            fits = fits and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in found)
        if not fits:
            raise RowError(self.name, f"not a JSON {what}", f"it holds {value[:80]!r}")
        return found


def _arrow(hint: Any) -> pa.DataType | None:
    """Return the Arrow type that stores values of a type as they are; None where only JSON text can."""
    origin, args = get_origin(hint), get_args(hint)
    if hint == list[ImageFile]:
        return pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    if origin in (np.ndarray, npt.NDArray):  # which of them depends on numpy's version
        scalar = args[-1] if isinstance(args[-1], type) else get_args(args[-1])[0]
        return pa.list_(pa.from_numpy_dtype(scalar))
    if origin is dict and args[1] is float:
        return pa.map_(pa.string(), pa.float64())
    if origin is Literal:
        return pa.string()
    plain: dict[Any, pa.DataType] = {int: pa.int32(), float: pa.float64(), bool: pa.bool_(), str: pa.string()}
    return plain.get(hint)


def _utf8(value: str) -> str:
    """Return text with lone surrogates, which UTF-8 cannot hold, as escapes; in JSON text they mean the same."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def _columns(declaration: type[Any]) -> dict[str, Column]:
    hints = get_type_hints(declaration)
    chosen = (f for f in dataclasses.fields(declaration) if declaration is RowHead or f.metadata.get("stored"))
    return {field.name: Column.of(field, hints[field.name]) for field in chosen}


_HEAD = _columns(RowHead)
TRAJECTORY = _columns(Trajectory)
"""The columns that are fields of ``Trajectory``, by name."""
COLUMNS = {**_HEAD, **TRAJECTORY}
"""All columns of a file in their order, by name."""
_IMAGES = {name for name, column in COLUMNS.items() if column.type == _arrow(list[ImageFile])}
_REQUIRED = [name for name, column in COLUMNS.items() if column.required]
_NULLS = " and ".join(f"`{name}`" for name, column in COLUMNS.items() if column.nullable)


def rollout_schema() -> pa.Schema:
    """Return the Arrow schema of rollout files."""
    return pa.schema([(column.name, column.type) for column in COLUMNS.values()])


def rollouts_folder(run: Path) -> Path:
    """Return the folder of a run's rollout files: ``rollouts``, or ``traces`` in a run that has one."""
    old = run / "traces"
    return old if old.is_dir() else run / "rollouts"


def _check(trajectory: Trajectory, vocabulary: int) -> None:
    """Raise ``RowError`` for what no episode of a model with ``vocabulary`` token ids can be."""
    t, length = trajectory, len(trajectory.tokens)
    for column in ("loss_mask", "logprobs", "weight_version"):
        if (found := len(getattr(t, column))) != length:
            raise RowError(column, f"{found} values for {length} tokens", "the row was changed after it was made")
    if len(t.routing) % length:
        raise RowError(
            "routing", f"{len(t.routing)} bytes for {length} tokens", "the row was changed after it was made"
        )
    if not 0 < t.prompt_length <= length:
        hint = f"it has {length} tokens"
        raise RowError("prompt_length", f"{t.prompt_length} is no length of this row's prompt", hint)
    if len(outside := t.tokens[(t.tokens < 0) | (t.tokens >= vocabulary)]):
        hint = "train the model that sampled these rollouts, or one with the same tokenizer"
        raise RowError("tokens", f"{outside[0]} is no token of the model, which has {vocabulary}", hint)
    if t.loss_mask[: t.prompt_length].any():
        raise RowError("loss_mask", "true in the prompt", "only sampled tokens carry loss")
    for column in ("logprobs", "reward"):
        if not np.isfinite(getattr(t, column)).all():
            raise RowError(column, "not finite", "leave such rows out")
    if t.stop_reason not in get_args(StopReason):
        raise RowError("stop_reason", f"unknown: {t.stop_reason!r}", f"one of {', '.join(get_args(StopReason))}")


def write_rollouts(
    path: Path,
    groups: Sequence[Sequence[Trajectory]],
    *,
    kind: Kind,
    step: int,
    temperature: float,
    tokenizer: str,
) -> None:
    """Write the trajectories of a step to one file, whole or not at all.

    Args:
        groups: trajectories by prompt; failed ones too.
        temperature: the sampling temperature.
        tokenizer: ``fingerprint`` of the tokenizer.

    Raises:
        DataError: the file cannot be written.
    """
    rows = [
        (_head(t.prompt, kind, step, number, temperature, first=place == 0), t)
        for number, group in enumerate(groups)
        for place, t in enumerate(group)
    ]
    values = [[c.encode(getattr(head, c.name)) for head, _ in rows] for c in _HEAD.values()]
    values += [[c.encode(getattr(t, c.name)) for _, t in rows] for c in TRAJECTORY.values()]
    schema = rollout_schema().with_metadata({_TOKENIZER: tokenizer})
    arrays = [_array(column, field.type) for column, field in zip(values, schema, strict=True)]
    leaves = {f.name: f"{f.name}.list.element" if pa.types.is_list(f.type) else f.name for f in schema}
    leaves = {name: leaf for name, leaf in leaves.items() if name not in _IMAGES}  # they hardly ever repeat
    # Log-probabilities hardly ever repeat, but their first bytes do.
    split = leaves.pop("logprobs")
    write_table(
        path,
        pa.table(arrays, schema=schema),
        compression="zstd",
        use_dictionary=list(leaves.values()),
        use_byte_stream_split=[split],
    )


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of a tokenizer's vocabulary: equal for tokenizers that give every id the same meaning."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


@dataclass(frozen=True)
class _Step:
    """The rows of one recorded step: where they are."""

    path: str
    start: int
    stop: int
    temperature: float


class RolloutFiles:
    """The recorded steps of rollout files. Only their index is in memory.

    Args:
        paths: a file, a folder, a glob, or several (see ``shard_files``).
        vocabulary: number of token ids of the model.
        tokenizer: ``fingerprint`` of the model's tokenizer.
        kind: which episodes are read.

    Raises:
        DataError: a file is missing, unreadable, of another schema or of another tokenizer; a step is in two files; or
            there are no episodes of this kind.
    """

    def __init__(
        self, paths: str | Sequence[str], *, vocabulary: int = 2**31, tokenizer: str, kind: Kind = "train"
    ) -> None:
        self.vocabulary = vocabulary
        self.kind: Kind = kind
        self.files = shard_files(paths, made_by=MADE_BY)
        self._steps: dict[int, _Step] = {}
        for path in self.files:
            with open_parquet(path, _REQUIRED, made_by=MADE_BY) as file:
                _check_file(file, path, tokenizer)
                for number, step in self._index(file, path):
                    self._add(number, step)
        if not self._steps:
            raise DataError(
                f"{self.name}: no episode of kind {kind!r}", hint="give the rollout files of training steps"
            )
        self.steps = sorted(self._steps)

    @property
    def name(self) -> str:
        """Return the first file and how many more there are, for messages."""
        return some(self.files, 1)

    @property
    def temperatures(self) -> set[float]:
        """Return the temperatures that the steps were sampled at."""
        return {step.temperature for step in self._steps.values()}

    def read(self, step: int) -> list[list[Trajectory]]:
        """Return the trajectories of a recorded step, by group.

        Raises:
            DataError: naming file, row and column of what is damaged, or fits neither the schema nor the model.
        """
        where = self._steps[step]
        groups: dict[int, list[Trajectory]] = {}
        rows = _rows(where)
        if len(rows) < where.stop - where.start or {(row["kind"], row["step"]) for row in rows} != {(self.kind, step)}:
            raise DataError(f"{where.path}: it has other rows than before", hint="it was written anew during the run")
        for index, row in enumerate(rows, start=where.start):
            with located(where.path, index):
                trajectory = _trajectory(row)
                _check(trajectory, self.vocabulary)
                group = groups.setdefault(row["group"], [])
                if group:
                    trajectory.prompt = dataclasses.replace(trajectory.prompt, images=group[0].prompt.images)
                group.append(trajectory)
        return list(groups.values())

    def _index(self, file: pq.ParquetFile, path: str) -> Iterator[tuple[int, _Step]]:
        table = _read(file, path, None, ["kind", "step", "temperature"])
        keys = zip(*(column.to_pylist() for column in table.columns), strict=True)
        start = 0
        for (kind, step, temperature), run in groupby(keys):
            stop = start + len(list(run))
            if kind == self.kind:
                yield step, _Step(path, start, stop, temperature)
            start = stop

    def _add(self, number: int, step: _Step) -> None:
        other = self._steps.setdefault(number, step)
        if other is not step:
            raise DataError(
                f"step {number} comes twice: {other.path}, row {other.start}, and {step.path}, row {step.start}",
                hint="give the rollout files of one run; the rows of a step lie together and have one temperature",
            )


def _check_file(file: pq.ParquetFile, path: str, tokenizer: str) -> None:
    """Raise ``DataError`` for columns of other types, and for another tokenizer where the file names one."""
    schema: pa.Schema = file.schema_arrow
    for column in COLUMNS.values():
        found = schema.field(column.name).type if column.name in schema.names else column.type
        if found != column.type:
            raise DataError(
                f"{path}: column {column.name!r} is {found}, and should be {column.type}",
                hint=f"`{MADE_BY}` writes what is needed (docs/rollout-files.md)",
            )
    made_with = (schema.metadata or {}).get(_TOKENIZER)
    if made_with not in (None, tokenizer.encode()):
        raise DataError(
            f"{path}: sampled with another tokenizer than the model's",
            hint="token ids mean something else there: train the model that sampled these rollouts",
        )


def _rows(step: _Step) -> list[dict[str, Any]]:
    """Return the rows of a step as the file holds them, by column. Raises ``DataError`` for nulls."""
    with open_parquet(step.path, _REQUIRED, made_by=MADE_BY) as file:
        found = [name for name in COLUMNS if name in file.schema_arrow.names]
        needed: list[int] = []
        first = start = 0
        for number in range(file.metadata.num_row_groups):
            stop = start + file.metadata.row_group(number).num_rows
            if start < step.stop and stop > step.start:
                first = start if not needed else first
                needed.append(number)
            start = stop
        table = _read(file, step.path, needed, found).slice(step.start - first, step.stop - step.start)
    columns = [_values(table[name].combine_chunks(), COLUMNS[name], step) for name in found]
    return [dict(zip(found, values, strict=True)) for values in zip(*columns, strict=True)]


def _head(prompt: Prompt, kind: Kind, step: int, group: int, temperature: float, *, first: bool) -> RowHead:
    return RowHead(
        kind=kind,
        step=step,
        group=group,
        temperature=temperature,
        row=prompt.index,
        data_source=prompt.data_source,
        prompt=prompt.messages,
        ground_truth=prompt.ground_truth,
        extra_info=prompt.extra_info,
        images=cast("list[ImageFile]", prompt.images) if first else [],
    )


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    """Return the trajectory of a row. Raises ``RowError`` for JSON text that does not hold its field."""
    head = RowHead(**{name: column.decode(row[name]) for name, column in _HEAD.items() if name in row})
    return Trajectory(
        prompt=Prompt(
            head.row,
            head.prompt,
            head.data_source,
            head.ground_truth,
            head.extra_info,
            cast("list[dict[str, Any]]", head.images),
        ),
        **{name: column.decode(row[name]) for name, column in TRAJECTORY.items() if name in row},
    )


def _read(file: pq.ParquetFile, path: str, row_groups: list[int] | None, columns: Sequence[str]) -> pa.Table:
    groups = range(file.metadata.num_row_groups) if row_groups is None else row_groups
    try:
        return file.read_row_groups(list(groups), columns=list(columns))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: unreadable: {error}", hint="the file is damaged, or was written anew") from error


def _values(array: pa.Array, column: Column, step: _Step) -> list[Any]:
    """Return the values of a column. Raises ``DataError`` naming the row of a null."""
    hint = f"only {_NULLS} may be null"
    if not column.nullable and array.null_count:
        row = step.start + int(np.flatnonzero(array.is_null())[0])
        raise DataError(f"{step.path}: row {row}, column {column.name!r}: null", hint=hint)
    if pa.types.is_map(array.type):
        return [dict(pairs) for pairs in array.to_pylist()]
    if column.name in _IMAGES:
        return [[{k: v for k, v in image.items() if v is not None} for image in row] for row in array.to_pylist()]
    if not pa.types.is_list(array.type):
        return cast("list[Any]", array.to_pylist())
    if array.flatten().null_count:
        raise DataError(f"{step.path}: column {column.name!r}: a null among the values", hint=hint)
    # A copy, because Arrow's own memory cannot be written to, and torch warns of that.
    return split_lists(array, np.array(array.flatten()))


def split_lists(array: pa.ListArray, flat: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Return the lists of an array as arrays, twenty times as fast as Arrow makes Python's own lists.

    Args:
        flat: the values of all lists, as ``array.flatten()`` gives them.
    """
    return np.split(flat, np.cumsum(array.value_lengths())[:-1])


def _array(values: list[Any], kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    if not pa.types.is_list(kind) or pa.types.is_struct(kind.value_type) or not values:
        return pa.array(values, kind)
    if sum(map(len, values)) > _LIST_VALUES:
        half = len(values) // 2
        parts = (_array(part, kind) for part in (values[:half], values[half:]))
        return pa.chunked_array([c for a in parts for c in (a.chunks if isinstance(a, pa.ChunkedArray) else [a])])
    # As `pa.array` would, but twenty times as fast.
    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(np.concatenate(values), kind.value_type), kind)
