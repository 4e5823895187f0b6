"""Chat templates: what a conversation is in tokens, and which of them the assistant wrote.

Two users. SFT renders a whole conversation and needs its loss mask (``render_chat``). Rollouts render the first prompt
once (``render_prompt``) and afterwards only what follows a sampled turn (``ChatDeltas``): history is never tokenized
again, so what is trained is exactly what was sampled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posttrain.errors import DataError
from posttrain.types import Message, ToolSchema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class RenderedChat:
    """A conversation in tokens."""

    ids: list[int]
    mask: list[bool]
    """True for the tokens the assistant wrote, its end-of-turn token included."""


def render_chat(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[ToolSchema] | None = None,
    **template_kwargs: Any,
) -> RenderedChat:
    """Render a conversation and mark the assistant's tokens.

    The ids are those of the whole conversation rendered at once. The mask comes from the template's
    ``{% generation %}`` marks where it has them; else each assistant turn is found as the text that rendering one more
    message adds. A message with ``train: false`` is left out of the mask.

    Raises:
        DataError: the template refuses the conversation, or rewrites its history so that turns cannot be told apart.
    """
    return render_chats([(messages, tools)], tokenizer, **template_kwargs)[0]


def render_chats(
    conversations: Sequence[tuple[Sequence[Message], Sequence[ToolSchema] | None]],
    tokenizer: PreTrainedTokenizerBase,
    **template_kwargs: Any,
) -> list[RenderedChat]:
    """``render_chat`` of many conversations, tokenized together (the tokenizer then uses all cores)."""
    marked = bool(re.search(r"\{%-?\s*generation\s*-?%\}", str(tokenizer.chat_template)))
    find_spans = _marked_spans if marked else _spans_by_prefix
    rendered = []
    for i, (messages, tools) in enumerate(conversations):
        with _named(f"conversation {i}"):
            rendered.append(find_spans(messages, tokenizer, tools, template_kwargs))
    encoded = tokenizer([text for text, _ in rendered], add_special_tokens=False, return_offsets_mapping=True)
    chats = []
    for i, (_, spans) in enumerate(rendered):
        with _named(f"conversation {i}"):
            mask = _token_mask(encoded["offset_mapping"][i], spans)
        chats.append(RenderedChat(encoded["input_ids"][i], mask))
    return chats


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Put a name before the message of a ``DataError``."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{what}: {error.message}", hint=error.hint) from error


def _token_mask(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Which tokens lie in the character spans. A token that straddles a span's edge is an error: it would train on
    text of another role, or leave text of the assistant out."""
    mask = [False] * len(offsets)
    spans_left = iter(spans)
    span = next(spans_left, None)
    for i, (start, end) in enumerate(offsets):
        while span is not None and start >= span[1]:
            span = next(spans_left, None)
        if span is None:
            break
        if end > span[0] and end > start:
            if start < span[0] or end > span[1]:
                raise DataError("a token straddles the start or end of an assistant turn", hint="use another template")
            mask[i] = True
    return mask


Spans = list[tuple[int, int]]


def _marked_spans(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[ToolSchema] | None,
    template_kwargs: dict[str, Any],
) -> tuple[str, Spans]:
    """The rendered text and the [start, end) characters of each trained turn, from the template's generation marks."""
    from jinja2.exceptions import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered: Any = render_jinja_template(  # its annotation knows only the form without marks
            [_plain(messages)],
            tools=list(tools) if tools else None,
            chat_template=tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **{**tokenizer.special_tokens_map, **template_kwargs},
        )
    except TemplateError as error:
        raise DataError(f"the chat template refuses the conversation: {error}") from error
    texts, marks = rendered
    turns = [m for m in messages if m["role"] == "assistant"]
    if len(turns) != len(marks[0]):
        raise DataError(
            f"the chat template marks {len(marks[0])} generated parts in a conversation of {len(turns)} assistant turns"
        )
    text, eos = texts[0], str(tokenizer.eos_token)
    opening = _generation_prompt(tokenizer, template_kwargs)
    spans = [_as_sampled(text, span, opening, eos) for span in marks[0]]
    return text, [span for m, span in zip(turns, spans, strict=True) if m.get("train", True)]


def _generation_prompt(tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> str:
    """What a template puts before the assistant starts to write."""
    question: list[Message] = [{"role": "user", "content": "?"}]
    without = _render(tokenizer, question, None, False, template_kwargs)
    return _render(tokenizer, question, None, True, template_kwargs).removeprefix(without)


def _as_sampled(text: str, span: tuple[int, int], opening: str, eos: str) -> tuple[int, int]:
    """A marked part without what no policy samples: templates in use also mark the line break that ends the generation
    prompt, or the one that follows the end of the turn."""
    start, end = span
    for begin in range(start, min(end, start + len(opening)) + 1):
        if text.endswith(opening, 0, begin):
            start = begin
            break
    last = text.rfind(eos, start, end)
    return start, end if last < 0 else last + len(eos)


def _spans_by_prefix(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[ToolSchema] | None,
    template_kwargs: dict[str, Any],
) -> tuple[str, Spans]:
    """The same for a template without marks: a turn is what one more message adds to the text."""
    text = _render(tokenizer, messages, tools, False, template_kwargs)
    eos = str(tokenizer.eos_token)
    spans: Spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        # Text up to where the assistant starts to write, and up to where this turn ends.
        before = _render(tokenizer, messages[:i], tools, True, template_kwargs)
        after = _render(tokenizer, messages[: i + 1], tools, False, template_kwargs)
        if not text.startswith(after) or not after.startswith(before):
            raise DataError(
                f"the chat template rewrites earlier turns at message {i}, so its tokens cannot be told apart",
                hint="drop the reasoning of earlier turns, or use a template with {% generation %} marks",
            )
        end = after.rfind(eos)
        end = end + len(eos) if end >= len(before) else len(after)
        if message.get("train", True):
            spans.append((len(before), end))
    return text, spans


def render_prompt(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[ToolSchema] | None = None,
    **template_kwargs: Any,
) -> list[int]:
    """Token ids of the conversation so far, ending where the assistant starts to write."""
    text = _render(tokenizer, messages, tools, True, template_kwargs)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


_STAND_IN = "(what the assistant wrote)"


class ChatDeltas:
    """What a template puts between the end of one assistant turn and the start of the next.

    The text is rendered after a stand-in conversation of fixed size, so a turn costs the same at any length of history.
    It is exact wherever the template does not rewrite history.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[ToolSchema] | None = None,
        **template_kwargs: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.tools = tools
        self.template_kwargs = template_kwargs
        self.eos = str(tokenizer.eos_token)
        if tools:  # a template that cannot do it is known before the first episode
            self.ids([{"role": "tool", "content": "?"}])

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids of ``messages`` (tool results or a user's reply) that follow a turn whose end-of-turn token was sampled,
        up to where the assistant writes again."""
        before: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _STAND_IN}]
        text = _render(self.tokenizer, [*before, *messages], self.tools, True, self.template_kwargs)
        _, finished_turn, rest = text.partition(_STAND_IN + self.eos)
        if not finished_turn:
            raise DataError(
                "the chat template does not continue a finished assistant turn",
                hint="multi-turn rollouts need a template that ends turns with the end-of-sequence token",
            )
        ids: list[int] = self.tokenizer(rest, add_special_tokens=False)["input_ids"]
        return ids


def _plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates know them: without our own `train` flag."""
    return [{k: v for k, v in m.items() if k != "train"} for m in messages]


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[ToolSchema] | None,
    add_generation_prompt: bool,
    template_kwargs: dict[str, Any],
) -> str:
    from jinja2.exceptions import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            _plain(messages),
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **template_kwargs,
        )
    except TemplateError as error:
        raise DataError(f"the chat template refuses the conversation: {error}") from error
    return str(text)
