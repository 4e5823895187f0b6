# The keys and values of verl's SFT on GSM8K with sequence parallelism, in an order of our own.
if [ "$#" -lt 2 ]; then
    echo "usage: $0 GPUS FOLDER"; exit 1
fi
gpus=$1
folder=$2
shift 2
torchrun --standalone --nnodes=1 --nproc_per_node=$gpus -m verl.trainer.fsdp_sft_trainer \
    data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet \
    data.prompt_key=extra_info data.response_key=extra_info \
    data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] \
    optim.lr=1e-4 data.micro_batch_size=4 model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct \
    trainer.default_local_dir=$folder trainer.project_name=gsm8k-sft trainer.experiment_name=sp2 \
    trainer.logger=console trainer.total_training_steps=1 $@ \
    ulysses_sequence_parallel_size=2 use_remove_padding=true
