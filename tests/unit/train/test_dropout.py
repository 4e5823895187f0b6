"""Models whose config asks for dropout or for noise in routers."""

import socket

import pytest
import torch
import torch.distributed as dist
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GraniteConfig, GraniteForCausalLM

from posttrain.config import TrainConfig
from posttrain.data.pack import PackedBatch
from posttrain.models.load import ModelSource
from posttrain.train.spec import LossSpec, WorkerSpec
from posttrain.train.worker import TrainWorker

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def neox(folder):
    config = GPTNeoXConfig(**SIZES, hidden_dropout=0.3, attention_dropout=0.2, classifier_dropout=0.1)
    GPTNeoXForCausalLM(config).save_pretrained(folder)
    return {"hidden_dropout": 0.3, "attention_dropout": 0.2}


def granite(folder):
    GraniteForCausalLM(GraniteConfig(**SIZES, attention_dropout=0.1)).save_pretrained(folder)
    return {"attention_dropout": 0.1}


def batch():
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(64, (n,), generator=generator).tolist() for n in (9, 14)]
    made = PackedBatch.from_sequences(ids, [[True] * len(one) for one in ids])
    made.loss_weights = made.loss_mask / made.loss_mask.sum()
    return made


@pytest.mark.parametrize("make", [neox, granite])
@pytest.mark.parametrize("kind", ["policy", "LoRA policy", "critic"])
def test_no_pass_of_a_worker_has_dropout(tmp_path, make, kind):
    asked = make(tmp_path)
    train = TrainConfig.model_validate(
        {"optim": {"lr": 0.0, "weight_decay": 0.0}, "lora": {"rank": 2} if kind == "LoRA policy" else {}}
    )
    spec = WorkerSpec(ModelSource(str(tmp_path)), "cpu", "float32", 0, 1.0, train, values=kind == "critic")
    worker = TrainWorker(spec, 0, 1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    metadata = worker.setup("127.0.0.1", port, 60.0)
    try:
        with torch.no_grad():  # a critic's head begins at 0, and would hide what comes before it
            worker.lm.model.get_output_embeddings().weight.normal_()
        first, second = (worker.logprobs([batch()])[0] for _ in range(2))
        assert first.any()
        assert torch.equal(first, second)
        updates = [worker.update([batch()], LossSpec()) for _ in range(2)]
        expected = -float((first * batch().loss_weights).sum())  # of a policy and of a reward model alike
        assert updates[0].sums["loss"] == updates[1].sums["loss"] == pytest.approx(expected, abs=1e-5)
        if kind != "critic":
            assert worker.evaluate([batch()])["loss"] == pytest.approx(expected, abs=1e-5)
        assert updates[0].shared["grad_norm"] == updates[1].shared["grad_norm"] > 0
        assert metadata["dropout"] == asked
    finally:
        dist.destroy_process_group()
