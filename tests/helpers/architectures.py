"""Tiny random models of transformers' own classes, one of each architecture that docs/models.md tells about."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 1024
"""That of the built-in tokenizer."""
WINDOW = 8
"""Of sliding-window layers: shorter than most of the sequences that are tested."""

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}


@dataclass(frozen=True)
class Architecture:
    """One row of the page."""

    title: str
    config: str
    """Name of its config class in transformers."""
    own: dict[str, Any] = field(default_factory=dict)
    """What its config has beside the common sizes; None takes a size away."""
    about: str = ""
    """What is special about it."""

    def make_config(self) -> Any:
        """Return the config."""
        import transformers

        values = {key: value for key, value in (_SIZES | self.own).items() if value is not ...}
        return getattr(transformers, self.config)(**values)

    def save(self, folder: Path) -> None:
        """Write a random model into ``folder``, with the built-in tokenizer."""
        from transformers import AutoModelForCausalLM

        from posttrain.models.builtin import builtin_tokenizer

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(self.make_config(), attn_implementation="eager")
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            # Far from uniform, so that a wrong mask cannot hide, and nothing is exactly 0 or 1.
            spread = 0.25 if parameter.ndim > 1 else 0.1
            parameter.data += torch.randn(parameter.shape, generator=generator) * spread
        model.save_pretrained(folder)
        builtin_tokenizer("tiny").save_pretrained(folder)


def architectures() -> Iterator[Architecture]:
    """Yield every architecture, the one that most models have first."""
    yield Architecture("Llama", "LlamaConfig")
    yield Architecture("Mistral", "MistralConfig", {"sliding_window": WINDOW}, "sliding window in all layers")
    yield Architecture("Ministral", "MinistralConfig", _MIXED, "some layers have a sliding window")
    yield Architecture("Qwen2", "Qwen2Config", {"tie_word_embeddings": True}, "biases, tied embeddings")
    yield Architecture("Qwen3", "Qwen3Config", {}, "normalised queries and keys")
    yield Architecture("Qwen2-MoE", "Qwen2MoeConfig", _EXPERTS | {"shared_expert_intermediate_size": 24}, "experts, one shared")
    yield Architecture("Qwen3-MoE", "Qwen3MoeConfig", _EXPERTS, "experts")
    yield Architecture("Mixtral", "MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}, "experts")
    yield Architecture("Gemma 2", "Gemma2Config", _MIXED | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}, "caps of scores and logits, sliding window, tied embeddings")
    yield Architecture("Gemma 3 (text)", "Gemma3TextConfig", _MIXED | {"query_pre_attn_scalar": 8}, "sliding window, two rotary bases, tied embeddings")
    yield Architecture("Phi-3, Phi-4", "Phi3Config", {"sliding_window": WINDOW}, "query, key and value in one matrix; sliding window")
    yield Architecture("OLMo 2", "Olmo2Config", {}, "norms after the layers")
    yield Architecture("OLMo 3", "Olmo3Config", _MIXED, "norms after the layers, sliding window")
    yield Architecture("GLM-4", "Glm4Config", {}, "gate and up in one matrix, partial rotary")
    yield Architecture("Granite", "GraniteConfig", {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}, "factors of embeddings, residuals, scores and logits")
    yield Architecture("Cohere (Command R)", "CohereConfig", {"logit_scale": 0.25}, "factor of logits, attention beside the MLP, tied embeddings")
    yield Architecture("Cohere 2", "Cohere2Config", _MIXED | {"logit_scale": 0.25}, "as Cohere, sliding window, layers without positions")
    yield Architecture("SmolLM3", "SmolLM3Config", {"no_rope_layers": [1, 0]}, "layers without positions, tied embeddings")
    yield Architecture("StableLM", "StableLmConfig", {}, "partial rotary, LayerNorm")
    yield Architecture("StarCoder 2", "Starcoder2Config", {"sliding_window": WINDOW}, "biases, sliding window, LayerNorm")
    yield Architecture("gpt-oss", "GptOssConfig", _MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2}, "sinks, experts with biases, sliding window")
    yield Architecture("GPT-NeoX (Pythia)", "GPTNeoXConfig", {}, "query, key and value in one matrix, attention beside the MLP")
    yield Architecture("Qwen3-Next", "Qwen3NextConfig", _LINEAR | _EXPERTS | {"shared_expert_intermediate_size": 24}, "linear attention, gated attention, experts")
    yield Architecture("Qwen3.5 (text)", "Qwen3_5TextConfig", _LINEAR, "linear attention, gated attention")
    yield Architecture("Falcon-H1", "FalconH1Config", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16, "lm_head_multiplier": 0.5}, "Mamba 2 beside attention, factors")
    yield Architecture("LFM2", "Lfm2Config", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}, "short convolutions")
    yield Architecture("Granite 4 (hybrid)", "GraniteMoeHybridConfig", {"layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16, "logits_scaling": 4.0}, "Mamba 2, experts, factors")
    yield Architecture("DeepSeek-V3", "DeepseekV3Config", {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8, "num_key_value_heads": 4, "head_dim": 8}, "latent attention, experts chosen with a bias")
    yield Architecture("DeepSeek-V2", "DeepseekV2Config", {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8, "num_key_value_heads": 4, "head_dim": 8}, "latent attention, experts")
    yield Architecture("Mamba 2", "Mamba2Config", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16})
    yield Architecture("Hunyuan", "HunYuanDenseV1Config")
    yield Architecture("Seed-OSS", "SeedOssConfig")
    yield Architecture("EXAONE 4", "Exaone4Config", _MIXED)
    yield Architecture("ERNIE 4.5", "Ernie4_5Config")
    yield Architecture("Phi", "PhiConfig")
    yield Architecture("GLM-4 MoE", "Glm4MoeConfig", {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace":1, "n_group":1, "topk_group":1})
    yield Architecture("Mistral 4", "Mistral4Config",{})
