"""Token ids as pieces of text that joined are the text that the model wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from posttrain.core.errors import PosttrainError, first_line
from posttrain.data.chat import decode
from posttrain.models.load import ModelSource, load_tokenizer
from posttrain.rollout.files import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What an incomplete character decodes to: its bytes are spread over several tokens."""
_MOST_BYTES = 4
"""Tokens that one character of UTF-8 may be spread over."""


def find_tokenizer(folders: Sequence[str], made_with: str) -> tuple[PreTrainedTokenizerBase | None, str]:
    """Return the tokenizer that the trajectories were made with, from the first of ``folders`` that has it; or None and
    why.

    Args:
        made_with: its ``fingerprint``, as the rollout files have it; empty: unknown.
    """
    why = "its tokenizer is neither in a checkpoint nor where model.path says"
    for folder in folders:
        try:
            tokenizer = load_tokenizer(ModelSource(folder))
        except (PosttrainError, OSError, ValueError) as error:
            why = first_line(error)
            continue
        if not made_with or fingerprint(tokenizer) == made_with:
            return tokenizer, ""
        why = f"the tokenizer in {folder} is another than the one that the rollouts were sampled with"
    return None, why


class Pieces:
    """A table of pieces of text, filled as tokens are met."""

    def __init__(self) -> None:
        self.table: dict[str, int] = {}
        """Piece -> its number."""

    def number(self, text: str) -> int:
        return self.table.setdefault(text, len(self.table))


class Splitter:
    """Splits tokens of one tokenizer into pieces."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, pieces: Pieces) -> None:
        self._tokenizer, self._pieces = tokenizer, pieces
        self._text: dict[int, str] = {}
        # A token decoded alone may lose the space before it: it is decoded after another one.
        self._first: list[int] = list(tokenizer.encode("a", add_special_tokens=False))
        self._first_text = decode(tokenizer, self._first)

    def split(self, ids: Sequence[int]) -> list[int]:
        """Return the number of each token's piece. Of a character that is spread over tokens the first one has it
        all."""
        found = [self._of(token) for token in ids]
        at = 0
        while at < len(found):
            if _BROKEN in found[at]:
                for end in range(at + 2, min(at + _MOST_BYTES, len(found)) + 1):
                    whole = self._after(list(ids[at:end]))
                    if _BROKEN not in whole:
                        found[at:end] = [whole] + [""] * (end - at - 1)
                        at = end - 1
                        break
            at += 1
        return [self._pieces.number(text) for text in found]

    def _of(self, token: int) -> str:
        if token not in self._text:
            self._text[token] = self._after([token])
        return self._text[token]

    def _after(self, ids: list[int]) -> str:
        return decode(self._tokenizer, [*self._first, *ids])[len(self._first_text) :]
