"""Experts by grouped products: values and gradients are those of transformers' loop over experts, without a scatter."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from posttrain.models import grouped_experts
from posttrain.train.expert_parallel import expert_modules
from tests.helpers.architectures import ARCHITECTURES

TOKENS = 37
MIXTURES = [name for name, found in ARCHITECTURES.items() if "expert" in found.about]
SCATTERS = {"index_put", "_index_put_impl_", "index_put_", "index_add", "index_add_", "scatter_add", "scatter_add_"}


def experts_of(name, folder, implementation):
    """The experts of a layer of such an architecture, which uses all of its features, with weights that matter."""
    grouped_experts.register()
    ARCHITECTURES[name].save(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, experts_implementation=implementation
    )
    experts = expert_modules(model)[0]
    torch.manual_seed(0)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return experts


def width_of(experts):
    return experts.down_proj.shape[2 if experts.is_transposed else 1]


def results(experts, dtype=torch.float32, k=2, seed=1):
    """What comes out for some tokens, and the gradients of inputs, weights and parameters."""
    torch.manual_seed(seed)
    hidden = torch.randn(TOKENS, width_of(experts), dtype=dtype).requires_grad_()
    chosen = torch.stack([torch.randperm(experts.num_experts)[:k] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, k, dtype=dtype).requires_grad_()
    experts.zero_grad()
    out = experts(hidden, chosen, weights)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return [out.detach(), hidden.grad, weights.grad, *(p.grad for p in experts.parameters())]


@pytest.mark.parametrize("name", MIXTURES)
def test_values_and_gradients_are_those_of_transformers(tmp_path, name):
    plain, ours = (results(experts_of(name, tmp_path / how, how)) for how in ("eager", grouped_experts.NAME))
    for expected, found in zip(plain, ours, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "parameter"), [("Qwen3-MoE", "down_proj"), ("gpt-oss", "down_proj_bias")])
@pytest.mark.parametrize("used", [[0, 2], [1, 3]])
def test_an_expert_without_tokens_gets_no_gradient(tmp_path, name, parameter, used):
    experts = experts_of(name, tmp_path, grouped_experts.NAME)
    assert experts.num_experts == 4
    hidden = torch.randn(5, width_of(experts))
    experts(hidden, torch.tensor([used] * 5), torch.ones(5, 2)).sum().backward()
    found = getattr(experts, parameter).grad.flatten(1).abs().sum(1) > 0
    assert found.nonzero().flatten().tolist() == used


class Operators(TorchDispatchMode):
    """The names of operators that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.__name__.split(".")[0])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["Qwen3-MoE", "gpt-oss"])
@pytest.mark.parametrize(("implementation", "scatters"), [("grouped_mm", True), (grouped_experts.NAME, False)])
def test_no_gradient_is_added_up_by_a_scatter(tmp_path, name, implementation, scatters):
    experts = experts_of(name, tmp_path, implementation)
    with Operators() as seen:
        results(experts)
    assert bool(seen.names & SCATTERS) == scatters


@pytest.mark.slow
def test_a_compiled_layer_gives_the_same_in_bfloat16(tmp_path):
    experts = experts_of("Qwen3-MoE", tmp_path, grouped_experts.NAME).to(torch.bfloat16)
    plain = results(experts, torch.bfloat16)
    experts.forward = torch.compile(experts.forward, dynamic=True)
    for expected, found in zip(plain, results(experts, torch.bfloat16), strict=True):
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
