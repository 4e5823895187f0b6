"""The bytes of the tokens of byte-level BPE, from which text is decoded two to three times as fast as by tokenizers."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = sorted(set(range(256)).difference(_SHOWN))
_BYTES = {chr(byte): byte for byte in _SHOWN} | {chr(256 + n): byte for n, byte in enumerate(_HIDDEN)}
"""The byte that a character of a token stands for: itself where it is visible, else the next character from U+0100 on
(GPT-2's table, which all byte-level BPE has)."""


class TokenBytes(dict[int, bytes]):
    """Token id -> its bytes, filled as tokens come. An id that the tokenizer does not know has none, as in its own
    decoding."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def __missing__(self, token: int) -> bytes:
        text = self._backend.id_to_token(token)
        if text is None:
            return b""
        # An added token may have characters that stand for no byte: it is its text then.
        found = self[token] = bytes(map(_BYTES.__getitem__, text)) if _BYTES.keys() >= set(text) else text.encode()
        return found


@lru_cache
def token_bytes(backend: Tokenizer) -> TokenBytes | None:
    """Return the bytes of a tokenizer's tokens; None where its texts are not the bytes of their tokens in a row."""
    from tokenizers.decoders import ByteLevel

    return TokenBytes(backend) if isinstance(backend.decoder, ByteLevel) else None
