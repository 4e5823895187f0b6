"""A responses file: `data_source`, `reward_model {ground_truth}`, `responses` (a list of text) and, where they are
there, `prompt`, `extra_info`, `conversations`, `errors` (a list, null where the episode went well), `env_scores` and
`env_correct` (lists, null where the episode's environment or agent gave no reward)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from posttrain.core.errors import DataError
from posttrain.core.types import Message, Score
from posttrain.data.parquet import located, read_rows
from posttrain.data.schema import plain_row, without_none
from posttrain.generation.output import BRANCHES, VERDICTS

NEEDED = ("data_source", "reward_model", "responses")
_OPTIONAL = ("extra_info", "errors", "prompt", "conversations", BRANCHES)
_SCORES, _CORRECT = VERDICTS


@dataclass(frozen=True)
class ResponseRow:
    """One problem of a responses file, checked."""

    number: int
    data_source: str
    ground_truth: Any
    responses: list[str]
    errors: list[str | None]
    extra_info: dict[str, Any]
    prompt: list[Message]
    """Empty where the file has none."""
    conversations: list[str]
    """JSON of all messages, for each response; empty where the file has none."""
    branches: list[str]
    """JSON of the further branches of an agent's episode, for each response; empty where the file has none."""
    given: list[Score | None]
    """Verdict of the environment or the agent on each response; None: a grader is asked."""

    @property
    def level(self) -> str | None:
        """How hard it is, as its data set says."""
        level = self.extra_info.get("level")
        return None if level is None else str(level)

    @property
    def by_index(self) -> str | None:
        """Its identity in the data set: source, split and `extra_info.index`."""
        index = self.extra_info.get("index")
        return None if index is None else json.dumps([self.data_source, self.extra_info.get("split"), index])

    @property
    def by_prompt(self) -> str | None:
        """Its identity by what is asked: a hash of source and prompt."""
        if not self.prompt:
            return None
        text = json.dumps([self.data_source, without_none(self.prompt)], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()


def read_responses(file: Path, *, given: bool = True) -> Iterator[ResponseRow]:
    """The rows of a responses file, one after the other.

    Args:
        given: read the verdicts of environments and agents; False: graders are asked for all.

    Raises:
        DataError: naming file, row and column.
    """
    optional = (*_OPTIONAL, *VERDICTS) if given else _OPTIONAL
    rows = read_rows(file, NEEDED, optional, made_by="posttrain generate")
    return (_row(file, number, raw) for number, raw in rows)


def newest_responses(root: Path) -> Path:
    """The newest ``responses.parquet`` of the runs in ``root``. Raises ``DataError`` when there is none."""
    found = sorted(root.glob("*/responses.parquet"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise DataError(f"no responses.parquet in the runs under {root}/", hint="make one: posttrain generate")
    return found[-1]


def _row(file: Path, number: int, raw: dict[str, Any]) -> ResponseRow:
    def wrong(column: str, needs: str, value: Any) -> DataError:
        return DataError(f"{file}: row {number}, column {column!r} is not {needs}", hint=f"it holds {repr(value)[:80]}")

    with located(file, number):
        raw = plain_row(raw)
    source, model, responses = raw["data_source"], raw["reward_model"], raw["responses"]
    if not isinstance(source, str) or not source:
        raise wrong("data_source", "text", source)
    if not isinstance(responses, list) or not responses:
        raise wrong("responses", "a list with at least one response", responses)
    errors = raw.get("errors")
    errors = [None] * len(responses) if errors is None else errors
    if not isinstance(errors, list) or len(errors) != len(responses):
        raise wrong("errors", f"a list of {len(responses)}, one for each response", errors)
    for response, error in zip(responses, errors, strict=True):
        if error is None and not isinstance(response, str):
            raise wrong("responses", "a list of text", response)
    given = _given(raw, len(responses), wrong)
    asks = any(error is None and verdict is None for error, verdict in zip(errors, given, strict=True))
    if not isinstance(model, dict) or (asks and model.get("ground_truth") is None):
        raise wrong("reward_model", "a struct with ground_truth", model)
    extra = raw.get("extra_info") or {}
    if not isinstance(extra, dict):
        raise wrong("extra_info", "a struct", extra)
    conversations, branches = raw.get("conversations") or [], raw.get(BRANCHES) or []
    for name, texts in (("conversations", conversations), (BRANCHES, branches)):
        if not isinstance(texts, list) or len(texts) not in (0, len(responses)):
            raise wrong(name, f"a list of {len(responses)}, one for each response", texts)
    if not all(_is_json(text, _is_conversation) for text in conversations):
        raise wrong("conversations", "a list of JSON texts, each a list of messages", conversations)
    if not all(_is_json(text, _are_branches) for text in branches):
        raise wrong(BRANCHES, "a list of JSON texts, each a list of branches", branches)
    prompt = raw.get("prompt")
    prompt = prompt if isinstance(prompt, list) else []
    if not _is_conversation(prompt):
        raise wrong("prompt", "a list of messages with role and content", prompt)
    truth = model.get("ground_truth")
    return ResponseRow(number, source, truth, responses, errors, extra, prompt, conversations, branches, given)


def _is_json(text: Any, holds: Callable[[Any], bool]) -> bool:
    """Return whether ``text`` is JSON of a value that is of a kind."""
    try:
        return holds(json.loads(text))
    except (TypeError, ValueError):
        return False


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    calls = value.get("tool_calls") or []
    return (
        isinstance(value.get("content"), str | list | None)
        and isinstance(calls, list)
        and all(isinstance(call, dict) and "function" in call for call in calls)
    )


def _are_branches(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(branch, dict) and "given" in branch and _is_conversation(branch.get("messages")) for branch in value
    )


def _given(raw: dict[str, Any], count: int, wrong: Callable[[str, str, Any], DataError]) -> list[Score | None]:
    """Return the verdicts that the environment or the agent gave in a row. Raises ``DataError``."""
    if raw.get(_SCORES) is None:
        return [None] * count
    scores, correct = raw[_SCORES], raw.get(_CORRECT)
    for name, values, kind in ((_SCORES, scores, int | float), (_CORRECT, correct, bool)):
        if not isinstance(values, list) or len(values) != count:
            raise wrong(name, f"a list of {count}, one for each response", values)
        if not all(isinstance(value, kind | None) for value in values):
            raise wrong(name, "a list of numbers" if name == _SCORES else "a list of true and false", values)
    assert correct is not None
    pairs = list(zip(scores, correct, strict=True))
    if not all(right is None if score is None else right is not None and isfinite(score) for score, right in pairs):
        raise wrong(_SCORES, f"a list of finite numbers, null where {_CORRECT} is", scores)
    return [None if score is None else Score(float(score), right) for score, right in pairs]
