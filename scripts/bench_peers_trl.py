"""TRL's side of ``bench_peers.py``, in a process and an interpreter of its own: ``bench_peers_trl.py JOB.json``.

It prints one line of JSON for each step as soon as the step is done.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from bench_peers_task import calculator, compute_score
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, chat_template_utils

GPU = torch.cuda.is_available()


class Timed(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer that adds up the seconds of its phases. They nest: ``prepare`` is the rollout, rewards, and
    log-probabilities; ``training_step`` is ``prepare`` at the first micro-batch, and the update."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        super().__init__(*args, **kwargs)
        if hasattr(self, "vllm_generation"):
            inner = self.vllm_generation.sync_weights
            self.vllm_generation.sync_weights = lambda *a, **k: self.timed("sync", inner, *a, **k)

    def timed(self, phase: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        start = now()
        result = call(*args, **kwargs)
        self.seconds[phase] += now() - start
        return result

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.timed("generate", super()._generate, *args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        return self.timed("rewards", super()._calculate_rewards, *args, **kwargs)

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        return self.timed("prepare", super()._generate_and_score_completions, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.timed("training_step", super().training_step, *args, **kwargs)


class Report(TrainerCallback):  # type: ignore[misc]
    """Prints a step's phases, reward and length."""

    trainer: Timed

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.start = now()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.before_optimizer = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.optimizer = now() - self.before_optimizer
        self.end = now()

    def on_log(self, _: Any, state: Any, __: Any, logs: dict[str, Any], **___: Any) -> None:
        if "reward" not in logs:
            return  # the summary at the end
        seconds, tokens = self.trainer.seconds, float(logs["num_tokens"])
        sync = seconds["sync"]
        row = {
            "step": state.global_step,
            "at": time.time(),
            "seconds": self.end - self.start,
            "rollout": seconds["generate"] - sync,
            "logprobs": seconds["prepare"] - seconds["generate"] - seconds["rewards"],
            "update": seconds["training_step"] - seconds["prepare"] + self.optimizer,
            "weights": sync,
            "reward": logs["reward"],
            "length": logs["completions/mean_length"],
            "tokens": tokens - getattr(self, "tokens", 0.0),
            "calls": logs.get("tools/call_frequency", 0.0),
        }
        self.tokens, self.start = tokens, now()
        seconds.clear()
        print(json.dumps(row), flush=True)


def now() -> float:
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def reward(completions: list[Any], data_source: list[str], ground_truth: list[Any], **_: Any) -> list[float]:
    """The common reward: of all that the assistant wrote."""
    texts = ["\n".join(m.get("content") or "" for m in c if m["role"] == "assistant") for c in completions]
    return [compute_score(*row) for row in zip(data_source, texts, ground_truth, strict=True)]


def tokenizer_with_tools(model: str) -> Any:
    """The model's tokenizer, told how its answers are read: TRL knows templates by their text alone, and calls here
    are written as Qwen3's."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    if chat_template_utils._SUPPORTS_RESPONSE_TEMPLATE:
        tokenizer.response_template = chat_template_utils.qwen3_template
    else:
        tokenizer.response_schema = chat_template_utils.qwen3_schema
    return tokenizer


def main(job: dict[str, Any]) -> None:
    rows = [json.loads(line) for line in Path(job["rows"]).read_text(encoding="utf-8").splitlines()]
    episodes, micro = job["prompts"] * job["n"], job["trl_rows"]
    values: dict[str, Any] = {
        "output_dir": job["out"], "max_steps": job["steps"], "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": episodes // micro, "num_generations": job["n"],
        "max_completion_length": job["response"], "temperature": 1.0, "top_p": 1.0, "beta": 0.0, "epsilon": 0.2,
        "num_iterations": 1, "loss_type": "dapo", "scale_rewards": "group", "mask_truncated_completions": False,
        "learning_rate": job["lr"], "lr_scheduler_type": "constant", "warmup_steps": 0, "weight_decay": 0.0,
        "adam_beta1": 0.9, "adam_beta2": 0.999, "max_grad_norm": 1.0, "gradient_checkpointing": job["checkpointing"],
        "shuffle_dataset": False, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "seed": job["seed"],
        "disable_tqdm": True, "bf16": GPU, "use_cpu": not GPU, "model_init_kwargs": {"dtype": "float32"},
    }  # fmt: skip
    if GPU:
        values |= {
            "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": job["memory_fraction"],
            "vllm_max_model_length": job["prompt"] + job["response"], "use_liger_kernel": True,
            "vllm_enable_sleep_mode": job["sleep"],
        }  # fmt: skip
    else:
        values["use_transformers_continuous_batching"] = job["trl_continuous"]
    more: dict[str, Any] = {}
    if job["lora_rank"]:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=job["lora_rank"], lora_alpha=32, target_modules="all-linear")
    if job["turns"] > 1:
        more["tools"] = [calculator]
        more["processing_class"] = tokenizer_with_tools(job["model"])
        values["max_tool_calling_iterations"] = job["turns"] - 1
    report = Report()
    trainer = Timed(
        model=job["model"], reward_funcs=reward, args=GRPOConfig(**values | job["trl_options"]),
        train_dataset=Dataset.from_list(rows), callbacks=[report], **more,
    )  # fmt: skip
    report.trainer = trainer
    trainer.train()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
