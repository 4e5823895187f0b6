"""Which characters of a rendered conversation the policy would have sampled.

Of what a template writes for an assistant message, three things are not sampled: what stands before the assistant's
words (the header, in inference the generation prompt), what follows the end-of-turn token (mostly a line break), and
turns that the caller does not train. What the template writes at all decides about the rest: reasoning that it drops
has no characters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from posttrain.core.errors import DataError
from posttrain.core.registry import some
from posttrain.core.types import ToolSchema
from posttrain.data.template import ChatTemplate, Span, Traced, extend, hidden_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_USER: dict[str, Any] = {"role": "user", "content": "?"}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
_BEFORE: dict[str, list[dict[str, Any]]] = {
    "user": [_USER],
    "tool": [
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "name": "f", "tool_call_id": _CALL["id"], "content": "?"},
    ],
}
"""The shortest conversations in which the assistant answers a user and a tool: templates may open them otherwise."""


class AssistantSpans:
    """Finds the sampled characters of conversations, for one tokenizer and one set of template arguments."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> None:
        self.template = ChatTemplate(tokenizer, template_kwargs)
        eos = [str(tokenizer.eos_token)] if tokenizer.eos_token else []
        added = tokenizer.added_tokens_decoder.values()
        self._ends = tuple({*eos, *(token.content for token in added if token.special)})
        self._eos = eos[0] if eos else None
        self._openings: dict[str, str] = {}
        self._headers: dict[str, str] = {}

    def find(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSchema] | None) -> tuple[str, list[Span]]:
        """Return the rendered text, and the characters of it that are trained, in order.

        Raises:
            DataError: the template refuses the conversation, leaves tools or tool calls out, or writes an assistant
                message in such a way that it is not certain which characters are sampled.
        """
        traced = self.template.traced(messages, tools)
        hidden = hidden_tools(traced.text, tools or ())
        # What the messages say too may be all that is shown of a name.
        said = [] if hidden else hidden_tools(traced.text, tools or (), messages)
        if hidden or (said and self.template.text(messages) == traced.text):
            raise DataError(
                f"the chat template does not show the tools of the conversation: {some(hidden or said)}",
                hint="use a template that does, or remove the rows' tools",
            )
        marked = _marked_parts(traced, messages) if traced.generated else None
        spans: list[Span] = []
        for i, message in enumerate(messages):
            regions = traced.regions.get(i, [])
            if message["role"] == "tool" and marked is None and not regions and message.get("content"):
                raise DataError(
                    f"message {i}: the chat template writes it nowhere of its own: what a tool has said may be in the "
                    "turn before it",
                    hint="put {% generation %} marks into the template, around what the assistant writes",
                )
            if message["role"] != "assistant":
                continue
            _check_calls(traced.text, regions, i, message)
            parts = marked[i] if marked is not None else [_one(regions, i)]
            if message.get("train", True):
                spans += self._sampled(traced.text, parts, _role_before(messages, i), i, marked is not None)
        return traced.text, spans

    def _sampled(self, text: str, parts: list[Span], before: str, i: int, marked: bool) -> list[Span]:
        """Return the parts of one message without its header, and without what follows its end of turn."""
        start = self._start(text, parts[0], before, i, marked)
        end = self._end(text, (start, parts[-1][1]))
        spans: list[Span] = []
        for first, last in parts:
            if max(start, first) < min(end, last):
                extend(spans, (max(start, first), min(end, last)))
        return spans

    def _start(self, text: str, span: Span, before: str, i: int, marked: bool) -> int:
        """Return where sampling starts: after the generation prompt, wherever in it the span begins.

        A turn of the past may lack a part of the generation prompt, such as an empty thought. Then it starts after the
        header that all turns share. A mark is taken at its word.
        """
        start, end = span
        opening = self._opening(before)
        for begin in range(start, min(end, start + len(opening)) + 1):
            if text.endswith(opening, 0, begin):
                return begin
        if marked:
            return start
        header = self._header(before)
        if not text.startswith(header, start, end):
            raise DataError(
                f"message {i}: the chat template does not begin it with what it puts before the assistant's words, "
                f"{header!r}",
                hint="does the conversation begin with an assistant message? put a system or user message before it",
            )
        return start + len(header)

    def _end(self, text: str, span: Span) -> int:
        """Return the position behind the end-of-turn token. Without one in the template, the turn has all that it
        wrote."""
        written = text[slice(*span)]
        trimmed = written.rstrip()
        if trimmed.endswith(self._ends):
            return span[0] + len(trimmed)
        last = written.rfind(self._eos) if self._eos else -1
        return span[1] if self._eos is None or last < 0 else span[0] + last + len(self._eos)

    def _opening(self, before: str) -> str:
        """Return the generation prompt after a message of role ``before``."""
        if before not in self._openings:
            try:
                asked = self.template.text(_BEFORE[before], add_generation_prompt=True)
                silent = self.template.text(_BEFORE[before])
            except DataError:
                if before == "user":
                    raise
                self._openings[before] = self._opening("user")  # the template knows no tools
            else:
                self._openings[before] = asked[self._before_token(asked, len(_common_start([asked, silent]))) :]
        return self._openings[before]

    def _before_token(self, text: str, position: int) -> int:
        """Return the position, or the start of the special token that it is in: two such tokens may begin alike."""
        for token in self._ends:
            start = text.rfind(token, max(0, position - len(token) + 1), position + len(token) - 1)
            if 0 <= start < position < start + len(token):
                return start
        return position

    def _header(self, before: str) -> str:
        """Return the start of the generation prompt that every turn has, also those of the past: what turns of other
        content, last in the conversation or not, have in common with it."""
        if before not in self._headers:
            starts = [self._opening(before)]
            for content in ("x", "y"):
                turn = {"role": "assistant", "content": content}
                for conversation in ([*_BEFORE[before], turn], [*_BEFORE[before], turn, _USER, turn]):
                    traced = self.template.traced(conversation)
                    spans = traced.regions.get(len(_BEFORE[before]), [])
                    starts += [traced.text[slice(*span)] for span in spans]
            self._headers[before] = _common_start(starts)
        return self._headers[before]


def _common_start(texts: Sequence[str]) -> str:
    for length, characters in enumerate(zip(*texts, strict=False)):
        if len(set(characters)) > 1:
            return texts[0][:length]
    return min(texts, key=len)


def _role_before(messages: Sequence[Mapping[str, Any]], i: int) -> str:
    return "tool" if i and messages[i - 1]["role"] == "tool" else "user"


def _one(spans: list[Span], i: int) -> Span:
    if len(spans) == 1:
        return spans[0]
    found = "in several places" if spans else "nowhere in a loop over the messages"
    raise DataError(
        f"message {i}: the chat template writes it {found}, so that its tokens cannot be told apart",
        hint="put {% generation %} marks into the template, around what the assistant writes",
    )


def _marked_parts(traced: Traced, messages: Sequence[Mapping[str, Any]]) -> dict[int, list[Span]]:
    """Return the ``{% generation %}`` parts of each assistant message."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    origins = [message for message, _ in traced.generated]
    if all(origin is None for origin in origins) and len(origins) == len(turns) and not traced.regions:
        origins = list(turns)  # a template without a loop over messages: by order
    parts: dict[int, list[Span]] = {i: [] for i in turns}
    for origin, (_, span) in zip(origins, traced.generated, strict=True):
        if origin is None or origin not in parts:
            raise DataError("the chat template marks as generated what belongs to no assistant message")
        parts[origin].append(span)
    for i, spans in parts.items():
        if not spans:
            raise DataError(
                f"the chat template marks {len(traced.generated)} generated parts in a conversation of {len(turns)} "
                f"assistant turns: none in message {i}"
            )
    return parts


def _check_calls(text: str, regions: list[Span], i: int, message: Mapping[str, Any]) -> None:
    """Raise for a template that leaves tool calls out without an error: the model would learn to stop in their
    place."""
    written = "".join(text[slice(*span)] for span in regions)
    for key in ("content", "reasoning_content"):  # which may have a tool's name as a word
        if isinstance(said := message.get(key), str) and said.strip():
            written = written.replace(said.strip(), "", 1)
    called = Counter(call["function"]["name"] for call in message.get("tool_calls", ()))
    for name, times in called.items():
        if regions and written.count(name) < times:
            raise DataError(
                f"message {i}: the chat template leaves out {'its call' if times == 1 else 'calls'} of {name!r}",
                hint="use the template of a model that calls tools",
            )
