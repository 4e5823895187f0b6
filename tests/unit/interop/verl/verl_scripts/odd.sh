# What cannot be known without running the script, and keys that nobody knows.
source cluster.env
when=$(date +%F)
if [ -n "$BIG" ]; then batch=1024; fi
python3 -m verl.trainer.main_ppo \
    trainer.experiment_name=run-$when \
    data.train_batch_size=${batch} \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    algorithm.adv_estimator=grpo \
    +trainer.no_such_key=3 \
    actor_rollout_ref.actor.megatron.context_parallel_size=2 \
    ~data.val_files \
    trainer.nnodes=$SLURM_JOB_NUM_NODES \
    trainer.n_gpus_per_node=8 \
    # the next line is another command, to bash \
    trainer.total_epochs=7
