"""`posttrain prefer`: training on pairs of answers, a policy (DPO) or a reward model.

In each step the driver asks the workers for one number a sequence, the log-probability of an answer or the score of a
conversation. It takes the loss of the pairs and its derivative by each number (``algos.preference``), and gives these
to an ordinary update as loss weights. The gradient is that of the loss of the pairs, however workers and micro-batches
divide them, at the price of a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from posttrain.algos.preference import PairResult, bradley_terry, dpo, pair_metrics, token_weights
from posttrain.algos.segments import owners, totals
from posttrain.cluster.cluster import Cluster
from posttrain.config import Config
from posttrain.config.presets import Resolved
from posttrain.data.pack import PackedBatch
from posttrain.data.prefetch import Rendered
from posttrain.data.samples import RenderPairs, preference_shards
from posttrain.data.shards import Shards
from posttrain.models.classifier import classifier_config
from posttrain.runs.training import TrainingRun
from posttrain.sft import loop as supervised

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.cluster.trainers import TrainerGroup
    from posttrain.models.load import ModelSource

_VAL_BATCH = 128
"""Pairs judged at once in a validation."""


def run(resolved: Resolved) -> Path:
    """Train as the config says; returns the run's folder. Raises as ``supervised.run`` does."""
    return supervised.run(resolved, Pairs())


def dry_run(resolved: Resolved) -> str:
    """The plan of a run that is not made; see ``supervised.dry_run``."""
    return supervised.dry_run(resolved, Pairs())


class Pairs(supervised.Objective):
    one, many = "pair", "pairs"

    def shards(self, paths: str | Sequence[str]) -> Shards:
        return preference_shards(paths)

    def renderer(self, cfg: Config, tokenizer: PreTrainedTokenizerBase) -> RenderPairs:
        end = tokenizer.eos_token_id if cfg.trains_reward_model else None
        return RenderPairs(supervised.conversation_renderer(cfg, tokenizer), end)

    def pack(self, samples: supervised.Samples) -> PackedBatch:
        return pack(samples)

    async def start(self, cluster: Cluster, run: TrainingRun, val: Sequence[Rendered]) -> Judge:
        scores = run.cfg.trains_reward_model
        actor = await cluster.trainer("actor", run.source, total_steps=run.total_steps, values=scores)
        run.describe(actor)
        ref = None
        if not scores and run.cfg.train.lora.rank is None:
            ref = await cluster.trainer("reference", run.source, trainable=False)
        return Judge(run, actor, ref, [pack(val[i : i + _VAL_BATCH]) for i in range(0, len(val), _VAL_BATCH)])

    def check(self, cfg: Config, source: ModelSource) -> None:
        if cfg.trains_reward_model:
            classifier_config(source)


@dataclass(frozen=True)
class Judged:
    """What became of a batch of P pairs."""

    result: PairResult
    logps: Tensor | None
    """[2P] log-probabilities of the answers, of a policy"""

    def metrics(self, loss: str = "loss") -> dict[str, float]:
        """Means over the pairs, the loss under that name."""
        found = {loss: self.result.loss, **pair_metrics(self.result.chosen, self.result.rejected)}
        if self.logps is not None:
            chosen, rejected = self.logps.chunk(2)
            found |= {"logps/chosen": float(chosen.mean()), "logps/rejected": float(rejected.mean())}
        return found


@dataclass(frozen=True)
class Judge:
    """A ``Learner`` of pairs: the models of a run, and what they make of pairs. With LoRA the reference is the actor
    without its adapter, and ``ref`` is None, as it is for a reward model."""

    run: TrainingRun
    actor: TrainerGroup
    ref: TrainerGroup | None
    val: Sequence[PackedBatch]

    async def weigh(self, batch: PackedBatch) -> dict[str, float]:
        """Give a batch the slopes of its loss as weights; metrics of the pairs before the update."""
        judged = await self.judge(batch)
        batch.loss_weights = token_weights(judged.result.slopes, owners(batch.cu_seqlens), batch.loss_mask)
        return judged.metrics("train/loss")

    async def validate(self, done: Callable[[int], None]) -> dict[str, float]:
        """Means over all pairs."""
        sums: dict[str, float] = {}
        for batch in self.val:
            judged = await self.judge(batch)
            _add(sums, judged.metrics(), batch.num_sequences // 2)
            done(batch.num_sequences // 2)
        pairs = sum(batch.num_sequences // 2 for batch in self.val)
        return {name: value / pairs for name, value in sums.items()}

    async def judge(self, batch: PackedBatch) -> Judged:
        """The loss of a batch and its slopes. The reference's log-probabilities stay in the batch."""
        cfg, tracker = self.run.cfg.prefer, self.run.tracker
        if cfg.method == "reward_model":
            with tracker.phase("values"):
                scores = _per_sequence(await self.actor.values(batch), batch)  # one token of each carries loss
            smoothing, centering = cfg.label_smoothing, cfg.center_coef
            return Judged(bradley_terry(scores, label_smoothing=smoothing, center_coef=centering), None)
        with tracker.phase("log_prob"):
            logps = _per_sequence(await self.actor.logprobs(batch), batch)
        if batch.ref_logprobs is None:
            with tracker.phase("ref"):
                batch.ref_logprobs = await (
                    self.ref.logprobs(batch) if self.ref else self.actor.logprobs(batch, adapter=False)
                )
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
        return Judged(result, logps)


def _add(sums: dict[str, float], means: Mapping[str, float], count: int) -> None:
    for name, mean in means.items():
        sums[name] = sums.get(name, 0.0) + count * mean


def _per_sequence(column: Tensor, batch: PackedBatch) -> Tensor:
    """[B] float64: sums of a column [T], which is 0 where no loss is carried."""
    return totals(column, owners(batch.cu_seqlens), batch.num_sequences)


def pack(pairs: supervised.Samples) -> PackedBatch:
    """P pairs as a batch of 2P sequences: all chosen ones, then the rejected ones in the same order."""
    both = [(p, slice(p.second)) for p in pairs] + [(p, slice(p.second, None)) for p in pairs]
    return PackedBatch.from_sequences([p.ids[part] for p, part in both], [p.mask[part] for p, part in both])
