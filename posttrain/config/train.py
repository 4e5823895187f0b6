"""The trainer and its optimizer."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from posttrain.config.base import Factor, Fraction, NaturalInt, PositiveFactor, PositiveInt, Section

_Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimConfig(Section):
    """AdamW and its schedule."""

    name: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw_8bit keeps both moments in 8 bits, in blocks (arXiv:2110.02861; extra `torchao`)."""
    stochastic_rounding: bool = False
    """Round stepped weights up or down at random, so that steps too small for bfloat16 count on average. Needs
    `train.param_dtype = "bfloat16"` and the extra `torchao`. A function of `run.seed` and the step: a run resumed with
    as many workers is the same."""
    lr: Fraction = 1e-5
    """Learning rate after warm-up."""
    betas: tuple[_Decay, _Decay] = (0.9, 0.95)
    """Decay of the first and the second moment."""
    eps: Annotated[float, Field(ge=1e-20, le=1.0)] = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: Fraction = 0.01
    """Applied to matrices only, not to norms, biases and embeddings."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How the rate falls after warm-up."""
    warmup_ratio: Fraction = 0.0
    """Share of all steps spent raising the rate from 0."""
    warmup_steps: NaturalInt | None = None
    """Optimizer steps spent raising it, instead; none: `warmup_ratio` decides."""
    min_lr_ratio: Fraction = 0.0
    """Where cosine and linear end, as a share of `lr`."""
    grad_clip: PositiveFactor = 1.0
    """Largest global gradient norm."""

    @property
    def needs_torchao(self) -> bool:
        """Whether torchao's optimizers are used instead of torch's."""
        return self.name != "adamw" or self.stochastic_rounding

    @model_validator(mode="after")
    def _one_warmup(self) -> OptimConfig:
        if self.warmup_steps is not None and self.warmup_ratio > 0:
            raise ValueError("train.optim.warmup_steps and train.optim.warmup_ratio exclude each other")
        return self


class EarlyStopConfig(Section):
    """`sft` and `prefer`: end the run when `val/loss` gets no better."""

    patience: PositiveInt | None = None
    """Validations in a row without a better loss that end the run; none: it goes to its last step."""
    min_delta: Factor = 0.0
    """A loss is better when it is lower than the best by more than this."""

    @model_validator(mode="after")
    def _no_setting_without_effect(self) -> EarlyStopConfig:
        if self.min_delta and self.patience is None:
            raise ValueError("train.early_stop.min_delta has no effect without train.early_stop.patience")
        return self


class LoraConfig(Section):
    """Train low-rank adapters beside frozen weights (LoRA, arXiv:2106.09685); see lora.md."""

    rank: PositiveInt | None = None
    """Rank of the adapters; none: no adapters, all weights are trained."""
    alpha: PositiveInt = 32
    """An adapter's output is multiplied by alpha / rank."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (rsLoRA, arXiv:2312.03732)."""
    target_modules: str | list[str] = "all-linear"
    """Layers that get one: `all-linear`, a list of names (`q_proj`, `layers.0.mlp.up_proj`), or a regular expression
    that whole names match, as in peft. Linear layers alone, without embeddings and output head."""

    @field_validator("target_modules")
    @classmethod
    def _names_something(cls, value: str | list[str]) -> str | list[str]:
        if not value or (isinstance(value, list) and "" in value):
            raise ValueError("train.lora.target_modules is empty, or a name in it is")
        if isinstance(value, str):
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(f"train.lora.target_modules = {value!r} is no regular expression: {error}") from error
        return value

    @model_validator(mode="after")
    def _no_setting_without_effect(self) -> LoraConfig:
        if self.rank is None and self.changed:
            raise ValueError(f"train.lora.{min(self.changed)} has no effect without train.lora.rank")
        return self


class TrainConfig(Section):
    """The trainer."""

    epochs: PositiveInt = 1
    """Passes over the data; `steps` ends a run earlier."""
    steps: PositiveInt | None = None
    """Optimizer steps (`sft`, `prefer`) or RL steps; none: `epochs` decides."""
    tokens_per_microbatch: PositiveInt = 16384
    """Most tokens a worker runs through the model at once. Any value gives the same gradient."""
    sequences_per_microbatch: PositiveInt | None = None
    """Most sequences at once, besides the token budget; none: no limit."""
    sequence_parallel: PositiveInt = 1
    """Workers that share one sequence (Ulysses)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type. auto: bfloat16 on GPU, float32 on CPU."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights that the optimizer steps, and of its state. bfloat16 halves their memory, and loses steps
    that are small beside the weight, unless `train.optim.stochastic_rounding` is on. Reductions stay float32."""
    attention: Literal["auto", "flash4", "flash3", "flash2", "torch", "sdpa"] = "auto"
    """What computes attention over packed rows. auto: the fastest that is installed and runs on the device: flash-attn
    4, 3 or 2, core torch's varlen attention, or padded scaled dot-product attention. All are exact."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile each decoder layer, and the steps of torchao's optimizers, with `torch.compile`. auto: on GPU."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What of a layer is computed again in the backward pass: nothing; all but matrix products and attention; all."""
    shard_size: PositiveInt | None = None
    """Workers that share one copy of the weights; copies are replicated (hybrid sharding); none: all share one."""
    reduce_gradients: Literal["microbatch", "step"] = "microbatch"
    """When gradients of several workers are summed. After every micro-batch each worker holds its share only; once a
    step takes less communication, and memory for all gradients in float32 on every worker."""
    gather_weights: Literal["pass", "step"] = "pass"
    """When several workers gather the weights of a layer: for each pass through it, forward and backward; or once a
    step, which takes less communication, and memory for all weights in the compute type on every worker."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory at all times, and step there (FSDP2's offloading)."""
    offload: bool = False
    """Keep parameters and optimizer state in host memory while the samplers run."""
    val_every: PositiveInt | None = None
    """Steps between validations; none: only after the last step."""
    save_every: PositiveInt | None = None
    """Steps between checkpoints; none: only after the last step."""
    max_skipped_steps: PositiveInt = 3
    """An update whose gradient is not finite is skipped; so many in a row end the run, and their last batch stays in
    its folder (`nonfinite_step_N.pt`)."""
    optim: OptimConfig = OptimConfig()
    lora: LoraConfig = LoraConfig()
    early_stop: EarlyStopConfig = EarlyStopConfig()

    @model_validator(mode="after")
    def _rounding_has_effect(self) -> TrainConfig:
        if self.optim.stochastic_rounding and self.param_dtype != "bfloat16":
            raise ValueError(
                "train.optim.stochastic_rounding rounds weights to bfloat16: it needs train.param_dtype = 'bfloat16'"
            )
        return self
