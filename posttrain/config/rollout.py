"""Sections of sampling and of validation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from posttrain.config.base import NaturalInt, PositiveInt, Seconds, Section, Temperature

EngineName = Literal["hf", "sglang", "vllm"]


class RolloutConfig(Section):
    """Sampling of episodes."""

    engine: Literal["auto", EngineName] = "auto"
    """Sampling engine; see engines.md. hf is the embedded engine: transformers' continuous batching. auto: where there
    is a GPU, sglang or else vllm if it is installed; hf otherwise."""
    n: PositiveInt = 8
    """Episodes per prompt."""
    temperature: Temperature = 1.0
    """Sampling temperature; the trainer computes log-probabilities at the same temperature. 0: greedy (`generate`
    only)."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the smallest set of tokens with this total probability; 1: from all tokens."""
    top_k: NaturalInt = 0
    """Sample from this many most likely tokens; 0: from all tokens."""
    max_prompt_tokens: PositiveInt = 1024
    """Maximum prompt length. A longer prompt is an error before the first step."""
    max_response_tokens: PositiveInt = 1024
    """Maximum tokens after the prompt, over all turns and including tool results."""
    max_turns: PositiveInt = 1
    """Maximum assistant turns per episode."""
    max_user_turns: PositiveInt = 4
    """Maximum turns of the simulated user per episode."""
    max_calls_per_turn: PositiveInt = 16
    """Maximum tool calls per assistant turn. Calls of one turn run concurrently; further calls are answered with an
    error."""
    tools: list[str] = []
    """Tools the model may call: names of registered tools and of `[tools.NAME]` tables, `my_file.py:function`, or a
    `.yaml` file in verl's format; see tools.md."""
    tool_format: str = "auto"
    """Format of the model's tool calls: one of docs/tool-formats.md or of a plugin. auto: detected from the chat
    template."""
    max_tool_response_chars: PositiveInt = 1024
    """Maximum length of a tool result, in characters; a longer one is cut."""
    tool_response_cut: Literal["left", "middle", "right"] = "middle"
    """Part of a long tool result that is cut out: its start, its middle or its end."""
    interaction: str = ""
    """Simulated user that answers when the assistant calls no tool: `retry`, or one from a plugin; empty: none."""
    interaction_options: dict[str, Any] = {}
    """Keyword arguments of the interaction."""
    env: str = ""
    """Environment that plays with the model and gives the reward: `FILE.py:NAME`, one from a plugin, or
    `gymnasium:NAME`, `openenv:NAME`, `skyrl:NAME` or `verifiers:NAME`; empty: none. See environments.md. Its own tasks
    are used where `data.train`, `data.val` or `generate.data` is empty."""
    env_options: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    agent: str = ""
    """Agent that plays the episodes and samples at an endpoint of the run: `FILE.py:NAME` of an `async def`, or one
    from a plugin; empty: none. See agents.md."""
    agent_command: str = ""
    """Agent that is a program: its command line, run for each episode; empty: none."""
    agent_processes: NaturalInt | Literal["auto"] = "auto"
    """Processes that play the episodes of an agent, or of a verifiers environment, beside the run's own; 0: it plays
    them itself. auto: three for each four cores, at most 16; with fewer than four cores 0."""
    branches: Literal["all", "last"] = "all"
    """With an agent: which branches of an episode to train on; each has the episode's reward, and counts in its group.
    last: only the one that was sampled from last. `generate` writes these branches."""
    staleness: NaturalInt = 0
    """`rl`: asynchronous training with sampling up to this many steps ahead: the version of the weights that train a
    token minus the version that sampled it is never above it. 0: sampling and training take turns. See async.md."""
    window: Annotated[float, Field(ge=0.0, le=1.0)] | Literal["auto"] = "auto"
    """With `staleness`: share of a batch that may overtake a group which is still played, before the next batch waits
    for it; 0: strict order. auto: 0 where `staleness` is 1, since so large a share of each batch is then sampled while
    trainers wait; else 0.25."""
    pacing: bool = True
    """With a `staleness` above 1: sample ahead only what trainers need not to wait, so that tokens are less stale.
    false: all that `staleness` allows, at all times, which keeps trainers busier where waits have a long tail."""
    in_flight_updates: bool = True
    """With `staleness`: engines take new weights amid their requests, which then go on with these; false: the turns in
    progress end with the old weights first."""
    keep_kv: bool = False
    """With `in_flight_updates`: requests go on with the KV cache that the old weights computed; false: it is computed
    anew with the new weights. Engines: hf, and vllm from 0.32 on."""
    over_sample_rate: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """`rl`: share of additional groups to start; the slowest groups are cancelled once enough have finished. A
    cancelled group comes first in the next step and is not cancelled again, so no prompt is skipped."""
    partial_rollouts: bool = False
    """Keep the partial rollouts of cancelled groups and continue them in the next step, with weights that are one step
    newer; false: sample these groups from the start."""
    filter_groups: bool = False
    """`rl`: replace groups whose episodes all have the same `filter_metric` by further groups (dynamic sampling, DAPO,
    arXiv:2503.14476)."""
    filter_metric: str = "correct"
    """With `filter_groups`: value to compare the episodes by. `correct`, as in DAPO: leave out groups that are all
    right or all wrong, whatever they earn for length or format; `reward`: the weighted sum; or any part of the reward,
    such as `score` for graders with partial credit."""
    filter_max_batches: PositiveInt = 10
    """With `filter_groups`: maximum prompts drawn for one step, in multiples of `data.batch_size`. At the limit the
    step trains on the groups that it has."""
    replicas: PositiveInt = 1
    """Number of engines that share the load. Engines share GPUs when there are more engines than trainer GPUs
    (colocated) or, in commands that only sample, than GPUs in the cluster."""
    tensor_parallel: PositiveInt = 1
    """GPUs per engine."""
    memory_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Share of a GPU's memory for an engine (weights and KV cache); with SGLang, share of the memory that is free at
    its start, unless several engines share the GPU. On a CPU `kv_tokens` applies instead."""
    engine_options: dict[str, Any] = {}
    """Additional arguments of the engine: fields of vLLM's `AsyncEngineArgs` or SGLang's `ServerArgs`."""
    router_replay: Literal["off", "R3"] = "off"
    """`rl`, mixtures of experts: R3 (rollout routing replay, arXiv:2510.11370): the trainer sends each token to the
    experts that the engine chose, in log-probabilities and updates; see experts.md. off: its own routers choose."""
    quantization: Literal["none", "fp8"] = "none"
    """fp8: engines multiply in FP8. The linear layers' weights are quantized in blocks at each weight update, their
    activations as they come; the trainer stays as it is, and `algo.correction.weight` is token by default; see fp8.md.
    hf computes the same with rounded numbers, and is no faster for it. none: engines compute in the trainer's type."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Type of the KV cache. fp8: float8_e4m3fn without scales, half of the memory of bfloat16 (sglang, vllm, on a GPU);
    auto: the engine's compute type."""
    batch_invariant: bool = False
    """Batch-invariant mode: engine and trainer use matrix products and attention whose result for a sequence does not
    depend on the rest of the batch, so that their log-probabilities are as close as bfloat16 allows. Slower; see
    engines.md. hf runs one request at a time for that."""
    sleep: bool = False
    """`rl`: engines release their weights and KV cache while trainers use the same GPUs. See also `train.offload`."""
    kv_tokens: PositiveInt = 65536
    """Size of an engine's KV cache on a CPU, in tokens."""
    max_concurrent: PositiveInt | Literal["auto"] = "auto"
    """Maximum concurrent requests per engine. auto: as many as its KV cache holds of typical episodes, at most 1024 and
    what a step needs; with hf 256."""
    tool_deadline_s: Seconds = 30.0
    """Longest tool call, and longest answer of a simulated user. A slower call returns an error that the model can
    read."""
    episode_deadline_s: Seconds = 600.0
    """Longest episode. A longer one ends with stop reason `deadline`."""
    replay: str | list[str] = ""
    """Rollout files to train from instead of sampling: a file, a folder, a glob, or a list of these; empty: sample."""
    only: bool = False
    """Sample and grade the batches and write their rollout files, without training."""
    record_schedule: bool = False
    """`rl`: write down in which order groups were drawn, ended and trained, and which weights sampled which tokens, so
    that `replay_schedule` can repeat the run to the bit. Each request is sampled with a seed of its own. It needs
    `batch_invariant`; see async.md."""
    replay_schedule: str = ""
    """Run to repeat to the bit, by its name or folder: one with `record_schedule`, the same config and the same data;
    empty: none."""

    @property
    def overtaking(self) -> float:
        """Return the share of a batch that `window` stands for."""
        if self.window != "auto":
            return self.window
        return 0.0 if self.staleness == 1 else 0.25

    @property
    def has_agent(self) -> bool:
        """Return whether an agent plays the episodes."""
        return bool(self.agent or self.agent_command)

    @model_validator(mode="after")
    def _no_setting_without_effect(self) -> RolloutConfig:
        if "filter_metric" in self.changed and not self.filter_groups:
            raise ValueError("rollout.filter_metric has no effect without rollout.filter_groups")
        if self.partial_rollouts and not self.over_sample_rate:
            raise ValueError("rollout.partial_rollouts has no effect without rollout.over_sample_rate")
        self._check_staleness()
        if self.interaction_options and not self.interaction:
            raise ValueError("rollout.interaction_options has no effect without rollout.interaction")
        if self.env_options and not self.env:
            raise ValueError("rollout.env_options has no effect without rollout.env")
        if self.env and (self.tools or self.interaction):
            raise ValueError(
                "rollout.env with rollout.tools or rollout.interaction: an environment brings its own tools and answers"
            )
        if self.has_agent:
            taken = [name for name in ("tools", "interaction", "env") if getattr(self, name)]
            if self.agent and self.agent_command:
                raise ValueError("rollout.agent and rollout.agent_command exclude each other")
            if taken:
                raise ValueError(f"rollout.{taken[0]} has no effect with an agent, which brings its own")
        elif not self.env and (unused := self.changed & {"branches", "agent_processes"}):
            raise ValueError(f"rollout.{min(unused)} has no effect without rollout.agent or rollout.agent_command")
        if self.agent_command and "agent_processes" in self.changed:
            raise ValueError("rollout.agent_processes has no effect with rollout.agent_command, a process by itself")
        if self.only and (self.over_sample_rate or self.filter_groups):
            raise ValueError("rollout.over_sample_rate and rollout.filter_groups have no effect without training")
        if self.engine_options and self.engine == "hf":
            raise ValueError("rollout.engine_options has no effect with rollout.engine = 'hf'")
        if self.engine_options and self.engine == "auto":
            raise ValueError("rollout.engine_options are of one engine: name it in rollout.engine, sglang or vllm")
        if self.batch_invariant and self.engine == "hf" and "max_concurrent" in self.changed:
            raise ValueError(
                "rollout.max_concurrent has no effect with rollout.batch_invariant: the embedded engine "
                "(rollout.engine = 'hf') runs one request at a time then"
            )
        self._check_schedule()
        self._check_fp8()
        return self

    @property
    def rounds(self) -> bool:
        """Return whether engines compute in another type than the trainer."""
        return self.quantization != "none" or self.kv_cache_dtype != "auto"

    def _check_fp8(self) -> None:
        used = [name for name in ("quantization", "kv_cache_dtype") if name in self.changed]
        if self.replay and self.rounds:
            raise ValueError(f"rollout.{used[0]} has no effect with rollout.replay: no engine samples")
        if self.kv_cache_dtype != "auto" and self.engine == "hf":
            raise ValueError("rollout.kv_cache_dtype with rollout.engine = 'hf': its KV cache has the compute type")

    def gpus_alone(self, there: int) -> int:
        """Return how many of ``there`` GPUs the engines of a command that only samples get: ``tensor_parallel`` each.
        Where there are fewer they share GPUs, if ``memory_fraction`` lets them."""
        engines = min(self.replicas, there // self.tensor_parallel)
        if not engines or self.memory_fraction * -(-self.replicas // engines) >= 1.0:
            engines = self.replicas
        return engines * self.tensor_parallel

    def _check_schedule(self) -> None:
        if self.replay_schedule and not self.record_schedule:
            raise ValueError(
                "rollout.replay_schedule without rollout.record_schedule: give the config of the run that is to be "
                "repeated (--preset RUN/config.toml)"
            )
        if not self.record_schedule:
            return
        if not self.batch_invariant:
            raise ValueError(
                "rollout.record_schedule needs rollout.batch_invariant = true: else what is sampled depends on the "
                "requests that happen to run at the same time"
            )
        taken = [name for name in ("only", "replay", "over_sample_rate", "has_agent") if getattr(self, name)]
        if taken:
            what = "an agent" if taken[0] == "has_agent" else f"rollout.{taken[0]}"
            raise ValueError(f"rollout.record_schedule with {what}: such runs cannot be repeated")

    def _check_staleness(self) -> None:
        if not self.staleness:
            if unused := self.changed & {"window", "pacing", "in_flight_updates", "keep_kv"}:
                raise ValueError(f"rollout.{min(unused)} has no effect without rollout.staleness")
            return
        if self.staleness == 1 and not self.pacing:
            raise ValueError("rollout.pacing has no effect with rollout.staleness = 1: no less can be sampled ahead")
        if self.keep_kv and not self.in_flight_updates:
            raise ValueError(
                "rollout.keep_kv has no effect with rollout.in_flight_updates = false: no request is amid its tokens "
                "when weights change"
            )
        if self.keep_kv and self.record_schedule:
            raise ValueError(
                "rollout.keep_kv with rollout.record_schedule: a replay computes the KV cache anew at each update"
            )
        if self.over_sample_rate:
            raise ValueError(
                "rollout.over_sample_rate with rollout.staleness: slow groups go on while others are trained, and "
                "rollout.window says how many may overtake them"
            )
        if self.sleep:
            raise ValueError("rollout.sleep with rollout.staleness: engines sample while trainers work")
        if self.only or self.replay:
            raise ValueError("rollout.staleness has no effect with rollout.only or rollout.replay")


class ValConfig(Section):
    """Validation sampling during `rl`."""

    n: PositiveInt = 1
    """Episodes per prompt."""
    temperature: Temperature = 1.0
    """Sampling temperature; 0: greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Same as `rollout.top_p`, for validation."""
    top_k: NaturalInt = 0
    """Same as `rollout.top_k`, for validation."""
    limit: PositiveInt | None = None
    """Maximum number of rows of `data.val`, from its start; none: all."""
    before_train: bool = False
    """Also validate the initial model, as step 0 of the metrics."""
