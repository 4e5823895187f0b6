"""Raw files of data sets, as people have them: which file holds which split, and the rows of a file.

Formats: ``.jsonl``, ``.json`` (a list, an object with one list of rows, one row, or lines as in ``.jsonl``),
``.parquet`` and ``.csv`` with a header, each also with ``.gz`` after it. Text is UTF-8; a byte order mark is skipped.
"""

from __future__ import annotations

import csv
import glob
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from io import BytesIO
from pathlib import Path
from typing import IO, Any, cast

from posttrain.core.errors import DataError, first_line
from posttrain.prep import card

RawRow = dict[str, Any]

FORMATS = (".jsonl", ".json", ".parquet", ".csv")
"""Where a folder has one file in several formats, the first of these is read."""
EVALUATION = ("test", "val", "validation", "dev", "eval")
"""Names of splits that are not for training."""
_CONVERSATION = frozenset({"messages", "conversations", "conversation", "prompt"})
"""Lists of objects that are part of one row, so that an object with one of them is a row, not a container of rows."""
_LONGEST_CELL = 1 << 30


def split_files(source: str, patterns: Mapping[str, Sequence[str]]) -> dict[str, list[Path]]:
    """The files of each split that ``source`` has.

    Args:
        source: a folder, a file, or a glob (``data/train-*.parquet``).
        patterns: for each split, globs within a folder without format (``train``, ``data/train-*``, several that belong
            together as ``a|b``). The first that matches names the split's files. A file given by itself belongs to the
            splits whose patterns match its name, else to the one whose name stands in its own; to the only split where
            there is one.

    Raises:
        DataError: nothing is there, nothing in a folder matches, or a file's name says neither split nor format.
    """
    path = Path(source)
    if os.path.isdir(path):  # False also of a name that no file may have, as is `exists`
        return _in_folder(path, patterns)
    files = [path] if os.path.exists(path) else sorted(Path(name) for name in glob.glob(source, recursive=True))
    files = [file for file in files if not file.is_dir() and (file == path or not _is_card(file))]
    if not files:
        expected = next(iter(patterns.values()))[0]
        raise DataError(
            f"{source}: no such file or folder", hint=f"give a folder with {expected}.jsonl, a file or a glob"
        )
    found: dict[str, list[Path]] = {split: [] for split in patterns}
    for file in files:
        for split in _splits_of(file, patterns):
            found[split].append(file)
    return {split: files for split, files in found.items() if files}


def read_raw(files: Sequence[Path]) -> Iterator[RawRow]:
    """The rows of files, in order; a jsonl, csv or parquet file is never in memory as a whole.

    Raises:
        DataError: naming the file, and where there is one the line: a file is missing, empty, truncated, of another
            format than its name says, not UTF-8, or holds something that is not a row.
    """
    for file in files:
        count = 0
        try:
            for count, row in enumerate(_rows(file), start=1):  # noqa: B007 - the count outlives the loop
                yield row
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{file}: unreadable: {error}", hint="it may be truncated") from error
        if not count:
            raise DataError(f"{file}: the file has no rows", hint="it is empty: fetch or write it again")


def download(hub_id: str, files: Sequence[str]) -> str:
    """Fetch the files of a hub data set that match the globs ``files``; the folder with them.

    Raises:
        DataError: there is no client, no network, or no such data set.
    """
    try:
        from huggingface_hub import snapshot_download

        return str(snapshot_download(hub_id, repo_type="dataset", allow_patterns=list(files)))
    except ImportError as error:
        raise DataError(
            f"{hub_id} cannot be fetched: huggingface_hub is not installed", hint="install it, or give --source"
        ) from error
    except Exception as error:  # the hub client raises errors of many libraries; each means: no data from the hub
        raise DataError(
            f"{hub_id} cannot be fetched from the hub: {type(error).__name__}: {first_line(error)}",
            hint="without a network, give local files with --source (a folder, a file or a glob)",
        ) from error


def _format(file: Path) -> str | None:
    suffix = Path(file.stem).suffix if file.suffix == ".gz" else file.suffix
    return suffix if suffix in FORMATS else None


def _stem(file: Path) -> str:
    return file.name.removesuffix(".gz").removesuffix(_format(file) or "")


def _in_folder(folder: Path, patterns: Mapping[str, Sequence[str]]) -> dict[str, list[Path]]:
    found = {}
    for split, globs in patterns.items():
        matches = ((pattern, _matching(folder, pattern)) for pattern in globs)
        pattern, files = next((match for match in matches if match[1]), ("", []))
        if pattern == "*":
            _check_alike(folder, files)
        if files:
            found[split] = files
    if not found:
        name = next(iter(patterns.values()))[0]
        raise DataError(
            f"{folder}: holds neither {name}.jsonl nor {name}.parquet",
            hint=f"looked for {', '.join(_listed(patterns))} as {', '.join(FORMATS)}, also .gz",
        )
    return found


def _check_alike(folder: Path, files: Sequence[Path]) -> None:
    """Raise ``DataError`` where some of the files that no split is named for are for evaluation, by their names."""
    held = [file for file in files if not set(re.split("[^a-z]+", _stem(file).lower())).isdisjoint(EVALUATION)]
    if held and len(held) < len(files):
        raise DataError(
            f"{folder}: {held[0].name} is for evaluation, by its name, and lies beside files that are not",
            hint="name the files to read with --source: one, or a glob",
        )


def _listed(patterns: Mapping[str, Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(pattern for globs in patterns.values() for pattern in globs))


def _matching(folder: Path, pattern: str) -> list[Path]:
    """Files whose path without format matches, sorted by name; one for each name."""
    best: dict[Path, Path] = {}
    for file in sorted(file for part in pattern.split("|") for file in folder.glob(f"{part}.*")):
        kind = _format(file)
        if kind is None or not file.is_file() or file.name.startswith(".") or _is_card(file):
            continue
        if not _fits(file, pattern):
            continue
        key = file.with_name(_stem(file))
        known = best.get(key)
        if known is None or FORMATS.index(kind) < FORMATS.index(_format(known) or ".csv"):
            best[key] = file
    return list(best.values())


def _is_card(file: Path) -> bool:
    """Return whether prep wrote a file beside its data, to say what that is."""
    return file.name.endswith(card.SUFFIX)


def _fits(file: Path, pattern: str) -> bool:
    """Return whether the end of the file's path matches: as many folders as the pattern has, and the name without
    format."""
    parts = (*file.absolute().parts[:-1], _stem(file))
    wanted = [part.split("/") for part in pattern.split("|")]
    return any(len(w) <= len(parts) and all(map(fnmatchcase, parts[-len(w) :], w)) for w in wanted)


def _splits_of(file: Path, patterns: Mapping[str, Sequence[str]]) -> list[str]:
    if _format(file) is not None:
        if len(patterns) == 1:
            return list(patterns)
        named = [split for split, globs in patterns.items() if any(_fits(file, pattern) for pattern in globs)]
        if found := named or [split for split in patterns if split in _stem(file)][:1]:
            return found
    names = ", ".join(f"{split}.jsonl" for split in patterns)
    raise DataError(
        f"{file}: its name says neither split nor format",
        hint=f"name it like {names}; formats: {', '.join(FORMATS)}, also .gz",
    )


def _rows(file: Path) -> Iterator[RawRow]:
    match _format(file):
        case ".jsonl":
            with _open(file) as lines:
                yield from _json_lines(file, lines)
        case ".json":
            yield from _json(file)
        case ".parquet":
            yield from _parquet(file)
        case ".csv":
            yield from _csv(file)
        case _:
            raise DataError(f"{file}: unknown format", hint=f"known: {', '.join(FORMATS)}, also with .gz")


def _open(file: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(file)) if file.suffix == ".gz" else file.open("rb")


def _text_lines(file: Path, lines: Iterator[bytes]) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: line {number} is unreadable: not UTF-8: {error}", hint=_UTF8) from error


_UTF8 = "the file must be UTF-8 text; `iconv -t UTF-8` converts one of another encoding"


def _json_lines(file: Path, lines: Iterator[bytes]) -> Iterator[RawRow]:
    for number, line in enumerate(_text_lines(file, lines), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file}: line {number} is not JSON: {error}", hint="one object a line") from error
        yield _row(row, _has_surrogate(line), f"{file}: line {number}")


def _json(file: Path) -> Iterator[RawRow]:
    with _open(file) as stream:
        data = stream.read()
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(text)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(f"{file}: line {line} is unreadable: not UTF-8: {error}", hint=_UTF8) from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and error.lineno > 1:
            yield from _json_lines(file, iter(BytesIO(data)))
            return
        if not text.strip():
            return
        raise DataError(f"{file}: line {error.lineno} is not JSON: {error}", hint="it may be truncated") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: is not JSON: {error}", hint="it is damaged") from error
    rows = value if isinstance(value, list) else _contained(value)
    suspect = _has_surrogate(text)
    for number, row in enumerate(rows):
        yield _row(row, suspect, f"{file}: element {number}")


def _contained(value: Any) -> list[Any]:
    """The rows of a top-level object: its one list of objects, else itself."""
    if not isinstance(value, dict):
        return [value]
    lists = [
        (key, items)
        for key, items in value.items()
        if isinstance(items, list) and items and all(isinstance(item, dict) for item in items)
    ]
    return lists[0][1] if len(lists) == 1 and lists[0][0] not in _CONVERSATION else [value]


def _has_surrogate(text: str) -> bool:
    """Return whether a JSON text may hold half a surrogate pair: only an escape can smuggle one in."""
    return "\\ud" in text or "\\uD" in text


def _row(row: Any, suspect: bool, where: str) -> RawRow:
    if not isinstance(row, dict):
        raise DataError(f"{where} is not a JSON object", hint=f"a row is an object; this is {type(row).__name__}")
    if suspect:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{where} has a character that UTF-8 cannot hold: {error}", hint=_UTF8) from error
    return row


def _parquet(file: Path) -> Iterator[RawRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = 0
    try:
        with _open(file) as stream, pq.ParquetFile(stream) as parquet:
            for batch in parquet.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield row
                    count += 1
    except (OSError, EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(
            f"{file}: not a readable parquet file after row {count}: {error}"
            if count
            else f"{file}: not a readable parquet file: {error}",
            hint="it may be truncated",
        ) from error


def _csv(file: Path) -> Iterator[RawRow]:
    csv.field_size_limit(_LONGEST_CELL)
    with _open(file) as lines:
        reader = csv.DictReader(_text_lines(file, lines), strict=True)
        try:
            header = [name for name in reader.fieldnames or [] if name]
            if twice := next((name for name in header if header.count(name) > 1), None):
                # One of the two would be lost without a word.
                raise DataError(f"{file}: the header has the column {twice!r} twice", hint="rename one of the two")
            for row in reader:
                if None in row or None in row.values():
                    raise DataError(
                        f"{file}: line {reader.line_num} has another number of fields than the header",
                        hint=f"the header is {', '.join(reader.fieldnames or [])}",
                    )
                yield row
        except csv.Error as error:
            line = reader.reader.line_num
            raise DataError(f"{file}: line {line} is not CSV: {error}", hint="it is damaged") from error
