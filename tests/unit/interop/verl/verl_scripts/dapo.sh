#!/usr/bin/env bash
# The keys and values of verl's DAPO on Qwen2.5-7B-Math, in an order of our own.
set -euo pipefail
prompt=$((1024 * 2)); answer=$((1024 * 8))
sp=4 tp=4
: "${NNODES:=8}"
export ROOT=${ROOT:-"${HOME}/verl"}
run() { echo "$@"; rm -rf never; }

ray job submit --no-wait --runtime-env=env.yaml -- python3 -m recipe.dapo.main_dapo \
    data.train_files="${ROOT}/data/train.parquet" data.val_files="${ROOT}/data/aime.parquet" \
    data.prompt_key=prompt data.truncation='left' \
    data.max_prompt_length=${prompt} data.max_response_length=${answer} \
    data.gen_batch_size=$((512 * 3)) data.train_batch_size=512 \
    actor_rollout_ref.rollout.n=16 \
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.0 \
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.0 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=10 \
    algorithm.filter_groups.metric=acc \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((prompt + answer)) \
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=$((prompt + answer)) \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=$((prompt + answer)) \
    actor_rollout_ref.model.path="${ROOT}/models/Qwen2.5-Math-7B" \
    +actor_rollout_ref.model.override_config.max_position_embeddings=32768 \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.actor.grad_clip=1.0 \
    actor_rollout_ref.actor.loss_agg_mode="token-mean" \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=${sp} \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.80 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=${tp} \
    actor_rollout_ref.rollout.enable_chunked_prefill=True \
    actor_rollout_ref.rollout.max_num_batched_tokens=$((prompt + answer)) \
    actor_rollout_ref.rollout.temperature=1.0 actor_rollout_ref.rollout.top_p=1.0 \
    actor_rollout_ref.rollout.top_k=-1 \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \
    actor_rollout_ref.rollout.val_kwargs.top_k=-1 actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.n=1 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    actor_rollout_ref.ref.ulysses_sequence_parallel_size=${sp} \
    actor_rollout_ref.actor.fsdp_config.fsdp_size=32 \
    reward_model.reward_manager=dapo \
    reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=$((1024*4)) \
    reward_model.overlong_buffer.penalty_factor=1.0 \
    trainer.logger=['console','wandb'] trainer.project_name="DAPO" trainer.experiment_name="DAPO-7b" \
    trainer.n_gpus_per_node=8 trainer.nnodes="${NNODES}" trainer.val_before_train=True \
    trainer.test_freq=10 trainer.save_freq=10 trainer.total_epochs=10 trainer.total_training_steps=200 \
    trainer.default_local_dir="${ROOT}/ckpts/DAPO/DAPO-7b" trainer.resume_mode=auto trainer.log_val_generations=10
