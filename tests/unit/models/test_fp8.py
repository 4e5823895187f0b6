"""Weights in FP8: codes and scales beside a worked example and transformers' own; which of a model's they are."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from posttrain.core.errors import ConfigError
from posttrain.models import fp8
from posttrain.models.fp8_layers import SCALE, Fp8Layers, fp8_layers
from posttrain.models.load import ModelSource, build
from posttrain.models.weights import as_stored

SMALL = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "eos_token_id": 0, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def random(*shape, seed=0, spread=0.05):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


def model_of(tmp_path, config, **sizes):
    getattr(transformers, config)(**SMALL | sizes).save_pretrained(tmp_path)
    return build(ModelSource(str(tmp_path)), dtype=torch.float32)


# ---------------------------------------------------------------------- weights


def test_a_worked_example():
    """Blocks of 2 x 2. The scale is max |w| / 448, so the largest of a block is 448; 3 / (4 / 448) = 336 lies between
    320 and 352, whose mean it is, and goes to 320, the even one."""
    weight = torch.tensor([[448.0, 1.0, 0.0, 0.0], [-2.0, 7.0, 0.0, 0.0], [4.0, -4.0, 0.5, 1.0], [3.0, 1.0, 0.25, 2.0]])
    quantized, scale = fp8.quantize(weight, 2)
    assert scale.tolist() == [pytest.approx([1.0, 1e-12 / 448]), pytest.approx([4 / 448, 2 / 448])]
    assert quantized.float().tolist() == [
        [448.0, 1.0, 0.0, 0.0],
        [-2.0, 7.0, 0.0, 0.0],
        [448.0, -448.0, 112.0, 224.0],
        [320.0, 112.0, 56.0, 448.0],
    ]
    back = fp8.dequantize(quantized, scale, torch.float32)
    expected = weight.clone()
    expected[3, 0] = 320 * 4 / 448
    assert torch.allclose(back, expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("block", [128, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_element_is_off_by_at_most_half_of_its_last_place(block, dtype):
    """e4m3 has 4 significant bits down to 2^-6, and steps of 2^-9 below."""
    weight = random(256, 384).to(dtype)
    quantized, scale = fp8.quantize(weight, block)
    assert quantized.shape == weight.shape
    assert scale.shape == (256 // block, 384 // block)
    off = (fp8.dequantize(quantized, scale, torch.float32) - weight.float()).abs()
    whole = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
    assert (off <= torch.maximum(weight.float().abs() * 2**-4, whole * 2**-10) * 1.0001).all()
    assert 0.02 < float((off.square().mean() / weight.float().square().mean()).sqrt()) < 0.03


@pytest.mark.parametrize("block", [128, 64])
def test_codes_and_scales_are_those_of_transformers(block):
    """It divides by the scales' reciprocals, so a scale may differ in its last bit, and a code by one where that lies
    in the middle."""
    weight = random(256, 384, seed=1)
    settings = SimpleNamespace(weight_block_size=[block, block], scale_fmt="float")
    theirs = Fp8Quantize(SimpleNamespace(quantization_config=settings)).convert({"a.b.weight": weight})
    quantized, scale = fp8.quantize(weight, block)
    assert torch.allclose(scale, theirs["a.b.weight" + SCALE], rtol=1e-6)
    assert (quantized.view(torch.uint8) == theirs["a.b.weight"].view(torch.uint8)).float().mean() > 0.999
    back = Fp8Dequantize(None)._dequantize_one(quantized, scale, torch.bfloat16)
    assert torch.equal(back, fp8.dequantize(quantized, scale, torch.bfloat16))


def test_experts_are_quantized_one_by_one():
    weight = random(3, 256, 128, seed=2)
    weight[1] *= 10
    quantized, scale = fp8.quantize(weight, 128)
    for one, codes, scales in zip(weight, quantized, scale, strict=True):
        expected = fp8.quantize(one, 128)
        assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(scales, expected[1])
    back = fp8.dequantize(quantized, scale, torch.float32)
    assert torch.equal(back[2], fp8.dequantize(quantized[2], scale[2], torch.float32))


def test_the_weight_itself_stays_as_it_is():
    weight = random(128, 128)
    before = weight.clone()
    fp8.quantize(weight, 128)
    assert torch.equal(weight, before)


def test_blocks_that_do_not_divide_a_weight_are_refused():
    with pytest.raises(ValueError, match=r"blocks of 128 do not divide a weight of shape \(576, 192\)"):
        fp8.quantize(random(576, 192), 128)


def test_each_update_has_scales_of_its_own():
    layers = Fp8Layers(128, frozenset({"a.weight"}), (), 128 * 128, 128 * 128)
    weight, norm = random(128, 128), torch.ones(128)
    first = dict(fp8.quantized_weights([("a.weight", weight), ("norm", norm)], layers))
    assert list(first) == ["a.weight_scale_inv", "a.weight", "norm"]
    weight *= 3.0
    second = dict(fp8.quantized_weights([("a.weight", weight), ("norm", norm)], layers))
    assert torch.allclose(second["a.weight_scale_inv"], 3.0 * first["a.weight_scale_inv"])
    assert (second["a.weight"].view(torch.uint8) == first["a.weight"].view(torch.uint8)).float().mean() > 0.999
    assert second["norm"] is norm


def test_ranks_that_nobody_reads_go_through_the_same_sizes_without_values():
    layers = Fp8Layers(64, frozenset({"a.weight"}), (), 64 * 128, 64 * 128)
    given = [("a.weight", random(64, 128)), ("b", torch.ones(3))]
    whole = list(fp8.quantized_weights(given, layers))
    without = list(fp8.quantized_weights(given, layers, values=False))
    assert [(n, t.shape, t.dtype) for n, t in whole] == [(n, t.shape, t.dtype) for n, t in without]
    assert [t.is_meta for _, t in without] == [True, True, False]


# ---------------------------------------------------------------------- activations


def test_activations_are_rounded_token_by_token():
    x = random(5, 256, seed=3, spread=1.0)
    x[2] *= 1000
    rounded = fp8.rounded_activations(x, 128)
    for token in range(5):
        assert torch.equal(rounded[token], fp8.rounded_activations(x[token : token + 1], 128)[0])
        codes, scale = fp8.quantize(x[token].view(2, 128).repeat_interleave(128, 0).view(2 * 128, 128), 128)
        by_weights = fp8.dequantize(codes, scale, torch.float32).view(2, 128, 128)[:, 0]
        assert torch.equal(rounded[token].view(2, 128), by_weights)
    assert fp8.rounded_activations(x.bfloat16(), 128).dtype == torch.bfloat16
    assert torch.equal(fp8.rounded_activations(torch.zeros(1, 64), 64), torch.zeros(1, 64))


def test_a_rounded_layer_is_the_product_of_rounded_numbers(tmp_path):
    model = model_of(tmp_path, "Qwen3Config").to_empty(device="cpu")
    layer = model.model.layers[0].mlp.down_proj
    weight = random(256, 384, seed=4)
    layer.weight.data.copy_(weight)
    layers = fp8.layers_of(model, stored=False)
    kept = model.model.embed_tokens.weight.data.normal_().clone()
    fp8.round_weights(model, layers)
    fp8.round_inputs(model, layers)
    x = random(7, 384, seed=5)
    whole = fp8.dequantize(*fp8.quantize(weight, 128), torch.float32)
    assert torch.equal(layer(x), fp8.rounded_activations(x, 128) @ whole.T)
    assert torch.equal(model.model.embed_tokens.weight, kept)


# ---------------------------------------------------------------------- which weights


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def ends(names):
    return {name.removesuffix(".weight").rpartition(".")[2] for name in names}


@pytest.mark.parametrize(
    ("config", "sizes", "chosen", "kept"),
    [
        ("LlamaConfig", {}, {*ATTENTION, *MLP}, set()),
        ("Qwen2Config", {"tie_word_embeddings": True}, {*ATTENTION, *MLP}, set()),
        ("Phi3Config", {}, {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}, set()),
        ("Qwen3MoeConfig", EXPERTS, {*ATTENTION, *MLP}, {"gate"}),
        (
            "Qwen2MoeConfig",
            {**EXPERTS, "shared_expert_intermediate_size": 256},
            {*ATTENTION, *MLP},
            {"gate", "shared_expert_gate"},
        ),
        (
            "Qwen3NextConfig",
            {
                **EXPERTS, "shared_expert_intermediate_size": 256, "linear_num_value_heads": 4,
                "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
                "layer_types": ["linear_attention", "full_attention"],
            },
            {*ATTENTION, *MLP},
            {"gate", "shared_expert_gate", "in_proj_qkvz", "in_proj_ba", "out_proj"},
        ),
    ],
)  # fmt: skip
def test_linear_layers_are_quantized_and_nothing_else(tmp_path, config, sizes, chosen, kept):
    model = model_of(tmp_path, config, **sizes)
    layers = fp8.layers_of(model, stored=True)
    weights = dict(as_stored(model, model.named_parameters()))
    assert layers.block == 128
    assert ends(layers.names) == chosen
    assert ends(layers.kept) == kept
    assert layers.elements == sum(weights[name].numel() for name in layers.names)
    assert not any("embed" in name or "norm" in name or "lm_head" in name for name in layers.names)
    shapes = layers.shapes({name: tuple(w.shape) for name, w in weights.items()})
    assert len(shapes) == len(weights) + len(layers.names)
    sent = dict(fp8.quantized_weights(weights.items(), layers))
    assert {name: tuple(tensor.shape) for name, tensor in sent.items()} == shapes
    size = sum(t.numel() * fp8.sent_type(n, t, torch.bfloat16).itemsize for n, t in sent.items())
    assert size == 2 * sum(w.numel() for w in weights.values()) - layers.saved_bytes(2)


def test_the_embedded_engine_quantizes_the_same_elements(tmp_path):
    """Its experts are joined in one parameter."""
    model = model_of(tmp_path, "Qwen3MoeConfig", **EXPERTS)
    own, stored = fp8.layers_of(model, stored=False), fp8.layers_of(model, stored=True)
    assert "model.layers.0.mlp.experts.gate_up_proj" in own.names
    assert own.elements == stored.elements
    assert own.block == stored.block


def test_the_config_of_engines_is_that_of_published_checkpoints(tmp_path):
    model = model_of(tmp_path, "Qwen3MoeConfig", **EXPERTS)
    assert fp8.layers_of(model, stored=True).engine_config == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
    }


SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}


def test_blocks_of_64_where_those_of_128_do_not_fit(tmp_path):
    """SmolLM2-135M: 576 = 4.5 x 128 = 9 x 64."""
    layers = fp8.layers_of(model_of(tmp_path, "LlamaConfig", **SMOLLM2), stored=True)
    assert layers.block == 64
    assert layers.kept == ()
    assert layers.describe() == "100 % of the linear layers' weights, in blocks of 64 x 64"


def layer(**shapes):
    return {f"model.layers.0.x.{name}.weight": shape for name, shape in shapes.items()}


def test_parts_of_a_joined_matrix_stay_together():
    """Keys and values of 32 do not fit, so queries stay as they are, too."""
    found = fp8_layers("llama", layer(
        q_proj=(256, 256), k_proj=(32, 256), v_proj=(32, 256), o_proj=(256, 256),
        gate_proj=(384, 256), up_proj=(384, 256), down_proj=(256, 384),
    ))  # fmt: skip
    assert found.block == 128
    assert ends(found.names) == {"o_proj", *MLP}
    assert ends(found.kept) == {"q_proj", "k_proj", "v_proj"}
    assert found.describe() == (
        "81.5 % of the linear layers' weights, in blocks of 128 x 128; 3 layers stay as they are (docs/fp8.md)"
    )


@pytest.mark.parametrize(("parallel", "block"), [(1, 128), (2, 64)])
def test_each_gpu_of_an_engine_has_whole_blocks(parallel, block):
    """Of 384 two GPUs have 192 each."""
    found = fp8_layers(
        "llama",
        layer(gate_proj=(384, 512), up_proj=(384, 512), down_proj=(512, 384)),
        tensor_parallel=parallel,
    )
    assert found.block == block
    assert ends(found.names) == set(MLP)


def test_experts_have_blocks_of_128_or_none():
    experts = {
        f"model.layers.0.mlp.experts.{n}.{name}.weight": (192, 256)
        for n in range(2)
        for name in ("gate_proj", "up_proj")
    }
    with pytest.raises(ConfigError, match=r"nothing can be quantized \(no size of \[192, 256\] fits"):
        fp8_layers("qwen3_moe", experts)


@pytest.mark.parametrize(
    ("kind", "shapes", "why"),
    [
        ("gpt_oss", {"q_proj": (256, 256)}, "its experts are stored transposed"),
        ("deepseek_v3", {"o_proj": (256, 256)}, "latent attention"),
        ("llama", {"q_proj": (32, 48)}, r"no size of \[32, 48\] fits blocks of 128 or 64"),
        ("mamba2", {"in_proj": (256, 256)}, "no layer of it is known"),
    ],
)
def test_models_that_cannot_be_quantized_are_refused(kind, shapes, why):
    with pytest.raises(ConfigError, match=f"rollout.quantization = 'fp8' with a model of type {kind}.*{why}") as error:
        fp8_layers(kind, layer(**shapes))
    assert "rollout.quantization=none" in error.value.hint
