"""`posttrain sft`: supervised fine-tuning on conversations, loss on what the assistant wrote."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.algos.reduce import token_weights
from posttrain.cluster.cluster import Cluster
from posttrain.config import Config
from posttrain.data.chat import RenderedChat, render_chats
from posttrain.data.loader import BatchOrder, total_steps
from posttrain.data.pack import PackedBatch
from posttrain.data.parquet import read_conversations
from posttrain.errors import DataError
from posttrain.presets import Resolved
from posttrain.registry import load_plugins
from posttrain.runs import RunDir, StopSignal
from posttrain.startup import check_machine, check_supported, open_model
from posttrain.track.tracker import Tracker
from posttrain.train.worker import LossSpec
from posttrain.training import TrainingRun, recorded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.cluster.trainers import TrainerGroup

_VAL_BATCH = 256
"""Conversations evaluated at once."""


def run(resolved: Resolved) -> Path:
    """Fine-tune as the config says; returns the run's folder.

    Raises:
        UserError: bad config, data or model, before anything is written.
        RunError: a worker failed; the run can be resumed.
    """
    cfg = resolved.config
    load_plugins(cfg.plugins)
    source, tokenizer = open_model(cfg)
    check_supported(cfg)
    check_machine(cfg)
    data = load_chats(cfg.data.train, tokenizer, cfg)
    val = load_chats(cfg.data.val, tokenizer, cfg) if cfg.data.val else None
    train = data.chats
    steps = total_steps(len(train), cfg.data.batch_size, cfg.train.epochs, cfg.train.steps)

    folder = RunDir.open(resolved)
    title = f"sft {cfg.run.name}"
    with recorded(folder), StopSignal() as stop, Tracker(folder.path, title, steps, cfg.run.logger) as tracker:
        tracker.note(f"{len(train):,} conversations, {sum(len(c.ids) for c in train):,} tokens, {steps} steps")
        for note in [*data.notes(), *(val.notes() if val else ())]:
            tracker.note(note)
        training = TrainingRun(cfg, folder, source, tracker, stop, steps)
        asyncio.run(_train(training, train, val.chats if val else []))
    return folder.path


async def _train(run: TrainingRun, train: Sequence[RenderedChat], val: Sequence[RenderedChat]) -> None:
    cfg, tracker = run.cfg, run.tracker
    order = BatchOrder(len(train), cfg.data.batch_size, cfg.run.seed, cfg.data.shuffle)
    async with Cluster(cfg) as cluster:
        with tracker.phase("start"):
            actor = await cluster.trainer("actor", run.source, total_steps=run.total_steps)
        tracker.note(
            f"{actor.facts['parameters']:,} parameters on {cluster.device}, attention: {actor.facts['attention']}"
        )
        if (state := await run.resume(actor)) is not None:
            order.restore(state)
        for step in run.steps():
            with tracker.phase("data"):
                batch = pack([train[i] for i in order.next()])
            with tracker.phase("update"):
                result = await actor.update(batch, LossSpec())
            metrics = {
                "train/loss": result["loss"],
                "train/grad_norm": result["grad_norm"],
                "train/lr": result["lr"],
                "train/tokens": float(batch.num_tokens),
                "train/loss_tokens": float(batch.loss_mask.sum()),
                "perf/throughput": batch.num_tokens / result["seconds"],
                "perf/memory_gib": result["memory_gib"],
            }
            if val and run.due(cfg.train.val_every, step):
                with tracker.phase("validate"):
                    metrics["val/loss"] = await evaluate(actor, val)
            if run.due(cfg.train.save_every, step):
                await run.save(step, actor, order.state())
            tracker.log(step, metrics)
        await run.save(run.step, actor, order.state())
    run.raise_if_interrupted()


def pack(chats: Sequence[RenderedChat]) -> PackedBatch:
    """Conversations as one batch, its loss the mean over the tokens the assistant wrote."""
    batch = PackedBatch.from_sequences([c.ids for c in chats], [c.mask for c in chats])
    batch.loss_weights = token_weights(batch.loss_mask, batch.cu_seqlens, "token-mean")
    return batch


async def evaluate(actor: TrainerGroup, chats: Sequence[RenderedChat]) -> float:
    """Mean negative log-likelihood per assistant token over a whole data set."""
    total, tokens = 0.0, 0
    for start in range(0, len(chats), _VAL_BATCH):
        batch = pack(chats[start : start + _VAL_BATCH])
        count = int(batch.loss_mask.sum())
        total += count * await actor.evaluate(batch)
        tokens += count
    return total / max(1, tokens)


@dataclass(frozen=True)
class LoadedChats:
    """The conversations of a file that can be trained on, and what became of the others."""

    path: str
    chats: list[RenderedChat]
    truncation: str
    """What was done to those that were too long (``data.truncation``)."""
    too_long: int
    """Conversations longer than ``data.max_length``: cut or left out."""
    nothing_to_learn: int
    """Conversations left out because not one token of the assistant's carries loss, before or after a cut."""

    def notes(self) -> Iterator[str]:
        """One line for each reason why a conversation is not there as it was written."""
        if self.too_long:
            yield (
                f"{self.path}: {self.too_long} conversations are longer than data.max_length "
                f"(truncation = {self.truncation})"
            )
        if self.nothing_to_learn:
            yield f"{self.path}: {self.nothing_to_learn} conversations left out: no assistant token to train on"


def load_chats(path: str, tokenizer: PreTrainedTokenizerBase, cfg: Config) -> LoadedChats:
    """Read, render and length-check a conversation file.

    Raises:
        DataError: no such file, a bad row, a conversation that the chat template refuses, one that is too long under
            ``data.truncation = "error"``, or no conversation left.
    """
    if not path:
        raise DataError("no training data", hint="give --data FILE.parquet (posttrain prep writes it)")
    rows = read_conversations(path)
    try:
        chats = render_chats([(r.messages, r.tools) for r in rows], tokenizer)
    except DataError as error:  # it says which conversation
        raise DataError(f"{path}, {error.message}", hint=error.hint) from error
    kept: list[RenderedChat] = []
    too_long = nothing_to_learn = 0
    limit, how = cfg.data.max_length, cfg.data.truncation
    for i, chat in enumerate(chats):
        if len(chat.ids) > limit:
            too_long += 1
            if how == "error":
                raise DataError(
                    f"{path}, row {i}: the conversation has {len(chat.ids)} tokens, data.max_length is {limit}",
                    hint='raise data.max_length, or set data.truncation to "drop", "left" or "right"',
                )
            if how == "drop":
                continue
            part = slice(-limit, None) if how == "left" else slice(limit)
            chat = RenderedChat(chat.ids[part], chat.mask[part])
        if any(chat.mask[1:]):
            kept.append(chat)
        else:
            nothing_to_learn += 1
    if not kept:
        raise DataError(f"{path}: no conversation with assistant tokens is left", hint="raise data.max_length")
    return LoadedChats(path, kept, how, too_long, nothing_to_learn)
