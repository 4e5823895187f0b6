"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): 7,473 train and 1,319 test grade-school word problems."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from posttrain.datasets.base import RawRow, WordProblems
from posttrain.errors import DataError


class Gsm8k(WordProblems):
    name = "gsm8k"
    data_source = "openai/gsm8k"
    licence = "MIT"
    hub_id: str | None = "openai/gsm8k"
    splits: tuple[str, ...] = ("train", "test")
    system = (
        "Reason step by step. Check your answer with the `calc_gsm8k_reward` tool, then end with a line "
        "`#### <answer>`."
    )

    def __init__(self) -> None:
        self._files: dict[str | None, dict[str, Path]] = {}

    def available(self, source: str | None) -> Sequence[str]:
        return [split for split in self.splits if split in self._find(source)]

    def rows(self, split: str, source: str | None, *, n: int | None = None, seed: int = 0) -> Iterator[RawRow]:
        """Rows in the file's order; ``seed`` is not used."""
        file = self._find(source)[split]
        return itertools.islice(_parquet(file) if file.suffix == ".parquet" else _jsonl(file), n)

    def _find(self, source: str | None) -> dict[str, Path]:
        if source not in self._files:
            self._files[source] = _local(Path(source)) if source else _download(self.hub_id or "")
        return self._files[source]


def _local(source: Path) -> dict[str, Path]:
    """The file of each split. A folder must hold both splits; a file's name says which split it is."""
    if not source.exists():
        raise DataError(f"{source}: no such file or folder", hint="give a folder with train.jsonl and test.jsonl")
    if source.is_file():
        for split in Gsm8k.splits:
            if split in source.stem and source.suffix in (".jsonl", ".parquet"):
                return {split: source}
        raise DataError(
            f"{source}: its name says neither split nor format", hint="name it like train.jsonl or test.parquet"
        )
    found: dict[str, Path] = {}
    for split in Gsm8k.splits:
        patterns = (f"{split}.jsonl", f"{split}.parquet", f"{split}-*.parquet", f"main/{split}-*.parquet")
        files = [file for pattern in patterns for file in sorted(source.glob(pattern))]
        if not files:
            raise DataError(
                f"{source}: holds neither {split}.jsonl nor {split}.parquet",
                hint="--source is a folder with train.jsonl and test.jsonl (or .parquet)",
            )
        found[split] = files[0]
    return found


def _download(hub_id: str) -> dict[str, Path]:
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(hub_id, repo_type="dataset", allow_patterns="main/*.parquet")
    except ImportError as error:
        raise DataError(
            f"{hub_id} cannot be fetched: huggingface_hub is not installed", hint="install it, or give --source FOLDER"
        ) from error
    except Exception as error:  # the hub client raises errors of many libraries; each means: no data from the hub
        raise DataError(
            f"{hub_id} cannot be fetched from the hub: {type(error).__name__}: {str(error).splitlines()[0]}",
            hint="without a network, give a local copy with --source FOLDER (train.jsonl and test.jsonl)",
        ) from error
    return _local(Path(folder))


def _jsonl(file: Path) -> Iterator[RawRow]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise DataError(f"{file}: line {number} is not JSON: {error}", hint="one object a line") from error
                if not isinstance(row, dict):
                    raise DataError(f"{file}: line {number} is not a JSON object", hint="one object a line")
                yield row
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: unreadable: {error}", hint="the file must be UTF-8 text") from error


def _parquet(file: Path) -> Iterator[RawRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file}: not a readable parquet file: {error}", hint="it may be truncated") from error
