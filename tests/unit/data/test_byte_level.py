"""Text from the bytes of tokens is what the tokenizer itself decodes."""

import os
import random
from copy import deepcopy
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from posttrain.data.byte_level import token_bytes
from posttrain.data.chat import decode
from posttrain.models.builtin import builtin_tokenizer

QWEN = Path(os.environ.get("POSTTRAIN_TEST_DATA", "")) / "tokenizer"


def qwen():
    if not (QWEN / "vocab.json").is_file():
        pytest.skip("POSTTRAIN_TEST_DATA has no tokenizer")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE.from_file(str(QWEN / "vocab.json"), str(QWEN / "merges.txt")))
    )


@pytest.mark.parametrize("make", [lambda: deepcopy(builtin_tokenizer("builtin:tiny")), qwen], ids=["tiny", "qwen"])
def test_any_tokens_decode_to_the_tokenizers_own_text(make):
    """Among them ones that cut a character in two, added ones whose characters stand for no byte, and ids that no token
    has."""
    tokenizer = make()
    backend = tokenizer.backend_tokenizer
    backend.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["<|a b|>", "<｜fin▁de｜>", "é\n", "Ġ x"])
    assert token_bytes(backend) is not None
    size, rng = len(tokenizer), random.Random(0)
    everything = list(range(size + 50))
    texts = [everything, [], [size + 7]]
    for most in (size + 50, 300):  # the first tokens are single bytes
        texts += [[rng.randrange(most) for _ in range(rng.randrange(1, 40))] for _ in range(3000)]
    for ids in texts:
        assert decode(tokenizer, ids) == backend.decode(ids, skip_special_tokens=False)


def test_a_tokenizer_that_does_more_than_join_bytes_decodes_by_itself():
    vocab = {"▁the": 0, "▁end": 1, "<0x0A>": 2}
    backend = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert token_bytes(backend) is None
    assert decode(PreTrainedTokenizerFast(tokenizer_object=backend), [0, 2, 1]) == " the\n end"
