"""Tiny random models of transformers' own classes, one of each architecture that docs/models.md tells about."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_SIZES = {
    "vocab_size": 1024,  # that of the built-in tokenizer
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 0,
    "pad_token_id": None,
}  # fmt: skip
_WINDOW = {"sliding_window": 8}
"""Shorter than most of the sequences that are tested."""
_MIXED = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 24}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_MAMBA = {"mamba_n_groups": 1, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_chunk_size": 16}
_LATENT = {
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "num_key_value_heads": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """One row of the page."""

    name: str
    config: str
    """Name of its config class in transformers."""
    about: str
    """What is special about it, for the page."""
    own: dict[str, Any] = field(default_factory=dict)
    """What its config has beside the common sizes."""
    tools: str | None = None
    """Call format of its published chat templates; None: none of ours, or none."""

    def save(self, folder: Path) -> None:
        """Write a random model into ``folder``, with the built-in tokenizer."""
        import transformers

        from posttrain.models.builtin import builtin_tokenizer

        config = getattr(transformers, self.config)(**_SIZES | self.own)
        torch.manual_seed(0)
        model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            # Far from uniform, so that a wrong mask cannot hide, and nothing is exactly 0 or 1.
            spread = 0.25 if parameter.ndim > 1 else 0.1
            parameter.data += torch.randn(parameter.shape, generator=generator) * spread
        model.save_pretrained(folder)
        builtin_tokenizer("tiny").save_pretrained(folder)


_ROWS = [
    Architecture("Llama", "LlamaConfig", "", tools="llama3_json"),
    Architecture("Mistral", "MistralConfig", "sliding window", _WINDOW, "mistral"),
    Architecture("Ministral", "MinistralConfig", "sliding window in some layers", _MIXED, "mistral"),
    Architecture("Qwen2", "Qwen2Config", "biases, tied", {"tie_word_embeddings": True}, "hermes"),
    Architecture("Qwen3", "Qwen3Config", "norms of queries and keys", {}, "hermes"),
    Architecture("Qwen2-MoE", "Qwen2MoeConfig", "experts, one for all tokens", _SHARED_EXPERT, "hermes"),
    Architecture("Qwen3-MoE", "Qwen3MoeConfig", "experts", _EXPERTS, "hermes"),
    Architecture("Mixtral", "MixtralConfig", "experts", _LOCAL_EXPERTS, "mistral_v3"),
    Architecture(
        "Gemma 2", "Gemma2Config", "caps of scores and logits, sliding window, tied",
        {**_MIXED, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    ),
    Architecture(
        "Gemma 3 (text)", "Gemma3TextConfig", "sliding window, two rotary bases, tied",
        {**_MIXED, "query_pre_attn_scalar": 8},
    ),
    Architecture("Phi-3", "Phi3Config", "joined query, key and value; sliding window", _WINDOW),
    Architecture("OLMo 2", "Olmo2Config", "norms after layers"),
    Architecture("OLMo 3", "Olmo3Config", "norms after layers, sliding window", _MIXED),
    Architecture("GLM-4", "Glm4Config", "joined gate and up"),
    Architecture(
        "Granite", "GraniteConfig", "factors of embeddings, residuals, scores and logits",
        {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    ),
    Architecture("Cohere", "CohereConfig", "factor of logits, tied", {"logit_scale": 0.25}),
    Architecture(
        "Cohere 2", "Cohere2Config", "factor of logits, sliding window, tied", {**_MIXED, "logit_scale": 0.25}
    ),
    Architecture(
        "SmolLM3", "SmolLM3Config", "layers without positions, tied", {"no_rope_layers": [1, 0]}, "hermes"
    ),
    Architecture("StarCoder 2", "Starcoder2Config", "biases, sliding window, tied", _WINDOW),
    Architecture("gpt-oss", "GptOssConfig", "sinks, sliding window, experts", {**_MIXED, **_LOCAL_EXPERTS}, "gpt_oss"),
    Architecture("GPT-NeoX", "GPTNeoXConfig", "joined query, key and value", {"num_key_value_heads": 4}),
    Architecture("EXAONE 4", "Exaone4Config", "sliding window, norms after layers", _MIXED),
    Architecture("Seed-OSS", "SeedOssConfig", "biases"),
    Architecture("ERNIE 4.5", "Ernie4_5Config", "tied"),
    Architecture("Hunyuan", "HunYuanDenseV1Config", "norms of queries and keys"),
    Architecture(
        "Qwen3-Next", "Qwen3NextConfig", "linear attention, experts", {**_DELTA, **_SHARED_EXPERT}, "hermes"
    ),
    Architecture("Qwen3.5 (text)", "Qwen3_5TextConfig", "linear attention", _DELTA, "qwen3_coder"),
    Architecture(
        "Falcon-H1", "FalconH1Config", "Mamba 2 beside attention, factors",
        {**_MAMBA, "mamba_d_ssm": 32, "mamba_d_head": 8, "lm_head_multiplier": 0.5},
    ),
    Architecture(
        "Granite 4", "GraniteMoeHybridConfig", "Mamba 2, experts, factors",
        {
            **_MAMBA, **_LOCAL_EXPERTS, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 24,
            "mamba_d_head": 16, "logits_scaling": 4.0,
        },
    ),
    Architecture("DeepSeek-V2", "DeepseekV2Config", "latent attention, experts", _LATENT, "deepseek"),
    Architecture("DeepSeek-V3", "DeepseekV3Config", "latent attention, experts with a bias", _LATENT, "deepseek"),
    Architecture("StableLM", "StableLmConfig", ""),
    Architecture("LFM2", "Lfm2Config", "short convolutions", {"layer_types": ["conv", "full_attention"]}),
    Architecture("Phi-2", "PhiConfig", "output head with a bias"),
    Architecture(
        "Mamba 2", "Mamba2Config", "no attention", {"num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16}
    ),
]  # fmt: skip

ARCHITECTURES = {row.name: row for row in _ROWS}
