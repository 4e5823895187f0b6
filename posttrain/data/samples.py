"""From a row of a file to a training sample: checked, rendered, masked, cut to length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from posttrain.core.errors import DataError
from posttrain.core.types import Message
from posttrain.data.chat import ChatRenderer, RenderedChat
from posttrain.data.images import ImageError
from posttrain.data.parquet import parse_conversation, parse_preference, refuse_images
from posttrain.data.prefetch import Rendered, Row
from posttrain.data.schema import Conversation
from posttrain.data.shards import Shards, shard_files
from posttrain.data.turns import with_image_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.data.preferences import Preference
    from posttrain.data.vision import VisionProcessor

Truncation = Literal["error", "left", "right", "drop"]


def conversation_shards(paths: str | Sequence[str]) -> Shards:
    """Return the rows of the SFT files that ``paths`` names (see ``shard_files``). Raises ``DataError``."""
    return Shards(shard_files(paths), ("messages",), ("tools", "images"))


def preference_shards(paths: str | Sequence[str]) -> Shards:
    """Return the rows of the preference files that ``paths`` names (see ``shard_files``). Raises ``DataError``."""
    return Shards(shard_files(paths), ("chosen", "rejected"), ("prompt", "tools", "images"))


class RenderConversations:
    """A ``Render`` of SFT rows. It can be pickled, with the tokenizer as it is, and renders the same elsewhere.

    Args:
        tokenizer: with a chat template.
        max_length: most tokens of a sample.
        truncation: what happens to a longer conversation: an error, a cut of its start (``left``) or end (``right``),
            or it is left out (``drop``). What carries no loss (any more) is left out in any case.
        chat_kwargs: variables of the chat template.
        vision: what reads the images of rows; None: the model reads text alone, and rows with images are refused.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        truncation: Truncation,
        chat_kwargs: dict[str, Any] | None = None,
        vision: VisionProcessor | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.truncation: Truncation = truncation
        self.chat_kwargs = chat_kwargs or {}
        self.vision = vision
        self._chats: ChatRenderer | None = None

    def __call__(self, rows: Sequence[Row]) -> list[Rendered]:
        """Raises ``DataError`` naming file and row: of another schema, too long, with images that cannot be used, or
        what the template refuses."""
        conversations = [parse_conversation(row.columns, row.file, row.index) for row in rows]
        if self.vision is None:
            for row, conversation in zip(rows, conversations, strict=True):
                refuse_images(conversation, row.file, row.index)
        return self.render(conversations, rows)

    def render(self, conversations: Sequence[Conversation], rows: Sequence[Row], column: str = "") -> list[Rendered]:
        """Return conversations that stand in these rows. ``column`` goes into the messages of a ``DataError``."""
        chats = self._render(conversations, rows, column)
        every = zip(chats, conversations, rows, strict=True)
        return [self._cut(self._expanded(*one, column), _where(one[2], column)) for one in every]

    def _expanded(self, chat: RenderedChat, conversation: Conversation, row: Row, column: str) -> Rendered:
        """Return a conversation before it is cut to length, each image's token repeated as a trainer reads it."""
        if self.vision is None:
            return Rendered(np.asarray(chat.ids, np.int32), np.asarray(chat.mask, np.bool_), straddling=chat.straddling)
        try:
            found = self.vision.read(chat.ids, chat.mask, conversation.images)
        except ImageError as error:
            raise DataError(f"{_where(row, error.column or column)}: {error.message}", hint=error.hint) from error
        return Rendered(found.ids, found.mask, straddling=chat.straddling, images=found.images)

    def __getstate__(self) -> dict[str, Any]:
        # What is known about the template is found out anew; it holds compiled code.
        return {**self.__dict__, "_chats": None}

    def _render(self, conversations: Sequence[Conversation], rows: Sequence[Row], column: str) -> list[RenderedChat]:
        if self._chats is None:
            self._chats = ChatRenderer(self.tokenizer, **self.chat_kwargs)
        pairs = [(with_image_parts(c.messages, len(c.images)), c.tools) for c in conversations]
        try:
            return self._chats.render(pairs)
        except DataError:
            # One of them is refused: find out which.
            places = [_where(row, column) for row in rows]
            return [self._render_one(self._chats, pair, place) for pair, place in zip(pairs, places, strict=True)]

    @staticmethod
    def _render_one(chats: ChatRenderer, pair: tuple[Any, Any], where: str) -> RenderedChat:
        try:
            return chats.render([pair])[0]
        except DataError as error:
            message = error.message.removeprefix("conversation 0: ")
            raise DataError(f"{where}: {message}", hint=error.hint) from error

    def _cut(self, whole: Rendered, where: str) -> Rendered:
        limit, how, length = self.max_length, self.truncation, len(whole.ids)
        too_long = length if length > limit else 0
        if too_long and how == "error":
            raise DataError(
                f"{where}: the conversation has {length} tokens, data.max_length is {limit}",
                hint='raise data.max_length, or set data.truncation to "drop", "left" or "right"',
            )
        if too_long and how == "drop":
            return Rendered.nothing(too_long=too_long)
        start = length - limit if too_long and how == "left" else 0
        part = slice(start, start + limit if too_long else length)
        images = [image for image in whole.images if part.start <= image.start]
        images = [replace(i, start=i.start - start) for i in images if i.start + i.tokens <= part.stop]
        if len(images) < len(whole.images):
            raise DataError(
                f"{where}: cut to data.max_length = {limit} tokens, the conversation of {length} would lose an image",
                hint='raise data.max_length, or set data.truncation = "drop"',
            )
        ids, mask = whole.ids[part], whole.mask[part]
        if not mask[1:].any():
            return Rendered.nothing(too_long=too_long, nothing_to_learn=True)
        return Rendered(ids, mask, too_long, straddling=whole.straddling, images=tuple(images))


class RenderPairs:
    """A ``Render`` of preference rows: both conversations of a pair, one behind the other (``Rendered.second``).

    Loss falls on the two answers, not on what the conversations begin with in common. Each is cut to length by itself;
    where nothing is left of one, or nothing in which they differ, the pair is left out.

    Args:
        conversations: how each of the two is rendered.
        end: for a reward model, which scores a conversation at its last token. This token is put behind each one and
            alone carries loss; the tools are not shown, as they are not to a reward model in use. None: for a policy.
    """

    def __init__(self, conversations: RenderConversations, end: int | None = None) -> None:
        self._conversations = conversations
        self._end = end

    def __call__(self, rows: Sequence[Row]) -> list[Rendered]:
        """Raises ``DataError`` as ``RenderConversations`` does."""
        pairs = [parse_preference(row.columns, row.file, row.index) for row in rows]
        if self._conversations.vision is None:
            for row, pair in zip(rows, pairs, strict=True):
                refuse_images(pair, row.file, row.index)
        chosen = self._conversations.render([self._whole(p, p.chosen) for p in pairs], rows, "chosen")
        rejected = self._conversations.render([self._whole(p, p.rejected) for p in pairs], rows, "rejected")
        return [self._joined(a, b) for a, b in zip(chosen, rejected, strict=True)]

    def _whole(self, pair: Preference, answer: Sequence[Message]) -> Conversation:
        asked: list[Message] = [{**m, "train": False} if m["role"] == "assistant" else m for m in pair.prompt]
        return Conversation([*asked, *answer], pair.tools if self._end is None else [], pair.images)

    def _joined(self, chosen: Rendered, rejected: Rendered) -> Rendered:
        too_long = max(chosen.too_long, rejected.too_long)
        if chosen.left_out or rejected.left_out:
            nothing = chosen.nothing_to_learn or rejected.nothing_to_learn
            return Rendered.nothing(too_long=too_long, nothing_to_learn=nothing)
        if np.array_equal(chosen.ids, rejected.ids):
            return Rendered.nothing(too_long=too_long, nothing_to_learn=True)
        ids, masks = [chosen.ids, rejected.ids], [chosen.mask, rejected.mask]
        if self._end is not None:
            ids = [np.append(part, np.int32(self._end)) for part in ids]
            masks = [np.arange(len(part)) == len(part) - 1 for part in ids]
        second = len(ids[0])
        images = (*chosen.images, *(replace(image, start=image.start + second) for image in rejected.images))
        straddling = chosen.straddling + rejected.straddling
        whole = np.concatenate(ids), np.concatenate(masks)
        return Rendered(*whole, too_long, straddling=straddling, second=second, images=images)


def _where(row: Row, column: str) -> str:
    return f"{row.file}: row {row.index}{f', column {column!r}' * bool(column)}"
