"""The sizes of a model, from its config.json alone.

Shape legend: h hidden size, q width of all query heads, kv width of all key heads, i width of the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from posttrain.config import LoraConfig
from posttrain.core.errors import ModelError
from posttrain.core.flops import Flops
from posttrain.models.fp8_layers import Fp8Layers, fp8_layers
from posttrain.plan.matrix import Matrix
from posttrain.plan.tower import TowerShape, tower_of

_KNOWN = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"}
"""Model types whose parameters are counted exactly, and tested to be."""
_QWEN2 = {"qwen2", "qwen2_5_vl", "qwen2_5_vl_text"}
_QWEN3 = {"qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_text"}
"""Model types whose layers are those of Qwen2 and Qwen3."""
_LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "intermediate_size": 11008, "vocab_size": 32000,
}  # fmt: skip
"""What transformers takes where the config of a Llama within another model says nothing. Releases of SmolVLM and
Idefics3 lack some of these."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer."""

    kind: str
    """`model_type` of its config"""
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    """The output head is the embedding."""
    matrices: tuple[Matrix, ...]
    """Linear layers of a decoder layer, router and experts apart"""
    expert: tuple[Matrix, ...] = ()
    """Linear layers of one expert"""
    experts: int = 0
    experts_per_token: int = 0
    intermediate: int = 0
    """Width of the MLP that a token goes through: of all its experts together"""
    qk_norm: bool = False
    """Queries and keys are normalised, each head for itself."""
    max_length: int | None = None
    values: bool = False
    """One value a token instead of logits (a critic, a reward model)"""
    sees: bool = False
    """It has a vision tower."""
    tower: TowerShape | None = None
    """None: it has none, or one of a kind that is not known here, and not in these sizes"""

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def known(self) -> bool:
        """Return whether parameters of this kind are counted exactly."""
        return self.kind in _KNOWN

    @property
    def expert_parameters(self) -> int:
        """Return the parameters of all experts of one decoder layer."""
        return self.experts * sum(m.parameters for m in self.expert)

    @property
    def multiplied(self) -> int:
        """Return the parameters of one decoder layer that a token is multiplied by."""
        router = self.hidden * self.experts
        active = self.experts_per_token * sum(m.parameters for m in self.expert)
        return router + active + sum(m.parameters for m in self.matrices)

    @property
    def layer_parameters(self) -> int:
        """Return the parameters of one decoder layer."""
        norms = 2 * self.hidden + 2 * self.head_dim * self.qk_norm
        router = self.hidden * self.experts
        return norms + router + self.expert_parameters + sum(m.parameters for m in self.matrices)

    @property
    def embedding(self) -> int:
        """Parameters of the token embedding."""
        return self.vocabulary * self.hidden

    @property
    def head(self) -> int:
        """Parameters of the output head, where it is not the embedding."""
        if self.values:
            return self.hidden
        return 0 if self.tied else self.embedding

    @property
    def head_gradient(self) -> int:
        """Elements of the gradient that the output head gives."""
        return self.hidden if self.values else self.embedding

    @property
    def outside(self) -> int:
        """Parameters that belong to no layer."""
        return self.embedding + self.head + self.hidden

    @property
    def language(self) -> int:
        """Return the parameters of the language model."""
        return self.layers * self.layer_parameters + self.outside

    @property
    def of_tower(self) -> int:
        """Return the parameters of the vision tower."""
        return 0 if self.tower is None else self.tower.parameters

    @property
    def parameters(self) -> int:
        return self.language + self.of_tower

    def lora_parameters(self, lora: LoraConfig, *, tower: bool = False) -> int:
        """Return the parameters of adapters beside all linear layers (`all-linear`; routers and experts are none), or
        beside those whose last name is in the list; with ``tower`` also of the vision tower."""
        if lora.rank is None:
            return 0
        given = lora.target_modules
        names = None if given == "all-linear" or isinstance(given, str) else {name.rsplit(".", 1)[-1] for name in given}
        adapted = [m for m in self.matrices if names is None or m.name in names]
        more = self.tower.lora_parameters(lora, names) if tower and self.tower is not None else 0
        return more + self.layers * sum(m.count * lora.rank * (m.inputs + m.outputs) for m in adapted)

    def fp8(self, tensor_parallel: int = 1) -> Fp8Layers:
        """Return what is quantized of one decoder layer for `rollout.quantization`. Raises ``ConfigError``."""
        layer = "model.layers.0"
        linear: dict[str, tuple[int, ...]] = {f"{layer}.{m.name}.weight": (m.outputs, m.inputs) for m in self.matrices}
        for m in self.expert:
            linear[f"{layer}.mlp.experts.{m.name}"] = (self.experts, m.outputs, m.inputs)
        if self.experts:
            linear[f"{layer}.mlp.gate.weight"] = (self.experts, self.hidden)
        return fp8_layers(self.kind, linear, tensor_parallel=tensor_parallel)

    def flops(self, lora: LoraConfig | None = None) -> Flops:
        """As ``train.flops.model_flops`` counts them of the model itself, without its vision tower."""
        active = self.experts_per_token / self.experts if self.experts else 1.0
        experts = self.layers * self.expert_parameters
        looked_up = 0 if self.tied and not self.values else self.embedding
        forward = 2.0 * (self.language - looked_up - experts * (1.0 - active))
        trained = forward
        if lora is not None and lora.rank is not None:
            trained = 2.0 * self.lora_parameters(lora)
            forward += trained
        return Flops(forward, trained, 2.0 * self.layers * self.q)

    def as_values(self) -> ModelShape:
        """The same with one value a token."""
        return ModelShape(**{**self.__dict__, "values": True, "tied": False})


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape of the model that a config.json describes.

    Raises:
        ModelError: it lacks a size.
    """
    whole, text, sees = config, config.get("text_config"), "vision_config" in config
    if isinstance(text, Mapping):
        left_out = _LLAMA if text.get("model_type", "llama") == "llama" else {}
        config = {"tie_word_embeddings": config.get("tie_word_embeddings", False), **left_out, **text}
    try:
        shape = _shape(config)
        return replace(shape, sees=sees, tower=tower_of(whole, shape.hidden) if sees else None)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(
            f"the config of {name} does not give the sizes of a decoder: {type(error).__name__}: {error}",
            hint="plan knows models like Llama, Qwen and Mistral",
        ) from error


def _shape(c: Mapping[str, Any]) -> ModelShape:
    kind = str(c.get("model_type", ""))
    hidden, layers, heads = int(c["hidden_size"]), int(c["num_hidden_layers"]), int(c["num_attention_heads"])
    kv_heads = int(c.get("num_key_value_heads") or heads)
    head_dim = int(c.get("head_dim") or hidden // heads)
    q, kv = heads * head_dim, kv_heads * head_dim
    biased = bool(c.get("attention_bias", False))
    qkv_bias, out_bias = (True, False) if kind in _QWEN2 else (biased, biased)
    mlp_bias = bool(c.get("mlp_bias", False))
    matrices = [
        Matrix("q_proj", hidden, q, qkv_bias),
        Matrix("k_proj", hidden, kv, qkv_bias),
        Matrix("v_proj", hidden, kv, qkv_bias),
        Matrix("o_proj", q, hidden, out_bias),
    ]
    experts = int(c.get("num_experts") or c.get("num_local_experts") or 0)
    width = int((c.get("moe_intermediate_size") if experts else None) or c["intermediate_size"])
    mlp = (
        Matrix("gate_proj", hidden, width, mlp_bias),
        Matrix("up_proj", hidden, width, mlp_bias),
        Matrix("down_proj", width, hidden, mlp_bias),
    )
    each = int(c["num_experts_per_tok"]) if experts else 1
    return ModelShape(
        kind=kind,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=int(c["vocab_size"]),
        tied=bool(c.get("tie_word_embeddings", False)),
        matrices=(*matrices, *(() if experts else mlp)),
        expert=mlp if experts else (),
        experts=experts,
        experts_per_token=each if experts else 0,
        intermediate=width * each,
        qk_norm=kind in _QWEN3,
        max_length=c.get("max_position_embeddings"),
    )
