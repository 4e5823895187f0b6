"""verl's defaults of the keys that mean something here."""

from __future__ import annotations

from typing import Any

VERSION = "0.8.0.dev, commit b178a3c of 2026-01-29"
"""Where the defaults were read: ``verl/trainer/config/_generated_ppo_trainer.yaml``, ``sft_trainer.yaml`` and
``sft_trainer_engine.yaml``."""

_A = "actor_rollout_ref.actor."
_R = "actor_rollout_ref.rollout."
_OPTIM: dict[str, Any] = {
    "optimizer": "AdamW", "lr_warmup_steps_ratio": 0.0, "weight_decay": 0.01, "lr_warmup_steps": -1,
    "betas": [0.9, 0.999], "clip_grad": 1.0, "min_lr_ratio": 0.0, "lr_scheduler_type": "constant",
}  # fmt: skip

RL: dict[str, Any] = {
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
    "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.train_batch_size": 1024,
    "data.shuffle": True,
    "data.filter_overlong_prompts": False,
    "data.truncation": "error",
    "actor_rollout_ref.model.path": "~/models/deepseek-llm-7b-chat",
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.model.lora_rank": 0,
    "actor_rollout_ref.model.lora_alpha": 16,
    "actor_rollout_ref.model.target_modules": "all-linear",
    _A + "ppo_mini_batch_size": 256,
    _A + "ppo_epochs": 1,
    _A + "use_dynamic_bsz": False,
    _A + "ppo_max_token_len_per_gpu": 16384,
    _A + "clip_ratio": 0.2,
    _A + "clip_ratio_low": 0.2,
    _A + "clip_ratio_high": 0.2,
    _A + "clip_ratio_c": 3.0,
    _A + "tau_pos": 1.0,
    _A + "tau_neg": 1.05,
    _A + "loss_agg_mode": "token-mean",
    _A + "entropy_coeff": 0,
    _A + "use_kl_loss": False,
    _A + "kl_loss_coef": 0.001,
    _A + "kl_loss_type": "low_var_kl",
    _A + "grad_clip": 1.0,
    _A + "ulysses_sequence_parallel_size": 1,
    _A + "policy_loss.loss_mode": "vanilla",
    _A + "policy_loss.clip_cov_ratio": 0.0002,
    _A + "policy_loss.clip_cov_lb": 1.0,
    _A + "policy_loss.clip_cov_ub": 5.0,
    _A + "policy_loss.kl_cov_ratio": 0.0002,
    _A + "policy_loss.ppo_kl_coef": 0.1,
    _A + "fsdp_config.param_offload": False,
    _A + "fsdp_config.optimizer_offload": False,
    _A + "fsdp_config.offload_policy": False,
    _A + "fsdp_config.fsdp_size": -1,
    _A + "use_torch_compile": True,
    _A + "optim.lr": 1e-6,
    **{f"{_A}optim.{key}": value for key, value in _OPTIM.items()},
    _R + "n": 1,
    _R + "temperature": 1.0,
    _R + "top_k": -1,
    _R + "top_p": 1.0,
    _R + "gpu_memory_utilization": 0.5,
    _R + "free_cache_engine": True,
    _R + "tensor_model_parallel_size": 2,
    _R + "data_parallel_size": 1,
    _R + "max_num_seqs": 256,
    _R + "val_kwargs.n": 1,
    _R + "val_kwargs.temperature": 0,
    _R + "val_kwargs.top_p": 1.0,
    _R + "val_kwargs.top_k": -1,
    _R + "val_kwargs.do_sample": False,
    _R + "over_sample_rate": 0,
    _R + "multi_turn.enable": False,
    _R + "multi_turn.max_parallel_calls": 1,
    _R + "multi_turn.max_tool_response_length": 256,
    _R + "multi_turn.tool_response_truncate_side": "middle",
    _R + "multi_turn.format": "hermes",
    "critic.optim.lr": 1e-5,
    **{f"critic.optim.{key}": value for key, value in _OPTIM.items()},
    "critic.model.path": "~/models/deepseek-llm-7b-chat",
    "critic.cliprange_value": 0.5,
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "algorithm.filter_groups.enable": False,
    "algorithm.filter_groups.max_num_gen_batches": 0,
    "overlong.enable": False,
    "overlong.len": 0,
    "overlong.penalty_factor": 0.0,
    "reward_model.enable": False,
    "trainer.total_epochs": 30,
    "trainer.logger": ["console", "wandb"],
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.critic_warmup": 0,
}

SFT: dict[str, Any] = {
    "data.train_batch_size": 256,
    "data.micro_batch_size_per_gpu": 4,
    "data.max_length": 1024,
    "data.truncation": "error",
    "model.enable_gradient_checkpointing": True,
    "model.lora_rank": 0,
    "model.lora_alpha": 16,
    "model.target_modules": "all-linear",
    "model.fsdp_config.model_dtype": "fp32",
    "optim.lr": 1e-5,
    "optim.betas": [0.9, 0.95],
    "optim.weight_decay": 0.01,
    "optim.lr_warmup_steps_ratio": 0.1,
    "optim.clip_grad": 1.0,
    "optim.lr_scheduler": "cosine",
    "ulysses_sequence_parallel_size": 1,
    "trainer.project_name": "gsm8k-sft",
    "trainer.experiment_name": "test",
    "trainer.total_epochs": 4,
    "trainer.logger": ["console", "wandb"],
    "trainer.seed": 1,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
}
"""Defaults of ``verl.trainer.fsdp_sft_trainer``."""

SFT_ENGINE: dict[str, Any] = {
    **{key: value for key, value in SFT.items() if key not in ("optim.lr_scheduler", "optim.lr_warmup_steps_ratio")},
    "data.use_dynamic_bsz": True,
    "data.max_token_len_per_gpu": 8192,
    "optim.lr": 1e-3,
    "optim.betas": [0.9, 0.999],
    "optim.lr_warmup_steps_ratio": 0.0,
    "optim.lr_scheduler_type": "constant",
}
"""Defaults of ``verl.trainer.sft_trainer``, with its FSDP engine."""

ALIASES: dict[str, str] = {
    "reward_model.overlong_buffer.": "overlong.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.": "overlong.",
    "reward.reward_kwargs.overlong_buffer_cfg.": "overlong.",
    "reward_model.reward_kwargs.max_resp_len": "overlong.max_resp_len",
    "reward.reward_kwargs.max_resp_len": "overlong.max_resp_len",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward_manager.name": "reward_model.reward_manager",
    "reward.custom_reward_function.": "custom_reward_function.",
    "reward.sandbox_fusion.": "reward_model.sandbox_fusion.",
    "actor_rollout_ref.model.lora.": "actor_rollout_ref.model.lora_",
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": _A + "ulysses_sequence_parallel_size",
    "engine.ulysses_sequence_parallel_size": "ulysses_sequence_parallel_size",
    "optim.warmup_style": "optim.lr_scheduler_type",
    "optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio",
    _A + "optim.warmup_style": _A + "optim.lr_scheduler_type",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
}
"""Other names of keys, of older and newer versions: a prefix, or where it does not end with a dot a whole name."""


def canonical(key: str) -> str:
    """The name under which the rules know a key."""
    for alias, name in ALIASES.items():
        if key == alias or (alias.endswith(".") and key.startswith(alias)):
            return name + key[len(alias) :]
    return key
