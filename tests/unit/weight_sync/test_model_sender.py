"""What a trainer's process hands out of its model: the weights of the moment, in the form that engines take."""

import os

import pytest
import torch

from posttrain.config import LoraConfig
from posttrain.models import lora, vision
from posttrain.models.builtin import create_builtin
from posttrain.models.fp8 import DTYPE, layers_of
from posttrain.models.fp8_layers import SCALE
from posttrain.models.weights import materialize
from posttrain.weight_sync.buckets import CPU, BucketReader
from posttrain.weight_sync.model_sender import ModelSender

LARGE = 1 << 30


def buckets(sender, transport="host", **how):
    """Copies of all buckets of one update."""
    sender.open(transport, LARGE, **how)
    found, slot = [], 0
    while (bucket := sender.next(slot)) is not None:
        found.append({name: tensor.clone() for name, tensor in BucketReader().tensors(bucket)} if bucket.path else {})
        slot ^= 1
    assert sender.close() == 0.0  # no GPU is in use
    return found


def update(sender, **how):
    return {name: tensor for bucket in buckets(sender, **how) for name, tensor in bucket.items()}


@pytest.fixture(scope="module")
def model():
    return create_builtin("tiny", 0)


def test_each_update_has_the_weights_of_its_time_in_the_type_of_engines(model):
    sender = ModelSender(model, torch.bfloat16, CPU)
    for _ in range(2):
        found = update(sender)
        assert found.keys() == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():
            assert torch.equal(found[name], parameter.detach().bfloat16())
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(2.0)


def test_a_small_model_has_several_buckets_and_their_memory_ends_with_the_update(model):
    sender = ModelSender(model, torch.float32, CPU)
    assert len(buckets(sender)) > 1
    sender.open("host", LARGE)
    first, second = sender.next(0), sender.next(1)
    assert first.path != second.path
    sender.close()
    assert not os.path.exists(first.path)
    assert not os.path.exists(second.path)
    assert sender.close() == 0.0  # again, where an update has failed


def test_a_rank_that_nobody_reads_draws_the_same_buckets_without_their_bytes(model):
    sender = ModelSender(model, torch.float32, CPU)
    assert buckets(sender, None) == [{} for _ in buckets(sender)]


def test_adapters_are_merged_into_what_is_handed_out():
    model = create_builtin("tiny", 0)
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    lora.inject(model, LoraConfig(rank=2, alpha=4), dtype=torch.float32)
    materialize(model, CPU)
    layer = model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(0.0) if "lora_" in name else parameter.copy_(base[lora.base_name(name)])
        layer.lora_A["default"].weight.copy_(torch.arange(2.0 * model.config.hidden_size).view(2, -1))
        layer.lora_B["default"].weight.fill_(1.0)
    found = update(ModelSender(model, torch.float32, CPU))
    changed = "model.layers.0.self_attn.q_proj.weight"
    assert found.keys() == base.keys()
    assert [name for name in base if not torch.equal(found[name], base[name])] == [changed]
    added = 2.0 * layer.lora_A["default"].weight.detach().sum(0)  # alpha / rank, and both rows for each output
    torch.testing.assert_close(found[changed], base[changed] + added)


@pytest.mark.parametrize("tower_frozen", [True, False])
def test_a_frozen_tower_is_left_out_where_engines_have_it(tower_frozen):
    model = create_builtin("tiny-vision", 0)
    sender = ModelSender(model, torch.float32, CPU, tower_frozen=tower_frozen)
    whole, rest = update(sender), update(sender, frozen=False)
    of_tower = {name for name in whole if name.startswith(vision.TOWER)}
    assert of_tower
    assert whole.keys() == dict(model.named_parameters()).keys()
    assert whole.keys() - rest.keys() == (of_tower if tower_frozen else set())


def test_quantized_layers_come_with_their_scales(model):
    layers = layers_of(model, stored=False)
    found = update(ModelSender(model, torch.float32, CPU, fp8=layers))
    assert {name for name, tensor in found.items() if tensor.dtype == DTYPE} == layers.names
    assert {name for name in found if name.endswith(SCALE)} == {name + SCALE for name in layers.names}
