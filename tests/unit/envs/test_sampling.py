"""Answers to an agent's requests: where a stop text ends the tokens of a turn."""

import pytest
from tokenizers import Tokenizer, decoders, models

from posttrain.envs.sampling import _tokens_until

BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
A, LINE, B = 256, 257, 258


@pytest.mark.parametrize("character", ["é", "語", "😀"])
def test_a_stop_text_after_a_character_of_several_tokens_ends_behind_it(character):
    """As in tokenizers that write what they do not know in bytes: each reads as a character until the last is there."""
    tokenizer = Tokenizer(models.BPE(BYTES | {"▁a": A, "\n": LINE, "b": B}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    ids = [A, *character.encode(), LINE, B]
    count = _tokens_until(ids, f" a{character}\n", lambda ids: tokenizer.decode(list(ids)))
    assert ids[:count] == [A, *character.encode(), LINE]
