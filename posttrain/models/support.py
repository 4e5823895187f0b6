"""What can be told from a model on the meta device: that packing or an engine would compute something else with it.

Each check raises before a run, with the reason. docs/models.md has the architectures that are tested, by feature.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from posttrain.core.errors import ConfigError, ModelError
from posttrain.models import recurrent, vision
from posttrain.models.output_head import check_head

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PROVEN = frozenset(
    {
        "cohere", "cohere2", "ernie4_5", "exaone4", "gemma2", "gemma3_text", "glm4", "gpt_neox", "gpt_oss", "granite",
        "hunyuan_v1_dense", "llama", "ministral", "mistral", "mixtral", "olmo2", "olmo3", "phi3", "qwen2", "qwen2_moe",
        "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2",
    }
)  # fmt: skip
"""Types of models for which every cell of docs/models.md is right."""
_PAGE = "docs/models.md lists the architectures that work"
_STATELESS = frozenset({"full_attention", "sliding_attention", "attention"})
_STATEFUL = frozenset({"linear_attention", "conv", "mamba", "hybrid"})
_BY_LONGEST = frozenset({"dynamic", "longrope"})
"""Rotary embeddings that depend on the longest sequence of a micro-batch."""
_ASKED = frozenset({"ragged", "position_ids", "use_cache", "sliding_window", "softcap", "s_aux"})
"""What a layer may pass to attention: all that ``attention.ragged_attention`` does, and what makes no difference."""


def check_architecture(model: PreTrainedModel) -> None:
    """Check that packed rows give what each sequence alone does, for a model on the meta device. Raises
    ``ModelError``."""
    for problem in _problems(model):
        raise ModelError(f"models of type {model.config.model_type} {problem}", hint=_PAGE)
    check_head(model)


def is_proven(config: PreTrainedConfig) -> bool:
    """Return true if tests have shown all that ``check_architecture`` looks for. Workers check their model all the
    same: this spares the driver the import of its code, which takes seconds."""
    return config.model_type in PROVEN and not hasattr(config, "auto_map") and not _rope_types(config) & _BY_LONGEST


def _problems(model: PreTrainedModel) -> Iterator[str]:
    """Yield why packed rows would be wrong."""
    config: Any = model.config.get_text_config()
    code = {type(module).__module__ for module in model.modules()}
    if not any("ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[name]) for name in code):
        yield "compute attention in code of their own, which would mix packed sequences"
    if (layer := recurrent.unproven(model)) is not None:
        yield f"have layers with a state ({layer}), which would go from one packed sequence into the next"
    types = list(getattr(config, "layer_types", None) or ())
    if other := sorted(set(types) - _STATELESS - _STATEFUL):
        yield f"have layers of {other[0]}, which this version does not compute"
    if sum(kind in _STATEFUL for kind in types) > len(list(recurrent.recurrent_layers(model))):
        yield "have layers with a state that is not found, and would go from one packed sequence into the next"
    for kind in _rope_types(config) & _BY_LONGEST:
        yield (
            f"with rope_type {kind!r} take positions by the longest sequence of a micro-batch, so that packing would "
            "change what a sequence gives"
        )
    yield from _probe(model)


def _rope_types(config: Any) -> set[str | None]:
    """Return the kinds of rotary embedding of all layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    return {rope.get("rope_type"), *(part.get("rope_type") for part in rope.values() if isinstance(part, dict))}


def _probe(model: PreTrainedModel) -> list[str]:
    """Run three tokens through the model's code, where layers say what they get instead of computing, and return what
    is wrong with that."""
    from transformers import AttentionInterface

    problems: list[str] = []

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float = 0.0, **asked: Any
    ) -> tuple[Tensor, None]:
        if "ragged" not in asked:
            problems.append("do not tell their attention where packed sequences begin")
        if not getattr(module, "is_causal", True):
            problems.append("have attention that is not causal")
        problems.extend(
            f"ask attention for {name!r}, which this version does not compute"
            for name, value in asked.items()
            if name not in _ASKED | {"scaling"} and value is not None
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None

    def recur(hidden_states: Tensor, *args: Any, **asked: Any) -> Tensor:
        if "ragged" not in asked:
            problems.append("do not tell their layers with a state where packed sequences begin")
        return torch.zeros_like(hidden_states)

    def zeros(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros_like(hidden_states)

    replaced: list[tuple[Any, Any, Any]] = [
        (layer, vars(layer).get("forward"), recur) for _, layer in recurrent.recurrent_layers(model)
    ]
    experts = (module for module in model.modules() if type(module).__name__.endswith("Experts"))
    replaced += [(module, vars(module).get("forward"), zeros) for module in experts]
    before = model.config._attn_implementation
    training = model.training
    AttentionInterface.register(_PROBE, attend)
    try:
        for module, _, forward in replaced:
            module.forward = forward
        model.set_attn_implementation(vision.attention_of(model.config, _PROBE))
        model.eval()
        tokens = torch.zeros(1, 3, dtype=torch.int64, device="meta")
        # Code that does not run on the meta device is not judged here. In a run attention itself refuses a row of which
        # it is not told where its sequences begin.
        with contextlib.suppress(NotImplementedError, RuntimeError), torch.no_grad(), torch.device("meta"):
            cast(Any, model.base_model)(input_ids=tokens, position_ids=tokens, use_cache=False, ragged=object())
    finally:
        for module, own, _ in replaced:
            del module.forward
            if own is not None:  # of `recurrent.separate_sequences`
                module.forward = own
        model.set_attn_implementation(vision.attention_of(model.config, before))
        model.train(training)
    return problems


_PROBE = "posttrain-probe"


def check_sequence_parallel(model: PreTrainedModel, size: int) -> None:
    """Check that ``size`` workers can share the model's sequences. Raises ``ConfigError``."""
    from posttrain.models.ulysses import check_heads

    if size == 1:
        return
    for _, layer in recurrent.recurrent_layers(model):
        raise ConfigError(
            f"train.sequence_parallel = {size}: {type(layer).__name__} has a state that goes from token to token, and "
            "workers that share a sequence would each begin without it",
            hint="--set train.sequence_parallel=1",
        )
    check_heads(model.config.get_text_config(), size)


def check_embedded(model: PreTrainedModel) -> None:
    """Check that the embedded engine can sample from the model. Raises ``ConfigError``."""
    hint = "--set rollout.engine=vllm, or sglang on a GPU"
    for _, layer in recurrent.recurrent_layers(model):
        raise ConfigError(
            f"rollout.engine = hf: {type(layer).__name__} has a state, for which the KV cache of transformers' "
            "continuous batching has no place",
            hint=hint,
        )
    config: Any = model.config.get_text_config()
    if getattr(config, "kv_lora_rank", None):
        raise ConfigError(
            f"rollout.engine = hf: models of type {config.model_type} have keys and values of different sizes, for "
            "which the KV cache of transformers' continuous batching has no place",
            hint=hint,
        )
