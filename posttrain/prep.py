"""``posttrain prep``: raw rows of a dataset to checked RLHF and SFT parquet files."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.data.parquet import sft_row, write_rows
from posttrain.datasets import DATASETS, Dataset
from posttrain.errors import DataError


@dataclass(frozen=True)
class PrepReport:
    """What a prep wrote."""

    name: str
    out: str
    rows: dict[str, int]
    """File name to its number of rows."""
    seconds: float


def run(
    name: str,
    source: str | None = None,
    out: str | None = None,
    *,
    limit: int | None = None,
    train_rows: int | None = None,
    test_rows: int | None = None,
    seed: int = 0,
    overwrite: bool = False,
) -> PrepReport:
    """Write ``train.parquet``, ``test.parquet`` (RLHF) and ``sft_train.parquet``, ``sft_test.parquet`` into ``out``.

    ``out`` defaults to ``data/<name>``. ``limit`` caps the rows of every split; ``train_rows`` and ``test_rows`` those
    of one. Every gold answer is graded by the dataset's own grader first. All files appear together, or none does.

    Raises:
        ConfigError: there is no dataset ``name``.
        DataError: bad source or row, a gold answer that its own grader rejects, or ``out`` holds these files already.
    """
    started = time.perf_counter()
    for flag, value in (("--limit", limit), ("--train-rows", train_rows), ("--test-rows", test_rows)):
        if value is not None and value < 1:
            raise DataError(f"{flag} must be at least 1, not {value}", hint="leave it out for all rows")
    dataset = DATASETS.get(name)()
    counts = {"train": train_rows or limit, "test": test_rows or limit}
    folder = Path(out or f"data/{name}")
    splits = dataset.available(source)
    if not overwrite:
        _refuse_existing(folder, [file for split in splits for file in _file_names(split)])
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".prep-", dir=folder))
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error}", hint="choose another folder with --out") from error
    rows: dict[str, int] = {}
    try:
        for split in splits:
            raw = list(_checked(dataset, split, dataset.rows(split, source, n=counts.get(split, limit), seed=seed)))
            if not raw:
                raise DataError(f"{name}: split {split!r} has no rows", hint="check --source and the row limits")
            rlhf, sft = _file_names(split)
            rows[rlhf] = write_rows(temporary / rlhf, (dataset.to_rlhf(r, i, split) for i, r in enumerate(raw)))
            rows[sft] = write_rows(temporary / sft, (sft_row(dataset.to_sft(r, i, split)) for i, r in enumerate(raw)))
        for file in rows:
            os.replace(temporary / file, folder / file)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if made and not any(folder.iterdir()):
            folder.rmdir()
    return PrepReport(name, str(folder), rows, time.perf_counter() - started)


def _file_names(split: str) -> tuple[str, str]:
    """(RLHF file, SFT file) of a split."""
    return f"{split}.parquet", f"sft_{split}.parquet"


def _refuse_existing(folder: Path, files: list[str]) -> None:
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder}: exists and is not a folder", hint="choose another folder with --out")
    for file in files:
        if (folder / file).exists():
            raise DataError(f"{folder / file} exists already", hint="--overwrite replaces it, --out writes elsewhere")


def _checked(dataset: Dataset, split: str, rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows, each after its gold answer was graded 1.0."""
    for index, row in enumerate(rows):
        where = f"{dataset.name} {split} row {index}"
        try:
            score = dataset.check(row)
        except DataError as error:
            raise DataError(f"{where}: {error.message}", hint=error.hint) from error
        if score.error is not None or not score.correct:
            reason = score.error or f"the grader read {score.extracted!r}"
            raise DataError(f"{where}: the gold answer is not graded as right: {reason}", hint="correct the row")
        yield row
