"""The trainer against a plain PyTorch loop over padded, unpacked rows: twenty steps, however the work is spread."""

import asyncio
import json
import math
from pathlib import Path

import pytest
import torch

from posttrain.algos.reduce import token_weights
from posttrain.cluster.cluster import Cluster, local_ray
from posttrain.config import Config
from posttrain.data.pack import PackedBatch
from posttrain.models.builtin import create_builtin
from posttrain.models.load import ModelSource
from posttrain.train.spec import LossSpec

STEPS, ROWS, SEED = 20, 12, 3
OPTIM = {
    "lr": 2e-3, "eps": 1e-6, "betas": [0.9, 0.95], "weight_decay": 0.1, "schedule": "cosine", "warmup_steps": 4,
    "min_lr_ratio": 0.1,
}  # fmt: skip
BUDGET = 1200  # tokens of a micro-batch: one of them holds all rows of a step
GOLDEN = Path(__file__).parent / "golden" / "sft_losses.json"


@pytest.fixture(scope="module", autouse=True)
def ray_here():
    with local_ray():
        yield


def rows(step):
    """Ids and loss masks of one step. Few different tokens: there is something to learn."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(2, 90, (ROWS,), generator=generator).tolist()
    ids = [torch.randint(40, (n,), generator=generator) for n in lengths]
    masks = [torch.rand(n, generator=generator) < 0.6 for n in lengths]
    masks[step % ROWS][:] = False  # a row without loss
    return ids, masks


def plain_loop():
    """Loss and gradient norm of every step with torch and transformers alone."""
    model = create_builtin("tiny", SEED).train()
    model.set_attn_implementation("eager")
    decay = [p for name, p in model.named_parameters() if p.ndim >= 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim < 2 or "embed" in name]
    groups = [{"params": decay, "weight_decay": OPTIM["weight_decay"]}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=OPTIM["lr"], betas=OPTIM["betas"], eps=OPTIM["eps"])

    def rate(step):
        if step < 4:
            return (step + 1) / 4
        return 0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * (step - 4) / (STEPS - 4)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for step in range(STEPS):
        ids, masks = rows(step)
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
        real = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in ids], batch_first=True)
        logits = model(input_ids=padded, attention_mask=real).logits
        targets = padded.masked_fill(~mask, -100)[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        yield {"loss": loss.item(), "grad_norm": norm.item()}


@pytest.fixture(scope="module")
def plain():
    found = list(plain_loop())
    assert found[-1]["loss"] < 0.6 * found[0]["loss"]
    return found


def curve(workers, **train):
    section = {"optim": OPTIM, "tokens_per_microbatch": BUDGET} | train
    cfg = Config.model_validate({
        "command": "sft", "run": {"seed": SEED}, "train": section, "cluster": {"workers": workers, "device": "cpu"},
    })  # fmt: skip

    async def main():
        async with Cluster(cfg) as cluster:
            group = await cluster.trainer("actor", ModelSource("builtin:tiny"), total_steps=STEPS)
            found = []
            for step in range(STEPS):
                ids, masks = rows(step)
                batch = PackedBatch.from_sequences(ids, masks)
                batch.loss_weights = token_weights(batch.loss_mask, batch.cu_seqlens, "token-mean")
                found.append(await group.update(batch, LossSpec()))
            last = await group.logprobs(batch)
            return found, last

    return asyncio.run(main())


WAYS = {
    "one worker": (1, {}),
    "one worker, 4 micro-batches": (1, {"tokens_per_microbatch": BUDGET // 4}),
    "one worker, 8 micro-batches": (1, {"tokens_per_microbatch": BUDGET // 8, "activation_checkpointing": "full"}),
    "two workers": (2, {}),
    "two workers, 4 micro-batches": (2, {"tokens_per_microbatch": BUDGET // 4, "reduce_gradients": "step"}),
    "two workers, 4 micro-batches, weights gathered once": (
        2, {"tokens_per_microbatch": BUDGET // 4, "gather_weights": "step"},
    ),
    "two replicas": (2, {"shard_size": 1, "activation_checkpointing": "selective"}),
    "two workers share sequences": (2, {"sequence_parallel": 2}),
    "two workers share sequences, 8 micro-batches": (
        2, {"sequence_parallel": 2, "tokens_per_microbatch": BUDGET // 8, "cpu_offload": True},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_plain_loop_takes_the_same_steps(way, plain):
    workers, train = WAYS[way]
    found, last = curve(workers, **train)
    for n, (step, wanted) in enumerate(zip(found, plain, strict=True), start=1):
        for name in ("loss", "grad_norm"):
            assert step[name] == pytest.approx(wanted[name], rel=1e-5), f"{name} of step {n}"
        assert step["skipped"] == 0.0
    assert torch.isfinite(last).all()
    assert (last != 0).any()


def test_the_plain_loop_is_as_it_was(plain):
    """A change of the built-in model, its initialisation or of the libraries beneath shows here first."""
    golden = json.loads(GOLDEN.read_text())
    assert [step["loss"] for step in plain] == pytest.approx(golden["loss"], rel=1e-4)
    assert [step["grad_norm"] for step in plain] == pytest.approx(golden["grad_norm"], rel=1e-3)
