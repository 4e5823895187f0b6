"""`posttrain sft`: supervised fine-tuning on conversations, loss on what the assistant wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain import launch
from posttrain.algos.reduce import token_weights
from posttrain.cluster.cluster import Cluster
from posttrain.config import Config
from posttrain.config.presets import Resolved
from posttrain.data.pack import PackedBatch
from posttrain.data.prefetch import Rendered
from posttrain.data.samples import RenderConversations, conversation_shards
from posttrain.data.shards import Shards
from posttrain.runs.training_run import TrainingRun
from posttrain.sft.job import prepare
from posttrain.sft.objective import Objective, Samples
from posttrain.sft.samples import conversation_renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.cluster.trainers import TrainerGroup
    from posttrain.data.vision import VisionProcessor

_VAL_BATCH = 256
"""Conversations evaluated at once."""


def run(resolved: Resolved) -> Path:
    """Fine-tune as the config says; returns the run's folder. Raises as ``launch.run`` does."""
    return launch.run(resolved, partial(prepare, objective=Conversations()))


def dry_run(resolved: Resolved) -> str:
    """Return the plan of the run after all its checks; see ``launch.dry_run``."""
    return launch.dry_run(resolved, partial(prepare, objective=Conversations()))


class Conversations(Objective):
    """Conversations, of which the model learns what the assistant wrote."""

    one, many = "conversation", "conversations"

    def shards(self, paths: str | Sequence[str]) -> Shards:
        return conversation_shards(paths)

    def renderer(self, cfg: Config, tokenizer: PreTrainedTokenizerBase) -> RenderConversations:
        return conversation_renderer(cfg, tokenizer, self.vision)

    def pack(self, samples: Samples) -> PackedBatch:
        return pack(samples, self.vision)

    async def start(self, cluster: Cluster, run: TrainingRun, val: Sequence[Rendered]) -> ConversationLearner:
        actor = await cluster.trainer("actor", run.source, total_steps=run.total_steps)
        run.describe(actor)
        return ConversationLearner(actor, val, self.vision)


@dataclass(frozen=True)
class ConversationLearner:
    """A ``SampleLearner`` whose loss is the mean over all tokens that the assistant wrote."""

    actor: TrainerGroup
    val: Sequence[Rendered]
    vision: VisionProcessor | None

    async def weigh(self, batch: PackedBatch) -> dict[str, float]:
        return {"train/loss_tokens": float(batch.loss_mask.sum())}

    async def validate(self, done: Callable[[int], None]) -> dict[str, float]:
        """Return the mean negative log-likelihood per assistant token."""
        total, tokens = 0.0, 0
        for start in range(0, len(self.val), _VAL_BATCH):
            batch = pack(self.val[start : start + _VAL_BATCH], self.vision)
            count = int(batch.loss_mask.sum())
            total += count * await self.actor.evaluate(batch)
            tokens += count
            done(batch.num_sequences)
        return {"loss": total / max(1, tokens)}


def pack(samples: Samples, vision: VisionProcessor | None = None) -> PackedBatch:
    """Pack conversations one after another; each token that the assistant wrote has the same weight.

    Raises:
        DataError: an image can no longer be read.
    """
    batch = PackedBatch.from_sequences([s.ids for s in samples], [s.mask for s in samples])
    batch.loss_weights = token_weights(batch.loss_mask, batch.cu_seqlens, "token-mean")
    if vision is not None:
        vision.attach_read(batch, [s.images for s in samples])
    return batch
