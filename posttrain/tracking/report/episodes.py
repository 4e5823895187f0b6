"""The trajectories of a run: numbers of all of them, and a choice of those that the page shows whole.

Shape legend: E episodes of one rollout file, T tokens of one episode.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.core.errors import DataError

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

LIGHT = ("kind", "step", "group", "reward", "correct", "prompt_length", "error", "weight_version")
"""Columns that are read of every trajectory. The last one costs next to nothing: it hardly changes along an episode."""
_BRANCH = "branch"
"""Column that older files lack."""
_MOST_STEPS = 64
"""Steps whose trajectories are shown, besides the best, worst and failed of all: each costs reading a file."""
_EXTREMES = 12
"""Best, worst and failed trajectories that are shown whatever their step."""


@dataclass(frozen=True)
class FileNumbers:
    """What the page says of all trajectories of a rollout file, whether it shows them or not."""

    path: Path
    kind: str
    step: int
    tokenizer: str
    """Fingerprint, or empty."""
    group: Ints
    """[E]"""
    episode: Ints
    """[E] number of the episode: that of the row before for a further branch of an agent's."""
    reward: Floats
    """[E]"""
    length: Ints
    """[E] tokens after the prompt."""
    tokens: Ints
    """[E] tokens in all."""
    failed: Bools
    """[E]"""
    correct: Bools
    """[E]"""
    staleness: dict[int, int]
    """Steps that the weights were behind -> tokens that they sampled."""


def read_numbers(path: Path) -> FileNumbers:
    """Return the light columns of a rollout file of one step. Raises ``DataError``."""
    try:
        file = pq.ParquetFile(path)
        branches = _BRANCH in file.schema_arrow.names
        table = file.read(columns=[*LIGHT, _BRANCH] if branches else list(LIGHT))
        made_with = (file.schema_arrow.metadata or {}).get(b"posttrain.tokenizer", b"").decode()
        columns = {name: table[name].combine_chunks() for name in LIGHT}
    except (OSError, KeyError, pa.ArrowException) as error:
        raise DataError(f"{path}: unreadable: {error}", hint="the file is damaged") from error
    versions = columns["weight_version"]
    tokens = np.asarray(versions.value_lengths()).astype(np.int64)
    step = int(columns["step"][0].as_py())
    first = np.asarray(table[_BRANCH]) == 0 if branches else np.ones(len(tokens), np.bool_)
    flat = np.asarray(versions.flatten())
    behind, counts = np.unique(step - 1 - flat[flat >= 0], return_counts=True)
    return FileNumbers(
        path=path,
        kind=str(columns["kind"][0].as_py()),
        step=step,
        tokenizer=made_with,
        group=np.asarray(columns["group"]).astype(np.int64),
        episode=np.cumsum(first).astype(np.int64),
        reward=np.asarray(columns["reward"]).astype(np.float64),
        length=tokens - np.asarray(columns["prompt_length"]),
        tokens=tokens,
        failed=~np.asarray(columns["error"].is_null()),
        correct=np.asarray(columns["correct"].to_numpy(zero_copy_only=False)).astype(bool),
        staleness=dict(zip(behind.tolist(), counts.tolist(), strict=True)),
    )


class Numbers:
    """Keeps the numbers of all rollout files of a run. A file is read once, unless it was written anew."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int], FileNumbers]] = {}

    def read(self, folder: Path) -> tuple[list[FileNumbers], list[str]]:
        """Return the files of ``folder`` by step, and what was wrong with others."""
        found, problems = [], []
        for path in sorted(folder.glob("*.parquet")):
            try:
                stat = path.stat()
                mark = (stat.st_mtime_ns, stat.st_size)
                if path not in self._known or self._known[path][0] != mark:
                    self._known[path] = (mark, read_numbers(path))
                found.append(self._known[path][1])
            except (OSError, DataError) as error:  # also one that a resumed run has just removed
                problems.append(str(error))
        return sorted(found, key=lambda file: (file.step, file.kind)), problems


# ---------------------------------------------------------------------- which are shown

Place = tuple[int, int]
"""(number of the file, row in it)"""


def choose(files: Sequence[FileNumbers], most: int, most_tokens: int) -> list[Place]:
    """Return the trajectories to show: the best, worst and failed of all, then of every step, or of evenly spaced ones,
    in turn its best, worst and failed and whole groups at random (always the same ones); each with all branches of its
    episode."""
    chosen: dict[Place, None] = {}
    tokens = 0
    for place in _in_order(files):
        if place in chosen:
            continue
        file = files[place[0]]
        rows = np.flatnonzero(file.episode == file.episode[place[1]])
        tokens += int(file.tokens[rows].sum())
        if len(chosen) + len(rows) > most or (chosen and tokens > most_tokens):
            break
        chosen |= dict.fromkeys((place[0], int(row)) for row in rows)
    return sorted(chosen)


def _in_order(files: Sequence[FileNumbers]) -> Iterator[Place]:
    yield from _extremes(files)
    spaced = np.unique(np.linspace(0, len(files) - 1, min(len(files), _MOST_STEPS)).round().astype(int))
    queues = [_of_file(files[number], number) for number in spaced]
    while queues:
        left = []
        for queue in queues:
            if (place := next(queue, None)) is not None:
                yield place
                left.append(queue)
        queues = left


def _extremes(files: Sequence[FileNumbers]) -> Iterator[Place]:
    """Yield the best, worst and first failed of all."""
    if not files:
        return
    reward = np.concatenate([file.reward for file in files])
    failed = np.concatenate([file.failed for file in files])
    first = np.cumsum([0, *(len(file.reward) for file in files)])
    order = np.lexsort((np.random.default_rng(0).random(len(reward)), reward))  # equal ones from all steps
    order = order[~failed[order] & np.isfinite(reward[order])]
    for index in (*order[::-1][:_EXTREMES], *order[:_EXTREMES], *np.flatnonzero(failed)[:_EXTREMES]):
        number = int(np.searchsorted(first, index, side="right")) - 1
        yield number, int(index - first[number])


def _of_file(file: FileNumbers, number: int) -> Iterator[Place]:
    """Yield the rows of a file: its best, worst and first failed one, then group by group."""
    rng = np.random.default_rng(file.step)
    failed = np.flatnonzero(file.failed)
    yield number, int(np.argmax(np.where(file.failed, -np.inf, file.reward)))
    yield number, int(np.argmin(np.where(file.failed, np.inf, file.reward)))
    if len(failed):
        yield number, int(failed[0])
    for group in rng.permutation(np.unique(file.group)):
        yield from ((number, int(row)) for row in np.flatnonzero(file.group == group))


# ---------------------------------------------------------------------- distributions over all of them

MOST_PARTS = 100
"""Most parts of a run along its steps; a distribution is counted for each, so that the page can show any range."""
_BINS = 40
_LARGEST = 1e300
"""Where larger values are counted: rounding them, or their distance, would be infinite, which JSON does not have."""


def distributions(files: Sequence[FileNumbers], rows: Sequence[Any]) -> dict[str, Any]:
    """Return histograms by part of the run: ``parts`` (first and last step of each), and by name ``edges`` and
    ``counts``, a row of bins for each part."""
    files = [file for file in files if file.kind == "train"]
    steps = sorted({file.step for file in files} | {int(row["step"]) for row in rows})
    if not steps:
        return {"parts": [], "of": {}}
    width = max(1, math.ceil(len(steps) / MOST_PARTS))
    parts = [steps[i : i + width] for i in range(0, len(steps), width)]
    where = {step: number for number, part in enumerate(parts) for step in part}
    made: dict[str, Any] = {}
    if files:
        lengths = [(where[f.step], f.length[~f.failed].astype(float)) for f in files]
        rewards = [(where[f.step], f.reward[~f.failed]) for f in files]
        made["response length"] = _binned(lengths, len(parts), "tokens")
        made["reward"] = _binned(rewards, len(parts), "")
        made["staleness"] = _staleness(files, where, len(parts))
    if (gap := _gap(rows, where, len(parts))) is not None:
        made["gap"] = gap
    return {"parts": [[part[0], part[-1]] for part in parts], "of": made}


def _binned(values: Sequence[tuple[int, Floats]], parts: int, unit: str) -> dict[str, Any]:
    """Return histograms of finite values: a bin for each where they are few, else bins of equal width."""
    values = [(part, np.clip(v[np.isfinite(v)], -_LARGEST, _LARGEST)) for part, v in values]
    every = np.concatenate([v for _, v in values])
    single = np.unique(every.round(6))
    few = len(single) <= _BINS // 2
    edges = single if few else np.linspace(every.min(), every.max(), _BINS + 1)
    counts = np.zeros((parts, max(len(edges) - (0 if few else 1), 1)), dtype=np.int64)
    for part, some in values:
        if len(some):
            at = np.searchsorted(single, some.round(6)) if few else np.searchsorted(edges[1:-1], some, side="right")
            counts[part] += np.bincount(at, minlength=counts.shape[1])
    return {"edges": [float(f"{e:.6g}") for e in edges], "single": few, "unit": unit, "counts": counts.tolist()}


def _staleness(files: Sequence[FileNumbers], where: dict[int, int], parts: int) -> dict[str, Any]:
    lowest = min((min(f.staleness, default=0) for f in files), default=0)
    highest = min(max((max(f.staleness, default=0) for f in files), default=0), lowest + _BINS)
    counts = np.zeros((parts, highest - lowest + 1), dtype=np.int64)
    for file in files:
        for behind, tokens in file.staleness.items():
            counts[where[file.step], min(behind, highest) - lowest] += tokens
    return {
        "edges": list(range(lowest, highest + 1)), "single": True, "unit": "steps behind", "counts": counts.tolist()
    }  # fmt: skip


def _gap(rows: Sequence[Any], where: dict[int, int], parts: int) -> dict[str, Any] | None:
    """Return the gap between trainer and engine, from the shares of tokens below each bound, which the metrics have
    (``algos.gap.BELOW``)."""
    prefix = "rollout_gap/below/"
    bounds = sorted({name.removeprefix(prefix) for row in rows for name in row if name.startswith(prefix)}, key=float)
    names = [prefix + bound for bound in bounds]
    if not names:
        return None
    counts = np.zeros((parts, len(names) + 1))
    for row in rows:
        if all(name in row for name in names):
            below = [0.0, *(float(row[name]) for name in names), 1.0]
            counts[where[int(row["step"])]] += np.nan_to_num(np.diff(below))  # of every step equally
    labels = [f"<{bound.replace('e-0', 'e-')}" for bound in bounds] + ["more"]
    return {"edges": labels, "single": True, "unit": "apart", "shares": True, "counts": counts.round(6).tolist()}
