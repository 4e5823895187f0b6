"""Linear attention and state-space layers over packed rows: each sequence begins with an empty state.

The layers of transformers go from the first token of a row to its last, and would carry the state of one sequence into
the next. Here each gets its sequences as padded rows instead, in groups of similar length: padding is right of every
sequence, and nothing that is causal sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posttrain.models.attention import NAME, Ragged, pad_rows

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_PROVEN = frozenset(
    {
        "FalconH1Mixer",
        "GraniteMoeHybridMambaLayer",
        "Qwen3NextGatedDeltaNet",
        "Qwen3_5GatedDeltaNet",
        "Qwen3_5MoeGatedDeltaNet",
    }
)
"""Layers whose packed rows are tested."""

_MAMBA = frozenset({"FalconH1Mixer", "GraniteMoeHybridMambaLayer"})


def recurrent_layers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """(name, layer) of each layer that has a state: those with a convolution over tokens or a decay of their own."""
    for name, module in model.named_modules():
        own = {child for child, _ in module.named_parameters(recurse=False)}
        if "A_log" in own or any(isinstance(child, nn.Conv1d) for child in module.children()):
            yield name, module


def bypassed(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of linear layers whose weights Mamba kernels take as they are, past an adapter beside them."""
    mixers = (name for name, layer in recurrent_layers(model) if type(layer).__name__ in _MAMBA)
    return frozenset(f"{name}.out_proj" for name in mixers)


def unproven(model: PreTrainedModel) -> str | None:
    """Return the type of a layer with a state that would leak into the next sequence; None: there is none."""
    kinds = {type(layer).__name__ for _, layer in recurrent_layers(model)}
    return min(kinds - _PROVEN, default=None)


def separate_sequences(model: PreTrainedModel) -> None:
    """Let each layer that has a state begin anew at each sequence of a packed row."""
    for _, layer in recurrent_layers(model):
        # Of a compiled decoder layer it breaks the graph: the number of groups differs from row to row.
        layer.forward = torch.compiler.disable(partial(_each_alone, layer.forward, model.config))


def _each_alone(
    forward: Callable[..., Tensor],
    config: PreTrainedConfig,
    hidden_states: Tensor,
    *args: Any,
    ragged: Ragged | None = None,
    **kwargs: Any,
) -> Tensor:
    """hidden_states [1, T, D] -> [1, T, D]; with another attention than ours each row is one sequence."""
    if ragged is None and config._attn_implementation == NAME:
        raise ValueError("packed rows need `ragged=`: without it a sequence would begin with the state of another")
    if ragged is None:
        return forward(hidden_states, *args, **kwargs)
    prefixes = ragged.prefixes
    # A prompt that sequences share goes through once for each of them: a state has no keys to be laid out again.
    tokens = hidden_states[0] if prefixes is None else prefixes.spread(hidden_states[0])
    out = torch.zeros_like(tokens)
    for group in ragged.length_groups:
        part = tokens if group.tokens is None else tokens.index_select(0, group.tokens)
        done = forward(pad_rows(part, group), *args, **kwargs).flatten(0, 1).index_select(0, group.slots)
        out = done if group.tokens is None else out.index_copy(0, group.tokens, done)
    return (out if prefixes is None else out.index_select(0, prefixes.own))[None]
