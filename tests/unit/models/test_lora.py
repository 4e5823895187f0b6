"""LoRA: the same model as peft's, the same weights wherever they go, and names that do not fit are refused."""

import json
import re
from functools import partial

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from posttrain.config import Config, LoraConfig
from posttrain.core.errors import ConfigError, ModelError
from posttrain.merge_ckpt import run as merge_ckpt
from posttrain.models import lora, weights
from posttrain.models.attention import Ragged
from posttrain.models.attention_kernels import choose
from posttrain.models.builtin import create_builtin
from posttrain.models.export import save_text_side, save_whole
from posttrain.models.load import ModelSource, build, load_model, locate
from posttrain.models.weights import load_weights, materialize
from posttrain.runs.preflight import open_model
from posttrain.train import checkpoint, saver
from posttrain.train.flops import model_flops
from posttrain.train.model import PackedLM
from posttrain.train.optim import build_optimizer
from posttrain.train.parallel import parallelize
from tests.helpers.saved import save_shards

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TINY = ModelSource("builtin:tiny")
CPU = torch.device("cpu")
SDPA = choose("sdpa", CPU, torch.float32)
SMALL = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models on disk: head and embeddings apart, a mixture of experts, and one without linear layers."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SMALL, tie_word_embeddings=False)).save_pretrained(root / "qwen3")
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **MOE, tie_word_embeddings=True)).save_pretrained(root / "moe")
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(vocab_size=160, n_embd=32, n_layer=2, n_head=4, **ends)).save_pretrained(root / "gpt2")
    return {path.name: ModelSource(str(path)) for path in root.iterdir()}


def adapted(source=TINY, seed=3, dtype=torch.float32, shaken=False, **settings):
    """A model with adapters and its weights; ``shaken``: the adapters do something already."""
    model = build(source, dtype=dtype)
    lora.inject(model, LoraConfig(**{"rank": 4, "alpha": 8} | settings), dtype=torch.float32)
    materialize(model, CPU)
    load_weights(model, source, seed)
    if shaken:
        generator = torch.Generator().manual_seed(7)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data += torch.randn(parameter.shape, generator=generator) * 0.1
    return model


def written(model, folder, source=TINY, seed=3):
    """A checkpoint's ``actor`` folder of this model."""
    save_shards(folder / "actor", model, None, 5)
    lora.save(model, folder / "actor" / "adapter", source, seed, write=True)
    return folder


def state(model):
    return dict(model.named_parameters())


def assert_same_weights(got, expected, **tolerance):
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, expected[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


# ---------------------------------------------------------------------- the model


def sequences(vocabulary=160):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocabulary, (n,), generator=generator) for n in (9, 2, 31, 17)]


def packed_loss(model, ids):
    """The mean negative log-likelihood of all tokens but the first of each sequence, packed into one row."""
    offsets = torch.tensor([0, *[len(s) for s in ids]]).cumsum(0)
    flat, positions = torch.cat(ids), torch.cat([torch.arange(len(s)) for s in ids])
    targets = torch.cat([offsets[i] + torch.arange(1, len(s)) for i, s in enumerate(ids)])
    ragged = Ragged.build(offsets, CPU, SDPA)
    loss = lambda logprobs, entropies, part: -logprobs.sum() / len(targets)  # noqa: E731
    return PackedLM(model)(flat, positions, targets - 1, flat[targets], ragged, 1.0, loss)[0]


def padded_loss(model, ids):
    """The same by plain transformers, over padded rows."""
    rows = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(s)) for s in ids], batch_first=True)
    logits = model(input_ids=rows, attention_mask=mask).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


KINDS = [
    ("qwen3", {}, "none"),
    ("qwen3", {"rslora": True, "target_modules": ["q_proj", "layers.1.mlp.up_proj"]}, "full"),
    ("qwen3", {"target_modules": r".*\.(v|o)_proj"}, "selective"),
    ("moe", {"rank": 2}, "full"),
]


@pytest.mark.parametrize(("name", "settings", "recompute"), KINDS)
def test_loss_and_gradients_are_those_of_peft(folders, name, settings, recompute):
    """Packed, on a model built without memory, with layers that are computed again, against `get_peft_model` over
    padded rows of plain transformers."""
    model = adapted(folders[name], shaken=True, **settings)
    parallelize(PackedLM(model), None, dtype=torch.float32, activation_checkpointing=recompute, compiled=False)
    cfg = LoraConfig(**{"rank": 4, "alpha": 8} | settings)
    plain = AutoModelForCausalLM.from_pretrained(folders[name].path, attn_implementation="eager")
    targets = cfg.target_modules if "target_modules" in settings else model.peft_config["default"].target_modules
    theirs = peft.get_peft_model(
        plain, peft.LoraConfig(r=cfg.rank, lora_alpha=cfg.alpha, use_rslora=cfg.rslora, target_modules=targets)
    )
    expected = {n.removeprefix("base_model.model."): p for n, p in theirs.named_parameters()}
    assert state(model).keys() == expected.keys()
    for parameter_name, parameter in state(model).items():
        if "lora_" in parameter_name:
            expected[parameter_name].data.copy_(parameter.data)
        assert torch.equal(parameter, expected[parameter_name])
        assert parameter.requires_grad == expected[parameter_name].requires_grad == ("lora_" in parameter_name)
    ids = sequences()
    ours, reference = packed_loss(model, ids), padded_loss(theirs, ids)
    assert ours.item() == pytest.approx(reference.item(), rel=1e-6)
    ours.backward()
    reference.backward()
    for parameter_name, parameter in state(model).items():
        if parameter.requires_grad:
            wanted = expected[parameter_name].grad
            assert wanted.abs().max() > 0
            assert (parameter.grad - wanted).norm() <= 1e-5 * wanted.norm(), parameter_name


def test_it_starts_as_its_base_and_as_peft_starts(folders):
    model = adapted(folders["qwen3"])
    layers = [m for m in model.modules() if isinstance(m, peft.tuners.lora.Linear)]
    assert len(layers) == 14
    for layer in layers:
        down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        assert not up.any()
        bound = layer.in_features**-0.5
        assert 0.9 * bound < down.abs().max() <= bound
        assert down.std().item() == pytest.approx(bound / 3**0.5, rel=0.2)
    plain = load_model(folders["qwen3"], dtype=torch.float32)
    assert_same_weights(dict(lora.whole_weights(model)), state(plain), rtol=0, atol=0)
    again, other = adapted(folders["qwen3"]), adapted(folders["qwen3"], seed=4)
    assert_same_weights(state(again), state(model), rtol=0, atol=0)
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert not torch.equal(state(other)[name], state(model)[name])
    assert not torch.equal(state(model)[name], state(model)[name.replace("layers.0", "layers.1")])


def test_switched_off_it_is_the_base(folders):
    model = adapted(folders["qwen3"], shaken=True)
    plain = load_model(folders["qwen3"], dtype=torch.float32)
    ids = sequences()
    with torch.no_grad():
        base = float(packed_loss(plain, ids))
        on = float(packed_loss(model, ids))
        with lora.switched_off(model):
            assert float(packed_loss(model, ids)) == base
        with pytest.raises(KeyError), lora.switched_off(model):
            raise KeyError
        assert float(packed_loss(model, ids)) == on
    assert abs(on - base) > 1e-3
    assert all(p.requires_grad == ("lora_" in name) for name, p in state(model).items())
    with pytest.raises(ModelError, match="no adapter"), lora.switched_off(plain):
        pass


def test_frozen_weights_are_kept_in_the_compute_type():
    model = adapted(dtype=torch.bfloat16)
    assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {
        (torch.bfloat16, False),
        (torch.float32, True),
    }


def test_the_optimizer_steps_adapters_alone():
    model = adapted()
    optimizer = build_optimizer(model, Config(command="sft").train.optim)
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    assert stepped == {p for name, p in state(model).items() if "lora_" in name}


def test_flops():
    """A frozen weight costs 4 a token, a trained one 6, and attention is as without adapters."""
    model, plain = adapted(), create_builtin("tiny", 0)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in plain.parameters())
    lengths = [7, 30]
    attention_alone = model_flops(plain).training(lengths) - 6 * frozen * 37
    assert attention_alone > 0
    assert model_flops(model).training(lengths) == 4 * frozen * 37 + 6 * trained * 37 + attention_alone
    assert model_flops(model).forward == model_flops(plain).forward + 2 * trained


# ---------------------------------------------------------------------- what cannot be adapted


REFUSED = [
    ("tiny", "nothing_such", "not found in the base model"),
    ("tiny", ["nothing_such"], "not found in the base model"),
    ("tiny", ["q_proj", "z_proj"], "no layer z_proj"),
    ("tiny", ["lm_head"], "lm_head is an embedding or the output head"),
    ("tiny", ["q_proj", "embed_tokens"], "embed_tokens is an embedding or the output head"),
    ("tiny", ["norm"], "not supported"),
    ("qwen3", ["lm_head"], "lm_head is an embedding or the output head"),
    ("moe", ["gate_proj", "up_proj", "down_proj"], "is a Qwen3MoeExperts; linear layers alone"),
    ("moe", ["gate_proj"], "up_proj"),
    ("gpt2", "all-linear", "train.lora.target_modules = 'all-linear'"),
    ("gpt2", ["c_attn"], "is a Conv1D; linear layers alone"),
]


@pytest.mark.parametrize(("name", "targets", "message"), REFUSED)
def test_targets_that_cannot_be_adapted(folders, name, targets, message):
    source = folders.get(name, TINY)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        lora.inject(build(source, dtype=torch.float32), LoraConfig(rank=4, target_modules=targets), dtype=torch.float32)
    assert "train.lora.target_modules" in error.value.message
    assert name == "gpt2" or "q_proj" in error.value.hint


def test_experts_are_left_alone(folders):
    model = adapted(folders["moe"])
    assert sorted(model.peft_config["default"].target_modules) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    expected = state(load_model(folders["moe"], dtype=torch.float32))
    assert_same_weights(dict(lora.whole_weights(model)), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "greater than 0"),
        ({"rank": 4, "alpha": 0}, "greater than 0"),
        ({"rank": 4, "target_modules": []}, "is empty"),
        ({"rank": 4, "target_modules": ""}, "is empty"),
        ({"rank": 4, "target_modules": ["q_proj", ""]}, "is empty"),
        ({"rank": 4, "target_modules": "(q_proj"}, "no regular expression"),
        ({"rank": 4, "dropout": 0.1}, "Extra inputs"),
        ({"alpha": 16}, "train.lora.alpha has no effect without train.lora.rank"),
        ({"rslora": True}, "train.lora.rslora has no effect"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValidationError, match=message):
        Config.model_validate({"command": "sft", "train": {"lora": settings}})


def test_a_run_is_refused_before_it_exists():
    def cfg(**more):
        return Config.model_validate({"train": {"lora": {"rank": 4, "target_modules": ["z_proj"]}}, **more})

    for command in ("sft", "rl"):
        with pytest.raises(ConfigError, match="z_proj"):
            open_model(cfg(command=command))
    for other in (cfg(command="generate"), cfg(command="rl", rollout={"only": True})):
        assert open_model(other)[0] == TINY  # nothing is trained


# ---------------------------------------------------------------------- merging and files


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.floats(0.1, 4.0), st.data())
def test_a_part_of_the_merged_weight_is_the_merged_part(rows, columns, rank, scale, data):
    generator = torch.Generator().manual_seed(rows * 100 + columns)
    weight = torch.randn(rows, columns, generator=generator)
    update = lora.LowRank(
        torch.randn(rank, columns, generator=generator), torch.randn(rows, rank, generator=generator), scale
    )
    merged = update.added_to(weight)
    torch.testing.assert_close(merged, weight + scale * update.up @ update.down)
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first, rows))
    part = update.added_to(weight[first:last], slice(first, last))
    torch.testing.assert_close(part, merged[first:last])
    half = update.added_to(weight.bfloat16())
    assert torch.equal(half, (weight.bfloat16().float() + scale * update.up @ update.down).bfloat16())


def test_merged_weights_are_those_of_peft_and_nothing_changes(folders, tmp_path):
    model = adapted(folders["qwen3"], shaken=True, rslora=True)
    before = {name: p.detach().clone() for name, p in state(model).items()}
    merged = dict(lora.whole_weights(model))
    assert_same_weights(state(model), before, rtol=0, atol=0)
    folder = written(model, tmp_path, folders["qwen3"]) / "actor" / "adapter"
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folders["qwen3"].path), folder)
    assert_same_weights(merged, state(theirs.merge_and_unload()), rtol=1e-6, atol=1e-7)
    plain = state(load_model(folders["qwen3"], dtype=torch.float32))
    changed = [name for name, weight in merged.items() if not weight.equal(plain[name])]
    assert len(changed) == 14


def test_a_checkpoint_holds_what_is_trained(tmp_path):
    model = adapted(shaken=True)
    written(model, tmp_path)
    other = adapted(seed=9)
    optimizer = build_optimizer(other, Config(command="sft").train.optim)
    save_shards(tmp_path / "second", other, optimizer, 1)
    saver.load_shards(tmp_path / "actor", other, None)
    trained = [n for n, p in state(model).items() if p.requires_grad]
    assert all(torch.equal(state(other)[n], state(model)[n]) for n in trained)
    size = sum(f.stat().st_size for f in (tmp_path / "actor" / "model").iterdir())
    assert size < 3 * 4 * sum(state(model)[n].numel() for n in trained)
    adapter = load_file(tmp_path / "actor" / "adapter" / "adapter_model.safetensors")
    assert len(adapter) == len(trained)
    text = json.loads((tmp_path / "actor" / "adapter" / "adapter_config.json").read_text())
    assert (text["r"], text["lora_alpha"], text["peft_type"], text["task_type"]) == (4, 8, "LORA", "CAUSAL_LM")
    assert text["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def test_what_is_loaded_is_base_and_adapter(tmp_path):
    """By the engine (whole, on the CPU) and by a trainer that starts there; a built-in base keeps its seed."""
    model = adapted(shaken=True)
    merged = dict(lora.whole_weights(model))
    source = locate(str(written(model, tmp_path)))
    assert (source.path, source.seed, source.shards) == ("builtin:tiny", 3, None)
    assert source.adapters == (str(tmp_path / "actor" / "adapter"),)
    assert_same_weights(state(load_model(source, dtype=torch.float32, seed=99)), merged, rtol=0, atol=0)
    trainer = build(source, dtype=torch.float32)
    materialize(trainer, CPU)
    load_weights(trainer, source, 99)
    assert_same_weights(state(trainer), merged, rtol=0, atol=0)
    assert locate(str(tmp_path / "actor" / "adapter")) == source


def test_weights_in_bfloat16_are_rounded_once_with_their_adapter(tmp_path, monkeypatch):
    """As `merge-ckpt` rounds them: added to a rounded base, a quarter of them came out otherwise."""
    monkeypatch.setattr(weights, "_chunks", partial(weights._chunks, chunk_bytes=1 << 20))
    model = adapted(shaken=True)
    merged = {name: weight.bfloat16() for name, weight in lora.whole_weights(model)}
    source = locate(str(written(model, tmp_path)))
    assert_same_weights(state(load_model(source, dtype=torch.bfloat16)), merged, rtol=0, atol=0)


def test_an_adapter_on_an_adapter(tmp_path, folders):
    first = adapted(folders["qwen3"], shaken=True)
    source = locate(str(written(first, tmp_path / "first", folders["qwen3"])))
    second = adapted(source, shaken=True, rank=2, target_modules=["q_proj"])
    both = dict(lora.whole_weights(second))
    found = locate(str(written(second, tmp_path / "second", source)))
    assert found.path == folders["qwen3"].path
    assert found.adapters == (str(tmp_path / "first/actor/adapter"), str(tmp_path / "second/actor/adapter"))
    assert_same_weights(state(load_model(found, dtype=torch.float32)), both, rtol=0, atol=0)
    with lora.switched_off(second), torch.no_grad():  # the reference of a second run is what it started from
        off = float(packed_loss(second, sequences()))
    assert off == pytest.approx(packed_loss(first, sequences()).item(), rel=1e-6)


def test_a_run_of_all_weights_on_an_adapter_and_back(tmp_path):
    """The shards of a full checkpoint under an adapter."""
    full = create_builtin("tiny", 5)
    save_shards(tmp_path / "full" / "actor", full, None, 1)
    save_text_side(TINY, tmp_path / "full" / "actor" / "huggingface")
    source = locate(str(tmp_path / "full"))
    model = adapted(source, shaken=True)
    found = locate(str(written(model, tmp_path / "lora", source)))
    assert found.shards == source.shards
    expected = dict(lora.whole_weights(model))
    assert_same_weights(state(load_model(found, dtype=torch.float32)), expected, rtol=0, atol=0)


@pytest.mark.parametrize("first", ["full", "lora"])
def test_a_base_that_was_trained_again_is_noticed(tmp_path, first):
    def train_base(seed):
        root = tmp_path / "base"
        folder = checkpoint.begin(root, 1)
        if first == "full":
            save_shards(folder / "actor", create_builtin("tiny", seed), None, 1)
            save_text_side(TINY, folder / "actor" / "huggingface")
        else:
            written(adapted(seed=seed, shaken=True), folder, seed=seed)
        return locate(str(checkpoint.commit(folder, 1, {}, keep=1).path))

    source = train_base(1)
    written(adapted(source), tmp_path / "lora", source)
    assert locate(str(tmp_path / "lora")).path == source.path
    train_base(2)
    with pytest.raises(ModelError, match=r"other weights than those that are now in .*base/global_step_1"):
        locate(str(tmp_path / "lora"))


def test_export_and_merge_ckpt(tmp_path):
    root = tmp_path / "run" / "checkpoints"
    model = adapted(shaken=True)
    merged = dict(lora.whole_weights(model))
    done = checkpoint.commit(written(model, checkpoint.begin(root, 5)), 5, {}, keep=1)
    save_whole(locate(str(done.path)), tmp_path / "whole")
    out = merge_ckpt(str(tmp_path / "run"), str(tmp_path / "merged"))
    for folder in (tmp_path / "whole", out):
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert_same_weights(state(loaded), merged, rtol=0, atol=0)
    only = merge_ckpt(str(tmp_path / "run"), str(tmp_path / "adapter"), adapter=True)
    base = create_builtin("tiny", 3)
    theirs = peft.PeftModel.from_pretrained(base, only).merge_and_unload()
    assert_same_weights(state(theirs), merged, rtol=1e-6, atol=1e-7)
    assert_same_weights(state(load_model(locate(str(only)), dtype=torch.float32)), merged, rtol=0, atol=0)
    assert (only / "tokenizer.json").is_file()
    with pytest.raises(Exception, match="output folder exists"):
        merge_ckpt(str(tmp_path / "run"), str(only), adapter=True)
    merge_ckpt(str(tmp_path / "run"), str(only), adapter=True, overwrite=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_merged_weights_are_rounded_once(tmp_path, dtype):
    """Not the base, and then the sum: an update smaller than half a step of the base would be lost, or counted
    twice."""
    model = adapted(shaken=True)
    merged = {name: weight.to(getattr(torch, dtype)) for name, weight in lora.whole_weights(model)}
    save_whole(locate(str(written(model, tmp_path / "run"))), tmp_path / "out", dtype=dtype)
    assert_same_weights(state(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), merged, rtol=0, atol=0)


def test_a_checkpoint_without_adapter_has_none_to_keep(tmp_path):
    root = tmp_path / "run" / "checkpoints"
    folder = checkpoint.begin(root, 5)
    save_shards(folder / "actor", create_builtin("tiny", 0), None, 5)
    save_text_side(TINY, folder / "actor" / "huggingface")
    checkpoint.commit(folder, 5, {}, keep=1)
    with pytest.raises(ConfigError, match="no adapter") as error:
        merge_ckpt(str(tmp_path / "run"), str(tmp_path / "out"), adapter=True)
    assert "without --adapter" in error.value.hint
    assert not (tmp_path / "out").exists()


def break_base(folder):
    (folder / "base.json").write_text("{")


def break_base_fields(folder):
    (folder / "base.json").write_text('{"path": "builtin:tiny", "manifests": {}}')


def remove_base(folder):
    base = json.loads((folder / "base.json").read_text())
    (folder / "base.json").write_text(json.dumps(base | {"path": "/gone/model"}))


def break_weights(folder):
    (folder / "adapter_model.safetensors").write_bytes(b"x")


def break_config(folder):
    (folder / "adapter_config.json").write_text("{}")


def other_model(folder):
    tensors = load_file(folder / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_base, "base.json cannot be read"),
        (break_base_fields, "base.json cannot be read"),
        (remove_base, "weights that are gone: /gone/model"),
        (break_weights, "cannot read the adapter"),
        (break_config, "cannot read the adapter"),
        (other_model, "of another model: model.layers.0.self_attn.q_proj.weight does not fit"),
    ],
)
def test_a_damaged_adapter(tmp_path, damage, message):
    damage(written(adapted(), tmp_path) / "actor" / "adapter")
    with pytest.raises(ModelError, match=message):
        load_model(locate(str(tmp_path)), dtype=torch.float32)
