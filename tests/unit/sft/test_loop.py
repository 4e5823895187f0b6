"""The loop of `sft` and `prefer`, with a worker in the process of the test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from posttrain.config import TrainConfig
from posttrain.config.presets import resolve
from posttrain.core.errors import RunError
from posttrain.data.pack import PackedBatch
from posttrain.data.stream import Counts
from posttrain.models.load import ModelSource
from posttrain.runs.recording import open_tracker
from posttrain.runs.run import RunTarget, StopSignal
from posttrain.runs.training_run import TrainingRun
from posttrain.sft import loop
from posttrain.train import checkpoint
from posttrain.train.spec import WorkerSpec
from tests.helpers.local_trainer import LocalGroup, NoCluster, local_trainer

SOURCE = ModelSource("builtin:tiny")
STEPS = 2


class Data:
    """The same sample again and again."""

    def __init__(self) -> None:
        self.position, self.counts, self.shards = 0, Counts(), SimpleNamespace(rows=9)

    def next(self) -> SimpleNamespace:
        self.position += 1
        return SimpleNamespace(samples=[])

    def state(self) -> dict[str, int]:
        return {"position": self.position}

    def restore(self, state: Mapping[str, int]) -> None:
        self.position = state["position"]


class Sample:
    """What makes the batch and its loss weights."""

    def __init__(self, actor: LocalGroup) -> None:
        self.actor = actor

    async def start(self, *_: object) -> Sample:
        return self

    def pack(self, samples: object) -> PackedBatch:
        batch = PackedBatch.from_sequences([[1, 2, 3, 4]], [[True] * 4])
        batch.loss_weights = batch.loss_mask.float()
        return batch

    async def weigh(self, batch: PackedBatch) -> dict[str, float]:
        return {}


async def trained(run: TrainingRun) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl."""
    with local_trainer(WorkerSpec(SOURCE, "cpu", "float32", 3, 1.0, TrainConfig(), total_steps=STEPS)) as group:
        data = Data()
        await loop.train(run, cast(Any, Sample(group)), cast(Any, data), data.state(), [])
    return [json.loads(line) for line in (run.folder.path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("step", [1, STEPS])
async def test_a_step_that_was_saved_and_not_logged_is_logged_when_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(loop, "Cluster", NoCluster)
    sets = ["train.save_every=1", "checkpoint.background=false", 'run.logger=["jsonl"]']
    resolved = resolve("sft", "tiny-multiturn", sets, {"run.name": "r", "run.dir": str(tmp_path)})
    folder = RunTarget.find(resolved).open()
    run = TrainingRun(resolved.config, folder, SOURCE, open_tracker(resolved.config, folder, 9), StopSignal(), STEPS)
    finished = TrainingRun.finished

    def ends(self: TrainingRun, number: int, metrics: Mapping[str, float]) -> None:
        if number == step:
            raise RunError("it ends here")
        finished(self, number, metrics)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "finished", ends)
        with pytest.raises(RunError, match="it ends here"):
            await trained(run)
    assert checkpoint.find(folder.path).step == step
    rows = await trained(run.again())
    assert [(row["step"], row["train/tokens"]) for row in rows] == [(1, 4.0), (2, 4.0)]
