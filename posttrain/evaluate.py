"""`posttrain eval`: grade a responses parquet and print pass@k by data source.

A responses file holds `data_source`, `reward_model {ground_truth}`, `responses` (list of text) and, optionally,
`extra_info` and `errors` (list, as long as `responses`; null where the episode went well).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from posttrain.config import Config, RewardConfig, SandboxConfig
from posttrain.data.parquet import read_rows
from posttrain.errors import ConfigError, DataError, RunError
from posttrain.rewards.grade import GradeItem, GraderPool
from posttrain.track.examine import conversation
from posttrain.types import Message, Score

NEEDED = ("data_source", "reward_model", "responses")


@dataclass(frozen=True)
class Row:
    """One problem of a responses file, checked."""

    number: int
    data_source: str
    ground_truth: Any
    responses: list[str]
    errors: list[str | None]
    extra_info: dict[str, Any]


@dataclass
class Tally:
    """The verdicts on one data source, or on all."""

    counts: list[tuple[int, int]] = field(default_factory=list)
    """(graded responses n, correct ones c) of each problem."""
    grader_errors: int = 0
    """Responses whose grader failed: they count neither as right nor as wrong."""
    generation_errors: int = 0
    """Responses that were never finished: left out likewise."""

    def summary(self, pass_at: Sequence[int], n: int) -> dict[str, float | int | None]:
        """Numbers by name. A pass@k is None when no problem has k graded responses."""
        out: dict[str, float | int | None] = {"problems": len(self.counts), "responses": sum(n for n, _ in self.counts)}
        for k in pass_at:
            out[f"pass@{k}"] = _mean([pass_at_k(graded, right, k) for graded, right in self.counts if graded >= k])
            out[f"problems_below_{k}"] = sum(graded < k for graded, _ in self.counts)
        out[f"mean@{n}"] = _mean([right / graded for graded, right in self.counts if graded])
        return out | {"grader_errors": self.grader_errors, "generation_errors": self.generation_errors}


@dataclass
class Report:
    """What an evaluation found."""

    file: str
    n: int
    """Responses per problem (the most, where problems differ)."""
    overall: dict[str, float | int | None]
    sources: dict[str, dict[str, float | int | None]]
    first_error: str | None
    """Message of the first grader that failed."""

    def as_dict(self) -> dict[str, Any]:
        return {"file": self.file, "n": self.n, "overall": self.overall, "sources": self.sources}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k responses, drawn without replacement from n of which c are right, is right.

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374), equation 1: ``1 - C(n-c, k) / C(n, k)``.

    Raises:
        ValueError: unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n = {n}, c = {c}, k = {k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def run(file: Path, cfg: Config, as_json: bool, out: Path | None = None) -> None:
    """Grade ``file`` and print a table (or one JSON line) on stdout; with ``out``, also write the JSON there."""
    _check_reward(cfg.reward)
    pass_at = cfg.eval.pass_at
    report = evaluate(file, pass_at, cfg.reward, cfg.sandbox, cfg.plugins)
    line = json.dumps(report.as_dict())
    if out is not None:
        _write(out, line + "\n")
    if as_json:
        print(line)
    else:
        _print_table(report, pass_at)


def evaluate(
    file: Path,
    pass_at: Sequence[int],
    reward: RewardConfig | None = None,
    sandbox: SandboxConfig | None = None,
    plugins: Sequence[str] = (),
) -> Report:
    """Grade every response of ``file`` with the grader of its data source, or with ``reward.function``.

    Raises:
        DataError: the file is missing, unreadable, empty or of another schema; the message names row and column.
        ConfigError: a k is below 1 or above the number of responses, or a data source has no grader.
        RunError: not one response could be graded.
    """
    if not pass_at or min(pass_at) < 1:
        raise ConfigError(f"pass@k needs k >= 1, got {list(pass_at)}", hint="for example --pass-at 1,5")
    rows = read_responses(file)
    _check_k(file, rows, max(pass_at))
    reward = reward or RewardConfig()
    with GraderPool(reward, sandbox, plugins) as graders:
        items = [_items(row) for row in rows]
        flat = asyncio.run(graders.grade([item for of_row in items for item in of_row]))
    scores = iter(flat)
    shown = 0
    everything, first_error = Tally(), None
    sources: dict[str, Tally] = {}
    for row, of_row in zip(rows, items, strict=True):
        tallies = (everything, sources.setdefault(row.data_source, Tally()))
        graded = right = grader_errors = 0
        for item in of_row:
            score = next(scores)
            if shown < reward.examine:
                shown += 1
                typer.echo(_examined(item, score), err=True)
            if score.error is not None:
                grader_errors += 1
                first_error = first_error or f"row {row.number}: {score.error}"
            else:
                graded += 1
                right += score.correct
        for tally in tallies:
            tally.counts.append((graded, right))
            tally.grader_errors += grader_errors
            tally.generation_errors += len(row.responses) - graded - grader_errors
    if not any(graded for graded, _ in everything.counts):
        reason = first_error or f"row {rows[0].number}: {rows[0].errors[0]}"
        raise RunError(f"{file}: not one response could be graded", hint=f"the first failure: {reason}")
    n = max(len(row.responses) for row in rows)
    summaries = {name: tally.summary(pass_at, n) for name, tally in sorted(sources.items())}
    return Report(str(file), n, everything.summary(pass_at, n), summaries, first_error)


def _items(row: Row) -> list[GradeItem]:
    """What is graded of a row: the responses that were finished."""
    finished = [r for r, error in zip(row.responses, row.errors, strict=True) if error is None]
    return [GradeItem(row.data_source, response, row.ground_truth, row.extra_info) for response in finished]


def _examined(item: GradeItem, score: Score) -> str:
    facts = {"score": score.score, **score.parts, "correct": score.correct, "error": score.error}
    message: Message = {"role": "assistant", "content": item.response}
    return conversation([message], item.data_source, item.ground_truth, facts | {"extracted": score.extracted})


def _check_reward(reward: RewardConfig) -> None:
    """`eval` reports what graders say. Raises ``ConfigError`` for what only training composes."""
    default = RewardConfig()
    for name in ("weights", "model", "judge", "overlong", "on_error"):
        if getattr(reward, name) != getattr(default, name):
            raise ConfigError(f"reward.{name} has no meaning in eval", hint="it makes the reward of `posttrain rl`")


def newest_responses(root: Path = Path("runs")) -> Path:
    """The newest ``responses.parquet`` of a run. Raises ``DataError`` when there is none."""
    found = sorted(root.glob("*/responses.parquet"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise DataError(f"no responses.parquet in the runs under {root}/", hint="make one: posttrain generate")
    return found[-1]


def read_responses(file: Path) -> list[Row]:
    """The rows of a responses file, checked one by one. Raises ``DataError`` naming file, row and column."""
    rows = read_rows(file, NEEDED, ("extra_info", "errors"), made_by="posttrain generate")
    return [_row(file, number, raw) for number, raw in rows]


def _row(file: Path, number: int, raw: dict[str, Any]) -> Row:
    def wrong(column: str, needs: str, value: Any) -> DataError:
        return DataError(f"{file}: row {number}, column {column!r} is not {needs}", hint=f"it holds {repr(value)[:80]}")

    source, model, responses = raw["data_source"], raw["reward_model"], raw["responses"]
    if not isinstance(source, str) or not source:
        raise wrong("data_source", "text", source)
    if not isinstance(model, dict) or model.get("ground_truth") is None:
        raise wrong("reward_model", "a struct with ground_truth", model)
    if not isinstance(responses, list) or not responses:
        raise wrong("responses", "a list with at least one response", responses)
    errors = raw.get("errors")
    errors = [None] * len(responses) if errors is None else errors
    if not isinstance(errors, list) or len(errors) != len(responses):
        raise wrong("errors", f"a list of {len(responses)}, one for each response", errors)
    for response, error in zip(responses, errors, strict=True):
        if error is None and not isinstance(response, str):
            raise wrong("responses", "a list of text", response)
    extra = raw.get("extra_info") or {}
    if not isinstance(extra, dict):
        raise wrong("extra_info", "a struct", extra)
    return Row(number, source, model["ground_truth"], responses, errors, extra)


def _check_k(file: Path, rows: Sequence[Row], k: int) -> None:
    short = next((row for row in rows if len(row.responses) < k), None)
    if short is not None:
        raise ConfigError(
            f"pass@{k} needs {k} responses per problem; row {short.number} of {file} has {len(short.responses)}",
            hint=f"sample more with `posttrain generate --n {k}`, or give --pass-at {len(short.responses)}",
        )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _print_table(report: Report, pass_at: Sequence[int]) -> None:
    from rich.console import Console
    from rich.table import Table

    scores = [*(f"pass@{k}" for k in dict.fromkeys(pass_at)), f"mean@{report.n}"]
    table = Table(title=report.file, title_justify="left")
    table.add_column("data source", no_wrap=True)
    for name in ("problems", *scores):
        table.add_column(name, justify="right")
    rows = [*report.sources.items()]
    if len(rows) > 1:
        rows.append(("all", report.overall))
    for source, numbers in rows:
        percents = ["-" if (v := numbers[name]) is None else f"{100 * v:.1f} %" for name in scores]
        table.add_row(source, str(numbers["problems"]), *percents)
    console = Console()
    console.print(table)
    for line in _left_out(report, pass_at):
        console.print(line, markup=False, highlight=False)


def _left_out(report: Report, pass_at: Sequence[int]) -> Iterator[str]:
    """One line for each reason why a response or a problem does not count."""
    numbers = report.overall
    if numbers["generation_errors"]:
        yield f"{numbers['generation_errors']} responses left out: their episodes failed"
    if numbers["grader_errors"]:
        yield f"{numbers['grader_errors']} responses left out: their grader failed, first at {report.first_error}"
    for k in dict.fromkeys(pass_at):
        if count := numbers[f"problems_below_{k}"]:
            yield f"{count} problems left out of pass@{k}: fewer than {k} graded responses"


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", hint="choose another --out") from error
    finally:
        temporary.unlink(missing_ok=True)
