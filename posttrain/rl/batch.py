"""Batches with advantages and loss weights, made from the trajectories of a step.

The formulas are in ``posttrain.algos``. What depends on more than one token is computed here, for all trajectories of a
step or of an update, and goes to the workers as columns; so no result depends on how these cut it into micro-batches.

Shape legend: T tokens of all trajectories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from posttrain.algos import ADVANTAGES, POLICY_LOSSES
from posttrain.algos.episodes import Episodes
from posttrain.algos.reduce import token_weights
from posttrain.algos.segments import segment_ids, segment_sum
from posttrain.algos.tokens import UpdateTokens
from posttrain.core.errors import CodeError, DataError, RunError
from posttrain.core.plugins import definition_of, with_place
from posttrain.data.images import ImageError, RawImage
from posttrain.data.pack import PackedBatch
from posttrain.rl.metrics import spread

if TYPE_CHECKING:
    from posttrain.config import AlgoConfig, Config
    from posttrain.core.types import Trajectory
    from posttrain.data.vision import VisionProcessor

Groups = Sequence[Sequence["Trajectory"]]


def usable(groups: Groups) -> list[Trajectory]:
    """Return the episodes that can be trained on, and whose rewards count in their groups. Raises ``RunError`` where
    there is none."""
    kept = [t for group in groups for t in group if t.trainable]
    if not kept:
        errors = {t.error for group in groups for t in group if t.error}
        hint = "mend what failed; the rollout files have the reason of each episode in the column error"
        if not errors and any(t.stop_reason == "prompt_too_long" for group in groups for t in group):
            errors = {"what environments began with is longer than rollout.max_prompt_tokens"}
            hint = "raise rollout.max_prompt_tokens, or have the environment begin with less"
        why = "; ".join(sorted(errors)[:3]) or "all are empty"
        raise RunError(f"no episode of this step can be trained on: {why}", hint=hint)
    return kept


def group_numbers(groups: Groups) -> list[int]:
    """Return the number of the group of each of the ``usable`` episodes. A row of the data may have several groups."""
    return [number for number, group in enumerate(groups) for t in group if t.trainable]


def pack(kept: Sequence[Trajectory], vision: VisionProcessor | None = None, *, routing: bool = False) -> PackedBatch:
    """Pack the episodes into one batch, with the engine's log-probabilities, the images of their prompts and tools,
    which ``vision`` reads, and with ``routing`` the experts that the engine chose.

    Raises:
        DataError: an image can no longer be read.
        RunError: an episode has no recorded experts.
    """
    batch = PackedBatch.from_sequences([t.tokens for t in kept], [t.loss_mask for t in kept])
    batch.rollout_logprobs = torch.cat([torch.from_numpy(t.logprobs) for t in kept])
    if routing:
        if missing := sum(not len(t.routing) for t in kept):
            raise RunError(
                f"rollout.router_replay = 'R3': {missing} of {len(kept)} episodes have no recorded experts",
                hint="rollout files have them where the run that wrote them had rollout.router_replay = 'R3'",
            )
        batch.routing = torch.cat([torch.from_numpy(t.routing.reshape(len(t.tokens), -1)) for t in kept])
    if vision is not None:
        images = [[RawImage.of(image) for image in (*t.prompt.images, *t.tool_images)] for t in kept]
        try:
            grids = {raw: vision.grid(raw) for raw in {raw for of_one in images for raw in of_one}}
            sized = [[(raw, grids[raw]) for raw in of_one] for of_one in images]
            vision.attach(batch, [vision.locate(t.tokens, found) for t, found in zip(kept, sized, strict=True)])
        except ImageError as error:
            raise DataError(f"an image of the training data: {error.message}", hint=error.hint) from error
    return batch


def stale_tokens(kept: Sequence[Trajectory], version: int) -> Tensor:
    """Return [T], true where other weights than those of ``version`` sampled the token (`rollout.partial_rollouts`)."""
    versions = torch.from_numpy(np.concatenate([t.weight_version for t in kept]))
    return (versions >= 0) & (versions != version)


def fill_advantages(
    batch: PackedBatch,
    kept: Sequence[Trajectory],
    groups: Groups,
    cfg: Config,
    *,
    penalties: Tensor | None = None,
    baselines: Mapping[int, float] | None = None,
    teacher_log_ratio: Tensor | None = None,
) -> dict[str, float]:
    """Give the batch ``advantages`` and, where the estimator has them, ``returns``. Returns metrics.

    Args:
        kept: the episodes of the batch, in order: ``usable(groups)``.
        groups: all episodes by prompt.
        penalties: [T] KL in the reward, times its coefficient.
        baselines: row of a prompt -> reward of its greedy episode.
        teacher_log_ratio: [T] log-probability under the teacher less that under the policy.
    """
    estimator = ADVANTAGES.get(cfg.algo.advantage)
    rewards = torch.tensor([t.reward for t in kept])
    parts = {}
    if estimator.parts:
        if missing := {name for t in kept for name in cfg.reward.weights.keys() - t.reward_parts.keys()}:
            raise RunError(f"reward.weights names {', '.join(sorted(missing))}, and not every episode has it")
        parts = {name: torch.tensor([t.reward_parts[name] for t in kept]) for name in cfg.reward.weights}
    episodes = Episodes(
        rewards,
        torch.tensor(group_numbers(groups)),
        batch.loss_mask,
        segment_ids(batch.cu_seqlens),
        penalties=penalties,
        parts=parts,
        part_weights=cfg.reward.weights,
        baselines=None if baselines is None else torch.tensor([baselines[t.prompt.index] for t in kept]),
        values=batch.values,
        teacher_log_ratio=teacher_log_ratio,
        played=torch.tensor([t.branch == 0 for t in kept]).cumsum(0),
    )
    result = estimator(episodes, cfg.algo.advantage_values)
    if estimator.critic and result.returns is None:
        what = f"advantage estimator {cfg.algo.advantage!r} has a critic, and gives no returns to train it on"
        raise CodeError(with_place(what, definition_of(estimator.function)), hint="give token_advantages(..., returns)")
    batch.advantages, batch.returns = result.advantages, result.returns
    own = batch.loss_mask
    metrics = spread("critic/score", rewards) | spread("critic/rewards", episodes.scores())
    metrics |= spread("critic/advantages", batch.advantages[own])
    if batch.returns is not None:
        metrics |= spread("critic/returns", batch.returns[own])
    if batch.values is not None and batch.returns is not None:
        metrics |= spread("critic/values", batch.values[own])
        metrics["critic/vf_explained_var"] = explained_variance(batch.values[own], batch.returns[own])
    return metrics


def keep_advantages(batch: PackedBatch, kept: Sequence[Trajectory]) -> None:
    """Give each episode the advantages of its tokens, for the rollout files."""
    assert batch.advantages is not None
    parts = batch.advantages.float().split([len(t.tokens) for t in kept])
    for trajectory, part in zip(kept, parts, strict=True):
        trajectory.advantages = part.numpy()


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant one, and 0 where all
    returns are equal."""
    spread_of_returns = float(returns.double().var(correction=0))
    left = float((returns.double() - values.double()).var(correction=0))
    return 1.0 - left / spread_of_returns if spread_of_returns > 0.0 else 0.0


def weigh(batch: PackedBatch, groups: Groups, cfg: Config) -> list[list[int]]:
    """Give the batch the loss weights of a step's optimizer updates. Groups stay whole, and each update has a loss of
    its own.

    Args:
        groups: all episodes by prompt; the batch has those that are ``usable``.

    Returns:
        The episodes of each update.
    """
    norm_length = cfg.algo.norm_length or cfg.rollout.max_response_tokens
    sequence, weights, updates = segment_ids(batch.cu_seqlens), torch.zeros(batch.num_tokens), []
    numbers = group_numbers(groups)
    for part in np.array_split(list(dict.fromkeys(numbers)), cfg.algo.updates_per_step):
        member = torch.from_numpy(np.isin(numbers, part))
        if len(part):
            updates.append(member.nonzero().flatten().tolist())
            mask = batch.loss_mask & member[sequence]
            weights += token_weights(mask, batch.cu_seqlens, cfg.algo.loss_agg, norm_length=norm_length)
    batch.loss_weights = weights
    return updates


def leave_out(batch: PackedBatch) -> dict[str, float]:
    """Take the loss from episodes whose advantages are all 0 (`train.skip_zero_advantages`), so that workers do not
    compute them. Loss weights stay: those of the others are what they were. Returns metrics."""
    assert batch.advantages is not None
    sequence = segment_ids(batch.cu_seqlens)
    of_sequence = segment_sum((batch.advantages != 0) & batch.loss_mask, sequence, batch.num_sequences) > 0
    kept = of_sequence[sequence]
    batch.loss_mask = batch.loss_mask & kept
    return {"perf/skipped_tokens": 1.0 - float(kept.double().mean())}


def minibatch(batch: PackedBatch, members: Sequence[int]) -> PackedBatch:
    """Return the batch of an optimizer update, of these episodes, with the correction in its loss weights."""
    part = batch if len(members) == batch.num_sequences else batch.select(members)
    weights = part.loss_weights
    assert weights is not None
    return replace(part, loss_weights=weights if part.correction is None else weights * part.correction)


def for_critic(part: PackedBatch) -> PackedBatch:
    """Return the batch of the critic's update, in which every token has the same weight."""
    return replace(part, loss_weights=token_weights(part.loss_mask, part.cu_seqlens, "token-mean"))


def prepared_column(part: PackedBatch, current: Tensor | None, algo: AlgoConfig, seed: int) -> Tensor:
    """Return the column [T] that the policy loss reads of an update's batch.

    Args:
        current: [T] log-probabilities under the policy before the update; None: all ratios are 1, and the loss says
            what the column is then.
        seed: of random choices.
    """
    loss = POLICY_LOSSES.get(algo.policy_loss)
    if current is None:
        assert loss.prepared_on_policy is not None
        return torch.full((part.num_tokens,), loss.prepared_on_policy)
    assert part.advantages is not None
    update = UpdateTokens(
        current,
        current if part.old_logprobs is None else part.old_logprobs,
        part.advantages,
        segment_ids(part.cu_seqlens),
        part.loss_mask,
        torch.Generator().manual_seed(seed),
    )
    return loss.column(update, algo.loss_values)
