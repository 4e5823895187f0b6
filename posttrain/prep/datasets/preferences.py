"""Pairs of answers, one of them preferred, from files in the layouts that people publish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from posttrain.core.errors import DataError
from posttrain.core.types import Message, Score
from posttrain.data.messages import normalize_messages, normalize_tools
from posttrain.data.parquet import Preference, preference_row
from posttrain.data.preferences import PreferenceRow
from posttrain.data.schema import RowError, parse_row
from posttrain.prep.datasets.base import Kind, RawRow
from posttrain.prep.datasets.conversations import (
    ConversationFiles,
    asked,
    check_text,
    images_of,
    json_list,
    modern,
    role_of,
)
from posttrain.prep.datasets.problems import first

_PROMPTS = ("prompt", "question", "instruction", "conversations", "messages")


class Preferences(ConversationFiles):
    """Any file of pairs. Raw rows ``{"prompt", "chosen", "rejected", "tools"}``:

    - ``prompt`` (also ``question``, ``instruction``): a text, which is a user's message, or messages; a system message
      perhaps in a column ``system``, and Alpaca's ``input`` and ``history`` as ``messages`` reads them. It may be
      missing where both answers are whole conversations;
    - ``chosen`` and ``rejected``: a text, which is an assistant's message, one message, or messages: those that follow
      the prompt, or the whole conversation;
    - messages in every style that ``messages`` reads, also as JSON text; ``tools`` and ``images`` likewise.

    A file without a split in its name is ``train``.
    """

    name = "preferences"
    data_source = ""
    licence = "that of your file"
    hub_id: str | None = None
    splits: tuple[str, ...] = ("train",)
    kinds: tuple[Kind, ...] = ("preference",)
    patterns: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "train": ("train", "train-*", "train_prefs*", "data/train-*", "data/train_prefs*", "*")
    }

    def to_rlhf(self, row: RawRow, index: int, split: str) -> None:
        """There is no answer to grade."""

    def to_sft(self, row: RawRow, index: int, split: str) -> None:
        """A pair is no conversation to imitate."""

    def to_preference(self, row: RawRow, index: int, split: str) -> Preference:
        """The pair, checked.

        Raises:
            DataError: the row is of no known layout, a conversation is out of order, or the two are no answers to one
                prompt, or the same. The message is the same for every row with this fault.
        """
        chosen, rejected = _messages(row, "chosen", "assistant"), _messages(row, "rejected", "assistant")
        prompt = _prompt(row, [chosen, rejected])
        chosen, rejected = (_begun(row, a) if a[: len(prompt)] == prompt else a for a in (chosen, rejected))
        prompt = _begun(row, prompt) if prompt else prompt
        raw = preference_row(Preference(prompt, chosen, rejected, _tools(row), images_of(row)))
        try:
            return parse_row(PreferenceRow, raw).typed(index)
        except RowError as error:
            raise DataError(error.message, hint=f"{error.field}: {error.hint}") from error

    def check(self, row: RawRow) -> Score:
        """Right where the pair can be read and is in order."""
        self.to_preference(row, 0, "train")
        return Score(score=1.0, correct=True)


def _messages(row: RawRow, column: str, role: str) -> list[Message]:
    """The messages of a column; a text is one message of ``role``. Raises ``DataError``."""
    value = row.get(column)
    listed: Sequence[Any] = [value] if isinstance(value, Mapping) else _listed(value)
    if not listed and isinstance(value, str) and value.strip():
        listed = asked(row, column) if role == "user" else [{"role": role, "content": value}]
    if not listed:
        raise DataError(f"`{column}` is missing or empty", hint=f"the row has {list(row)}")
    try:
        normal = normalize_messages([modern(message) for message in listed])
    except DataError as error:
        reason = error.message.partition(": ")[2] if error.message.startswith("message ") else error.message
        raise DataError(f"`{column}`: {reason.partition(': ')[0]}", hint=error.message) from error
    check_text(normal)
    return cast(list[Message], normal)


def _listed(value: Any) -> list[Any]:
    """The messages of a list; of text only where it is JSON of messages, for an answer may well be another list."""
    listed = json_list(value)
    return [] if isinstance(value, str) and not all(map(role_of, listed)) else listed


def _prompt(row: RawRow, answers: Sequence[Sequence[Message]]) -> list[Message]:
    """The messages before the answers; none where both answers have them already."""
    column = next((name for name in _PROMPTS if row.get(name)), None)
    whole = all(role_of(answer[0]) in ("system", "user") for answer in answers)
    if column is None and not whole:
        raise DataError("there is no prompt", hint=f"looked for {', '.join(_PROMPTS)}; the row has {list(row)}")
    if column is None or (whole and isinstance(row[column], str) and not _listed(row[column])):
        return []
    return _messages(row, column, "user")


def _begun(row: RawRow, conversation: list[Message]) -> list[Message]:
    """A conversation with the row's system message, if it has none of its own."""
    system = row.get("system")
    if not isinstance(system, str) or not system.strip() or conversation[0]["role"] == "system":
        return conversation
    return [{"role": "system", "content": system}, *conversation]


def _tools(row: RawRow) -> list[dict[str, Any]]:
    try:
        return normalize_tools(first(row, ("tools", "functions"))) or []
    except DataError as error:
        raise DataError("the tools cannot be read", hint=error.message) from error
