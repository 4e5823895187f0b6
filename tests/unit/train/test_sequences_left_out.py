"""Sequences without loss are not computed, and every parameter takes the step that it takes with their zeros: also
those of a vision tower whose images are all left out, and of experts to which no token is left."""

from dataclasses import replace

import pytest
import torch

from posttrain.algos.reduce import token_weights
from posttrain.config import AlgoConfig, TrainConfig
from posttrain.data.pack import PackedBatch
from posttrain.models.load import ModelSource
from posttrain.models.processors import load_vision
from posttrain.rl.batch import leave_out
from posttrain.sft.command import pack
from posttrain.train.spec import LossSpec, WorkerSpec
from tests.helpers import seeing
from tests.helpers.local_trainer import local_trainer
from tests.helpers.mixtures import mixture, prompts_of

TRAIN = {"optim": {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.1}, "tokens_per_microbatch": 300}


def with_images():
    source = ModelSource("builtin:tiny-vision")
    return source, pack(seeing.rendered(source), load_vision(source)), TRAIN | {"vision_tower": "trained"}


def with_experts(folder):
    ids = prompts_of([20, 5, 30, 9, 14, 26])
    masks = [[False] * 3 + [True] * (len(s) - 3) for s in ids]
    return mixture(folder), PackedBatch.from_sequences(ids, masks), TRAIN


def columns(batch):
    batch.loss_weights = token_weights(batch.loss_mask, batch.cu_seqlens, "token-mean")
    batch.rollout_logprobs = torch.zeros(batch.num_tokens)
    batch.advantages = (torch.arange(batch.num_tokens) % 7 - 3.0) * batch.loss_mask


@pytest.mark.parametrize("left", [(1, 4), (1,), ()], ids=["two", "one", "none"])
@pytest.mark.parametrize("kind", ["images", "experts"])
async def test_every_parameter_takes_the_same_step(tmp_path, kind, left):
    source, batch, train = with_images() if kind == "images" else with_experts(tmp_path)
    columns(batch)
    of_sequence = torch.zeros(batch.num_sequences, dtype=torch.bool)
    of_sequence[list(left)] = True
    of_tokens = of_sequence.repeat_interleave(batch.cu_seqlens.diff().long())
    whole = replace(batch, advantages=batch.advantages * of_tokens)
    if kind == "images":
        assert batch.images is not None
        assert batch.select(left or (1, 4)).images is None
    fewer = replace(whole)
    leave_out(fewer)
    assert fewer.carrying == list(left)
    loss, found, metrics = LossSpec(AlgoConfig()), [], []
    spec = WorkerSpec(source, "cpu", "float32", 0, 1.0, TrainConfig.model_validate(train), total_steps=3)
    for second in (whole, fewer):
        with local_trainer(spec, tokens_per_microbatch=300) as group:
            metrics.append([await group.update(each, loss) for each in (batch, second, batch)])
            worker = group.worker
            state = {n: worker.optimizer.state[p] for n, p in worker.parameters.items()}
            found.append({n: (p.detach().clone(), state[n]) for n, p in worker.parameters.items()})
    assert {float(state["step"]) for _, state in found[1].values()} == {3.0}
    for name, (tensor, state) in found[0].items():
        torch.testing.assert_close(found[1][name][0], tensor, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: n + text)
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(found[1][name][1][moment], state[moment], rtol=1e-3, atol=1e-6)
    assert metrics[1][1]["tokens_run"] < 0.6 * metrics[0][1]["tokens_run"]
    assert metrics[1][1]["grad_norm"] == pytest.approx(metrics[0][1]["grad_norm"], rel=1e-4, abs=1e-7)
