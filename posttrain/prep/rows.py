"""The rows of a split of ``prep``: graded, checked, given tools, and compared with evaluation sets."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from posttrain.core.errors import DataError
from posttrain.core.plugins import expect
from posttrain.core.registry import nearest
from posttrain.core.types import Prompt, ToolSchema
from posttrain.data.parquet import (
    Conversation,
    Preference,
    parse_conversation,
    parse_preference,
    parse_prompt,
    preference_row,
    read_preferences,
    read_rows,
    sft_row,
)
from posttrain.prep.datasets import DATASETS, Dataset, Refusal, available_splits, fault, open_dataset, raw_rows, refusal
from posttrain.prep.datasets.raw import EVALUATION, RawRow
from posttrain.prep.decontaminate import EvalSet, Overlap, PromptText, asked
from posttrain.prep.measure import question
from posttrain.tools import Tool

T = TypeVar("T")

TOLERATED = 0.005
"""Share of a split's rows that may be bad: fewer are dropped and listed, from there on it is an error."""
_SHARED = 0.5
"""Share of the smaller of two splits from which on it is an error that its rows are also the other's."""
_SHOWN = 200
"""Characters of a dropped row's question in its card."""
_BATCH = 1024
"""Rows that take each step of ``collect`` together. The code of one step stays in the processor's caches, that of all
steps does not: row after row takes half as long again."""


class Item(NamedTuple):
    """One good row of a split, in every kind that it gives."""

    row: int
    """Its number in the split as it was read."""
    asked: str
    """The question, for what compares prompts."""
    rlhf: dict[str, Any] | None
    prompt: Prompt | None
    """``rlhf``, typed."""
    sft: dict[str, Any] | None
    conversation: Conversation | None
    """``sft``, typed."""
    preference: dict[str, Any] | None = None
    pair: Preference | None = None
    """``preference``, typed."""

    @property
    def data_source(self) -> str:
        return self.prompt.data_source if self.prompt else ""


@dataclass
class Split:
    """What became of the rows of a split."""

    name: str
    """The split that was read."""
    read: int = 0
    items: list[Item] = field(default_factory=list)
    dropped: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    """By reason: (row, what is wrong with it)."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Rows that are no part of the set, by reason."""
    overlaps: dict[str, dict[int, Overlap]] = field(default_factory=dict)
    """By evaluation set: the overlaps of items that stayed, by ``Item.row``."""

    def drop(self, row: int, reason: str, detail: str) -> None:
        self.dropped.setdefault(reason, []).append((row, detail))


def collect(dataset: Dataset, split: str, rows: Iterator[dict[str, Any]], tools: Sequence[Tool] = ()) -> Split:
    """Grade and check the raw rows of a split.

    Raises:
        DataError: there is no row, or at least 0.5 % of them are bad; the message names the first.
    """
    found = Split(split)
    steps = _Steps(dataset, split, tools)
    numbered = enumerate(rows)
    bad: list[tuple[int, Refusal]] = []
    while batch := [_Draft(row, raw) for row, raw in itertools.islice(numbered, _BATCH)]:
        steps.take(batch)
        found.read += len(batch)
        for draft in batch:
            refused = draft.refused
            if refused is None:
                found.items.append(draft.item())
                continue
            bad.append((draft.row, refused))
            beginning = _beginning(dataset, draft.raw, draft.row, split)
            found.drop(draft.row, refused.reason, f"row {draft.row}: {refused.detail} | {beginning}")
    found.skipped = dict(dataset.skipped)
    if bad and len(bad) >= TOLERATED * found.read:
        row, refused = bad[0]
        what = f"{refused.reason}: {refused.detail}" if refused.detail else refused.reason
        where = dataset.where(row)
        raise DataError(
            f"{dataset.name} {split} row {row}{f' ({where})' if where else ''}: {what}",
            hint=f"{len(bad)} of {found.read} rows are bad; under {TOLERATED:.1%}, they would be dropped and listed",
        )
    if not found.items:
        raise DataError(f"{dataset.name}: split {split!r} has no rows", hint="check --source and the row limits")
    return found


@dataclass(slots=True)
class _Draft:
    """A raw row on its way to an ``Item``."""

    row: int
    raw: RawRow
    refused: Refusal | None = None
    rlhf: dict[str, Any] | None = None
    prompt: Prompt | None = None
    sft: dict[str, Any] | None = None
    conversation: Conversation | None = None
    preference: dict[str, Any] | None = None
    pair: Preference | None = None

    def item(self) -> Item:
        """The good row that it became."""
        shown = self.prompt or self.conversation
        messages = shown.messages if shown else self.pair.prompt if self.pair else ()
        asked = question(messages, shown.images if shown else self.pair.images if self.pair else ())
        return Item(self.row, asked, self.rlhf, self.prompt, self.sft, self.conversation, self.preference, self.pair)


class _Steps:
    """What makes an ``Item`` of a raw row. Each step may raise ``DataError``, which refuses the row."""

    def __init__(self, dataset: Dataset, split: str, tools: Sequence[Tool]) -> None:
        self._dataset, self._split, self._tools = dataset, split, tools

    def take(self, batch: Sequence[_Draft]) -> None:
        """Take rows through the steps, all of them through one before the next."""
        steps = (self._grade, self._make_rlhf, self._make_sft, self._make_pair)
        for step in (*steps, self._check_rlhf, self._check_sft, self._check_pair):
            for draft in batch:
                if draft.refused is None:
                    try:
                        step(draft)
                    except DataError as error:  # the row's own, of its schema
                        draft.refused = Refusal("the row breaks its schema", error.message)
                    except (SystemExit, Exception) as error:
                        draft.refused = fault(self._dataset, draft.raw, error)

    def _grade(self, draft: _Draft) -> None:
        draft.refused = refusal(self._dataset, draft.raw)

    def _make_rlhf(self, draft: _Draft) -> None:
        rlhf = self._dataset.to_rlhf(draft.raw, draft.row, self._split)
        draft.rlhf = None if rlhf is None else _with_tools(self._expect(rlhf, dict, "to_rlhf"), self._tools)

    def _make_sft(self, draft: _Draft) -> None:
        conversation = self._dataset.to_sft(draft.raw, draft.row, self._split)
        if conversation is not None:
            self._expect(conversation, Conversation, "to_sft")
            draft.sft = sft_row(replace(conversation, tools=self._with_tools(conversation.tools)))

    def _make_pair(self, draft: _Draft) -> None:
        if "preference" in self._dataset.kinds:
            pair = self._dataset.to_preference(draft.raw, draft.row, self._split)
            if pair is not None:
                self._expect(pair, Preference, "to_preference")
                draft.preference = preference_row(replace(pair, tools=self._with_tools(pair.tools)))
        if draft.rlhf is None and draft.sft is None and draft.preference is None:
            raise DataError("it gives neither an RLHF, nor an SFT, nor a preference row", hint="")

    def _expect(self, result: Any, kind: type[T], method: str) -> T:
        of = getattr(type(self._dataset), method)
        return expect(result, kind, f"data set {self._dataset.name!r}: {method}", of)

    def _with_tools(self, schemas: list[ToolSchema]) -> list[ToolSchema]:
        """Schemas with those of the tools that they lack; the same list where they lack none."""
        declared = [schema["function"]["name"] for schema in schemas]
        extra = [tool.schema for tool in self._tools if tool.name not in declared]
        return [*schemas, *extra] if extra else schemas

    def _check_rlhf(self, draft: _Draft) -> None:
        if draft.rlhf is not None:
            draft.prompt = parse_prompt(draft.rlhf, f"{self._split}.parquet", draft.row)

    def _check_sft(self, draft: _Draft) -> None:
        if draft.sft is not None:
            draft.conversation = parse_conversation(draft.sft, f"sft_{self._split}.parquet", draft.row)

    def _check_pair(self, draft: _Draft) -> None:
        if draft.preference is not None:
            draft.pair = parse_preference(draft.preference, f"prefer_{self._split}.parquet", draft.row)


def _with_tools(row: dict[str, Any], tools: Sequence[Tool]) -> dict[str, Any]:
    """An RLHF row whose ``tools_kwargs`` name these tools too, each created with the row's gold answer."""
    if not tools:
        return row
    extra = dict(row.get("extra_info") or {})
    given = {"create_kwargs": {"ground_truth": row["reward_model"]["ground_truth"]}}
    kwargs = {**{tool.name: given for tool in tools}, **(extra.get("tools_kwargs") or {})}
    return {**row, "extra_info": {**extra, "need_tools_kwargs": True, "tools_kwargs": kwargs}}


def _beginning(dataset: Dataset, raw: dict[str, Any], index: int, split: str) -> str:
    """How a bad row begins, as far as it can be read."""
    text = next((value for value in raw.values() if isinstance(value, str) and value.strip()), repr(raw))
    try:
        rlhf = dataset.to_rlhf(raw, index, split)
        text = question(rlhf["prompt"]) if rlhf else text
    except (SystemExit, Exception):
        return text[:_SHOWN]  # it is bad, after all, and why is told beside it
    return text[:_SHOWN]


def check_apart(dataset: Dataset, parts: Mapping[str, Split]) -> list[str]:
    """Compare splits that are prepared together, row by row.

    Returns:
        A line on each two splits that share rows: the same question with the same answer and images.

    Raises:
        DataError: two splits share half of the smaller one's rows, or more.
    """
    keys = {name: Counter(map(_identity, part.items)) for name, part in parts.items()} if len(parts) > 1 else {}
    lines = []
    for (one, rows), (other, others) in itertools.combinations(keys.items(), 2):
        if rows.total() > others.total():
            one, rows, other, others = other, others, one, rows
        count = sum(number for key, number in rows.items() if key in others)
        if not count:
            continue
        said = f"{count:,} of the {rows.total():,} rows of split {one!r} are also in split {other!r}"
        if count >= _SHARED * rows.total():
            raise DataError(
                f"{dataset.name}: {said}",
                hint="give each split a file of its own; `--split train --val-fraction 0.1` divides one file",
            )
        lines.append(said)
    return lines


def _identity(item: Item) -> int:
    """A hash of all that makes a row what it is."""
    if item.prompt is not None:
        return hash((item.asked, repr(item.prompt.ground_truth), repr(item.prompt.images)))
    if item.pair is not None:
        return hash((item.asked, repr(item.pair.chosen), repr(item.pair.rejected)))
    return hash((item.asked, repr(item.conversation)))


class EvaluationOverlap:
    """Evaluation sets, and which rows of the training splits overlap them."""

    def __init__(self, dataset: Dataset, source: str | None, drop: Sequence[str], prepared: dict[str, Split]) -> None:
        """Read the evaluation sets.

        Args:
            drop: what no training row may overlap: parquet files, splits of this set, sets beside the source.
            prepared: the splits of this run; their rows need not be read again.

        Raises:
            DataError: one of ``drop`` is none of these, or cannot be read.
        """
        self.drop = list(drop)
        self._dataset, self._source, self._prepared = dataset, source, prepared
        training = [split for split in prepared if split not in EVALUATION]
        own = [split for split in available_splits(dataset, source) if split in EVALUATION]
        names = [*own, *offered(dataset, source), *drop] if training else []
        self.sets = {name: EvalSet(self._words(name, own)) for name in dict.fromkeys(names)}

    def clean(self, split: Split) -> None:
        """Note the overlaps of a training split, and drop the rows that may not overlap."""
        if split.name in EVALUATION or not self.sets:
            return
        words = asked([item.asked for item in split.items], [item.data_source for item in split.items])
        for name, evaluation in self.sets.items():
            hits = {split.items[o.row].row: o for o in evaluation.overlaps(words)}
            split.overlaps[name] = hits
            if name in self.drop:
                for row, overlap in hits.items():
                    split.drop(row, f"overlaps {name}", f"row {row} and its row {overlap.eval_row}: {overlap.shared}")
        gone = {row for name in self.drop for row in split.overlaps[name]}
        split.items = [item for item in split.items if item.row not in gone]
        split.overlaps = {
            name: {row: o for row, o in hits.items() if row not in gone} for name, hits in split.overlaps.items()
        }
        if not split.items:
            raise DataError(
                f"every row of split {split.name!r} overlaps {', '.join(self.drop)}",
                hint="is the evaluation set the training set?",
            )

    def _words(self, name: str, own: Sequence[str]) -> list[PromptText]:
        if name in self._prepared:
            items = self._prepared[name].items
            return asked([item.asked for item in items], [item.data_source for item in items])
        if name in own or name in self._dataset.splits:
            return asked(*_questions(self._dataset, name, self._source))
        if not os.path.exists(name) and name in offered(self._dataset, self._source):
            other = open_dataset(name)
            texts = [_questions(other, split, self._source) for split in available_splits(other, self._source)]
            return asked([t for some, _ in texts for t in some], [s for _, some in texts for s in some])
        return asked(*_questions_of_file(name, [*self._dataset.splits, *offered(self._dataset, self._source)]))


def offered(dataset: Dataset, source: str | None) -> list[str]:
    """Other evaluation sets whose files lie in the source folder, told by their file names (``math500.jsonl``)."""
    if source is None or not os.path.isdir(source):
        return []
    stems = [file.name.replace("-", "").replace("_", "").lower() for file in Path(source).iterdir()]
    named = [name for name in DATASETS.names() if any(stem.startswith(name.replace("-", "")) for stem in stems)]
    found = []
    for name in named:
        other = DATASETS.get(name)
        if name != dataset.name and all(split in EVALUATION for split in other.splits):
            found.append(name)
    return found


def _questions(dataset: Dataset, split: str, source: str | None) -> tuple[list[str], list[str]]:
    """(question, data source) of the rows of a split, ungraded; rows that cannot be read ask nothing."""
    texts, sources = [], []
    for index, raw in enumerate(raw_rows(dataset, split, source)):
        try:
            rlhf = dataset.to_rlhf(raw, index, split)
            asked = rlhf or _conversation(dataset, raw, index, split)
            text = question(asked["prompt"], asked.get("images") or ())
        except (SystemExit, Exception) as error:
            fault(dataset, raw, error)
            continue  # preparing that split is where a bad row is reported
        texts.append(text)
        sources.append(rlhf["data_source"] if rlhf else "")
    return texts, sources


def _conversation(dataset: Dataset, raw: RawRow, index: int, split: str) -> dict[str, Any]:
    """The messages, as `prompt`, and images of a raw row that gives no RLHF row."""
    if (sft := dataset.to_sft(raw, index, split)) is not None:
        return {"prompt": sft.messages, "images": sft.images}
    pair = dataset.to_preference(raw, index, split) if "preference" in dataset.kinds else None
    return {"prompt": pair.prompt, "images": pair.images} if pair else {"prompt": []}


def _questions_of_file(path: str, known: Sequence[str]) -> tuple[list[str], list[str]]:
    """(question, data source) of the rows of a parquet file of any kind."""
    if not os.path.exists(path):
        close = nearest(path, known)
        raise DataError(
            f"--decontaminate {path}: no such file",
            hint=f"did you mean {close!r}?" if close else "give a parquet file that `posttrain prep` writes",
        )
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(path).names
    except (OSError, ValueError) as error:
        raise DataError(f"--decontaminate {path}: not a readable parquet file: {error}", hint="give another") from error
    if "chosen" in names and "rejected" in names:
        pairs = read_preferences(path)
        return [question(pair.prompt, pair.images) for pair in pairs], [""] * len(pairs)
    if "messages" in names and "prompt" not in names:
        rows = [parse_conversation(r, path, i) for i, r in read_rows(path, ("messages",), ("tools", "images"))]
        return [question(row.messages, row.images) for row in rows], [""] * len(rows)
    prompts = [
        parse_prompt({"data_source": "", "reward_model": {"ground_truth": None}, **r}, path, i)
        for i, r in read_rows(path, ("prompt",), ("data_source", "images"))
    ]
    return [question(prompt.messages, prompt.images) for prompt in prompts], [prompt.data_source for prompt in prompts]
