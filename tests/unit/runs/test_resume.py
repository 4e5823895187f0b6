"""Who may use a run's folder at the same time, and what a run may go on from."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from posttrain.config.presets import Resolved, resolve
from posttrain.core.errors import ConfigError, UserError
from posttrain.launch import TrainingJob, dry_run
from posttrain.runs.resume import early_stop_after, play_changes
from posttrain.runs.run import RunDir, RunTarget, Status, StopSignal
from posttrain.train import checkpoint

PRESETS = {"sft": "tiny-multiturn", "rl": "tiny-gsm8k"}


def make(root: Path, *sets: str, name: str = "a", command: str = "sft") -> Resolved:
    return resolve(command, PRESETS[command], [f'run.dir="{root}"', *sets], {"run.name": name})


# ---------------------------------------------------------------------- one process at a time


OPEN = """
import sys, time
from posttrain.core.errors import ConfigError
from posttrain.config.presets import resolve
from posttrain.runs.run import RunTarget
try:
    run = RunTarget.find(resolve("sft", "tiny-multiturn", [f'run.dir="{sys.argv[1]}"'], {"run.name": "a"})).open()
    print("open", run.resumed, flush=True)
    time.sleep(60)
except ConfigError as error:
    print(error.message, flush=True)
"""


def opening(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", OPEN, str(root)], stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_only_one_of_concurrent_starts_gets_the_run(tmp_path: Path) -> None:
    processes = [opening(tmp_path) for _ in range(4)]
    try:
        words = [said(process) for process in processes]
        assert words.count("open False") == 1, words
        assert sum("in use" in word for word in words) == 3, words
        # Two that go on with it when it is gone: again one.
        for process in processes:
            process.kill()
            process.wait()
        processes += (again := [opening(tmp_path) for _ in range(2)])
        words = [said(process) for process in again]
        assert words.count("open True") == 1, words
        assert sum("in use" in word for word in words) == 1, words
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_process_on_another_host_keeps_its_run(tmp_path: Path) -> None:
    """Its process id means nothing here: the lock does."""
    process = opening(tmp_path)
    try:
        assert said(process) == "open False"
        file = tmp_path / "a" / "run.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"host": "elsewhere"}))
        for overwrite in ("false", "true"):
            with pytest.raises(ConfigError, match="is in use"):
                RunTarget.find(make(tmp_path, f"run.overwrite={overwrite}")).open()
    finally:
        process.kill()
        process.wait()
    assert RunTarget.find(make(tmp_path)).open().resumed


# ---------------------------------------------------------------------- what it goes on from


def with_checkpoints(
    root: Path,
    *steps: int,
    sets: Sequence[str] = (),
    command: str = "sft",
    status: Status = "interrupted",
    without_better: int = 0,
) -> RunDir:
    resolved = make(root, *sets, command=command)
    run = RunTarget.find(resolved).open()
    for step in steps:
        folder = checkpoint.begin(run.checkpoints, step)
        (folder / "weights").write_text(f"{step}")
        early_stop = {"best": 1.5, "best_step": 1, "without_better": without_better}
        meta = {"config": resolved.config.model_dump(mode="json"), "early_stop": early_stop}
        checkpoint.commit(folder, step, {"meta.json": meta}, keep=9)
    run.finish(status)
    return run


def test_new_run_starts_from_a_checkpoint_of_another(tmp_path: Path) -> None:
    with_checkpoints(tmp_path, 2, 4, status="finished")
    for path, step in (("a", 4), ("a/checkpoints/global_step_2", 2)):
        run = RunTarget.find(make(tmp_path, f'run.resume="{tmp_path / path}"', name=f"from-{step}")).open()
        assert not run.resumed
        assert run.start is not None
        assert (run.start.step, run.changes) == (step, ())
    changed = make(tmp_path, f'run.resume="{tmp_path}/a"', "train.optim.lr=0.5", "train.steps=7", name="other")
    run = RunTarget.find(changed).open()
    assert sorted(run.changes) == ["train.optim.lr: 0.002 -> 0.5", "train.steps: 100 -> 7"]
    # Killed before its first checkpoint, it begins there again; and says nothing of what has not changed since.
    run.finish("failed")
    again = RunTarget.find(changed).open()
    assert again.resumed
    assert again.start is not None
    assert (again.start.step, again.changes) == (4, ())


def test_a_run_that_stopped_early_is_trained_further_with_more_patience_only(tmp_path: Path) -> None:
    """It would end before its first step: a run of another name would then be finished, and without a checkpoint."""
    patience = ("data.val='x'", "train.val_every=1", "train.early_stop.patience=2")
    run = with_checkpoints(tmp_path, 6, sets=patience, status="finished", without_better=2)
    for name in ("a", "other"):
        with pytest.raises(ConfigError, match=r"nothing is left to train: after step 6 .* 2 validations") as caught:
            RunTarget.find(make(tmp_path, f'run.resume="{tmp_path}/a"', *patience, name=name))
        assert "train.early_stop.patience=none" in str(caught.value.hint)
        for more in ("3", "none"):
            sets = (f'run.resume="{tmp_path}/a"', *patience[:2], f"train.early_stop.patience={more}")
            RunTarget.find(make(tmp_path, *sets, name=name))
        # Losses of two validation sets do not compare.
        other = (f'run.resume="{tmp_path}/a"', "data.val='y'", *patience[1:])
        start = RunTarget.find(make(tmp_path, *other, name=name)).start
        assert start is not None
        assert early_stop_after(start, make(tmp_path, *other).config).state()["best"] is None
    # Killed before it could say that it is finished: that is left to do.
    file = run.path / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"status": "interrupted"}))
    assert RunTarget.find(make(tmp_path, f'run.resume="{tmp_path}/a"', *patience)).open().resumed


@pytest.mark.parametrize(
    "change", ["model.path='other'", "data.batch_size=3", "run.seed=5", "data.train='x.parquet'", "train.lora.rank=4"]
)
def test_rejects_changes_that_invalidate_the_result(tmp_path: Path, change: str) -> None:
    with_checkpoints(tmp_path, 2)
    with pytest.raises(ConfigError, match=change.split("=")[0]) as caught:
        RunTarget.find(make(tmp_path, f'run.resume="{tmp_path}/a"', change, name="other")).open()
    assert "--model" in str(caught.value.hint)
    assert not (tmp_path / "other").exists()


REPLAY = "rollout.replay=['rollouts']"


@pytest.mark.parametrize(("before", "now"), [((), (REPLAY,)), ((REPLAY,), ())])
def test_a_replay_does_not_start_from_a_run_that_sampled_nor_the_reverse(
    tmp_path: Path, before: Sequence[str], now: Sequence[str]
) -> None:
    with_checkpoints(tmp_path, 2, sets=before, command="rl")
    start = f'run.resume="{tmp_path}/a"'
    with pytest.raises(ConfigError, match=r"another config:\n  rollout\.replay: ") as caught:
        RunTarget.find(make(tmp_path, start, *now, name="other", command="rl")).open()
    assert "--model" in str(caught.value.hint)
    assert not (tmp_path / "other").exists()
    RunTarget.find(make(tmp_path, start, *before, "algo.gamma=1.0", name="other", command="rl")).open()


@pytest.mark.parametrize("change", ["algo.updates_per_step=2", "critic.warmup_steps=1"])
def test_the_place_in_the_schedule_of_the_learning_rate_keeps_its_meaning(tmp_path: Path, change: str) -> None:
    with_checkpoints(tmp_path, 2, sets=["algo.advantage=gae"], command="rl")
    sets = [f'run.resume="{tmp_path}/a"', "algo.advantage=gae", change]
    with pytest.raises(ConfigError, match=change.split("=")[0]):
        RunTarget.find(make(tmp_path, *sets, name="other", command="rl")).open()


def test_other_recorded_rollouts_may_follow(tmp_path: Path) -> None:
    with_checkpoints(tmp_path, 2, sets=[REPLAY], command="rl")
    sets = [f'run.resume="{tmp_path}/a"', "rollout.replay=['others']"]
    run = RunTarget.find(make(tmp_path, *sets, name="other", command="rl")).open()
    assert run.changes == ("rollout.replay: ['rollouts'] -> ['others']",)


@pytest.mark.parametrize(
    ("change", "plays_on"),
    [
        *((change, False) for change in ("rollout.n=2", "rollout.max_turns=7", "rollout.staleness=2")),
        *((change, False) for change in ("reward.weights.score=0.5", "rollout.tools=['calculator']")),
        *((change, False) for change in ("tools.c={type='calculator'}", "data.enable_thinking=false")),
        *((change, True) for change in ("rollout.replicas=2", "train.optim.lr=0.5", "reward.examine=3")),
    ],
)
def test_episodes_go_on_where_they_are_played_and_graded_alike(tmp_path: Path, change: str, plays_on: bool) -> None:
    with_checkpoints(tmp_path, 2, command="rl")
    changes = play_changes(checkpoint.find(tmp_path / "a"), make(tmp_path, change, command="rl").config)
    assert (changes == []) == plays_on, changes


def test_rejects_paths_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder") as caught:
        RunTarget.find(make(tmp_path, 'run.resume="auot"')).open()
    assert caught.value.hint == "did you mean 'auto'?"
    with_checkpoints(tmp_path)
    with pytest.raises(UserError, match="no checkpoint in"):
        RunTarget.find(make(tmp_path, f'run.resume="{tmp_path}/a"', name="other")).open()
    with pytest.raises(UserError, match="no best checkpoint in"):
        RunTarget.find(make(tmp_path, f'run.resume="{tmp_path}/a/best"', name="other")).open()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_dry_run_looks_at_the_name_and_the_checkpoint(tmp_path: Path) -> None:
    def prepare(resolved: Resolved) -> TrainingJob:
        pytest.fail("began")

    with_checkpoints(tmp_path, 2)
    for sets, name, message in (
        ((), "", "is not a folder name"),
        (('run.resume=""',), "b", "run.resume is empty"),
        (('run.resume="nowhere"',), "b", "there is no such folder"),
        ((f'run.resume="{tmp_path}/a"', "data.batch_size=7"), "b", "was made with another config"),
    ):
        with pytest.raises(UserError, match=message) as refused:
            dry_run(make(tmp_path, *sets, name=name), prepare)
        assert refused.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_paths_in_the_hint_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    resolved = make(tmp_path / "my runs", name="ü x")
    run = RunTarget.find(resolved).open()
    meta = {"config": resolved.config.model_dump(mode="json")}
    checkpoint.commit(checkpoint.begin(run.checkpoints, 2), 2, {"meta.json": meta}, keep=9)
    run.finish("finished")
    with pytest.raises(ConfigError, match="holds a finished run") as caught:
        RunTarget.find(resolved)
    words = shlex.split(str(caught.value.hint))
    assert words[words.index("--resume") + 1] == str(run.path)
    assert words[words.index("--model") + 1] == "run:ü x"


def test_a_finished_run_may_go_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    with_checkpoints(tmp_path, 2, 4, status="finished")
    with pytest.raises(ConfigError, match="has gone on to step 4 since") as caught:
        RunTarget.find(make(tmp_path, f'run.resume="{tmp_path}/a/checkpoints/global_step_2"', "train.steps=50")).open()
    assert "--name" in str(caught.value.hint)
    run = RunTarget.find(make(tmp_path, f'run.resume="{tmp_path}/a"', "train.steps=50")).open()
    assert run.resumed
    assert run.start is not None
    assert run.start.step == 4
    assert run.changes == ("train.steps: 100 -> 50",)


def test_a_run_does_not_delete_what_it_begins_with(tmp_path: Path) -> None:
    run = with_checkpoints(tmp_path, 2, status="finished")
    with pytest.raises(ConfigError, match="--overwrite would delete"):
        RunTarget.find(make(tmp_path, f'run.resume="{tmp_path}/a"', "run.overwrite=true")).open()
    assert checkpoint.find(run.path).step == 2


@pytest.mark.parametrize("key", ["data.train", "data.val", "model.path"])
@pytest.mark.parametrize("place", ["{}/a/rows/more.parquet", "run:a/best"])
def test_a_run_does_not_delete_what_it_reads(tmp_path: Path, key: str, place: str) -> None:
    run = with_checkpoints(tmp_path, 2, status="finished")
    given = place.format(tmp_path)
    with pytest.raises(ConfigError, match=f"--overwrite would delete {given}, which the run reads"):
        RunTarget.find(make(tmp_path, f'{key}="{given}"', "run.overwrite=true")).open()
    assert checkpoint.find(run.path).step == 2


@pytest.mark.parametrize("repeated", ["a", "{}/a"])
def test_a_run_does_not_delete_the_reward_model_or_the_run_that_it_repeats(tmp_path: Path, repeated: str) -> None:
    run = with_checkpoints(tmp_path, 2, status="finished")
    scored = [f'reward.model.path="{tmp_path}/a/scores"', "reward.weights={score = 1.0, model = 1.0}"]
    again = [f'rollout.replay_schedule="{repeated.format(tmp_path)}"', "rollout.batch_invariant=true"]
    for sets in (scored, [*again, "rollout.record_schedule=true", "rollout.engine=hf"]):
        with pytest.raises(ConfigError, match=r"--overwrite would delete \S+, which the run reads"):
            RunTarget.find(make(tmp_path, *sets, "run.overwrite=true", command="rl")).open()
    assert checkpoint.find(run.path).step == 2


# ---------------------------------------------------------------------- SIGTERM


def test_a_scheduler_is_given_no_limit() -> None:
    """It has one of its own. After Ctrl-C the alarm would have come."""
    with StopSignal(grace_s=0.05) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        assert stop.requested
        assert stop.by is signal.SIGTERM
