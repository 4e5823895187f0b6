"""Which kernels SGLang, and vLLM, multiply with in FP8."""

from dataclasses import replace

import pytest
import torch
from transformers import Qwen2Config

from posttrain.config import RolloutConfig
from posttrain.engines import external, sglang
from posttrain.engines.base import EngineSpec
from posttrain.models.load import ModelSource


@pytest.fixture(params=[128, 64])
def block(request):
    return request.param


@pytest.fixture
def spec(block, tmp_path):
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3}
    Qwen2Config(
        hidden_size=block * 3, intermediate_size=block * 5, num_hidden_layers=1, vocab_size=64, **heads,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    rollout = RolloutConfig(engine="sglang", quantization="fp8")
    return EngineSpec(ModelSource(str(tmp_path)), "cuda", "bfloat16", 0, rollout, [0])


@pytest.mark.parametrize("compiler", ["", "PATH", "CUDA_HOME"])
@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
def test_deep_gemm_is_taken_where_it_can_take_new_weights(
    monkeypatch, tmp_path, spec, block, installed, compiler, capability
):
    monkeypatch.setattr(external, "find_spec", lambda name: object() if installed and name == "deep_gemm" else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(0o755)
    monkeypatch.setenv("PATH", str(nvcc.parent) if compiler == "PATH" else "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path if compiler == "CUDA_HOME" else tmp_path / "none"))
    expected = "deep_gemm" if installed and compiler and capability == (9, 0) and block == 128 else "triton"
    kernels = {"fp8_gemm_runner_backend": expected, "moe_runner_backend": "triton"}
    assert sglang.fp8_kernels(spec) == kernels
    names = ("deep_gemm", "vllm.third_party.deep_gemm")  # either will do for vLLM
    assert external.takes_deep_gemm(external.fp8_of(spec), capability, *names) == (expected == "deep_gemm")
    monkeypatch.setattr(external, "find_spec", lambda name: object() if installed and name == names[1] else None)
    assert external.takes_deep_gemm(external.fp8_of(spec), capability, *names) == (expected == "deep_gemm")
    plain = replace(spec, rollout=spec.rollout.model_copy(update={"quantization": "none"}))
    assert sglang.fp8_kernels(plain) == {}
