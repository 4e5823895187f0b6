"""From a row of a conversation file to a training sample: checked, rendered, masked, cut to length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from posttrain.data.ahead import Rendered, Row
from posttrain.data.chat import ChatRenderer, RenderedChat
from posttrain.data.parquet import parse_conversation, refuse_images
from posttrain.data.shards import Shards, shard_files
from posttrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.data.schema import Conversation

Truncation = Literal["error", "left", "right", "drop"]


def conversation_shards(paths: str | Sequence[str]) -> Shards:
    """The rows of the SFT files that ``paths`` names (see ``shard_files``). Raises ``DataError``."""
    return Shards(shard_files(paths), ("messages",), ("tools", "images"))


class RenderConversations:
    """A ``Render`` of SFT rows. It can be pickled, with the tokenizer as it is, and renders the same elsewhere.

    Args:
        tokenizer: with a chat template.
        max_length: most tokens of a sample.
        truncation: what happens to a longer conversation: an error, a cut of its start (``left``) or end (``right``),
            or it is left out (``drop``). What carries no loss (any more) is left out in any case.
        chat_kwargs: variables of the chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        truncation: Truncation,
        chat_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.truncation: Truncation = truncation
        self.chat_kwargs = chat_kwargs or {}
        self._chats: ChatRenderer | None = None

    def __call__(self, rows: Sequence[Row]) -> list[Rendered]:
        """Raises ``DataError`` naming file and row: of another schema, with images, too long, or what the template
        refuses."""
        conversations = [parse_conversation(row.columns, row.file, row.index) for row in rows]
        for row, conversation in zip(rows, conversations, strict=True):
            refuse_images(conversation, row.file, row.index)
        chats = self._render(conversations, rows)
        return [self._cut(chat, row) for chat, row in zip(chats, rows, strict=True)]

    def __getstate__(self) -> dict[str, Any]:
        # What is known about the template is found out anew; it holds compiled code.
        return {**self.__dict__, "_chats": None}

    def _render(self, conversations: Sequence[Conversation], rows: Sequence[Row]) -> list[RenderedChat]:
        if self._chats is None:
            self._chats = ChatRenderer(self.tokenizer, **self.chat_kwargs)
        pairs = [(c.messages, c.tools) for c in conversations]
        try:
            return self._chats.render(pairs)
        except DataError:
            # One of them is refused: find out which.
            return [self._render_one(self._chats, pair, row) for pair, row in zip(pairs, rows, strict=True)]

    @staticmethod
    def _render_one(chats: ChatRenderer, pair: tuple[Any, Any], row: Row) -> RenderedChat:
        try:
            return chats.render([pair])[0]
        except DataError as error:
            message = error.message.removeprefix("conversation 0: ")
            raise DataError(f"{row.file}: row {row.index}: {message}", hint=error.hint) from error

    def _cut(self, chat: RenderedChat, row: Row) -> Rendered:
        limit, how = self.max_length, self.truncation
        too_long = len(chat.ids) > limit
        if too_long and how == "error":
            raise DataError(
                f"{row.file}: row {row.index}: the conversation has {len(chat.ids)} tokens, data.max_length is {limit}",
                hint='raise data.max_length, or set data.truncation to "drop", "left" or "right"',
            )
        if too_long and how == "drop":
            return Rendered.nothing(too_long=True)
        part = slice(None) if not too_long else slice(-limit, None) if how == "left" else slice(limit)
        ids, mask = np.asarray(chat.ids[part], np.int32), np.asarray(chat.mask[part], np.bool_)
        if not mask[1:].any():
            return Rendered.nothing(too_long=too_long, nothing_to_learn=True)
        return Rendered(ids, mask, too_long, straddling=chat.straddling)
