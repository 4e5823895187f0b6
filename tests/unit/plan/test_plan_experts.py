"""What the plan says of mixtures of experts, beside models that were built and tokens that were exchanged."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from posttrain.config import LoraConfig, RolloutConfig, TrainConfig
from posttrain.models import lora
from posttrain.models.builtin import builtin_config
from posttrain.plan import activations
from posttrain.plan.known import known_models
from posttrain.plan.memory import EngineMemory, Trainer
from posttrain.plan.shape import shape_of
from posttrain.plan.speed import _collective_bytes, routed_bytes
from posttrain.train import expert_parallel, parallel
from tests.helpers.ports import free_ports
from tests.unit.plan.test_plan_activations import CONFIGS, Policy, saved_bytes

BIG = "Qwen/Qwen3-30B-A3B"
TOKENS = 96


def config_of(name):
    return Qwen3MoeConfig(**known_models()[name]) if name == BIG else builtin_config(name)


def built(name):
    config = config_of(name)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def trainer(shape, size=1, world=4, **train):
    return Trainer("actor", shape, TrainConfig(expert_parallel=size, **train), world=world, tokens=1000)


@pytest.mark.parametrize("name", [BIG, "tiny-moe"])
def test_experts_are_those_of_the_model(name):
    model, shape = built(name), shape_of(config_of(name).to_dict(), name)
    sizes = {key: parameter.numel() for key, parameter in model.named_parameters()}
    assert shape.parameters == sum(sizes.values())
    of_experts = sum(size for key, size in sizes.items() if ".experts." in key)
    assert shape.layers * shape.expert_parameters == of_experts
    for workers in (2, 4):
        gathered = sum(size // workers if ".experts." in key else size for key, size in sizes.items())
        assert trainer(shape, workers).gathered == gathered
    if name == BIG:
        assert round(shape.flops().forward / 2e9, 2) == 3.04  # "A3B", without the embedding


def test_adapters_beside_all_linear_layers_leave_out_routers_and_experts():
    cfg = LoraConfig(rank=4)
    model = built("tiny-moe")
    lora.inject(model, cfg, dtype=torch.float32)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert shape_of(config_of("tiny-moe").to_dict(), "tiny-moe").lora_parameters(cfg) == trained


@pytest.fixture
def alone():
    """A process group of one."""
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def shared_out(alone, monkeypatch):
    """Layers whose experts are shared out among a group of one: all tokens go the way of those that go elsewhere."""
    mesh = init_device_mesh("cpu", (1,))
    grid = init_device_mesh("cpu", (1, 1), mesh_dim_names=("shard", "expert"))
    apply = parallel.parallelize

    def parallelize(lm, _, **how):
        apply(lm, mesh, experts=grid, **how)
        lm.unshard()
        return lm

    monkeypatch.setattr(parallel, "parallelize", parallelize)


@pytest.mark.slow
def test_what_shared_out_experts_keep_is_counted(shared_out, monkeypatch):
    """Weights that FSDP gathers are kept too: what the second half of twice as many tokens adds is without them."""
    config, policy = CONFIGS["qwen3_moe"], Policy("none", compiled=False, shared_out=True)

    def of_layer(tokens):
        three, two = (saved_bytes(config(layers), policy, monkeypatch, tokens) for layers in (3, 2))
        return three - two

    shape = shape_of(config(2).to_dict(), "a mixture")
    assert of_layer(2 * TOKENS) - of_layer(TOKENS) == activations.of_layer(shape, policy) * TOKENS


@pytest.mark.parametrize(("checkpointing", "passes"), [("none", 2), ("selective", 3), ("full", 3)])
def test_exchanges_send_the_bytes_that_are_counted(shared_out, checkpointing, passes, monkeypatch):
    sent = []
    exchange = expert_parallel._all_to_all

    def counted(x, *args):
        sent.append(x.numel() * x.element_size())
        return exchange(x, *args)

    monkeypatch.setattr(expert_parallel, "_all_to_all", counted)
    config = CONFIGS["qwen3_moe"](2)
    saved_bytes(config, Policy(checkpointing, compiled=False, shared_out=True), monkeypatch, TOKENS)
    shape = shape_of(config.to_dict(), "a mixture")
    half = routed_bytes(trainer(shape, 2), TOKENS, passes)  # of two workers one has half of the experts
    assert half == sum(sent) / 2
    assert routed_bytes(trainer(shape), TOKENS, passes) == 0


def test_expert_parallel_takes_memory_and_traffic_off_the_weights():
    shape = shape_of(known_models()[BIG], BIG)
    alone, shared = trainer(shape, world=8), trainer(shape, 8, world=8)
    assert alone.state() == shared.state()
    layer = 2 * shape.expert_parameters  # bytes
    assert alone.update()["gathered weights"] - shared.update()["gathered weights"] == 2 * layer * 7 / 8
    experts = shape.layers * shape.expert_parameters
    sent = (2 * 2 + 4) * experts * 7 / 8  # gathered twice in two bytes, and gradients once in four
    assert _collective_bytes(alone, 1) - _collective_bytes(shared, 1) == pytest.approx(sent)


def test_a_decoding_step_reads_the_experts_that_its_tokens_go_to():
    shape = shape_of(known_models()[BIG], BIG)
    engine = EngineMemory(shape, RolloutConfig(), 2, 140e9, "vllm")
    one, many = engine.read_weights(1), engine.read_weights(512)
    assert one == pytest.approx(2 * (shape.parameters - shape.layers * shape.expert_parameters * 120 / 128))
    assert many == pytest.approx(engine.weights, rel=1e-3)
