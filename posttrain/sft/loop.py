"""The loop that `sft` and `prefer` share: each step gives a batch its loss weights, and the model one update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any

from posttrain.cluster.cluster import Cluster
from posttrain.data.pack import PackedBatch
from posttrain.data.prefetch import Rendered
from posttrain.data.stream import SampleStream
from posttrain.runs.speed import update_speed
from posttrain.runs.training_run import TrainingRun
from posttrain.sft.objective import Objective
from posttrain.train.spec import LossSpec


async def train(
    run: TrainingRun, objective: Objective, data: SampleStream, beginning: Mapping[str, Any], val: Sequence[Rendered]
) -> None:
    """Train from the run's last checkpoint to its last step, or until the user or `train.early_stop` ends it.

    Args:
        beginning: state of ``data`` before the first step.
        val: the validation set; empty: there is none.

    Raises:
        RunError: a worker failed, or too many updates were skipped. The run can be resumed.
    """
    cfg, tracker = run.cfg, run.tracker
    async with AsyncExitStack() as closing:
        with tracker.phase("start"):
            cluster = await closing.enter_async_context(Cluster(cfg, run.folder.logs))
            await closing.enter_async_context(run)
            learner = await objective.start(cluster, run, val)
            actor = learner.actor
            data.restore(await run.resume({"actor": actor}) or beginning)
        if run.unlogged is not None:
            run.finished(run.step, run.unlogged)
        for step in run.steps():
            with tracker.phase("data"):
                batch = objective.pack(data.next().samples)
            weighed = await learner.weigh(batch)
            async with run.profiled(actor):
                with tracker.phase("update"):
                    result = await run.update(actor, batch, LossSpec())
            speed = update_speed([result], batch.num_tokens, actor)
            metrics = _step_metrics(run, data, batch, result) | speed | weighed
            if val and run.due(cfg.train.val_every, step):
                with tracker.phase("validate"), tracker.counting("validation", len(val), objective.many) as done:
                    found = await learner.validate(done)
                metrics |= {f"val/{name}": value for name, value in found.items()}
                run.early_stop.validated(step, found["loss"])
            if run.due(cfg.train.save_every, step):
                await run.save(step, {"actor": actor}, data.state(), metrics=metrics)
            metrics["perf/data_wait"] = tracker.share("data")
            run.finished(step, metrics)
        await run.save(run.step, {"actor": actor}, data.state())
    run.raise_if_interrupted()


def _step_metrics(
    run: TrainingRun, data: SampleStream, batch: PackedBatch, result: Mapping[str, float]
) -> dict[str, float]:
    return {
        "train/loss": result["loss"],
        "train/grad_norm": result["grad_norm"],
        "train/lr": result["lr"],
        "train/tokens": float(batch.num_tokens),
        "train/epoch": data.position / data.shards.rows,
        **{f"data/{name}": float(count) for name, count in asdict(data.counts).items()},
        "train/skipped_steps": float(run.skipped_steps),
        **{name: value for name, value in result.items() if name.startswith("moe/")},
    }
