"""The whole configuration tree. Every default is stated here and nowhere else.

The tree is frozen, and a key it does not know is an error. ``posttrain.presets`` fills it from TOML and remembers where
each value came from. Imports pydantic only, so that ``posttrain --help`` stays fast.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Command = Literal["sft", "rl", "generate", "eval"]

PositiveInt = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Base of every section: frozen, unknown keys forbidden. Docstrings of fields become docs/config.md."""

    model_config = ConfigDict(frozen=True, defer_build=True, extra="forbid", protected_namespaces=())


class RunConfig(Section):
    """Where a run lives and how it starts."""

    name: str = ""
    """Folder under `run.dir`; empty: the preset's name."""
    dir: str = "runs"
    """Folder that holds runs."""
    seed: int = 0
    """Seeds data order, sampling and model initialisation."""
    resume: Literal["auto", "never"] = "auto"
    """auto: an unfinished run of this name and config goes on from its last checkpoint. never: it is an error."""
    overwrite: bool = False
    """Delete an existing run of this name first."""
    logger: list[Literal["console", "jsonl", "tensorboard", "wandb"]] = ["console", "jsonl"]
    """Where metrics go; see metrics.md. The last two need extras of the same name."""
    traces: bool = True
    """rl: write every trajectory to `traces/` in the run's folder, about 6 bytes a token (docs/traces.md)."""
    trace_every: PositiveInt = 1
    """Steps between two that are written there."""
    profile: str = ""
    """`FIRST:LAST`: trace the updates of these steps with torch.profiler, into `profile/` of the run's folder: a Chrome
    trace and a table of the costliest kernels for each rank. Empty: none."""

    @property
    def profiled_steps(self) -> range:
        """The steps of `profile`."""
        if not self.profile:
            return range(0)
        first, last = map(int, self.profile.split(":"))
        return range(first, last + 1)

    @field_validator("profile")
    @classmethod
    def _steps(cls, value: str) -> str:
        found = re.fullmatch(r"(\d+):(\d+)", value)
        if value and (found is None or not 1 <= int(found[1]) <= int(found[2])):
            raise ValueError(f"{value!r} is not FIRST:LAST with 1 <= FIRST <= LAST, for example 10:12")
        return value


class ModelConfig(Section):
    """The model to start from."""

    path: str = "builtin:tiny"
    """A Hugging Face folder or hub id, `builtin:tiny`, or `run:NAME` (the newest checkpoint of a run; `run:latest`)."""
    trust_remote_code: bool = False
    """Run Python code that ships with the model. Off unless asked."""


_RENDERING_ARGUMENTS = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize",
    "tokenizer_kwargs", "tools", "truncation",
}  # fmt: skip
"""Arguments of transformers' ``apply_chat_template`` that are no variables of a template."""


class DataConfig(Section):
    """What is trained on, and in which batches."""

    train: str | list[str] = ""
    """Parquet of SFT or RLHF rows. SFT: also a folder, a glob, or a list of these."""
    val: str | list[str] = ""
    """Held-out parquet, as `train`; empty: no validation."""
    batch_size: PositiveInt = 32
    """Rows per optimizer step (SFT) or prompts per step (RL), over all workers."""
    max_length: PositiveInt = 2048
    """SFT: longest conversation, in tokens."""
    truncation: Literal["error", "left", "right", "drop"] = "error"
    """SFT: what happens to a longer conversation."""
    enable_thinking: bool | None = None
    """Passed to the chat template, in training and in sampling; none: as the template does without it."""
    template_kwargs: dict[str, Any] = {}
    """Further variables of the chat template."""
    shuffle: bool = True
    """A new order every epoch, from `run.seed`."""
    stream_above: Annotated[int, Field(ge=0)] = 20_000
    """SFT: data of at most so many rows is read, checked and tokenized before the run starts. More is streamed from its
    files while it trains, and `train.epochs` then counts all rows, also those that `truncation` drops."""
    shuffle_rows: PositiveInt = 32_768
    """SFT: rows in memory at once when streaming. The next row is drawn from these, and they come from several places
    of the files; data of no more rows is shuffled as a whole."""
    workers: Annotated[int, Field(ge=0)] = 2
    """SFT: processes that tokenize streamed data ahead of the trainer; 0: a thread of the driver does it."""
    prefetch: PositiveInt = 4
    """SFT: batches of streamed data that are ready ahead of the trainer."""
    deadline_s: Annotated[float, Field(gt=0.0)] = 300.0
    """SFT: longest wait for the next batch of streamed data, the start of the processes included."""

    @property
    def chat_kwargs(self) -> dict[str, Any]:
        """All keyword arguments of the chat template."""
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return {**self.template_kwargs, **thinking}

    @field_validator("template_kwargs")
    @classmethod
    def _free_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "enable_thinking" in value:
            raise ValueError("enable_thinking has a key of its own: data.enable_thinking")
        if taken := sorted(_RENDERING_ARGUMENTS & value.keys()):
            raise ValueError(f"{', '.join(taken)}: not variables of a template, posttrain sets them")
        return value


class OptimConfig(Section):
    """AdamW and its schedule."""

    name: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw_8bit keeps both moments in 8 bits, in blocks (arXiv:2110.02861; extra `torchao`)."""
    stochastic_rounding: bool = False
    """Round stepped weights up or down at random, so that steps too small for bfloat16 count on average. Needs
    `train.param_dtype = "bfloat16"` and the extra `torchao`. A function of `run.seed` and the step: a run resumed with
    as many workers is the same."""
    lr: Annotated[float, Field(ge=0.0)] = 1e-5
    """Learning rate after warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and the second moment."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.01
    """Applied to matrices only, not to norms, biases and embeddings."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How the rate falls after warm-up."""
    warmup_ratio: Fraction = 0.0
    """Share of all steps spent raising the rate from 0."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Optimizer steps spent raising it, instead; none: `warmup_ratio` decides."""
    min_lr_ratio: Fraction = 0.0
    """Where cosine and linear end, as a share of `lr`."""
    grad_clip: Annotated[float, Field(gt=0.0)] = 1.0
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
    """SFT: end the run when `val/loss` gets no better."""

    patience: PositiveInt | None = None
    """Validations in a row without a better loss that end the run; none: it goes to its last step."""
    min_delta: Annotated[float, Field(ge=0.0)] = 0.0
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
        names = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        if self.rank is None and names:
            raise ValueError(f"train.lora.{names[0]} has no effect without train.lora.rank")
        return self


class TrainConfig(Section):
    """The trainer."""

    epochs: PositiveInt = 1
    """Passes over the data; `steps` ends a run earlier."""
    steps: PositiveInt | None = None
    """Optimizer steps (SFT) or RL steps; none: `epochs` decides."""
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
    """Compile each decoder layer with `torch.compile`. auto: on GPU."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What of a layer is computed again in the backward pass: nothing; all but matrix products and attention; all."""
    shard_size: PositiveInt | None = None
    """Workers that share one copy of the weights; copies are replicated (hybrid sharding); none: all share one."""
    reduce_gradients: Literal["microbatch", "step"] = "microbatch"
    """When gradients of several workers are summed. After every micro-batch each worker holds its share only; once a
    step takes less communication, and memory for all gradients in float32 on every worker."""
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


class AlgoConfig(Section):
    """The RL algorithm. `--algo NAME` sets a coherent bundle; each field stays open to `--set`."""

    name: str = "grpo"
    """Which bundle the other fields start from."""
    advantage: Literal["grpo"] = "grpo"
    """From one reward an episode to its advantage: relative to the episodes of the same prompt."""
    normalize_by_std: bool = True
    """Divide group-relative rewards by their standard deviation (GRPO) or not (Dr. GRPO)."""
    clip_low: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """The ratio to the old policy counts no lower than 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0.0)] = 0.2
    """The ratio to the old policy counts no higher than 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Lower bound c of the objective for negative advantages (dual-clip PPO); none: off."""
    loss_agg: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = "token-mean"
    """How losses of tokens become one number; see docs/architecture.md."""
    kl_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the KL loss to the reference model; 0: no reference model is loaded, nor is it with LoRA, where the
    reference is the model without its adapter."""
    kl_estimator: Literal["k1", "k2", "low_var_kl"] = "low_var_kl"
    """How the KL is estimated from the sampled tokens (Schulman 2020); low_var_kl is k3."""
    updates_per_step: PositiveInt = 1
    """Optimizer steps made from one batch of trajectories; above 1 the clip acts on stale log-probabilities."""


class RolloutConfig(Section):
    """How episodes are sampled."""

    engine: Literal["hf", "sglang", "vllm"] = "hf"
    """What samples. hf is the embedded engine: transformers' continuous batching."""
    n: PositiveInt = 8
    """Episodes per prompt."""
    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    """Of sampling; the trainer computes log-probabilities at the same one. 0 is greedy (`generate` only)."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the smallest set of tokens with this probability; 1: from all."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from this many most likely tokens; 0: from all."""
    max_prompt_tokens: PositiveInt = 1024
    """A prompt longer than this is an error before the first step."""
    max_response_tokens: PositiveInt = 1024
    """Most tokens after the prompt, over all turns, tool results included."""
    max_turns: PositiveInt = 1
    """Most assistant turns in an episode."""
    max_user_turns: PositiveInt = 4
    """Most turns of the simulated user in an episode."""
    max_calls_per_turn: PositiveInt = 16
    """Most tool calls of one assistant turn; they run side by side, and those above are answered with an error."""
    tools: list[str] = []
    """Tools the model may call: names of registered tools and of `[tools.NAME]` tables, `my_file.py:function`, or a
    `.yaml` file in verl's format; see tools.md."""
    tool_format: str = "auto"
    """How the model writes calls: a format of docs/tool-formats.md or of a plugin. auto: told by its chat template."""
    max_tool_response_chars: PositiveInt = 1024
    """A longer tool result is cut."""
    tool_response_cut: Literal["left", "middle", "right"] = "middle"
    """Where it is cut: its start, its middle or its end is left out."""
    interaction: str = ""
    """A simulated user who answers when the assistant calls no tool: `retry`, or one of a plugin; empty: none."""
    interaction_options: dict[str, Any] = {}
    """Keyword arguments of the interaction."""
    over_sample_rate: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """`rl`: start this share of groups more than needed, and cancel the slowest once enough are in. A cancelled group
    comes first in the next step, and is not cancelled again, so no prompt is passed over."""
    carry_cancelled: bool = False
    """What a cancelled group has sampled is kept, and played on in the next step with weights that are one step newer
    (partial rollout); off: the group is played anew."""
    filter_groups: bool = False
    """`rl`: leave out groups whose episodes all have the same reward, and draw others (dynamic sampling, DAPO,
    arXiv:2503.14476)."""
    filter_max_batches: PositiveInt = 10
    """With `filter_groups`: draw at most so many times `data.batch_size` prompts for one step. Then the step trains on
    what it has."""
    replicas: PositiveInt = 1
    """Engines that share the load."""
    tensor_parallel: PositiveInt = 1
    """GPUs of one engine."""
    memory_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Share of a GPU's memory for an engine (weights and KV cache). On CPU `kv_tokens` rules."""
    kv_tokens: PositiveInt = 65536
    """KV cache of the embedded engine on CPU, in tokens."""
    max_concurrent: PositiveInt = 256
    """Requests an engine runs at once."""
    tool_deadline_s: Annotated[float, Field(gt=0.0)] = 30.0
    """A tool call that takes longer becomes an error that the model can read; also the limit of a simulated user."""
    episode_deadline_s: Annotated[float, Field(gt=0.0)] = 600.0
    """An episode that takes longer ends with stop reason `deadline`."""
    replay: str | list[str] = ""
    """Train from these traces instead of sampling: a file, a folder, a glob, or a list of these; empty: sample."""
    only: bool = False
    """Sample and grade the batches, write their traces, and train nothing."""

    @model_validator(mode="after")
    def _no_setting_without_effect(self) -> RolloutConfig:
        if self.carry_cancelled and not self.over_sample_rate:
            raise ValueError("rollout.carry_cancelled has no effect without rollout.over_sample_rate")
        if self.interaction_options and not self.interaction:
            raise ValueError("rollout.interaction_options has no effect without rollout.interaction")
        if self.only and (self.over_sample_rate or self.filter_groups):
            raise ValueError("rollout.over_sample_rate and rollout.filter_groups have no effect without training")
        return self


class ValConfig(Section):
    """Validation sampling during `rl`."""

    n: PositiveInt = 1
    """Episodes per prompt."""
    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    """Of sampling; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """As `rollout.top_p`."""
    limit: PositiveInt | None = None
    """Only the first so many rows of `data.val`."""


class OverlongConfig(Section):
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13): the part `overlong` of a reward."""

    buffer_tokens: PositiveInt | None = None
    """The last so many tokens before `rollout.max_response_tokens` cost linearly more; none: no such part."""


class RewardModelConfig(Section):
    """A sequence-classification model that scores conversations: the part `model` of a reward."""

    path: str = ""
    """A Hugging Face folder or hub id with one label; empty: no reward model."""
    max_length: PositiveInt = 4096
    """A longer conversation is an error of that episode (`reward.on_error`)."""
    tokens_per_batch: PositiveInt = 16384
    """Most tokens, padding included, that it runs through at once."""

    @model_validator(mode="after")
    def _longest_fits(self) -> RewardModelConfig:
        if self.tokens_per_batch < self.max_length:
            raise ValueError(
                f"reward.model.tokens_per_batch = {self.tokens_per_batch} holds no conversation of "
                f"reward.model.max_length = {self.max_length} tokens"
            )
        return self


class JudgeConfig(Section):
    """A model behind an OpenAI-compatible endpoint that scores conversations: the part `judge` of a reward."""

    url: str = ""
    """Base URL, for example `http://127.0.0.1:8000/v1`; empty: no judge."""
    model: str = ""
    """Name of the model at the endpoint."""
    api_key_env: str = ""
    """Environment variable that holds the key; empty: none is sent."""
    prompt: str = (
        "Judge the last answer of this conversation.\n\n<conversation>\n{conversation}\n</conversation>\n\n"
        "<reference>\n{ground_truth}\n</reference>\n\n"
        "Think briefly, then end with one line: Score: N, where N is a whole number from 0 (wrong or useless) to 10."
    )
    """What the judge reads; `{conversation}`, `{response}`, `{question}` and `{ground_truth}` are filled in."""
    pattern: str = r"Score:\s*(-?\d+(?:\.\d+)?)"
    """Regular expression; the last match's first group is the number."""
    scale: Annotated[float, Field(gt=0.0)] = 10.0
    """The number is divided by this."""
    temperature: Annotated[float, Field(ge=0.0)] = 0.0
    """Of the judge's sampling."""
    max_tokens: PositiveInt = 512
    """Of the judge's answer."""
    concurrency: PositiveInt = 32
    """Most requests at once."""
    retries: Annotated[int, Field(ge=0)] = 4
    """After a refused connection, a timeout, HTTP 408, 429 or 5xx: exponential backoff, `Retry-After` respected."""
    deadline_s: Annotated[float, Field(gt=0.0)] = 60.0
    """Longest wait for one answer."""
    cache: bool = True
    """Ask for the same text once; in a run, answers are kept in its folder and survive a resume."""


class RewardConfig(Section):
    """What an episode earns: a weighted sum of named parts."""

    function: str = ""
    """`my_file.py:name` (or `package.module:name`) of a function that grades every row instead of its data source's
    grader: `(data_source, solution_str, ground_truth, extra_info)` to a float, a dict with `score`, or a `Score`."""
    function_kwargs: dict[str, Any] = {}
    """More keyword arguments for `function`."""
    weights: dict[str, float] = {"score": 1.0}
    """The reward is the sum of weight x part. Parts: `score` (the grader's), `correct` and `format` (1 or 0), whatever
    parts the grader names, `tool/NAME`, `length` (share of `rollout.max_response_tokens`, negative), `overlong`,
    `model`, `judge`."""
    on_error: Literal["drop", "zero", "raise"] = "drop"
    """What an episode whose grader failed counts as: it is left out, it earns 0, or the run ends."""
    deadline_s: Annotated[float, Field(gt=0.0)] = 30.0
    """Longest wait for the verdict on one response; then its grader process is replaced."""
    workers: PositiveInt = 2
    """Grader processes."""
    examine: Annotated[int, Field(ge=0)] = 0
    """Print so many graded conversations of every step, with their parts."""
    overlong: OverlongConfig = OverlongConfig()
    model: RewardModelConfig = RewardModelConfig()
    judge: JudgeConfig = JudgeConfig()

    @model_validator(mode="after")
    def _weights_match(self) -> RewardConfig:
        """A part that is computed has a weight, and a weight has its part: neither is ever ignored in silence."""
        computed = {
            "overlong": ("reward.overlong.buffer_tokens", self.overlong.buffer_tokens is not None),
            "model": ("reward.model.path", bool(self.model.path)),
            "judge": ("reward.judge.url", bool(self.judge.url)),
        }
        for part, (key, on) in computed.items():
            if on and part not in self.weights:
                raise ValueError(f"{key} is set, and reward.weights gives {part!r} no weight")
            if not on and part in self.weights:
                raise ValueError(f"reward.weights names {part!r}, and {key} is not set")
        if not self.weights:
            raise ValueError("reward.weights is empty: every episode would earn 0")
        return self


class SandboxConfig(Section):
    """Where generated code runs, for graders and tools. Limits are of one run."""

    mode: Literal["local", "remote"] = "local"
    """local: processes of this machine without network, in namespaces. remote: a SandboxFusion-compatible service."""
    url: str = ""
    """remote: base URL of the service; `/run_code` is appended."""
    deadline_s: Annotated[float, Field(gt=0.0)] = 10.0
    """Longest wall time, and CPU time of each process."""
    memory_mb: PositiveInt = 1024
    """Address space of each process, and resident memory of all together."""
    processes: PositiveInt = 32
    """Processes and threads."""
    file_mb: PositiveInt = 16
    """Size of one file."""
    disk_mb: PositiveInt = 64
    """Size of the private temporary folder, which is the only place it can write to."""
    output_kb: PositiveInt = 1024
    """Of stdout and of stderr; a program that writes more is killed."""
    allow_unisolated: bool = False
    """Run code with the resource limits alone where the kernel allows no namespaces. It then has your network, and can
    read and write whatever you can."""

    @model_validator(mode="after")
    def _remote_has_url(self) -> SandboxConfig:
        if (self.mode == "remote") != bool(self.url):
            raise ValueError("sandbox.url goes with sandbox.mode = 'remote', and that mode needs it")
        return self


class ClusterConfig(Section):
    """Processes and their deadlines."""

    workers: PositiveInt = 1
    """Training workers (one GPU each, where there are GPUs)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs where Ray sees any, else the CPU."""
    placement: Literal["colocated", "separate"] = "colocated"
    """colocated: trainers and samplers take turns on the same GPUs. separate: each has its own."""
    address: str | None = None
    """Address of a running Ray cluster; none: start one here."""
    start_deadline_s: Annotated[float, Field(gt=0.0)] = 300.0
    """Longest wait for workers to come up."""
    step_deadline_s: Annotated[float, Field(gt=0.0)] = 1800.0
    """Longest wait for one call to a worker."""
    silence_deadline_s: Annotated[float, Field(ge=10.0)] = 60.0
    """A sampler at work that has said nothing for this long is taken for dead. It says something every few seconds."""
    sampler_restarts: Annotated[int, Field(ge=0)] = 3
    """A sampler that dies is started again at the current weights, at most so many times a run; its episodes go on at
    another meanwhile, or wait."""
    sync_tolerance: Annotated[float, Field(gt=0.0)] | None = None
    """Largest mean |log-probability difference| between trainer and engine after a weight update;
    none: 1e-3 in float32, 0.1 in bfloat16."""


class CheckpointConfig(Section):
    """What a checkpoint holds and how many are kept."""

    keep: PositiveInt = 2
    """Newest checkpoints that stay."""
    save_hf: bool = False
    """Also write the full safetensors into `actor/huggingface`."""


class GenerateConfig(Section):
    """`posttrain generate`: where prompts come from and responses go."""

    data: str = ""
    """RLHF parquet with the prompts."""
    out: str = ""
    """Responses parquet; empty: `<run.dir>/<run.name>/responses.parquet`."""
    limit: PositiveInt | None = None
    """Only the first so many prompts."""


class EvalConfig(Section):
    """`posttrain eval`."""

    pass_at: list[PositiveInt] = [1]
    """k of pass@k (unbiased estimator of Chen et al. 2021, arXiv:2107.03374)."""


class Config(Section):
    """One run of one command."""

    command: Command
    """What the preset is for."""
    description: str = ""
    """One line for `posttrain presets`."""
    plugins: list[str] = []
    """User files or modules imported in every process before names are looked up."""
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    algo: AlgoConfig = AlgoConfig()
    rollout: RolloutConfig = RolloutConfig()
    tools: dict[str, dict[str, Any]] = {}
    """`[tools.NAME]`: a tool with its options, `{type = "search", url = ...}`, or a set of several, `{use = [...]}`;
    see tools.md."""
    val: ValConfig = ValConfig()
    reward: RewardConfig = RewardConfig()
    sandbox: SandboxConfig = SandboxConfig()
    cluster: ClusterConfig = ClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    generate: GenerateConfig = GenerateConfig()
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        """Combinations that make no sense are refused before anything starts."""
        if self.cluster.workers % self.train.sequence_parallel:
            raise ValueError(
                f"train.sequence_parallel = {self.train.sequence_parallel} does not divide "
                f"cluster.workers = {self.cluster.workers}"
            )
        if self.train.shard_size is not None and self.cluster.workers % self.train.shard_size:
            raise ValueError(
                f"train.shard_size = {self.train.shard_size} does not divide cluster.workers = {self.cluster.workers}"
            )
        if self.command == "rl":
            self._check_rl()
        if self.train.early_stop.patience is not None:
            self._check_early_stop()
        if self.command == "sft" or (self.command == "rl" and not self.rollout.replay and not self.rollout.only):
            ranks = self.cluster.workers // self.train.sequence_parallel
            rows = self.data.batch_size * (self.rollout.n if self.command == "rl" else 1)
            if rows % ranks:
                what = "data.batch_size * rollout.n" if self.command == "rl" else "data.batch_size"
                raise ValueError(
                    f"{what} = {rows} is not divisible by {ranks} data-parallel workers "
                    "(cluster.workers / train.sequence_parallel)"
                )
        return self

    def _check_early_stop(self) -> None:
        if self.command == "rl":
            raise ValueError("train.early_stop is of sft only: rl has no val/loss")
        if self.command == "sft" and not self.data.val:
            raise ValueError("train.early_stop.patience needs data.val")
        if self.command == "sft" and self.train.val_every is None:
            raise ValueError("train.early_stop.patience needs train.val_every: else the last step alone is validated")

    def _check_rl(self) -> None:
        if self.rollout.only:
            self._check_rollout_only()
            return
        if self.rollout.n < 2 and not self.rollout.replay:
            raise ValueError("rollout.n must be at least 2: GRPO compares the episodes of one prompt")
        if self.rollout.temperature == 0.0:
            raise ValueError("rollout.temperature = 0 samples the same episode every time: nothing to learn from")
        if self.rollout.top_p < 1.0 or self.rollout.top_k:
            raise ValueError(
                "rollout.top_p < 1 or rollout.top_k > 0 while training: the trainer's log-probabilities would be of "
                "another distribution than the one sampled from"
            )
        if self.data.batch_size % self.algo.updates_per_step and not self.rollout.replay:
            raise ValueError(
                f"algo.updates_per_step = {self.algo.updates_per_step} does not divide "
                f"data.batch_size = {self.data.batch_size} prompts"
            )

    def _check_rollout_only(self) -> None:
        if self.rollout.replay:
            raise ValueError("rollout.only and rollout.replay exclude each other: one samples, the other does not")
        if self.run.profile:
            raise ValueError("run.profile has no effect with rollout.only: there are no updates to trace")
        if not self.run.traces or self.run.trace_every > 1:
            raise ValueError(
                "rollout.only without the traces of every step (run.traces, run.trace_every) would leave nothing behind"
            )


def algo_bundle(name: str) -> dict[str, Any]:
    """The `algo.*` values that `--algo NAME` sets. Raises ``ConfigError`` for an unknown name."""
    from posttrain.errors import ConfigError
    from posttrain.registry import nearest

    if name not in ALGO_BUNDLES:
        close = nearest(name, ALGO_BUNDLES)
        known = ", ".join(ALGO_BUNDLES)
        raise ConfigError(f"unknown algo {name!r}", hint=f"did you mean {close!r}?" if close else f"known: {known}")
    return ALGO_BUNDLES[name]


ALGO_BUNDLES: dict[str, dict[str, Any]] = {
    # DeepSeekMath, arXiv:2402.03300: the KL term is the preset's choice.
    "grpo": {"advantage": "grpo", "normalize_by_std": True, "loss_agg": "token-mean"},
    # Understanding R1-Zero-like training, arXiv:2503.20783: no division by the group's standard deviation or by length.
    "dr_grpo": {"advantage": "grpo", "normalize_by_std": False, "loss_agg": "seq-mean-token-sum"},
}
