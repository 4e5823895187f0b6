"""LoRA on a GPU: compiled layers, adapters in float32 beside weights in bfloat16, switching off, offloading."""

import gc

import pytest
import torch

from posttrain.config import TrainConfig
from posttrain.data.pack import PackedBatch
from posttrain.models.load import ModelSource
from tests.gpu.models import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
VOCABULARY = 2048


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=2048,
    )  # fmt: skip
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def batches(seed, count=2):
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(count):
        lengths = torch.randint(2, 300, (11,), generator=generator).tolist()
        ids = [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
        batch = PackedBatch.from_sequences(ids, [[True] * len(s) for s in ids])
        batch.loss_weights = batch.loss_mask / batch.loss_mask.sum() / count
        out.append(batch)
    return out


def train(folder, **options):
    """(metrics of a few steps; log-probabilities before them, after them, and after them without the adapter)."""
    import torch.distributed as dist

    from posttrain.train.spec import LossSpec, WorkerSpec
    from posttrain.train.worker import TrainWorker

    section = {"optim": {"lr": 1e-3}, "lora": {"rank": 8}} | options
    worker = TrainWorker(
        WorkerSpec(ModelSource(str(folder)), "cuda", "bfloat16", 0, 1.0, TrainConfig.model_validate(section)), 0, 1
    )
    worker.setup("127.0.0.1", free_port(), 60.0)
    try:
        before = worker.logprobs(batches(0))[0]
        found = [worker.update(batches(seed), LossSpec()) for seed in range(5)]
        worker.offload()
        worker.onload()
        after, off = worker.logprobs(batches(0))[0], worker.logprobs(batches(0), adapter=False)[0]
        worker.sender.open("host", 64 << 20)
        sent = set()
        while (bucket := worker.sender.next(0)) is not None:
            sent |= bucket.shapes.keys()
        worker.sender.close()
    finally:
        dist.destroy_process_group()
        del worker
        gc.collect()
        torch.cuda.empty_cache()
    assert not any("lora" in name or "base_layer" in name for name in sent)
    return [(r.sums["loss"], r.shared["grad_norm"]) for r in found], before, after, off


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation_checkpointing", ["none", "selective", "full"])
def test_compiled_layers_with_adapters(folder, param_dtype, activation_checkpointing):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = {"param_dtype": param_dtype, "activation_checkpointing": activation_checkpointing}
    compiled, before, after, off = train(folder, compile="on", **options)
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"], dict(counters["graph_break"])
    # With and without gradients, for the first layer (whose input needs none) and the others, and without the adapter.
    # From 8 on torch would no longer compile.
    assert counters["stats"]["unique_graphs"] <= 7, dict(counters["stats"])
    assert torch.equal(off, before)
    assert (after - before).abs().max() > 0.1
    eager, *_ = train(folder, compile="off", param_dtype=param_dtype)
    for (loss, norm), (eager_loss, eager_norm) in zip(compiled, eager, strict=True):
        assert loss == pytest.approx(eager_loss, rel=2e-3)
        assert norm == pytest.approx(eager_norm, rel=3e-2)
