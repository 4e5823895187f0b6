"""What the wire formats of the endpoint share: a request in our types, its answers, refusals, server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from posttrain.core.types import Message, ToolSchema

Finish = Literal["stop", "length", "tool_calls"]


class Refused(Exception):
    """A request that is answered with an error.

    Args:
        status: of HTTP.
        fatal: the episode fails with it.
    """

    def __init__(self, status: int, message: str, *, code: str = "invalid_request_error", fatal: bool = False) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.fatal = status, message, code, fatal


class Shape(BaseModel):
    """Fields of a request with the types that they must have. What is not named may be anything."""

    model_config = ConfigDict(strict=True)


S = TypeVar("S", bound=Shape)


def shaped(kind: type[S], value: Any) -> S:
    """Return the fields of a request, or of a part of one. Raises ``Refused`` where one has a wrong type."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        at = ".".join(map(str, first["loc"])) or "a part"
        raise Refused(400, f"a request of another shape: {at}: {first['msg']}") from error


@dataclass(frozen=True)
class Request:
    """A request of any wire format."""

    messages: list[dict[str, Any]]
    tools: list[ToolSchema]
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    """The text of each token is wanted, beside its log-probability."""


@dataclass(frozen=True)
class Choice:
    """One sampled turn."""

    message: Message
    finish: Finish
    ids: list[int]
    """Sampled token ids."""
    logprobs: list[float]
    tokens: list[str]
    """The text of each, where the request wants ``logprobs``."""
    stopped_by: str | None = None
    """The stop text that ended it."""


@dataclass(frozen=True)
class Answers:
    """What a request is answered with."""

    choices: list[Choice]
    prompt_ids: list[int]

    @property
    def completion_tokens(self) -> int:
        return sum(len(answer.ids) for answer in self.choices)


class Wire(Protocol):
    """One wire format. All methods are pure."""

    def request(self, body: Mapping[str, Any]) -> Request:
        """Read a request. Raises ``Refused``, or what a body of wrong types makes Python raise."""
        ...

    def response(self, body: Mapping[str, Any], answers: Answers, name: str) -> dict[str, Any]:
        """Return the answer to ``body``; ``name`` is its id."""
        ...

    def events(self, body: Mapping[str, Any], answers: Answers, name: str) -> Iterator[str]:
        """Yield the answer as server-sent events."""
        ...

    def error(self, refused: Refused) -> dict[str, Any]:
        """Return the body of an error."""
        ...


def event(data: Any, kind: str | None = None) -> str:
    """Return one server-sent event."""
    return (f"event: {kind}\n" if kind else "") + f"data: {json.dumps(data)}\n\n"


def texts(content: Any, kinds: Sequence[str]) -> str:
    """Return the text of a content, which is a text or a list of parts. Raises ``Refused`` for other parts."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part["type"] not in kinds:
            raise Refused(400, f"a part of the content has type {part['type']!r}: the model reads text alone")
    return "".join(str(part.get("text") or "") for part in content)


def read_json(text: str, what: str) -> Any:
    """Return the value of a JSON text. Raises ``Refused``."""
    try:
        return json.loads(text or "{}")
    except ValueError as error:
        raise Refused(400, f"{what}: not JSON ({error})") from error
