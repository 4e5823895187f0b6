"""What went wrong, for people: each response that is not right, with its problem, its verdict and what was expected."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from posttrain.core.errors import ConfigError
from posttrain.core.files import replacing
from posttrain.core.text import markdown, markdown_block
from posttrain.core.types import Message, Score
from posttrain.evaluation.grading import Graded, failure_of
from posttrain.tracking.examine import conversation, spoken

_COLUMNS = (
    "row", "sample", "data_source", "level", "kind", "response", "messages", "expected", "extracted", "score", "error",
    "branches",
)  # fmt: skip
_SUFFIXES = (".md", ".jsonl", ".parquet")


def check_suffix(path: Path) -> None:
    """Raise ``ConfigError`` where failures cannot be written to a file of this suffix."""
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"--failures {path}: not one of {', '.join(_SUFFIXES)}", hint="--failures failures.md")


def failures_of(graded: Graded) -> Iterator[dict[str, Any]]:
    """One record for each response that is not right: `kind` is ``wrong``, ``unfinished`` (by its grader, and so
    wrong), ``grader_failed`` or ``episode_failed``."""
    row = graded.row
    for number, score in enumerate(graded.scores):
        if score is not None and score.error is None and score.correct:
            continue
        kind = failure_of(score) or "wrong"
        values = (
            row.number, number, row.data_source, row.level, kind, row.responses[number] or "",
            json.dumps(_messages(graded, number), ensure_ascii=False), str(row.ground_truth),
            None if score is None else score.extracted,
            None if score is None or score.error is not None else float(score.score),
            row.errors[number] if score is None else score.error, row.branches[number] if row.branches else None,
        )  # fmt: skip
        yield dict(zip(_COLUMNS, values, strict=True))


def _messages(graded: Graded, number: int) -> list[Message]:
    row = graded.row
    if row.conversations:
        found: list[Message] = json.loads(row.conversations[number])
        return found
    return [*row.prompt, {"role": "assistant", "content": row.responses[number] or ""}]


def as_markdown(graded: Graded) -> Iterator[str]:
    """A section for a problem with failures: how many of its responses are right, and each that is not."""
    found = list(failures_of(graded))
    if not found:
        return
    row = graded.row
    level = f", level {markdown(row.level)}" if row.level else ""
    right = len(graded.scores) - len(found)
    yield f"\n## Row {row.number}: {markdown(row.data_source)}{level}, {right} of {len(graded.scores)} right\n"
    for record in found:
        metadata = {name: record[name] for name in ("kind", "extracted", "score", "error") if record[name] is not None}
        text = conversation(json.loads(record["messages"]), row.data_source, row.ground_truth, metadata)
        yield f"\n### Sample {record['sample']}\n\n{markdown_block(text)}\n"
        for branch in json.loads(record["branches"] or "[]"):
            yield f"\nA branch, to which the first {branch['given']} messages were given:\n"
            yield "\n" + markdown_block("\n".join(spoken(branch["messages"]))) + "\n"


def examined(graded: Graded, number: int, score: Score) -> str:
    """One graded conversation, for `--examine`."""
    metadata = {"score": score.score, **score.parts, "correct": score.correct, "error": score.error}
    message: Message = {"role": "assistant", "content": graded.row.responses[number]}
    row = graded.row
    return conversation([message], row.data_source, row.ground_truth, metadata | {"extracted": score.extracted})


class FailuresFile:
    """Writes failures as they are found: `.md` to read, `.jsonl` or `.parquet` to work with. A context manager; the
    file is there whole or not at all.

    Raises:
        ConfigError: another suffix, or it cannot be written there.
        RunError: the disk is full or broken, also when it is closed.
    """

    def __init__(self, path: Path) -> None:
        check_suffix(path)
        self.path = path
        self.count = 0
        self._closing = ExitStack()
        self._records: list[dict[str, Any]] = []
        self._file: IO[str] | None = None

    def add(self, graded: Graded) -> None:
        records = list(failures_of(graded))
        self.count += len(records)
        if self.path.suffix == ".parquet":
            self._records += records
        elif self.path.suffix == ".jsonl":
            self._write(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records)
        else:
            self._write(as_markdown(graded))

    def _write(self, texts: Iterator[str]) -> None:
        if self._file is not None:
            self._file.writelines(texts)

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            self._temporary = opening.enter_context(replacing(self.path, hint="choose another file"))
            opening.push(self._finish)
            self._file = opening.enter_context(self._temporary.open("w", encoding="utf-8", errors="replace"))
            self._closing = opening.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closing.__exit__(kind, error, at)

    def _finish(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Write the rows that parquet takes all at once, where nothing went wrong."""
        if error is None and self.path.suffix == ".parquet":
            _write_records(self._temporary, self._records)


def _write_records(path: Path, records: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {"row": pa.int64(), "sample": pa.int32(), "score": pa.float64()}
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in _COLUMNS])
    pq.write_table(pa.Table.from_pylist(records, schema=schema), path)
