"""What to do with a file that a command does not want: the command that converts it, or the one that trains on it."""

from __future__ import annotations

import csv
import gzip
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import IO, cast

RLHF = ("data_source", "prompt", "reward_model")
SFT = ("messages",)
PREFERENCE = ("chosen", "rejected")
"""Columns that a row must have"""

_KINDS = {RLHF: "an RLHF file", SFT: "an SFT file", PREFERENCE: "a preference file"}
_CONVERSATIONS = ({"messages"}, {"conversations"}, {"conversation"})
_ANSWERS = ({"prompt", "response"}, {"prompt", "completion"}, {"question", "answer"}, {"instruction", "output"})
_RAW = (".jsonl", ".json", ".csv", ".jsonl.gz", ".json.gz", ".csv.gz")
_PEEK_BYTES = 1 << 20
"""Most bytes that are read of the first row of a text file, to see its columns."""


def of_columns(path: str | Path, needed: Sequence[str], columns: Sequence[str]) -> str | None:
    """Return a hint for a parquet file with these columns where those ``needed`` are wanted. None: nothing is known of
    it."""
    wanted = tuple(needed)
    if wanted not in _KINDS:
        return None
    found = next((kind for kind in _KINDS if set(kind) <= set(columns)), None)
    looks = f"this looks like {_KINDS[found]}; here {_KINDS[wanted]} is needed ({', '.join(needed)})" if found else None
    advice = _command(path, wanted, columns)
    return "; ".join(filter(None, (looks, advice))) or None


def of_other_format(path: str | Path, needed: Sequence[str]) -> str | None:
    """Return a hint for a file that is no parquet, such as JSON lines. None: nothing is known of it."""
    wanted, path = tuple(needed), Path(path)
    columns = _peek(path)
    if columns is None or wanted not in _KINDS:
        return None
    if path.name.endswith(_RAW):
        return _command(path, wanted, columns)
    named = path.with_suffix(".jsonl")
    return f"it holds JSON lines: name it {named}; {_command(named, wanted, columns) or 'prep reads it then'}"


def of_folder(path: str | Path) -> str | None:
    """Return a hint for a folder without parquet files. None: nothing is known of it."""
    raw = next((file for file in sorted(Path(path).iterdir()) if file.name.endswith(_RAW)), None)
    if raw is None:
        return None
    return f"it has {raw.name}: {_prep('messages', path)} of conversations, `posttrain prep preferences` of pairs"


def _command(path: str | Path, wanted: tuple[str, ...], columns: Sequence[str]) -> str | None:
    """Return what a file with these columns is good for."""
    has = set(columns)
    imitated = any(names <= has for names in (*_CONVERSATIONS, *_ANSWERS))
    pairs, conversion = set(PREFERENCE) <= has, f"{_prep('messages', path)} of it"
    if wanted == SFT:
        if pairs or set(RLHF) <= has:
            return f"`posttrain {'prefer' if pairs else 'rl'} --data` trains on such rows"
        return conversion if imitated else None
    if wanted == PREFERENCE and pairs:
        return f"{_prep('preferences', path)} of it"
    if wanted == RLHF and set(RLHF) <= has:
        return "write its rows with posttrain.data.parquet.write_rows (docs/your-own-task.md)"
    if not imitated:
        return None
    needs = "docs/preference.md" if wanted == PREFERENCE else "docs/your-own-task.md"
    ready = set(SFT) <= has and str(path).endswith(".parquet")
    instead = "`posttrain sft --data` trains on such rows" if ready else f"for `posttrain sft` {conversion}"
    return f"a row needs {', '.join(wanted)} ({needs}); {instead}"


def _prep(dataset: str, path: str | Path) -> str:
    """Return the command that converts a file, and what comes of it."""
    stem = Path(path).name.partition(".")[0] or "mine"
    source, out = shlex.quote(str(path)), shlex.quote(f"data/{stem}")
    made = {"messages": "sft_train", "preferences": "prefer_train"}[dataset]
    return f"`posttrain prep {dataset} --source {source} --out {out}` makes {out}/{made}.parquet"


def _peek(path: Path) -> list[str] | None:
    """Return the columns of the first row of a text file; None: it is no JSON and no CSV."""
    try:
        with cast("IO[bytes]", gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as stream:
            text = stream.read(_PEEK_BYTES).decode("utf-8-sig", errors="replace").lstrip()
    except (OSError, EOFError):
        return None
    if text.startswith(("{", "[")):
        try:
            row, _ = json.JSONDecoder().raw_decode(text.lstrip("[ \r\n\t"))
        except ValueError:
            return []  # a row longer than what was read
        return list(row) if isinstance(row, dict) else []
    if ".csv" in path.suffixes:
        return next(csv.reader(text.splitlines()), [])
    return None
