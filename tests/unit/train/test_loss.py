"""The parts of a micro-batch's loss: what is added, what is subtracted, and what an update cannot do without."""

from __future__ import annotations

import pytest
import torch

from posttrain.algos.kl import kl_penalty
from posttrain.config import Config
from posttrain.core.errors import RunError
from posttrain.data.pack import PackedBatch
from posttrain.models.attention_kernels import choose
from posttrain.train.loss import token_loss, value_loss
from posttrain.train.microbatch import MicroBatch
from posttrain.train.spec import LossSpec

CPU = torch.device("cpu")
LOGPROBS, ENTROPIES = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([0.5, 2.0, 1.0])
ADVANTAGES, REFERENCE = torch.tensor([1.0, -1.0, 2.0]), torch.tensor([-1.5, -1.0, -0.5])
WEIGHTS = torch.tensor([0.5, 0.3, 0.2])


def micro_batch(**columns: torch.Tensor) -> MicroBatch:
    """Return three tokens that carry loss after a prompt of one, with these columns of theirs."""
    batch = PackedBatch.from_sequences([[7, 1, 2, 3]], [[False, True, True, True]])
    batch.loss_weights = torch.cat([torch.zeros(1), WEIGHTS])
    for name, column in columns.items():
        setattr(batch, name, torch.cat([torch.zeros(1), column]))
    return MicroBatch.build(batch, CPU, choose("sdpa", CPU, torch.float32))


def spec(**algo: object) -> LossSpec:
    return LossSpec(Config.model_validate({"command": "rl", "algo": algo}).algo)


def loss_of(spec: LossSpec, **columns: torch.Tensor) -> tuple[float, dict[str, float]]:
    total, sums = token_loss(micro_batch(**columns), LOGPROBS, ENTROPIES, slice(None), spec)
    return float(total), {name: float(value) for name, value in sums.items()}


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_a_kl_in_the_loss_is_added_and_the_entropy_subtracted(kl_in: str) -> None:
    policy = -float((WEIGHTS * ADVANTAGES).sum())  # at ratio 1
    entropy = float((WEIGHTS * ENTROPIES).sum())
    kl = float((WEIGHTS * kl_penalty(LOGPROBS, REFERENCE, "k2")).sum())
    made = spec(kl_coef=0.5, kl_in=kl_in, kl_estimator="k2", entropy_coef=0.25)
    total, sums = loss_of(made, advantages=ADVANTAGES, ref_logprobs=REFERENCE)
    assert total == pytest.approx(policy - 0.25 * entropy + (0.5 * kl if kl_in == "loss" else 0.0))
    assert (sums["pg_loss"], sums["entropy"]) == (pytest.approx(policy), pytest.approx(entropy))
    assert ("kl_loss" in sums) == (kl_in == "loss")
    assert sums["weight"] == pytest.approx(1.0)


@pytest.mark.parametrize("asked", [True, False])
def test_the_gap_is_summed_up_where_it_is_asked_for(asked: bool) -> None:
    made = LossSpec(spec().algo, gap=asked)
    _, sums = loss_of(made, advantages=ADVANTAGES, rollout_logprobs=LOGPROBS - 0.5)
    assert sums.get("gap/diff") == (1.5 if asked else None)


def test_a_correction_multiplies_the_weights_of_policy_and_entropy_and_has_no_gradient() -> None:
    algo = Config.model_validate({"command": "rl", "algo": {"correction": {"weight": "token", "upper": 1.5}}}).algo
    engine = LOGPROBS - torch.tensor([0.5, 0.25, 1.0]).log()  # ratios 0.5, 0.25 and 1
    columns = {"advantages": ADVANTAGES, "rollout_logprobs": engine}
    made = LossSpec(algo, gap=False, correction=algo.correction)
    total, sums = loss_of(made, **columns)
    weights = WEIGHTS * torch.tensor([0.5, 0.25, 1.0])
    assert total == pytest.approx(-float((weights * ADVANTAGES).sum()))
    assert sums["entropy"] == pytest.approx(float((weights * ENTROPIES).sum()))
    assert sums["weight"] == pytest.approx(float(weights.sum()))
    logprobs = LOGPROBS.clone().requires_grad_()
    token_loss(micro_batch(**columns), logprobs, ENTROPIES, slice(None), made)[0].backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx((-weights * ADVANTAGES).tolist())  # none through the weights


def test_an_update_names_the_column_that_it_lacks() -> None:
    with pytest.raises(RunError, match="a policy update needs advantages"):
        loss_of(spec())
    with pytest.raises(RunError, match="a correction needs the engine's log-probabilities"):
        loss_of(LossSpec(spec().algo, correction=spec().algo.correction), advantages=ADVANTAGES)
    with pytest.raises(RunError, match="needs the values before it"):
        value_loss(micro_batch(returns=ADVANTAGES), LOGPROBS, LossSpec())
