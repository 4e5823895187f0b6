"""The models of an `rl` run, and the updates that they take on the trajectories of a step."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.algos import ADVANTAGES, POLICY_LOSSES
from posttrain.algos.corrections import correct
from posttrain.algos.gap import gap_sums
from posttrain.algos.kl import AdaptiveKl, FixedKl, kl_penalty
from posttrain.algos.segments import segment_ids
from posttrain.cluster.cluster import Cluster
from posttrain.cluster.trainers import reference_logprobs
from posttrain.data.pack import PackedBatch
from posttrain.models.processors import load_vision
from posttrain.rl.batch import (
    Groups,
    fill_advantages,
    for_critic,
    keep_advantages,
    leave_out,
    minibatch,
    pack,
    prepared_column,
    stale_tokens,
    usable,
    weigh,
)
from posttrain.rl.metrics import critic_metrics, gap_by_age, gap_metrics, update_metrics
from posttrain.runs.preflight import find_model
from posttrain.runs.speed import update_speed
from posttrain.runs.training_run import TrainingRun
from posttrain.train.spec import LossSpec

if TYPE_CHECKING:
    from posttrain.cluster.trainers import TrainerGroup
    from posttrain.config import AlgoConfig
    from posttrain.core.types import Trajectory
    from posttrain.data.vision import VisionProcessor


@dataclass
class Learner:
    """The models that the algorithm needs, and their updates. With LoRA the reference is the actor without its adapter,
    and ``ref`` is None."""

    run: TrainingRun
    actor: TrainerGroup
    critic: TrainerGroup | None
    ref: TrainerGroup | None
    teacher: TrainerGroup | None
    kl: FixedKl | AdaptiveKl
    """Coefficient of the KL penalty in the reward."""
    vision: VisionProcessor | None = None
    """What reads the images of prompts; None: the models read text alone."""

    @staticmethod
    async def open(cluster: Cluster, run: TrainingRun) -> Learner:
        """Start the models that the algorithm needs."""
        cfg, algo, source = run.cfg, run.cfg.algo, run.source
        temperature, updates = cfg.rollout.temperature, run.total_steps * algo.updates_per_step
        of_actor = (run.total_steps - cfg.critic.warmup_steps) * algo.updates_per_step
        actor = await cluster.trainer("actor", source, temperature=temperature, total_steps=of_actor)
        run.describe(actor)
        if cfg.train.skip_zero_advantages and (others := cfg.trained_without_advantage):
            run.tracker.note(f"train.skip_zero_advantages does nothing: with {others[0]} every episode has a part")
        critic = ref = teacher = None
        if ADVANTAGES.get(algo.advantage).critic:
            start = find_model(cfg, cfg.critic.path) if cfg.critic.path else source
            critic = await cluster.trainer("critic", start, total_steps=updates, train=cfg.critic_train, values=True)
        if algo.kl_coef > 0 and cfg.train.lora.rank is None:
            ref = await cluster.trainer("reference", source, temperature=temperature, trainable=False)
        if ADVANTAGES.get(algo.advantage).teacher:
            start = find_model(cfg, algo.teacher)
            teacher = await cluster.trainer("teacher", start, temperature=temperature, trainable=False)
        return Learner(run, actor, critic, ref, teacher, kl_in_reward(algo), load_vision(source))

    @property
    def models(self) -> list[TrainerGroup]:
        """All models, which take turns with the engines on shared GPUs."""
        return [group for group in (self.actor, self.critic, self.ref, self.teacher) if group is not None]

    @property
    def trained(self) -> dict[str, TrainerGroup]:
        """The models that a checkpoint holds, by the names of their folders in it."""
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})

    async def warm_up(self) -> None:
        """Prepare the models that are trained for their first update, while engines sample; not where trainers leave
        the GPUs to these meanwhile."""
        cfg = self.run.cfg
        if not (cfg.rollout.sleep or cfg.train.offload):
            scores = {"actor": cfg.scores_before_updates, "critic": True}
            await asyncio.gather(*(group.warm_up(scores=scores[name]) for name, group in self.trained.items()))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps besides the models, as JSON."""
        return {"kl_coef": self.kl.value, "kl_settings": self._kl_settings}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken. A coefficient of the KL with another start or target begins anew."""
        settings = state.get("kl_settings", self._kl_settings)  # checkpoints of before lack them
        if isinstance(self.kl, AdaptiveKl) and settings == self._kl_settings:
            self.kl.value = float(state["kl_coef"])

    @property
    def _kl_settings(self) -> list[float | None]:
        return [self.run.cfg.algo.kl_coef, self.run.cfg.algo.kl_target]

    async def learn(
        self, groups: Groups, *, version: int | None, baselines: Mapping[int, float] | None = None
    ) -> tuple[list[Trajectory], dict[str, float]]:
        """Take the optimizer updates of a step.

        Args:
            groups: episodes of the same prompts.
            version: of the actor's weights. Ratios are taken to the actor's own log-probabilities where these weights
                sampled, and to the engine's recorded ones where others did, but for ``_ratio_to_engine``. None: others
                sampled everything.
            baselines: row of a prompt -> reward of its greedy episode, for an estimator that needs it. Episodes of a
                prompt that has none are left out.

        Returns:
            The episodes that were trained on, which now have their ``advantages``, and metrics.

        Raises:
            RunError: there is no such episode, or updates were skipped too often.
        """
        played = len(groups)
        if baselines is not None:
            groups = [group for group in groups if group[0].prompt.index in baselines]
        kept = usable(groups)
        batch = pack(kept, self.vision, routing=self.run.cfg.rollout.router_replay != "off")
        metrics: dict[str, float] = {}
        own = await self._own_logprobs(batch) if self.run.cfg.advantages_read_policy else None
        await self._read_others(batch)
        if batch.routing is not None:
            metrics["moe/replay_bytes_per_token"] = float(batch.routing.shape[1])
        if baselines is not None:
            metrics["rollout/missing_baselines"] = float(played - len(groups))
        teacher = await self._teacher_log_ratio(batch, own)
        with self.run.tracker.phase("adv"):
            penalties, of_kl = self._kl_penalties(batch, own)
            if of_kl and self._trains_actor:  # else it is at the reference's weights
                self.kl.update(of_kl["actor/reward_kl_penalty"], sum(t.branch == 0 for t in kept))
            metrics |= of_kl | fill_advantages(
                batch, kept, groups, self.run.cfg, penalties=penalties, baselines=baselines, teacher_log_ratio=teacher
            )
            keep_advantages(batch, kept)
            updates = weigh(batch, groups, self.run.cfg)
            if self.run.cfg.skips_zero_advantages:
                metrics |= leave_out(batch)
        own, of_ratios = await self._score(batch, kept, version, own)
        metrics |= of_ratios
        parts = [minibatch(batch, members) for members in updates]
        if self.critic is not None:
            metrics |= await self._update_critic(self.critic, parts)
        if self._trains_actor:
            metrics |= await self._update_actor(parts, version, own)
            if self.actor.before_update is not None:
                metrics |= self._correct(batch, kept, version, self.actor.before_update)[1]
        metrics["perf/total_num_tokens"] = float(batch.num_tokens)
        metrics["actor/skipped_steps"] = float(self.run.skipped_steps)
        return kept, metrics

    @property
    def _trains_actor(self) -> bool:
        """Return whether the current step trains the actor, and not the critic alone."""
        return self.critic is None or self.run.step >= self.run.cfg.critic.warmup_steps

    # ------------------------------------------------------------------ before the updates

    async def _own_logprobs(self, batch: PackedBatch) -> Tensor:
        """Return the actor's log-probabilities [T] before the updates."""
        with self.run.tracker.phase("old_log_prob"):
            return await self.actor.logprobs(batch)

    async def _read_others(self, batch: PackedBatch) -> None:
        """Compute the batch's columns that come from the reference and the critic."""
        if self.run.cfg.algo.kl_coef > 0:
            with self.run.tracker.phase("ref"):
                batch.ref_logprobs = await reference_logprobs(batch, self.actor, self.ref)
        if self.critic is not None:
            with self.run.tracker.phase("values"):
                batch.values = await self.critic.values(batch)

    async def _score(
        self, batch: PackedBatch, kept: Sequence[Trajectory], version: int | None, own: Tensor | None = None
    ) -> tuple[Tensor | None, dict[str, float]]:
        """Compute the log-probabilities that ratios are taken to, and the correction, as columns of the batch. Returns
        the actor's ``own`` log-probabilities [T], which may be known already, where something reads them, and metrics.

        In a step of one update by the policy that sampled, all ratios are 1, and ``old_logprobs`` stay None. A
        correction of tokens is then left to the update, whose forward pass computes what it needs.
        """
        cfg, engine = self.run.cfg, batch.rollout_logprobs
        assert engine is not None
        to_engine = self._ratio_to_engine(kept, version)
        moves = cfg.algo.updates_per_step > 1 or bool(to_engine.any())
        if own is None and (cfg.scores_before_updates or (moves and version is not None)):
            own = await self._own_logprobs(batch)
        if moves:
            batch.old_logprobs = engine if own is None else torch.where(to_engine, engine, own)
        if own is None:
            return None, {}
        batch.correction, metrics = self._correct(batch, kept, version, own)
        return own, metrics

    def _correct(
        self, batch: PackedBatch, kept: Sequence[Trajectory], version: int | None, own: Tensor
    ) -> tuple[Tensor | None, dict[str, float]]:
        """Return the factors [T] of the loss weights, None without a correction, and metrics of them and of the gap
        between trainer and engine, from the actor's ``own`` log-probabilities [T] before the first update."""
        assert batch.rollout_logprobs is not None
        sums = gap_sums(own[batch.loss_mask], batch.rollout_logprobs[batch.loss_mask])
        metrics = gap_metrics({name: float(value) for name, value in sums.items()})
        gap, factors = own - batch.rollout_logprobs, None
        if self.run.cfg.rollout.staleness and version is not None:
            metrics |= gap_by_age(gap, stale_tokens(kept, version), batch.loss_mask)
        if self.run.cfg.correction.active:
            # A ratio that is taken to the engine has the correction in it.
            gap = torch.where(self._ratio_to_engine(kept, version), 0.0, gap)
            sequence = segment_ids(batch.cu_seqlens)
            factors, of_weights = correct(gap, sequence, batch.loss_mask, **self.run.cfg.correction.model_dump())
            if batch.loss_mask.any():  # else all episodes are left out
                metrics |= of_weights
        return factors, metrics

    def _ratio_to_engine(self, kept: Sequence[Trajectory], version: int | None) -> Tensor:
        """Return [T], true where ratios are taken to the engine's recorded log-probabilities.

        With `rollout.staleness` and a correction none are: the policy before the update is the proximal one, and the
        correction weighs a token by proximal / engine, whatever version sampled it (decoupled PPO, arXiv:2110.00641).
        """
        if version is None:
            return torch.ones(sum(len(t.tokens) for t in kept), dtype=torch.bool)
        stale = stale_tokens(kept, version)
        decoupled = self.run.cfg.rollout.staleness and self.run.cfg.correction.active
        return torch.zeros_like(stale) if decoupled else stale

    def _kl_penalties(self, batch: PackedBatch, own: Tensor | None) -> tuple[Tensor | None, dict[str, float]]:
        """Return the KL penalty in the reward, [T], times its coefficient; and metrics."""
        algo = self.run.cfg.algo
        if algo.kl_in != "reward":
            return None, {}
        assert own is not None
        assert batch.ref_logprobs is not None
        kl = kl_penalty(own, batch.ref_logprobs, algo.kl_estimator) * batch.loss_mask
        mean = float(kl.double().sum() / batch.loss_mask.sum())
        metrics = {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": self.kl.value}
        return self.kl.value * kl, metrics

    async def _teacher_log_ratio(self, batch: PackedBatch, own: Tensor | None) -> Tensor | None:
        """Return the log-probability under the teacher, where there is one, less that under the actor, [T]."""
        if self.teacher is None:
            return None
        assert own is not None
        with self.run.tracker.phase("teacher"):
            return await self.teacher.logprobs(batch) - own

    # ------------------------------------------------------------------ the updates

    async def _update_critic(self, critic: TrainerGroup, parts: Sequence[PackedBatch]) -> dict[str, float]:
        loss = LossSpec(value_clip=self.run.cfg.critic.value_clip)
        with self.run.tracker.phase("update_critic"):
            results = [await self.run.update(critic, for_critic(part), loss) for part in parts]
        return critic_metrics(results)

    async def _update_actor(
        self,
        parts: Sequence[PackedBatch],
        version: int | None,
        own: Tensor | None,
    ) -> dict[str, float]:
        """Take the actor's updates.

        Args:
            own: its log-probabilities [T] of the whole step before them, where known.
        """
        algo, results = self.run.cfg.algo, []
        policy_loss = POLICY_LOSSES.get(algo.policy_loss)
        correction = self.run.cfg.correction if self.run.cfg.correction.active and own is None else None
        loss = LossSpec(algo, gap=own is None and correction is None, correction=correction)  # else ``_correct`` does
        async with self.run.profiled(self.actor):
            with self.run.tracker.phase("update_actor"):
                for number, part in enumerate(parts):
                    if policy_loss.prepare is not None:
                        current = None
                        if policy_loss.reads_current or part.old_logprobs is not None:
                            current = own if len(parts) == 1 and own is not None else await self.actor.logprobs(part)
                        seed = (self.run.cfg.run.seed << 32) + (self.run.step << 10) + number
                        part = replace(part, prepared=prepared_column(part, current, algo, seed))
                    results.append(await self.run.update(self.actor, part, loss))
        tokens = int(sum(part.cu_seqlens.diff()[part.carrying].sum() for part in parts))
        metrics = update_metrics(results) | update_speed(results, tokens, self.actor)
        # Fewer than algo.updates_per_step where fewer prompts than that are left: groups stay whole.
        return metrics | {"actor/updates": float(len(parts))}


def kl_in_reward(algo: AlgoConfig) -> FixedKl | AdaptiveKl:
    """Return the coefficient of the KL penalty in the reward."""
    if algo.kl_target is None:
        return FixedKl(algo.kl_coef)
    return AdaptiveKl(algo.kl_coef, algo.kl_target, algo.kl_horizon)
