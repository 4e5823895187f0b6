"""Compiled layers: what torch compiles for micro-batches of different shapes."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from posttrain.config import LoraConfig, TrainConfig
from posttrain.data.pack import PackedBatch
from posttrain.models import attention_kernels, lora
from posttrain.models.attention import Ragged
from posttrain.models.attention_kernels import Kernel, choose
from posttrain.models.experts import Mixture, RoutedTokens
from posttrain.models.load import ModelSource, implementations
from posttrain.models.prefixes import SharedPrefixes
from posttrain.models.weights import materialize
from posttrain.train import parallel
from posttrain.train.model import PackedLM
from posttrain.train.spec import LossSpec, WorkerSpec
from posttrain.train.worker import TrainWorker
from tests.helpers.ports import free_ports

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "num_hidden_layers": 3,
}  # fmt: skip
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, head_dim=16, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2),
}


# As the kernels on GPUs are: one operator, which is told of the offsets of queries and keys and the longest sequence. A
# query meets the key and the value of its own token.


def own_rows(cu_q: torch.Tensor, cu_k: torch.Tensor) -> torch.Tensor:
    lengths = cu_q.diff()
    return torch.cat([torch.arange(end - n, end) for n, end in zip(lengths.tolist(), cu_k[1:].tolist(), strict=True)])


@torch.library.custom_op("paralleltest::varlen", mutates_args=())
def varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, longest: int
) -> torch.Tensor:
    repeat = q.shape[1] // v.shape[1]
    return q * float(longest) / len(cu_q) + (k * v)[own_rows(cu_q, cu_k)].repeat_interleave(repeat, dim=1)


@varlen.register_fake
def _(q, k, v, cu_q, cu_k, longest):
    return torch.empty_like(q)


def _remember(ctx, inputs, output):
    _, k, v, cu_q, cu_k, ctx.longest = inputs
    ctx.save_for_backward(k, v, cu_q, cu_k)


@torch.library.custom_op("paralleltest::varlen_backward", mutates_args=())
def varlen_backward(
    grad: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, longest: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    of_product = torch.zeros_like(k)
    of_product[own_rows(cu_q, cu_k)] = grad.view(len(grad), k.shape[1], -1, k.shape[2]).sum(2)
    return grad * float(longest) / len(cu_q), of_product * v, of_product * k


@varlen_backward.register_fake
def _(grad, k, v, cu_q, cu_k, longest):
    return torch.empty_like(grad), torch.empty_like(k), torch.empty_like(v)


varlen.register_autograd(
    lambda ctx, grad: (*varlen_backward(grad.contiguous(), *ctx.saved_tensors, ctx.longest), None, None, None),
    setup_context=_remember,
)
slow = partial(pytest.param, marks=pytest.mark.slow)
KERNEL = Kernel("test", "test", lambda q, k, v, cu_q, cu_k, longest, scale: varlen(q, k, v, cu_q, cu_k, longest))


def batch(lengths, shared):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.cat([torch.arange(n) for n in lengths])
    prefixes = SharedPrefixes.build(offsets, torch.tensor(shared)) if shared else None
    positions = positions[prefixes.own] if prefixes else positions
    ids = torch.arange(len(positions)) * 7 % 128
    ragged = Ragged.build(offsets, torch.device("cpu"), KERNEL, prefixes=prefixes)
    return ids, positions, torch.arange(len(ids)), ids, ragged


def model(name, checkpointing, *, compiled):
    torch.manual_seed(0)
    lm = PackedLM(AutoModelForCausalLM.from_config(CONFIGS[name], **implementations(CONFIGS[name])))
    return parallel.parallelize(
        lm, None, dtype=torch.float32, activation_checkpointing=checkpointing, compiled=compiled
    )


WHOLE = [[5, 9], [5, 9], [4, 9], [5, 9, 2], [5, 8, 3], [3, 30], [17], [2, 2, 2, 2, 40]]
SHARED = [
    ([5, 9], [0, 3]),
    ([6, 9, 7], [0, 3, 3]),
    ([5, 8], [0, 1]),
    ([30, 4, 4, 6], [0, 2, 2, 0]),
    ([2, 40, 3], [0, 0, 2]),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "checkpointing", "batches"),
    [
        ("qwen2", "selective", [(lengths, None) for lengths in WHOLE]),
        ("qwen2", "selective", SHARED),
        slow("qwen2", "none", [(lengths, None) for lengths in WHOLE]),
        slow("qwen2", "full", [(lengths, None) for lengths in WHOLE]),
        slow("qwen2", "none", SHARED),
        slow("qwen2", "full", SHARED),
        slow("qwen3", "none", [(lengths, None) for lengths in WHOLE]),
    ],
)
def test_no_length_is_compiled_for(monkeypatch, name, checkpointing, batches):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    # Code for the graphs takes seconds to make, and how many there are is decided before it.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compiled, eager = (model(name, checkpointing, compiled=compiled) for compiled in (True, False))
    seen = []
    for lengths, shared in batches:
        inputs = batch(lengths, shared)
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


def test_layers_with_adapters_share_their_graphs_above_frozen_embeddings(monkeypatch):
    counters = torch._dynamo.utils.counters["stats"]
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    found, graphs = [], []
    for compiled in (True, False):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        lm = PackedLM(AutoModelForCausalLM.from_config(CONFIGS["qwen2"], **implementations(CONFIGS["qwen2"])))
        lora.inject(lm.model, LoraConfig(rank=4), dtype=torch.float32)
        materialize(lm, torch.device("cpu"))
        for name, parameter in lm.named_parameters():
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
        parallel.parallelize(lm, None, dtype=torch.float32, activation_checkpointing="full", compiled=compiled)
        lm(*batch([5, 9, 6], None), 1.0)[0].mean().backward()
        found.append({name: p.grad for name, p in lm.named_parameters() if p.grad is not None})
        graphs.append(counters["unique_graphs"])
    assert graphs == [1, 0]
    assert all(".lora_" in name for name in found[0])
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name])


@pytest.mark.slow
def test_routers_of_compiled_layers_replay_balance_and_count(monkeypatch):
    """As those of layers that are not compiled, with no graph for each layer or for each length."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    # A backend that makes graphs for the backward pass needs the grouped products of a GPU.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    config, models = CONFIGS["qwen3-moe"], []
    for compiled in (True, False):
        torch.manual_seed(0)
        lm = PackedLM(AutoModelForCausalLM.from_config(config, **implementations(config)))
        mixture = Mixture(lm.model)
        how = {"dtype": torch.float32, "activation_checkpointing": "selective", "compiled": compiled}
        models.append((parallel.parallelize(lm, None, **how), mixture))
    pull, seen = torch.linspace(-1, 1, 8).expand(3, 8).contiguous(), []
    for lengths in ([5, 9, 6, 2, 7], [3, 30, 4], [17]):
        inputs = batch(lengths, None)
        first = torch.arange(sum(lengths) * 3).view(-1, 3, 1) * 5 % 8
        replayed = torch.cat([first, (first + 3) % 8], 2) + 1
        replayed[-1] = 0
        found = []
        for lm, mixture in models:
            mixture.begin(RoutedTokens(torch.ones(sum(lengths)), replayed), pull)
            logprobs = lm(*inputs, 1.0)[0]
            counted = mixture.seen().rows
            lm.zero_grad()
            logprobs.mean().backward()
            assert torch.equal(mixture.seen().rows, counted)
            found.append([logprobs.detach(), counted, *(p.grad for p in lm.parameters() if p.grad is not None)])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        seen.append(counters["stats"]["unique_graphs"])
    assert seen[1] == seen[2] <= 2
    assert not counters["graph_break"], dict(counters["graph_break"])


PADDED = choose("sdpa", torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    ("kernel", "batches", "train", "scores"),
    [
        (KERNEL, ([5, 9, 30], [12]), {}, False),
        (KERNEL, ([5, 9, 30], [12]), {"gather_weights": "step", "param_dtype": "bfloat16"}, True),
        (KERNEL, ([5, 9, 30], [12]), {"lora": {"rank": 4}}, True),
        # One group of each, as they are longer than 16 and at most 32.
        (PADDED, ([17, 20, 30, 32], [20] * 8), {}, False),
    ],
)
def test_the_first_update_of_a_worker_that_warmed_up_compiles_nothing_and_is_the_same(
    monkeypatch, kernel, batches, train, scores
):
    """``scores``: with a pass without gradients before it. Another one for a check compiles nothing either way."""
    counters = torch._dynamo.utils.counters["stats"]
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(attention_kernels, "choose", lambda *_: kernel)
    settings = TrainConfig.model_validate({"compile": "on", **train})

    def updates(*, warm):
        torch._dynamo.reset()
        counters.clear()
        worker = TrainWorker(WorkerSpec(ModelSource("builtin:tiny"), "cpu", "float32", 9, 1.0, settings), 0, 1)
        worker.setup("127.0.0.1", int(free_ports(1)[0]), 60.0)
        try:
            ids = [[5, 6, 7], [8, 9]]
            checked = worker.logprobs([PackedBatch.from_sequences(ids, [[True] * 3, [True] * 2])], compiled=False)
            assert counters["unique_graphs"] == 0
            if warm:
                worker.warm_up(scores)
            before, found = counters["unique_graphs"], [checked[0].tolist()]
            for lengths in batches:
                ids = [list(range(5, 5 + n)) for n in lengths]
                packed = PackedBatch.from_sequences(ids, [[True] * n for n in lengths])
                packed.loss_weights = packed.loss_mask / packed.num_tokens
                if scores:
                    found.append(worker.logprobs([packed])[0].tolist())
                metrics = worker.update([packed], LossSpec())
                found.append(metrics.sums | {"grad_norm": metrics.shared["grad_norm"]})
            whole = ((name, getattr(p, "full_tensor", p.clone)()) for name, p in worker.parameters.items())
            weights = {name: value.detach() for name, value in whole}
            return found, weights, before, counters["unique_graphs"]
        finally:
            dist.destroy_process_group()

    cold, cold_weights, none, graphs = updates(warm=False)
    warm, warm_weights, before, after = updates(warm=True)
    assert none == 0 < before == after == graphs
    assert warm == cold
    assert all(torch.equal(warm_weights[name], value) for name, value in cold_weights.items())
