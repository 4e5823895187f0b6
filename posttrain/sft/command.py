"""`posttrain sft`: supervised fine-tuning on conversations, loss on what the assistant wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.algos.reduce import token_weights
from posttrain.cluster.cluster import Cluster
from posttrain.config import Config
from posttrain.config.presets import Resolved
from posttrain.data.pack import PackedBatch
from posttrain.data.prefetch import Rendered
from posttrain.data.samples import RenderConversations, conversation_shards
from posttrain.data.shards import Shards
from posttrain.runs.training import TrainingRun
from posttrain.sft import loop as supervised

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.cluster.trainers import TrainerGroup

_VAL_BATCH = 256
"""Conversations evaluated at once."""


def run(resolved: Resolved) -> Path:
    """Fine-tune as the config says; returns the run's folder. Raises as ``supervised.run`` does."""
    return supervised.run(resolved, Conversations())


def dry_run(resolved: Resolved) -> str:
    """The plan of a run that is not made; see ``supervised.dry_run``."""
    return supervised.dry_run(resolved, Conversations())


class Conversations(supervised.Objective):
    one, many = "conversation", "conversations"

    def shards(self, paths: str | Sequence[str]) -> Shards:
        return conversation_shards(paths)

    def renderer(self, cfg: Config, tokenizer: PreTrainedTokenizerBase) -> RenderConversations:
        return supervised.conversation_renderer(cfg, tokenizer)

    def pack(self, samples: supervised.Samples) -> PackedBatch:
        return pack(samples)

    async def start(self, cluster: Cluster, run: TrainingRun, val: Sequence[Rendered]) -> Imitation:
        actor = await cluster.trainer("actor", run.source, total_steps=run.total_steps)
        run.describe(actor)
        return Imitation(actor, val)


@dataclass(frozen=True)
class Imitation:
    """A ``Learner`` of conversations: the loss is the mean over all tokens that the assistant wrote."""

    actor: TrainerGroup
    val: Sequence[Rendered]

    async def weigh(self, batch: PackedBatch) -> dict[str, float]:
        return {"train/loss_tokens": float(batch.loss_mask.sum())}

    async def validate(self, done: Callable[[int], None]) -> dict[str, float]:
        """Mean negative log-likelihood per assistant token."""
        total, tokens = 0.0, 0
        for start in range(0, len(self.val), _VAL_BATCH):
            batch = pack(self.val[start : start + _VAL_BATCH])
            count = int(batch.loss_mask.sum())
            total += count * await self.actor.evaluate(batch)
            tokens += count
            done(batch.num_sequences)
        return {"loss": total / max(1, tokens)}


def pack(samples: supervised.Samples) -> PackedBatch:
    """Conversations one after another, each token of the assistant's with the same weight."""
    batch = PackedBatch.from_sequences([s.ids for s in samples], [s.mask for s in samples])
    batch.loss_weights = token_weights(batch.loss_mask, batch.cu_seqlens, "token-mean")
    return batch
