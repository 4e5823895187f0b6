"""Conversations to imitate: files of messages in any of the field's styles, and Glaive's function calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

from posttrain.core.errors import DataError
from posttrain.core.types import Message, Score
from posttrain.data.messages import SHAREGPT_ROLES, normalize_messages, normalize_tools
from posttrain.data.parquet import Conversation, sft_row
from posttrain.data.schema import RowError, SftRow, parse_row, without_none
from posttrain.prep.datasets.base import FileSet, Kind, RawRow
from posttrain.prep.datasets.problems import first

_ROLES = {"developer": "system", "function": "tool"}
"""OpenAI's names for roles that chat templates know by another."""
_COLUMNS = ("messages", "conversations", "conversation")
_PAIRS = (("prompt", "response"), ("prompt", "completion"), ("question", "answer"), ("instruction", "output"))


class ConversationFiles(FileSet):
    """Files of conversations, whose calls and tools have no fixed shape."""

    def complete(self, row: RawRow, file: Path) -> RawRow:
        """The row without the nulls with which parquet fills the structs of calls and tools, for keys that other rows
        have. Those of JSON text, and of jsonl, were written by someone."""
        if ".parquet" not in file.suffixes:
            return row
        return {column: _without_nulls(value) for column, value in row.items()}


class Messages(ConversationFiles):
    """Any file of conversations. Raw rows ``{"messages", "tools"}``, both also as JSON text:

    - OpenAI's messages: ``role``, ``content`` (text, null, or a list of typed parts), ``tool_calls`` with arguments as
      objects or JSON text, ``tool_call_id``, ``reasoning_content``; the older ``function_call`` and role ``function``;
      ``train`` or ``weight`` (0 leaves a message out of the loss);
    - ShareGPT's turns: ``conversations: [{"from", "value"}]``, with ``function_call`` and ``observation``, and the
      system message perhaps in a column ``system``;
    - ``tools`` as OpenAI schemas or bare functions; also named ``functions``;
    - ``images``, one for each ``<image>`` in the messages: paths, bytes, or structs of either;
    - a user's text and the assistant's answer, in ``prompt`` and ``response`` or ``completion``, ``question`` and
      ``answer``, or ``instruction`` and ``output``, which may stand in ``extra_info``. Either may be messages; the
      assistant's in the first are not trained. As in Alpaca's files, ``input`` follows ``instruction`` after a blank
      line, and ``history`` holds the turns before as pairs of texts.

    A file without a split in its name is ``train``.
    """

    name = "messages"
    data_source = ""
    licence = "that of your file"
    hub_id: str | None = None
    splits: tuple[str, ...] = ("train",)
    kinds: tuple[Kind, ...] = ("sft",)
    patterns: ClassVar[Mapping[str, tuple[str, ...]]] = {"train": ("train", "train-*", "data/train-*", "*")}

    def to_rlhf(self, row: RawRow, index: int, split: str) -> None:
        """There is no answer to grade."""

    def to_sft(self, row: RawRow, index: int, split: str) -> Conversation:
        """The conversation, checked.

        Raises:
            DataError: the row is of no known style, or the conversation is out of order, or calls a tool that is not
                declared. The message is the same for every row with this fault.
        """
        conversation = self.conversation(row)
        try:
            return parse_row(SftRow, sft_row(conversation)).typed(index)
        except RowError as error:
            raise DataError(error.message, hint=f"{error.field}: {error.hint}") from error

    def conversation(self, row: RawRow) -> Conversation:
        """The messages and tools of a row, in OpenAI's shape. Raises ``DataError`` where they are of no known style."""
        raw = first(row, _COLUMNS)
        messages = json_list(raw) or _pair(row)
        if not messages:
            raise DataError(
                "there are no messages",
                hint=f"looked for {', '.join(_COLUMNS)}, and prompt with response; the row has {list(row)}",
            )
        system = row.get("system")
        if isinstance(system, str) and system.strip() and role_of(messages[0]) != "system":
            messages = [{"role": "system", "content": system}, *messages]
        try:
            normal = normalize_messages([modern(message) for message in messages])
            tools = normalize_tools(first(row, ("tools", "functions")))
        except DataError as error:
            # "message 3: it has no role": what is wrong is the reason, where it is wrong the detail.
            reason = error.message.partition(": ")[2] if error.message.startswith("message ") else error.message
            raise DataError(reason.partition(": ")[0], hint=error.message) from error
        check_text(normal)
        return Conversation(cast(list[Message], normal), tools or [], images_of(row))

    def check(self, row: RawRow) -> Score:
        """Right where the conversation can be read and is in order."""
        self.to_sft(row, 0, "train")
        return Score(score=1.0, correct=True)


class GlaiveToolcall(Messages):
    """Glaive's function calling v2 in ShareGPT's style: ``{"conversations": [{"from": "human" | "gpt" |
    "function_call" | "observation", "value"}], "tools": JSON text}``."""

    name = "glaive-toolcall"
    licence = "Apache-2.0"
    hub_id: str | None = "hiyouga/glaive-function-calling-v2-sharegpt"
    patterns: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "train": ("glaive_toolcall_en*", "glaive*", "train", "train-*", "data/train-*")
    }


def _without_nulls(value: Any) -> Any:
    """A value without nulls in structs. Messages keep their own: a null content is an empty text."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if role_of(value) is not None:
        return {key: without_none(item) for key, item in value.items()}
    return without_none(value)


def json_list(value: Any) -> list[Any]:
    """A list, also of JSON text; empty for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return []
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []


def images_of(row: RawRow) -> list[Any]:
    """The images of a row, as they are there: the row's schema says what they may be."""
    images = row.get("images") or []
    return json_list(images) or [images] if not isinstance(images, list) else images


def role_of(message: Any) -> Any:
    """Who speaks in a message of any style; None where it does not say."""
    return (message.get("role") or message.get("from")) if isinstance(message, Mapping) else None


def modern(message: Any) -> dict[str, Any]:
    """An OpenAI message without what newer versions of that API call by another name. Others as they are."""
    if not isinstance(message, Mapping):
        raise DataError("a message is not an object", hint=f"it is {str(message)[:80]!r}")
    turn = {key: value for key, value in message.items() if key not in ("function_call", "weight")}
    if not isinstance(turn.get("role"), str | None):
        raise DataError("the role of a message is no text", hint=f"it is {str(turn['role'])[:80]}")
    if turn.get("role") in _ROLES:
        turn["role"] = _ROLES[turn["role"]]
    if message.get("function_call"):
        turn["tool_calls"] = [message["function_call"]]
    weight = message.get("weight")
    if weight is not None and SHAREGPT_ROLES.get(str(role_of(turn))) == "assistant":
        if weight not in (0, 1):  # a text is true whatever it says, and a half is neither
            what = f"the weight of a message is neither 0 nor 1: {str(weight)[:80]!r}"
            raise DataError(what, hint='0 leaves a message out of the loss; `"train": false` does, too')
        turn["train"] = bool(weight)
    return turn


def check_text(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``DataError`` for half of a surrogate pair, which JSON text in a column can bring."""
    try:
        json.dumps(messages, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise DataError("a message has a character that UTF-8 cannot hold", hint=str(error)) from error


def asked(row: Mapping[str, Any], column: str) -> list[dict[str, Any]]:
    """The messages up to the user's text in ``column``; empty where it is no text or blank.

    Alpaca's rows have two columns more: ``input`` belongs to ``instruction``, and ``history`` holds the turns before.

    Raises:
        DataError: one of the two is of another kind.
    """
    text, more = row.get(column), row.get("input") if column == "instruction" else None
    if not isinstance(text, str) or not text.strip():
        return []
    if not isinstance(more, str | None):
        raise DataError("`input` is not text", hint=f"it holds {str(more)[:80]}")
    return [*_history(row.get("history")), _said("user", f"{text}\n\n{more}" if more and more.strip() else text)]


def _history(value: Any) -> list[dict[str, Any]]:
    pairs = json_list(value)
    if not all(isinstance(pair, list) and [type(text) for text in pair] == [str, str] for pair in pairs):
        raise DataError("`history` is not a list of pairs of texts", hint=f"it holds {str(value)[:80]}")
    return [_said(role, text) for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)]


def _said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def _pair(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A prompt and its response as messages; empty where the row has no such two."""
    inner = row.get("extra_info")
    for place in (row, inner if isinstance(inner, Mapping) else {}):
        for prompt, response in _PAIRS:
            answer = place.get(response)
            said = [_said("assistant", answer)] if isinstance(answer, str) and answer.strip() else _turns(answer)
            if said and (messages := asked(place, prompt) or [*map(_untrained, _turns(place.get(prompt)))]):
                return [*messages, *said]
    return []


def _untrained(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of a prompt: what the assistant says there is no part of the answer that is to be learned."""
    answers = SHAREGPT_ROLES.get(str(role_of(message))) == "assistant"
    return {**message, "train": False} if answers else dict(message)


def _turns(value: Any) -> list[Any]:
    """The messages of a list; empty where it is none of messages."""
    turns = value if isinstance(value, list) else []
    return turns if all(map(role_of, turns)) else []
