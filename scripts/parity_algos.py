"""Compare posttrain.algos with verl 0.9.1 on random batches: values, gradients, metrics.

    python scripts/parity_algos.py --seeds 20

It runs on a CPU, in an environment of its own, which ``_verl_env`` makes the first time.

A row of the table is one function of verl. Its batches are padded [B, L] rectangles with tool tokens between the
policy's; ours are the same tokens side by side. The difference is the largest of any number over all seeds, in units of
the largest number in verl's tensor, or for scalars of 1 or the number if that is larger. Where the two differ on
purpose, the row says why, and compares ours with verl's number put right in the way that it says, so that nothing else
can hide behind it. Exit code 1: a difference above 1e-6.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import torch
from _verl_env import run_there
from torch import Tensor

from posttrain.algos import ADVANTAGES, POLICY_LOSSES, kl, losses, segments
from posttrain.algos.corrections import correct
from posttrain.algos.episodes import Episodes
from posttrain.algos.reduce import token_weights
from posttrain.algos.tokens import TokenInputs, UpdateTokens
from posttrain.config.algo import Aggregation

run_there()

from verl.trainer.ppo import core_algos, rollout_corr_helper  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402

TOLERANCE = 1e-6
GAMMA, LAM = 0.95, 0.9
CLIP_LOW, CLIP_HIGH, DUAL_CLIP = 0.2, 0.28, 3.0
NORM_LENGTH = 32


@dataclass
class Row:
    """One comparison of one seed."""

    name: str
    pairs: list[tuple[Any, Any]]
    """(ours, verl's), tensors or numbers"""
    why: str = ""
    """Why verl's number was put right first"""

    def difference(self) -> float:
        return max(_difference(ours, theirs) for ours, theirs in self.pairs)


def _difference(ours: Any, theirs: Any) -> float:
    ours, theirs = (torch.as_tensor(x).detach().double() for x in (ours, theirs))
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    scale = max(1.0, float(theirs.abs())) if theirs.ndim == 0 else float(theirs.abs().max()) or 1.0
    return float((ours - theirs).abs().max()) / scale


class Batch:
    """A random padded batch. Row 0 has no policy token; group 0 has equal rewards."""

    def __init__(self, seed: int, rows: int = 24, length: int = 19) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.index = np.arange(rows) % 6
        lengths = torch.randint(3, length + 1, (rows,), generator=self.generator)
        self.real = torch.arange(length) < lengths[:, None]
        policy = torch.rand(rows, length, generator=self.generator) < 0.75
        policy[:, 0] = True
        self.bool_mask = self.real & policy
        self.bool_mask[0] = False
        self.mask = self.bool_mask.double()
        self.rewards = torch.randint(0, 4, (rows,), generator=self.generator).double()
        self.rewards[torch.from_numpy(self.index == 0)] = 1.0
        self.values = self.normal(rows, length)
        self.penalties = 0.1 * self.normal(rows, length) * self.mask
        self.old = -self.normal(rows, length).abs() - 0.1
        self.logprobs = self.old + 0.4 * self.normal(rows, length)
        self.advantages = self.normal(rows, 1).expand(rows, length).contiguous()
        self.offsets = torch.cat([torch.zeros(1), self.real.sum(1)]).cumsum(0).long()

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def token_rewards(self, scores: Tensor, penalties: Tensor | None = None) -> Tensor:
        """[B, L] as verl has them: the score on the last policy token, or the last of all where there is none."""
        own = torch.where(self.bool_mask.any(1, keepdim=True), self.bool_mask, self.real)
        last = own & (own.flip(1).cumsum(1).flip(1) == 1)
        return last * scores[:, None] - (0.0 if penalties is None else penalties)

    def pack(self, padded: Tensor) -> Tensor:
        return padded[self.real]

    def episodes(self, index: np.ndarray | None = None, **columns: Any) -> Episodes:
        groups = torch.from_numpy(self.index if index is None else index)
        return Episodes(self.rewards, groups, self.pack(self.bool_mask), segments.segment_ids(self.offsets), **columns)


# ---------------------------------------------------------------------- advantages


def advantage_rows(seed: int) -> Iterator[Row]:
    batch = Batch(seed)
    config = SimpleNamespace(gamma=GAMMA)
    plain, with_kl = batch.token_rewards(batch.rewards), batch.token_rewards(batch.rewards, batch.penalties)
    penalties = {"penalties": batch.pack(batch.penalties)}
    options = {"gamma": GAMMA, "lam": LAM}

    def row(
        name: str, theirs: Any, columns: dict[str, Any], options: dict[str, Any], verl: str = "", why: str = ""
    ) -> Row:
        ours = ADVANTAGES.get(name)(batch.episodes(**columns), options)
        pairs = [(ours.advantages, batch.pack(theirs[0] * batch.mask))]
        if ours.returns is not None:
            pairs.append((ours.returns, batch.pack(theirs[1] * batch.mask)))
        return Row(f"advantage {verl or name}", pairs, why)

    def theirs(name: str, rewards: Tensor, **more: Any) -> Any:
        return core_algos.get_adv_estimator_fn(name)(rewards.clone(), response_mask=batch.mask, **more)

    groups = {"index": batch.index}
    for by_std in (True, False):
        own, label = {"normalize_by_std": by_std}, "" if by_std else ", no std"
        setting = groups | {"norm_adv_by_std_in_grpo": by_std}
        yield row("grpo", theirs("grpo", with_kl, **setting), penalties, own, f"grpo{label}")
        if not by_std:
            yield row("grpo", theirs("grpo_vectorized", plain, **setting), {}, own, f"grpo_vectorized{label}")
        passk = groups | {"config": {"norm_adv_by_std_in_grpo": by_std}}
        yield row("grpo_passk", theirs("grpo_passk", with_kl, **passk), penalties, own, f"grpo_passk{label}")
    for name in ("rloo", "rloo_vectorized", "reinforce_plus_plus_baseline", "opo"):
        estimator = name.removesuffix("_vectorized")
        yield row(estimator, theirs(name, with_kl, **groups), penalties, options, name)
    yield row("reinforce_plus_plus", theirs("reinforce_plus_plus", with_kl, config=config), penalties, options)
    baselines = batch.normal(len(batch.rewards))
    columns = penalties | {"baselines": baselines}
    yield row("remax", theirs("remax", with_kl, reward_baselines=baselines), columns, options)
    values = {"values": batch.values, "gamma": GAMMA, "lam": LAM}
    yield row("gae", theirs("gae", with_kl, **values), penalties | {"values": batch.pack(batch.values)}, options)
    yield gpg_row(batch, plain)
    yield gdpo_row(batch)
    yield from group_of_one_rows(batch, plain)


def gpg_row(batch: Batch, rewards: Tensor) -> Row:
    theirs, _ = core_algos.compute_gpg_outcome_advantage(rewards.clone(), batch.mask, batch.index)
    # The right factor counts episodes in groups with a gradient, not episodes with a reward other than 0.
    groups = [batch.rewards[torch.from_numpy(batch.index == g)] for g in sorted(set(batch.index.tolist()))]
    signal = sum(len(rewards) for rewards in groups if rewards.min() < rewards.max())
    theirs = theirs * int(batch.rewards.count_nonzero()) / signal
    ours = ADVANTAGES.get("gpg")(batch.episodes(), {}).advantages
    why = "the factor is B / (episodes of groups with unequal scores), as in the paper; verl's is B / (scores not 0)"
    return Row("advantage gpg", [(ours, batch.pack(theirs))], why)


def gdpo_row(batch: Batch) -> Row:
    parts = {"a": batch.rewards, "b": batch.normal(len(batch.rewards)).float().double()}  # verl makes them float32
    prompts = torch.zeros(len(batch.rewards), 2)
    theirs, _ = core_algos.compute_gdpo_outcome_advantage(
        batch.token_rewards(batch.rewards),
        batch.mask,
        batch.index,
        config={"gdpo_reward_keys": list(parts), "gdpo_reward_weights": [1.0, 0.5]},
        non_tensor_batch={name: rewards.numpy() for name, rewards in parts.items()},
        batch={"prompts": prompts, "attention_mask": torch.cat([prompts.long() + 1, batch.real.long()], 1)},
    )
    episodes = batch.episodes(parts=parts, part_weights={"b": 0.5})
    ours = ADVANTAGES.get("gdpo")(episodes, {"normalize_by_std": True}).advantages
    return Row("advantage gdpo", [(ours, batch.pack(theirs))])


def group_of_one_rows(batch: Batch, rewards: Tensor) -> Iterator[Row]:
    """Every episode a group of its own: verl passes the score on as it is, we say that nothing is known."""
    index, config = np.arange(len(batch.rewards)), SimpleNamespace(gamma=1.0)
    scores = batch.rewards[:, None] * batch.mask
    zero = torch.zeros_like(batch.mask)
    for name in ("grpo", "rloo", "opo"):
        advantages, _ = core_algos.get_adv_estimator_fn(name)(
            rewards.clone(), response_mask=batch.mask, index=index, config=config
        )
        ours = ADVANTAGES.get(name)(batch.episodes(index), {"normalize_by_std": True}).advantages
        expected = scores / (1 + 1e-6) if name == "grpo" else scores
        pairs = [(ours, batch.pack(zero)), (advantages, expected)]
        yield Row(f"advantage {name}, groups of one", pairs, "0: there is no baseline; verl's is the score itself")


# ---------------------------------------------------------------------- losses

VERL_LOSSES = {"clipped": "vanilla", "gmpo": "geo_mean"}
"""Ours -> verl's name, where they differ"""
PER_SEQUENCE = ("gmpo", "sapo")
"""verl aggregates these by seq-mean-token-mean whatever is asked for"""
COV_SHARE, COV_LOW, COV_HIGH, COV_COEF = 0.2, 0.1, 1.5, 0.7


def actor_config() -> ActorConfig:
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=CLIP_LOW,
        clip_ratio_high=CLIP_HIGH,
        clip_ratio_c=DUAL_CLIP,
    )
    policy = config.policy_loss
    # A share of 1 takes all candidates of clip_cov: which ones are drawn depends on the random generator.
    for key, value in {
        "clip_cov_ratio": 1.0, "clip_cov_lb": COV_LOW, "clip_cov_ub": COV_HIGH, "kl_cov_ratio": COV_SHARE,
        "ppo_kl_coef": COV_COEF,
    }.items():  # fmt: skip
        object.__setattr__(policy, key, value)
    return config


def loss_rows(seed: int) -> Iterator[Row]:
    batch, config = Batch(seed), actor_config()
    options = {
        "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "dual_clip": DUAL_CLIP,
        "tau_positive": config.tau_pos, "tau_negative": config.tau_neg,
        "clip_cov_share": 1.0, "clip_cov_low": COV_LOW, "clip_cov_high": COV_HIGH,
        "kl_cov_share": COV_SHARE, "kl_cov_coef": COV_COEF,
    }  # fmt: skip
    for name in POLICY_LOSSES.names():
        aggregation = "seq-mean-token-mean" if name in PER_SEQUENCE else "token-mean"
        logprobs = batch.logprobs.clone().requires_grad_()
        loss, metrics = core_algos.get_policy_loss_fn(VERL_LOSSES.get(name, name))(
            batch.old, logprobs, batch.advantages, batch.mask, aggregation, config
        )
        why = ""
        if name == "gmpo":  # the mean of verl is over all rows
            loss = loss * len(batch.mask) / int(batch.bool_mask.any(1).sum())
            why = "the mean is over sequences with policy tokens, verl's is over all rows"
        (gradient,) = torch.autograd.grad(loss, logprobs)
        own_loss, own_gradient, sums = our_loss(batch, name, options, aggregation)
        pairs = [(own_loss, loss), (own_gradient, batch.pack(gradient))]
        yield Row(f"loss {name}", pairs, why)
        if metrics:  # verl has none of gpg
            yield Row(f"loss {name}, metrics", *metric_pairs(batch, name, sums, metrics))


def our_loss(
    batch: Batch, name: str, options: dict[str, Any], aggregation: str
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return loss, gradient [T] and metrics; these weighted by token-mean, as verl's are."""
    logprobs = batch.pack(batch.logprobs).requires_grad_()
    old, advantages, mask = (batch.pack(x) for x in (batch.old, batch.advantages, batch.bool_mask))
    policy_loss, column = POLICY_LOSSES.get(name), None
    if policy_loss.prepare is not None:
        sequence = segments.segment_ids(batch.offsets)
        update = UpdateTokens(logprobs.detach(), old, advantages, sequence, mask, torch.Generator())
        column = policy_loss.column(update, options)
    tokens = TokenInputs(advantages, old, column)
    weights = token_weights(mask, batch.offsets, aggregation).double()
    loss, _ = losses.weighted_policy_loss(policy_loss, logprobs, tokens, options, weights)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    by_token = token_weights(mask, batch.offsets, "token-mean").double()
    return loss, gradient, losses.weighted_policy_loss(policy_loss, logprobs.detach(), tokens, options, by_token)[1]


def metric_pairs(
    batch: Batch, name: str, sums: dict[str, Tensor], metrics: dict[str, float]
) -> tuple[list[tuple[Any, Any]], str]:
    theirs = {key.removeprefix("actor/"): value for key, value in metrics.items()}
    why = ""
    if name == "kl_cov":
        difference = (batch.logprobs - batch.old)[batch.bool_mask]
        assert _difference(theirs["ppo_kl"], difference.abs().mean()) < TOLERANCE
        theirs["ppo_kl"] = -difference.mean()
        why = "ppo_kl is the mean of old - new as for other losses, verl's is of its size"
    if name == "gmpo":
        x, advantages = (y[batch.bool_mask] for y in (batch.logprobs - batch.old, batch.advantages))
        acts = torch.where(advantages > 0, x > CLIP_HIGH, x < -CLIP_LOW)
        theirs["pg_clipfrac"] = acts.double().mean()
        why = "pg_clipfrac counts tokens that the clip holds, verl's all that lie outside, on either side"
    return [(value, theirs[key]) for key, value in sums.items() if key in theirs], why


# ---------------------------------------------------------------------- KL, aggregation, critic


def kl_rows(seed: int) -> Iterator[Row]:
    batch = Batch(seed)
    ref = batch.logprobs + 3.0 * batch.normal(*batch.logprobs.shape)  # some are beyond the clamp
    for estimator in kl.ESTIMATORS:
        pairs = []
        for function in (kl.kl_penalty, core_algos.kl_penalty):
            logprobs = batch.logprobs.clone().requires_grad_()
            value = function(logprobs, ref, estimator)
            pairs.append((value, torch.autograd.grad(value.sum(), logprobs)[0]))
        yield Row(f"KL {estimator}", list(zip(*pairs, strict=True)))
    ours, theirs = kl.AdaptiveKl(0.1, 0.5, 1000), core_algos.AdaptiveKLController(0.1, 0.5, 1000)
    for x in torch.rand(50, generator=batch.generator).tolist():
        ours.update(x, 64)
        theirs.update(x, 64)
    yield Row("KL controller, adaptive", [(ours.value, theirs.value)])


def aggregation_rows(seed: int) -> Iterator[Row]:
    batch = Batch(seed)
    per_token = batch.normal(*batch.mask.shape)
    for aggregation in get_args(Aggregation):
        theirs = core_algos.agg_loss(per_token, batch.mask, aggregation, loss_scale_factor=NORM_LENGTH)
        weights = token_weights(batch.pack(batch.bool_mask), batch.offsets, aggregation, norm_length=NORM_LENGTH)
        yield Row(f"aggregation {aggregation}", [((weights.double() * batch.pack(per_token)).sum(), theirs)])


def value_rows(seed: int) -> Iterator[Row]:
    batch = Batch(seed)
    returns = batch.values + batch.normal(*batch.mask.shape)
    new = batch.values + batch.normal(*batch.mask.shape)
    theirs, own = new.clone().requires_grad_(), batch.pack(new).requires_grad_()
    loss, clipfrac = core_algos.compute_value_loss(theirs, returns, batch.values, batch.mask, 0.5)
    weights = token_weights(batch.pack(batch.bool_mask), batch.offsets, "token-mean").double()
    own_loss, sums = losses.value(own, batch.pack(batch.values), batch.pack(returns), weights, clip=0.5)
    gradients = torch.autograd.grad(own_loss, own)[0], batch.pack(torch.autograd.grad(loss, theirs)[0])
    yield Row("value loss", [(own_loss, loss), gradients, (sums["vf_clipfrac"], clipfrac)])


# ---------------------------------------------------------------------- corrections

NO_CORRECTION: dict[str, Any] = {
    "weight": "none", "upper": math.inf, "lower": None, "reject": "none", "reject_above": math.inf,
}  # fmt: skip
CORRECTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "token TIS": ({"weight": "token", "upper": 1.5}, {"rollout_is": "token", "rollout_is_threshold": 1.5}),
    "sequence TIS": ({"weight": "sequence", "upper": 2.0}, {"rollout_is": "sequence", "rollout_is_threshold": 2.0}),
    "token IcePop": (
        {"weight": "token", "upper": 1.5, "lower": 0.7}, {"rollout_is": "token", "rollout_is_threshold": "0.7_1.5"},
    ),
    "sequence IcePop": (
        {"weight": "sequence", "upper": 4.0, "lower": 0.3},
        {"rollout_is": "sequence", "rollout_is_threshold": "0.3_4.0"},
    ),
}  # fmt: skip
REJECTIONS = {
    # verl's bounds are of the ratio, or of half the squared log-ratio.
    "geometric_mean": (1.1, "seq_mean_k1", str(1.1)),
    "max_token": (2.5, "seq_max_k2", repr(0.5 * math.log(2.5) ** 2)),
}


def correction_rows(seed: int) -> Iterator[Row]:
    batch = Batch(seed)
    gap = batch.logprobs - batch.old
    arguments = batch.pack(gap), segments.segment_ids(batch.offsets), batch.pack(batch.bool_mask)
    for name, (options, settings) in CORRECTIONS.items():
        weights, metrics = correct(*arguments, **NO_CORRECTION | options)
        theirs, their_metrics = rollout_corr_helper.compute_rollout_correction_weights(gap, batch.mask, **settings)
        pairs = [(weights, batch.pack(theirs))]
        if options["weight"] == "token":
            pairs.append((metrics["correction/effective_sample_size"], their_metrics["rollout_is_eff_sample_size"]))
            pairs.append((metrics["correction/weight/mean"], their_metrics["rollout_is_mean"]))
        if "lower" in options:
            pairs.append((metrics["correction/masked"], their_metrics["rollout_is_oob_ratio"]))
        yield Row(f"correction {name}", pairs)
    for name, (bound, mode, threshold) in REJECTIONS.items():
        weights, metrics = correct(*arguments, **NO_CORRECTION | {"reject": name, "reject_above": bound})
        kept, _ = rollout_corr_helper.compute_rollout_rejection_mask(gap, batch.mask, mode, threshold)
        rejected = 1.0 - kept.any(1)[batch.bool_mask.any(1)].double().mean()
        yield Row(f"correction {name}", [(weights, batch.pack(kept)), (metrics["correction/rejected"], rejected)])


# ---------------------------------------------------------------------- the table

SECTIONS: tuple[Callable[[int], Iterator[Row]], ...] = (
    advantage_rows, loss_rows, kl_rows, aggregation_rows, value_rows, correction_rows,
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare posttrain.algos with verl.")
    parser.add_argument("--seeds", type=int, default=20)
    seeds = range(parser.parse_args().seeds)
    worst: dict[str, tuple[float, str]] = {}
    for section in SECTIONS:
        for seed in seeds:
            for row in section(seed):
                worst[row.name] = max(worst.get(row.name, (0.0, row.why)), (row.difference(), row.why))
    print("| compared | largest difference | where ours differs on purpose |\n| --- | --- | --- |")
    for name, (difference, why) in worst.items():
        print(f"| {name} | {difference:.0e} | {why} |")
    wrong = [name for name, (difference, _) in worst.items() if not difference <= TOLERANCE]
    print(f"\n{len(worst)} comparisons, {len(seeds)} batches each; above {TOLERANCE:.0e}: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
