"""A checked run of `sft` or `prefer`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from posttrain.config.presets import Resolved
from posttrain.data.chat import ends_turns
from posttrain.data.loader import check_batch, total_steps
from posttrain.data.prefetch import Rendered
from posttrain.data.stream import Counts, SampleStream
from posttrain.launch import TrainingJob
from posttrain.models.processors import load_vision
from posttrain.plan.inputs import Known
from posttrain.runs.preflight import check_machine, check_supported, open_model
from posttrain.runs.prompts import reading_validation, validation_note
from posttrain.runs.training_run import Loop
from posttrain.sft.loop import train
from posttrain.sft.objective import Objective
from posttrain.sft.samples import describe, load_validation, notes, open_stream
from posttrain.tracking.tracker import Tracker

_ENDLESS = "warning: the chat template ends turns with no control token: nothing teaches the model to stop"


def prepare(resolved: Resolved, *, objective: Objective) -> SamplesJob:
    """Check all that can be checked before something is written. Streamed data is checked in part. Raises
    ``UserError``."""
    cfg = resolved.config
    source, tokenizer = open_model(cfg)
    objective.check(cfg, source)
    objective.vision = load_vision(source)
    check_supported(cfg)
    check_machine(cfg)
    data = open_stream(objective, cfg, tokenizer)
    with reading_validation():
        val = load_validation(objective, cfg, tokenizer) if cfg.data.val else []
    endless = None if cfg.trains_reward_model or ends_turns(tokenizer) else _ENDLESS
    steps = total_steps(data.usable_rows, cfg.data.batch_size, cfg.train.epochs, cfg.train.steps)
    return SamplesJob(resolved, source, steps, objective, data, val, endless)


@dataclass(frozen=True)
class SamplesJob(TrainingJob):
    """A run that trains on samples of files."""

    objective: Objective
    data: SampleStream
    rendered_val: Sequence[Rendered]
    """The validation set, with the samples that are left out"""
    warning: str | None = None
    """What the chat template does not teach"""

    @property
    def val(self) -> list[Rendered]:
        """The samples of the validation set that can be used."""
        return [row for row in self.rendered_val if not row.left_out]

    def notes(self) -> Iterator[str]:
        cfg, data, objective = self.resolved.config, self.data, self.objective
        yield f"{describe(objective, data)}, {self.steps} steps"
        if (warning := check_batch(data.usable_rows, cfg.data.batch_size)) is not None:
            yield warning
        if self.warning is not None:
            yield self.warning
        yield validation_note(self.resolved, len(self.val), objective.many)
        for name, rows in ((data.shards.name, data.rendered or []), (str(cfg.data.val), self.rendered_val)):
            yield from notes(objective, name, Counts.of(rows), cfg)

    def known(self) -> Known:
        """Return the lengths of the first batch."""
        with self.data as data:
            batch = self.objective.pack(data.next().samples)
        without_loss = float((batch.loss_mask == 0).sum()) / batch.num_sequences
        return Known(tuple(batch.lengths), without_loss, self.steps)

    @contextmanager
    def opened(self, tracker: Tracker) -> Iterator[Loop]:
        """Open the stream of samples; note at its end which streamed samples were left out or cut."""
        with self.data as data:
            try:
                yield partial(train, objective=self.objective, data=data, beginning=data.state(), val=self.val)
            finally:
                if data.rendered is None:
                    for note in notes(self.objective, data.shards.name, data.counts, self.resolved.config):
                        tracker.note(note)
