"""Sections of the trainer and its optimizer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from posttrain.config.base import Factor, Fraction, NaturalInt, PositiveFactor, PositiveInt, Section

_Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimConfig(Section):
    """AdamW and its learning-rate schedule."""

    name: Literal["adamw", "adamw_8bit"] = "adamw"
    """Optimizer. adamw_8bit stores both moments in 8 bits with block-wise scaling (arXiv:2110.02861; extra
    `torchao`)."""
    stochastic_rounding: bool = False
    """Round updated weights up or down at random, so that updates too small for bfloat16 count on average. Needs
    `train.param_dtype = "bfloat16"` and the extra `torchao`. Seeded by `run.seed` and the step: a run resumed with the
    same number of workers gives the same weights."""
    lr: Fraction = 1e-5
    """Learning rate after warmup."""
    betas: tuple[_Decay, _Decay] = (0.9, 0.95)
    """Decay rates of the first and the second moment."""
    eps: Annotated[float, Field(ge=1e-20, le=1.0)] = 1e-8
    """Constant added to the square root of the second moment."""
    weight_decay: Fraction = 0.01
    """Weight decay of matrices; norms, biases and embeddings have none."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Decay of the learning rate after warmup."""
    warmup_ratio: Fraction = 0.0
    """Share of all steps in which the learning rate rises linearly from 0."""
    warmup_steps: NaturalInt | None = None
    """Warmup in optimizer steps, instead of `warmup_ratio`; none: `warmup_ratio` applies."""
    min_lr_ratio: Fraction = 0.0
    """Final learning rate of cosine and linear, as a share of `lr`."""
    grad_clip: PositiveFactor = 1.0
    """Maximum global gradient norm; larger gradients are scaled down to it."""

    @property
    def needs_torchao(self) -> bool:
        """Return whether torchao's optimizers are used instead of torch's."""
        return self.name != "adamw" or self.stochastic_rounding

    def check(self, key: str) -> None:
        """Raise ``ValueError`` where settings of the optimizer ``key`` exclude each other or have no effect."""
        if self.warmup_steps is not None and self.warmup_ratio > 0:
            raise ValueError(f"{key}.warmup_steps and {key}.warmup_ratio exclude each other")
        if self.min_lr_ratio and self.schedule == "constant":
            raise ValueError(
                f"{key}.min_lr_ratio = {self.min_lr_ratio:g} has no effect with {key}.schedule = 'constant': set it to "
                "0, or the schedule to 'cosine' or 'linear'"
            )


class EarlyStopConfig(Section):
    """`sft` and `prefer`: end the run when `val/loss` stops improving."""

    patience: PositiveInt | None = None
    """Consecutive validations without improvement after which the run ends; none: no early stop."""
    min_delta: Factor = 0.0
    """Minimum decrease below the best loss that counts as an improvement."""

    @model_validator(mode="after")
    def _no_setting_without_effect(self) -> EarlyStopConfig:
        if self.min_delta and self.patience is None:
            raise ValueError("train.early_stop.min_delta has no effect without train.early_stop.patience")
        return self


class LoraConfig(Section):
    """Low-rank adapters on frozen weights (LoRA, arXiv:2106.09685); see lora.md."""

    rank: PositiveInt | None = None
    """Rank of the adapters; none: no adapters, train all weights."""
    alpha: PositiveInt = 32
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (rsLoRA, arXiv:2312.03732)."""
    target_modules: str | list[str] = "all-linear"
    """Layers with an adapter: `all-linear`, a list of names (`q_proj`, `layers.0.mlp.up_proj`), or a regular expression
    for whole names, as in peft. Only linear layers, without embeddings and output head."""

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
    """The training loop and its workers."""

    epochs: PositiveInt = 1
    """Passes over the data, where `steps` is none. With `rollout.replay` also the most passes over its files."""
    steps: PositiveInt | None = None
    """Optimizer steps (`sft`, `prefer`) or RL steps, whatever `epochs` says; none: determined by `epochs`."""
    tokens_per_microbatch: PositiveInt = 16384
    """Maximum tokens per micro-batch of a worker. The gradient does not depend on it."""
    sequences_per_microbatch: PositiveInt | None = None
    """Maximum sequences per micro-batch, in addition to the token limit; none: no limit."""
    patches_per_microbatch: PositiveInt | None = None
    """Models that see: maximum image patches per micro-batch, in addition to the token limit; none: no limit. What is
    above it has a micro-batch of its own."""
    vision_tower: Literal["frozen", "trained"] = "frozen"
    """Models that see: keep the vision tower, with its projection into the language model, as it is, or train it like
    the rest (with `train.lora` by adapters); see vision.md."""
    sequence_parallel: PositiveInt = 1
    """Workers that share one sequence (Ulysses sequence parallelism)."""
    expert_parallel: PositiveInt = 1
    """Mixtures of experts: workers that share out the experts of a layer, so that tokens go to experts instead of the
    weights of experts to tokens; see experts.md. Must divide `cluster.workers` and the number of experts. 1: experts
    are sharded as all other weights."""
    share_prompts: bool = False
    """Compute a prompt that several sequences of a batch begin with once per micro-batch, where that saves more than it
    costs: the groups of `rl`, the pairs of `prefer`. The gradient is the same. Not with `train.sequence_parallel` above
    1, `train.sequences_per_microbatch` or `rollout.batch_invariant`."""
    skip_zero_advantages: bool = False
    """Leave episodes whose advantages are all 0, as those of groups with equal rewards, out of the actor's updates and
    of the pass for its log-probabilities before them. Gradient, loss normaliser and number of updates stay as they are;
    metrics of the policy are then of the other episodes. Does nothing where such episodes have a gradient or a say in
    that of others; see training.md."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype. auto: bfloat16 on GPU, float32 on CPU."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the optimizer's weights and state. bfloat16 halves their memory, and loses updates that are small
    relative to the weight unless `train.optim.stochastic_rounding` is on. Reductions stay in float32."""
    attention: Literal["auto", "flash4", "flash3", "flash2", "torch", "sdpa"] = "auto"
    """Attention implementation for packed rows. auto: the fastest that is installed and runs on the device: flash-attn
    4, 3 or 2, torch's varlen attention, or padded scaled dot-product attention. All are exact."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile each decoder layer and block of a vision tower, and the steps of torchao's optimizers, with
    `torch.compile`. auto: on GPUs only."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Parts of a layer to recompute in the backward pass: none; all but matrix products and attention (selective); all
    (full)."""
    shard_size: PositiveInt | None = None
    """Workers that share one copy of the weights; further workers hold replicas (hybrid sharding); none: all workers
    share one copy."""
    reduce_gradients: Literal["microbatch", "step"] = "microbatch"
    """When to sum the gradients of several workers. microbatch: after every micro-batch, so that each worker holds its
    shard only. step: once per step, with less communication and with memory for all gradients in float32 on every
    worker."""
    gather_weights: Literal["pass", "step"] = "pass"
    """When several workers gather the weights of a layer. pass: for each forward and backward pass through it. step:
    once per step, with less communication and with memory for all weights in the compute dtype on every worker."""
    cpu_offload: bool = False
    """CPU offload of FSDP2: keep weights, gradients and optimizer state in host memory at all times, and run the
    optimizer there."""
    offload: bool = False
    """CPU offload during sampling: move parameters and optimizer state to host memory while the samplers run."""
    val_every: PositiveInt | None = None
    """Steps between validations; none: only after the last step."""
    save_every: PositiveInt | None = None
    """Steps between checkpoints; none: only after the last step."""
    router_aux_loss_coef: Factor = 0.0
    """Mixtures of experts: coefficient of the auxiliary loss that balances the load of the experts, over the whole
    batch (experts.md). Above 0 an update takes a forward pass more. 0: none, whatever the model's config says."""
    max_skipped_steps: PositiveInt = 3
    """Maximum consecutive updates of a model skipped because of a gradient that is not finite; at this count the run
    ends and keeps the last batch in its folder (`nonfinite_step_N.pt`)."""
    optim: OptimConfig = OptimConfig()
    lora: LoraConfig = LoraConfig()
    early_stop: EarlyStopConfig = EarlyStopConfig()

    @model_validator(mode="after")
    def _prompts_can_be_shared(self) -> TrainConfig:
        if self.share_prompts and self.sequence_parallel > 1:
            raise ValueError(
                "train.share_prompts: with train.sequence_parallel each worker has a part of a sequence, and sequences "
                "cannot share prompts; set one of the two"
            )
        if self.share_prompts and self.sequences_per_microbatch is not None:
            raise ValueError(
                "train.share_prompts keeps sequences of a prompt together, and train.sequences_per_microbatch parts "
                "them; limit micro-batches with train.tokens_per_microbatch"
            )
        return self

    @model_validator(mode="after")
    def _experts_can_be_shared_out(self) -> TrainConfig:
        if self.expert_parallel == 1:
            return self
        if self.shard_size is not None:
            raise ValueError(
                "train.expert_parallel with train.shard_size: all workers share one copy of the weights; set one of "
                "the two"
            )
        untested = {"train.sequence_parallel": self.sequence_parallel > 1, "train.cpu_offload": self.cpu_offload}
        self._check_untested(untested)
        return self

    def _check_untested(self, besides: Mapping[str, bool]) -> None:
        for other in (name for name, is_set in besides.items() if is_set):
            raise ValueError(
                f"train.expert_parallel with {other} has not been tested, and is refused; set one of the two"
            )

    @model_validator(mode="after")
    def _optimizer_fits(self) -> TrainConfig:
        self.optim.check("train.optim")
        self.check_optimizer(self.optim, "train.optim")
        return self

    def check_optimizer(self, optim: OptimConfig, key: str) -> None:
        """Raise ``ValueError`` where the optimizer ``key`` does not fit these weights."""
        if self.expert_parallel > 1:
            self._check_untested({
                f"{key}.name = 'adamw_8bit'": optim.name == "adamw_8bit",
                f"{key}.stochastic_rounding": optim.stochastic_rounding,
            })  # fmt: skip
        if optim.stochastic_rounding and self.param_dtype != "bfloat16":
            raise ValueError(
                f"{key}.stochastic_rounding rounds weights to bfloat16: it needs train.param_dtype = 'bfloat16'"
            )
