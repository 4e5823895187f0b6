"""The card beside a prepared file: where its rows come from, which were left out, and what is known about the others.

``<file>.card.json`` is for programs; ``README.md`` in the same folder says the same of all files there, for people.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from posttrain.core.errors import DataError
from posttrain.core.text import markdown, markdown_code
from posttrain.prep.decontaminate import Overlap

SUFFIX = ".card.json"
README = "README.md"
_MADE = "<!-- Made by `posttrain prep` from the cards beside it; the next prep into this folder writes it again. -->"
EXAMPLES = 5
"""Most examples of one thing in a card."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Source(_Part):
    """Where the rows come from."""

    given: str | None
    """`--source`; null: the hub, or generated."""
    hub_id: str | None
    """The set on the hub."""
    files: dict[str, str]
    """sha256 of each raw file that was read, by path below the source."""


class Dropped(_Part):
    """Rows that were left out for one reason."""

    reason: str
    """Why."""
    rows: list[int]
    """Their numbers in the split as it was read, from 0."""
    examples: list[str]
    """What is wrong with the first of them, and how they begin."""


class Duplicates(_Part):
    """Rows that an earlier row says already. They are counted, not dropped."""

    exact: int
    """Rows whose text is the same, letter by letter."""
    normalised: int
    """Rows whose text is the same but for case, white space and punctuation; the exact ones among them."""
    examples: list[tuple[int, int]]
    """The first of them: row, earlier row."""


class Overlaps(_Part):
    """Rows that share 13 words in a row with an evaluation set."""

    evaluation: str
    """The evaluation set: a file, or a split of the same set."""
    rows: int
    """How many rows of this file do."""
    examples: list[str]
    """The first of them."""


class Card(_Part):
    """What is known about one file."""

    file: str
    """Its name."""
    kind: Literal["rlhf", "sft", "preference"]
    """Which row schema it has."""
    dataset: str
    """The set's name in `prep --list`."""
    split: str
    """The split that its rows were read from."""
    licence: str
    """The set's licence."""
    rows: int
    """Rows in it."""
    sha256: str
    """Digest of the file."""
    read: int
    """Rows of the split that were read."""
    data_sources: dict[str, int]
    """Rows by data source (RLHF)."""
    skipped: dict[str, int]
    """Raw rows that are no part of the set as it is used here, by reason."""
    dropped: list[Dropped]
    """Rows that were read and left out, by reason."""
    lengths: dict[str, dict[str, float]]
    """Mean and percentiles of the rows' lengths, by what was measured."""
    duplicates: Duplicates
    """Rows that come twice: the prompt in RLHF, all of the row in SFT and preferences."""
    overlaps: list[Overlaps]
    """Overlap of what is left with evaluation sets."""
    source: Source
    """Where the rows come from."""
    options: dict[str, Any]
    """What prep was asked for."""
    version: str
    """Version of posttrain."""


def sha256(path: Path) -> str:
    """Hexadecimal digest of a file. Raises ``DataError`` where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: unreadable: {error}", hint="check its permissions") from error


def digests(files: Iterable[Path], source: str | None) -> dict[str, str]:
    """sha256 of raw files, by their path below the source (a folder), else by their name."""
    root = Path(source) if source else None
    return {
        str(file.relative_to(root)) if root and file.is_relative_to(root) and file != root else file.name: sha256(file)
        for file in files
    }


def overlaps(name: str, found: Mapping[int, Overlap]) -> Overlaps:
    """What a card says of the overlap with one evaluation set; by row of the file."""
    examples = [f"row {row} and its row {o.eval_row}: {o.shared}" for row, o in list(found.items())[:EXAMPLES]]
    return Overlaps(evaluation=name, rows=len(found), examples=examples)


def dropped(reason: str, rows: Sequence[tuple[int, str]]) -> Dropped:
    """All rows, as (number, what is wrong with it), that were dropped for one reason."""
    return Dropped(reason=reason, rows=[row for row, _ in rows], examples=[text for _, text in rows[:EXAMPLES]])


def write_card(card: Card, folder: Path) -> str:
    """Write the card of ``card.file`` into a folder; its file name."""
    name = card.file + SUFFIX
    (folder / name).write_text(card.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return name


def read_card(path: Path) -> Card:
    """A card. Raises ``DataError`` where it is not one."""
    try:
        return Card.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise DataError(f"{path}: not a card: {error}", hint="delete it, or prepare the set again") from error


def is_ours(readme: Path) -> bool:
    """Return whether a README was written by prep, and may be written again."""
    try:
        return readme.read_text(encoding="utf-8", errors="replace").startswith(_MADE)
    except OSError:
        return False


def readme(cards: Sequence[Card]) -> str:
    """The page about all files of a folder."""
    names = dict.fromkeys(card.dataset for card in cards)
    parts = [_MADE, f"\n# {markdown(', '.join(names))}\n", _overview(cards)]
    parts += [_section(card) for card in cards]
    return "\n".join(parts)


def _overview(cards: Sequence[Card]) -> str:
    rows = [
        (
            markdown_code(c.file),
            c.kind,
            f"{c.rows:,}",
            f"{sum(len(d.rows) for d in c.dropped):,}",
            f"{c.duplicates.normalised:,}",
            markdown(c.licence),
            f"`{c.sha256[:12]}`",
        )
        for c in cards
    ]
    return _table(("file", "rows are", "rows", "dropped", "duplicates", "licence", "sha256"), rows)


def _section(card: Card) -> str:
    source = card.source.given or card.source.hub_id or "generated"
    lines = [
        f"## {markdown(card.file)}\n",
        f"{card.rows:,} {card.kind} rows of {markdown_code(card.dataset)}, split {markdown(card.split)} "
        f"({card.read:,} rows read), from {markdown_code(source)}. Licence: {markdown(card.licence)}. "
        f"sha256 `{card.sha256}`.\n",
    ]
    if card.source.files:
        lines.append(
            "Raw files: "
            + ", ".join(f"{markdown_code(file)} ({sha[:12]})" for file, sha in card.source.files.items())
            + "\n"
        )
    if card.data_sources:
        named = ", ".join(f"{markdown_code(name)} {n:,}" for name, n in card.data_sources.items())
        lines.append(f"Data sources: {named}\n")
    if card.lengths:
        columns = list(next(iter(card.lengths.values())))
        lines.append(
            _table(("length", *columns), [(n, *(f"{v[c]:g}" for c in columns)) for n, v in card.lengths.items()])
        )
    lines += _findings(card)
    return "\n".join(lines)


def _findings(card: Card) -> list[str]:
    double = card.duplicates
    lines = [f"Duplicates: {double.exact:,} exact, {double.normalised:,} normalised.\n"]
    lines += [f"Overlap with {markdown(o.evaluation)}: {o.rows:,} rows.{_listed(o.examples)}\n" for o in card.overlaps]
    lines += [f"Not part of the set: {n:,} rows: {markdown(reason)}.\n" for reason, n in card.skipped.items()]
    lines += [f"Dropped: {len(d.rows):,} rows: {markdown(d.reason)}.{_listed(d.examples)}\n" for d in card.dropped]
    return lines


def _listed(examples: Sequence[str]) -> str:
    return "".join(f"\n- {markdown(example)}" for example in examples)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
