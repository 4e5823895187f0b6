"""A mixture of experts whose choices matter, and the gap between an engine's log-probabilities and a trainer's."""

from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from posttrain.config import TrainConfig
from posttrain.data.pack import PackedBatch
from posttrain.data.record import Record
from posttrain.models.load import ModelSource
from posttrain.train.spec import WorkerSpec
from posttrain.train.worker import TrainWorker
from tests.helpers.ports import free_ports

STOP = 7
CONFIG = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 32, "num_experts_per_tok": 4,
    "norm_topk_prob": True, "tie_word_embeddings": True,
}  # fmt: skip


def mixture(folder):
    """Write a mixture whose experts matter as much as those of a trained one, in which many are nearly as likely."""
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**CONFIG))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                spread = 1.0 if ".experts." in name else 0.3
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread / parameter.shape[-1] ** 0.5)
                if "embed" in name:
                    parameter.mul_(4.0)
    model.save_pretrained(folder)
    return ModelSource(str(folder))


@contextmanager
def trainer(source, dtype):
    spec = WorkerSpec(source, "cpu", dtype, 0, 1.0, TrainConfig(), threads=1, replays_routing=True)
    made = TrainWorker(spec, 0, 1)
    made.setup("127.0.0.1", int(free_ports(1)[0]), 60.0)
    yield made
    dist.destroy_process_group()


def prompts_of(lengths, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(8, 512, (n,), generator=generator).tolist() for n in lengths]


def batch_of(prompts, samples):
    whole = [[*p, *s.ids] for p, s in zip(prompts, samples, strict=True)]
    masks = [[False] * len(p) + [True] * len(s.ids) for p, s in zip(prompts, samples, strict=True)]
    batch = PackedBatch.from_sequences(whole, masks)
    records = []
    for prompt, sample in zip(prompts, samples, strict=True):
        record = Record(prompt)
        record.sampled(sample)
        records.append(record.columns()["routing"].reshape(len(record), -1))
    batch.routing = torch.from_numpy(np.concatenate(records))
    return batch


def engine_logprobs(prompts, samples):
    """[T] of the tokens of ``batch_of``, 0 for those of prompts."""
    return torch.cat([torch.tensor([0.0] * len(p) + s.logprobs) for p, s in zip(prompts, samples, strict=True)])


def gap(worker, batch, engine, *, replay):
    """The mean gap of log-probabilities over sampled tokens, and the divergence (k3) of the two."""
    routing = batch.routing if replay else None
    [own] = worker.logprobs([PackedBatch(**{**vars(batch), "routing": routing})])
    difference = (own - engine)[batch.loss_mask]
    return float(difference.abs().mean()), float((difference.exp() - 1 - difference).mean())
