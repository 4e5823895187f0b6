"""Map other names of config keys to the keys: earlier names, and those of Hugging Face's TrainingArguments, TRL,
OpenRLHF and verl by the last part of a name. verl's whole keys are in ``posttrain.interop.verl``."""

from __future__ import annotations

from functools import cache

RENAMED: dict[str, str] = {
    "rollout.carry_cancelled": "rollout.partial_rollouts",
    "rollout.exact": "rollout.batch_invariant",
    "run.trace_every": "run.rollouts_every",
    "run.traces": "run.rollouts",
}
"""Earlier key -> key, in the same section. Presets, `--set` and the configs of existing runs are read by either name
(``posttrain.config.keys``)."""

ALIASES: dict[str, tuple[str, ...]] = {
    "run.name": ("run_name", "experiment_name", "wandb_run_name"),
    "run.dir": ("output_dir", "save_path", "ckpt_path", "default_local_dir"),
    "run.logger": ("report_to",),
    "run.resume": ("resume_from_checkpoint", "resume_mode", "load_checkpoint"),
    "model.path": ("model_name_or_path", "model_name", "model_id", "pretrain", "pretrained_model"),
    "data.train": ("train_files", "train_file", "dataset_name", "prompt_data", "dataset"),
    "data.val": ("val_files", "validation_file", "eval_file", "eval_dataset"),
    "data.batch_size": ("train_batch_size", "global_batch_size", "rollout_batch_size"),
    "data.max_length": ("max_seq_length", "max_seq_len", "max_len", "model_max_length", "cutoff_len"),
    "train.epochs": ("num_train_epochs", "num_epochs", "max_epochs", "total_epochs"),
    "train.steps": ("max_steps", "num_steps", "total_steps", "total_training_steps"),
    "train.tokens_per_microbatch": ("ppo_max_token_len_per_gpu", "max_token_len_per_gpu", "max_tokens_per_gpu"),
    "train.sequences_per_microbatch": (
        "per_device_train_batch_size", "micro_train_batch_size", "micro_batch_size_per_gpu", "micro_batch_size",
    ),
    "train.sequence_parallel": (
        "ulysses_sequence_parallel_size", "sequence_parallel_size", "context_parallel_size", "ring_attn_size",
        "sp_size",
    ),
    "train.expert_parallel": (
        "expert_model_parallel_size", "expert_parallel_size", "expert_parallel_degree", "ep_size",
    ),
    "train.router_aux_loss_coef": ("moe_aux_loss_coeff", "moe_aux_loss_coef", "aux_loss_coef"),
    "train.skip_zero_advantages": ("filter_zero_advantages", "filter_zero_adv"),
    "train.share_prompts": ("use_prefix_grouper", "shared_prefix_training"),
    "train.dtype": ("bf16", "fp16", "torch_dtype", "mixed_precision", "precision"),
    "train.attention": ("attn_implementation", "flash_attn"),
    "train.compile": ("torch_compile", "use_torch_compile"),
    "train.activation_checkpointing": ("gradient_checkpointing", "enable_gradient_checkpointing"),
    "train.offload": ("param_offload", "optimizer_offload"),
    "train.cpu_offload": ("offload_policy", "adam_offload", "fsdp_offload_params"),
    "train.save_every": ("save_steps", "save_freq", "save_interval"),
    "train.val_every": ("eval_steps", "test_freq", "eval_interval"),
    "train.optim.name": ("optimizer",),
    "train.optim.lr": ("learning_rate", "actor_learning_rate"),
    "train.optim.betas": ("adam_beta1", "adam_beta2", "adam_betas"),
    "train.optim.eps": ("adam_epsilon", "adam_eps"),
    "train.optim.schedule": ("lr_scheduler_type", "lr_scheduler", "lr_warmup_style", "warmup_style"),
    "train.optim.warmup_ratio": ("lr_warmup_ratio", "lr_warmup_steps_ratio"),
    "train.optim.warmup_steps": ("num_warmup_steps", "lr_warmup_steps"),
    "train.optim.min_lr_ratio": ("min_lr_rate", "min_lr"),
    "train.optim.grad_clip": ("max_grad_norm", "max_norm", "gradient_clipping", "clip_grad"),
    "train.lora.rank": ("lora_rank", "lora_r"),
    "train.lora.alpha": ("lora_alpha",),
    "train.lora.target_modules": ("lora_target_modules", "lora_target"),
    "train.early_stop.patience": ("early_stopping_patience",),
    "prefer.loss": ("loss_type",),
    "prefer.beta": ("dpo_beta",),
    "prefer.nll_coef": ("rpo_alpha", "sft_weight"),
    "algo.name": ("adv_estimator", "advantage_estimator", "algorithm"),
    "algo.loss_agg": ("loss_agg_mode",),
    "algo.clip_low": ("epsilon", "eps_clip", "cliprange", "clip_ratio", "clip_ratio_low"),
    "algo.clip_high": ("epsilon_high", "eps_clip_high", "clip_ratio_high"),
    "algo.dual_clip": ("clip_ratio_c",),
    "algo.kl_coef": ("kl_loss_coef", "init_kl_coef", "kl_beta"),
    "algo.kl_estimator": ("kl_loss_type", "kl_penalty"),
    "algo.entropy_coef": ("entropy_coeff", "entropy_loss_coef", "ent_coef"),
    "algo.lam": ("gae_lambda", "lambd"),
    "algo.updates_per_step": ("ppo_mini_batch_size", "num_mini_batches"),
    "critic.optim.lr": ("critic_learning_rate",),
    "critic.value_clip": ("cliprange_value", "vf_clip"),
    "rollout.engine": ("use_vllm", "rollout_backend"),
    "rollout.n": ("num_generations", "n_samples_per_prompt", "num_return_sequences", "group_size"),
    "rollout.max_prompt_tokens": ("max_prompt_length", "prompt_max_len"),
    "rollout.max_response_tokens": (
        "max_completion_length", "max_response_length", "max_new_tokens", "generate_max_len", "response_length",
    ),
    "rollout.max_turns": ("max_assistant_turns",),
    "rollout.max_user_turns": ("max_user_turn",),
    "rollout.router_replay": ("use_rollout_routing_replay", "enable_rollout_routing_replay", "routing_replay"),
    "rollout.replicas": ("vllm_num_engines", "num_engines"),
    "rollout.tensor_parallel": (
        "tensor_model_parallel_size", "tensor_parallel_size", "vllm_tensor_parallel_size", "tp_size",
    ),
    "rollout.memory_fraction": ("gpu_memory_utilization", "vllm_gpu_memory_utilization", "mem_fraction_static"),
    "rollout.sleep": ("vllm_enable_sleep", "free_cache_engine"),
    "rollout.partial_rollouts": ("partial_rollout",),
    "rollout.filter_groups": ("dynamic_filtering", "dynamic_sampling"),
    "reward.function": ("reward_funcs", "reward_fn", "custom_reward_function", "remote_rm_url"),
    "reward.model.path": ("reward_pretrain", "reward_model_path"),
    "cluster.workers": ("n_gpus_per_node", "num_processes", "num_gpus", "world_size", "actor_num_gpus_per_node"),
    "checkpoint.keep": ("save_total_limit", "max_ckpt_num", "max_actor_ckpt_to_keep"),
    "checkpoint.best": ("metric_for_best_model",),
}  # fmt: skip
"""Our key -> names in other trainers. Their values may have another form: docs/config.md describes ours."""

NO_KEY: dict[str, str] = {
    "gradient_accumulation_steps": "it follows from data.batch_size and train.tokens_per_microbatch",
    "accumulate_grad_batches": "it follows from data.batch_size and train.tokens_per_microbatch",
    "logging_steps": "every step is logged; run.console says what is shown",
    "packing": "rows are always packed, without padding",
    "use_remove_padding": "rows are always packed, without padding",
    "deepspeed": "FSDP2 shards the model: train.shard_size, train.cpu_offload",
    "zero_stage": "FSDP2 shards the model: train.shard_size, train.cpu_offload",
    "load_in_4bit": "weights are not quantized; train.lora.rank and train.param_dtype save memory",
    "load_in_8bit": "weights are not quantized; train.lora.rank and train.param_dtype save memory",
}
"""Names in other trainers without a key here, and the reason."""


@cache
def keys_by_alias() -> dict[str, str]:
    """Return our key by each name in other trainers."""
    return {alias: key for key, aliases in ALIASES.items() for alias in aliases}
