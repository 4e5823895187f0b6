"""The samples of `sft` and `prefer`: rows of files in tokens, for training and for validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from posttrain.config import Config
from posttrain.data.samples import RenderConversations
from posttrain.data.stream import Counts, SampleStream, nothing_left, render_all

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.data.prefetch import Rendered
    from posttrain.data.vision import VisionProcessor
    from posttrain.sft.objective import Objective


def conversation_renderer(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, vision: VisionProcessor | None = None
) -> RenderConversations:
    """Return what turns a conversation into tokens under this config. ``vision`` as in ``Objective``."""
    return RenderConversations(tokenizer, cfg.data.max_length, cfg.data.truncation, cfg.data.chat_kwargs, vision)


def open_stream(objective: Objective, cfg: Config, tokenizer: PreTrainedTokenizerBase) -> SampleStream:
    """Return the training samples: all of them rendered or, where there are many, only the first ones checked.

    Raises:
        DataError: no such file, a bad row, a conversation that the chat template refuses, one that is too long under
            ``data.truncation = "error"``, or no sample left.
    """
    return SampleStream(
        objective.shards(cfg.data.train),
        objective.renderer(cfg, tokenizer),
        cfg.data,
        batch_size=cfg.data.batch_size,
        seed=cfg.run.seed,
        one=objective.one,
    )


def load_validation(objective: Objective, cfg: Config, tokenizer: PreTrainedTokenizerBase) -> list[Rendered]:
    """Render the whole validation set. Raises ``DataError`` as ``open_stream`` does."""
    shards = objective.shards(cfg.data.val)
    rows = render_all(shards, objective.renderer(cfg, tokenizer))
    if all(row.left_out for row in rows):
        raise nothing_left(shards.name, objective.one, Counts.of(rows))
    return rows


def describe(objective: Objective, data: SampleStream) -> str:
    """Return how much there is to train on, for a message."""
    if data.rendered is None:
        files = len(data.shards.files)
        return f"{data.shards.rows:,} {objective.many} streamed from {files} file{'s' * (files > 1)}"
    return f"{data.usable_rows:,} {objective.many}, {sum(len(row.ids) for row in data.rendered):,} tokens"


def notes(objective: Objective, name: str, counts: Counts, cfg: Config) -> Iterator[str]:
    """Yield a line for each reason why samples were left out or cut."""
    of = f"of {counts.drawn} {objective.many}"
    if counts.too_long:
        yield (
            f"{name}: {counts.too_long} {of} are longer than data.max_length = {cfg.data.max_length} tokens, the "
            f"longest has {counts.longest} (data.truncation = {cfg.data.truncation})"
        )
    if counts.nothing_to_learn:
        yield f"{name}: {counts.nothing_to_learn} {of} left out: {objective.nothing}"
    if counts.straddling:
        yield f"{name}: {counts.straddling} tokens without loss: they are the assistant's only in part"
