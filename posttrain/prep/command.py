"""``posttrain prep``: raw rows of a data set to checked RLHF, SFT and preference parquet files, each with a card."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from posttrain import __version__
from posttrain.core.cycles import rare_cycle_search
from posttrain.core.errors import DataError
from posttrain.core.files import refuse_inputs, writing
from posttrain.core.plugins import user_code
from posttrain.core.registry import nearest
from posttrain.core.text import printable, table
from posttrain.core.types import Message, ToolSchema
from posttrain.data.parquet import write_rows
from posttrain.prep import card as cards
from posttrain.prep import measure
from posttrain.prep.datasets import DATASETS, Dataset, Kind, available_splits, open_dataset, raw_rows
from posttrain.prep.rows import EvaluationOverlap, Item, Split, check_apart, collect
from posttrain.tools import Tool


@dataclass(frozen=True)
class PrepReport:
    """What a prep wrote."""

    name: str
    out: str
    rows: dict[str, int]
    """File name to its number of rows."""
    dropped: dict[str, int]
    """Reason to the number of rows that were left out."""
    notes: list[str]
    """How splits overlap."""
    seconds: float


LISTED = ("name", "licence", "size", "splits", "grader", "rows")
"""What ``listing`` says of a data set."""


def listing() -> list[tuple[str, ...]]:
    """Each data set that prep knows, as ``LISTED``: its size by split, and its kinds of rows."""
    rows: list[tuple[str, ...]] = []
    for name in DATASETS.names():
        known = open_dataset(name)
        with user_code(f"data set {name!r} cannot be listed", known):
            size = ", ".join(f"{split} {known.size[split]:,}" for split in known.splits if split in known.size)
            size = size or ("any" if known.hub_id is None else "unknown")
            rows.append((name, known.licence, size, ", ".join(known.splits), known.grader, ", ".join(known.kinds)))
    return rows


def print_list() -> None:
    """Print ``listing`` as a table; where stdout is no terminal, as lines with tabs."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        console.print(table(LISTED, listing(), numbers=False))
        return
    for row in listing():
        print(printable("\t".join(row)))


@dataclass(frozen=True)
class Options:
    """What a prep is asked for."""

    limit: int | None = None
    """Most rows of every split."""
    train_rows: int | None = None
    """Most rows of the train split; of a generated set, how many."""
    test_rows: int | None = None
    """The same for the test split."""
    seed: int = 0
    """Seed of generated data."""
    splits: Sequence[str] = ()
    """Only these; none: all."""
    template: str | None = None
    """A chat template that must render every row; see ``measure.open_chat_lengths``."""
    tokenizer: str | None = None
    """Measures the rows in tokens; see ``measure.open_chat_lengths``."""
    tools: Sequence[str] = ()
    """Tools, named as in `rollout.tools`: their schemas go into SFT and preference rows, their ``tools_kwargs`` into
    RLHF rows."""
    demos: str | None = None
    """What the demonstrations of a set that has several kinds show (``Dataset.demos``); None: its default."""
    val_fraction: float = 0.0
    """Share of the train split that goes into ``val`` files instead, chosen by a hash of the prompt."""
    decontaminate: Sequence[str] = ()
    """Parquet files, splits of this set, or sets beside the source, whose prompts no training row may overlap."""

    def __post_init__(self) -> None:
        flags = (("--limit", self.limit), ("--train-rows", self.train_rows), ("--test-rows", self.test_rows))
        for flag, value in flags:
            if value is not None and value < 1:
                raise DataError(f"{flag} must be at least 1, not {value}", hint="leave it out for all rows")
        if not 0 <= self.val_fraction < 1:
            raise DataError(f"--val-fraction must be in [0, 1), not {self.val_fraction}", hint="0.05 is usual")

    def rows_of(self, split: str) -> int | None:
        """Most rows of a split; None: all."""
        return {"train": self.train_rows, "test": self.test_rows}.get(split) or self.limit


def run(
    name: str, source: str | None = None, out: str | None = None, *, overwrite: bool = False, **options: Any
) -> PrepReport:
    """Write ``<split>.parquet`` (RLHF), ``sft_<split>.parquet`` and ``prefer_<split>.parquet`` of each split, whatever
    the set has, their cards and a README.

    Every gold answer is graded by the row's own grader first, and every row is checked against its schema. Bad rows are
    dropped and listed in the card while they are under 0.5 % of a split. All files appear together, or none does.

    Args:
        name: of the data set.
        source: raw files: a file, a folder or a glob. None: the hub, or generated.
        out: folder to write to; None: ``data/<name>``.
        overwrite: replace files that are there.
        options: fields of ``Options``.

    Raises:
        ConfigError: there is no such data set or tool, a tool cannot be opened, or a file that is read would be
            replaced.
        DataError: a bad option, source or row, too many bad rows, or ``out`` holds these files already.
        ModelError: the tokenizer cannot be loaded.
    """
    started = time.perf_counter()
    with rare_cycle_search():
        rows, dropped, notes = _prepare(name, source, Path(out or f"data/{name}"), overwrite, Options(**options))
    return PrepReport(name, str(Path(out or f"data/{name}")), rows, dropped, notes, time.perf_counter() - started)


def _prepare(
    name: str, source: str | None, folder: Path, overwrite: bool, asked: Options
) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """What ``run`` does; (rows by file, dropped rows by reason, how splits overlap)."""
    dataset = open_dataset(name, asked.demos)
    tools = _opened(asked.tools)
    splits = _chosen(dataset, source, asked)
    written = [*splits, "val"] if asked.val_fraction else splits
    _check_folder(folder, [] if overwrite else [file for split in written for file in _files(split).values()])
    with user_code(f"data set {dataset.name!r}: source_files", dataset):
        raw = list(dataset.source_files(source))
    for file in (file for split in written for kind, file in _files(split).items() if kind in dataset.kinds):
        refuse_inputs(folder / file, "--out", [*raw, *asked.decontaminate])
    lengths = measure.open_chat_lengths(asked.template, asked.tokenizer)
    parts = {
        split: collect(dataset, split, raw_rows(dataset, split, source, n=asked.rows_of(split), seed=asked.seed), tools)
        for split in splits
    }
    comparison = EvaluationOverlap(dataset, source, asked.decontaminate, parts)
    for part in parts.values():
        comparison.clean(part)
    notes = [*check_apart(dataset, parts), *_overlaps(parts)]
    written_parts = _with_val(parts, asked.val_fraction)
    rows: dict[str, int] = {}
    with _all_or_nothing(folder) as temporary:
        files = cards.Source(given=source, hub_id=dataset.hub_id, files=cards.digests(raw, source))
        writer = _Writer(dataset, files, asked, temporary, lengths, [tool.schema for tool in tools])
        for split, part in written_parts.items():
            rows |= writer.write(split, part)
        _write_readme(temporary, folder)
    dropped: Counter[str] = Counter()
    for part in parts.values():
        dropped.update({reason: len(faults) for reason, faults in part.dropped.items()})
    return rows, dict(dropped), notes


def _overlaps(parts: dict[str, Split]) -> list[str]:
    """A line on each evaluation set whose prompts rows of a training split overlap."""
    return [
        f"{len(hits):,} of the {len(part.items):,} rows of split {split!r} overlap {name} (13 words in a row, or all); "
        f"--decontaminate {name} drops them"
        for split, part in parts.items()
        for name, hits in part.overlaps.items()
        if hits
    ]


def _opened(names: Sequence[str]) -> list[Tool]:
    """The tools of these names."""
    if not names:
        return []
    from posttrain.tools.sets import open_tools

    return list(open_tools(names).values())


def _files(split: str) -> dict[Kind, str]:
    """The files of a split, by what their rows are."""
    return {"rlhf": f"{split}.parquet", "sft": f"sft_{split}.parquet", "preference": f"prefer_{split}.parquet"}


def _chosen(dataset: Dataset, source: str | None, asked: Options) -> list[str]:
    """The splits to prepare."""
    available = list(available_splits(dataset, source))
    for split in asked.splits:
        if split not in available:
            close = nearest(split, available)
            hint = f"did you mean {close!r}?" if close else f"there are: {', '.join(available)}"
            raise DataError(f"{dataset.name}: there is no split {split!r}", hint=hint)
    splits = [split for split in available if not asked.splits or split in asked.splits]
    if asked.val_fraction and "train" not in splits:
        raise DataError("--val-fraction takes rows of the split 'train', which is not prepared", hint="leave it out")
    if asked.val_fraction and "val" in splits:
        raise DataError(f"{dataset.name} has a split 'val' of its own", hint="leave --val-fraction out")
    return splits


def _check_folder(folder: Path, files: Sequence[str]) -> None:
    """Refuse a folder that holds one of these files, or a README that is not ours."""
    if os.path.exists(folder) and not folder.is_dir():
        raise DataError(f"{folder}: exists and is not a folder", hint="choose another folder with --out")
    for file in [*files, *(file + cards.SUFFIX for file in files)]:
        if os.path.exists(folder / file):
            raise DataError(f"{folder / file} exists already", hint="--overwrite replaces it, --out writes elsewhere")
    readme = folder / cards.README
    if os.path.exists(readme) and not cards.is_ours(readme):
        raise DataError(f"{readme} exists already, and prep did not write it", hint="choose another folder with --out")


def _with_val(parts: dict[str, Split], fraction: float) -> dict[str, Split]:
    """The splits, some rows of train in a split ``val``. The same prompt always falls to the same side.

    Raises:
        DataError: one side would be empty.
    """
    if not fraction:
        return parts
    train = parts["train"]
    sides: dict[bool, list[Item]] = {False: [], True: []}
    for item in train.items:
        digest = hashlib.sha256(measure.normalised(item.asked)).digest()
        sides[int.from_bytes(digest[:8], "big") < fraction * 2**64].append(item)
    if not sides[True] or not sides[False]:
        raise DataError(
            f"--val-fraction {fraction:g} of {len(train.items)} rows leaves one side empty", hint="choose another"
        )
    val = Split("train", train.read, sides[True], overlaps=train.overlaps)
    return {**parts, "train": replace(train, items=sides[False]), "val": val}


class _Writer:
    """Writes the files of a split and their cards."""

    def __init__(
        self,
        dataset: Dataset,
        source: cards.Source,
        asked: Options,
        folder: Path,
        lengths: measure.ChatLengths | None,
        schemas: Sequence[ToolSchema],
    ) -> None:
        self._dataset, self._source, self._asked, self._folder = dataset, source, asked, folder
        self._lengths, self._schemas = lengths, schemas

    def write(self, split: str, part: Split) -> dict[str, int]:
        """Write what a split gives; rows by file."""
        written = {}
        for kind, file in _files(split).items():
            if items := [item for item in part.items if getattr(item, kind) is not None]:
                written[file] = write_rows(self._folder / file, [getattr(item, kind) for item in items])
                cards.write_card(self._card(kind, file, part, items), self._folder)
        return written

    def _card(self, kind: Any, file: str, part: Split, items: Sequence[Item]) -> cards.Card:
        kept = {item.row: number for number, item in enumerate(items)}
        texts = [measure.full_text(_messages(kind, item)) for item in items]
        return cards.Card(
            file=file,
            kind=kind,
            dataset=self._dataset.name,
            split=part.name,
            licence=self._dataset.licence,
            rows=len(items),
            sha256=cards.sha256(self._folder / file),
            read=part.read,
            data_sources=dict(Counter(item.data_source for item in items)) if kind == "rlhf" else {},
            skipped=part.skipped,
            dropped=[cards.dropped(reason, rows) for reason, rows in part.dropped.items()],
            lengths=self._measured(kind, file, items, texts),
            duplicates=_duplicates([item.asked for item in items], texts),
            overlaps=[
                cards.overlaps(name, {kept[row]: overlap for row, overlap in hits.items() if row in kept})
                for name, hits in part.overlaps.items()
            ],
            source=self._source,
            options={key: value for key, value in asdict(self._asked).items() if value},
            version=__version__,
        )

    def _measured(
        self, kind: str, file: str, items: Sequence[Item], texts: Sequence[str]
    ) -> dict[str, dict[str, float]]:
        what = {"rlhf": "prompt", "sft": "conversation", "preference": "pair"}[kind]
        measured = {
            f"{what}, characters": measure.percentiles([len(text) for text in texts]),
            f"{what}, words": measure.percentiles([len(text.split()) for text in texts]),
        }
        if self._lengths:
            values = [self._rendered(kind, file, number, item) for number, item in enumerate(items)]
            what = "longer one of a pair" if kind == "preference" else what
            measured[f"{what} in the chat template, {self._lengths.unit}"] = measure.percentiles(values)
        return measured

    def _rendered(self, kind: str, file: str, number: int, item: Item) -> int:
        assert self._lengths is not None
        try:
            if kind == "preference":
                assert item.pair is not None
                pair = item.pair
                sides = [[*pair.prompt, *pair.chosen], [*pair.prompt, *pair.rejected]]
                return max(self._lengths.conversation(messages, pair.tools) for messages in sides)
            if kind == "sft":
                assert item.conversation is not None
                return self._lengths.conversation(item.conversation.messages, item.conversation.tools)
            assert item.prompt is not None
            return self._lengths.prompt(item.prompt.messages, item.prompt.extra_info.get("tools") or self._schemas)
        except DataError as error:
            raise DataError(f"{file}: row {number}: {error.message}", hint=error.hint) from error


def _messages(kind: str, item: Item) -> Sequence[Message]:
    """All that stands in a row of this kind."""
    if kind == "preference":
        return [*item.pair.prompt, *item.pair.chosen, *item.pair.rejected] if item.pair else ()
    typed = item.prompt if kind == "rlhf" else item.conversation
    return typed.messages if typed else ()


def _duplicates(questions: Sequence[str], texts: Sequence[str]) -> cards.Duplicates:
    exact, pairs = measure.duplicates(questions, texts)
    return cards.Duplicates(exact=exact, normalised=len(pairs), examples=pairs[: cards.EXAMPLES])


@contextmanager
def _all_or_nothing(folder: Path) -> Iterator[Path]:
    """A temporary folder whose files are moved into ``folder`` at the end: all of them, or none.

    Raises:
        ConfigError: the folder cannot be written to.
        RunError: the disk is full or broken.
    """
    made = not os.path.exists(folder)
    with writing(folder, hint="choose another folder with --out"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=".prep-", dir=folder))
            try:
                yield temporary
                _move_all(temporary, folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        finally:
            if made and folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def _move_all(temporary: Path, folder: Path) -> None:
    """Move files to a folder; if one cannot be moved, those that were there before are put back."""
    old = temporary / "old"
    old.mkdir()
    moved: list[str] = []
    try:
        for file in sorted(path.name for path in temporary.iterdir() if path.is_file()):
            if (folder / file).exists():
                os.replace(folder / file, old / file)
            moved.append(file)
            os.replace(temporary / file, folder / file)
    except BaseException:
        for file in moved:
            (folder / file).unlink(missing_ok=True)
            if (old / file).exists():
                os.replace(old / file, folder / file)
        raise


def _write_readme(temporary: Path, folder: Path) -> None:
    """The page about what the folder will hold: the new files, and those of earlier preps that stay."""
    found = {path.name: path for path in (*folder.glob("*" + cards.SUFFIX), *temporary.glob("*" + cards.SUFFIX))}
    known = [cards.read_card(path) for _, path in sorted(found.items())]
    there = [card for card in known if any((place / card.file).exists() for place in (folder, temporary))]
    (temporary / cards.README).write_text(cards.readme(there), encoding="utf-8")
