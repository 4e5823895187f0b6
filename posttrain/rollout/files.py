"""Recorded trajectories in parquet: a row an episode, a file a step, and exactly the same trajectories when read back.

``TraceRow`` is the schema. `posttrain rl` writes it (``posttrain.rollout.writer``) and `--replay` trains from it.

Shape legend: T tokens of one episode (prompt and all turns).
"""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.core.errors import DataError
from posttrain.core.types import Message, Prompt, StopReason, Trajectory
from posttrain.data.parquet import located, open_parquet, write_table
from posttrain.data.shards import shard_files
from posttrain.data.turns import RowError

if TYPE_CHECKING:
    import pyarrow.parquet as pq
    from transformers import PreTrainedTokenizerBase

Kind = Literal["train", "val"]

MADE_BY = "posttrain rl"
_TOKENIZER = b"posttrain.tokenizer"
"""Key of the file's metadata that holds the fingerprint of the tokenizer."""


@dataclass(frozen=True)
class TraceRow:
    """One trajectory as a row. Parquet's types follow from these: int is int32, float is double, an array is a list.

    Prompts with images have no trajectories, so there is no column for images.
    """

    kind: Kind
    """`train`, or `val` for an episode of a validation."""
    step: int
    """The RL step, from 1."""
    group: int
    """Number of the prompt in the step. Rows of a step lie together, and so do those of a group."""
    temperature: float
    """Of sampling; `logprobs` are of the distribution at this temperature."""
    row: int
    """Row of the prompt in its data file."""
    data_source: str
    """The prompt's data source; it chooses the grader."""
    prompt: str
    """JSON text: the prompt's messages."""
    ground_truth: str
    """JSON text: what the grader compared with."""
    extra_info: str
    """JSON text: the prompt's `extra_info`. What JSON has no form for, such as a date, is text."""
    tokens: npt.NDArray[np.int32]
    """[T] the prompt and every turn, exactly as fed to and sampled by the engine."""
    loss_mask: npt.NDArray[np.bool_]
    """[T] true where the policy sampled the token."""
    logprobs: npt.NDArray[np.float32]
    """[T] the engine's log-probability of each sampled token; 0 elsewhere."""
    weight_version: npt.NDArray[np.int32]
    """[T] version of the weights that sampled each token: the RL steps they had seen; -1 elsewhere."""
    prompt_length: int
    """Tokens of the first rendered prompt."""
    messages: str
    """JSON text: the whole conversation by turn, the prompt's messages included."""
    turns: int
    """Assistant turns."""
    user_turns: int
    """Turns of the simulated user."""
    tool_calls: int
    """Calls of tools, those that failed included."""
    stop_reason: StopReason
    """Why the episode ended."""
    seconds: float
    """Wall time of the episode."""
    tool_seconds: float
    """The part of it in which it waited for tools and the simulated user."""
    reward: float
    """The weighted sum that it was trained with."""
    correct: bool
    """The grader's verdict."""
    extracted: str | None
    """The answer that the grader found; null where it found none."""
    reward_parts: dict[str, float]
    """The parts of the reward by name, with a weight or without."""
    error: str | None
    """Why the episode cannot be trained on; null where it can."""

    @staticmethod
    def of(trajectory: Trajectory, kind: Kind, step: int, group: int, temperature: float) -> TraceRow:
        """The row of a trajectory."""
        t, prompt = trajectory, trajectory.prompt
        return TraceRow(
            kind=kind,
            step=step,
            group=group,
            temperature=temperature,
            row=prompt.index,
            data_source=_text(prompt.data_source),
            prompt=_json(prompt.messages),
            ground_truth=_json(prompt.ground_truth),
            extra_info=_json(prompt.extra_info),
            tokens=t.tokens,
            loss_mask=t.loss_mask,
            logprobs=t.logprobs,
            weight_version=t.weight_version,
            prompt_length=t.prompt_length,
            messages=_json(t.messages),
            turns=t.turns,
            user_turns=t.user_turns,
            tool_calls=t.tool_calls,
            stop_reason=t.stop_reason,
            seconds=t.seconds,
            tool_seconds=t.tool_seconds,
            reward=t.reward,
            correct=t.correct,
            extracted=None if t.extracted is None else _text(t.extracted),
            reward_parts=t.reward_parts,
            error=None if t.error is None else _text(t.error),
        )

    def trajectory(self) -> Trajectory:
        """The trajectory of a row. Raises ``RowError`` for JSON text that does not hold what it should."""
        extra_info = self._read("extra_info")
        if not isinstance(extra_info, dict):
            raise RowError("extra_info", "not a JSON object", f"it holds {self.extra_info[:80]}")
        truth, asked = self._read("ground_truth"), self._messages("prompt")
        return Trajectory(
            prompt=Prompt(self.row, asked, self.data_source, truth, extra_info),
            tokens=self.tokens,
            loss_mask=self.loss_mask,
            logprobs=self.logprobs,
            weight_version=self.weight_version,
            messages=self._messages("messages"),
            stop_reason=self.stop_reason,
            turns=self.turns,
            user_turns=self.user_turns,
            tool_calls=self.tool_calls,
            seconds=self.seconds,
            tool_seconds=self.tool_seconds,
            prompt_length=self.prompt_length,
            reward=self.reward,
            reward_parts=self.reward_parts,
            correct=self.correct,
            extracted=self.extracted,
            error=self.error,
        )

    def check(self, vocabulary: int) -> None:
        """Raise ``RowError`` for what no episode of a model with so many token ids can be."""
        length = len(self.tokens)
        for column in ("loss_mask", "logprobs", "weight_version"):
            if (found := len(getattr(self, column))) != length:
                raise RowError(column, f"{found} values for {length} tokens", "the row was changed after it was made")
        if not 0 < self.prompt_length <= length:
            hint = f"it has {length} tokens"
            raise RowError("prompt_length", f"{self.prompt_length} is no length of this row's prompt", hint)
        if len(outside := self.tokens[(self.tokens < 0) | (self.tokens >= vocabulary)]):
            hint = "train the model that sampled these traces, or one with the same tokenizer"
            raise RowError("tokens", f"{outside[0]} is no token of the model, which has {vocabulary}", hint)
        if self.loss_mask[: self.prompt_length].any():
            raise RowError("loss_mask", "true in the prompt", "only sampled tokens carry loss")
        for column in ("logprobs", "reward"):
            if not np.isfinite(getattr(self, column)).all():
                raise RowError(column, "not finite", "leave such rows out")
        if self.stop_reason not in get_args(StopReason):
            raise RowError("stop_reason", f"unknown: {self.stop_reason!r}", f"one of {', '.join(get_args(StopReason))}")

    def _read(self, column: str) -> Any:
        text = getattr(self, column)
        try:
            return json.loads(text)
        except ValueError as error:
            raise RowError(column, f"not JSON text: {error}", f"it holds {text[:80]!r}") from None

    def _messages(self, column: str) -> list[Message]:
        found = self._read(column)
        if isinstance(found, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in found):
            return cast("list[Message]", found)
        raise RowError(column, "not a JSON list of messages", f"it holds {getattr(self, column)[:80]!r}")


COLUMNS = [field.name for field in fields(TraceRow)]
_MAY_BE_NULL = ("extracted", "error")
_NULLS = " and ".join(f"`{name}`" for name in _MAY_BE_NULL)


def trace_schema() -> pa.Schema:
    """``TraceRow`` in Arrow's types."""
    return pa.schema([(name, _arrow(hint)) for name, hint in get_type_hints(TraceRow).items()])


def _arrow(hint: Any) -> pa.DataType:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _arrow(args[0])
    if origin in (np.ndarray, npt.NDArray):  # which of them depends on numpy's version
        scalar = args[-1] if isinstance(args[-1], type) else get_args(args[-1])[0]
        return pa.list_(pa.from_numpy_dtype(scalar))
    if origin is dict:
        return pa.map_(_arrow(args[0]), _arrow(args[1]))
    if origin is Literal:
        return pa.string()
    return {int: pa.int32(), float: pa.float64(), bool: pa.bool_(), str: pa.string()}[hint]


def write_traces(
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
        temperature: they were sampled at.
        tokenizer: its ``fingerprint``.

    Raises:
        DataError: the file cannot be written.
    """
    rows = [TraceRow.of(t, kind, step, number, temperature) for number, group in enumerate(groups) for t in group]
    schema = trace_schema().with_metadata({_TOKENIZER: tokenizer})
    columns = {name: [getattr(row, name) for row in rows] for name in COLUMNS}
    columns["reward_parts"] = [list(row.reward_parts.items()) for row in rows]
    arrays = [_array(columns[field.name], field.type) for field in schema]
    leaves = {f.name: f"{f.name}.list.element" if pa.types.is_list(f.type) else f.name for f in schema}
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
    """Equal for tokenizers that give every id the same meaning."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


@dataclass(frozen=True)
class _Place:
    """Where the rows of a step are."""

    path: str
    start: int
    stop: int
    temperature: float


class Traces:
    """The recorded steps of trace files. Only their index is in memory.

    Args:
        paths: a file, a folder, a glob, or several (see ``shard_files``).
        vocabulary: token ids that the model has.
        tokenizer: ``fingerprint`` of the model's.
        kind: which episodes.

    Raises:
        DataError: a file is missing, unreadable, of another schema or of another tokenizer; a step is in two files; or
            there are no episodes of this kind.
    """

    def __init__(self, paths: str | Sequence[str], *, vocabulary: int, tokenizer: str, kind: Kind = "train") -> None:
        self.vocabulary = vocabulary
        self.kind: Kind = kind
        self.files = shard_files(paths, made_by=MADE_BY)
        self._places: dict[int, _Place] = {}
        for path in self.files:
            with open_parquet(path, COLUMNS, made_by=MADE_BY) as file:
                _check_file(file, path, tokenizer)
                for step, place in self._index(file, path):
                    self._add(step, place)
        if not self._places:
            raise DataError(f"{self.name}: no episode of kind {kind!r}", hint="give the traces of training steps")
        self.steps = sorted(self._places)

    @property
    def name(self) -> str:
        """What messages call them."""
        return self.files[0] if len(self.files) == 1 else f"{self.files[0]} and {len(self.files) - 1} more"

    @property
    def temperatures(self) -> set[float]:
        """Temperatures that the steps were sampled at."""
        return {place.temperature for place in self._places.values()}

    def read(self, step: int) -> list[list[Trajectory]]:
        """The trajectories of a recorded step, by group.

        Raises:
            DataError: naming file, row and column of what is damaged, or fits neither the schema nor the model.
        """
        place = self._places[step]
        groups: dict[int, list[Trajectory]] = {}
        rows = _rows(place)
        if len(rows) < place.stop - place.start or {(row.kind, row.step) for row in rows} != {(self.kind, step)}:
            raise DataError(f"{place.path}: it has other rows than before", hint="it was written anew during the run")
        for index, row in enumerate(rows, start=place.start):
            with located(place.path, index):
                row.check(self.vocabulary)
                groups.setdefault(row.group, []).append(row.trajectory())
        return list(groups.values())

    def _index(self, file: pq.ParquetFile, path: str) -> Iterator[tuple[int, _Place]]:
        table = _read(file, path, None, ["kind", "step", "temperature"])
        keys = zip(*(column.to_pylist() for column in table.columns), strict=True)
        start = 0
        for (kind, step, temperature), run in groupby(keys):
            stop = start + len(list(run))
            if kind == self.kind:
                yield step, _Place(path, start, stop, temperature)
            start = stop

    def _add(self, step: int, place: _Place) -> None:
        other = self._places.setdefault(step, place)
        if other is not place:
            raise DataError(
                f"step {step} comes twice: {other.path}, row {other.start}, and {place.path}, row {place.start}",
                hint="give the traces of one run; the rows of a step lie together and have one temperature",
            )


def _check_file(file: pq.ParquetFile, path: str, tokenizer: str) -> None:
    """Raise ``DataError`` for columns of other types, and for another tokenizer, where the file tells."""
    schema: pa.Schema = file.schema_arrow
    for field in trace_schema():
        found = schema.field(field.name).type
        if found != field.type:
            raise DataError(
                f"{path}: column {field.name!r} is {found}, and should be {field.type}",
                hint=f"`{MADE_BY}` writes what is needed (docs/traces.md)",
            )
    made_with = (schema.metadata or {}).get(_TOKENIZER)
    if made_with not in (None, tokenizer.encode()):
        raise DataError(
            f"{path}: sampled with another tokenizer than the model's",
            hint="token ids mean something else there: train the model that sampled these traces",
        )


def _rows(place: _Place) -> list[TraceRow]:
    """The rows of a step, without nulls, but not checked otherwise."""
    with open_parquet(place.path, COLUMNS, made_by=MADE_BY) as file:
        needed: list[int] = []
        first = start = 0
        for number in range(file.metadata.num_row_groups):
            stop = start + file.metadata.row_group(number).num_rows
            if start < place.stop and stop > place.start:
                first = start if not needed else first
                needed.append(number)
            start = stop
        table = _read(file, place.path, needed, COLUMNS).slice(place.start - first, place.stop - place.start)
    columns = [_values(table[name].combine_chunks(), name, place) for name in COLUMNS]
    return [TraceRow(*values) for values in zip(*columns, strict=True)]


def _read(file: pq.ParquetFile, path: str, row_groups: list[int] | None, columns: Sequence[str]) -> pa.Table:
    groups = range(file.metadata.num_row_groups) if row_groups is None else row_groups
    try:
        return file.read_row_groups(list(groups), columns=list(columns))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: unreadable: {error}", hint="the file is damaged, or was written anew") from error


def _values(column: pa.Array, name: str, place: _Place) -> list[Any]:
    """The values of a column. Raises ``DataError`` naming the row of a null."""
    if name not in _MAY_BE_NULL and column.null_count:
        row = place.start + int(np.flatnonzero(column.is_null())[0])
        raise DataError(f"{place.path}: row {row}, column {name!r}: null", hint=f"only {_NULLS} may be null")
    if pa.types.is_map(column.type):
        return [dict(pairs) for pairs in column.to_pylist()]
    if not pa.types.is_list(column.type):
        return cast("list[Any]", column.to_pylist())
    if column.flatten().null_count:
        raise DataError(f"{place.path}: column {name!r}: a null among the values", hint=f"only {_NULLS} may be null")
    # A copy, because Arrow's own memory cannot be written to, and torch warns of that.
    values = np.array(column.flatten())
    ends = np.cumsum(column.value_lengths())
    return np.split(values, ends[:-1])


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if not pa.types.is_list(kind) or not values:
        return pa.array(values, kind)
    # As `pa.array` would, but twenty times as fast.
    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(np.concatenate(values), kind.value_type), kind)


def _json(value: Any) -> str:
    return _text(json.dumps(value, ensure_ascii=False, default=str))


def _text(value: str) -> str:
    """Lone surrogates, which UTF-8 cannot hold, as escapes; in JSON text they mean the same."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8")
