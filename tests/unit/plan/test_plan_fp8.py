"""What the plan says of engines in FP8: bytes as of the tensors that are sent, and what it cannot know."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from posttrain.cli import app
from posttrain.config import RolloutConfig, TrainConfig
from posttrain.core.machines import Machine, gpu_named
from posttrain.engines import external
from posttrain.engines.base import EngineSpec
from posttrain.models import fp8
from posttrain.models.load import ModelSource
from posttrain.plan import speed
from posttrain.plan.known import known_models
from posttrain.plan.memory import EngineMemory, Trainer
from posttrain.plan.shape import shape_of

QWEN_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
MOE = known_models()["Qwen/Qwen3-30B-A3B"] | {"num_hidden_layers": 2}
SHAPES = {"7b": QWEN_7B, "smollm2": SMOLLM2, "30b-a3b": MOE, "odd": SMOLLM2 | {"intermediate_size": 1000}}


def sent_bytes(config, tmp_path, dtype=torch.bfloat16):
    """Of all tensors of an update, built by the code that sends them, on the meta device."""
    transformers.AutoConfig.for_model(**config).save_pretrained(tmp_path)
    rollout = RolloutConfig(engine="sglang", quantization="fp8")
    spec = EngineSpec(ModelSource(str(tmp_path)), "cuda", "bfloat16", 0, rollout, [0])
    quantized = external.fp8_of(spec)
    size = 0
    for name, shape in external.shapes(spec).items():
        itemsize = 4 if name.endswith("_scale_inv") else 1 if name in quantized.names else dtype.itemsize
        size += torch.Size(shape).numel() * itemsize
    assert size == external.weight_bytes(spec)
    return size


@pytest.mark.parametrize("name", SHAPES)
def test_weights_and_buckets_are_those_of_an_update_to_the_byte(name, tmp_path):
    config = SHAPES[name]
    shape = shape_of(config, name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    engine = EngineMemory(shape, RolloutConfig(engine="sglang", quantization="fp8"), 2, 140e9, "sglang")
    size = sent_bytes(config, tmp_path)
    assert engine.weights == size
    assert size < 0.999 * 2 * shape.parameters
    trainer = Trainer("actor", shape, TrainConfig(param_dtype="bfloat16"), tokens=1000)
    terms = trainer.handing_out("device", engine.in_fp8)
    assert terms["buckets"] == 2 * max(min(2 << 30, -(-size // 2)), 2 * shape.embedding)


def test_a_7b_model_takes_little_more_than_half(tmp_path):
    shape = shape_of(QWEN_7B, "7b")
    bf16 = EngineMemory(shape, RolloutConfig(engine="vllm"), 2, 140e9, "vllm")
    in_fp8 = replace(bf16, rollout=RolloutConfig(engine="vllm", quantization="fp8"))
    assert round(bf16.weights / 2**30, 2) == 14.19
    assert round(in_fp8.weights / 2**30, 2) == 8.11  # embedding and head stay, 2.03 GiB
    assert in_fp8.tokens > bf16.tokens
    both = replace(bf16, rollout=RolloutConfig(engine="vllm", quantization="fp8", kv_cache_dtype="fp8"))
    assert both.of_token == bf16.of_token / 2
    assert both.tokens == int(2 * in_fp8.cache / bf16.of_token)


def test_the_embedded_engine_saves_no_memory_but_its_updates_do():
    shape = shape_of(QWEN_7B, "7b")
    embedded = EngineMemory(shape, RolloutConfig(engine="hf", quantization="fp8"), 2, 140e9, "hf")
    assert embedded.weights == 2 * shape.parameters
    assert embedded.in_fp8 is not None


def test_quantizing_a_matrix_takes_what_is_counted(tmp_path):
    """A copy in float32, and the codes; scales and their parts are less than a thousandth."""
    shape = shape_of(SMOLLM2, "smollm2")
    trainer = Trainer("actor", shape, TrainConfig(param_dtype="bfloat16"), tokens=1000)
    layers = shape.fp8()
    more = trainer.handing_out("device", layers)["gathered weights"] - trainer.handing_out("device")["gathered weights"]
    weight = torch.randn(1536, 576).bfloat16()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = fp8.quantize(weight, 64)
    sizes, held, most = [], 0, 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            sizes.append(event.nbytes())
    for change in sizes:
        held += change
        most = max(most, held)
    assert kept[0].dtype == fp8.DTYPE
    assert most == pytest.approx(more, rel=0.01)


@pytest.mark.parametrize("experts", [True, False])
def test_a_decoding_step_reads_fewer_bytes(experts):
    shape = shape_of(MOE if experts else QWEN_7B, "x")
    engine = EngineMemory(shape, RolloutConfig(engine="vllm", quantization="fp8"), 2, 140e9, "vllm")
    assert engine.read_weights(10**6) == pytest.approx(engine.weights)
    if experts:
        idle = shape.layers * shape.expert_parameters * 120 / 128
        assert engine.read_weights(1) == pytest.approx(engine.weights - idle)


def test_an_update_sends_less_and_quantizes_first():
    shape = shape_of(QWEN_7B, "7b")
    trainer = Trainer("actor", shape, TrainConfig(param_dtype="bfloat16"), tokens=1000)
    machine = Machine(gpu_named("h200"), 2)
    plain = speed.sync_seconds(trainer, machine, "broadcast", "vllm")
    in_fp8 = speed.sync_seconds(trainer, machine, "broadcast", "vllm", shape.fp8())
    assert in_fp8.communication / plain.communication == pytest.approx(8.11 / 14.19, abs=0.001)
    assert in_fp8.memory > plain.memory


def test_the_command_says_what_is_not_known_and_what_cannot_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    transformers.AutoConfig.for_model(**QWEN_7B).save_pretrained(tmp_path / "model")
    common = ["plan", "--preset", "tiny-arith", "--model", "model", "--set", "rollout.engine=sglang"]

    def said(gpu, *more):
        done = CliRunner().invoke(app, [*common, "--gpu", gpu, "--set", "rollout.quantization=fp8", *more])
        return " ".join(done.output.split())

    assert "times of engines in FP8 were never measured" in said("h200")
    assert "A100 does not multiply in FP8" in said("a100")
    gpt_oss = known_models()["Qwen/Qwen3-30B-A3B"] | {"model_type": "gpt_oss"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(gpt_oss))
    assert "its experts are stored transposed" in said("h200")
