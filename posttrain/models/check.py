"""What is known to be wrong with a model before a run, from its files alone: no weights are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.core.errors import ModelError
from posttrain.core.registry import some
from posttrain.models.load import ModelSource, build, load_config, load_generation_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def check_weights(
    source: ModelSource, model: PreTrainedModel | None = None, *, leave: frozenset[str] = frozenset()
) -> None:
    """Check that every weight is there in the shape that the config says.

    Args:
        model: what the weights are for, on the meta device; None: the causal LM of its config.
        leave: names of parameters that the files need not hold.

    Raises:
        ModelError: a file is missing or damaged, or a weight is missing or of another shape.
    """
    import torch

    from posttrain.models.weights import check_files

    if getattr(load_config(source), "quantization_config", None) is not None:
        return  # names and shapes are those of its method, which the engine that knows it checks
    check_files(build(source, dtype=torch.float32) if model is None else model, source, leave=leave)


def check_vocabulary(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that every token has a row in the model's embedding. Raises ``ModelError``."""
    rows = getattr(load_config(source).get_text_config(), "vocab_size", None)
    if rows is None:
        return  # a kind of model that says it elsewhere
    vocabulary = tokenizer.get_vocab()
    if beyond := sorted((token for token, number in vocabulary.items() if number >= rows), key=vocabulary.__getitem__):
        largest = max(vocabulary.values())
        raise ModelError(
            f"the tokenizer of {source.path} is larger than the model's embedding: its ids go to {largest}, the "
            f"embedding has {rows} rows, and none for {some(beyond)}",
            hint="take the tokenizer that came with these weights, or give the model more rows: "
            f"model.resize_token_embeddings({largest + 1})",
        )
    generation = load_generation_config(source)
    ends = (None if generation is None else generation.eos_token_id) or []
    if outside := [number for number in (ends if isinstance(ends, list) else [ends]) if not 0 <= number < rows]:
        raise ModelError(
            f"generation_config.json of {source.path} ends a turn with token {outside[0]}, and the embedding has "
            f"{rows} rows",
            hint="take the generation_config.json that came with these weights",
        )
