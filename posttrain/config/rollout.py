"""Sampling."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from posttrain.config.base import NaturalInt, PositiveInt, Seconds, Section, Temperature


class RolloutConfig(Section):
    """How episodes are sampled."""

    engine: Literal["hf", "sglang", "vllm"] = "hf"
    """What samples; see engines.md. hf is the embedded engine: transformers' continuous batching."""
    n: PositiveInt = 8
    """Episodes per prompt."""
    temperature: Temperature = 1.0
    """Of sampling; the trainer computes log-probabilities at the same one. 0 is greedy (`generate` only)."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the smallest set of tokens with this probability; 1: from all."""
    top_k: NaturalInt = 0
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
    """`rl`: leave out groups whose episodes are all alike in `filter_metric`, and draw others (dynamic sampling, DAPO,
    arXiv:2503.14476)."""
    filter_metric: str = "correct"
    """With `filter_groups`: what episodes are compared by. `correct`, as in DAPO: groups that are all right or all
    wrong are left out, whatever they earn for length or format; `reward`: the weighted sum; or any other part of it,
    such as `score`, where a grader gives shares."""
    filter_max_batches: PositiveInt = 10
    """With `filter_groups`: draw at most so many times `data.batch_size` prompts for one step. Then the step trains on
    what it has."""
    replicas: PositiveInt = 1
    """Engines that share the load."""
    tensor_parallel: PositiveInt = 1
    """GPUs of one engine."""
    memory_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Share of a GPU's memory for an engine (weights and KV cache); with SGLang, of what is free when it starts. On CPU
    `kv_tokens` rules."""
    engine_options: dict[str, Any] = {}
    """More arguments of the engine itself: fields of vLLM's `AsyncEngineArgs`, or of SGLang's `ServerArgs`."""
    exact: bool = False
    """Engine and trainer use products and attention whose result for a sequence does not depend on what else is in the
    batch, so that their log-probabilities are as near to each other as bfloat16 allows. Slower; see engines.md."""
    sleep: bool = False
    """`rl`: engines give back their weights and KV cache while trainers work on the same GPUs. See also
    `train.offload`."""
    kv_tokens: PositiveInt = 65536
    """KV cache of an engine on a CPU, in tokens."""
    max_concurrent: PositiveInt = 256
    """Requests an engine runs at once."""
    tool_deadline_s: Seconds = 30.0
    """A tool call that takes longer becomes an error that the model can read; also the limit of a simulated user."""
    episode_deadline_s: Seconds = 600.0
    """An episode that takes longer ends with stop reason `deadline`."""
    replay: str | list[str] = ""
    """Train from these traces instead of sampling: a file, a folder, a glob, or a list of these; empty: sample."""
    only: bool = False
    """Sample and grade the batches, write their traces, and train nothing."""

    @model_validator(mode="after")
    def _no_setting_without_effect(self) -> RolloutConfig:
        if "filter_metric" in self.changed and not self.filter_groups:
            raise ValueError("rollout.filter_metric has no effect without rollout.filter_groups")
        if self.carry_cancelled and not self.over_sample_rate:
            raise ValueError("rollout.carry_cancelled has no effect without rollout.over_sample_rate")
        if self.interaction_options and not self.interaction:
            raise ValueError("rollout.interaction_options has no effect without rollout.interaction")
        if self.only and (self.over_sample_rate or self.filter_groups):
            raise ValueError("rollout.over_sample_rate and rollout.filter_groups have no effect without training")
        if self.engine_options and self.engine == "hf":
            raise ValueError("rollout.engine_options has no effect with rollout.engine = 'hf'")
        if self.exact and self.engine == "hf":
            raise ValueError(
                "rollout.exact: the embedded engine (rollout.engine = 'hf') has no batch-invariant kernels; "
                "sglang and vllm have them"
            )
        return self


class ValConfig(Section):
    """Validation sampling during `rl`."""

    n: PositiveInt = 1
    """Episodes per prompt."""
    temperature: Temperature = 1.0
    """Of sampling; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """As `rollout.top_p`."""
    top_k: NaturalInt = 0
    """As `rollout.top_k`."""
    limit: PositiveInt | None = None
    """Only the first so many rows of `data.val`."""
    before_train: bool = False
    """Validate the model that the run starts from, too: step 0 of the metrics."""
