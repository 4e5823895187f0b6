"""A run without workers: its restarts, its early stop, its checkpoints, and weights that are not finite."""

import asyncio
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from posttrain.cluster.actors import ActorHandle
from posttrain.cluster.trainers import TrainerGroup
from posttrain.config import Command, TrainConfig
from posttrain.config.presets import resolve
from posttrain.core.errors import ConfigError, DeadlineError, RunError, WorkerError
from posttrain.data.pack import PackedBatch
from posttrain.models.load import ModelSource
from posttrain.runs.checkpoints import check_disk_space
from posttrain.runs.early_stop import EarlyStop
from posttrain.runs.recording import open_tracker
from posttrain.runs.run import RunTarget, StopSignal
from posttrain.runs.speed import update_speed
from posttrain.runs.training_run import TrainingRun, train
from posttrain.train import checkpoint
from posttrain.train.checkpoint import Checkpoint
from posttrain.train.spec import LossSpec, WorkerSpec
from posttrain.weight_sync.publish import publish
from posttrain.weight_sync.transfers import TransferChooser
from tests.helpers.local_trainer import LocalGroup, local_trainer


def test_speed_counts_all_updates_and_workers() -> None:
    """Two updates of 2 s and 6 s on two workers: 600 tokens of 800 that ran, 12 of 2 x 8 s x 4 FLOP/s."""
    results = [
        {"seconds": 2.0, "tokens_run": 300.0, "memory_gib": 3.0, "flops": 4.0},
        {"seconds": 6.0, "tokens_run": 500.0, "memory_gib": 2.0, "flops": 8.0},
    ]
    group = TrainerGroup("actor", [ActorHandle("first"), ActorHandle("second")], 1.0, 1, metadata={"peak_flops": 4.0})
    speed = update_speed(results, 600, group)
    assert speed == {
        "perf/throughput": 75.0,
        "perf/tokens_per_second_per_gpu": 37.5,
        "perf/padding": pytest.approx(0.25),
        "perf/memory_gib": 3.0,
        "perf/mfu": 12.0 / (2 * 8.0 * 4.0),
    }
    group.metadata["peak_flops"], group.share_prompts = None, True
    results[1]["tokens_shared"], results[0]["tokens_shared"] = 150.0, 0.0
    assert update_speed(results, 600, group)["perf/shared_tokens"] == 0.25
    assert "perf/mfu" not in update_speed(results, 600, group)


def stopped_at(losses: list[float], patience: int | None, min_delta: float = 0.0) -> int | None:
    """The validation, from 1, after which a run with these losses ends."""
    stop = EarlyStop(patience, min_delta)
    for step, loss in enumerate(losses, start=1):
        stop.validated(step, loss)
        again = EarlyStop(patience, min_delta)  # a run that goes on from a checkpoint decides alike
        again.restore(json.loads(json.dumps(stop.state(), allow_nan=False)))
        assert again == stop
        stop = again
        if stop.reached:
            return step
    return None


def test_early_stop_waits_for_patience_and_min_delta() -> None:
    losses = [3.0, 2.0, 2.5, 1.9, 1.9, 1.95, 1.0]
    assert stopped_at(losses, 1) == 3
    assert stopped_at(losses, 2) == 6
    assert stopped_at(losses, 3) is None
    assert stopped_at(losses, 2, min_delta=0.2) == 4
    assert stopped_at(losses, None) is None
    assert stopped_at([math.nan, math.inf, 1.0], 2) == 2
    assert stopped_at([math.nan, 1.0, math.nan, 0.5], 2) is None


# ---------------------------------------------------------------------- stops and restarts


def bare_run(tmp_path: Path, *sets: str, command: Command = "sft") -> TrainingRun:
    """A run without workers."""
    preset = "tiny-multiturn" if command == "sft" else "tiny-arith"
    resolved = resolve(command, preset, [f'run.dir="{tmp_path}"', "run.logger=[]", *sets], {"run.name": "r"})
    folder = RunTarget.find(resolved).open()
    source, tracker = ModelSource("builtin:tiny"), open_tracker(resolved.config, folder, 9)
    return TrainingRun(resolved.config, folder, source, tracker, StopSignal(), 9)


def test_restarts_after_worker_failures_up_to_the_limit(tmp_path: Path) -> None:
    attempts: list[TrainingRun] = []

    async def loop(run: TrainingRun) -> None:
        attempts.append(run)
        if len(attempts) == 1:
            raise WorkerError("actor worker 0 died")
        if len(attempts) == 2:
            raise DeadlineError("actor worker 0 did not answer")

    run = bare_run(tmp_path, "run.restarts=2")
    train(run, loop)
    assert [attempt.folder.resumed for attempt in attempts] == [False, True, True]

    attempts.clear()
    one = replace(run, cfg=run.cfg.model_copy(update={"run": run.cfg.run.model_copy(update={"restarts": 1})}))
    with pytest.raises(DeadlineError):
        train(one, loop)
    assert len(attempts) == 2


@pytest.mark.parametrize("error", [RunError("the weights differ"), ValueError("a bug")])
def test_does_not_restart_after_other_errors(tmp_path: Path, error: Exception) -> None:
    attempts: list[int] = []

    async def loop(run: TrainingRun) -> None:
        attempts.append(1)
        raise error

    with pytest.raises(type(error)):
        train(bare_run(tmp_path, "run.restarts=3"), loop)
    assert attempts == [1]


async def test_cancels_work_when_the_user_asks_to_stop(tmp_path: Path) -> None:
    run = bare_run(tmp_path)
    cancelled: list[bool] = []

    async def long() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return "done"

    async def short() -> str:
        return "done"

    async def failing() -> str:
        raise RunError("no sampler is left")

    assert await run.unless_stopped(short()) == "done"
    with pytest.raises(RunError, match="no sampler"):
        await run.unless_stopped(failing())
    asyncio.get_running_loop().call_later(0.05, setattr, run.stop, "requested", True)
    assert await run.unless_stopped(long()) is None
    assert cancelled == [True]


# ---------------------------------------------------------------------- weights that are not finite


@pytest.fixture
def group() -> Iterator[LocalGroup]:
    with local_trainer(WorkerSpec(ModelSource("builtin:tiny"), "cpu", "float32", 9, 1.0, TrainConfig())) as made:
        yield made


async def test_weights_that_are_not_finite_are_not_saved_sent_or_loaded(tmp_path: Path, group: LocalGroup) -> None:
    """Neither into a checkpoint nor to samplers, nor out of a checkpoint into a run; the sound one stays."""
    run, models = bare_run(tmp_path), {"actor": group}
    checkpoints, batch = run.folder.checkpoints, PackedBatch.from_sequences([[1, 2, 3, 4]], [[True] * 4])
    batch.loss_weights = batch.loss_mask.float()
    await group.update(batch, LossSpec())
    await run.save(1, models, {})
    await run.checkpoints.settle()

    async def saving(step: int, message: str) -> None:
        with pytest.raises(RunError, match=message) as error:
            await run.save(step, models, {})
        assert f"step {step} is not saved, the checkpoint before it is" in error.value.message
        assert "global_step_1" in error.value.message
        assert "lower train.optim.lr" in str(error.value.hint)
        assert sorted(path.name for path in checkpoints.iterdir()) == ["global_step_1", "latest"]

    check = [list(range(5, 69))]

    transfers = TransferChooser(run.cfg.cluster, "cpu", "127.0.0.1")

    async def sending(message: str) -> None:
        with pytest.raises(RunError, match=message) as error:
            await publish(group, [], transfers, version=2, check=check, tolerance=1.0)
        assert "weight version 2 is" in error.value.message

    optimizer = group.worker.optimizer
    assert optimizer is not None
    norm = group.worker.parameters["model.norm.weight"]
    query = group.worker.parameters["model.layers.0.self_attn.q_proj.weight"]
    changes = (
        (norm, math.nan, r"weights of the actor are not finite: model\.norm\.weight"),
        (norm, -math.inf, r"weights of the actor are not finite: model\.norm\.weight"),
        (optimizer.state[query]["exp_avg_sq"], math.inf, r"not finite: model\..*q_proj\.weight \(exp_avg_sq\)"),
        (query, 3e38, "the actor gives logprobs of plain text that are not finite"),  # finite, and of no use
    )
    for step, (tensor, value, message) in enumerate(changes, start=2):
        await group.load(str(checkpoints / "global_step_1" / "actor"))
        await group.check_finite("nothing is wrong")
        with torch.no_grad():
            tensor.fill_(value)
        await saving(step, message)
        await sending("not finite")

    with torch.no_grad():  # a checkpoint that another version wrote
        norm.fill_(math.nan)
    await group.save(str(tmp_path / "global_step_5" / "actor"))
    (tmp_path / "global_step_5" / "meta.json").write_text("{}")
    with pytest.raises(RunError, match=r"the run does not go on from .*global_step_5: remove that folder"):
        await run._load(Checkpoint(tmp_path / "global_step_5", 5), models)
    assert checkpoint.find(checkpoints).step == 1


async def test_a_run_does_not_go_on_with_other_weights_under_its_adapter(tmp_path: Path, group: LocalGroup) -> None:
    """Nor with another reference: `run:NAME` stands for the newest checkpoint, and that run may have gone on."""
    places = [checkpoint.commit(checkpoint.begin(tmp_path / "base", n), n, {}, keep=2).path for n in (1, 2)]
    first, second = (ModelSource("builtin:tiny", shards=str(place / "actor" / "model")) for place in places)
    begun, models = replace(bare_run(tmp_path, "train.lora.rank=4"), source=first), {"actor": group}
    await begun.save(3, models, {})
    await begun.checkpoints.settle()
    saved = Checkpoint(begun.folder.checkpoints / "global_step_3", 3)
    await begun._load(saved, models)
    with pytest.raises(ConfigError, match=r"weights that were in .*base/global_step_1, and .* stands for .*step_2"):
        await replace(begun, source=second)._load(saved, models)
    whole = resolve("sft", "tiny-multiturn", []).config
    assert replace(begun, source=second, cfg=whole).base == {}  # all weights are in its own checkpoint


async def test_a_branch_may_begin_to_need_the_first_weights_or_no_longer_need_them(
    tmp_path: Path, group: LocalGroup
) -> None:
    """As with `algo.kl_coef`, which a run that begins with another's checkpoint may change."""
    place = checkpoint.commit(checkpoint.begin(tmp_path / "base", 1), 1, {}, keep=2).path
    source = ModelSource("builtin:tiny", shards=str(place / "actor" / "model"))
    without, with_reference = (bare_run(tmp_path / str(kl), f"algo.kl_coef={kl}", command="rl") for kl in (0.0, 0.1))
    for before, after in ((without, with_reference), (with_reference, without)):
        begun, models = replace(before, source=source), {"actor": group}
        await begun.save(3, models, {})
        await begun.checkpoints.settle()
        await replace(after, source=source)._load(Checkpoint(begun.folder.checkpoints / "global_step_3", 3), models)


async def test_a_run_does_not_go_on_with_another_teacher_of_the_same_name(tmp_path: Path, group: LocalGroup) -> None:
    def taught(step: int) -> None:
        made = checkpoint.begin(tmp_path / "teacher" / "checkpoints", step)
        for folder in ("model", "huggingface"):
            (made / "actor" / folder).mkdir(parents=True)
        (made / "actor" / "huggingface" / "config.json").write_text("{}")
        checkpoint.commit(made, step, {}, keep=2)

    taught(1)
    (tmp_path / "teacher" / "run.json").write_text("{}")
    run = bare_run(tmp_path, "algo.advantage=distill", "algo.teacher='run:teacher'", command="rl")
    models = {"actor": group}
    await run.save(3, models, {})
    await run.checkpoints.settle()
    saved = Checkpoint(run.folder.checkpoints / "global_step_3", 3)
    await run._load(saved, models)
    taught(2)
    with pytest.raises(ConfigError, match=r"weights that were in .*step_1, and algo.teacher = 'run:teacher' now .*_2"):
        await replace(run)._load(saved, models)
    branch = replace(run, folder=replace(run.folder, path=tmp_path / "branch"))  # takes what it is given
    await branch._load(saved, models)


def test_rejects_full_disk_before_the_first_step(tmp_path: Path) -> None:
    run = bare_run(tmp_path)
    group = TrainerGroup("actor", [None], 1.0, 1, metadata={"checkpoint_bytes": 10**6, "parameters": 10**5})
    assert check_disk_space(run.cfg, run.folder.checkpoints, {"actor": group}) is None
    assert list(run.folder.checkpoints.iterdir()) == []
    group.metadata["checkpoint_bytes"] = 10**18
    with pytest.raises(ConfigError, match=r"a checkpoint takes 9\.31e\+08 GiB, and .* free"):
        check_disk_space(run.cfg, run.folder.checkpoints, {"actor": group})
    group.metadata["checkpoint_bytes"] = int(0.6 * shutil.disk_usage(tmp_path).free)
    warning = check_disk_space(run.cfg, run.folder.checkpoints, {"actor": group})
    assert warning is not None
    assert "checkpoint.keep" in warning
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="a part of the path is not a folder"):
        check_disk_space(run.cfg, tmp_path / "file" / "checkpoints", {"actor": group})
