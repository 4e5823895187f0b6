"""`posttrain sft`: supervised fine-tuning on conversations, loss on what the assistant wrote."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.algos.reduce import token_weights
from posttrain.cluster.cluster import Cluster
from posttrain.config import Config
from posttrain.data.ahead import Rendered
from posttrain.data.loader import total_steps
from posttrain.data.pack import PackedBatch
from posttrain.data.samples import RenderConversations, conversation_shards
from posttrain.data.stream import Counts, SampleStream, render_all
from posttrain.errors import DataError
from posttrain.presets import Resolved
from posttrain.registry import load_plugins
from posttrain.runs import RunDir, StopSignal
from posttrain.startup import check_machine, check_supported, open_model
from posttrain.train.worker import LossSpec
from posttrain.training import TrainingRun, check_profile, open_tracker, recorded, update_speed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.cluster.trainers import TrainerGroup
    from posttrain.data.stream import Sample

_VAL_BATCH = 256
"""Conversations evaluated at once."""


def run(resolved: Resolved) -> Path:
    """Fine-tune as the config says; returns the run's folder.

    Raises:
        UserError: bad config, data or model, before anything is written. (Of streamed data a part is looked at then.)
        RunError: a worker failed; the run can be resumed.
    """
    cfg = resolved.config
    load_plugins(cfg.plugins)
    source, tokenizer = open_model(cfg)
    check_supported(cfg)
    check_machine(cfg)
    data = open_stream(cfg, tokenizer)
    val = load_validation(cfg, tokenizer) if cfg.data.val else []
    steps = total_steps(data.usable_rows, cfg.data.batch_size, cfg.train.epochs, cfg.train.steps)
    check_profile(cfg, steps)

    folder = RunDir.open(resolved)
    with recorded(folder), StopSignal() as stop, open_tracker(cfg, folder, steps) as tracker, data:
        tracker.note(f"{describe(data)}, {steps} steps")
        for name, rows in ((data.shards.name, data.rendered or []), (str(cfg.data.val), val)):
            for note in notes(name, Counts.of(rows), cfg):
                tracker.note(note)
        training = TrainingRun(cfg, folder, source, tracker, stop, steps)
        try:
            asyncio.run(_train(training, data, [row for row in val if not row.left_out]))
        finally:
            if data.rendered is None:
                for note in notes(data.shards.name, data.counts, cfg):
                    tracker.note(note)
    return folder.path


async def _train(run: TrainingRun, data: SampleStream, val: Sequence[Rendered]) -> None:
    cfg, tracker = run.cfg, run.tracker
    async with Cluster(cfg) as cluster:
        with tracker.phase("start"):
            actor = await cluster.trainer("actor", run.source, total_steps=run.total_steps)
        run.describe(actor)
        if (state := await run.resume(actor)) is not None:
            data.restore(state)
        for step in run.steps():
            with tracker.phase("data"):
                batch = pack(data.next().samples)
            async with run.profiled(actor):
                with tracker.phase("update"):
                    result = await run.update(actor, batch, LossSpec())
            metrics = {
                "train/loss": result["loss"],
                "train/grad_norm": result["grad_norm"],
                "train/lr": result["lr"],
                "train/tokens": float(batch.num_tokens),
                "train/loss_tokens": float(batch.loss_mask.sum()),
                "train/epoch": data.position / data.shards.rows,
                **{f"data/{name}": float(count) for name, count in asdict(data.counts).items()},
                "train/skipped_steps": float(run.skipped_steps),
                **update_speed([result], batch.num_tokens, actor),
            }
            if val and run.due(cfg.train.val_every, step):
                with tracker.phase("validate"):
                    metrics["val/loss"] = await evaluate(actor, val)
                run.early_stop.validated(step, metrics["val/loss"])
            if run.due(cfg.train.save_every, step):
                await run.save(step, actor, data.state())
            metrics["perf/data_wait"] = tracker.share("data")
            tracker.log(step, metrics)
        await run.save(run.step, actor, data.state())
    run.raise_if_interrupted()


def pack(chats: Sequence[Sample] | Sequence[Rendered]) -> PackedBatch:
    """Conversations as one batch, its loss the mean over the tokens the assistant wrote."""
    batch = PackedBatch.from_sequences([c.ids for c in chats], [c.mask for c in chats])
    batch.loss_weights = token_weights(batch.loss_mask, batch.cu_seqlens, "token-mean")
    return batch


async def evaluate(actor: TrainerGroup, chats: Sequence[Rendered]) -> float:
    """Mean negative log-likelihood per assistant token over a whole data set."""
    total, tokens = 0.0, 0
    for start in range(0, len(chats), _VAL_BATCH):
        batch = pack(chats[start : start + _VAL_BATCH])
        count = int(batch.loss_mask.sum())
        total += count * await actor.evaluate(batch)
        tokens += count
    return total / max(1, tokens)


def renderer(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> RenderConversations:
    """How a row becomes a sample under this config."""
    return RenderConversations(tokenizer, cfg.data.max_length, cfg.data.truncation, cfg.data.chat_kwargs)


def open_stream(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> SampleStream:
    """The training samples: all of them rendered, or, where there are many, a look at the first.

    Raises:
        DataError: no such file, a bad row, a conversation that the chat template refuses, one that is too long under
            ``data.truncation = "error"``, or no conversation left.
    """
    return SampleStream(
        conversation_shards(cfg.data.train),
        renderer(cfg, tokenizer),
        cfg.data,
        batch_size=cfg.data.batch_size,
        seed=cfg.run.seed,
    )


def load_validation(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> list[Rendered]:
    """The validation set, whole. Raises ``DataError`` as ``open_stream`` does."""
    shards = conversation_shards(cfg.data.val)
    rows = render_all(shards, renderer(cfg, tokenizer))
    if all(row.left_out for row in rows):
        raise DataError(f"{shards.name}: no conversation with assistant tokens is left", hint="raise data.max_length")
    return rows


def describe(data: SampleStream) -> str:
    """How much there is to train on."""
    if data.rendered is None:
        files = len(data.shards.files)
        return f"{data.shards.rows:,} conversations streamed from {files} file{'s' * (files > 1)}"
    return f"{data.usable_rows:,} conversations, {sum(len(row.ids) for row in data.rendered):,} tokens"


def notes(name: str, counts: Counts, cfg: Config) -> Iterator[str]:
    """One line for each reason why conversations are not there as they were written."""
    if counts.too_long:
        yield (
            f"{name}: {counts.too_long} of {counts.drawn} conversations are longer than data.max_length "
            f"(truncation = {cfg.data.truncation})"
        )
    if counts.nothing_to_learn:
        yield (
            f"{name}: {counts.nothing_to_learn} of {counts.drawn} conversations left out: "
            "no assistant token to train on"
        )
    if counts.straddling:
        yield f"{name}: {counts.straddling} tokens without loss: they are the assistant's only in part"
