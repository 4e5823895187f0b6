"""Optimizers, their state in checkpoints, learning-rate schedules."""

import copy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from posttrain.config import Config, OptimConfig
from posttrain.core.errors import ConfigError
from posttrain.runs import preflight as startup
from posttrain.train import saver
from posttrain.train.optim import (
    build_optimizer,
    clip_gradients,
    dequantized,
    init_state,
    is_quantized,
    quantize,
    seed_rounding,
    set_learning_rate,
)
from posttrain.train.schedule import learning_rate
from tests.helpers.saved import save_shards

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:OptimState8bit does not")

EIGHT_BIT = OptimConfig(name="adamw_8bit", lr=1e-2)
ROUNDED = OptimConfig(stochastic_rounding=True, lr=1e-2)


def config(**train: object) -> Config:
    return Config.model_validate({"command": "sft", "train": train})


# ---------------------------------------------------------------------- schedules


def rates(total: int, **options: object) -> list[float]:
    return [learning_rate(OptimConfig.model_validate({"lr": 1.0, **options}), step, total) for step in range(total)]


def test_warm_up_by_steps_or_by_share() -> None:
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(8, warmup_ratio=0.5, schedule="linear") == rates(8, warmup_steps=4, schedule="linear")
    assert rates(3, warmup_steps=0) == rates(3) == [1.0] * 3
    assert rates(2, warmup_steps=4) == [0.25, 0.5]


def test_schedules_end_where_they_should() -> None:
    assert rates(5, warmup_steps=1, schedule="linear") == [1.0, 1.0, 0.75, 0.5, 0.25]
    cosine = rates(101, warmup_steps=1, schedule="cosine", min_lr_ratio=0.1)
    assert cosine[51] == pytest.approx(0.55)
    assert learning_rate(OptimConfig(lr=1.0, schedule="cosine", min_lr_ratio=0.1), 200, 100) == pytest.approx(0.1)


# ---------------------------------------------------------------------- refused before anything starts


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValidationError, match="warmup_ratio exclude each other"):
        config(optim={"warmup_steps": 5, "warmup_ratio": 0.1})
    with pytest.raises(ValidationError, match=r"it needs train\.param_dtype = 'bfloat16'"):
        config(optim={"stochastic_rounding": True})
    assert config(optim={"stochastic_rounding": True}, param_dtype="bfloat16").train.optim.needs_torchao
    assert not config(param_dtype="bfloat16").train.optim.needs_torchao


def test_a_missing_package_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "find_spec", lambda name: None)
    for cfg in (
        config(optim={"name": "adamw_8bit"}),
        config(optim={"stochastic_rounding": True}, param_dtype="bfloat16"),
    ):
        with pytest.raises(ConfigError, match=r"^train\.optim\..* needs the package torchao") as error:
            startup.check_machine(cfg)
        assert error.value.hint == "pip install 'posttrain[torchao]'"
    startup.check_machine(config())


# ---------------------------------------------------------------------- optimizers


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64, dtype=torch.float32)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        ids = torch.randint(64, (32,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(ids).float().square().mean().backward()
        seed_rounding(7, step, 0)
        optimizer.step()


def test_only_matrices_decay() -> None:
    model = network()
    groups = build_optimizer(model, OptimConfig(weight_decay=0.1)).param_groups
    decay = {id(p): g["weight_decay"] for g in groups for p in g["params"]}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        "0.weight": 0.0,
        "1.weight": 0.1,
        "1.bias": 0.0,
    }


def test_biases_of_experts_do_not_decay() -> None:
    experts = nn.Module()
    experts.gate_up_proj = nn.Parameter(torch.zeros(4, 8, 8))
    experts.gate_up_proj_bias = nn.Parameter(torch.zeros(4, 8))  # as gpt-oss has them
    groups = build_optimizer(experts, OptimConfig(weight_decay=0.1)).param_groups
    assert {g["weight_decay"]: [p.shape[1:] for p in g["params"]] for g in groups} == {0.1: [(8, 8)], 0.0: [(8,)]}


def test_state_before_the_first_step_is_that_of_a_fresh_optimizer() -> None:
    model = network()
    expected = copy.deepcopy(model)
    optimizer = build_optimizer(model, OptimConfig(lr=1e-2, weight_decay=0.1))
    init_state(optimizer)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))
    assert all(not t.any() for state in optimizer.state.values() for t in state.values())
    train(model, optimizer, range(3))
    train(expected, build_optimizer(expected, OptimConfig(lr=1e-2, weight_decay=0.1)), range(3))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))
    # Where steps were taken, nothing changes.
    before = copy.deepcopy(optimizer.state_dict())
    init_state(optimizer)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


def test_rounding_is_seeded_by_step_and_shard() -> None:
    def draw(*key: int) -> int:
        seed_rounding(*key)
        return int(torch.randint(1 << 60, ()))

    assert draw(0, 5, 1) == draw(0, 5, 1)
    assert len({draw(seed, step, shard) for seed in (-1, 0, 1) for step in range(3) for shard in range(3)}) == 27


@needs_torchao
@settings(deadline=None)  # the first imports torchao
@given(st.integers(0, 2**32), st.sampled_from([1e-16, 1e-4, 1.0, 1e6]), st.booleans())
def test_quantizing_again_changes_nothing(seed: int, scale: float, signed: bool) -> None:
    from torchao.optim.subclass_8bit import OptimState8bit

    values = torch.randn(8, 256, generator=torch.Generator().manual_seed(seed)) * scale
    values[0] = 0.0
    values[1] = -values[1].abs()  # the largest of its block is negative
    values[2, 1:] = 0.0
    state, again = (OptimState8bit.zeros((8, 256), signed) for _ in range(2))
    assert is_quantized(state)
    assert torch.equal(dequantized(state), torch.zeros(8, 256))
    quantize(state, values if signed else values.abs())
    quantize(again, dequantized(state))
    assert torch.equal(again.codes, state.codes)
    assert torch.equal(again.scale, state.scale)


@needs_torchao
@pytest.mark.slow  # torchao compiles its step: about 20 s
@pytest.mark.parametrize(
    ("cfg", "dtype"),
    [(EIGHT_BIT, torch.float32), (EIGHT_BIT, torch.bfloat16), (ROUNDED, torch.bfloat16)],
    ids=["8bit", "8bit-bfloat16", "rounded"],
)
def test_a_run_that_goes_on_is_the_same_to_the_bit(cfg: OptimConfig, dtype: torch.dtype, tmp_path: Path) -> None:
    model = network(dtype)
    optimizer = build_optimizer(model, cfg)
    train(model, optimizer, range(3))
    save_shards(tmp_path, model, optimizer, 3)
    train(model, optimizer, range(3, 6))
    again = network(dtype)
    its_optimizer = build_optimizer(again, cfg)
    assert saver.load_shards(tmp_path, again, its_optimizer) == 3
    assert any(is_quantized(t) for s in its_optimizer.state.values() for t in s.values()) == (cfg is EIGHT_BIT)
    train(again, its_optimizer, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


@needs_torchao
@pytest.mark.slow
def test_rounding_keeps_steps_that_are_too_small_for_bfloat16() -> None:
    """Steps of 1e-4 on weights of 1: bfloat16 has 1 and 1.0078."""
    moved = {}
    for cfg in (ROUNDED, OptimConfig()):
        layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(layer.weight)
        optimizer = build_optimizer(layer, cfg.model_copy(update={"weight_decay": 0.0}))
        for step in range(100):
            layer.weight.grad = torch.ones_like(layer.weight)
            set_learning_rate(optimizer, 1e-4)
            seed_rounding(0, step, 0)
            optimizer.step()
        moved[cfg.needs_torchao] = 1.0 - float(layer.weight.detach().float().mean())
    assert moved[False] == 0.0
    assert moved[True] == pytest.approx(0.01, rel=0.05)


@needs_torchao
@pytest.mark.slow
def test_eight_bits_train_as_well() -> None:
    def loss_after(cfg: OptimConfig) -> float:
        model = network()
        train(model, build_optimizer(model, cfg), range(60))
        return float(model(torch.arange(64)).square().mean())

    plain = loss_after(OptimConfig(lr=1e-2))
    assert plain < 0.1 * float(network()(torch.arange(64)).square().mean())
    assert loss_after(EIGHT_BIT) < 2 * plain


@pytest.mark.parametrize("largest", [1.0, 5.0, 100.0])
def test_gradients_are_scaled_down_to_the_largest_norm_and_never_up(largest: float) -> None:
    parameters = [
        torch.nn.Parameter(torch.zeros(2)),
        torch.nn.Parameter(torch.zeros(1)),
        torch.nn.Parameter(torch.ones(1)),
    ]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([-4.0])
    assert float(clip_gradients(parameters, largest)) == 5.0
    scale = min(1.0, largest / 5.0)
    found = [*parameters[0].grad.tolist(), *parameters[1].grad.tolist()]
    assert found == pytest.approx([3.0 * scale, 0.0, -4.0 * scale], rel=1e-6)
