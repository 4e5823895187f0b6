# The keys and values of verl's ReTool on Qwen2.5-7B, in an order of our own.
BASE=${DATA_ROOT:-$PWD}
turns=16; prompt=2048; answer=16384
budget=$(( (prompt + answer) * 1 ))
train="['$BASE/dataset/DAPO-Math-17k']"
test="['$BASE/dataset/aime_2025', '$BASE/dataset/AIME_2024']"
name=qwen2.5-7b_dapo

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.0 \
    data.train_files="$train" data.val_files="$test" data.return_raw_chat=True data.train_batch_size=64 \
    data.max_prompt_length=$prompt data.max_response_length=$answer data.filter_overlong_prompts=True \
    data.truncation='error' data.custom_cls.path=recipe/retool/retool.py data.custom_cls.name=CustomRLHFDataset \
    custom_reward_function.path=recipe/retool/retool.py custom_reward_function.name=compute_score \
    actor_rollout_ref.model.path=$BASE/checkpoint/sft/global_step_372 \
    actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.0 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$budget \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=$(( budget * 4 )) \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.mode=async \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.multi_turn.enable=True actor_rollout_ref.rollout.multi_turn.max_user_turns=$turns \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=$turns \
    actor_rollout_ref.rollout.multi_turn.tool_config_path=sandbox_tool.yaml \
    actor_rollout_ref.rollout.multi_turn.format=hermes \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.9 actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.val_kwargs.top_p=0.6 actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.n=30 \
    trainer.logger=['console','wandb'] trainer.project_name=retool trainer.experiment_name=$name \
    trainer.n_gpus_per_node=8 trainer.val_before_train=True trainer.log_val_generations=20 trainer.nnodes=1 \
    trainer.save_freq=20 trainer.default_local_dir=$BASE/checkpoint/$name trainer.test_freq=10 \
    trainer.total_epochs=1 $@
