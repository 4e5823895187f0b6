"""Compiled layers: what torch compiles for micro-batches of different shapes."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from posttrain.models import attention
from posttrain.models.attention import Kernel, Ragged
from posttrain.train import parallel
from posttrain.train.model import PackedLM

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "num_hidden_layers": 3,
}  # fmt: skip
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
}


# As the kernels on GPUs are: one operator, which is told of the sequences' offsets and the longest of them.


@torch.library.custom_op("paralleltest::varlen", mutates_args=())
def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, longest: int) -> torch.Tensor:
    repeat = q.shape[1] // v.shape[1]
    return q * float(longest) / len(cu_seqlens) + (k * v).repeat_interleave(repeat, dim=1)


@varlen.register_fake
def _(q, k, v, cu_seqlens, longest):
    return torch.empty_like(q)


def _remember(ctx, inputs, output):
    _, k, v, cu_seqlens, ctx.longest = inputs
    ctx.save_for_backward(k, v, cu_seqlens)


@torch.library.custom_op("paralleltest::varlen_backward", mutates_args=())
def varlen_backward(
    grad: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, longest: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    of_product = grad.view(len(grad), k.shape[1], -1, k.shape[2]).sum(2)
    return grad * float(longest) / len(cu_seqlens), of_product * v, of_product * k


@varlen_backward.register_fake
def _(grad, k, v, cu_seqlens, longest):
    return torch.empty_like(grad), torch.empty_like(k), torch.empty_like(v)


varlen.register_autograd(
    lambda ctx, grad: (*varlen_backward(grad.contiguous(), *ctx.saved_tensors, ctx.longest), None, None),
    setup_context=_remember,
)
slow = partial(pytest.param, marks=pytest.mark.slow)
KERNEL = Kernel("test", "test", lambda q, k, v, offsets, longest, scale: varlen(q, k, v, offsets, longest))


def batch(lengths):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    tokens = int(offsets[-1])
    positions = torch.cat([torch.arange(n) for n in lengths])
    ids = torch.arange(tokens) * 7 % 128
    return ids, positions, torch.arange(tokens), ids, Ragged.build(offsets, torch.device("cpu"), KERNEL)


def model(name, checkpointing, *, compiled):
    attention.register()
    torch.manual_seed(0)
    lm = PackedLM(AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=attention.NAME))
    return parallel.parallelize(
        lm, None, dtype=torch.float32, activation_checkpointing=checkpointing, compiled=compiled
    )


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [("qwen2", "selective"), slow("qwen2", "none"), slow("qwen2", "full"), slow("qwen3", "none")],
)
def test_no_length_is_compiled_for(monkeypatch, name, checkpointing):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    # Code for the graphs takes seconds to make, and how many there are is decided before it.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compiled, eager = (model(name, checkpointing, compiled=compiled) for compiled in (True, False))
    seen = []
    for lengths in ([5, 9], [5, 9], [4, 9], [5, 9, 2], [5, 8, 3], [3, 30], [17], [2, 2, 2, 2, 40]):
        inputs = batch(lengths)
        with torch.no_grad():
            scored = compiled(*inputs, 1.0)[0]
        found, expected = (lm(*inputs, 1.0)[0] for lm in (compiled, eager))
        for logprobs, lm in ((found, compiled), (expected, eager)):
            lm.zero_grad()
            logprobs.mean().backward()
        torch.testing.assert_close(scored, expected.detach())
        torch.testing.assert_close(found, expected)
        for ours, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad)
        seen.append(counters["stats"]["unique_graphs"])
    assert seen[0] == seen[-1], f"graphs after each micro-batch: {seen}"
    assert not counters["graph_break"], dict(counters["graph_break"])
