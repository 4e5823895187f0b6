# GRPO on GSM8K with the keys and values of verl's example, in an order of our own.
LEN=512
OPTS=(
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False
    data.train_files=$HOME/data/gsm8k/train.parquet
    data.val_files="$HOME/data/gsm8k/test.parquet"
    data.train_batch_size=$((2 * LEN))
    data.max_prompt_length=${LEN} data.max_response_length=$(( LEN*2 ))   # prompt, answer
    data.filter_overlong_prompts=True data.truncation='error'
)
ACTOR="actor_rollout_ref.actor"
OPTS+=(
    actor_rollout_ref.model.path=${MODEL:-Qwen/Qwen2-7B-Instruct}
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    $ACTOR.optim.lr=1e-6
    ${ACTOR}.ppo_mini_batch_size=256
    ${ACTOR}.ppo_micro_batch_size_per_gpu=40
    $ACTOR.use_kl_loss=True $ACTOR.kl_loss_coef=0.001 $ACTOR.kl_loss_type=low_var_kl
    $ACTOR.entropy_coeff=0
    $ACTOR.fsdp_config.param_offload=False
    $ACTOR.fsdp_config.optimizer_offload=False
)
python3 -m verl.trainer.main_ppo "${OPTS[@]}" \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    trainer.critic_warmup=0 trainer.logger='["console","wandb"]' \
    trainer.project_name='grpo_gsm8k' trainer.experiment_name=qwen2_7b \
    trainer.n_gpus_per_node=8 trainer.nnodes=1 \
    trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 "$@" 2>&1 | tee train.log
