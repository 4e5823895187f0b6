"""`merge-ckpt --check`: what a checkpoint says of its model, and a merged folder that is another one."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from posttrain import merge_ckpt
from posttrain.config import LoraConfig
from posttrain.core.errors import ConfigError, ModelError, RunError
from posttrain.models import lora
from posttrain.models.builtin import create_builtin
from posttrain.models.export import save_text_side
from posttrain.models.load import ModelSource, build
from posttrain.models.weights import load_weights, materialize
from posttrain.train import checkpoint
from posttrain.train.model import PackedValues
from tests.helpers.saved import save_shards

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TINY = ModelSource("builtin:tiny")
IDS = torch.randint(0, 500, (2, 30), generator=torch.Generator().manual_seed(0))


def loud(seed=3):
    """The built-in model with larger weights, so that its log-probabilities depend on all of them."""
    model = create_builtin("tiny", seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5.0)
    return model


def plainly(model):
    """Log-probabilities of ``IDS`` but the first of each."""
    with torch.no_grad():
        logprobs = model(input_ids=IDS).logits[:, :-1].log_softmax(-1)
    return logprobs.gather(-1, IDS[:, 1:, None])[..., 0].tolist()


def checkpointed(root, model, said, *, reward_model=False):
    folder = checkpoint.begin(root / "checkpoints", 1)
    save_shards(folder / "actor", model, None, 1)
    save_text_side(TINY, folder / "actor" / "huggingface", reward_model=reward_model)
    checkpoint.commit(folder, 1, {} if said is None else {checkpoint.PROBE: said}, keep=1)
    return str(root)


def says(model, dtype="float32", **more):
    return {"ids": IDS.tolist(), "logprobs": plainly(model), "dtype": dtype} | more


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_good_merge_passes_in_every_type(tmp_path, capsys, dtype):
    run = checkpointed(tmp_path / "run", loud(), says(loud()))
    out = merge_ckpt.run(run, str(tmp_path / "out"), check=True, dtype=dtype)
    assert (out / "model.safetensors").is_file()
    told = capsys.readouterr().err
    assert "checked: 29 likelier log-probabilities of the trainer (float32), mean |difference| " in told
    assert "largest " in told


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_another_model_is_refused_and_nothing_is_left(tmp_path, dtype):
    """One of its matrices is the neighbour's."""
    wrong = loud()
    layers = wrong.model.layers
    with torch.no_grad():
        layers[0].mlp.down_proj.weight.copy_(layers[1].mlp.down_proj.weight)
    run = checkpointed(tmp_path / "run", wrong, says(loud()))
    with pytest.raises(
        RunError, match=r"not the one that was trained: of 29 likelier log-probabilities, mean"
    ) as error:
        merge_ckpt.run(run, str(tmp_path / "out"), check=True, dtype=dtype)
    assert error.value.exit_code == 1
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


def test_what_was_there_stays_where_the_new_one_is_wrong(tmp_path):
    before = merge_ckpt.run(checkpointed(tmp_path / "a", loud(), None), str(tmp_path / "out"))
    content = (before / "model.safetensors").read_bytes()
    wrong = checkpointed(tmp_path / "b", loud(4), says(loud(3)))
    with pytest.raises(RunError, match="not the one that was trained"):
        merge_ckpt.run(wrong, str(tmp_path / "out"), check=True, overwrite=True)
    assert (before / "model.safetensors").read_bytes() == content


@pytest.mark.parametrize(("trainer", "gap", "passes"), [
    ("float32", 0.0005, True), ("float32", 0.002, False), ("bfloat16", 0.05, True), ("bfloat16", 0.2, False),
])  # fmt: skip
def test_how_far_off_is_allowed(tmp_path, trainer, gap, passes):
    moved = [[x + gap for x in row] for row in plainly(loud())]
    run = checkpointed(tmp_path / "run", loud(), says(loud(), trainer, logprobs=moved))
    if passes:
        merge_ckpt.run(run, str(tmp_path / "out"), check=True)
        return
    with pytest.raises(RunError, match="allowed is a mean of"):
        merge_ckpt.run(run, str(tmp_path / "out"), check=True)
    assert not (tmp_path / "out").exists()


def test_adapters_go_through_peft(tmp_path):
    model = build(TINY, dtype=torch.float32)
    lora.inject(model, LoraConfig(rank=2, alpha=64), dtype=torch.float32)
    materialize(model, torch.device("cpu"))
    load_weights(model, TINY, 3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.3, generator=generator)
    merged = create_builtin("tiny", 3)
    merged.load_state_dict(dict(lora.whole_weights(model)), strict=False)
    for place, said in (("right", merged), ("wrong", create_builtin("tiny", 3))):
        folder = checkpoint.begin(tmp_path / place / "checkpoints", 1)
        save_shards(folder / "actor", model, None, 1)
        lora.save(model, folder / "actor" / "adapter", TINY, 3, write=True)
        save_text_side(TINY, folder / "actor" / "huggingface")
        checkpoint.commit(folder, 1, {checkpoint.PROBE: says(said)}, keep=1)
    for adapter in (True, False):
        out = str(tmp_path / f"out{adapter}")
        with pytest.raises(RunError, match="not the one that was trained"):
            merge_ckpt.run(str(tmp_path / "wrong"), out, check=True, adapter=adapter)
        merge_ckpt.run(str(tmp_path / "right"), out, check=True, adapter=adapter)


@pytest.mark.parametrize(("off", "passes"), [(0.0, True), (0.01, False)])
def test_a_reward_model_says_its_scores(tmp_path, capsys, off, passes):
    lm = PackedValues(build(TINY, dtype=torch.float32))
    materialize(lm, torch.device("cpu"))
    load_weights(lm.model, TINY, 3, leave=frozenset({PackedValues.HEAD}))
    with torch.no_grad():
        lm.model.get_output_embeddings().weight.normal_(generator=torch.Generator().manual_seed(0))
    silent = merge_ckpt.run(checkpointed(tmp_path / "a", lm.model, None, reward_model=True), str(tmp_path / "first"))
    with torch.no_grad():
        model = AutoModelForSequenceClassification.from_pretrained(silent)
        scores = [model(input_ids=ids[None]).logits.item() + off for ids in IDS]
    said = {"ids": IDS.tolist(), "scores": scores, "dtype": "float32"}
    run = checkpointed(tmp_path / "b", lm.model, said, reward_model=True)
    if passes:
        merge_ckpt.run(run, str(tmp_path / "out"), check=True)
        assert "checked: 2 scores of the trainer" in capsys.readouterr().err
        return
    with pytest.raises(RunError, match="of 2 scores"):
        merge_ckpt.run(run, str(tmp_path / "out"), check=True)


def test_what_cannot_be_checked_is_said_before_anything_is_written(tmp_path):
    run = checkpointed(tmp_path / "run", create_builtin("tiny", 3), None)
    with pytest.raises(ConfigError, match=r"has no probe\.json") as error:
        merge_ckpt.run(run, str(tmp_path / "out"), check=True)
    assert "without --check" in error.value.hint
    actor = tmp_path / "verl" / "global_step_1" / "actor"
    (actor / "huggingface").mkdir(parents=True)
    (actor / "huggingface" / "config.json").write_text("{}")
    torch.save({}, actor / "model_world_size_1_rank_0.pt")
    with pytest.raises(ConfigError, match=r"has no probe\.json"):
        merge_ckpt.run(str(actor), str(tmp_path / "out"), check=True)
    broken = checkpointed(tmp_path / "broken", create_builtin("tiny", 3), {"ids": []})
    with pytest.raises(ModelError, match="cannot be read"):
        merge_ckpt.run(broken, str(tmp_path / "out"), check=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", [{"dtype": "float32"}, {"max_shard_size": "5GB"}])
def test_an_adapter_has_no_other_type_or_files(tmp_path, option):
    with pytest.raises(ConfigError, match="an adapter is written as it was trained") as error:
        merge_ckpt.run("nowhere", str(tmp_path / "out"), adapter=True, **option)
    assert "leave one of them out" in error.value.hint


def test_a_critic_is_not_merged(tmp_path):
    folder = checkpoint.begin(tmp_path / "checkpoints", 1)
    for name in ("actor", "critic"):
        save_shards(folder / name, create_builtin("tiny", 3), None, 1)
    save_text_side(TINY, folder / "actor" / "huggingface")
    done = checkpoint.commit(folder, 1, {}, keep=1).path
    with pytest.raises(Exception, match="is a critic, which a run keeps to go on from") as error:
        merge_ckpt.run(str(done / "critic"), str(tmp_path / "out"))
    assert str(done) in error.value.hint
    found = AutoModelForCausalLM.from_pretrained(merge_ckpt.run(str(done), str(tmp_path / "out")))
    assert torch.equal(found.model.norm.weight, create_builtin("tiny", 3).model.norm.weight)
