"""Models built without memory and filled from safetensors."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from posttrain.core.errors import ConfigError, ModelError
from posttrain.models.attention_kernels import available, choose, needs
from posttrain.models.load import ModelSource, build
from posttrain.models.ulysses import check_heads
from posttrain.models.weights import as_stored, check_files, load_weights, materialize, stream
from posttrain.train.flops import model_flops

CPU = torch.device("cpu")
COMMON = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "head_dim": 12,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
KINDS = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": False}),
    "tied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": False}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
    "qwen3-moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {"tie_word_embeddings": False, **MOE}),
}


def saved(kind, folder):
    """A random model, written to several files."""
    config, model, more = KINDS[kind]
    torch.manual_seed(0)
    made = model(config(**COMMON, **more))
    made.save_pretrained(folder, max_shard_size="20KB")
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_loads_the_weights_that_were_saved(kind, tmp_path):
    expected = saved(kind, tmp_path)
    source = ModelSource(str(tmp_path))
    model = build(source, dtype=torch.float32)
    assert all(p.is_meta for p in model.parameters())
    materialize(model, CPU)
    load_weights(model, source, 0)
    wanted = dict(expected.named_parameters())
    assert dict(model.named_parameters()).keys() == wanted.keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, wanted[name]), name
    for (name, buffer), (_, other) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(buffer, other), name
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == (kind == "tied")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_as_stored_are_those_of_the_files_and_take_one_pass_through_the_modules(kind, tmp_path, monkeypatch):
    model = saved(kind, tmp_path)
    files = {name: w for file in tmp_path.glob("*.safetensors") for name, w in load_file(file).items()}
    weights, passes, pass_through = list(model.named_parameters()), [], model.named_modules
    monkeypatch.setattr(model, "named_modules", lambda *args, **how: passes.append(1) or pass_through(*args, **how))
    for _ in range(2):
        sent = dict(as_stored(model, weights))
        assert sent.keys() == files.keys()
        assert all(torch.equal(sent[name], files[name]) for name in files)
    assert len(passes) == 1  # of as many modules as a model with adapters has, one takes milliseconds


def test_rejects_models_that_store_buffers(tmp_path):
    """DeepSeek-V3 and its kin correct the choice of experts by a buffer, which would stay at zero."""
    from transformers import DeepseekV3Config

    DeepseekV3Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, n_group=2, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8,
        v_head_dim=8, qk_nope_head_dim=8, architectures=["DeepseekV3ForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    with pytest.raises(ModelError, match=r"deepseek_v3 store more than parameters, .*e_score_correction_bias"):
        build(ModelSource(str(tmp_path)), dtype=torch.float32)


def test_loads_weights_in_the_requested_dtype(tmp_path):
    expected = saved("qwen2", tmp_path)
    model = build(ModelSource(str(tmp_path)), dtype=torch.bfloat16)
    materialize(model, CPU)
    load_weights(model, ModelSource(str(tmp_path)), 0)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name).bfloat16())


def test_rejects_missing_or_misshaped_weight(tmp_path):
    saved("qwen2", tmp_path)
    source = ModelSource(str(tmp_path))
    index = tmp_path / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    lost = whole["weight_map"].pop("model.layers.1.mlp.up_proj.weight")
    index.write_text(json.dumps(whole))
    for other in [name for name, file in whole["weight_map"].items() if file == lost]:
        del whole["weight_map"][other]
    index.write_text(json.dumps(whole))
    model = build(source, dtype=torch.float32)
    materialize(model, CPU)
    with pytest.raises(ModelError, match=r"has no weights for .*layers\.1\.mlp\.up_proj\.weight"):
        load_weights(model, source, 0)

    saved("qwen2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    model = build(source, dtype=torch.float32)
    materialize(model, CPU)
    with pytest.raises(ModelError, match=r"mlp\.\w+\.weight is \(.*80.*\), and the config makes it \(.*96.*\)"):
        load_weights(model, source, 0)


@pytest.mark.parametrize("how", ["load", "stream"])
def test_rejects_quantized_weights(tmp_path, how):
    """Codes have the names and shapes of weights: without their scales they would be weights of another size."""
    saved("qwen2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = ModelSource(str(tmp_path))
    model = build(source, dtype=torch.float32)
    with pytest.raises(ModelError, match=r"the weights of .* are quantized \(fp8\)"):
        if how == "load":
            materialize(model, CPU)
            load_weights(model, source, 0)
        else:
            list(stream(model, source, dtype=torch.float32))


@pytest.mark.parametrize("left", [False, True])
def test_one_file_takes_the_place_of_those_that_an_index_names(tmp_path, left):
    """transformers leaves the index where it saves a model in one file over one in several."""
    old, new = tmp_path / "old", tmp_path / "new"
    saved("qwen2", old)
    config, kind, more = KINDS["qwen2"]
    expected = kind(config(**COMMON, **more))
    expected.save_pretrained(old)
    assert (old / "model.safetensors.index.json").is_file()
    if left:
        saved("qwen2", new)
        for file in new.glob("model-*.safetensors"):
            file.rename(old / file.name)
    source = ModelSource(str(old))
    model = build(source, dtype=torch.float32)
    check_files(model, source)
    weights = dict(stream(model, source, dtype=torch.float32))
    assert all(torch.equal(parameter, weights[name]) for name, parameter in expected.named_parameters())


@pytest.mark.parametrize("change", [0.0, 1.0])
def test_rejects_a_tied_weight_with_two_values(tmp_path, change):
    """transformers does not tie them then, whatever the config says."""
    saved("tied", tmp_path)
    (file,) = [file for file in tmp_path.glob("*.safetensors") if "model.embed_tokens.weight" in load_file(file)]
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + change
    save_file(tensors, file, metadata={"format": "pt"})
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = file.name
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = build(ModelSource(str(tmp_path)), dtype=torch.bfloat16)
    materialize(model, CPU)
    if not change:
        load_weights(model, ModelSource(str(tmp_path)), 0)
        return
    with pytest.raises(ModelError, match=r"the config ties lm_head\.weight to model\.embed_tokens\.weight, and"):
        load_weights(model, ModelSource(str(tmp_path)), 0)


def test_rejects_truncated_weight_file(tmp_path):
    saved("qwen2", tmp_path)
    file = next(tmp_path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:100])
    model = build(ModelSource(str(tmp_path)), dtype=torch.float32)
    materialize(model, CPU)
    with pytest.raises(ModelError, match="cannot read") as error:
        load_weights(model, ModelSource(str(tmp_path)), 0)
    assert "download" in error.value.hint


LOAD = """
import pathlib, sys, torch
from posttrain.models.weights import check_files, load_weights, materialize, stream
from posttrain.models.load import ModelSource, build

def kib(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

source = ModelSource(sys.argv[1])
model = build(source, dtype=torch.bfloat16)
before = kib("VmRSS:")
materialize(model, torch.device("cpu"))
load_weights(model, source, 0)
print(before, kib("VmHWM:"), kib("RssAnon:"), kib("VmRSS:"))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_peaks_at_the_weights_and_one_file(tmp_path):
    """Files are mapped into memory and let go: the model is never there twice, in a file's pages and its own."""
    torch.manual_seed(0)
    config = Qwen2Config(**COMMON | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12})
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(tmp_path, max_shard_size="50MB")
    files = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    assert len(files) > 4
    done = subprocess.run([sys.executable, "-c", LOAD, tmp_path], capture_output=True, text=True, check=True)
    before, peak, *_ = (int(word) * 1024 for word in done.stdout.split())
    assert sum(files) < peak - before < sum(files) + 2 * max(files)


# ---------------------------------------------------------------------- what else is chosen by shape


@pytest.mark.parametrize(("heads", "kv_heads", "size", "fits"), [
    (14, 2, 2, True), (28, 4, 4, True), (28, 4, 2, True), (28, 4, 14, False), (16, 2, 4, True), (14, 2, 4, False),
    (12, 8, 6, False),
])  # fmt: skip
def test_sequence_parallel_size_must_divide_heads(heads, kv_heads, size, fits):
    config = Qwen2Config(num_attention_heads=heads, num_key_value_heads=kv_heads)
    if fits:
        check_heads(config, size)
        return
    with pytest.raises(ConfigError, match=f"train.sequence_parallel = {size}"):
        check_heads(config, size)


def test_on_a_cpu_attention_is_padded_sdpa():
    assert available(CPU, torch.float32) == ["sdpa"]
    assert choose("auto", CPU, torch.float32).name == "sdpa"
    for name in ("flash4", "flash3", "flash2", "torch"):
        with pytest.raises(ConfigError, match=f"train.attention = '{name}': it needs a GPU"):
            choose(name, CPU, torch.bfloat16)


def test_a_kernel_that_lacks_what_layers_ask_for_is_refused():
    with torch.device("meta"):
        model = Gemma2ForCausalLM(Gemma2Config(**COMMON))
    assert needs(model) == {"window", "softcap"}
    for needed, message in (({"window", "softcap"}, "a cap of its scores"), ({"sinks"}, "sinks")):
        with pytest.raises(ConfigError, match=f"train.attention = 'torch': the model's attention has {message}, which"):
            choose("torch", torch.device("cuda"), torch.bfloat16, frozenset(needed))
    assert choose("sdpa", CPU, torch.float32, needs(model)).name == "sdpa"


def test_flops_of_published_shapes():
    """Qwen2.5-7B: 7.62 billion weights, 0.54 of them input embeddings. A row of 8,192 tokens, by hand."""
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(
            vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28,
            num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False,
        ))  # fmt: skip
    total = sum(p.numel() for p in model.parameters())
    multiplied = total - 152_064 * 3584
    flops = model_flops(model)
    length = 8192
    by_hand = 6 * multiplied * length + 6 * 28 * 3584 * length * length
    assert flops.training([length]) == pytest.approx(by_hand)
    assert flops.training([length, length]) == pytest.approx(2 * by_hand)
    model.requires_grad_(False)
    frozen = 4 * multiplied * length + 6 * 28 * 3584 * length * length
    assert flops.training([length]) > model_flops(model).training([length]) == pytest.approx(frozen)


def test_flops_of_a_mixture_count_the_experts_that_a_token_goes_through():
    config, model, more = KINDS["qwen3-moe"]
    one = model(config(**COMMON, **more | {"num_experts_per_tok": 1}))
    two = model(config(**COMMON, **more))
    experts = sum(p.numel() for name, p in two.named_parameters() if ".experts." in name)
    difference = model_flops(two).forward - model_flops(one).forward
    assert difference == pytest.approx(2 * experts / 4)
