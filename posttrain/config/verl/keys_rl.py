"""What keys of ``verl.trainer.main_ppo`` and ``recipe.dapo.main_dapo`` mean here: data, batches, machine, sampling."""

from __future__ import annotations

from typing import Any

from posttrain.config.verl.keys_algo import ALGO
from posttrain.config.verl.keys_shared import (
    SHARED,
    checkpointing,
    contents,
    files,
    lora,
    param_dtype,
    schedule,
)
from posttrain.config.verl.rules import SKIP, Draft, Rule, ScriptValues, missing, no_need, only, same, unless_set

A, R, D, M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "data.", "actor_rollout_ref.model."


_VLLM = ("max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching")
"""Settings that verl gives to vLLM alone, by vLLM's names."""


def _updates(view: ScriptValues, draft: Draft) -> None:
    prompts, mini, epochs = view[D + "train_batch_size"], view[A + "ppo_mini_batch_size"], view[A + "ppo_epochs"]
    draft.set("data.batch_size", prompts, f"{view.origin(D + 'train_batch_size')}: prompts a step")
    if epochs != 1:
        draft.refuse(view, A + "ppo_epochs", f"{epochs} passes over a batch: here each trajectory is trained on once")
    if prompts % min(mini, prompts):
        draft.refuse(view, A + "ppo_mini_batch_size", f"{mini} prompts an update do not divide {prompts} a step")
    else:
        about = f"{prompts} prompts a step / {mini} an update ({view.origin(A + 'ppo_mini_batch_size')})"
        draft.set("algo.updates_per_step", prompts // min(mini, prompts), about)


def _microbatches(view: ScriptValues, draft: Draft) -> None:
    tokens, rows = A + "ppo_max_token_len_per_gpu", A + "ppo_micro_batch_size_per_gpu"
    together = A + "ppo_micro_batch_size"
    if view[A + "use_dynamic_bsz"]:
        share = view[A + "ulysses_sequence_parallel_size"]
        about = view.origin(tokens) + (f" x {share} workers that share a sequence" if share > 1 else "")
        draft.set("train.tokens_per_microbatch", view[tokens] * share, about)
        for key in (rows, together):
            draft.pass_over(view, key, "verl reads it without use_dynamic_bsz only")
        return
    count, key = view[rows], rows
    if count is None and view[together] is not None:
        count, key = max(1, view[together] // (view["trainer.n_gpus_per_node"] * view["trainer.nnodes"])), together
    draft.pass_over(view, tokens, "verl reads it with use_dynamic_bsz only")
    if count is None:
        return
    count, longest = int(count), view[D + "max_prompt_length"] + view[D + "max_response_length"]
    draft.set("train.sequences_per_microbatch", count, view.origin(key))
    draft.set("train.tokens_per_microbatch", count * longest, f"{count} longest episodes ({view.origin(key)})")


def _machine(view: ScriptValues, draft: Draft) -> None:
    gpus = view["trainer.n_gpus_per_node"] * view["trainer.nnodes"]
    draft.set("cluster.workers", gpus, f"{view.origin('trainer.n_gpus_per_node')} x {view.origin('trainer.nnodes')}")
    if view["trainer.nnodes"] > 1:
        draft.notes.append("several nodes: start Ray on them and name it, --set cluster.address=HOST:PORT")
    engine = {"vllm": "vllm", "sglang": "sglang", "hf": "hf"}.get(view[R + "name"])
    if engine is not None:
        draft.set("rollout.engine", engine, view.origin(R + "name"))
    else:
        draft.refuse(view, R + "name", f"there is no engine {view[R + 'name']!r}: sglang, vllm or hf")
        draft.refuse(view, R + "tensor_model_parallel_size", "it depends on the engine")
        return
    parallel = 1 if engine == "hf" else view[R + "tensor_model_parallel_size"]
    if gpus % parallel:
        reason = f"engines of {parallel} GPUs do not divide {gpus} GPUs"
        draft.refuse(view, R + "tensor_model_parallel_size", reason)
        return
    if parallel > 1 or R + "tensor_model_parallel_size" in view.given:
        draft.set("rollout.tensor_parallel", parallel, view.origin(R + "tensor_model_parallel_size"))
    draft.set("rollout.replicas", gpus // parallel, f"{gpus} GPUs / {parallel} of an engine")


def _offload(view: ScriptValues, draft: Draft) -> None:
    actor = [f"{A}fsdp_config.{key}" for key in ("param_offload", "optimizer_offload")]
    if view[A + "fsdp_config.offload_policy"]:
        draft.set("train.cpu_offload", True, view.origin(A + "fsdp_config.offload_policy"))
    elif any(view[key] for key in actor):
        draft.set("train.offload", True, view.origin(*(key for key in actor if view[key])))
    leaving = "train.offload" in draft.touched
    for key in view.given:
        if key.endswith(("param_offload", "optimizer_offload")) and key not in actor and "megatron" not in key:
            if view.given[key] and not leaving:
                draft.refuse(
                    view, key, "it leaves the GPU with the actor (train.offload), which the script keeps there"
                )
            draft.pass_over(view, key, "actor, critic and reference leave the GPU together, by train.offload")


def _shards(view: ScriptValues, draft: Draft) -> None:
    size = view[A + "fsdp_config.fsdp_size"]
    gpus = view["trainer.n_gpus_per_node"] * view["trainer.nnodes"]
    if size in (None, -1, gpus):
        return
    if gpus % size:
        draft.refuse(view, A + "fsdp_config.fsdp_size", f"{size} does not divide {gpus} workers")
    else:
        draft.set("train.shard_size", size, view.origin(A + "fsdp_config.fsdp_size"))


def _routing(view: ScriptValues, draft: Draft) -> None:
    mode, recorded = A + "router_replay.mode", R + "enable_rollout_routing_replay"
    if view[mode] == "R3":
        draft.set("rollout.router_replay", "R3", view.origin(mode))
        return
    for key in (mode, recorded):
        if unless_set(view[key]):
            draft.refuse(view, key, f"{view[key]!r}: experts are replayed with router_replay.mode = R3 alone")
        else:
            draft.pass_over(view, key, "it is switched off")


def _quantization(view: ScriptValues, draft: Draft) -> None:
    key = R + "quantization"
    if view[key] == "fp8":
        draft.set("rollout.quantization", "fp8", view.origin(key))
    elif unless_set(view[key]):
        draft.refuse(view, key, f"{view[key]!r}: engines quantize to fp8 alone")
    else:
        draft.pass_over(view, key, "it is switched off")


def _overlong_prompts(view: ScriptValues, draft: Draft) -> None:
    key, dropped = D + "truncation", D + "filter_overlong_prompts"
    if view[dropped]:
        draft.set("data.truncation", "drop", view.origin(dropped))
        draft.pass_over(view, key, "no prompt is too long when those are left out")
    elif view[key] != "error":
        draft.refuse(view, key, "a prompt is never cut: one that is too long is an error, or left out with drop")


def _engine_options(view: ScriptValues, draft: Draft) -> None:
    eager = [R + key for key in ("enforce_eager", *_VLLM)]
    engine = view[R + "name"]
    if engine not in ("vllm", "sglang"):
        for key in view.given:
            if key in eager or key.startswith(R + "engine_kwargs."):
                draft.refuse(view, key, f"the engine {engine!r} takes no options here")
        return
    options: dict[str, Any] = {}
    keys: list[str] = []

    def pass_on(key: str, name: str, value: Any) -> None:
        options[name] = value
        keys.append(R + key)

    if view[R + "enforce_eager"] is True:
        pass_on("enforce_eager", "disable_cuda_graph" if engine == "sglang" else "enforce_eager", True)
    for key in _VLLM:
        if R + key not in view.given:
            continue
        if engine == "vllm":
            pass_on(key, key, view[R + key])
        else:
            draft.pass_over(view, R + key, "verl gives it to vLLM alone")
    prefix = f"{R}engine_kwargs.{engine}."
    for key in view.given:
        if key.startswith(prefix) and view.given[key] is not None:
            head, _, rest = key.removeprefix(prefix).partition(".")
            if rest:
                options.setdefault(head, {})[rest] = view.given[key]
            else:
                options[head] = view.given[key]
            keys.append(key)
    for key in view.given:
        if key.startswith(R + "engine_kwargs.") and not key.startswith(prefix):
            draft.pass_over(view, key, f"it is of another engine than {engine}")
    if options:
        draft.set("rollout.engine_options", options, ", ".join(keys))


def _turns(view: ScriptValues, draft: Draft) -> None:
    T = R + "multi_turn."
    if not (view[T + "enable"] or view[T + "tool_config_path"] or view[T + "interaction_config_path"]):
        return
    assistant, user = view[T + "max_assistant_turns"], view[T + "max_user_turns"]
    # verl counts the turn of a tool among the user's, and looks after each turn of the assistant.
    limits = [n for n in (assistant, user and user + 1) if n]
    about = view.origin(*[T + key for key in ("max_assistant_turns", "max_user_turns") if view[T + key]])
    turns = min(limits) if limits else view[D + "max_response_length"]
    draft.set("rollout.max_turns", turns, about if limits else "no limit in verl: the length of the response ends it")
    if user and view[T + "interaction_config_path"]:
        draft.set("rollout.max_user_turns", user, view.origin(T + "max_user_turns"))
    if view[T + "tool_config_path"]:
        draft.set("rollout.tools", [str(view[T + "tool_config_path"])], view.origin(T + "tool_config_path"))
        draft.set("rollout.max_calls_per_turn", view[T + "max_parallel_calls"], view.origin(T + "max_parallel_calls"))
        length = T + "max_tool_response_length"
        draft.set("rollout.max_tool_response_chars", view[length], view.origin(length))
        side, cut = T + "tool_response_truncate_side", {"left": "right", "right": "left", "middle": "middle"}
        if view[side] in cut and view[side] != "middle":
            draft.set("rollout.tool_response_cut", cut[view[side]], f"{view.origin(side)}: what verl keeps")
        formats = {"hermes": "hermes", "gpt-oss": "gpt_oss", "qwen3_coder": "qwen3_coder"}
        if view[T + "format"] in formats:
            draft.set("rollout.tool_format", formats[view[T + "format"]], view.origin(T + "format"))
        else:
            draft.refuse(view, T + "format", f"{view[T + 'format']!r}: see docs/tool-formats.md for those here")
    if view[T + "interaction_config_path"]:
        reason = "a class of verl's answers as the user: write it as a plugin, docs/rollouts.md"
        draft.refuse(view, T + "interaction_config_path", reason)


def _validation(view: ScriptValues, draft: Draft) -> None:
    V = R + "val_kwargs."
    draft.set("val.n", view[V + "n"], view.origin(V + "n"))
    greedy = not view[V + "do_sample"] and V + "temperature" not in view.given
    draft.set("val.temperature", 0.0 if greedy else float(view[V + "temperature"]), view.origin(V + "temperature"))
    if view[V + "top_p"] < 1:
        draft.set("val.top_p", float(view[V + "top_p"]), view.origin(V + "top_p"))
    if view[V + "top_k"] > 0:
        draft.set("val.top_k", view[V + "top_k"], view.origin(V + "top_k"))


def _sampling(view: ScriptValues, draft: Draft) -> None:
    draft.set("rollout.temperature", float(view[R + "temperature"]), view.origin(R + "temperature"))
    for key, off in (("top_p", 1), ("top_k", 0)):
        value = view[R + key]
        if value not in (off, -1, None):
            reason = f"{value}: the trainer's log-probabilities would be of another distribution than the sampled one"
            draft.refuse(view, R + key, reason)


def _template(view: ScriptValues, draft: Draft) -> None:
    prefix = D + "apply_chat_template_kwargs."
    rest: dict[str, Any] = {}
    for key in view.given:
        if not key.startswith(prefix):
            continue
        name = key.removeprefix(prefix)
        if name == "enable_thinking":
            draft.set("data.enable_thinking", view.given[key], key)
        else:
            rest[name] = view.given[key]
    if rest:
        draft.set("data.template_kwargs", rest, ", ".join(prefix + name for name in rest))


def _keep(view: ScriptValues, draft: Draft) -> None:
    actor, critic = "trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"
    if view[actor]:
        draft.set("checkpoint.keep", view[actor], view.origin(actor))
    else:
        draft.refuse(view, actor, "all of them: here checkpoint.keep is a number, two unless it is set")
    if critic in view.given and view[critic] != view[actor]:
        draft.refuse(view, critic, "actor and critic are one checkpoint here")


def _vision_tower(view: ScriptValues, draft: Draft) -> None:
    key = A + "freeze_vision_tower"
    if key not in view.given:
        if D + "image_key" in view.given:
            draft.notes.append(
                "verl trains the vision tower unless freeze_vision_tower is on; here it is frozen: "
                "--set train.vision_tower=trained trains it"
            )
    elif view[key]:
        draft.pass_over(view, key, "the vision tower is frozen unless train.vision_tower says otherwise")
    else:
        draft.set("train.vision_tower", "trained", key)


def _profiler(view: ScriptValues, draft: Draft) -> None:
    steps, tool = view["global_profiler.steps"], view["global_profiler.tool"]
    if not steps:
        return
    numbers = [steps] if isinstance(steps, int) else list(steps)
    if tool == "torch" and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        draft.set("run.profile", f"{numbers[0]}:{numbers[-1]}", view.origin("global_profiler.steps"))
        return
    for key in view.given:
        if key.startswith("global_profiler."):
            draft.refuse(view, key, f"the profiler here is torch's, over steps in a row; the script asks for {tool!r}")


RL = (
    files(D + "train_files", "data.train"),
    files(D + "val_files", "data.val"),
    Rule((D + "train_batch_size", A + "ppo_mini_batch_size", A + "ppo_epochs"),
         ("data.batch_size", "algo.updates_per_step"), "prompts a step / prompts an update = updates a step", _updates),
    Rule((A + "ppo_micro_batch_size_per_gpu", A + "ppo_micro_batch_size", A + "ppo_max_token_len_per_gpu",
          A + "use_dynamic_bsz"), ("train.tokens_per_microbatch", "train.sequences_per_microbatch"),
         "a budget of tokens (times the workers that share a sequence), or so many longest episodes; the gradient is "
         "the same with any", _microbatches),
    Rule(("trainer.n_gpus_per_node", "trainer.nnodes", R + "name", R + "tensor_model_parallel_size"),
         ("cluster.workers", "rollout.engine", "rollout.tensor_parallel", "rollout.replicas"),
         "workers = all GPUs; engines = GPUs / tensor_parallel", _machine),
    same(R + "n", "rollout.n"),
    same(D + "max_prompt_length", "rollout.max_prompt_tokens"),
    same(D + "max_response_length", "rollout.max_response_tokens"),
    Rule((D + "filter_overlong_prompts", D + "truncation"), ("data.truncation",),
         "a prompt that is too long is left out, or else an error; none is cut", _overlong_prompts),
    same(D + "shuffle", "data.shuffle"),
    same(D + "seed", "run.seed", "", lambda value: SKIP if value is None else value),
    same(D + "val_max_samples", "val.limit", "", lambda n: n if n and n > 0 else SKIP, "all rows are used"),
    Rule((D + "apply_chat_template_kwargs.*",), ("data.template_kwargs", "data.enable_thinking"), "", _template),
    same(M + "path", "model.path"),
    same(M + "trust_remote_code", "model.trust_remote_code", "", lambda on: bool(on) or SKIP),
    same(M + "external_lib", "plugins", "a module that is imported in every process", lambda m: [m] if m else SKIP),
    lora(M),
    checkpointing(M + "enable_gradient_checkpointing"),
    same(A + "ulysses_sequence_parallel_size", "train.sequence_parallel"),
    missing("Megatron is not here: FSDP2 shards the model", "*megatron*"),
    Rule(("*param_offload", "*optimizer_offload", A + "fsdp_config.offload_policy"), ("train.offload",
         "train.cpu_offload"),
         "all models of a run leave the GPU while engines sample, or none does", _offload),
    Rule((A + "fsdp_config.fsdp_size",), ("train.shard_size",), "-1, and all workers: one copy of the weights",
         _shards),
    param_dtype(A + "fsdp_config.model_dtype"),
    same(A + "use_prefix_grouper", "train.share_prompts", "", lambda on: bool(on) or SKIP),
    same(A + "use_torch_compile", "train.compile", "", lambda on: "auto" if on else "off"),
    same(A + "optim.lr", "train.optim.lr", "", float),
    same(A + "optim.weight_decay", "train.optim.weight_decay", "here of matrices only", float),
    same(A + "optim.betas", "train.optim.betas", "", list),
    schedule(A + "optim.", "train.optim", "lr_scheduler_type", per_step=True),
    Rule((R + "temperature", R + "top_p", R + "top_k"), ("rollout.temperature",),
         "training samples from the whole distribution: top_p 1, top_k -1", _sampling),
    Rule(tuple(f"{R}val_kwargs.{key}" for key in ("n", "temperature", "top_p", "top_k", "do_sample")),
         ("val.n", "val.temperature", "val.top_p", "val.top_k"), "greedy unless the script says otherwise",
         _validation),
    same(R + "gpu_memory_utilization", "rollout.memory_fraction"),
    same(R + "max_num_seqs", "rollout.max_concurrent"),
    same(R + "free_cache_engine", "rollout.sleep", "verl's default is on", bool),
    same(R + "over_sample_rate", "rollout.over_sample_rate", "", lambda share: float(share) if share else SKIP),
    Rule((R + "enforce_eager", R + "max_num_batched_tokens", R + "enable_chunked_prefill", R + "enable_prefix_caching",
          R + "engine_kwargs.*"), ("rollout.engine_options",), "the engine's own arguments", _engine_options),
    Rule(tuple(f"{R}multi_turn.{key}" for key in (
        "enable", "max_assistant_turns", "max_user_turns", "tool_config_path", "max_parallel_calls",
        "max_tool_response_length", "tool_response_truncate_side", "format", "interaction_config_path")),
        ("rollout.max_turns", "rollout.tools", "rollout.tool_format", "rollout.max_calls_per_turn",
         "rollout.max_tool_response_chars", "rollout.tool_response_cut", "rollout.max_user_turns"),
        "verl's tool files are read as they are (tools.md); without tools there is one turn", _turns),
    *ALGO,
    *SHARED,
    same("trainer.val_before_train", "val.before_train"),
    contents(A + "checkpoint."),
    Rule(("trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"), ("checkpoint.keep",),
         "verl keeps all by default, posttrain two", _keep),
    Rule(("global_profiler.*",), ("run.profile",), "no step is profiled, so nothing is", _profiler),
    same("actor_rollout_ref.nccl_timeout", "cluster.step_deadline_s", "", lambda s: float(max(s, 1800)) if s else SKIP),
    no_need("validation is sampled in one go, as in verl", D + "val_batch_size"),
    no_need("they size passes without gradient; here all have train.tokens_per_microbatch, and none changes a result",
            "*log_prob_micro_batch_size*", "*log_prob_max_token_len_per_gpu", "*log_prob_use_dynamic_bsz",
            "*forward_micro_batch_size*", "*forward_max_token_len_per_gpu"),
    no_need("prompts are messages, always", D + "return_raw_chat", D + "return_raw_input_ids", D + "return_full_prompt",
            D + "return_multi_modal_inputs"),
    no_need("the column is called so here too", D + "prompt_key", unless=only("prompt")),
    no_need("the column is called so here too", D + "reward_fn_key", unless=only("data_source")),
    no_need("the column is called so here too", D + "image_key", unless=only("images")),
    Rule((A + "freeze_vision_tower",), ("train.vision_tower",),
         "off is `trained`; verl's default is off, ours `frozen`", _vision_tower),
    missing("videos are refused, and the processor's own patches are taken", D + "video_key", D + "image_patch_size"),
    no_need("requests are always asynchronous", R + "mode", unless=only("async")),
    no_need("engines give back and take memory in stages, always", R + "multi_stage_wake_up"),
    no_need("the engine's log-probabilities are kept and compared with the trainer's, always",
         R + "calculate_log_probs"),
    no_need("the engine's length is that of prompt and response", R + "max_model_len", R + "prompt_length",
         R + "response_length"),
    no_need("the trainer's weights come to the engine, and are proven to be there", R + "load_format",
         R + "layered_summon",
            R + "skip_tokenizer_init", R + "checkpoint_engine.*"),
    no_need("it is about the engine's log alone", R + "disable_log_stats"),
    no_need("the engine computes in bfloat16", R + "dtype", unless=only("bfloat16", "auto")),
    no_need("each engine is a replica of its own", R + "data_parallel_size", R + "expert_parallel_size",
            R + "pipeline_model_parallel_size", unless=only(1, None)),
    no_need("episodes run in one asynchronous program", R + "agent.num_workers", R + "agent.default_agent_loop",
            unless=lambda value: "" if isinstance(value, int) or value in ("single_turn_agent", "tool_agent") else
            f"the agent loop {value!r} is verl's own code"),
    no_need("trainers and engines share their GPUs, which is the default", "actor_rollout_ref.hybrid_engine",
         unless=only(True)),
    no_need("every validation episode is in the run's rollouts/", "trainer.log_val_generations"),
    no_need("every episode is in the run's rollouts/", "trainer.rollout_data_dir", "trainer.validation_data_dir"),
    Rule((A + "router_replay.mode", R + "enable_rollout_routing_replay"), ("rollout.router_replay",),
         "R3 is replayed; R2 is not there", _routing),
    Rule((R + "quantization",), ("rollout.quantization",), "fp8 in blocks, as in verl", _quantization),
    no_need("it is switched off", A + "shuffle", "*router_replay.mode", R + "ignore_eos", R + "skip_rollout",
            "trainer.val_only", M + "enable_activation_offload", "*profiler.enable",
            R + "prometheus.enable", "*tiled_mlp.enabled", "transfer_queue.enable",
            A + "calculate_sum_pi_squared", M + "mtp.enable", "data.validation_shuffle", R + "trace.backend",
            unless=unless_set),
    no_need("the reference has the actor's sharding", "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
            "actor_rollout_ref.ref.use_torch_compile", "actor_rollout_ref.ref.fsdp_config.*"),
    missing("the data set is verl's own code: write the parquet with `posttrain prep`, or as a plugin",
         D + "custom_cls.*",
            D + "sampler.*", D + "datagen.*"),
    missing("changes to a model's config belong into its config.json", M + "override_config*",
         "critic.model.override_config*"),
    missing("the chat template is that of the tokenizer", M + "custom_chat_template"),
)  # fmt: skip
"""Rules in the order in which they apply: the updates a step are known when the schedule asks for them."""
