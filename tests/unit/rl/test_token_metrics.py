"""Metrics of the policy's tokens mean the same whatever the loss weights add up to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import pytest
import torch

from posttrain.algos.reduce import token_weights
from posttrain.config import AlgoConfig, TrainConfig
from posttrain.config.algo import Aggregation
from posttrain.data.pack import PackedBatch
from posttrain.models.load import ModelSource
from posttrain.rl.metrics import update_metrics
from posttrain.train.spec import LossSpec, WorkerSpec
from tests.helpers.local_trainer import LocalGroup, local_trainer

LENGTH = 40


@pytest.fixture(scope="module")
def group() -> Iterator[LocalGroup]:
    spec = WorkerSpec(ModelSource("builtin:tiny"), "cpu", "float32", 3, 1.0, TrainConfig(), total_steps=99)
    with local_trainer(spec, tokens_per_microbatch=LENGTH) as made:
        yield made


async def moved(group: LocalGroup, *, aggregation: str, factor: float = 1.0) -> PackedBatch:
    """Return two sequences, each a micro-batch, on which the policy is by 0.4 above the old one, which the clip holds,
    and by 0.2 above the reference."""
    ids = torch.randint(0, 1000, (2, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
    batch = PackedBatch.from_sequences(ids, [[False] * 4 + [True] * (LENGTH - 4)] * 2)
    batch.loss_weights = factor * token_weights(batch.loss_mask, batch.cu_seqlens, aggregation, norm_length=4096)
    batch.advantages = torch.ones(batch.num_tokens)
    now = await group.logprobs(batch)
    batch.old_logprobs, batch.ref_logprobs = now - 0.4, now - 0.2
    return batch


@pytest.mark.parametrize("factor", [1.0, 0.3], ids=["plain", "corrected"])
@pytest.mark.parametrize("aggregation", get_args(Aggregation))
async def test_shares_and_means_do_not_depend_on_the_sum_of_the_loss_weights(
    group: LocalGroup, aggregation: str, factor: float
) -> None:
    batch = await moved(group, aggregation=aggregation, factor=factor)
    assert batch.loss_weights is not None
    loss = LossSpec(AlgoConfig(kl_coef=0.1, kl_estimator="k1"))
    result = await group.update(batch, loss)
    metrics = update_metrics([result])
    assert metrics["actor/pg_clipfrac"] == pytest.approx(1.0)
    assert metrics["actor/ppo_kl"] == pytest.approx(-0.4, rel=1e-4)
    assert metrics["actor/kl_loss"] == pytest.approx(0.2, rel=1e-4)
    assert 5.0 < metrics["actor/entropy"] < 7.0  # of 1024 tokens, nearly alike
    clipped = 1.0 + AlgoConfig().clip_high
    assert metrics["actor/pg_loss"] == pytest.approx(-clipped * float(batch.loss_weights.sum()), rel=1e-4)


async def test_an_update_without_loss_weight_has_no_means(group: LocalGroup) -> None:
    batch = await moved(group, aggregation="token-mean")
    nothing = replace(batch, loss_weights=torch.zeros(batch.num_tokens))
    results = [await group.update(each, LossSpec(AlgoConfig())) for each in (nothing, batch)]
    assert update_metrics(results[:1]).keys() & {"actor/entropy", "actor/ppo_kl", "actor/pg_clipfrac"} == set()
    both, one = update_metrics(results), update_metrics(results[1:])
    assert both["actor/ppo_kl"] == one["actor/ppo_kl"] != 0.0
