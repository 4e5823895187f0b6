"""A run that ends between the checkpoint of a step and the step's end goes on with what is left of the step."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.config import TrainConfig
from posttrain.config.presets import resolve
from posttrain.core.errors import Interrupted, RunError
from posttrain.models.load import ModelSource
from posttrain.rl import loop
from posttrain.rl.learner import Learner, kl_in_reward
from posttrain.runs.recording import open_tracker
from posttrain.runs.run import RunTarget, StopSignal
from posttrain.runs.training_run import TrainingRun
from posttrain.train import checkpoint
from posttrain.train.spec import WorkerSpec
from tests.helpers import recorded
from tests.helpers.local_trainer import LocalGroup, NoCluster, local_trainer

SOURCE = ModelSource("builtin:tiny")
STEPS = 3
TIMES = ("time", "timing_s/", "perf/")


def new_trainer() -> AbstractContextManager[LocalGroup]:
    return local_trainer(WorkerSpec(SOURCE, "cpu", "float32", 3, 1.0, TrainConfig(), total_steps=STEPS))


class Engines:
    """They say which sequences the last weights were checked on."""

    version = 0

    async def start(self, version: int, check: Any) -> dict[str, float]:
        self.version = version
        return {"sync/check_gap": float(sum(map(sum, check)))}

    async def to_trainers(self) -> None: ...

    async def publish(self, version: int, check: Any) -> dict[str, float]:
        return await self.start(version, check)


class Rollouts:
    """A validation is as good as its step is late; that of step ``fails`` raises."""

    def __init__(self, fails: int | None = None) -> None:
        self.fails = fails

    def resume(self, step: int, state: object) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    files = state

    async def next_batch(self, step: int) -> loop.RolloutBatch:
        rng = np.random.default_rng(step)
        tokens = [rng.integers(0, recorded.VOCABULARY, 6 + number, dtype=np.int32) for number in range(4)]
        groups = [
            [recorded.trajectory(0, reward=float(i % 2), tokens=ids, length=len(ids)) for i, ids in enumerate(tokens)]
        ]
        return loop.RolloutBatch(groups, {"rollout/accuracy": step / 8})

    async def trained(self, step: int, groups: object) -> None: ...

    async def validate(self, step: int) -> dict[str, float]:
        if step == self.fails:
            raise RunError("validation failed")
        self.validated(step)
        return {"val/acc": float(step)}

    def validated(self, step: int) -> None: ...


async def trained(
    run: TrainingRun,
    group: LocalGroup,
    monkeypatch: pytest.MonkeyPatch,
    fails: int | None = None,
    stopped_at: int | None = None,
) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl of a run whose validation of step ``fails`` ends it, or which the user
    stops during that of step ``stopped_at``."""

    async def opened(cluster: object, run: TrainingRun) -> Learner:
        return Learner(run, group, None, None, None, kl_in_reward(run.cfg.algo))

    class Source:
        async def begin(self, *_: object) -> None: ...

        async def start(self, *_: object) -> tuple[Engines, Rollouts]:
            rollouts = Rollouts(fails)

            def validated(step: int) -> None:
                run.stop.requested = run.stop.requested or step == stopped_at

            monkeypatch.setattr(rollouts, "validated", validated)
            return Engines(), rollouts

    monkeypatch.setattr(loop, "Cluster", NoCluster)
    monkeypatch.setattr(loop.Learner, "open", opened)
    if stopped_at is not None:
        with pytest.raises(Interrupted):
            await loop.train(run, Source())
    elif fails is None:
        await loop.train(run, Source())
    else:
        with pytest.raises(RunError, match="validation failed"):
            await loop.train(run, Source())
    rows = [json.loads(line) for line in (run.folder.path / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in rows]


def new_run(tmp_path: Path, name: str, save_every: int = 1) -> TrainingRun:
    sets = [
        'run.logger=["jsonl"]',
        f"train.save_every={save_every}",
        "checkpoint.best=val/acc",
        "checkpoint.best_mode=max",
        "checkpoint.keep=1",
    ]
    flags = {"run.name": name, "run.dir": str(tmp_path)}
    resolved = resolve("rl", "tiny-arith", sets, flags)
    folder = RunTarget.find(resolved).open()
    tracker = open_tracker(resolved.config, folder, STEPS)
    return TrainingRun(resolved.config, folder, SOURCE, tracker, StopSignal(), STEPS)


@pytest.mark.parametrize("fails", [1, STEPS])
async def test_a_run_that_ends_amid_a_validation_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    """After the last step, too. All rows are those of a run that was never stopped, and the step's checkpoint may be
    the best."""
    with new_trainer() as group:
        expected = await trained(new_run(tmp_path, "whole"), group, monkeypatch)
    assert [(row["step"], row["val/acc"]) for row in expected] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert all(row["sync/check_gap"] > 0.0 and "actor/pg_loss" in row for row in expected)

    run = new_run(tmp_path, "stopped")
    with new_trainer() as group:
        assert await trained(run, group, monkeypatch, fails) == expected[: fails - 1]
    assert checkpoint.find(run.folder.path).step == fails
    again = run.again()
    with new_trainer() as group:
        assert await trained(again, group, monkeypatch) == expected
    best = checkpoint.read_best(run.folder.checkpoints)
    assert best is not None
    assert best.step == STEPS

    again = again.again()  # nothing is left to do
    with new_trainer() as group:
        assert await trained(again, group, monkeypatch) == expected
    assert again.unlogged is None


async def test_the_checkpoint_of_a_run_that_the_user_stops_may_be_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written after the step has been logged. Step 1 had a value, and no checkpoint."""
    run = new_run(tmp_path, "stopped", save_every=STEPS)
    with new_trainer() as group:
        await trained(run, group, monkeypatch, stopped_at=2)
    assert checkpoint.find(run.folder.path).step == 2
    assert checkpoint.read_best(run.folder.checkpoints) == checkpoint.Best(2, "val/acc", 2.0)


async def test_a_run_that_ended_before_it_compared_its_checkpoint_compares_it_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path, "whole")
    with new_trainer() as group:
        await trained(run, group, monkeypatch)
    checkpoint.write_best(run.folder.checkpoints, checkpoint.Best(STEPS - 1, "val/acc", STEPS - 1.0))
    with new_trainer() as group:
        await trained(run.again(), group, monkeypatch)
    assert checkpoint.read_best(run.folder.checkpoints) == checkpoint.Best(STEPS, "val/acc", float(STEPS))
