"""The run folder: who may open it, what is kept, and how a run is asked to stop."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tomli

from posttrain import load_run, merge_ckpt
from posttrain.config import Config
from posttrain.config.presets import Resolved, resolve
from posttrain.core.errors import ConfigError, RunError
from posttrain.core.signals import termination_raises
from posttrain.runs.run import RunDir, RunTarget, Status, StopSignal, find_run, latest_run, run_folder
from posttrain.tracking.report.folder import RunFolder
from posttrain.train import checkpoint


def make(root: Path, *sets: str, name: str = "a") -> Resolved:
    return resolve("sft", "tiny-multiturn", [f'run.dir="{root}"', *sets], {"run.name": name})


def abandoned(root: Path, *sets: str, name: str = "a") -> RunDir:
    """An unfinished run whose process is gone."""
    run = RunTarget.find(make(root, *sets, name=name)).open()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    state = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps(state | {"pid": gone.pid}))
    return run


def state(run: RunDir) -> dict[str, object]:
    loaded: dict[str, object] = json.loads((run.path / "run.json").read_text())
    return loaded


def test_new_run_holds_its_config_and_origin(tmp_path: Path) -> None:
    resolved = make(tmp_path / "runs")
    run = RunTarget.find(resolved).open()
    assert not run.resumed
    assert Config.model_validate(tomli.loads((run.path / "config.toml").read_text())) == resolved.config
    assert json.loads((run.path / "provenance.json").read_text())["run.name"] == "flag --name"
    written = state(run)
    assert (written["command"], written["status"], written["pid"]) == ("sft", "running", os.getpid())
    assert set(written["versions"]) >= {"posttrain", "python", "torch"}  # type: ignore[call-overload]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]
    run.finish("finished")
    assert state(run)["status"] == "finished"


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert not RunTarget.find(make(tmp_path)).open().resumed


def test_finished_run_is_kept_until_overwrite(tmp_path: Path) -> None:
    first = RunTarget.find(make(tmp_path)).open()
    first.finish("finished")
    (first.path / "result").write_text("precious")
    with pytest.raises(ConfigError, match="output folder exists") as caught:
        RunTarget.find(make(tmp_path)).open()
    assert "--overwrite" in str(caught.value.hint)
    assert "--name" in str(caught.value.hint)
    assert (first.path / "result").exists()
    again = RunTarget.find(make(tmp_path, "run.overwrite=true")).open()
    assert not again.resumed
    assert not (again.path / "result").exists()


def ended(root: Path, status: Status, *sets: str, step: int | None = None) -> RunDir:
    """A run that ended so, with a checkpoint of a step or without one."""
    resolved = make(root, *sets)
    run = RunTarget.find(resolved).open()
    if step is not None:
        meta = {"config": resolved.config.model_dump(mode="json")}
        checkpoint.commit(checkpoint.begin(run.checkpoints, step), step, {"meta.json": meta}, keep=3)
    run.finish(status, RunError("gone", hint="look", who="sampler 0") if status == "failed" else None)
    return run


@pytest.mark.parametrize("status", ["interrupted", "failed"])
def test_overwrite_goes_on_with_what_the_same_command_has_begun(tmp_path: Path, status: Status) -> None:
    run = ended(tmp_path, status, "run.overwrite=true", step=3)
    again = RunTarget.find(make(tmp_path, "run.overwrite=true")).open()
    assert (again.resumed, again.notes) == (
        True, (f"run {run.path} was begun by this --overwrite: it goes on, and with --resume never it begins anew",)
    )  # fmt: skip
    assert checkpoint.find(run.path).step == 3
    again.finish(status)
    anew = RunTarget.find(make(tmp_path, "run.overwrite=true", "run.resume=never")).open()
    assert not anew.resumed
    assert not anew.checkpoints.exists()


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (["run.overwrite=false"], ["run.overwrite=true"]),
        (["run.overwrite=true"], ["run.overwrite=true", "train.optim.lr=0.5"]),
    ],
    ids=["begun without", "another config"],
)
def test_overwrite_replaces_what_another_command_has_begun(tmp_path: Path, before: list[str], now: list[str]) -> None:
    ended(tmp_path, "interrupted", *before, step=3)
    again = RunTarget.find(make(tmp_path, *now)).open()
    assert not again.resumed
    assert not again.checkpoints.exists()


def test_a_run_that_failed_before_its_first_save_gives_its_name_back(tmp_path: Path) -> None:
    ended(tmp_path, "failed")
    again = RunTarget.find(make(tmp_path, "train.optim.lr=0.5")).open()
    assert (again.resumed, again.notes) == (
        False, (f"run {again.path} had failed before its first checkpoint: it is replaced",)
    )  # fmt: skip
    # Trajectories may have cost hours: they stay, and no hint names a checkpoint that is not there.
    (again.path / "rollouts").mkdir()
    (again.path / "rollouts" / "step_000001.parquet").write_text("")
    again.finish("failed")
    with pytest.raises(ConfigError, match="unfinished run of another config") as caught:
        RunTarget.find(make(tmp_path, "train.optim.lr=0.25"))
    assert caught.value.hint is not None
    assert "--overwrite" in caught.value.hint
    assert "--resume" not in caught.value.hint


def test_the_reason_of_a_failure_is_kept_until_the_run_goes_on(tmp_path: Path) -> None:
    run = ended(tmp_path, "failed")
    failure = state(run)["failure"]
    assert isinstance(failure, dict)
    assert failure.pop("time")
    assert failure == {"message": "gone", "hint": "look", "exit_code": 1, "who": "sampler 0"}
    assert RunFolder.read(run.path).summary()["failure"]["message"] == "gone"
    again = RunTarget.find(make(tmp_path)).open()
    assert "failure" not in state(again)


def test_a_run_with_nothing_left_to_train_is_refused(tmp_path: Path) -> None:
    run = ended(tmp_path, "finished", step=3)
    refused = "nothing is left to train: the run goes on after step 3, and ends after step {}"
    place = RunTarget.find(make(tmp_path, f'run.resume="{run.path}"'))
    for steps in (2, 3):
        with pytest.raises(ConfigError, match=refused.format(steps)) as caught:
            place.check_steps(steps)
        assert "give more than 3" in str(caught.value.hint)
    place.check_steps(4)
    # Its last step is saved, but it was killed before it could say that it is finished: that is left to do.
    interrupted = ended(tmp_path, "interrupted", "run.overwrite=true", step=3)
    place = RunTarget.find(make(tmp_path, "run.overwrite=true"))
    place.check_steps(3)
    place.check_steps(4)
    with pytest.raises(ConfigError, match=refused.format(2)):
        place.check_steps(2)
    assert checkpoint.find(interrupted.path).step == 3


def test_unfinished_run_is_resumed_with_what_may_change(tmp_path: Path) -> None:
    first = abandoned(tmp_path, "train.steps=10")
    (first.path / "metrics.jsonl").write_text("kept")
    again = RunTarget.find(make(tmp_path, "train.steps=20", "train.save_every=5", 'run.logger=["jsonl"]')).open()
    assert again.resumed
    assert (again.path / "metrics.jsonl").read_text() == "kept"
    assert tomli.loads((again.path / "config.toml").read_text())["train"]["steps"] == 20
    assert (state(again)["status"], state(again)["pid"]) == ("running", os.getpid())


def test_a_run_goes_on_with_the_workers_and_engines_that_are_left(tmp_path: Path) -> None:
    flags = {"run.dir": str(tmp_path), "run.name": "left"}
    both, one = ([f"rollout.replicas={count}", f"cluster.workers={count}"] for count in (2, 1))
    RunTarget.find(resolve("rl", "tiny-arith", both, flags)).open().finish("failed")
    fewer = RunTarget.find(resolve("rl", "tiny-arith", one, flags)).open()
    assert fewer.resumed
    assert sorted(fewer.changes) == ["cluster.workers: 2 -> 1", "rollout.replicas: 2 -> 1"]


@pytest.mark.parametrize("status", ["interrupted", "failed"])
def test_a_run_that_ended_early_is_resumed(tmp_path: Path, status: Status) -> None:
    RunTarget.find(make(tmp_path)).open().finish(status)
    assert RunTarget.find(make(tmp_path)).open().resumed


def test_other_config_is_refused_key_by_key(tmp_path: Path) -> None:
    first = abandoned(tmp_path)
    before = (first.path / "config.toml").read_text()
    with pytest.raises(ConfigError) as caught:
        RunTarget.find(make(tmp_path, "train.optim.lr=0.5", "model.path=other")).open()
    assert caught.value.message.splitlines()[1:] == [
        "  model.path: 'builtin:tiny' -> 'other'",
        "  train.optim.lr: 0.002 -> 0.5",
    ]
    assert (first.path / "config.toml").read_text() == before
    many = [f"train.optim.{key}=0.5" for key in ("lr", "eps", "weight_decay", "warmup_ratio", "min_lr_ratio")]
    with pytest.raises(ConfigError, match="and 2 more"):
        RunTarget.find(make(tmp_path, *many, "run.seed=7", "data.shuffle=false")).open()


def test_resume_never(tmp_path: Path) -> None:
    abandoned(tmp_path)
    with pytest.raises(ConfigError, match="unfinished run"):
        RunTarget.find(make(tmp_path, "run.resume=never")).open()


@pytest.mark.parametrize("overwrite", ["false", "true"])
def test_a_live_process_keeps_its_run(tmp_path: Path, overwrite: str) -> None:
    RunTarget.find(make(tmp_path)).open()  # this very process
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        RunTarget.find(make(tmp_path, f"run.overwrite={overwrite}")).open()


def test_a_reused_pid_is_not_the_owner(tmp_path: Path) -> None:
    run = RunTarget.find(make(tmp_path)).open()
    (run.path / "run.json").write_text(json.dumps(state(run) | {"pid_started": "1"}))
    assert RunTarget.find(make(tmp_path)).open().resumed


@pytest.mark.parametrize("overwrite", ["false", "true"])
def test_a_folder_that_is_no_run_is_never_touched(tmp_path: Path, overwrite: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="not a run folder"):
        RunTarget.find(make(tmp_path, f"run.overwrite={overwrite}")).open()
    assert (tmp_path / "a" / "thesis.tex").read_text() == "years of work"


def test_creation_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*: a file is in the way"):
        RunTarget.find(make(tmp_path / "file")).open()

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("posttrain.runs.run.os.replace", full_disk)
    with pytest.raises(RunError, match="no room is left on its disk"):
        RunTarget.find(make(tmp_path / "runs")).open()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


@pytest.mark.parametrize("name", ["", "..", "a/b"])
def test_names_that_are_no_folder_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="not a folder name"):
        RunTarget.find(make(tmp_path, name=name)).open()


def test_find_run_and_latest(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "old")):
        marker = RunTarget.find(make(tmp_path, name=name)).open().checkpoints / "global_step_3" / "COMPLETE"
        marker.parent.mkdir(parents=True)
        marker.write_text("{}")
        os.utime(marker, (1e9 - age, 1e9 - age))
    newest_without = RunTarget.find(make(tmp_path, name="untrained")).open()
    assert find_run(tmp_path, "old") == tmp_path / "old"
    assert latest_run(tmp_path) == find_run(tmp_path, "latest") == tmp_path / "new"
    with pytest.raises(ConfigError) as caught:
        find_run(tmp_path, "untraind")
    assert caught.value.hint == "did you mean 'untrained'?"
    assert not newest_without.checkpoints.exists()
    with pytest.raises(ConfigError, match="no run with a checkpoint"):
        latest_run(tmp_path / "old")


def test_a_folder_that_is_no_run_does_not_hide_the_run_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = RunTarget.find(make(tmp_path / "runs", name="done")).open().path
    for folder in ("done", "shards"):
        Path(folder).mkdir()
    assert run_folder("runs", "done").samefile(path)
    assert run_folder("nowhere", path) == path
    assert load_run("done").path.samefile(path)
    assert merge_ckpt.find_folder("done", "runs").samefile(path)
    step = checkpoint.commit(checkpoint.begin(path / "checkpoints", 1), 1, {}, keep=1).path
    assert [merge_ckpt.find_checkpoint(name, "runs").samefile(step) for name in ("done", "run:done")] == [True, True]
    assert merge_ckpt.find_folder("shards", "runs") == Path("shards")
    for find in (run_folder, lambda root, name: merge_ckpt.find_folder(name, root)):
        with pytest.raises(ConfigError, match="no run 'dune'") as caught:
            find("runs", "dune")
        assert caught.value.hint == "did you mean 'done'?"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_first_signal_is_a_wish_and_the_second_an_exception(number: signal.Signals) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    with pytest.raises(KeyboardInterrupt), StopSignal(grace_s=60) as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        os.kill(os.getpid(), number)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)] == before
    assert signal.getitimer(signal.ITIMER_REAL)[0] < 59


@pytest.mark.parametrize(
    ("number", "message", "code"),
    [
        (signal.SIGINT, "stopped after step 2", 130),
        (signal.SIGTERM, "stopped by SIGTERM after step 2", 0),
        (signal.SIGHUP, "stopped by SIGHUP after step 2", 0),
    ],
)
def test_who_asked_to_stop_is_named(number: signal.Signals, message: str, code: int) -> None:
    with StopSignal(grace_s=60) as stop:
        os.kill(os.getpid(), number)
    stopped = stop.interrupted("step 2")
    assert (str(stopped), stopped.exit_code) == (message, code)


def test_a_run_under_nohup_does_not_hear_that_its_terminal_goes_away() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal(grace_s=60) as stop, termination_raises():
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_patience_ends() -> None:
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), StopSignal(grace_s=0.2):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)
    assert 0.15 < time.monotonic() - start < 25


def test_a_loop_that_stops_in_time_is_left_alone() -> None:
    with StopSignal(grace_s=0.2) as stop:
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.requested
    time.sleep(0.4)  # the alarm was taken back


def test_other_threads_may_use_it() -> None:
    seen: list[bool] = []

    def work() -> None:
        with StopSignal() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
