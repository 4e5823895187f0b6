"""What a row of RLHF or SFT parquet is: one typed schema for writing, for reading and for the documents.

The RLHF row has verl's columns, and the SFT row those of TRL and verl's multi-turn SFT (preference rows are in
``posttrain.data.preferences``). Files of others are taken as
they are: JSON text where a struct or a list belongs, numpy arrays, the null fields that parquet fills in, typed content
lists, tools declared in ``tools``, ``tools_kwargs`` or both. Columns that the schema does not know are kept
(``model_extra``).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NotRequired, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict  # pydantic takes that of `typing` from Python 3.12 on

from posttrain.core.errors import DataError
from posttrain.core.types import Message, Prompt, Role, ToolCall, ToolSchema
from posttrain.data.messages import normalize_messages, normalize_tools
from posttrain.data.turns import IMAGE, RowError, check_messages

Bytes = bytes
"""The type, where a field has its name."""

__all__ = [
    "BaseRow", "Conversation", "RlhfRow", "RowError", "SftRow", "parse_row", "plain_row", "tool_names",
    "typed_messages",
]  # fmt: skip


@dataclass(frozen=True)
class Conversation:
    """One SFT row, typed. Rows with the same tools share the schemas; do not change them in place."""

    messages: list[Message]
    tools: list[ToolSchema] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)
    """``{"bytes": ...}`` or ``{"path": ...}`` for each ``<image>`` in the messages."""


class _Struct(BaseModel):
    model_config = ConfigDict(extra="ignore")


def _arguments(value: Any) -> Any:
    return json.loads(value or "{}") if isinstance(value, str) else without_none(value or {})


# Messages and their calls are checked as the dicts that they are. There are several in each row of a file, and to make
# objects of them takes as long again.


class FunctionCallField(TypedDict):
    """The function that a call names, and what it is given."""

    name: Annotated[str, Field(min_length=1)]
    """A function that `tools` declares."""
    arguments: NotRequired[Annotated[dict[str, Any], BeforeValidator(_arguments)]]
    """By parameter. Written as JSON text, because arguments have no fixed shape, which parquet needs."""


class ToolCallField(TypedDict):
    """One call of a tool, in OpenAI's form."""

    id: NotRequired[str | None]
    """What a tool message names in `tool_call_id`."""
    type: NotRequired[str | None]
    """Always `function`."""
    function: FunctionCallField
    """The call itself."""


class MessageField(TypedDict):
    """One message."""

    role: Role
    """Who speaks. A system message comes first, an assistant answers a user or a tool."""
    content: NotRequired[str | None]
    """The text; `<image>` where an image belongs. A list of typed parts becomes one text. A user's message has it."""
    reasoning_content: NotRequired[str | None]
    """Assistant only: its thoughts, for templates that show them apart."""
    reasoning: NotRequired[str | None]
    """Another name of `reasoning_content`."""
    thinking: NotRequired[str | None]
    """Another name of `reasoning_content`."""
    tool_calls: NotRequired[list[ToolCallField] | None]
    """Assistant only: the calls it makes."""
    tool_call_id: NotRequired[str | None]
    """Tool only: the call it answers; without it, results answer the calls in their order."""
    name: NotRequired[str | None]
    """Tool only: the function that was called."""
    train: NotRequired[bool | None]
    """Assistant only: false leaves the message out of the SFT loss."""
    weight: NotRequired[bool | None]
    """OpenAI's name of `train`: 0 or 1."""


def typed_messages(given: Sequence[MessageField], column: str) -> list[Message]:
    """Return the messages of a column as the rest of posttrain knows them: without absent fields, and their content
    always a text. Raises ``RowError`` for a user's without one, whose text must have another name."""
    for i, message in enumerate(given):
        if "content" not in message and message["role"] == "user":
            hint = "is its text under another name, such as `value` or `text`? a null is an empty text"
            raise RowError(f"{column}.{i}.content", "a user message without it", hint)
    return [_typed_message(message) for message in given]


def _typed_message(given: MessageField) -> Message:
    message: Message = {"role": given["role"], "content": given.get("content") or ""}
    if thoughts := given.get("reasoning_content") or given.get("reasoning") or given.get("thinking"):
        message["reasoning_content"] = thoughts
    if calls := given.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in calls]
    if (answered := given.get("tool_call_id")) is not None:
        message["tool_call_id"] = answered
    if (name := given.get("name")) is not None:
        message["name"] = name
    train = given.get("train")
    if (trained := given.get("weight") if train is None else train) is not None:
        message["train"] = trained
    return message


def _call(given: ToolCallField) -> ToolCall:
    """Return a call as the rest of posttrain knows it."""
    function = given["function"]
    call: ToolCall = {
        "type": "function",
        "function": {"name": function["name"], "arguments": function.get("arguments", {})},
    }
    identity = given.get("id")
    return call if identity is None else {"id": identity, **call}


class RewardModelField(_Struct):
    """How the answer is judged."""

    style: str | None = None
    """For your own bookkeeping; `rule` in the sets that prep writes."""
    ground_truth: Any
    """What the grader compares with, in the grader's own form."""


class ImageField(_Struct):
    """One image: its file's bytes, or where the file lies."""

    bytes: Bytes | None = None
    """The file, such as a PNG, as it is."""
    path: str | None = None
    """Where the file lies, if it is not in the row."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        value = {"bytes": value} if isinstance(value, bytes) else {"path": value} if isinstance(value, str) else value
        if isinstance(value, dict) and value.get("bytes") is None and value.get("path") is None:
            raise misplaced("bytes", "an image with neither bytes nor path")
        return value


class FunctionField(_Struct):
    """A function that can be called."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1)
    """What the assistant calls it."""
    description: str | None = None
    """What it does, for the model to read."""
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments."""


class ToolField(_Struct):
    """An OpenAI function schema."""

    model_config = ConfigDict(extra="allow")

    type: str = "function"
    """Always `function`."""
    function: FunctionField
    """The function. A bare one, without this wrapper, is read too."""


class BaseRow(BaseModel):
    """What rows of all kinds share."""

    # What we do not know is someone else's, and stays.
    model_config = ConfigDict(extra="allow")

    tools: list[dict[str, Any]] | None = None
    """OpenAI function schemas, as JSON text or as structs: what the template shows the model."""
    images: list[ImageField] | None = None
    """The images that the messages name with `<image>`, in that order."""

    @property
    def pictures(self) -> list[dict[str, Any]]:
        """Return ``images`` as the rest of posttrain knows them."""
        return [image.model_dump(exclude_none=True) for image in self.images or ()]

    @field_validator("tools", mode="before")
    @classmethod
    def _read_tools(cls, value: Any) -> Any:
        return None if value is None else parse_tools(value)


class RlhfRow(BaseRow):
    """A prompt and how to judge the answer."""

    data_source: str
    """Chooses the grader (`posttrain.rewards.DATA_SOURCES`)."""
    prompt: list[MessageField]
    """The conversation so far: at least one user message, and the last is not the assistant's."""
    ability: str | None = None
    """For your own bookkeeping."""
    reward_model: RewardModelField
    """How the answer is judged."""
    extra_info: dict[str, Any] | None = None
    """Passed to the grader. `tools_kwargs.<function>` is passed to that tool."""
    tools_kwargs: dict[str, Any] | None = None
    """The same as `extra_info.tools_kwargs`, in files that keep it in a column of its own."""

    def typed(self, index: int) -> Prompt:
        """Return row ``index`` as a prompt, checked, ``extra_info`` with ``tools_kwargs`` and, where declared,
        ``tools``.

        Raises:
            RowError: the messages are out of order, or their calls or images do not match the row.
        """
        messages = typed_messages(self.prompt, "prompt")
        extra = dict(self.extra_info or {})
        tools = self.tools or []
        kwargs = _tools_kwargs(extra.get("tools_kwargs"), self.tools_kwargs)
        declared = {*tool_names(tools), *kwargs} if tools else None
        check_messages(messages, "prompt", needs=("user",), declared=declared, images=len(self.images or ()))
        if messages[-1]["role"] == "assistant":
            raise RowError(
                f"prompt.{len(messages) - 1}.role",
                "roles out of order: the prompt ends with an assistant message",
                "the policy writes the next message, so a prompt ends with a user's or a tool's",
            )
        extra["tools_kwargs"] = {**{name: {} for name in tool_names(tools)}, **kwargs}
        if tools:
            extra["tools"] = tools
        return Prompt(index, messages, self.data_source, self.reward_model.ground_truth, extra, self.pictures)


class SftRow(BaseRow):
    """A conversation to imitate."""

    messages: list[MessageField]
    """The whole conversation: at least one user and one assistant message."""

    def typed(self, index: int) -> Conversation:
        """Return the row as a conversation, checked. ``index`` is not used.

        Raises:
            RowError: the messages are out of order, or their calls or images do not match the row.
        """
        messages = typed_messages(self.messages, "messages")
        tools = self.tools or []
        check_messages(
            messages,
            "messages",
            needs=("user", "assistant"),
            declared=tool_names(tools),
            images=len(self.images or ()),
        )
        return Conversation(messages, tools, self.pictures)


R = TypeVar("R", bound=BaseRow)


def parse_row(schema: type[R], raw: Mapping[str, Any]) -> R:
    """Return a raw row, typed.

    Raises:
        RowError: naming the first field that is missing or has a wrong value.
    """
    try:
        return schema.model_validate(raw)
    except ValidationError:
        raw = plain_row(raw)  # the long way, which few files need
    try:
        return schema.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        below = first.get("ctx", {}).get("at")
        where = ".".join([*(str(part) for part in first["loc"]), *([below] if below else [])])
        raise RowError(where, first["msg"], f"it holds {_short(first['input'])}") from None


_MESSAGES = ("prompt", "messages", "chosen", "rejected")
_STRUCTURED = (*_MESSAGES, "reward_model", "extra_info", "tools_kwargs", "images")
"""Columns that are structs or lists, and never text of their own."""


def plain_row(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without JSON text and arrays where structs and lists belong, its messages' content as text.

    Raises:
        RowError: a typed content list is malformed.
    """
    row = dict(raw)
    for column in _STRUCTURED:
        if column in row:
            row[column] = _sequence(_decoded(row[column]))
    for column in _MESSAGES:
        if isinstance(row.get(column), list):
            text = isinstance(raw[column], str)
            row[column] = [_plain_message(message, f"{column}.{i}", text) for i, message in enumerate(row[column])]
    return row


def _plain_message(message: Any, here: str, text: bool) -> Any:
    """Return a message of a struct, or of JSON ``text``."""
    if not isinstance(message, dict):
        return message
    content, calls = _sequence(message.get("content")), _sequence(message.get("tool_calls"))
    # A null in JSON text was written by someone, one in a struct may be parquet's.
    message = {**message, "tool_calls": calls if text else without_none(calls)}
    if "content" in message:
        message["content"] = content
    if not isinstance(message.get("role"), str) or not (isinstance(content, list) or (text and calls)):
        return message
    try:
        (normal,) = normalize_messages([message])
    except DataError as error:
        field = "content" if isinstance(content, list) else "tool_calls"
        hint = f"it holds {_short(message[field])}"
        raise RowError(f"{here}.{field}", error.message.removeprefix("message 0: "), hint) from None
    for call in normal.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    parts = normal["content"]
    if not isinstance(parts, str):
        normal["content"] = "".join(IMAGE if part["type"] == "image" else part.get("text", "") for part in parts)
    return normal


def parse_tools(value: Any) -> list[ToolSchema]:
    """Return function schemas in any style that ``normalize_tools`` reads, and arrays of structs with parquet's null
    fields.

    Raises:
        ValueError: it is none of these, or a tool has no name.
    """
    # A null in JSON text was written by someone (`"default": null`), one in a struct may be parquet's.
    return list(_tools_of_text(value)) if isinstance(value, str) else _checked_tools(without_none(value))


@functools.lru_cache(maxsize=1024)
def _tools_of_text(text: str) -> tuple[ToolSchema, ...]:
    """Return the tools of a JSON text. Most rows of a file declare the same tools, so results are kept."""
    return tuple(_checked_tools(text))


def _checked_tools(value: Any) -> list[ToolSchema]:
    try:
        tools = normalize_tools(value) or []
    except DataError as error:
        raise misplaced("", error.message) from None
    for i, tool in enumerate(tools):
        try:
            ToolField.model_validate(tool)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise misplaced(".".join(str(part) for part in (i, *first["loc"])), first["msg"]) from None
    return tools


def misplaced(at: str, message: str) -> PydanticCustomError:
    """Return a validation error at a path below the field that is validated."""
    return PydanticCustomError("posttrain", "{message}", {"message": message, "at": at})


def tool_names(tools: Sequence[ToolSchema]) -> list[str]:
    """Return the functions that schemas declare."""
    return [tool["function"]["name"] for tool in tools]


def _tools_kwargs(*styles: Any) -> dict[str, Any]:
    """Return the arguments of tools by function name, from the places where files keep them; the first place wins."""
    merged: dict[str, Any] = {}
    for style in styles:
        value = _decoded(style or None) or {}
        if not isinstance(value, dict):
            raise RowError("extra_info.tools_kwargs", "not a struct by function name", f"it holds {_short(style)}")
        merged = {**without_none(value), **merged}
    return merged


def _decoded(value: Any) -> Any:
    """Return what a JSON text holds; anything else, other text too, as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _sequence(value: Any) -> Any:
    """Return a numpy array as a list, anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def without_none(value: Any) -> Any:
    """Return dicts without the null fields that parquet fills in for keys other rows have."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    value = _sequence(value)
    return [without_none(item) for item in value] if isinstance(value, list) else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
