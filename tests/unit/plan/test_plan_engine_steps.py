"""What the plan says of the memory that a step of vLLM computes with."""

from dataclasses import replace

import pytest

from posttrain.config import RolloutConfig
from posttrain.plan.estimate import Plan
from posttrain.plan.memory import EngineMemory, total
from posttrain.plan.shape import shape_of
from tests.unit.plan.test_plan import config, question

QWEN_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
TOKENS = 16384


def engine(requests, *, step_tokens=TOKENS, on_gpu=1, **rollout):
    rollout = RolloutConfig(engine="vllm", max_concurrent=requests, **rollout)
    return EngineMemory(shape_of(QWEN_7B, "7b"), rollout, 2, 80e9, "vllm", on_gpu=on_gpu, step_tokens=step_tokens)


def test_the_most_of_a_step_is_a_layer_over_its_tokens_or_the_sampler_over_its_requests():
    # its input, the normalised, gate, up and their product
    assert engine(128).step == TOKENS * 2 * (2 * 3584 + 3 * 18944)
    # the last layer's output; logits in bfloat16, and four times their size in float32
    assert engine(1024).step == TOKENS * 2 * 3584 + 1024 * 152064 * (2 + 4 * 4)


def test_a_layer_is_shared_out_by_tensor_parallelism_but_for_the_hidden_states():
    assert engine(128, tensor_parallel=4).step == TOKENS * 2 * (2 * 3584 + 3 * 18944 / 4)


def test_a_step_has_no_more_tokens_than_its_requests():
    few = engine(8, max_prompt_tokens=100, max_response_tokens=156)
    assert few.step == 8 * 256 * 2 * (2 * 3584 + 3 * 18944)


def test_an_engine_alone_has_its_steps_within_the_fraction_and_engines_that_share_a_gpu_beside_it():
    uncounted, alone, sharing = engine(128, step_tokens=0), engine(128), engine(128, on_gpu=2)
    assert alone.cache == uncounted.cache - alone.step
    assert total(alone.awake()) == pytest.approx(total(uncounted.awake()))
    assert sharing.cache == uncounted.cache  # which it is given
    assert total(sharing.awake()) == pytest.approx(total(uncounted.awake()) + alone.step)
    assert alone.loading() == uncounted.loading()  # asleep it keeps nothing of a step


def test_plans_count_the_steps_of_vllm_as_large_as_it_takes_them():
    def planned(engine="vllm", gpu="h100", **rollout):
        cfg = config("rl", rollout={"engine": engine, **rollout})
        return Plan(question(cfg, gpu=gpu, gpus=1)).layout.engine

    assert planned().step_tokens == planned(gpu="h200").step_tokens == 16384
    assert planned(gpu="a100").step_tokens == planned(gpu="l40s").step_tokens == 8192
    assert planned(engine_options={"max_num_batched_tokens": 2048}).step_tokens == 2048
    assert planned("sglang").step_tokens == 0
    two = planned(replicas=2, memory_fraction=0.2)
    assert two.on_gpu == 2
    assert two.step > 0
    assert two.cache == replace(two, step_tokens=0).cache
