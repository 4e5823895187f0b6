"""What only a GPU has: attention kernels over ragged rows, the passes over logits, compiled and checkpointed layers."""

import gc
import json

import pytest
import torch

from posttrain.config import TrainConfig
from posttrain.data.pack import PackedBatch
from posttrain.models import attention, logprobs, tower_attention
from posttrain.models.attention import Ragged
from posttrain.models.attention_kernels import available, choose
from posttrain.models.load import ModelSource
from posttrain.models.logprobs import token_logprobs, tokenwise_loss
from posttrain.models.prefixes import SharedPrefixes
from tests.gpu.models import free_port, write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CUDA = torch.device("cuda")
KERNELS = available(CUDA, torch.bfloat16) if torch.cuda.is_available() else ["sdpa"]


def error(value, exact):
    """Relative to the size of what is compared."""
    exact = exact.double()
    return float((value.double() - exact).norm() / exact.norm())


# ---------------------------------------------------------------------- attention


@pytest.mark.parametrize("heads", [(8, 8, 64), (14, 2, 64), (28, 4, 128)])
@pytest.mark.parametrize("name", KERNELS)
def test_ragged_attention_is_each_sequence_alone(name, heads):
    """Against a float64 softmax of every sequence by itself, forward and backward; as exact as eager bfloat16."""
    query_heads, key_heads, size = heads
    lengths = torch.tensor([1, 130, 7, 64, 300, 2, 129, 511])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    torch.manual_seed(0)
    shapes = [(int(offsets[-1]), h, size) for h in (query_heads, key_heads, key_heads, query_heads)]
    q, k, v, upstream = (torch.randn(shape, device=CUDA, dtype=torch.bfloat16) for shape in shapes)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    kernel = choose(name, CUDA, torch.bfloat16)
    ragged = Ragged.build(offsets.int(), CUDA, kernel)
    out = attention._ragged(*inputs, ragged, attention.Scoring())
    grads = torch.autograd.grad(out, inputs, upstream)

    exact, exact_grads = plain(q, k, v, upstream, lengths.tolist(), torch.float64)
    eager, eager_grads = plain(q, k, v, upstream, lengths.tolist(), torch.bfloat16)
    assert error(out, exact) <= 1.5 * error(eager, exact)
    for got, by_eager, wanted in zip(grads, eager_grads, exact_grads, strict=True):
        assert error(got, wanted) <= 1.5 * error(by_eager, wanted)


@pytest.mark.parametrize("size", [64, 80])
def test_attention_of_a_tower_is_each_window_alone(size):
    """As exact as bfloat16 is, beside the same in float64 without a kernel; one call of a GPU's kernel."""
    lengths = torch.tensor([64] * 30 + [32, 16, 64, 8, 500])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int().cuda()
    torch.manual_seed(0)
    shape = (1, 16, int(offsets[-1]), size)
    q, k, v = (torch.randn(shape, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    upstream = torch.randn(1, shape[2], 16, size, device=CUDA, dtype=torch.bfloat16)
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        inputs = [x.to(dtype) for x in (q, k, v)]
        out, _ = tower_attention.attend(torch.nn.Module(), *inputs, None, scaling=size**-0.5, cu_seq_lens_q=offsets)
        found.append([out, *torch.autograd.grad(out, inputs, upstream.to(dtype))])
    for value, exact in zip(*found, strict=True):
        assert error(value, exact) < 6e-3


@pytest.mark.parametrize("heads", [(8, 8, 64), (14, 2, 64), (28, 4, 128)])
@pytest.mark.parametrize("name", KERNELS)
def test_attention_over_a_shared_prompt_is_that_over_whole_sequences(name, heads):
    """Against a float64 softmax of every whole sequence, forward and backward; as exact as eager bfloat16."""
    query_heads, key_heads, size = heads
    lengths = torch.tensor([330, 300, 301, 64, 700, 513, 514, 515, 2])
    shared = torch.tensor([0, 299, 299, 0, 0, 512, 512, 512, 0])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    prefixes = SharedPrefixes.build(offsets, shared)
    torch.manual_seed(0)
    shapes = [(len(prefixes.own), h, size) for h in (query_heads, key_heads, key_heads, query_heads)]
    q, k, v, upstream = (torch.randn(shape, device=CUDA, dtype=torch.bfloat16) for shape in shapes)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    kernel = choose(name, CUDA, torch.bfloat16)
    out = attention._ragged(*inputs, Ragged.build(offsets.int(), CUDA, kernel, prefixes=prefixes), attention.Scoring())
    grads = torch.autograd.grad(out, inputs, upstream)

    def whole(dtype):
        """Every sequence by itself: copies of a prompt's tokens get no gradient from above, and give theirs to it."""
        source, own = prefixes.source.to(CUDA), prefixes.own.to(CUDA)
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        above = torch.zeros(len(source), query_heads, size, device=CUDA, dtype=torch.bfloat16)
        above[own] = upstream
        found, of_copies = plain(*(x[source] for x in leaves), above, lengths.tolist(), dtype)
        summed = [
            torch.zeros_like(x, dtype=torch.float64).index_add_(0, source, grad.double())
            for x, grad in zip(leaves, of_copies, strict=True)
        ]
        return found[own], summed

    exact, exact_grads = whole(torch.float64)
    eager, eager_grads = whole(torch.bfloat16)
    assert error(out, exact) <= 1.5 * error(eager, exact)
    for got, by_eager, wanted in zip(grads, eager_grads, exact_grads, strict=True):
        assert error(got, wanted) <= 1.5 * max(error(by_eager, wanted), 2**-9)


def plain(q, k, v, upstream, lengths, dtype):
    inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    outs = []
    for one_q, one_k, one_v in zip(*(x.split(lengths) for x in inputs), strict=True):
        repeat = q.shape[1] // k.shape[1]
        keys, values = one_k.repeat_interleave(repeat, 1), one_v.repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", one_q, keys) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    out = torch.cat(outs)
    return out, torch.autograd.grad(out, inputs, upstream.to(dtype))


# ---------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1000, 64, 151_936), (777, 96, 4099), (5, 32, 33)])
def test_logprobs_entropies_and_gradients(monkeypatch, shape, dtype):
    """Both ways, against a full softmax in float64 of the same (rounded) inputs."""
    count, size, vocabulary = shape
    monkeypatch.setattr(logprobs, "BUFFER_BYTES", 200 * vocabulary * 4)
    torch.manual_seed(0)
    plain_hidden = torch.randn(count, size, device=CUDA).to(dtype)
    plain_head = (torch.randn(vocabulary, size, device=CUDA) * 0.3).to(dtype)
    targets = torch.randint(vocabulary, (count,), device=CUDA)
    weights = torch.rand(count, device=CUDA)

    def objective(values, entropies, part=slice(None)):
        return (weights[part] * (values.exp() - values + 0.1 * entropies.square())).sum()

    def leaves():
        return [x.detach().clone().requires_grad_() for x in (plain_hidden, plain_head)]

    exact_hidden, exact_head = (x.double().requires_grad_() for x in (plain_hidden, plain_head))
    rows = ((exact_hidden @ exact_head.t()) / 0.7).log_softmax(-1)
    chosen, exact_entropies = rows.gather(-1, targets[:, None]).squeeze(-1), -(rows.exp() * rows).sum(-1)
    total = objective(chosen, exact_entropies)
    exact_grads = torch.autograd.grad(total, (exact_hidden, exact_head))
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3

    hidden, head = leaves()
    values, entropies = token_logprobs(hidden, head, targets, 0.7)
    grads = torch.autograd.grad(objective(values, entropies), (hidden, head))
    for got, wanted in zip((values, entropies, *grads), (chosen, exact_entropies, *exact_grads), strict=True):
        assert error(got, wanted) < tolerance
    hidden, head = leaves()
    loss, values, entropies = tokenwise_loss(hidden, head, targets, 0.7, objective)
    grads = torch.autograd.grad(loss, (hidden, head))
    for got, wanted in zip((loss, values, *grads), (total, chosen, *exact_grads), strict=True):
        assert error(got, wanted) < tolerance


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("size", [896, 3584])
def test_the_heads_gradient_is_as_exact_over_many_chunks_as_over_one(monkeypatch, size, fused):
    """Tokens that all push the same way, against a sum in float32 of exact products."""
    count, vocabulary = 4096, 151_936
    torch.manual_seed(0)
    hidden = (1.0 + 0.1 * torch.randn(count, size, device=CUDA)).bfloat16()
    plain_head = (torch.randn(vocabulary, size, device=CUDA) * 0.02).bfloat16()
    targets = torch.randint(100, (count,), device=CUDA)
    errors, exact = {}, None
    for chunks in (1, 9, 64, 256):
        monkeypatch.setattr(logprobs, "BUFFER_BYTES", -(-count // chunks) * vocabulary * 4)
        head = plain_head.clone().requires_grad_()
        if fused:
            tokenwise_loss(hidden, head, targets, 1.0, lambda values, _, part: -values.sum())[0].backward()
        else:
            (-token_logprobs(hidden, head, targets)[0].sum()).backward()
        if exact is None:
            logits = torch.mm(hidden, plain_head.t(), out_dtype=torch.float32)
            by_logits = torch.softmax(logits, -1)
            by_logits[torch.arange(count, device=CUDA), targets] -= 1.0
            exact = by_logits.t() @ hidden.float()
            del logits, by_logits
        errors[chunks] = error(head.grad[:100], exact[:100])
        assert head.grad.dtype == torch.bfloat16
    print(f"hidden size {size}, error by chunks: {errors}")
    assert max(errors.values()) < 3e-3, errors


def test_memory_of_the_loss():
    """32k tokens x 152k vocabulary: at most 1 GiB beyond inputs, weight, their gradients, and the head's once more in
    float32."""
    count, size, vocabulary = 32_768, 3584, 152_064
    hidden = torch.randn(count, size, device=CUDA, dtype=torch.bfloat16).requires_grad_()
    head = torch.randn(vocabulary, size, device=CUDA, dtype=torch.bfloat16).mul_(0.02).requires_grad_()
    targets = torch.randint(vocabulary, (count,), device=CUDA)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tokenwise_loss(hidden, head, targets, 1.0, lambda x, _, part: -x.sum())[0].backward()
    gradients = 2 * (hidden.numel() + head.numel()) + 4 * head.numel()
    assert torch.cuda.max_memory_allocated() - before - gradients <= 1 << 30


# ---------------------------------------------------------------------- the model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shape = {
        "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12,
        "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    }  # fmt: skip
    path = write_model(tmp_path_factory.mktemp("model"), shape)
    assert json.loads((path / "config.json").read_text())["hidden_size"] == 512
    return path


def batches(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(count):
        lengths = torch.randint(2, 400, (17,), generator=generator).tolist()
        ids = [torch.randint(4096, (n,), generator=generator).tolist() for n in lengths]
        batch = PackedBatch.from_sequences(ids, [[True] * len(s) for s in ids])
        batch.loss_weights = batch.loss_mask / batch.loss_mask.sum() / count
        out.append(batch)
    return out


def curve(folder, steps=4, **train):
    """Losses and gradient norms of a few steps in a process group of one."""
    import torch.distributed as dist

    from posttrain.train.spec import LossSpec, WorkerSpec
    from posttrain.train.worker import TrainWorker

    spec = WorkerSpec(
        ModelSource(str(folder)),
        "cuda",
        "bfloat16",
        0,
        1.0,
        TrainConfig.model_validate(train | {"optim": {"lr": 1e-4}}),
    )
    worker = TrainWorker(spec, 0, 1)
    metadata = worker.setup("127.0.0.1", free_port(), 60.0)
    try:
        results = [worker.update(batches(3, seed), LossSpec()) for seed in range(steps)]
    finally:
        dist.destroy_process_group()
        del worker
        gc.collect()
        torch.cuda.empty_cache()
    return metadata, [(r.sums["loss"], r.shared["grad_norm"]) for r in results]


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation_checkpointing", ["none", "selective", "full"])
def test_compiled_layers_compute_what_eager_ones_do(folder, param_dtype, activation_checkpointing):
    options = {"param_dtype": param_dtype, "activation_checkpointing": activation_checkpointing}
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    _, compiled = curve(folder, compile="on", **options)
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"], dict(counters["graph_break"])
    # One graph for all layers, of any length; tests/unit/train/test_parallel.py counts exactly.
    assert counters["stats"]["unique_graphs"] <= 3, dict(counters["stats"])
    _, eager = curve(folder, compile="off", param_dtype=param_dtype)
    for (loss, norm), (eager_loss, eager_norm) in zip(compiled, eager, strict=True):
        assert loss == pytest.approx(eager_loss, rel=2e-3)
        assert norm == pytest.approx(eager_norm, rel=3e-2)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_train_alike(folder, name):
    metadata, losses = curve(folder, compile="off", attention=name)
    _, reference = curve(folder, compile="off", attention="sdpa")
    assert metadata["attention"] == choose(name, CUDA, torch.bfloat16).title
    for (loss, norm), (other_loss, other_norm) in zip(losses, reference, strict=True):
        assert loss == pytest.approx(other_loss, rel=2e-3)
        assert norm == pytest.approx(other_norm, rel=3e-2)


def test_offload_frees_the_gpu_and_brings_everything_back(folder):
    import torch.distributed as dist

    from posttrain.train.spec import LossSpec, WorkerSpec
    from posttrain.train.worker import TrainWorker

    spec = WorkerSpec(ModelSource(str(folder)), "cuda", "bfloat16", 0, 1.0, TrainConfig(compile="off"))
    worker = TrainWorker(spec, 0, 1)
    worker.setup("127.0.0.1", free_port(), 60.0)
    try:
        batch = batches(1)
        worker.update(batch, LossSpec())
        before = worker.logprobs(batch)[0]
        held = torch.cuda.memory_allocated()
        worker.offload()
        workspaces = 2 * 32 * 2**20  # of cuBLAS, which keeps them
        assert torch.cuda.memory_allocated() - workspaces < 0.1 * (held - workspaces)
        worker.onload()
        assert torch.equal(worker.logprobs(batch)[0], before)
        assert worker.update(batch, LossSpec()).shared["skipped"] == 0.0
    finally:
        dist.destroy_process_group()
