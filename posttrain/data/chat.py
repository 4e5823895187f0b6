"""Chat templates: what a conversation is in tokens, and which of them the assistant wrote.

Two users. SFT renders a whole conversation and needs its loss mask (``render_chat``). Rollouts render the first prompt
once (``render_prompt``) and afterwards only what follows a sampled turn (``ChatDeltas``): history is never tokenized
again, so what is trained is exactly what was sampled.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast

from posttrain.core.errors import DataError, ModelError
from posttrain.core.text import encodable
from posttrain.core.types import ToolSchema
from posttrain.data.frames import frame, keeps_track
from posttrain.data.messages import AnyMessage, normalize_messages, normalize_tools
from posttrain.data.spans import AssistantSpans
from posttrain.data.template import ChatTemplate, Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class RenderedChat:
    """A conversation in tokens."""

    ids: list[int]
    """[T] token ids, those of ``tokenizer.apply_chat_template(messages, tokenize=True)``."""
    mask: list[bool]
    """[T] true for the tokens that the policy would have sampled, its end-of-turn token included."""
    straddling: int = 0
    """Tokens that hold the end of a turn's header and also its first characters (two line breaks can be one token), or
    likewise at its end. The policy never chooses such a token: when it writes, the header is there already, in tokens
    of its own. So they are not in the mask."""


def render_chat(
    messages: Sequence[AnyMessage],
    tokenizer: PreTrainedTokenizerBase,
    tools: str | Sequence[Any] | None = None,
    **template_kwargs: Any,
) -> RenderedChat:
    """Render a conversation and mark what the policy would have sampled.

    In the mask: the assistant's content, the reasoning that the template keeps, tool calls, the end-of-turn token. Not
    in it: headers, the line break after the end of a turn, all other roles, messages with ``train: false``. Turns are
    found by ``{% generation %}`` marks where the template has them, else by tracing its loop over the messages; either
    way the template runs twice, whatever the number of turns.

    Args:
        messages: in any style that ``data.messages.normalize_messages`` reads.
        tokenizer: a fast tokenizer with a chat template.
        tools: in any style that ``data.messages.normalize_tools`` reads.
        template_kwargs: variables of the template, such as ``enable_thinking=False``.

    Raises:
        DataError: the template refuses the conversation, leaves out tool calls or images, or cannot be traced.
        ModelError: the tokenizer does not know which characters its tokens hold.
    """
    return ChatRenderer(tokenizer, **template_kwargs).render([(messages, tools)])[0]


def render_chats(
    conversations: Sequence[tuple[Sequence[AnyMessage], str | Sequence[Any] | None]],
    tokenizer: PreTrainedTokenizerBase,
    **template_kwargs: Any,
) -> list[RenderedChat]:
    """Render many conversations (messages, tools), tokenized together (the tokenizer then uses all cores).

    Raises:
        DataError, ModelError: as ``render_chat``, naming the conversation by its place in the list.
    """
    return ChatRenderer(tokenizer, **template_kwargs).render(conversations)


class ChatRenderer:
    """``render_chats`` with one tokenizer and one set of template arguments, for calls that follow one another: what
    was found out about the template is kept. It renders as the tokenizer's template was when it was made."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, **template_kwargs: Any) -> None:
        if not tokenizer.is_fast:
            raise ModelError(
                f"{type(tokenizer).__name__} is a slow tokenizer: it does not say which characters its tokens hold",
                hint="use a model with a tokenizer.json",
            )
        self.tokenizer = tokenizer
        self._spans = AssistantSpans(tokenizer, template_kwargs)
        self._stripping = {i for i, token in tokenizer.added_tokens_decoder.items() if token.rstrip}
        """Tokens that take the white space behind them for their own."""

    def render(
        self, conversations: Sequence[tuple[Sequence[AnyMessage], str | Sequence[Any] | None]]
    ) -> list[RenderedChat]:
        """Render many conversations, as ``render_chats`` does."""
        texts: list[str] = []
        spans: list[list[Span]] = []
        for i, (messages, tools) in enumerate(conversations):
            with _named(f"conversation {i}"):
                text, found = self._spans.find(normalize_messages(messages), normalize_tools(tools))
            texts.append(encodable(text))
            spans.append(found)
        encoded = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        columns = zip(texts, encoded["input_ids"], encoded["offset_mapping"], spans, strict=True)
        return [
            RenderedChat(ids, *_token_mask(self._written(text, ids, offsets), found))
            for text, ids, offsets, found in columns
        ]

    def _written(self, text: str, ids: Sequence[int], offsets: Sequence[Span]) -> Sequence[Span]:
        """Return the characters of each token, without the white space behind it that some take: the policy samples
        an end of turn before there is any."""
        if self._stripping.isdisjoint(ids):
            return offsets
        return [
            (start, start + len(text[start:end].rstrip())) if token in self._stripping else (start, end)
            for token, (start, end) in zip(ids, offsets, strict=True)
        ]


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Put a name before the message of a ``DataError``."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{what}: {error.message}", hint=error.hint) from error


def _token_mask(offsets: Sequence[Span], spans: Sequence[Span]) -> tuple[list[bool], int]:
    """Return which tokens lie in the character spans, and how many lie in one in part only.

    Both ends of the tokens' characters never fall, so a span's tokens are found by bisection.
    """
    mask = [False] * len(offsets)
    straddling = 0
    for start, end in spans:
        first = bisect_right(offsets, start, key=itemgetter(1))
        stop = bisect_left(offsets, end, key=itemgetter(0))
        overlapping = max(0, stop - first)
        while first < stop and offsets[first][0] < start:
            first += 1
        while first < stop and offsets[stop - 1][1] > end:
            stop -= 1
        inside = max(0, stop - first)
        mask[first : first + inside] = [True] * inside
        straddling += overlapping - inside
    return mask, straddling


def render_prompt(
    messages: Sequence[AnyMessage],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[ToolSchema] | None = None,
    **template_kwargs: Any,
) -> list[int]:
    """Return token ids of the conversation so far, ending where the assistant starts to write. Raises ``DataError``."""
    return encode(tokenizer, prompt_text(messages, tokenizer, tools, **template_kwargs))


def prompt_text(
    messages: Sequence[AnyMessage],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[ToolSchema] | None = None,
    **template_kwargs: Any,
) -> str:
    """Return the text of ``render_prompt``'s token ids. Raises ``DataError``."""
    template = ChatTemplate(tokenizer, template_kwargs)
    return template.text(normalize_messages(messages), tools, add_generation_prompt=True)


def encoded_lengths(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> list[int]:
    """Return how many token ids ``encode`` gives for each text, computed on all cores where the tokenizer can."""
    if not tokenizer.is_fast:
        return [len(encode(tokenizer, text)) for text in texts]
    lengths, left = list[int](), iter(texts)
    while some := list(islice(left, _AT_ONCE)):
        found = tokenizer.backend_tokenizer.encode_batch_fast(list(map(encodable, some)), add_special_tokens=False)
        lengths += [len(encoded.ids) for encoded in found]
    return lengths


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return token ids of a text that has its control tokens in it. Halves of surrogate pairs are question marks."""
    text = encodable(text)
    if tokenizer.is_fast:  # past the wrapper, which starts threads even for one text
        encoded: list[int] = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return encoded
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of token ids as they are: control tokens included, spaces before punctuation not tidied."""
    if tokenizer.is_fast:
        return str(tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False))
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the control token with which the chat template ends a turn of the assistant. It may be another
    than the tokenizer's end of sequence, as in Gemma, Phi-3 and Qwen's base models; that one is returned where the
    template writes none."""
    end = str(tokenizer.eos_token)
    if tokenizer.chat_template:
        with suppress(DataError):  # it shows no such conversation: rendering one says why
            last, amid = _behind_a_turn(tokenizer), _behind_a_turn(tokenizer, _USER)
            end = last[_closing(last, amid, _control_tokens(tokenizer), end)] or end
    return cast(int, tokenizer.convert_tokens_to_ids(end))


def ends_turns(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template writes a control token behind the assistant's last words. Without one, as in
    GLM's, where the header of the next turn is the end of a turn, nothing in a conversation teaches a model to stop."""
    try:
        return _control_tokens(tokenizer).search(_behind_a_turn(tokenizer)) is not None
    except DataError:  # it shows no such conversation: those of the data say more
        return True


def _behind_a_turn(tokenizer: PreTrainedTokenizerBase, *more: AnyMessage) -> str:
    return ChatTemplate(tokenizer, {}).text([_USER, _ASSISTANT, *more]).partition(_ASSISTANT["content"])[2]


def _closing(last: str, amid: str, control: re.Pattern[str], eos: str) -> slice:
    """Return where the token is that ends a turn: the end of sequence, else the last control token, of what stands
    behind a turn whether it is the ``last`` or ``amid`` a conversation. Empty: there is none."""
    found = [token.span() for token in control.finditer(last) if amid.startswith(last[: token.end()])]
    of_sequence = [span for span in found if last[slice(*span)] == eos]
    return slice(*next(reversed(of_sequence or found), (0, 0)))


_AT_ONCE = 1024
"""Texts that are encoded together: each takes much more memory meanwhile than its ids do."""
_USER: dict[str, Any] = {"role": "user", "content": "?"}
_PLAIN = {"role", "name", "content"}
"""Keys of a reply that has nothing out of the ordinary."""
_FRAMES = 4096
"""Most frames that are kept."""
_ASSISTANT: dict[str, Any] = {"role": "assistant", "content": "(what the assistant wrote)"}


class ChatDeltas:
    """What a template puts between the end of one assistant turn and the start of the next.

    The text is rendered after a stand-in conversation of fixed size, so a turn costs the same at any length of history.
    It is exact wherever the template does not rewrite history.

    Attributes:
        end_id: the token that ends a turn of the assistant.

    Raises:
        DataError: the template cannot show the result of a tool, and there are ``tools``.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[ToolSchema] | None = None,
        **template_kwargs: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.tools = tools
        self.template = ChatTemplate(tokenizer, template_kwargs)
        self.end_id = end_of_turn(tokenizer)
        self._eos = str(tokenizer.eos_token)
        self._control = _control_tokens(tokenizer)
        self._frames: dict[tuple[str, ...], list[str] | None] = {}
        self._shows: dict[str, bool] = {}
        self._with_calls = False
        if tools:  # a template that cannot do it is known before the first episode
            self._with_calls = self._needs_calls()

    def ids(self, messages: Sequence[AnyMessage]) -> list[int]:
        """Return ids of ``messages`` (tool results or a user's reply) that follow a turn whose end-of-turn token was
        sampled, up to where the assistant writes again. Raises ``DataError``."""
        # Behind that token, as in the whole conversation: some tokenizers put a space before the start of a text, and
        # some of these tokens take the white space behind them.
        text = self._continued(messages)
        ids = encode(self.tokenizer, text)
        end = cast(int, self.tokenizer.convert_tokens_to_ids(self._end_of(text)))
        return ids[ids.index(end) + 1 :]

    def text(self, messages: Sequence[AnyMessage]) -> str:
        """Return ``ids`` as text. Raises ``DataError``."""
        text = self._continued(messages)
        return text.removeprefix(self._end_of(text))

    def _end_of(self, text: str) -> str:
        found = self._control.match(text)
        assert found is not None
        return found[0]

    def _continued(self, messages: Sequence[AnyMessage]) -> str:
        """Return the end of the turn before ``messages``, and what follows it."""
        replies = normalize_messages(messages)
        texts = [reply["content"] for reply in replies]
        # Nothing but the texts differs from one time to the next.
        key = tuple(str(reply.get(field)) for reply in replies for field in ("role", "name"))
        if not all(isinstance(text, str) for text in texts) or any(reply.keys() - _PLAIN for reply in replies):
            return self._render(replies)
        if key not in self._frames and len(self._frames) < _FRAMES:
            self._frames[key] = self._frame(replies)
        pieces = self._frames.get(key)
        if pieces is None:
            return self._render(replies)
        return "".join(piece for pair in zip(pieces, [*texts, ""], strict=True) for piece in pair)

    def _frame(self, replies: Sequence[dict[str, Any]]) -> list[str] | None:
        """Return what the template puts around the texts of such replies, if it does not depend on the texts."""
        if not keeps_track(self.template.source(self.tools)):
            return None

        def render(texts: Sequence[str]) -> str:
            return self._render([{**reply, "content": text} for reply, text in zip(replies, texts, strict=True)])

        return frame(render, len(replies))

    def _render(self, replies: Sequence[dict[str, Any]]) -> str:
        before = [_USER, self._stand_in(replies) if self._with_calls else _ASSISTANT]
        words, last = _ASSISTANT["content"], ""
        with suppress(DataError):  # it may refuse calls that nobody answers
            last = self.template.text(before, self.tools).partition(words)[2]
        amid = self.template.text([*before, *replies], self.tools, add_generation_prompt=True).partition(words)[2]
        if (end := _closing(last, amid, self._control, self._eos)).stop:
            return amid[end.start :]
        calls, ended, delta = amid.partition(self._eos)  # which may stand between turns alone
        if not ended or (calls and not self._with_calls):
            raise DataError(
                "the chat template does not continue a finished assistant turn",
                hint="multi-turn rollouts need a template that ends turns with a control token",
            )
        return ended + delta

    def shows_images(self, image_id: int, name: str = "f") -> bool:
        """Return true if the template shows an image in what a tool says as one token. Raises ``DataError``."""
        if name not in self._shows:
            probe = {"role": "tool", "name": name, "content": [{"type": "image"}]}
            self._shows[name] = self.ids([probe]).count(image_id) == 1
        return self._shows[name]

    def without_control_tokens(self, text: str) -> str:
        """Return ``text`` with a space inside whatever would become a control token, such as an end of turn: what tools
        and simulated users say must not be able to end their turn."""
        return self._control.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)

    def _needs_calls(self) -> bool:
        """Return true if the template shows a tool's result only after an assistant message that has ``tool_calls``."""
        probe = {"role": "tool", "name": "f", "content": "(what the tool said)"}
        refused = DataError("the chat template does not show what tools say", hint="use one that knows the role tool")
        for self._with_calls in (False, True):
            try:
                if probe["content"] in self._render([dict(probe)]):
                    return self._with_calls
            except DataError as error:
                refused = error
        raise refused

    @staticmethod
    def _stand_in(replies: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return an assistant message with a call for each of the replies, whose ids are given to them."""
        calls = []
        for number, reply in enumerate(replies):
            if reply["role"] == "tool":
                reply.setdefault("tool_call_id", f"call{number:05d}")
                function = {"name": reply.get("name", "f"), "arguments": {}}
                calls.append({"id": reply["tool_call_id"], "type": "function", "function": function})
        return {**_ASSISTANT, "tool_calls": calls} if calls else _ASSISTANT


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return a pattern that finds the tokenizer's special tokens in a text."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= {str(token) for token in tokenizer.all_special_tokens}
    longest_first = sorted((token for token in special if len(token) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
