"""`posttrain prefer`: training on pairs of answers, a policy (DPO) or a reward model.

In each step the workers compute one number for each sequence, the log-probability of an answer or the score of a
conversation. The driver computes the loss of the pairs and its derivative with respect to each number
(``algos.preference``), and passes these to an ordinary update as loss weights. The gradient is then that of the pair
loss, however workers and micro-batches divide the pairs, at the cost of one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from posttrain import launch
from posttrain.algos.preference import PairResult, bradley_terry, dpo, pair_metrics, token_weights
from posttrain.algos.segments import segment_ids, segment_sum
from posttrain.cluster.cluster import Cluster
from posttrain.cluster.trainers import reference_logprobs
from posttrain.config import Config
from posttrain.config.presets import Resolved
from posttrain.data.pack import PackedBatch
from posttrain.data.prefetch import Rendered
from posttrain.data.samples import RenderPairs, preference_shards
from posttrain.data.shards import Shards
from posttrain.models.classifier import classifier_config
from posttrain.runs.training_run import TrainingRun
from posttrain.sft.job import prepare
from posttrain.sft.objective import Objective, Samples
from posttrain.sft.samples import conversation_renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.cluster.trainers import TrainerGroup
    from posttrain.data.vision import VisionProcessor
    from posttrain.models.load import ModelSource

_VAL_BATCH = 128
"""Pairs of one batch in a validation."""


def run(resolved: Resolved) -> Path:
    """Train as the config says; returns the run's folder. Raises as ``launch.run`` does."""
    return launch.run(resolved, partial(prepare, objective=Pairs()))


def dry_run(resolved: Resolved) -> str:
    """Return the plan of the run after all its checks; see ``launch.dry_run``."""
    return launch.dry_run(resolved, partial(prepare, objective=Pairs()))


class Pairs(Objective):
    """Pairs of answers, of which one is preferred."""

    one, many = "pair", "pairs"
    nothing = "no assistant token to train on, or the same tokens in both answers"

    def shards(self, paths: str | Sequence[str]) -> Shards:
        return preference_shards(paths)

    def renderer(self, cfg: Config, tokenizer: PreTrainedTokenizerBase) -> RenderPairs:
        end = tokenizer.eos_token_id if cfg.trains_reward_model else None
        return RenderPairs(conversation_renderer(cfg, tokenizer, self.vision), end)

    def pack(self, samples: Samples) -> PackedBatch:
        return pack(samples, self.vision)

    async def start(self, cluster: Cluster, run: TrainingRun, val: Sequence[Rendered]) -> PairLearner:
        scores = run.cfg.trains_reward_model
        actor = await cluster.trainer("actor", run.source, total_steps=run.total_steps, values=scores)
        run.describe(actor)
        ref = None
        if not scores and run.cfg.train.lora.rank is None:
            ref = await cluster.trainer("reference", run.source, trainable=False)
        batches = [pack(val[i : i + _VAL_BATCH], self.vision) for i in range(0, len(val), _VAL_BATCH)]
        return PairLearner(run, actor, ref, batches)

    def check(self, cfg: Config, source: ModelSource) -> None:
        if cfg.trains_reward_model:
            classifier_config(source)


@dataclass(frozen=True)
class PairScores:
    """The loss of a batch of P pairs, and the log-probabilities that it came from."""

    result: PairResult
    logps: Tensor | None
    """[2P] log-probabilities of the answers under the policy; None for a reward model"""

    def metrics(self, loss: str = "loss") -> dict[str, float]:
        """Return means over the pairs, with the loss under the name ``loss``."""
        found = {loss: self.result.loss, **pair_metrics(self.result.chosen, self.result.rejected)}
        if self.logps is not None:
            chosen, rejected = self.logps.chunk(2)
            found |= {"logps/chosen": float(chosen.mean()), "logps/rejected": float(rejected.mean())}
        return found


@dataclass(frozen=True)
class PairLearner:
    """A ``SampleLearner`` of pairs. ``ref`` is None for a reward model, and with LoRA, where the actor without its
    adapter is the reference."""

    run: TrainingRun
    actor: TrainerGroup
    ref: TrainerGroup | None
    val: Sequence[PackedBatch]

    async def weigh(self, batch: PackedBatch) -> dict[str, float]:
        """Give a batch the derivative of its loss as weights; returns metrics of the pairs before the update."""
        scores = await self.score(batch)
        batch.loss_weights = token_weights(scores.result.slopes, segment_ids(batch.cu_seqlens), batch.loss_mask)
        return scores.metrics("train/loss")

    async def validate(self, done: Callable[[int], None]) -> dict[str, float]:
        """Return means over all pairs."""
        sums: dict[str, float] = {}
        for batch in self.val:
            scores = await self.score(batch)
            _add(sums, scores.metrics(), batch.num_sequences // 2)
            done(batch.num_sequences // 2)
        pairs = sum(batch.num_sequences // 2 for batch in self.val)
        return {name: value / pairs for name, value in sums.items()}

    async def score(self, batch: PackedBatch) -> PairScores:
        """Return the loss of a batch and its derivative. The reference's log-probabilities stay in the batch."""
        cfg, tracker = self.run.cfg.prefer, self.run.tracker
        if cfg.method == "reward_model":
            with tracker.phase("values"):
                scores = _per_sequence(await self.actor.values(batch), batch)  # one token of each carries loss
            smoothing, centering = cfg.label_smoothing, cfg.center_coef
            return PairScores(bradley_terry(scores, label_smoothing=smoothing, center_coef=centering), None)
        with tracker.phase("log_prob"):
            logps = _per_sequence(await self.actor.logprobs(batch), batch)
        if batch.ref_logprobs is None:
            with tracker.phase("ref"):
                batch.ref_logprobs = await reference_logprobs(batch, self.actor, self.ref)
        result = dpo(
            logps,
            _per_sequence(batch.ref_logprobs, batch),
            _per_sequence(batch.loss_mask, batch),
            loss=cfg.loss,
            beta=cfg.beta,
            label_smoothing=cfg.label_smoothing,
            nll_coef=cfg.nll_coef,
            length_normalized=cfg.length_normalized,
        )
        return PairScores(result, logps)


def _add(sums: dict[str, float], means: Mapping[str, float], count: int) -> None:
    for name, mean in means.items():
        sums[name] = sums.get(name, 0.0) + count * mean


def _per_sequence(column: Tensor, batch: PackedBatch) -> Tensor:
    """Return the sum over each sequence, [B] float64, of a column [T] that is 0 at tokens without loss."""
    return segment_sum(column, segment_ids(batch.cu_seqlens), batch.num_sequences)


def pack(pairs: Samples, vision: VisionProcessor | None = None) -> PackedBatch:
    """Pack P pairs as a batch of 2P sequences: all chosen ones, then the rejected ones in the same order.

    Raises:
        DataError: an image can no longer be read.
    """
    both = [(p, slice(p.second)) for p in pairs] + [(p, slice(p.second, None)) for p in pairs]
    batch = PackedBatch.from_sequences([p.ids[part] for p, part in both], [p.mask[part] for p, part in both])
    if vision is not None:
        chosen = [[image for image in p.images if image.start < p.second] for p in pairs]
        rejected = [[replace(i, start=i.start - p.second) for i in p.images if i.start >= p.second] for p in pairs]
        vision.attach_read(batch, [*chosen, *rejected])
    return batch
